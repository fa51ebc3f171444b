"""One rank of a training run, started with torchrun's variables: ``trainer_rank.py FOLDER MODE``."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from trainer_stub import ROWS, OneSampleFactory, StubFactory, config, events, tiny_model, zero_reward

from grpo_lab.recorders import ListRecorder
from grpo_lab.trainer import AsyncGRPOTrainer
from grpo_lab.trainer.protocols import SyncOutcome


class CollectiveSync:
    """Every rank must take part in every call, in one order, as in a gather of sharded weights."""

    def __init__(self):
        self.log = []
        self.version = 0

    def connect(self, term, base_version):
        self.version = base_version
        dist.barrier()
        self.log.append(("connect", term))

    def sync(self, named_tensors, optimizer_step):
        for name, tensor in named_tensors():
            mine = tensor.double().sum()
            both = mine.clone()
            dist.all_reduce(both)
            assert torch.allclose(both, 2 * mine), f"{name} differs between the ranks"
        self.version += 1
        self.log.append(("sync", optimizer_step))
        return SyncOutcome(self.version, committed=True)

    def close(self):
        self.log.append(("close",))


def main(folder: Path, mode: str) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    sync, factory = CollectiveSync(), StubFactory()
    settings = {"per_device_train_batch_size": 4, "token_budget": 16, "correction": "tis"}
    settings |= {"save_strategy": "steps", "save_steps": 2, "ddp_timeout": 60, "starvation_timeout": 1.0}
    if mode == "starve":
        factory = lambda start: StarvingFactory()  # noqa: E731
    args = config(folder, **settings)
    trainer = AsyncGRPOTrainer(
        tiny_model(),
        zero_reward,
        args,
        ROWS,
        recorder=ListRecorder(f"trainer-r{rank}", clock=lambda: 0.0),
        make_worker=factory,
        make_weight_sync=lambda: sync,
    )
    error = ""
    try:
        if mode == "resume":
            trainer.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-2"))
        else:
            trainer.train()
        if mode == "fresh":  # a second term, in whose steps one rank has nothing to do
            trainer._make_worker = OneSampleFactory()
            trainer.args.output_dir = str(folder / "second")
            trainer.train()
    except Exception as failure:  # the test reads it
        error = f"{type(failure).__name__}: {failure}"
    answer = {
        "error": error,
        "sync": sync.log,
        "losses": [one.loss for one in events(trainer, "optimizer_step_applied")],
        "passes": [[one.optimizer_step, one.tokens] for one in events(trainer, "micro_batch_began")],
        "term": trainer.term.term,
        "workers": len(getattr(factory, "workers", [])),
        "weights": {name: one.tolist() for name, one in trainer.model.named_parameters() if "norm" in name},
    }
    (folder / f"{mode}-{rank}.json").write_text(json.dumps(answer))
    if dist.is_initialized():
        dist.destroy_process_group()


class StarvingFactory:
    """A worker that brings nothing."""

    def __init__(self):
        self.rollout_buffer = self

    def get(self, block=True, timeout=None):
        import queue
        import time

        time.sleep(min(timeout or 0, 0.2))
        raise queue.Empty

    def start(self):
        """Nothing to start."""

    def stop(self):
        """Nothing to stop."""

    def update_model_version(self, version):
        """Nobody to tell."""


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    # Not over Python's own end: sometimes it meets an abort there ("terminate called without an active
    # exception"), of which torch's gloo threads are suspected. All is written by now.
    sys.stdout.flush()
    os._exit(0)
