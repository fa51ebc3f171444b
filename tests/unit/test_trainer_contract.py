"""What an injected worker and an injected weight transfer may rely on, in every kind of run."""

import queue

import pytest
import torch
from trainer_stub import StubFactory, StubWorker, events, make_trainer, tiny_model
from transformers import TrainerCallback

from grpo_lab.errors import ConfigError, ModelError, SyncError, WorkerDied, WorkerStalled
from grpo_lab.trainer.callbacks import (
    StepIntervalCallback,
    _InitialWeightSyncCallback,
    _StartRolloutWorkerCallback,
)
from grpo_lab.trainer.protocols import SyncOutcome
from grpo_lab.types import DroppedGroup


class StubTransfer:
    """Keeps a log, shared with the worker's, and what was sent."""

    def __init__(self, log, fail=()):
        self.log = log
        self.fail = fail
        self.sent = []

    def _call(self, name):
        self.log.append(name)
        if name in self.fail:
            raise RuntimeError(f"{name} failed")

    def init_weight_transfer(self):
        self._call("init")

    def pause(self):
        self._call("pause")

    def send_weights(self, iterator):
        self.sent.append({name: tensor.clone() for name, tensor in iterator})
        self._call("send")

    def resume(self):
        self._call("resume")

    def destroy(self):
        self._call("destroy")


class StubSync:
    """A weight sync whose outcomes are given; True commits."""

    def __init__(self, outcomes=(), fail_at=None):
        self.outcomes = list(outcomes)
        self.log = []
        self.version = 0
        self.fail_at = fail_at

    def connect(self, term, base_version):
        self.log.append(("connect", term, base_version))
        self.version = base_version

    def sync(self, named_tensors, optimizer_step):
        if self.fail_at == len(self.log):
            raise SyncError("too few engines")
        committed = self.outcomes.pop(0) if self.outcomes else True
        self.version += committed
        self.log.append(("sync", optimizer_step, self.version))
        return SyncOutcome(self.version, committed, total_s=0.25)

    def close(self):
        self.log.append(("close",))


class At(TrainerCallback):
    """Does something after a step, or raises it."""

    def __init__(self, step, action):
        self.step = step
        self.action = action

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            if isinstance(self.action, BaseException):
                raise self.action
            self.action(control)


def stop_training(control):
    control.should_training_stop = True


SYNC = ["pause", "send", "resume"]


def test_a_worker_without_weight_transfer_trains_and_counts_versions(tmp_path):
    worker = StubWorker()
    trainer = make_trainer(tmp_path, worker)
    assert trainer.train().global_step == 3
    assert trainer.version == 3
    assert worker.calls == ["version 1", "start", "version 2", "version 3", "stop"]
    applied = events(trainer, "optimizer_step_applied")
    assert [step.optimizer_step for step in applied] == [0, 1, 2]
    assert all(step.changed and step.grad_norm > 0 for step in applied)
    assert [group.version for group in events(trainer, "group_consumed")] == [1, 1, 2, 2, 3, 3]
    assert [event.version for event in events(trainer, "version_announced")] == [2, 3]


def test_callbacks_come_in_the_order_of_the_protocol_and_before_the_users(tmp_path):
    mine = At(99, stop_training)
    trainer = make_trainer(tmp_path, StubWorker(), callbacks=[mine])
    kinds = [_InitialWeightSyncCallback, _StartRolloutWorkerCallback, StepIntervalCallback]
    callbacks = trainer.callback_handler.callbacks
    places = [next(i for i, one in enumerate(callbacks) if type(one) is kind) for kind in kinds]
    assert places == sorted(places)
    assert places[-1] < callbacks.index(mine)


def test_with_an_injected_transfer_sync_comes_before_start_and_stop_before_destroy(tmp_path):
    worker = StubWorker()
    transfer = StubTransfer(worker.calls)
    model = tiny_model()
    first = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer = make_trainer(tmp_path, worker, model=model, weight_transfer=transfer, max_steps=2)
    trainer.train()
    assert worker.calls == [
        "init", *SYNC, "version 1", "start", *SYNC, "version 2", "stop", "destroy",
    ]  # fmt: skip
    assert all(torch.equal(transfer.sent[0][name], tensor) for name, tensor in first.items())
    assert not torch.equal(transfer.sent[0]["model.norm.weight"], transfer.sent[1]["model.norm.weight"])
    tied = transfer.sent[1]
    assert torch.equal(tied["lm_head.weight"], tied["model.embed_tokens.weight"])


