"""What rank 0 decides, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from accelerate.utils import broadcast_object_list

from grpo_lab.errors import GrpoLabError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Failed:
    words: str


def decided_by_rank_zero(decide: Callable[[], T], is_rank_zero: bool) -> T:
    """Calls ``decide`` on rank 0 and gives its result to every rank. All ranks must call this.

    Raises:
        GrpoLabError: on the other ranks, when ``decide`` raised; on rank 0 its exception leaves as it is.
    """
    answer: list[Any] = [None]
    failure: BaseException | None = None
    if is_rank_zero:
        try:
            answer = [decide()]
        except BaseException as error:  # also an interrupt: the other ranks wait for an answer
            failure, answer = error, [_Failed(repr(error))]
    broadcast_object_list(answer, from_process=0)
    if failure is not None:
        raise failure
    if isinstance(answer[0], _Failed):
        raise GrpoLabError(f"rank 0 failed: {answer[0].words}")
    result: T = answer[0]
    return result
