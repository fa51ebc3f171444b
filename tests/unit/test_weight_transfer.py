"""The trainer's faces of a weight transfer: the five public methods, in both directions."""

import pytest
import torch

from grpo_lab.errors import EngineUnreachable, SyncError
from grpo_lab.protocol.coordinator import SyncReport
from grpo_lab.recorders import ListRecorder
from grpo_lab.trainer import weight_transfer
from grpo_lab.trainer.weight_transfer import (
    CoordinatedSync,
    CountingSync,
    FiveMethodSync,
    TransferSettings,
    WeightTransferClient,
    fixed_canary,
)


class Transfer:
    """An injected five-method transfer; ``failing`` is the method that raises."""

    def __init__(self, failing=""):
        self.failing, self.calls, self.sent = failing, [], []

    def _call(self, name):
        self.calls.append(name)
        if name == self.failing:
            raise RuntimeError(f"{name} failed")

    def init_weight_transfer(self):
        self._call("init")

    def pause(self):
        self._call("pause")

    def send_weights(self, iterator):
        self.sent.append(dict(iterator))
        self._call("send")

    def resume(self):
        self._call("resume")

    def destroy(self):
        self._call("destroy")


def tensors():
    return iter([("weight", torch.ones(2))])


def test_five_methods_in_order_and_versions_count_from_the_base():
    transfer = Transfer()
    sync = FiveMethodSync(transfer)
    sync.connect(term=2, base_version=7)
    assert [sync.sync(tensors, 0).version for _ in range(2)] == [8, 9]
    sync.close()
    assert transfer.calls == ["init", *["pause", "send", "resume"] * 2, "destroy"]
    assert all(list(sent) == ["weight"] for sent in transfer.sent)


@pytest.mark.parametrize(
    ("failing", "calls"),
    [
        ("pause", ["pause", "resume"]),  # it may have paused an engine before it raised
        ("send", ["pause", "send", "resume"]),
        ("resume", ["pause", "send", "resume"]),
    ],
)
def test_resume_is_called_although_another_method_raised_and_the_version_stays(failing, calls):
    transfer = Transfer()
    sync = FiveMethodSync(transfer)
    sync.connect(term=1, base_version=0)
    transfer.failing = failing
    with pytest.raises(RuntimeError, match=f"{failing} failed"):
        sync.sync(tensors, 0)
    assert transfer.calls[1:] == calls
    transfer.failing = ""
    assert sync.sync(tensors, 0).version == 1


def test_both_failures_are_told_when_send_and_resume_raise():
    transfer = Transfer("send")
    sync = FiveMethodSync(transfer)
    sync.connect(1, 0)

    def resume():
        raise OSError("resume failed, too")

    transfer.resume = resume
    with pytest.raises(OSError, match="resume failed, too") as caught:
        sync.sync(tensors, 0)
    assert "send failed" in str(caught.value.__context__)


def test_counting_sync_counts():
    sync = CountingSync()
    sync.connect(1, 4)
    assert sync.sync(tensors, 0).version == 5
    assert sync.sync(tensors, 3).committed
    sync.close()


class Steps:
    """Stands for ``CoordinatedSync``; ``commits`` says what each transfer does."""

    def __init__(self, *commits):
        self.commits, self.version, self.calls, self.moved = list(commits), 0, [], False

    def connect(self, term, base_version):
        self.version = base_version
        self.calls.append(("connect", term, base_version))

    def pause(self):
        self.calls.append("pause")

    def transfer(self, named_tensors):
        self.calls.append(("transfer", [name for name, _ in named_tensors()], len(list(named_tensors()))))
        self.moved = self.commits.pop(0)
        self.version += self.moved
        return self.moved

    def resume(self):
        self.calls.append("resume")
        return SyncReport(self.version, self.moved, {})

    def close(self):
        self.calls.append("close")


def test_client_offers_the_coordinator_as_five_methods():
    steps = Steps(True, False, True)
    client = WeightTransferClient(steps, term=3, base_version=10)
    client.init_weight_transfer()
    client.pause()
    client.send_weights(tensors())
    client.resume()
    assert client.version == 11
    client.pause()
    with pytest.raises(SyncError, match="version 12 was not committed"):
        client.send_weights(tensors())
    client.resume()
    assert client.version == 11
    client.destroy()
    client.init_weight_transfer()
    assert steps.calls[0] == ("connect", 3, 10)
    assert steps.calls[2] == ("transfer", ["weight"], 1), "a one-shot iterator can be read more than once"
    assert steps.calls[-1] == ("connect", 4, 11), "a second init is a newer term that goes on counting"


def test_calls_before_connect_are_refused_and_close_is_safe():
    async def engines():
        return ()

    sync = CoordinatedSync(engines, tensors, lambda sequences: [], None, TransferSettings())
    sync.close()
    with pytest.raises(SyncError, match="not connected"):
        sync.sync(tensors, 0)


class OneOfTwoRanks:
    """``others`` is what the other rank says in every agreement."""

    size = 2

    def __init__(self, rank, others):
        self.rank, self.others, self.said = rank, others, []

    async def agree(self, ok, timeout_s):
        self.said.append(ok)
        return ok and self.others


@pytest.mark.parametrize(
    ("rank", "others", "error", "words"),
    [(0, True, EngineUnreachable, "nobody there"), (1, False, SyncError, "rank 0 found no engines")],
)
def test_when_rank_zero_finds_no_engine_every_rank_hears_of_it(monkeypatch, rank, others, error, words):
    async def engines():
        raise EngineUnreachable("nobody there")

    ranks = OneOfTwoRanks(rank, others)
    monkeypatch.setattr(weight_transfer, "make_ranks", lambda bridge, timeout_s: ranks)
    recorder = ListRecorder("trainer", clock=lambda: 0.0)
    sync = CoordinatedSync(engines, tensors, lambda sequences: [], recorder, TransferSettings())
    with pytest.raises(error, match=words):
        sync.connect(1, 0)
    assert ranks.said == [rank != 0]
    sync.close()


def test_the_canary_is_the_same_in_every_run_and_within_the_vocabulary():
    canary = fixed_canary(count=3, length=8, vocabulary=20, tolerance=0.01)
    assert canary == fixed_canary(count=3, length=8, vocabulary=20, tolerance=0.01)
    assert len(canary.sequences) == 3
    assert all(len(row) == 8 and max(row) < 20 for row in canary.sequences)
