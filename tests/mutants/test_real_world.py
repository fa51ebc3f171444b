"""Faults that are planted in real processes are caught from their trace alone, over both transports."""

import importlib

import pytest

from grpo_lab.testing.mutants.catalogue import all_mutants
from grpo_lab.testing.mutants.real import FREE, IN_MEMORY, OVER_GLOO, REAL_MUTANTS, REFUSED
from grpo_lab.testing.mutants.real_trainer import MUTANTS as SIMULATED_TRAINER

QUICK = ("M13-shm", "M16-gloo", "M23-real", "M28-real")
ALL = {mutant.id: mutant for mutant in REAL_MUTANTS}


def caught(mutant):
    """The finding, and the rules beside it."""
    others: list[str] = []
    return mutant.fixture.run(0, mutant.planted, frozenset(mutant.rules), others.append), others


@pytest.mark.parametrize("mutant", [*REAL_MUTANTS, *SIMULATED_TRAINER], ids=lambda mutant: mutant.id)
def test_what_is_planted_takes_the_place_of_its_base(mutant):
    """A plant under a name that nobody looks up would change nothing."""
    for key, part in mutant.parts.items():
        place = key if isinstance(key, str) else key[1]
        module, _, name = place.partition(":")
        original = getattr(importlib.import_module(module), name)
        assert issubclass(part, original)
        assert part is not original
        assert getattr(importlib.import_module(part.__module__), part.__qualname__) is part


def test_the_two_worlds_have_ids_of_their_own():
    ids = [mutant.id for mutant in all_mutants(real=True)]
    assert len(set(ids)) == len(ids)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant_id", QUICK)
def test_a_real_run_with_a_planted_fault_is_caught(mutant_id):
    finding, others = caught(ALL[mutant_id])
    assert finding is not None, others
    assert finding.rule in ALL[mutant_id].rules
    assert finding.event_ids


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant_id", [name for name in ALL if name not in QUICK])
def test_every_real_run_with_a_planted_fault_is_caught(mutant_id):
    finding, others = caught(ALL[mutant_id])
    assert finding is not None, others


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("runs", [IN_MEMORY, OVER_GLOO, FREE, REFUSED], ids=lambda runs: runs.name)
def test_the_same_runs_without_a_fault_are_clean(runs):
    others: list[str] = []
    assert runs.run(1, None, None, others.append) is None
    assert others == []
