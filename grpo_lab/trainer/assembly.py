"""From an ``AsyncGRPOConfig`` to the parts of a real run: the weight sync and the worker process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from grpo_lab.ports import Engine, Recorder
from grpo_lab.protocol.coordinator import SyncSettings
from grpo_lab.protocol.rollout_worker import RolloutSettings
from grpo_lab.protocol.sample_request import RequestSettings
from grpo_lab.trainer.config import AsyncGRPOConfig
from grpo_lab.trainer.protocols import NamedTensors, WorkerStart
from grpo_lab.trainer.weight_source import ScoreFunction
from grpo_lab.trainer.weight_transfer import CoordinatedSync, TransferSettings, fixed_canary
from grpo_lab.trainer.worker_main import WorkerSpec
from grpo_lab.trainer.worker_process import WorkerProcess
from grpo_lab.transport.engines import connect_engines
from grpo_lab.types import PauseMode, SamplingParams, SyncScope


def build_weight_sync(
    args: AsyncGRPOConfig,
    recorder: Recorder,
    *,
    named_tensors: NamedTensors,
    score: ScoreFunction,
    vocabulary: int,
) -> CoordinatedSync:
    """The coordinator for the engines of ``args``. ``vocabulary`` bounds the canary's token ids."""

    async def engines() -> Sequence[Engine]:
        return await connect_engines(args.engine_urls, recorder, args.vllm_server_timeout)

    settings = transfer_settings(args, vocabulary)
    return CoordinatedSync(engines, named_tensors, score, recorder, settings)


def transfer_settings(args: AsyncGRPOConfig, vocabulary: int) -> TransferSettings:
    """How to sync, in either world."""
    pause_mode: PauseMode = args.pause_mode  # type: ignore[assignment]
    scope: SyncScope = args.sync_scope  # type: ignore[assignment]
    canary = fixed_canary(args.canary_sequences, args.canary_length, vocabulary, args.canary_tolerance)
    return TransferSettings(
        sync=SyncSettings(
            pause_mode=pause_mode,
            scope=scope,
            clear_cache=args.clear_cache,
            attempts=args.sync_attempts,
            min_engines=args.min_engines,
            canary=canary,
            timeouts=args.timeouts,
        ),
        transport=args.weight_transport,
        bucket_bytes=args.bucket_bytes,
        wire_dtype=args.wire_dtype,
        ring_slots=args.ring_slots,
        pack_threads=args.pack_threads,
        turns=len(args.engine_urls) if scope == "rolling" else 1,
    )


def rollout_settings(args: AsyncGRPOConfig) -> RolloutSettings:
    """What the rollout worker does, in either world."""
    sampling = SamplingParams(
        max_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
    )
    rolling = args.sync_scope == "rolling"
    commit_s = args.timeouts.sync_s(args.sync_attempts, len(args.engine_urls)) if rolling else None
    request = RequestSettings(timeout_s=args.request_timeout, retries=args.request_retries, commit_s=commit_s)
    answer_s = (args.request_retries + 1) * args.request_timeout
    return RolloutSettings(
        num_generations=args.num_generations,
        sampling=sampling,
        bound=args.staleness_bound,
        max_inflight=args.max_inflight_tasks,
        request=request,
        group_timeout_s=answer_s + (commit_s or 0.0) + args.reward_timeout,
        seed=args.sampling_seed,
    )


def make_worker_process(
    start: WorkerStart,
    args: AsyncGRPOConfig,
    dataset: Any,
    reward_funcs: Sequence[Callable[..., Any]],
    tokenizer: Any,
    recorder: Recorder,
) -> WorkerProcess:
    """A rollout worker for one term, not started yet."""
    weights = args.reward_weights
    spec = WorkerSpec(
        term=start.term,
        version=start.version,
        cursor=start.cursor,
        engine_urls=args.engine_urls,
        settings=rollout_settings(args),
        queue_capacity=args.queue_maxsize,
        dataset=dataset,
        reward_funcs=tuple(reward_funcs),
        reward_weights=None if weights is None else tuple(weights),
        reward_timeout_s=args.reward_timeout,
        tokenizer=tokenizer,
        chat_template_kwargs=args.chat_template_kwargs,
        max_prompt_tokens=args.token_budget - args.max_completion_length,
        prompt_seed=args.sampling_seed,
        events_dir=args.events_dir,
        started_s=time.monotonic() - recorder.now_s,
        cause=recorder.last_id,
        fenced=start.fenced,
        engine_wait_s=min(args.vllm_server_timeout, args.request_timeout),
    )
    return WorkerProcess(spec, recorder, args.heartbeat_stale_after_s)
