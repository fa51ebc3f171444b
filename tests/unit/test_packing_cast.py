"""Casts against torch's: every 16-bit and 8-bit code, and fp32 values around every rounding boundary."""

from itertools import product

import pytest
import torch

from grpo_lab.packing import BucketPlan, Packer, Unpacker, instruction_sets


def list_product(*axes):
    return list(product(*axes))


SMALL = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


def bits(tensor):
    """Bit patterns with NaN made canonical (torch's vectorised and scalar casts encode NaN differently)."""
    raw = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]).clone()
    raw[tensor.to(torch.float32).isnan()] = -1 if tensor.element_size() > 1 else 255
    return raw


def every_code(name):
    dtype = getattr(torch, name)
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)


def interesting_floats(name):
    """All values of the small dtype, the midpoints between them, and the fp32 neighbours of each."""
    values = every_code(name).to(torch.float32)
    finite = values[values.isfinite()].unique()
    points = torch.cat([finite, (finite[1:].double() + finite[:-1].double()).div(2).float()])
    around = points.view(torch.int32)
    spread = torch.cat([around, around + 1, around - 1]).view(torch.float32)
    extreme = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-45, 1e-38,
    3.4e38, -3.4e38,
                            464.0, 465.0, 479.9, 480.0, 61440.0, 65504.0, 65519.0, 65520.0])  # fmt: skip
    generator = torch.Generator().manual_seed(7)
    noise = torch.randint(-(2**31), 2**31 - 1, (100_000,), generator=generator).to(torch.int32)
    return torch.cat([spread, extreme, noise.view(torch.float32)])


def round_trip(source, wire, isa="auto", into=None):
    """(as packed, as unpacked)"""
    plan = BucketPlan.build({"x": source}, wire_dtype=wire, bucket_bytes=1 << 20)
    packer, unpacker = Packer(plan, isa=isa), Unpacker(plan, isa=isa)
    packer.bind({"x": source})
    out = torch.zeros_like(source) if into is None else into
    packed = []
    for index in range(plan.num_buckets):
        bucket = packer.pack(index)
        packed.append(
            torch.frombuffer(bytearray(bucket.memory), dtype=getattr(torch, plan.tensors[0].wire_dtype))
        )
        unpacker.unpack(index, bucket.memory, {"x": out})
    return torch.cat(packed), out


@pytest.mark.parametrize(("wire", "isa"), list_product(SMALL, instruction_sets()))
def test_fp32_rounds_as_torch_does(wire, isa):
    source = interesting_floats(wire)
    packed, out = round_trip(source, wire, isa)
    expected = source.to(getattr(torch, wire))
    assert torch.equal(bits(packed), bits(expected))
    assert torch.equal(bits(out), bits(expected.to(torch.float32)))


@pytest.mark.parametrize(("source", "wire"), list_product(["float16", "bfloat16"], ["float32", *SMALL]))
def test_between_small_floats(source, wire):
    values = every_code(source)
    packed, _ = round_trip(values, wire)
    assert torch.equal(bits(packed), bits(values.to(getattr(torch, wire))))


@pytest.mark.parametrize(("wire", "isa"), list_product(SMALL, instruction_sets()))
def test_widening_is_exact_for_every_code(wire, isa):
    values = every_code(wire)
    into = torch.zeros(values.numel(), dtype=torch.float32)
    round_trip(values, None, isa, into)
    assert torch.equal(bits(into), bits(values.to(torch.float32)))


def test_a_thread_that_flushes_denormals_gets_the_same_bits():
    source = interesting_floats("float16")
    expected = bits(source.to(torch.float16))
    assert torch.set_flush_denormal(True)
    try:
        packed, _ = round_trip(source, "float16")
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(bits(packed), expected)


def test_8_bit_floats_and_integers_are_never_cast():
    tensors = {
        "q": torch.zeros(4).to(torch.float8_e4m3fn),
        "i": torch.zeros(4, dtype=torch.int64),
        "d": torch.zeros(4).double(),
    }
    plan = BucketPlan.build(tensors, wire_dtype="bfloat16")
    assert [e.wire_dtype for e in plan.tensors] == ["float8_e4m3fn", "int64", "float64"]
