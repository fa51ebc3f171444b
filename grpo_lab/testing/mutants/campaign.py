"""Hunts many mutants side by side, and the correct protocol through the same searches."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_lab.check.rules import ALL_RULES
from grpo_lab.testing.mutants.catalogue import all_mutants, find
from grpo_lab.testing.mutants.hunt import hunt
from grpo_lab.testing.mutants.mutant import DEADLOCK, Fixture, Mutant
from grpo_lab.testing.mutants.window import around
from grpo_lab.trainer.interrupts import children_born_deaf, children_ended_early

PROGRESS = "progress.jsonl"
MIN_CLEAN_EXAMPLES = 25
NO_RULE = "none"
KNOWN = frozenset(rule.id for rule in ALL_RULES) | {"C1", DEADLOCK}


@dataclass(frozen=True, slots=True)
class Kill:
    """What became of one mutant. ``rule`` is "" when it survived; ``fired`` are all rules that fire when its
    case runs to its end; ``others`` are findings that nobody asked for, among them how runs ended that broke
    no expected rule.
    """

    id: str
    case: str
    killed: bool
    expected: tuple[str, ...]
    rule: str
    seconds: float
    examples: int
    events: int
    title: str = ""
    fixture: str = ""
    message: str = ""
    saved: str = ""
    fired: tuple[str, ...] = ()
    others: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Clean:
    """The correct protocol in one fixture."""

    fixture: str
    seconds: float
    examples: int
    alarms: int
    message: str = ""
    saved: str = ""


@dataclass(slots=True)
class Result:
    mutants: list[Kill] = field(default_factory=list)
    clean: list[Clean] = field(default_factory=list)

    @property
    def survivors(self) -> list[Kill]:
        return [kill for kill in self.mutants if not kill.killed]

    @property
    def alarms(self) -> int:
        return sum(item.alarms for item in self.clean)

    def to_json(self) -> dict[str, Any]:
        return {
            "mutants": [dataclasses.asdict(kill) for kill in self.mutants],
            "clean": {
                "seconds": round(sum(item.seconds for item in self.clean), 3),
                "examples": sum(item.examples for item in self.clean),
                "alarms": self.alarms,
                "fixtures": [dataclasses.asdict(item) for item in self.clean],
            },
        }


def hunt_mutant(mutant: Mutant, seconds: float, *, shrink_s: float = 5.0, out: Path | None = None) -> Kill:
    """One mutant, until an expected rule fires or the time is over."""
    shrink_s = shrink_s if mutant.fixture.repeats else 0.0
    hunted = hunt(mutant.fixture, mutant.planted, frozenset(mutant.rules), seconds=seconds, shrink_s=shrink_s)
    rule = message = saved = ""
    events = 0
    fired: tuple[str, ...] = ()
    if hunted.found is not None:
        case, finding = hunted.found
        fired = _all_that_fire(mutant, case, finding.rule, hunted.others)
        rule, message, events = finding.rule, finding.message[:500], len(around(finding))
        failure = mutant.fixture.saved(case, finding, f"mutant:{mutant.id}")
        if failure is not None and out is not None:
            path = out / f"{mutant.id}.json"
            failure.save(path)
            saved = str(path)
    return Kill(
        id=mutant.id,
        case=mutant.case,
        killed=hunted.found is not None,
        expected=mutant.rules,
        rule=rule,
        seconds=round(hunted.seconds, 3),
        examples=hunted.examples,
        events=events,
        title=mutant.title,
        fixture=mutant.fixture.name,
        message=message,
        saved=saved,
        fired=fired,
        others=dict(hunted.others),
    )


def _all_that_fire(mutant: Mutant, case: Any, rule: str, others: Iterable[str]) -> tuple[str, ...]:
    """The killing case again, to its end, with no rule that stops it."""
    seen = {rule}
    if mutant.fixture.repeats:
        mutant.fixture.run(case, mutant.planted, frozenset({NO_RULE}), seen.add)
    else:
        seen.update(others)
    return tuple(sorted(seen & KNOWN, key=rule_order))


def hunt_clean(fixture: Fixture[Any], seconds: float, examples: int, out: Path | None = None) -> Clean:
    """The correct protocol through the cases that the fixture's mutants went through, all rules watching."""
    shrink_s = 5.0 if fixture.repeats else 0.0
    hunted = hunt(fixture, None, None, seconds=seconds, shrink_s=shrink_s, max_examples=examples)
    message = saved = ""
    if hunted.found is not None:
        case, finding = hunted.found
        message = f"{finding.rule}: {finding.message}"[:500]
        failure = fixture.saved(case, finding, "")
        if failure is not None and out is not None:
            path = out / f"clean-{fixture.name.replace(' ', '-')}.json"
            failure.save(path)
            saved = str(path)
    alarms = int(hunted.found is not None)
    return Clean(fixture.name, round(hunted.seconds, 3), hunted.examples, alarms, message, saved)


