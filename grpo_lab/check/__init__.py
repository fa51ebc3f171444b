"""Checks a trace against the rules of the protocol. Reads events, and nothing else.

>>> from grpo_lab.events import Record, RunDeclared
>>> result = check_records([Record(0.0, "run", 0, (), RunDeclared())])
>>> result.violations
0
"""

from grpo_lab.check.checker import Checker, check_records, check_trace
from grpo_lab.check.history import merge_to, read_parts
from grpo_lab.check.result import CheckResult, RuleResult, Violation

__all__ = [
    "CheckResult",
    "Checker",
    "RuleResult",
    "Violation",
    "check_records",
    "check_trace",
    "merge_to",
    "read_parts",
]
