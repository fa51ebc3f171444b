"""All mutants, in the order of their cases."""

from __future__ import annotations

import re
from collections.abc import Sequence

from grpo_lab.errors import ConfigError
from grpo_lab.testing.mutants import (
    config,
    coordinator,
    engine,
    landing,
    metrics,
    packer,
    ranks,
    resume,
    stock,
    trainer,
    updates,
    worker,
)
from grpo_lab.testing.mutants.mutant import Mutant

_PARTS = (
    coordinator,
    worker,
    engine,
    updates,
    packer,
    landing,
    stock,
    trainer,
    resume,
    ranks,
    metrics,
    config,
)


def all_mutants(*, real: bool = False) -> tuple[Mutant, ...]:
    """``real``: also those of the real trainer on the virtual clock, and those of real processes."""
    found = [mutant for part in _PARTS for mutant in part.MUTANTS]
    if real:
        # Imported only where they are asked for: the real trainer takes seconds.
        from grpo_lab.testing.mutants.real import REAL_MUTANTS  # noqa: PLC0415
        from grpo_lab.testing.mutants.real_trainer import MUTANTS  # noqa: PLC0415

        found += [*MUTANTS, *REAL_MUTANTS]
    return tuple(sorted(found, key=lambda mutant: _order(mutant.id)))


def chosen(only: Sequence[str], *, real: bool = False) -> tuple[Mutant, ...]:
    """Those whose id or case is named; all, when nothing is. Raises ``ConfigError`` for an unknown name."""
    everything = all_mutants(real=real)
    names = {name for mutant in everything for name in (mutant.id, mutant.case)}
    for name in only:
        if name not in names:
            listed = ", ".join(dict.fromkeys(mutant.case for mutant in everything))
            raise ConfigError("only", name, f"a mutant's id or case; the cases are {listed}")
    return tuple(item for item in everything if not only or item.id in only or item.case in only)


def find(mutant_id: str, *, real: bool = True) -> Mutant:
    """Raises ``ConfigError`` for an unknown id. Without ``real`` only those of the simulation are known."""
    for mutant in all_mutants(real=real):
        if mutant.id == mutant_id:
            return mutant
    words = "the id of a mutant" if real else "the id of a mutant of whole clusters, like M44"
    raise ConfigError("mutant", mutant_id, f"{words}, as grpo-lab mutants lists it")


def _order(mutant_id: str) -> tuple[int, str]:
    match = re.match(r"M(\d+)(.*)", mutant_id)
    assert match is not None, mutant_id
    return int(match[1]), match[2]