def test_a_second_train_is_a_new_term_that_syncs_and_starts_again(tmp_path):
    factory, syncs = StubFactory(), []

    def make_sync():
        syncs.append(StubSync())
        return syncs[-1]

    trainer = make_trainer(tmp_path, make_worker=factory, make_weight_sync=make_sync, max_steps=2)
    trainer.train()
    trainer.train()
    assert syncs[0].log == [("connect", 1, 0), ("sync", 0, 1), ("sync", 1, 2), ("close",)]
    assert syncs[1].log == [("connect", 2, 2), ("sync", 2, 3), ("sync", 3, 4), ("close",)]
    assert [worker.calls for worker in factory.workers] == [["start", f"version {v}", "stop"] for v in (2, 4)]
    assert factory.indices == list(range(8)), "no prompt skipped, none twice"
    began = events(trainer, "term_began")
    assert [(one.term, one.base_version, one.optimizer_step) for one in began] == [(1, 0, 0), (2, 2, 2)]
    assert [step.optimizer_step for step in events(trainer, "optimizer_step_applied")] == [0, 1, 2, 3]


def test_an_injected_worker_is_started_again_by_a_second_train(tmp_path):
    worker = StubWorker()
    trainer = make_trainer(tmp_path, worker, max_steps=1)
    trainer.train()
    worker.done = trainer.term.cursor
    trainer.train()
    assert worker.calls == ["version 1", "start", "stop", "version 2", "start", "stop"]


@pytest.mark.parametrize("final_sync", [True, False])
def test_the_last_step_is_synced_only_when_asked(tmp_path, final_sync):
    sync = StubSync()
    trainer = make_trainer(
        tmp_path, StubWorker(), make_weight_sync=lambda: sync, max_steps=2, final_sync=final_sync
    )
    trainer.train()
    steps = [entry[1] for entry in sync.log if entry[0] == "sync"]
    assert steps == ([0, 1, 2] if final_sync else [0, 1])
    assert sync.log[-1] == ("close",)


def test_no_final_sync_after_a_failure(tmp_path):
    sync = StubSync()
    trainer = make_trainer(
        tmp_path,
        StubWorker(),
        make_weight_sync=lambda: sync,
        final_sync=True,
        callbacks=[At(2, RuntimeError("mine"))],
    )
    with pytest.raises(RuntimeError, match="mine"):
        trainer.train()
    assert [entry[0] for entry in sync.log] == ["connect", "sync", "sync", "sync", "close"]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_sync_interval_and_staleness_in_both_units(tmp_path, steps):
    sync = StubSync()
    trainer = make_trainer(
        tmp_path, StubWorker(), make_weight_sync=lambda: sync, max_steps=6, weight_sync_steps=steps
    )
    trainer.train()
    assert [entry[1] for entry in sync.log if entry[0] == "sync"] == list(range(0, 6, steps))
    for group in events(trainer, "group_consumed"):
        assert group.version == group.optimizer_step // steps + 1
        assert group.optimizer_step_first == (group.versions_first[0] - 1) * steps


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_what_runs_is_stopped_on_every_path(tmp_path, error):
    worker = StubWorker()
    transfer = StubTransfer(worker.calls)
    trainer = make_trainer(tmp_path, worker, weight_transfer=transfer, callbacks=[At(1, error)])
    with pytest.raises(type(error)):
        trainer.train()
    assert worker.calls[-2:] == ["stop", "destroy"]


class BadStop(StubWorker):
    def stop(self):
        super().stop()
        raise ValueError("stop failed")


def test_stop_and_destroy_are_both_attempted_and_the_first_error_wins(tmp_path):
    worker = BadStop()
    transfer = StubTransfer(worker.calls, fail=("destroy",))
    trainer = make_trainer(tmp_path, worker, weight_transfer=transfer, max_steps=1)
    with pytest.raises(ValueError, match="stop failed") as caught:
        trainer.train()
    assert worker.calls[-2:] == ["stop", "destroy"]
    assert any("destroy failed" in note for note in caught.value.__notes__)


