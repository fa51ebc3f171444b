"""Traces of whole rollouts and optimizer steps, correct unless told otherwise."""

from __future__ import annotations

from typing import Any

from trace_builder import Trace, declared

from grpo_lab.events import (
    GroupAdmitted,
    GroupConsumed,
    GroupDropped,
    GroupQueued,
    GroupTaken,
    MicroBatchBegan,
    OptimizerStepApplied,
    RunEnded,
    SampleCompleted,
    SampleDispatched,
    StepPlanned,
    SyncBegan,
    SyncEnded,
    TermBegan,
    VersionCommitted,
)


class RolloutTrace(Trace):
    """Groups of two samples, ``t<term>.g<number>``; one group a step unless a step names more.

    >>> trace = RolloutTrace()
    >>> trace.begin().commit(1, step=0).generate(0, version=1).train(0, step=0, version=1, first=1).end()
    >>> trace.violated()
    set()
    """

    def __init__(self, **parameters: Any) -> None:
        super().__init__(declared(**parameters))
        self.term = 1
        self.queue: list[str] = []

    def begin(self, term: int = 1, base_version: int = 0, step: int = 0, **fields: Any) -> RolloutTrace:
        self.term = term
        began = TermBegan(term=term, base_version=base_version, optimizer_step=step, **fields)
        self.emit("trainer", began)
        return self

    def commit(self, version: int, step: int, **fields: Any) -> RolloutTrace:
        sync: dict[str, Any] = {"term": self.term, "version": version, "attempt": 1, "view": 1, "members": ()}
        self.emit("trainer", SyncBegan(**sync, optimizer_step=fields.pop("began_step", step)))
        self.emit("trainer", VersionCommitted(**sync, optimizer_step=step))
        phases_s = {"wire": 1.0, "total": 1.0}
        self.emit(
            "trainer", SyncEnded(term=self.term, version=version, outcome="committed", phases_s=phases_s)
        )
        return self

    def admit(self, number: int, version: int, **fields: Any) -> RolloutTrace:
        values: dict[str, Any] = {
            "term": self.term,
            "group": self.name(number),
            "number": number,
            "prompt_index": number,
            "samples": self.samples(number),
            "version": version,
            "admitted": number + 1,
            "running": 1,
        }
        self.emit("worker", GroupAdmitted(**(values | fields)))
        return self

    def dispatch(self, number: int, version: int) -> RolloutTrace:
        for sample in self.samples(number):
            self.emit(
                "worker",
                SampleDispatched(
                    term=self.term, sample=sample, group=self.name(number), engine="engine-0", version=version
                ),
            )
        return self

    def complete(
        self, number: int, version: int, last: int | None = None, tokens: int = 4, **fields: Any
    ) -> RolloutTrace:
        """Samples of ``tokens`` tokens of ``version``; with ``last``, the second half is of that one."""
        if last is None:
            spans: tuple[tuple[int, ...], ...] = ((self.term, version, 0, tokens),)
        else:
            spans = ((self.term, version, 0, tokens // 2), (self.term, last, tokens // 2, tokens))
        for sample in self.samples(number):
            values: dict[str, Any] = {
                "term": self.term,
                "sample": sample,
                "group": self.name(number),
                "engine": "engine-0",
                "finish_reason": "stop",
                "tokens": tokens,
                "logprobs": tokens,
                "logprobs_finite": True,
                "spans": spans,
            }
            self.emit("worker", SampleCompleted(**(values | fields)))
        return self

    def enqueue(self, number: int, **fields: Any) -> RolloutTrace:
        self.queue.append(self.name(number))
        values: dict[str, Any] = {
            "term": self.term,
            "group": self.name(number),
            "number": number,
            "depth": len(self.queue),
        }
        self.emit("worker", GroupQueued(**(values | fields)))
        return self

    def take(self, number: int) -> RolloutTrace:
        self.queue.remove(self.name(number))
        self.emit("trainer", GroupTaken(term=self.term, group=self.name(number)))
        return self

    def generate(self, number: int, version: int, last: int | None = None, **fields: Any) -> RolloutTrace:
        """A prompt from admission to the trainer's hands."""
        self.admit(number, version, **fields).dispatch(number, version).complete(number, version, last)
        return self.enqueue(number).take(number)

    def consume(
        self, number: int, step: int, version: int, first: int, last: int | None = None, **fields: Any
    ) -> RolloutTrace:
        samples = self.samples(number)
        values: dict[str, Any] = {
            "term": self.term,
            "group": self.name(number),
            "number": number,
            "prompt_index": number,
            "samples": samples,
            "versions_first": (first,) * len(samples),
            "versions_last": (first if last is None else last,) * len(samples),
            "version": version,
            "optimizer_step": step,
        }
        self.emit("trainer", GroupConsumed(**(values | fields)))
        return self

    def plan(self, *numbers: int, step: int, version: int) -> RolloutTrace:
        groups = tuple(self.name(number) for number in numbers)
        self.emit("trainer", StepPlanned(term=self.term, optimizer_step=step, version=version, groups=groups))
        return self

    def micro_batch(self, *numbers: int, step: int, version: int) -> RolloutTrace:
        groups = tuple(self.name(number) for number in numbers)
        event = MicroBatchBegan(
            term=self.term, optimizer_step=step, version=version, rank=0, micro_batch=0, groups=groups
        )
        self.emit("trainer", event)
        return self

    def apply(self, step: int, version: int, **fields: Any) -> RolloutTrace:
        applied = OptimizerStepApplied(
            term=self.term, optimizer_step=step, version=version, loss=0.0, **fields
        )
        self.emit("trainer", applied)
        return self

    def train(self, *numbers: int, step: int, version: int, first: int, **fields: Any) -> RolloutTrace:
        """One optimizer step over these groups."""
        self.plan(*numbers, step=step, version=version)
        for number in numbers:
            self.consume(number, step, version, first, **fields)
        return self.micro_batch(*numbers, step=step, version=version).apply(step, version)

    def drop(self, number: int, reason: str, actor: str = "worker", **fields: Any) -> RolloutTrace:
        values: dict[str, Any] = {
            "term": self.term,
            "group": self.name(number),
            "prompt_index": number,
            "samples": self.samples(number),
            "reason": reason,
        }
        self.emit(actor, GroupDropped(**(values | fields)))
        return self

    def end(self, outcome: str = "clean", **fields: Any) -> None:
        self.emit("run", RunEnded(outcome=outcome, **fields))

    def name(self, number: int) -> str:
        return f"t{self.term}.g{number}"

    def samples(self, number: int) -> tuple[str, ...]:
        return tuple(f"{self.name(number)}.s{index}" for index in range(2))
