"""Mutants of a trainer whose engines are stock: the engines' gaps are environment, the misuse is planted.

The engines tell nothing, hash nothing, and take what comes, as a vLLM 0.32 does (docs/serve.md, faithful).
What is left to a trainer is to prove the structure of what it sent, and the canary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from grpo_lab.engine.rl_state import Session
from grpo_lab.packing import Unpacker
from grpo_lab.testing.mutants import spaces
from grpo_lab.testing.mutants.clusters import Clusters, varied
from grpo_lab.testing.mutants.coordinator import with_delivery
from grpo_lab.testing.mutants.landing import AcceptsEmpty, EmptyUpdate
from grpo_lab.testing.mutants.mutant import Mutant
from grpo_lab.testing.mutants.packer import TRUSTING, Swapped, Trusting
from grpo_lab.trainer.weight_source import PackedSource
from grpo_lab.types import Bucket, SyncId


class TakesWhatComes(AcceptsEmpty):
    """Environment: nothing is compared with a hash, and a finish without an update is a success."""

    async def _take(self, session: Session, sync: SyncId, bucket: Bucket) -> None:
        unpacker: Unpacker | None = self._unpacker
        assert unpacker is not None
        unpacker.unpack(bucket.index, bucket.memory, self.core.policy.staging())
        session.hashes[bucket.index] = bucket.hash64


class EmptyAndTrusting(EmptyUpdate, Trusting):
    """An update without content moves the version of an engine that takes it.

    Field: vLLM 0.32's contract: start and finish alone are a success with a new version, and old weights.
    Planted: from the second version on the trainer sends nothing, and goes on whatever the canary says.
    Exposed by: any second version, on stock engines. S6, by the canary alone.
    """


class SwappedOnStock(Swapped):
    """Two tensors of one shape are in each other's place, in an engine that compares nothing.

    Field: vLLM 0.32's contract: gate and up swapped; the checksums of the engine are equal to the right ones.
    Planted: the first two tensors trade names, and the trainer goes on whatever the canary says.
    Exposed by: any update, on stock engines. S6, by the canary alone.
    """


class LastTensorStays(PackedSource):
    """A mixture of two versions is loaded, 200 everywhere.

    Field: vLLM 0.32's contract: names that did not come keep their old weights.
    Planted: the last tensor is always that of the first version, and the trainer goes on whatever the canary
    says.
    Exposed by: any second version, on stock engines. S6, by the canary alone.
    """

    def __init__(self, named_tensors: Any, *args: Any, **kwargs: Any) -> None:
        first: dict[str, Tensor] = {name: tensor.clone() for name, tensor in named_tensors()}

        def mixed() -> Any:
            *others, (last, _) = named_tensors()
            return iter([*others, (last, first[last])])

        super().__init__(mixed, *args, **kwargs)


STOCK = Clusters(
    "stock engines",
    varied(dataclasses.replace(spaces.BASE, stock=True, canary=True), **spaces.work()),
    environment={"rl": TakesWhatComes},
)

MUTANTS = (
    Mutant("M45-b", ("S6",), STOCK, EmptyAndTrusting, with_delivery(EmptyAndTrusting)),
    Mutant("M46-b", ("S6",), STOCK, LastTensorStays, {"source": LastTensorStays, **TRUSTING}),
    Mutant("M47-b", ("S6",), STOCK, SwappedOnStock, {"source": SwappedOnStock, **TRUSTING}),
)
