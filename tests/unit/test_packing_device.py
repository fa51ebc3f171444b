"""The CUDA kernels' per-thread code, run on the CPU thread after thread, against the packer and torch."""

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lab.errors import PackingError
from grpo_lab.packing import BucketPlan, Packer, hash64
from grpo_lab.packing import cuda as cuda_packer
from grpo_lab.packing.device import PIECE, coalesced, piece_table
from grpo_lab.packing.native import extension
from grpo_lab.packing.reference import pack_reference, raw_bytes


def aligned(nbytes):
    """Writable bytes at a multiple of 16, as GPU memory is."""
    return torch.zeros(nbytes, dtype=torch.uint8).numpy()


def model(seed, sizes):
    torch.manual_seed(seed)
    tensors = {f"f{i}": torch.randn(n) for i, n in enumerate(sizes)}
    tensors |= {
        "t": torch.randn(37, 53).t(),
        "permuted": torch.randn(3, 4, 5, 6).permute(2, 0, 3, 1),
        "sliced": torch.randn(40, 40)[1:39:2, 3:30:3],
        "shifted": torch.randn(5001)[1:],
        "expanded": torch.randn(1, 7).expand(9, 7),
        "scalar": torch.randn(()),
        "half": torch.randn(333).half(),
        "bytes": torch.arange(77, dtype=torch.uint8),
        "long": torch.arange(41),
        "complex": torch.randn(6, 5, dtype=torch.complex128).t(),
        "fp8": torch.randn(99).to(torch.float8_e5m2),
    }
    return tensors


@given(
    sizes=st.lists(st.sampled_from([1, 7, 31, 1000, 20_000, 70_001]), max_size=5),
    wire=st.sampled_from([None, "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float32"]),
    bucket_bytes=st.sampled_from([200, 1024, 70_000, 1 << 20]),
    layout=st.sampled_from(["aligned", "vllm"]),
)
@settings(max_examples=40, deadline=None)
def test_kernels_pack_hash_and_unpack_as_the_cpu_does(sizes, wire, bucket_bytes, layout):
    tensors = model(len(sizes), sizes)
    if layout == "vllm":  # largest elements first, so that every one is aligned
        del tensors["scalar"]
        tensors = dict(sorted(tensors.items(), key=lambda kv: -kv[1].element_size()))
        wire = None
    plan = BucketPlan.build(tensors, wire_dtype=wire, bucket_bytes=bucket_bytes, layout=layout)
    packer = Packer(plan)
    packer.bind(tensors)
    into = {name: torch.zeros_like(t, memory_format=torch.contiguous_format) for name, t in tensors.items()}
    into["t"] = torch.zeros(37, 53).t()
    for index, expected in enumerate(pack_reference(plan, tensors)):
        memory = aligned(plan.bucket_nbytes(index))
        leaves = extension.emulate_device_pack(piece_table(plan, index, tensors).view("u1"), memory)
        assert memory.tobytes() == expected
        assert extension.root_hash(leaves, memory.nbytes) == packer.pack(index).hash64
        extension.emulate_device_unpack(piece_table(plan, index, into).view("u1"), memory)
    for name, tensor in tensors.items():
        cast = wire is not None and tensor.dtype in (torch.float32, torch.float16)
        expected = tensor.to(getattr(torch, wire)).to(tensor.dtype) if cast else tensor
        assert torch.equal(raw_bytes(into[name]), raw_bytes(expected)), name


@pytest.mark.parametrize(
    "length", [1, 16, 63, 64, 65, 240, 241, 256, 1023, 1024, 1025, 1087, 65535, 65536, 65537, 131_085]
)
def test_hash_of_every_tail(length):
    data = {
        "x": torch.randint(
            0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(length)
        )
    }
    plan = BucketPlan.build(data, bucket_bytes=max(length, 16))
    memory = aligned(length)
    leaves = extension.emulate_device_pack(piece_table(plan, 0, data).view("u1"), memory)
    assert extension.root_hash(leaves, length) == hash64(data["x"].numpy())


def test_coalescing_drops_and_merges_dimensions():
    x = torch.zeros(4, 1, 6, 8)
    assert coalesced(x) == ((), ())
    assert coalesced(x[:, :, ::2]) == ((12, 8), (16, 1))
    assert coalesced(x.transpose(2, 3)) == ((4, 8, 6), (48, 1, 8))
    assert PIECE.itemsize == 144


def test_too_many_strides_are_refused_by_name():
    tensor = torch.zeros([3] * 8)[tuple(slice(None, None, 2) for _ in range(8))]
    plan = BucketPlan.build({"odd": tensor})
    with pytest.raises(PackingError, match="'odd' has 8 separate strides"):
        piece_table(plan, 0, {"odd": tensor})


def test_without_a_gpu_the_reason_is_plain():
    reason = cuda_packer.unavailable()
    if reason is None:
        pytest.skip("this machine has a GPU: tests/gpu covers it")
    with pytest.raises(PackingError) as caught:
        cuda_packer.CudaPacker(BucketPlan.build({"x": torch.zeros(4)}))
    assert str(caught.value) == reason
    assert "GPU" in reason or "not built" in reason


def test_the_compiled_kernels_load_without_a_driver():
    try:
        kernels = cuda_packer.library()
    except PackingError as error:
        pytest.skip(str(error))
    assert kernels.grpo_cuda_device_count() >= 0
    assert isinstance(kernels.grpo_cuda_error(2), bytes)
    assert kernels.grpo_cuda_pack(None, 0, 0, None, None, None) == 0
    assert isinstance(kernels, ctypes.CDLL)
