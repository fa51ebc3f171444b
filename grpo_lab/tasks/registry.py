"""Tasks by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from grpo_lab.errors import ConfigError
from grpo_lab.tasks.base import Task
from grpo_lab.tasks.distinct_digits import DISTINCT_DIGITS
from grpo_lab.tasks.reverse_digits import REVERSE_DIGITS
from grpo_lab.tasks.running_sum import RUNNING_SUM
from grpo_lab.tasks.sort_digits import SORT_DIGITS

_ALL = (SORT_DIGITS, RUNNING_SUM, REVERSE_DIGITS, DISTINCT_DIGITS)
TASKS: Mapping[str, Task] = MappingProxyType({task.name: task for task in _ALL})


def task_names() -> tuple[str, ...]:
    return tuple(TASKS)


def get_task(name: str) -> Task:
    """Raises ``ConfigError``, with the known names, for an unknown one."""
    try:
        return TASKS[name]
    except KeyError:
        raise ConfigError("task", name, f"one of {', '.join(TASKS)}") from None
