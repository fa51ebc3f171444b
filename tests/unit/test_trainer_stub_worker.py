"""The trainer with a stub worker: what an injected worker and transfer may rely on."""

import pytest
from trainer_stub import ROWS, StubWorker, tiny_model

from grpo_lab.recorders import ListRecorder
from grpo_lab.trainer import AsyncGRPOConfig, AsyncGRPOTrainer


def config(tmp_path, **extra):
    values = {
        "output_dir": str(tmp_path / "out"),
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
        "save_strategy": "no",
        "max_steps": 3,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 8,
        "learning_rate": 1e-3,
        "logging_steps": 1,
    } | extra
    return AsyncGRPOConfig(**values)


def trainer(tmp_path, worker=None, model=None, **extra):
    keys = ("weight_transfer", "callbacks", "make_weight_sync", "make_worker")
    injected = {key: extra.pop(key) for key in keys if key in extra}
    return AsyncGRPOTrainer(
        model or tiny_model(),
        lambda **columns: [0.0] * len(columns["completions"]),
        config(tmp_path, **extra),
        ROWS,
        rollout_worker=worker,
        recorder=ListRecorder("trainer", clock=lambda: 0.0),
        **injected,
    )


def events(one, kind):
    return [record.event for record in one.recorder.records if record.event.kind == kind]


def test_a_worker_without_weight_transfer_trains_and_counts_versions(tmp_path):
    worker = StubWorker()
    one = trainer(tmp_path, worker)
    output = one.train()
    assert output.global_step == 3
    assert one.version == 3
    assert worker.calls == ["version 1", "start", "version 2", "version 3", "stop"]
    assert [step.optimizer_step for step in events(one, "optimizer_step_applied")] == [0, 1, 2]
    assert [group.version for group in events(one, "group_consumed")] == [1, 1, 2, 2, 3, 3]
    assert all(step.changed for step in events(one, "optimizer_step_applied"))
