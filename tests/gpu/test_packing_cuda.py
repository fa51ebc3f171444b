"""The CUDA packer on a GPU, against the CPU packer. Without a GPU every test is skipped, saying why."""

import pytest
import torch

from grpo_lab.errors import BucketCorrupt, PackingError
from grpo_lab.packing import BucketPlan, Packer
from grpo_lab.packing import cuda as cuda_packer

reason = cuda_packer.unavailable()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))


def model():
    torch.manual_seed(0)
    return {
        "plain": torch.randn(1000, 333),
        "transposed": torch.randn(370, 530).t(),
        "permuted": torch.randn(3, 40, 5, 7).permute(2, 0, 3, 1),
        "sliced": torch.randn(400, 400)[1:390:2, 3:300:3],
        "shifted": torch.randn(50_001)[1:],
        "expanded": torch.randn(1, 9).expand(30, 9),
        "scalar": torch.randn(()),
        "empty": torch.zeros(0, 5),
        "odd": torch.arange(7, dtype=torch.uint8),
        "half": torch.randn(129).half(),
        "brain": torch.randn(65, 3).bfloat16(),
        "long": torch.arange(11) << 40,
        "complex": torch.randn(5, 4, dtype=torch.complex128).t(),
        "big": torch.randn(3_000_000),
        **{f"tiny{i}": torch.randn(i % 50) for i in range(500)},
    }


def on_gpu(tensors):
    """Copies with the same strides."""
    moved = {}
    for name, tensor in tensors.items():
        home = torch.zeros(
            max(1, tensor.untyped_storage().nbytes() // tensor.element_size()), dtype=tensor.dtype
        )
        home = home.cuda()
        view = home.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        if 0 in tensor.stride():
            view = tensor[:1].cuda().expand(tensor.shape)
        else:
            view.copy_(tensor)
        moved[name] = view
    return moved


@pytest.mark.parametrize("wire", [None, "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("bucket_bytes", [70_000, 1 << 20, 64 << 20])
def test_bytes_and_hash_are_those_of_the_cpu(wire, bucket_bytes):
    tensors = model()
    plan = BucketPlan.build(tensors, wire_dtype=wire, bucket_bytes=bucket_bytes)
    cpu, gpu = Packer(plan), cuda_packer.CudaPacker(plan)
    moved = on_gpu(tensors)
    cpu.bind(tensors)
    gpu.bind(moved)
    unpacker = cuda_packer.CudaUnpacker(plan)
    into = {name: torch.zeros(t.shape, dtype=t.dtype, device="cuda") for name, t in tensors.items()}
    for index in range(plan.num_buckets):
        expected, found = cpu.pack(index), gpu.pack(index)
        assert found.hash64() == expected.hash64
        assert found.memory.cpu().numpy().tobytes() == bytes(expected.memory)
        unpacker.verify(index, found.memory, expected.hash64)
        unpacker.unpack(index, found.memory, into)
    torch.cuda.synchronize()
    for name, tensor in tensors.items():
        cast = wire is not None and tensor.dtype in (torch.float32, torch.float16, torch.bfloat16)
        want = tensor.to(getattr(torch, wire)).to(tensor.dtype) if cast else tensor
        assert torch.equal(into[name].cpu(), want), name


def test_pack_is_ordered_after_its_producer():
    weight = torch.zeros(50_000_000, device="cuda")
    plan = BucketPlan.build({"w": weight}, bucket_bytes=1 << 28)
    packer = cuda_packer.CudaPacker(plan)
    packer.bind({"w": weight})
    for value in range(1, 20):
        weight.fill_(value)
        bucket = packer.pack(0)
        bucket.event.synchronize()
        assert (bucket.memory.view(torch.float32) == value).all()


def test_a_flipped_bit_is_found_and_repeated_packs_take_no_memory():
    weight = torch.randn(1_000_000, device="cuda")
    plan = BucketPlan.build({"w": weight})
    packer, unpacker = cuda_packer.CudaPacker(plan), cuda_packer.CudaUnpacker(plan)
    packer.bind({"w": weight})
    bucket = packer.pack(0)
    expected = bucket.hash64()
    bucket.memory[12345] ^= 1
    with pytest.raises(BucketCorrupt, match="bucket 0: expected hash"):
        unpacker.verify(0, bucket.memory, expected)
    packer.pack(0).event.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(40):
        packer.pack(0).event.synchronize()
    assert torch.cuda.max_memory_allocated() == before


def test_moved_memory_is_noticed():
    weight = torch.nn.Parameter(torch.zeros(20_000, device="cuda"))
    packer = cuda_packer.CudaPacker(BucketPlan.build({"w": weight}))
    packer.bind({"w": weight})
    packer.pack(0)
    weight.data = torch.full((40_000,), 3.0, device="cuda")[::2]
    bucket = packer.pack(0)
    bucket.event.synchronize()
    assert (bucket.memory.view(torch.float32) == 3).all()


def test_host_tensors_are_refused():
    plan = BucketPlan.build({"w": torch.zeros(4)})
    with pytest.raises(PackingError, match="'w' is on cpu"):
        cuda_packer.CudaPacker(plan).bind({"w": torch.zeros(4)})
