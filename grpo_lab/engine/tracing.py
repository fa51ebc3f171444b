"""What the trace says about an engine's requests and steps."""

from __future__ import annotations

from grpo_lab.engine.request import Request, WeightIdentity
from grpo_lab.engine.scheduler import StepPlan
from grpo_lab.events import CacheHit, ModelStep, RequestAdmitted, RequestFinished


def admitted_event(
    engine: str, request: Request, identity: WeightIdentity, request_term: int, *, paused: bool
) -> RequestAdmitted:
    """``request`` was taken while ``identity`` was served; its sender named ``request_term`` (0: none)."""
    return RequestAdmitted(
        engine=engine,
        request=request.request_id,
        request_kind=request.kind,
        prompt_tokens=request.num_prompt_tokens,
        weight_version=identity.version,
        paused=paused,
        term=identity.term,
        request_term=request_term,
    )


def hit_event(
    engine: str, request: Request, tokens: int, content: tuple[int, int], identity: WeightIdentity
) -> CacheHit:
    """``request`` found ``tokens`` tokens in the prefix cache that (term, version) ``content`` computed."""
    return CacheHit(
        engine=engine,
        request=request.request_id,
        cache="prefix",
        content_version=content[1],
        version=identity.version,
        tokens=tokens,
        content_term=content[0],
        term=identity.term,
    )


def step_event(
    engine: str,
    plan: StepPlan,
    identity: WeightIdentity,
    first_step: int,
    began_seq: int,
    duration_s: float,
    *,
    steps: int = 1,
    shard: int = 0,
) -> ModelStep:
    """``steps`` model steps from number ``first_step`` on ran ``plan`` under ``identity``, each with as many
    sequences and tokens; see ``ModelStep`` for ``began_seq``.
    """
    return ModelStep(
        engine=engine,
        first_step=first_step,
        last_step=first_step + steps - 1,
        version=identity.version,
        term=identity.term,
        sequences=plan.sequences,
        prefill_tokens=plan.prefill_tokens * steps,
        decode_tokens=plan.decode_tokens * steps,
        began_seq=began_seq,
        shard=shard,
        duration_s=round(duration_s, 6),
    )


def finished_event(engine: str, request: Request) -> RequestFinished:
    """``request`` has ended."""
    spans = tuple(
        (*span.identity.weights, span.start, span.end, span.first_step, span.last_step)
        for span in request.spans
    )
    return RequestFinished(
        engine=engine,
        request=request.request_id,
        finish_reason=request.finish_reason or "abort",
        tokens=request.num_output_tokens,
        spans=spans,
        recomputed_tokens=request.recomputed_tokens,
        kv_version=min((span.kv[1] for span in request.spans), default=None),
        request_kind=request.kind,
    )
