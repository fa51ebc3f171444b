"""Mutants of the real trainer, on the virtual clock: real gradients, syncs and engines, simulated seconds."""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from grpo_lab.harness.outcome import attempt
from grpo_lab.harness.recipe import load_recipe, recipe_with
from grpo_lab.harness.run_dir import make_run_dir
from grpo_lab.harness.runner import declaration
from grpo_lab.harness.simulated import end_trace, simulate, trace_recorder
from grpo_lab.sim.real_trainer import TimedTrainer
from grpo_lab.testing.mutants.mutant import Finding, Mutant, Only
from grpo_lab.testing.mutants.real import SMALL, SeedsAsCases, copies_of, judged, untrained_model
from grpo_lab.testing.mutants.resume import OneMarkOnly
from grpo_lab.testing.mutants.trainer import Prefetches, VersionsForSteps
from grpo_lab.trainer.term import TrainingTerm

TERM = "grpo_lab.trainer.trainer:TrainingTerm"
TRAINER = "grpo_lab.sim.real_trainer:TimedTrainer"


@contextlib.contextmanager
def planted(parts: Mapping[str, Any]) -> Iterator[None]:
    """Other classes under the names of a module (``module:name``) while it lasts."""
    with contextlib.ExitStack() as stack:
        for place, part in parts.items():
            path, _, name = place.partition(":")
            module = importlib.import_module(path)
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, part)
        yield


@dataclass(frozen=True)
class SimulatedRuns(SeedsAsCases):
    """``grpo-lab run --world sim`` of a small recipe; a case is its seed."""

    name: str
    recipe: tuple[tuple[str, Any], ...] = ()
    repeats: bool = True

    def cases(self) -> st.SearchStrategy[int]:
        return st.integers(0, 9)

    def run(self, case: int, plant: Any, only: Only, passed_over: Callable[[str], None]) -> Finding | None:
        recorder = trace_recorder()
        with tempfile.TemporaryDirectory(prefix="grpo-lab-mutant-") as out, planted(plant or {}):
            given = {**SMALL, **dict(self.recipe), "seed": case, "out": out, "world": "sim"}
            recipe = recipe_with({**given, "model": str(untrained_model(out))}, load_recipe("smoke"))
            directory = make_run_dir(recipe.out, recipe.name)
            declared = declaration(recipe)

            def body() -> object:
                model = Path(recipe.model)
                return simulate(recipe, directory, model, declared, recorder, lambda step, shown: None)

            outcome = attempt(body, directory.logs / "trainer.log")
            end_trace(recorder, outcome, directory)
        if outcome.ended != "clean":
            passed_over(outcome.detail[:80])
        return judged(recorder.records, only, passed_over)


class SendsWhatItWas(TimedTrainer):
    """What is trained is not what is sent.

    Field: verl#7495: the adapter is trained and the base model is sent; the policy stays where it was.
    Planted: every tensor that the real trainer sends is a copy from before training.
    Exposed by: any second version. D5.
    """

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if "before" not in self.__dict__:
            self.before = copies_of(super().named_tensors())
        return iter(self.before)


class CursorOfOneMark(TrainingTerm):
    """One dropped group pins the resume cursor of the real trainer for ever.

    Field: trl 1.16.0: the cursor is the first prompt that is not done; all behind it is trained on again.
    Planted: what is done above the low-water mark is not kept.
    Exposed by: a stale group, then a checkpoint. S27.
    """

    cursor_type = OneMarkOnly


class LagInVersions(TrainingTerm):
    """The real trainer counts the lag in versions where it was meant in optimizer steps.

    Field: trl 1.16.0: ``weight_sync_steps=4`` makes the true lag four times the logged one.
    Planted: the age in steps is the age in versions.
    Exposed by: several steps a sync, and a bound in steps. S18.
    """

    buffer_type = VersionsForSteps


def _runs(name: str, **recipe: Any) -> SimulatedRuns:
    return SimulatedRuns(f"real trainer, {name}", tuple(recipe.items()))


PLAIN = _runs("plain", steps=3)
FREE = _runs("free admission", staleness_policy="drop", max_staleness=0, steps=5, save_steps=1)
IN_STEPS = _runs(
    "bound in steps",
    staleness_policy="drop",
    weight_sync_steps=3,
    max_staleness=2,
    max_staleness_steps=2,
    steps=7,
)

MUTANTS = (
    Mutant("M14-b", ("D5",), PLAIN, SendsWhatItWas, {TRAINER: SendsWhatItWas}),
    Mutant("M34-b", ("S18",), FREE, Prefetches, {TERM: Prefetches}),
    Mutant("M36-b", ("S27",), FREE, CursorOfOneMark, {TERM: CursorOfOneMark}),
    Mutant("M38-b", ("S18",), IN_STEPS, LagInVersions, {TERM: LagInVersions}),
)