def test_an_error_of_training_wins_over_those_of_the_end(tmp_path):
    worker = BadStop()
    transfer = StubTransfer(worker.calls, fail=("destroy",))
    mine = RuntimeError("mine")
    trainer = make_trainer(tmp_path, worker, weight_transfer=transfer, callbacks=[At(1, mine)])
    with pytest.raises(RuntimeError, match="mine") as caught:
        trainer.train()
    assert len(caught.value.__notes__) == 2


@pytest.mark.parametrize("failing", ["init", "pause", "send", "resume"])
def test_a_worker_never_starts_when_the_initial_sync_failed(tmp_path, failing):
    worker = StubWorker()
    transfer = StubTransfer(worker.calls, fail=(failing,))
    trainer = make_trainer(tmp_path, worker, weight_transfer=transfer)
    with pytest.raises(RuntimeError, match=f"{failing} failed"):
        trainer.train()
    assert "start" not in worker.calls
    assert worker.calls[-1] == "destroy"
    assert trainer.version == 0
    if failing == "send":
        assert "resume" in worker.calls


def test_a_sync_that_commits_nothing_is_repeated_at_once(tmp_path):
    sync = StubSync([True, False, False, True])
    worker = StubWorker()
    trainer = make_trainer(tmp_path, worker, make_weight_sync=lambda: sync, max_steps=2)
    trainer.train()
    assert sync.log[1:-1] == [("sync", 0, 1), ("sync", 1, 1), ("sync", 1, 1), ("sync", 1, 2)]
    assert worker.calls == ["version 1", "start", "version 2", "stop"]


class FencingSync:
    """Loses an engine in its first sync and another one in its third."""

    def __init__(self):
        self.version = 0

    def connect(self, term, base_version): ...

    def sync(self, named_tensors, optimizer_step):
        self.version += 1
        fenced = ("engine-1",) if self.version < 3 else ("engine-1", "engine-2")
        return SyncOutcome(self.version, committed=True, fenced=fenced)

    def close(self): ...


def test_a_worker_that_wants_to_know_is_told_who_is_out_of_service_before_the_version(tmp_path):
    class Worker(StubWorker):
        def fence_engines(self, names):
            self.calls.append(f"fenced {' '.join(names)}")

    starts, worker = [], Worker(term=1)
    trainer = make_trainer(
        tmp_path,
        make_weight_sync=FencingSync,
        make_worker=lambda start: starts.append(start) or worker,
        max_steps=3,
    )
    trainer.train()
    assert starts[0].fenced == ("engine-1",)
    assert worker.calls == [
        "start",
        "fenced engine-1",
        "version 2",
        "fenced engine-1 engine-2",
        "version 3",
        "stop",
    ]


def test_a_worker_of_four_methods_hears_of_versions_only(tmp_path):
    worker = StubWorker()
    make_trainer(tmp_path, worker, make_weight_sync=FencingSync, max_steps=3).train()
    assert worker.calls == ["version 1", "start", "version 2", "version 3", "stop"]


def test_the_final_sync_does_not_depend_on_how_stopping_went_on_one_rank(tmp_path):
    class Worker(StubWorker):
        def stop(self):
            super().stop()
            raise RuntimeError("stop failed")

    worker = Worker()
    transfer = StubTransfer(worker.calls)
    trainer = make_trainer(tmp_path, worker, weight_transfer=transfer, max_steps=2, final_sync=True)
    with pytest.raises(RuntimeError, match="stop failed"):
        trainer.train()
    assert worker.calls[-5:] == ["stop", "pause", "send", "resume", "destroy"]


def test_a_sync_that_never_commits_ends_the_run(tmp_path):
    sync = StubSync([True] + [False] * 9)
    trainer = make_trainer(tmp_path, StubWorker(), make_weight_sync=lambda: sync)
    with pytest.raises(SyncError, match="3 weight syncs in a row committed no version after 1"):
        trainer.train()
    assert trainer.version == 1
    assert sync.log[-1] == ("close",)


class Never:
    def __init__(self, error=None):
        self.error = error

    def get(self, block=True, timeout=None):
        if self.error:
            raise self.error
        try:
            return queue.Queue().get(block, timeout)
        except queue.Empty:
            raise


