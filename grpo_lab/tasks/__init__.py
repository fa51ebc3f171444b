"""Verifiable tasks, data sets and tiny models: everything a run learns from.

The names here import neither torch nor transformers, so a process that only scores completions stays
small. Data sets are loaded by :mod:`grpo_lab.tasks.sources`, models made by
:mod:`grpo_lab.tasks.tiny_model` and scored by :mod:`grpo_lab.tasks.evaluation`.
"""

from grpo_lab.tasks.base import RewardFunction, Row, Split, Task, completion_text, exact_match
from grpo_lab.tasks.registry import get_task, task_names

__all__ = [
    "RewardFunction",
    "Row",
    "Split",
    "Task",
    "completion_text",
    "exact_match",
    "get_task",
    "task_names",
]
