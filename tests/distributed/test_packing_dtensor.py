"""Sharded tensors of torch itself: two ranks, of which one packs and both take part in the gathers."""

import multiprocessing
import os
import sys

import pytest
import torch

pytest.importorskip("torch.distributed.tensor")
WAIT_S = 90


def _rank(rank, ranks, store, results):
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from grpo_lab.packing import BucketPlan, Packer
    from grpo_lab.packing.reference import pack_reference

    distributed.init_process_group(
        "gloo", store=distributed.FileStore(store, ranks), rank=rank, world_size=ranks
    )
    mesh = init_device_mesh("cpu", (ranks,))

    def weights(seed):
        generator = torch.Generator().manual_seed(seed)
        return {
            "rows": torch.randn(33, 20, generator=generator),  # uneven: 17 and 16 rows
            "columns": torch.randn(8, 30, generator=generator).t(),
            "whole": torch.randn(50, generator=generator),
            "plain": torch.randn(70, generator=generator),
            "large": torch.randn(900, generator=generator),  # of several buckets
        }

    places = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate(), "large": Shard(0)}
    tensors = {
        name: torch.nn.Parameter(distribute_tensor(t, mesh, [places[name]]) if name in places else t.clone())
        for name, t in weights(0).items()
    }
    for bucket_bytes in (1024, 1 << 20):
        plan = BucketPlan.build(tensors, wire_dtype="bfloat16", bucket_bytes=bucket_bytes)
        packer = Packer(plan)
        packer.bind(tensors)
        for seed in (1, 2):  # two syncs of one binding: the second must not see what the first gathered
            for name, value in weights(seed).items():
                local = distribute_tensor(value, mesh, [places[name]]).to_local() if name in places else value
                target = tensors[name].data
                (target.to_local() if name in places else target).copy_(local)
            if (
                rank == 0
            ):  # moves on one rank only: no reason for a collective that the other does not know of
                tensors["plain"].data = tensors["plain"].data.clone()
                packed = [bytes(packer.pack(index).memory) for index in range(plan.num_buckets)]
                results.put((bucket_bytes, seed, packed == pack_reference(plan, weights(seed))))
            else:
                for index in range(plan.num_buckets):
                    packer.gather(index)
    distributed.barrier()
    distributed.destroy_process_group()
    results.close()
    results.join_thread()
    os._exit(0)  # like trainer_rank.py, which says why


@pytest.mark.skipif(sys.platform == "win32", reason="gloo with a FileStore")
def test_dtensors_are_packed_whole_in_every_sync(tmp_path):
    ranks, context = 2, multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=_rank, args=(rank, ranks, str(tmp_path / "store"), results), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        found = [results.get(timeout=WAIT_S) for _ in range(4)]
        for process in processes:
            process.join(WAIT_S)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
            process.join(WAIT_S)
    assert found == [(size, seed, True) for size in (1024, 1 << 20) for seed in (1, 2)]
