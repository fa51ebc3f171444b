"""One consistent cut: what a resumed run continues, and what no run resumes from."""

import dataclasses
import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_trainer_contract import At, StubSync, stop_training
from trainer_stub import StubFactory, StubWorker, events, make_trainer, tiny_model

from grpo_lab.errors import UserError
from grpo_lab.trainer.checkpoint import (
    STATE_FILE,
    CheckpointState,
    begin_term,
    load_state,
    newest_complete,
    save_state,
    unmark,
    weights_hash,
)
from grpo_lab.types import CursorState

STATE = CheckpointState(2, 7, 30, CursorState(60, (62, 65)), "abc")


def test_a_state_comes_back_as_it_was(tmp_path):
    save_state(tmp_path, STATE)
    assert load_state(tmp_path) == STATE
    assert os.listdir(tmp_path) == [STATE_FILE]
    unmark(tmp_path)
    unmark(tmp_path)
    with pytest.raises(UserError, match="was not finished"):
        load_state(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"format": 1}', '{"format": 1, "term": 1, "cursor": {"low_water": "x"}}']
)
def test_damaged_states_are_named(tmp_path, text):
    (tmp_path / STATE_FILE).write_text(text)
    with pytest.raises(UserError, match=STATE_FILE):
        load_state(tmp_path)


def test_a_newer_format_is_refused(tmp_path):
    save_state(tmp_path, STATE)
    row = json.loads((tmp_path / STATE_FILE).read_text()) | {"format": 2}
    (tmp_path / STATE_FILE).write_text(json.dumps(row))
    with pytest.raises(UserError, match="another format"):
        load_state(tmp_path)