def test_a_trainer_that_starves_says_so_and_gives_up(tmp_path):
    worker = StubWorker()
    worker.rollout_buffer = Never()
    trainer = make_trainer(tmp_path, worker, starvation_timeout=0.2)
    with pytest.raises(WorkerStalled, match=r"step 0 has 0 of 2 groups.*within 0\.2 s"):
        trainer.train()
    starved = events(trainer, "trainer_starved")
    assert [(one.have_groups, one.need_groups) for one in starved] == [(0, 2)]
    assert worker.calls[-1] == "stop"


def test_a_worker_that_died_ends_the_run_at_once(tmp_path):
    worker = StubWorker()
    worker.rollout_buffer = Never(WorkerDied("killed by SIGKILL"))
    with pytest.raises(WorkerDied, match="SIGKILL"):
        make_trainer(tmp_path, worker).train()
    assert worker.calls[-1] == "stop"


class LossyBuffer:
    """Every other item is a group that was lost, and then nothing but lost groups."""

    def __init__(self, worker, only_lost_after):
        self.worker = worker
        self.left = only_lost_after
        self.count = 0

    def get(self, block=True, timeout=None):
        if not self.worker.running:
            raise queue.Empty
        group = self.worker.make_group()
        self.count += 1
        if self.count % 2 and self.count < self.left:
            return group
        return DroppedGroup(
            group.group_id, group.number, group.prompt_index, group.term, ("s",), "request_refused", "400"
        )


def test_lost_groups_cost_themselves_only(tmp_path):
    worker = StubWorker()
    worker.rollout_buffer = LossyBuffer(worker, only_lost_after=10**6)
    trainer = make_trainer(tmp_path, worker, callbacks=[At(3, stop_training)])
    trainer.train()
    assert [group.prompt_index for group in events(trainer, "group_consumed")] == [0, 2, 4, 6, 8, 10]
    assert trainer.term.cursor.low_water == 11


def test_nothing_but_lost_groups_is_no_progress(tmp_path):
    worker = StubWorker()
    worker.rollout_buffer = LossyBuffer(worker, only_lost_after=6)
    with pytest.raises(WorkerStalled):
        make_trainer(tmp_path, worker, starvation_timeout=0.2).train()


def test_left_over_groups_are_dropped_and_their_prompts_come_again(tmp_path):
    class Eager(StubWorker):
        def stop(self):
            super().stop()
            self.rollout_buffer = queue.Queue()
            self.rollout_buffer.put(self.make_group())

    class EagerFactory(StubFactory):
        def __call__(self, start):
            worker = Eager(done=start.cursor, term=start.term)
            self.workers.append(worker)
            worker.version = start.version
            return worker

    factory = EagerFactory()
    trainer = make_trainer(tmp_path, make_worker=factory, max_steps=1)
    trainer.train()
    dropped = events(trainer, "group_dropped")
    assert [(one.prompt_index, one.reason) for one in dropped] == [(2, "shutdown")]
    trainer.train()
    assert factory.workers[1].indices[:1] == [2]


def test_groups_of_an_older_term_are_not_trained_on(tmp_path):
    class WithLeftover(StubWorker):
        """Its queue still holds a group of the term before."""

        def make_group(self):
            group = super().make_group()
            if self.term == 1 and group.number == 0:
                self.term, self.number = 2, 0
            return group

    factory = StubFactory()
    trainer = make_trainer(tmp_path, make_worker=factory, max_steps=1)
    trainer.train()

    def make(start):
        worker = WithLeftover(done=start.cursor, term=1)
        worker.version = start.version
        return worker

    trainer._make_worker = make
    trainer.train()
    assert [one.reason for one in events(trainer, "group_dropped")] == ["term_ended"]
    assert [one.term for one in events(trainer, "group_consumed")] == [1, 1, 2, 2]


def test_both_ways_to_give_a_worker_exclude_each_other(tmp_path):
    with pytest.raises(ConfigError, match="make_worker"):
        make_trainer(tmp_path, StubWorker(), make_worker=StubFactory())


def test_models_that_cannot_be_used_say_why(tmp_path):
    with pytest.raises(ModelError, match="there is no model at"):
        make_trainer(tmp_path, StubWorker(), model=str(tmp_path / "nothing"))
    with pytest.raises(ModelError, match="no transformers model"):
        make_trainer(tmp_path, StubWorker(), model=torch.nn.Linear(2, 2))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="could be loaded"):
        make_trainer(tmp_path, StubWorker(), model=str(tmp_path / "empty"))
