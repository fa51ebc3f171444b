"""Does a bucket plan describe this model? Asked when the transfer is joined, before any byte moves (H1).

vLLM fuses parameters (q, k and v into one), so its own names cannot be compared. The names and shapes of the
Hugging Face model of the same configuration can: that is what a trainer sends and ``load_weights`` takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from grpo_lab.errors import HandshakeError
from grpo_lab.packing import BucketPlan
from grpo_lab.packing.dtypes import DTYPES
from grpo_lab.types import JsonDict

MAX_NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Expected:
    """Shapes by name; ``tied`` maps each further name of a shared parameter to its first."""

    shapes: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_config(cls, config: Any) -> Expected | None:
        """From a Hugging Face configuration, without memory for the weights (on torch's meta device).

        None for a model that transformers cannot build as a causal language model: nothing to compare with.
        """
        import transformers  # noqa: PLC0415 - slow to import, and in vLLM's processes already

        try:
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        except (ValueError, KeyError, ImportError, AttributeError, NotImplementedError):
            return None
        model.tie_weights()
        shapes: dict[str, tuple[int, ...]] = {}
        tied: dict[str, str] = {}
        first: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            owner = first.setdefault(id(parameter), name)
            if owner == name:
                shapes[name] = tuple(parameter.shape)
            else:
                tied[name] = owner
        return cls(shapes, tied)


def plan_of(info: JsonDict, expected: Expected | None) -> BucketPlan:
    """The plan of an ``init_info``. Raises ``HandshakeError`` naming what differs from the model."""
    plan = BucketPlan.from_json(info.get("plan") or {})
    declared = info.get("plan_digest", plan.digest())
    if declared != plan.digest():
        raise HandshakeError(f"plan_digest={declared!r}, but the plan itself has {plan.digest()!r}")
    if expected is None:
        return plan
    _compare_names(plan, expected)
    for entry in plan.tensors:
        if not DTYPES[entry.wire_dtype].castable:
            raise HandshakeError(f"{entry.name}: dtype {entry.wire_dtype} in the plan, a float in the model")
        owners = {expected.tied.get(name, name) for name in entry.names} & expected.shapes.keys()
        if len(owners) > 1:
            raise HandshakeError(f"{' and '.join(sorted(owners))} are tied in the plan, not in the model")
        for owner in owners:
            shape = expected.shapes[owner]
            if shape != entry.shape:
                raise HandshakeError(f"{entry.name}: shape {entry.shape} in the plan, {shape} in the model")
    return plan


def _compare_names(plan: BucketPlan, expected: Expected) -> None:
    sent: dict[str, str] = {}
    extra = []
    for entry in plan.tensors:
        owners = {expected.tied.get(name, name) for name in entry.names} & expected.shapes.keys()
        if not owners:
            extra.append(entry.name)
        for owner in owners:
            if sent.setdefault(owner, entry.name) != entry.name:
                raise HandshakeError(f"{entry.name} and {sent[owner]} are tied in the model, not in the plan")
    missing = [name for name in expected.shapes if name not in sent]
    if missing or extra:
        raise HandshakeError(
            f"the plan is not this model's: missing {_listed(missing)}; extra {_listed(extra)}"
        )


def _listed(names: list[str]) -> str:
    hidden = len(names) - MAX_NAMES_SHOWN
    more = f" and {hidden} more" if hidden > 0 else ""
    return (", ".join(names[:MAX_NAMES_SHOWN]) or "nothing") + more
