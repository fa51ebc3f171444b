"""Compares the trainer's bucket plan with the engine's own parameters, before any weight moves (H1)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from grpo_lab.engine.policy import Policy
from grpo_lab.errors import HandshakeError
from grpo_lab.packing import BucketPlan
from grpo_lab.packing.dtypes import DTYPES
from grpo_lab.types import JsonDict


def checked_plan(info: JsonDict, policy: Policy) -> BucketPlan:
    """The plan of an ``init_info``. Raises ``HandshakeError`` naming what differs from the model.

    A float dtype other than the model's float32 is converted on landing: it is what the sender declared.
    """
    plan = BucketPlan.from_json(info.get("plan") or {})
    declared = info.get("plan_digest", plan.digest())
    if declared != plan.digest():
        raise HandshakeError(f"plan_digest={declared!r}, but the plan itself has {plan.digest()!r}")
    known = targets(policy.parameters(), policy.tied)
    _compare_names(plan, policy, known)
    owner: dict[int, str] = {}
    for entry in plan.tensors:
        if not DTYPES[entry.wire_dtype].castable:
            raise HandshakeError(f"{entry.name}: dtype {entry.wire_dtype} in the plan, float32 in the model")
        for name in entry.names:
            if name not in known:
                continue
            shape = tuple(known[name].shape)
            if shape != entry.shape:
                raise HandshakeError(f"{name}: shape {entry.shape} in the plan, {shape} in the model")
            first = owner.setdefault(known[name].data_ptr(), entry.name)
            if first != entry.name:
                raise HandshakeError(f"{entry.name} and {first} are tied in the model, not in the plan")
    return plan


def targets(tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> dict[str, Tensor]:
    """Every name that a parameter goes by, tied names included."""
    return {**{name: tensors[target] for name, target in tied.items()}, **tensors}


def _compare_names(plan: BucketPlan, policy: Policy, known: Mapping[str, Tensor]) -> None:
    extra = [entry.name for entry in plan.tensors if not known.keys() & set(entry.names)]
    covered = {name for entry in plan.tensors for name in entry.names}
    covered |= {target for name, target in policy.tied.items() if name in covered}
    missing = [name for name in policy.parameters() if name not in covered]
    if missing or extra:
        raise HandshakeError(
            f"the plan is not this model's: missing {_listed(missing)}; extra {_listed(extra)}"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return (", ".join(names[:8]) or "nothing") + more
