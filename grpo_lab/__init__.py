"""grpo_lab: a testbed and simulation harness for asynchronous GRPO weight sync."""

__version__ = "0.1.0"
