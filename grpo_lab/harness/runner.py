"""``grpo-lab run``: engines, worker and trainer for real, then the trace checked and reported.

Whatever happens in between, the engines are stopped, the trace is merged and checked, and the run
directory says how it ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.markup import escape

from grpo_lab.check import Violation, read_parts
from grpo_lab.events import RunDeclared, RunEnded
from grpo_lab.harness.attached import Attached, attach
from grpo_lab.harness.engine_report import tell_about_engines
from grpo_lab.harness.fleet import RunningEngine, own_capabilities, running_fleet
from grpo_lab.harness.live_check import LiveCheck
from grpo_lab.harness.outcome import (
    VIOLATED,
    Outcome,
    attempt,
    end_lost_groups,
    finish_run,
    unfinished_samples,
)
from grpo_lab.harness.progress import RunProgress
from grpo_lab.harness.recipe import Recipe
from grpo_lab.harness.refusals import refuse_at_a_glance
from grpo_lab.harness.rewards import reward_functions
from grpo_lab.harness.run_dir import RunDir, environment, make_run_dir
from grpo_lab.harness.simulated import end_trace, simulate, trace_recorder
from grpo_lab.harness.trainer_ranks import train_ranks
from grpo_lab.harness.training import load_training_data, train, trainer_config
from grpo_lab.harness.vllm_server import vllm_python
from grpo_lab.recorders import FileRecorder, run_clock
from grpo_lab.sim.scenario import SHARED_FIELDS
from grpo_lab.tasks import get_task, task_names
from grpo_lab.tasks.tiny_model import TinyModelSpec, make_tiny_model


def run(recipe: Recipe, console: Console) -> int:
    """Runs the recipe and returns the exit code: 0, 1 (a rule was violated), 3 or 130.

    Raises:
        UserError: bad input, before anything was started or written.
    """
    _refuse_bad_input(recipe)
    attached = attach(recipe.engine_urls) if recipe.attaches else None
    directory = make_run_dir(recipe.out, recipe.name)
    directory.write_json("config.json", recipe.to_json())
    directory.write_json("env.json", environment())
    console.print(f"run directory: {directory.path}", highlight=False)
    started_s = time.monotonic()
    if recipe.world == "sim":
        outcome = _simulate(recipe, directory, declaration(recipe), console)
        return finish_run(directory, outcome, time.monotonic() - started_s, console)
    try:
        with FileRecorder("run", directory.events, run_clock(started_s)) as recorder:
            recorder.emit(declaration(recipe, attached))
            first_term = attached.newest_term + 1 if attached else 1
            alarm = _Alarm(console, recipe.strict)
            with LiveCheck(directory.events, alarm.ring) as live:
                outcome = _attempt(recipe, directory, recorder, started_s, first_term, console, alarm)
                outcome = alarm.outcome(outcome)
                _end_trace(directory, recorder, outcome)
            if live.failure:
                console.print(f"[yellow]{escape(live.failure)}[/]", soft_wrap=True)
    except OSError as error:  # an event that tells nobody is no reason to leave the rest undone
        outcome = Outcome("failed", f"the trace in {directory.events} could not be written: {error}", 3)
    code = finish_run(directory, outcome, time.monotonic() - started_s, console)
    if recipe.engine != "sim":
        tell_about_engines(directory, console)
    return code


def _end_trace(directory: RunDir, recorder: FileRecorder, outcome: Outcome) -> None:
    in_flight, queued = 0, 0
    if outcome.ended == "clean":
        end_lost_groups(read_parts(directory.events), recorder)
    else:
        in_flight, queued = unfinished_samples(read_parts(directory.events))
    recorder.emit(RunEnded(outcome=outcome.ended, detail=outcome.detail, in_flight=in_flight, queued=queued))


class _Alarm:
    """Shows a violation when it is seen; a strict run is interrupted by the first."""

    def __init__(self, console: Console, strict: bool) -> None:
        self._console = console
        self._strict = strict
        self._first: Violation | None = None
        self._lock = threading.Lock()
        self._interruptible = False

    @contextlib.contextmanager
    def interrupts(self) -> Iterator[None]:
        """A strict run may be interrupted within, where SIGTERM ends it as cleanly as Ctrl-C does."""
        self._interruptible = True
        try:
            yield
        finally:
            with self._lock:
                self._interruptible = False

    def ring(self, found: Violation) -> None:
        """Called in the thread that listens to the checker."""
        self._console.print(f"[bold red]{found.rule}[/] violated: {escape(found.message)}", soft_wrap=True)
        with self._lock:
            if self._strict and self._first is None and self._interruptible:
                self._first = found
                os.kill(os.getpid(), signal.SIGTERM)

    def outcome(self, outcome: Outcome) -> Outcome:
        """How the run ended, if this is why."""
        if self._first is None or outcome.ended != "interrupted":
            return outcome
        return Outcome("failed", f"strict: {self._first.rule} was violated: {self._first.message}", VIOLATED)


def declaration(recipe: Recipe, attached: Attached | None = None) -> RunDeclared:
    """The first event of the trace: every bound that the checker needs, and what the engines can do."""
    same = (*SHARED_FIELDS, "num_generations", "batch_invariant", "heartbeat_stale_after_s")
    values: dict[str, Any] = {name: getattr(recipe, name) for name in same}
    own = dataclasses.asdict(own_capabilities(recipe))
    capabilities = {f"engine-{index}": own for index in range(recipe.engines)}
    if attached is None:
        values["prefix_policy"] = "versioned"  # what our engines do unless told otherwise
    return RunDeclared(
        world=recipe.world,
        engine=recipe.engine,
        seed=recipe.seed,
        parameters={
            **values,
            "groups_per_step": recipe.prompts_per_step,
            "max_inflight_tasks": recipe.max_inflight,
            "scope": recipe.sync_scope,
            "ring_slots": 2,
            "initial_version": 1,
            "trainer_ranks": recipe.trainer_ranks,
            "logprob_tolerance": 1e-4,
            "liveness_bound_s": 120.0,
        },
        capabilities=attached.capabilities if attached else capabilities,
    )


def _refuse_bad_input(recipe: Recipe) -> None:
    """Everything that can be known to fail before anything is made."""
    refuse_at_a_glance(recipe)
    if recipe.engine == "vllm":
        vllm_python()
    dataset = load_training_data(recipe)
    if "prompt" in dataset.column_names:
        reward_functions(recipe, dataset.column_names)
    # As one rank: how a step is split is judged in the ranks, which know how many they are.
    together = dataclasses.replace(recipe, trainer_ranks=1)
    trainer_config(together, RunDir(recipe.out), ["http://127.0.0.1:1"])


def _attempt(
    recipe: Recipe,
    directory: RunDir,
    recorder: FileRecorder,
    started_s: float,
    first_term: int,
    console: Console,
    alarm: _Alarm,
) -> Outcome:
    """Runs it with real processes and says how it ended."""
    engines: list[RunningEngine] = []

    def body() -> None:
        with _sigterm_interrupts(), alarm.interrupts(), RunProgress(console, recipe.steps) as progress:
            model = model_of(recipe, progress)
            with running_fleet(recipe, directory, recorder, model, started_s, progress, engines) as urls:
                if recipe.trainer_ranks > 1:
                    train_ranks(
                        recipe,
                        directory,
                        model,
                        tuple(urls),
                        recorder,
                        progress.step,
                        started_s=started_s,
                        first_term=first_term,
                    )
                    return
                trainer_recorder = FileRecorder("trainer", directory.events, run_clock(started_s))
                with trainer_recorder:
                    trainer_recorder.observe(recorder.last_id)
                    try:
                        train(recipe, directory, model, urls, trainer_recorder, progress.step, first_term)
                    finally:
                        recorder.observe(trainer_recorder.last_id)

    def deaths() -> list[str]:
        return [f"{engine.name} {engine.death_seen}" for engine in engines if engine.death_seen]

    return attempt(body, directory.logs / "trainer.log", deaths)


def _simulate(recipe: Recipe, directory: RunDir, declared: RunDeclared, console: Console) -> Outcome:
    """The whole run in this process, on a virtual clock; its trace is in its place afterwards."""

    def body() -> None:
        with _sigterm_interrupts(), RunProgress(console, recipe.steps) as progress:
            model = model_of(recipe, progress)
            with progress.stage("simulation"):
                simulated = simulate(recipe, directory, model, declared, recorder, progress.step)
        console.print(simulated.words())

    recorder = trace_recorder()
    outcome = attempt(body, directory.logs / "trainer.log")
    end_trace(recorder, outcome, directory)
    return outcome


def model_of(recipe: Recipe, progress: RunProgress) -> Path:
    """The recipe's model directory; a tiny model is made if it is not in the cache."""
    if recipe.model:
        return Path(recipe.model)
    task = get_task(recipe.task if recipe.task in task_names() else "sort_digits")
    with progress.stage("tiny model (made once, then cached)"):
        spec = TinyModelSpec(architecture=recipe.architecture)
        return make_tiny_model(spec, task, recipe.seed, progress=progress.warmup).path


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """SIGTERM ends a run as cleanly as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
