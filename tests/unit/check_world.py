"""Whole valid runs, written event by event, to be checked as they are or after an edit.

Written from what the rules say, not from how the checker or the protocol does it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from check_syncs import TOKENS, Engine, Syncs

from grpo_lab import events as ev
from grpo_lab.check import CheckResult, check_records
from grpo_lab.events import Event, Record


class World(Syncs):
    """Syncs, and the rollouts and optimizer steps between them."""

    # -- rollouts ----------------------------------------------------------------------------------------

    def group(self, engine: Engine | None = None, queued: bool = True) -> dict[str, Any]:
        """One group from admission to the queue."""
        engine = engine or self.live[self.number % len(self.live)]
        group = self.admit()
        for sample in group["samples"]:
            self.dispatch(group, sample, engine)
        for sample in group["samples"]:
            self.generate(group, sample, engine)
        rewards = (0.0, 1.0)
        self.emit("worker", ev.GroupScored(term=self.term, group=group["group"], rewards=rewards))
        if queued:
            self.ready.append(group)
            self.emit(
                "worker",
                ev.GroupQueued(
                    term=self.term, group=group["group"], number=group["number"], depth=len(self.ready)
                ),
            )
        return group

    def admit(self) -> dict[str, Any]:
        while self.prompt in self.prompts_done:
            self.prompt += 1
        name = f"t{self.term}.g{self.number}"
        samples = tuple(f"{name}.s{index}" for index in range(2))
        group = {"group": name, "number": self.number, "prompt_index": self.prompt, "samples": samples}
        self.number += 1
        self.prompt += 1
        self.admitted_in_term += 1
        self.emit(
            "worker",
            ev.GroupAdmitted(
                term=self.term, **group, version=self.version, admitted=self.admitted_in_term, running=1
            ),
            after="trainer",
        )
        return group

    def dispatch(self, group: dict[str, Any], sample: str, engine: Engine) -> None:
        self.emit(
            "worker",
            ev.SampleDispatched(
                term=self.term,
                sample=sample,
                group=group["group"],
                engine=engine.name,
                version=self.version,
                request=sample,
            ),
        )
        if engine.events:
            self.request_admitted(sample, engine)

    def request_admitted(self, request: str, engine: Engine, kind: str = "rollout") -> None:
        self.emit(
            engine.name,
            ev.RequestAdmitted(
                engine=engine.name,
                request=request,
                request_kind=kind,
                prompt_tokens=5,
                weight_version=engine.version[1],
                term=engine.version[0],
                request_term=self.term,
            ),
            after="worker",
        )

    def generate(self, group: dict[str, Any], sample: str, engine: Engine) -> None:
        """All tokens under the active version."""
        group.setdefault("first", {})[sample] = engine.version[1]
        group.setdefault("last", {})[sample] = engine.version[1]
        if engine.events:
            span = self.decode(engine, 0, TOKENS)
            self.request_finished(sample, engine, "stop", TOKENS, (span,))
        self.completed(group, sample, engine, ((*engine.version, 0, TOKENS),))

    def decode(self, engine: Engine, start: int, end: int) -> tuple[int, ...]:
        first, engine.step = engine.step, engine.step + end - start
        recorder = self.by[engine.name]
        began_seq = recorder.next_seq
        self.emit(
            engine.name,
            ev.ModelStep(
                engine=engine.name,
                first_step=first,
                last_step=engine.step - 1,
                version=engine.version[1],
                term=engine.version[0],
                sequences=1,
                prefill_tokens=0,
                decode_tokens=end - start,
                began_seq=began_seq,
            ),
        )
        return (*engine.version, start, end, first, engine.step - 1)

    def request_finished(
        self, request: str, engine: Engine, reason: str, tokens: int, spans: tuple[tuple[int, ...], ...]
    ) -> None:
        kv_version = min((span[1] for span in spans), default=None)
        self.emit(
            engine.name,
            ev.RequestFinished(
                engine=engine.name,
                request=request,
                finish_reason=reason,
                tokens=tokens,
                spans=spans,
                kv_version=kv_version,
            ),
        )

    def completed(
        self, group: dict[str, Any], sample: str, engine: Engine, spans: tuple[tuple[int, ...], ...]
    ) -> None:
        tokens = spans[-1][3]
        self.emit(
            "worker",
            ev.SampleCompleted(
                term=self.term,
                sample=sample,
                group=group["group"],
                engine=engine.name,
                finish_reason="stop",
                tokens=tokens,
                logprobs=tokens,
                logprobs_finite=True,
                spans=spans,
            ),
            after=engine.name,
        )

    def drop(self, group: dict[str, Any], reason: str, actor: str = "worker") -> None:
        if reason not in ("shutdown", "term_ended"):
            self.prompts_done.add(group["prompt_index"])
        names = {key: group[key] for key in ("group", "prompt_index", "samples")}
        self.emit(actor, ev.GroupDropped(term=self.term, **names, reason=reason))

    # -- training ------------------------------------------------------------------------------------------

    def step(self) -> None:
        """An optimizer step over the first two groups of the queue."""
        groups, self.ready = self.ready[:2], self.ready[2:]
        for group in groups:
            self.emit("trainer", ev.GroupTaken(term=self.term, group=group["group"]), after="worker")
        names = tuple(group["group"] for group in groups)
        place = {"term": self.term, "optimizer_step": self.steps, "version": self.version}
        self.emit("trainer", ev.StepPlanned(**place, groups=names))
        for group in groups:
            self.consume(group)
        self.emit("trainer", ev.MicroBatchBegan(**place, rank=0, micro_batch=0, groups=names, samples=4))
        self.emit(
            "trainer", ev.LogprobGapMeasured(version=self.version, gap_max=1e-6, gap_mean=1e-7, tokens=32)
        )
        self.emit("trainer", ev.OptimizerStepApplied(**place, loss=0.1, tokens=32, reward_mean=0.5))
        self.prompts_done |= {group["prompt_index"] for group in groups}
        self.steps += 1

    def consume(self, group: dict[str, Any]) -> None:
        firsts = tuple(group["first"][sample] for sample in group["samples"])
        lasts = tuple(group["last"][sample] for sample in group["samples"])
        self.emit(
            "trainer",
            ev.GroupConsumed(
                term=self.term,
                **{key: group[key] for key in ("group", "number", "prompt_index", "samples")},
                versions_first=firsts,
                versions_last=lasts,
                version=self.version,
                optimizer_step=self.steps,
                correction="tis",
                correction_versions=tuple(sorted({*firsts, *lasts})),
            ),
        )

    def cursor(self) -> tuple[int, tuple[int, ...]]:
        low = 0
        while low in self.prompts_done:
            low += 1
        return low, tuple(sorted(item for item in self.prompts_done if item > low))

    def checkpoint(self) -> dict[str, Any]:
        low, done = self.cursor()
        saved = {
            "checkpoint": f"checkpoint-{self.steps}",
            "version": self.version,
            "optimizer_step": self.steps,
            "prompt_low_water": low,
            "prompts_done": done,
            "weights_hash": f"hash-{self.steps}",
        }
        self.emit("trainer", ev.CheckpointSaved(term=self.term, **saved))
        return saved

    def start_worker(self) -> None:
        self.emit("trainer", ev.MemberStarted(member="worker", role="worker"))
        self.emit("worker", ev.Heartbeat(member="worker", progress=0), after="trainer")

    def stop_worker(self) -> None:
        for group in self.ready:
            self.drop(group, "shutdown", "trainer")
        self.ready = []
        self.emit("trainer", ev.MemberStopped(member="worker"), after="worker")
        self.emit("trainer", ev.ResourceClosed(resource=f"ring-{self.term}"))
        self.state("running", "disconnected")

    def end(self) -> None:
        self.emit("worker", ev.Heartbeat(member="worker", progress=self.number))
        self.stop_worker()
        for member in (*(engine.name for engine in self.engines), *self.others):
            self.emit("run", ev.MemberStopped(member=member), after="trainer")
        self.emit("run", ev.RunEnded(outcome="clean"))

    def rounds(self, count: int, **first_sync: Any) -> None:
        """Groups, a step and a sync, ``count`` times; the first sync takes the options."""
        for number in range(count):
            self.emit("worker", ev.Heartbeat(member="worker", progress=self.number))
            self.group()
            self.group()
            self.step()
            self.sync(**(first_sync if number == 0 else {}))


# -- edits -------------------------------------------------------------------------------------------------


def edited(world: World, kind: type[Event], nth: int = 0, **changes: Any) -> list[Record]:
    """The trace with fields of the nth event of a kind changed (negative: from the end)."""
    places = [index for index, record in enumerate(world.records) if isinstance(record.event, kind)]
    records = list(world.records)
    record = records[places[nth]]
    records[places[nth]] = dataclasses.replace(record, event=dataclasses.replace(record.event, **changes))
    return records


def without(world: World, kind: type[Event], nth: int | None = None) -> list[Record]:
    """The trace without the nth event of a kind, or without all of them."""
    places = [index for index, record in enumerate(world.records) if isinstance(record.event, kind)]
    gone = set(places if nth is None else [places[nth]])
    return [record for index, record in enumerate(world.records) if index not in gone]


def repeated(world: World, kind: type[Event], nth: int = 0) -> list[Record]:
    """The trace with the nth event of a kind twice."""
    places = [index for index, record in enumerate(world.records) if isinstance(record.event, kind)]
    records = list(world.records)
    records.insert(places[nth], records[places[nth]])
    return records


def violated(records: Iterable[Record]) -> set[str]:
    return set(result(records).violated_ids)


class Checked:
    """A result with the ids of violated rules at hand."""

    def __init__(self, checked: CheckResult) -> None:
        self.checked = checked
        self.violated_ids = [rule.id for rule in checked.rules if rule.violation_count]

    def words(self) -> str:
        return "\n".join(
            f"{rule.id} x{rule.violation_count}: {rule.violations[0].message} {rule.violations[0].event_ids}"
            for rule in self.checked.rules
            if rule.violations
        )


def result(records: Iterable[Record]) -> Checked:
    return Checked(check_records(records))
