"""What the canary sees at which learning rate; the module that measures it prints the table of the docs."""

import pytest
from canary_sensitivity import LEARNING_RATES, TOLERANCE, measure, quickstart_model


@pytest.fixture(scope="module")
def seen():
    model = quickstart_model()
    return {(row.fault, row.learning_rate): row for rate in LEARNING_RATES for row in measure(model, rate)}


def test_a_stale_version_is_seen_at_every_learning_rate(seen):
    assert all(seen["v-1", rate].outcome == "fails" for rate in LEARNING_RATES)


def test_a_stale_layer_is_seen_at_every_learning_rate(seen):
    assert all(seen["one stale layer", rate].outcome == "fails" for rate in LEARNING_RATES)


def test_one_stale_norm_hides_below_1e_3(seen):
    """It moves logprobs by less than the tolerance, and the canary then says that it holds."""
    hidden = [seen["one stale norm", rate] for rate in LEARNING_RATES if rate < 1e-3]
    assert all(row.gap < TOLERANCE and row.outcome == "holds" for row in hidden)
    assert seen["one stale norm", 1e-3].outcome == "fails"


def test_a_fault_shows_in_proportion_to_the_learning_rate(seen):
    for fault in ("one stale norm", "one stale layer"):
        small, large = seen[fault, 1e-6].gap, seen[fault, 1e-5].gap
        assert 5 < large / small < 20
