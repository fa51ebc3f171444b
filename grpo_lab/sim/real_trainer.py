"""The real trainer in virtual time: real gradients, rewards and weight syncs, simulated seconds.

``AsyncGRPOTrainer`` runs as a blocking actor, unmodified but for the time that a step takes. It syncs with
the real coordinator over a greenlet bridge and takes its samples from the real rollout worker, which runs
as a task of the same loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_lab.ports import Recorder, SampleQueue
from grpo_lab.protocol.rollout_worker import RolloutWorker
from grpo_lab.sim.greenlet_bridge import GreenletBridge, virtual_sleep
from grpo_lab.sim.simulation import SimContext
from grpo_lab.sim.speeds import Speeds
from grpo_lab.sim.torch_engines import TorchEngines
from grpo_lab.sim.worker_actor import Heartbeat, WorkerActor
from grpo_lab.trainer.assembly import rollout_settings, transfer_settings
from grpo_lab.trainer.batching import StepPlan
from grpo_lab.trainer.config import AsyncGRPOConfig
from grpo_lab.trainer.dataset import PromptSequence, RewardFunctions
from grpo_lab.trainer.protocols import WorkerStart
from grpo_lab.trainer.trainer import AsyncGRPOTrainer
from grpo_lab.trainer.weight_transfer import CoordinatedSync, SyncWorld


class TimedTrainer(AsyncGRPOTrainer):
    """``step_s`` gives the virtual seconds of an optimizer step from the tokens of its samples."""

    step_s: Callable[[int], float]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """The gradient is computed at once; what is left of the step's time passes before it is applied."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        virtual_sleep(self.step_s(tokens_of(inputs)))
        return loss


def tokens_of(plan: StepPlan) -> int:
    """Tokens of a step's samples, prompts included."""
    return sum(
        len(sample.prompt_token_ids) + len(sample.completion_token_ids)
        for group in plan.groups
        for sample in group.samples
    )


@dataclass(frozen=True, slots=True)
class TrainerWorld:
    """Everything around a simulated trainer."""

    context: SimContext
    engines: TorchEngines
    speeds: Speeds


def make_simulated_trainer(
    world: TrainerWorld,
    model: Any,
    reward_funcs: Sequence[Callable[..., Any]],
    args: AsyncGRPOConfig,
    train_dataset: Any,
    processing_class: Any,
    recorder: Recorder,
    **options: Any,
) -> AsyncGRPOTrainer:
    """The trainer for a blocking actor of the simulation. Call it on that actor.

    Args:
        model: a loaded model: transformers loads one with threads, which a simulation refuses.
        reward_funcs: they run in place, so a slow one takes wall time but no virtual time.
        recorder: the trainer's; from ``world.context``.
        options: further arguments of ``AsyncGRPOTrainer``.
    """
    loop = world.context.loop

    def make_sync() -> CoordinatedSync:
        return CoordinatedSync(
            lambda: world.engines.connect(recorder),
            trainer.named_tensors,
            trainer.score,
            recorder,
            transfer_settings(args, trainer.model.config.vocab_size),
            SyncWorld(
                bridge=lambda: GreenletBridge(loop),
                transport=world.engines.links,
                memory=None,  # of this process: not the same twice
            ),
        )

    def make_worker(start: WorkerStart) -> WorkerActor:
        return _worker(world, start, trainer, worker_recorder)

    worker_recorder = world.context.recorder("worker")
    trainer = TimedTrainer(
        model,
        list(reward_funcs),
        args,
        train_dataset,
        processing_class,
        recorder=recorder,
        make_weight_sync=make_sync,
        make_worker=make_worker,
        **options,
    )
    trainer.step_s = world.speeds.trainer_step
    return trainer


def _worker(
    world: TrainerWorld, start: WorkerStart, trainer: AsyncGRPOTrainer, recorder: Recorder
) -> WorkerActor:
    args = trainer.args
    engines = world.engines.clients(recorder)
    rewards = RewardFunctions(
        trainer.rewards.functions,
        trainer.processing_class,
        weights=args.reward_weights,
        timeout_s=args.reward_timeout,
        in_thread=False,
    )
    prompts = PromptSequence(
        trainer.train_dataset,
        trainer.processing_class,
        args.sampling_seed,
        start.cursor,
        args.chat_template_kwargs,
        args.token_budget - args.max_completion_length,
    )

    def make(queue: SampleQueue, heartbeat: Heartbeat) -> RolloutWorker:
        worker = RolloutWorker(
            engines,
            prompts,
            rewards,
            queue,
            recorder,
            rollout_settings(args),
            term=start.term,
            version=start.version,
            heartbeat=heartbeat,
            texts=rewards.texts,
        )
        worker.fence_engines(start.fenced)
        return worker

    async def connect() -> None:
        for engine in engines:
            if engine.name not in start.fenced:
                await engine.discover()

    return WorkerActor(
        world.context.loop,
        make,
        connect,
        recorder=recorder,
        trainer=trainer.recorder,
        capacity=args.queue_maxsize,
        stale_after_s=args.heartbeat_stale_after_s,
    )