def test_the_newest_complete_checkpoint_is_found_by_its_state(tmp_path):
    """Steps in folder names begin again in a new term."""
    with pytest.raises(UserError, match="no complete checkpoint"):
        newest_complete(tmp_path / "nothing")
    for name, term, step in (("9", 1, 9), ("10", 1, 10), ("3", 2, 13), ("1", 2, 11)):
        (tmp_path / f"checkpoint-{name}").mkdir()
        save_state(
            tmp_path / f"checkpoint-{name}", dataclasses.replace(STATE, term=term, optimizer_step=step)
        )
    assert newest_complete(tmp_path).name == "checkpoint-3"
    unmark(tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-1" / STATE_FILE).write_text("{")
    assert newest_complete(tmp_path).name == "checkpoint-10"


def test_terms_rise_in_a_folder_even_without_a_checkpoint(tmp_path):
    assert begin_term(tmp_path / "new", 1) == 1
    assert begin_term(tmp_path / "new", 1) == 2
    assert begin_term(tmp_path / "new", 9) == 9
    (tmp_path / "new" / "grpo_lab_term").write_text("x")
    with pytest.raises(UserError, match="damaged"):
        begin_term(tmp_path / "new", 1)


def test_the_hash_sees_every_bit_and_name():
    first, again, other = tiny_model(seed=0), tiny_model(seed=0), tiny_model(seed=1)
    assert weights_hash(first) == weights_hash(again) != weights_hash(other)
    with torch.no_grad():
        weight = again.model.norm.weight
        weight[0] = torch.nextafter(weight[0], torch.tensor(2.0))
    assert weights_hash(first) != weights_hash(again)


SAVING = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "linear"}


def run(tmp_path, resume=None, stop_at=None, sync=None, **extra):
    """A trainer in a new process, as it were: nothing is shared but the folder."""
    factory = StubFactory()
    trainer = make_trainer(
        tmp_path,
        make_worker=factory,
        make_weight_sync=lambda: sync or StubSync(),
        callbacks=[At(stop_at, stop_training)],
        **(SAVING | extra),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, factory


def losses(*trainers):
    return [step.loss for one in trainers for step in events(one, "optimizer_step_applied")]


@pytest.mark.parametrize("correction", ["none", "tis"])
def test_a_resumed_run_equals_one_that_never_stopped(tmp_path, correction):
    straight, whole = run(tmp_path / "straight", correction=correction)
    first, before = run(tmp_path / "two", stop_at=3, correction=correction)
    sync = StubSync()
    second, after = run(tmp_path / "two", resume=True, sync=sync, correction=correction)
    assert losses(first, second) == pytest.approx(losses(straight), abs=1e-6)
    assert before.indices + after.indices == whole.indices == list(range(12))
    for ours, theirs in zip(second.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    assert second.state.global_step == 6
    rates = [
        log["learning_rate"] for one in (first, second) for log in one.state.log_history if "loss" in log
    ]
    assert rates[-3:] == [log["learning_rate"] for log in straight.state.log_history if "loss" in log][-3:]
    assert second.state.epoch == straight.state.epoch


def test_a_resumed_run_is_a_new_term_and_publishes_the_next_version_before_the_worker_starts(tmp_path):
    first, _ = run(tmp_path, stop_at=3)
    (saved,) = events(first, "checkpoint_saved")
    assert (saved.term, saved.version, saved.optimizer_step, saved.prompt_low_water) == (1, 4, 3, 6)
    order, sync = [], StubSync()
    factory = StubFactory()

    def make_worker(start):
        order.extend([*sync.log, ("worker", start.term, start.version, start.cursor)])
        return factory(start)

    second = make_trainer(tmp_path, make_worker=make_worker, make_weight_sync=lambda: sync, **SAVING)
    published = []
    counted = sync.sync

    def copying(tensors, step):
        published.append({name: tensor.clone() for name, tensor in tensors()})
        return counted(tensors, step)

    sync.sync = copying
    second.train(resume_from_checkpoint=True)
    assert order == [("connect", 2, 4), ("sync", 3, 5), ("worker", 2, 5, CursorState(6, ()))]
    (began,) = events(second, "term_began")
    assert (began.term, began.base_version, began.optimizer_step) == (2, 4, 3)
    assert began.restored_weights_hash == saved.weights_hash
    kept = load_file(tmp_path / "out" / "checkpoint-3" / "model.safetensors")
    assert all(torch.equal(published[0][name], tensor) for name, tensor in kept.items())


def test_two_runs_that_resume_from_one_checkpoint_have_different_terms(tmp_path):
    run(tmp_path, stop_at=3)
    terms = []
    for _ in range(2):
        trainer, _ = run(tmp_path, resume=str(tmp_path / "out" / "checkpoint-3"), stop_at=4)
        terms.append(trainer.term.term)
    assert terms == [2, 3]


def test_lost_groups_and_applied_steps_are_done_in_the_cut(tmp_path):
    class Late(StubWorker):
        def make_group(self):
            group = super().make_group()
            if group.prompt_index == 2:
                for one in group.samples:
                    object.__setattr__(one, "version_first", -5)
            return group

    trainer = make_trainer(tmp_path, Late(), **SAVING, staleness_policy="drop")
    trainer.train()
    state = load_state(tmp_path / "out" / "checkpoint-6")
    assert state.cursor == CursorState(13, ()), "12 consumed, 1 dropped"
    assert state.optimizer_step == 6
    assert state.weights_hash == weights_hash(trainer.model)


def test_a_run_resumes_from_complete_checkpoints_only(tmp_path):
    run(tmp_path)
    unmark(tmp_path / "out" / "checkpoint-6")
    _trainer, factory = run(tmp_path, resume=True)
    assert factory.indices == list(range(6, 12)), "from checkpoint-3"
    unmark(tmp_path / "out" / "checkpoint-3")
    with pytest.raises(UserError, match="checkpoint-3 has no grpo_lab_state"):
        run(tmp_path, resume=str(tmp_path / "out" / "checkpoint-3"))
    with pytest.raises(UserError, match="there is no checkpoint at"):
        run(tmp_path, resume=str(tmp_path / "nothing"))


def test_a_checkpoint_with_other_weights_than_its_mark_is_refused_before_anything_starts(tmp_path):
    run(tmp_path, stop_at=3)
    path = tmp_path / "out" / "checkpoint-3" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][0] += 1e-3
    save_file(tensors, path, metadata={"format": "pt"})
    sync = StubSync()
    with pytest.raises(UserError, match="checkpoint is damaged"):
        run(tmp_path, resume=True, sync=sync)
    assert sync.log == [("close",)]


def test_a_crash_while_saving_leaves_the_older_checkpoint_the_newest_complete_one(tmp_path, monkeypatch):
    def crash(*_):
        raise OSError("disk full")

    trainer = make_trainer(tmp_path, StubWorker(), **SAVING, save_total_limit=1)
    save = trainer._save_rng_state
    monkeypatch.setattr(
        trainer, "_save_rng_state", lambda path: crash() if path.endswith("-6") else save(path)
    )
    with pytest.raises(OSError, match="disk full"):
        trainer.train()
    assert newest_complete(tmp_path / "out").name == "checkpoint-3"


def test_old_checkpoints_go_when_the_new_one_is_complete(tmp_path):
    run(tmp_path, save_total_limit=1, save_steps=2)
    assert [one.name for one in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-6"]


def test_weights_only_are_never_resumed_from(tmp_path):
    run(tmp_path, save_only_model=True)
    with pytest.raises(UserError, match="no complete checkpoint"):
        run(tmp_path, resume=True)


def test_a_finished_run_that_is_resumed_trains_no_step(tmp_path):
    run(tmp_path)
    trainer, factory = run(tmp_path, resume=True)
    assert factory.indices == []
    assert trainer.state.global_step == 6


def test_intervals_of_a_resumed_run_count_from_where_it_began(tmp_path):
    run(tmp_path, stop_at=3, weight_sync_steps=2)
    sync = StubSync()
    trainer, _ = run(tmp_path, resume=True, sync=sync, weight_sync_steps=2)
    assert [entry[1] for entry in sync.log if entry[0] == "sync"] == [3, 5]
    assert all(group.version - group.versions_first[0] == 0 for group in events(trainer, "group_consumed"))


def test_a_resume_in_the_same_trainer_goes_back_to_the_cut(tmp_path):
    factory = StubFactory()
    trainer = make_trainer(tmp_path, make_worker=factory, make_weight_sync=StubSync, **SAVING)
    trainer.train()
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert factory.indices == [*range(12), *range(6, 12)]
    began = events(trainer, "term_began")[1]
    assert (began.term, began.base_version, began.optimizer_step) == (2, 4, 3)