def run_campaign(
    mutants: Sequence[Mutant],
    *,
    seconds: float,
    workers: int,
    out: Path,
    resume: bool = False,
    on_result: Callable[[Kill | Clean], None] = lambda _: None,
) -> Result:
    """All of ``mutants``, then their fixtures with the correct protocol. Each result is on disk when it is
    told; ``resume`` takes those that are there.
    """
    progress = out / PROGRESS
    out.mkdir(parents=True, exist_ok=True)
    known = _read(progress) if resume else {}
    if not resume:
        progress.unlink(missing_ok=True)
    result = Result()

    def keep(item: Kill | Clean, *, new: bool) -> None:
        (result.mutants if isinstance(item, Kill) else result.clean).append(item)  # type: ignore[arg-type]
        if new:
            with progress.open("a", encoding="utf-8") as file:
                kind = "mutant" if isinstance(item, Kill) else "clean"
                file.write(json.dumps({"kind": kind, **dataclasses.asdict(item)}) + "\n")
        on_result(item)

    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _quiet) as pool:
        todo = [mutant for mutant in mutants if ("mutant", mutant.id) not in known]
        for mutant in mutants:
            if ("mutant", mutant.id) in known:
                keep(known["mutant", mutant.id], new=False)
        with children_born_deaf():
            hunts = [pool.submit(_hunt_named, mutant.id, seconds, str(out)) for mutant in todo]
        _gather(keep, hunts)
        needed = _examples_of(result.mutants)
        for name in needed:
            if ("clean", name) in known:
                keep(known["clean", name], new=False)
        with children_born_deaf():
            jobs = [
                pool.submit(_clean_named, name, seconds, examples, str(out))
                for name, examples in needed.items()
                if ("clean", name) not in known
            ]
        _gather(keep, jobs)
    order = {mutant.id: place for place, mutant in enumerate(mutants)}
    result.mutants.sort(key=lambda kill: order[kill.id])
    return result


def _examples_of(kills: Iterable[Kill]) -> dict[str, int]:
    """How many cases of each fixture its mutants needed."""
    needed: dict[str, int] = {}
    for kill in kills:
        needed[kill.fixture] = max(needed.get(kill.fixture, MIN_CLEAN_EXAMPLES), kill.examples)
    return needed


def _gather(keep: Callable[..., None], jobs: Sequence[Future[Any]]) -> None:
    with children_ended_early():
        for job in as_completed(jobs):
            keep(job.result(), new=True)


def rule_order(rule: str) -> tuple[str, int]:
    """S2 before S10; a deadlock is last."""
    number = rule[1:]
    return (rule[0], int(number)) if number.isdigit() else ("~", 0)


def _quiet() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"


def _hunt_named(mutant_id: str, seconds: float, out: str) -> Kill:
    return hunt_mutant(find(mutant_id), seconds, out=Path(out))


def _clean_named(name: str, seconds: float, examples: int, out: str) -> Clean:
    fixture = next(mutant.fixture for mutant in all_mutants(real=True) if mutant.fixture.name == name)
    return hunt_clean(fixture, seconds, examples, Path(out))


def _read(path: Path) -> dict[tuple[str, str], Kill | Clean]:
    """What an interrupted campaign had written; a line that was cut off is left out."""
    known: dict[tuple[str, str], Kill | Clean] = {}
    if not path.exists():
        return known
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        kind = row.pop("kind")
        if kind == "mutant":
            kill = Kill(**{**row, "expected": tuple(row["expected"]), "fired": tuple(row["fired"])})
            known[kind, kill.id] = kill
        else:
            known[kind, row["fixture"]] = Clean(**row)
    return known
