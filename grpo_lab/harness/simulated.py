"""``grpo-lab run RECIPE --world sim``: the recipe's whole run in one process, on a virtual clock.

Trainer, coordinator, worker and engines are the real ones, and so are gradients, tokens and rewards; seconds
are simulated (``grpo_lab.sim.speeds``). The same recipe gives the same trace, byte for byte.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import TrainerCallback

from grpo_lab.events import CheckpointSaved, MemberStopped, Record, RunDeclared, RunEnded
from grpo_lab.files import replacing
from grpo_lab.harness.outcome import Outcome, unfinished_samples
from grpo_lab.harness.recipe import Recipe
from grpo_lab.harness.rewards import reward_functions
from grpo_lab.harness.run_dir import RunDir
from grpo_lab.harness.training import Learned, StepSeen, learn, load_training_data, trainer_config
from grpo_lab.recorders import ListRecorder
from grpo_lab.sim.greenlet_bridge import spawn_blocking
from grpo_lab.sim.real_trainer import TrainerWorld, make_simulated_trainer
from grpo_lab.sim.simulation import SimContext, run_simulation
from grpo_lab.sim.speeds import Speeds
from grpo_lab.sim.torch_engines import MAX_NUM_SEQS, TorchEngines
from grpo_lab.tasks.tiny_model import no_progress_bars
from grpo_lab.trainer.loading import load_model, load_tokenizer
from grpo_lab.trainer.trainer import AsyncGRPOTrainer

MakeCallbacks = Callable[[AsyncGRPOTrainer], Sequence[TrainerCallback]]
DEFAULT_SPEEDS = Speeds()


def no_callbacks(_: AsyncGRPOTrainer) -> Sequence[TrainerCallback]:
    return ()


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a simulated run gave. ``wall_s`` is the simulation alone, without making a model or a report."""

    learned: Learned
    virtual_s: float
    wall_s: float

    def words(self) -> str:
        return (
            f"simulated: {self.virtual_s:,.1f} virtual s in {self.wall_s:,.1f} s, "
            f"{self.virtual_s / self.wall_s:.2f} virtual seconds per wall second"
        )


def trace_recorder() -> ListRecorder:
    """The recorder of actor "run"; its ``records`` take the whole trace. Its clock is the newest record's."""
    records: list[Record] = []
    return ListRecorder("run", lambda: records[-1].t if records else 0.0, records)


def simulate(
    recipe: Recipe,
    run: RunDir,
    model: Path,
    declared: RunDeclared,
    recorder: ListRecorder,
    step_seen: StepSeen,
    *,
    speeds: Speeds = DEFAULT_SPEEDS,
    max_num_seqs: int = MAX_NUM_SEQS,
    callbacks: MakeCallbacks = no_callbacks,
) -> Simulated:
    """Runs it; its trace is in ``recorder.records``, also when it fails. Raises what training raised.

    Args:
        declared: the first event; it names the engines.
        recorder: from ``trace_recorder``.
        max_num_seqs: sequences that an engine decodes at once.
        callbacks: makes further callbacks of the trainer.
    """
    names = tuple(declared.capabilities)
    config = trainer_config(recipe, run, [f"http://{name}" for name in names])
    dataset = load_training_data(recipe)
    rewards = reward_functions(recipe, dataset.column_names)
    # Here, not on the virtual loop: transformers loads with threads.
    with no_progress_bars():
        loaded, tokenizer = load_model(model, config), load_tokenizer(model)

    def blocking(world: TrainerWorld, trainer_recorder: ListRecorder) -> Learned:
        trainer = make_simulated_trainer(world, loaded, rewards, config, dataset, tokenizer, trainer_recorder)
        for callback in callbacks(trainer):
            trainer.add_callback(callback)
        return learn(trainer, recipe, run, step_seen)

    async def main(context: SimContext) -> Learned:
        recorder.emit(declared)
        engines = TorchEngines(
            context,
            model,
            names,
            speeds,
            seed=recipe.seed,
            batch_invariant=recipe.batch_invariant,
            max_num_seqs=max_num_seqs,
        )
        async with engines:
            trainer_recorder = context.recorder("trainer")
            trainer_recorder.observe(recorder.last_id)
            world = TrainerWorld(context, engines, speeds)
            learned = await spawn_blocking(
                context.loop, lambda: blocking(world, trainer_recorder), name="trainer"
            )
            recorder.observe(trainer_recorder.last_id)
            for name in names:
                recorder.emit(MemberStopped(member=name))
            return learned

    started_s = time.monotonic()
    with no_progress_bars():  # that of saving a model starts a thread
        result = run_simulation(main, seed=recipe.seed, records=recorder.records)
    return Simulated(result.value, result.virtual_s, time.monotonic() - started_s)


def end_trace(recorder: ListRecorder, outcome: Outcome, run: RunDir) -> None:
    """Ends the trace and writes it, in the order in which things happened, as the run's only part."""
    records = recorder.records
    in_flight, queued = (0, 0) if outcome.ended == "clean" else unfinished_samples(records)
    recorder.emit(RunEnded(outcome=outcome.ended, detail=outcome.detail, in_flight=in_flight, queued=queued))
    target = run.events / "simulation.jsonl"
    with replacing(target) as partial, partial.open("w", encoding="utf-8") as lines:
        for record in records:
            lines.write(_relative(record, run).to_line() + "\n")


def _relative(record: Record, run: RunDir) -> Record:
    """Without the run's directory, which has the time of day in its name."""
    event = record.event
    if not isinstance(event, CheckpointSaved):
        return record
    checkpoint = os.path.relpath(event.checkpoint, run.path)
    return dataclasses.replace(record, event=dataclasses.replace(event, checkpoint=checkpoint))
