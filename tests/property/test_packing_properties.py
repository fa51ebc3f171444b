"""For any tensors, dtypes, strides, layouts, bucket sizes and threads: what is unpacked is what was
packed.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from grpo_lab.errors import BucketCorrupt, PackingError
from grpo_lab.packing import BucketPlan, Packer, Unpacker, instruction_sets
from grpo_lab.packing.dtypes import CAST_SOURCES
from grpo_lab.packing.reference import pack_reference, raw_bytes, vllm_reference

DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int8, torch.uint8, torch.bool, torch.int64, torch.float64, torch.complex128,
]  # fmt: skip


@st.composite
def tensors(draw, max_dims=4):
    """Random bits under random strides: transposed, stepped, expanded, empty, scalar, sometimes large."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 7), max_size=max_dims))
    if shape and draw(st.integers(0, 4)) == 0:
        shape[draw(st.integers(0, len(shape) - 1))] = draw(st.integers(200, 3000))
    steps = [draw(st.integers(1, 3)) for _ in shape]
    order = draw(st.permutations(range(len(shape))))
    home = [shape[d] * steps[d] for d in order]
    count = 1
    for size in home:
        count *= size
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    raw = raw % 2 if dtype == torch.bool else raw
    tensor = raw.view(dtype).view(home) if home else raw.view(dtype).view(())
    for dim, d in enumerate(order):
        cut = slice(0, shape[d]) if draw(st.booleans()) else slice(None, None, steps[d])
        tensor = tensor[(slice(None),) * dim + (cut,)]
    tensor = tensor.permute([order.index(d) for d in range(len(shape))]) if shape else tensor
    if shape and draw(st.integers(0, 9)) == 0:
        tensor = tensor[:1].expand(draw(st.integers(0, 4)), *tensor.shape[1:]) if tensor.shape[0] else tensor
    return tensor


@st.composite
def models(draw):
    named = {f"t{i}": tensor for i, tensor in enumerate(draw(st.lists(tensors(), min_size=1, max_size=8)))}
    if draw(st.booleans()):
        named["tie"] = named[draw(st.sampled_from(sorted(named)))]
    return named


def same(a, b):
    """Bit for bit; a NaN of a cast float is any NaN."""
    if a.is_floating_point() and a.element_size() < 8:
        a, b = a.float(), b.float()
        return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0.5), b.nan_to_num(0.5))
    return torch.equal(raw_bytes(a), raw_bytes(b))


def build(model, **options):
    try:
        return BucketPlan.build(model, **options)
    except PackingError:
        assume(options["layout"] != "vllm")  # what vLLM cannot carry is another test's matter
        raise


def empty_like(tensor, layout):
    """A target to unpack into: contiguous, transposed, or every second element of more."""
    if layout == "transposed":
        return torch.zeros(tensor.shape[::-1], dtype=tensor.dtype).permute(
            tuple(reversed(range(tensor.dim())))
        )
    if layout == "stepped" and tensor.dim():
        return torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)[..., ::2]
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


OPTIONS = {
    "layout": st.sampled_from(["aligned", "vllm"]),
    "wire": st.sampled_from([None, "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]),
    "bucket_bytes": st.sampled_from([16, 100, 256, 1000, 4096, 70_000, 1 << 20]),
    "threads": st.integers(1, 3),
    "isa": st.sampled_from(instruction_sets()),
}


@given(model=models(), targets=st.sampled_from(["contiguous", "transposed", "stepped"]), **OPTIONS)
@settings(max_examples=150, deadline=None)
def test_unpack_inverts_pack(model, targets, layout, wire, bucket_bytes, threads, isa):
    plan = build(model, layout=layout, wire_dtype=wire, bucket_bytes=bucket_bytes)
    packer, unpacker = (
        Packer(plan, num_threads=threads, isa=isa),
        Unpacker(plan, num_threads=threads, isa=isa),
    )
    packer.bind(model)
    into = {name: empty_like(t, targets) for name, t in model.items()}
    for index in reversed(range(plan.num_buckets)):
        bucket = packer.pack(index)
        unpacker.verify(index, bucket.memory, bucket.hash64)
        unpacker.unpack(index, bucket.memory, into)
    for name, tensor in model.items():
        cast = wire is not None and str(tensor.dtype).removeprefix("torch.") in CAST_SOURCES
        expected = tensor.to(getattr(torch, wire)).to(tensor.dtype) if cast else tensor
        if cast:
            assert same(into[name], expected), name
        else:
            assert torch.equal(raw_bytes(into[name]), raw_bytes(expected)), name


@given(model=models(), exact=st.booleans(), **{k: v for k, v in OPTIONS.items() if k != "wire"})
@settings(max_examples=80, deadline=None)
def test_bytes_are_those_of_the_reference(model, exact, layout, bucket_bytes, threads, isa):
    if exact:  # of the first tensor, or of the first two: whether that fills a bucket is where layouts err
        first = [t.numel() * t.element_size() for t in model.values()][: 1 + len(model) % 2]
        bucket_bytes = max(sum(first), 16)
    plan = build(model, layout=layout, bucket_bytes=bucket_bytes)
    packer = Packer(plan, num_threads=threads, isa=isa)
    packer.bind(model)
    packed = [bytes(packer.pack(index).memory) for index in range(plan.num_buckets)]
    assert packed == pack_reference(plan, model)
    if layout == "vllm":
        assert packed == vllm_reference([model[e.name] for e in plan.tensors], bucket_bytes)


def vllm_views(packed, entries):
    """vLLM's packed consumer: cut by size, view as the dtype, view as the shape."""
    sizes = [e.nbytes for e in entries]
    parts = torch.frombuffer(bytearray(packed), dtype=torch.uint8).split(sizes)
    return [p.view(getattr(torch, e.wire_dtype)).view(*e.shape) for p, e in zip(parts, entries, strict=True)]


@given(model=st.lists(tensors(), min_size=1, max_size=6))
@settings(max_examples=80, deadline=None)
def test_vllm_layout_is_refused_exactly_where_the_consumer_fails(model):
    named = {f"t{i}": tensor.clone() for i, tensor in enumerate(model)}
    assume(any(t.numel() for t in named.values()))
    try:
        plan = BucketPlan.build(named, layout="vllm")
    except PackingError:
        aligned = BucketPlan.build(named)
        total = sum(t.numel() * t.element_size() for t in named.values())
        with pytest.raises((RuntimeError, TypeError)):
            vllm_views(bytes(total), aligned.tensors)
        return
    packer = Packer(plan)
    packer.bind(named)
    for view, tensor in zip(vllm_views(packer.pack(0).memory, plan.tensors), named.values(), strict=True):
        assert torch.equal(raw_bytes(view), raw_bytes(tensor))


@given(model=models(), data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_damaged_bucket_is_always_found(model, data):
    if data.draw(st.booleans()):  # several leaves of the hash, of 64 KiB each
        model = {"large": torch.arange(data.draw(st.integers(17_000, 50_000)), dtype=torch.float32)} | model
        plan = BucketPlan.build(model, bucket_bytes=data.draw(st.sampled_from([70_000, 1 << 20])))
    else:
        plan = BucketPlan.build(model, bucket_bytes=data.draw(OPTIONS["bucket_bytes"]))
    assume(plan.num_buckets > 0)
    packer, unpacker = Packer(plan, slots=2), Unpacker(plan)
    packer.bind(model)
    index = data.draw(st.integers(0, plan.num_buckets - 1))
    bucket = packer.pack(index, 0)
    good = bytes(bucket.memory)
    kind = data.draw(st.sampled_from(["flip", "truncate", "extend", "missing", "swap"]))
    bad = bytearray(good)
    if kind == "flip":
        at = data.draw(st.integers(0, len(bad) - 1))
        bad[at if data.draw(st.booleans()) else -1 - at] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "truncate":
        del bad[data.draw(st.integers(0, len(bad) - 1)) :]
    elif kind == "extend":
        bad += bytes(data.draw(st.integers(1, 100)))
    elif kind == "missing":
        bad = bytearray()
    else:
        bad = bytearray(packer.pack(data.draw(st.integers(0, plan.num_buckets - 1)), 1).memory)
        assume(bad != good)
    with pytest.raises(BucketCorrupt, match=f"bucket {index}"):
        unpacker.verify(index, bad, bucket.hash64)


@given(model=models(), threads=st.integers(1, 2))
@settings(max_examples=15, deadline=None)
def test_concurrent_packs_do_not_interfere(model, threads):
    plan = BucketPlan.build(model, bucket_bytes=1000)
    expected = pack_reference(plan, model)

    def work() -> list[bytes]:
        packer = Packer(plan, num_threads=threads)
        packer.bind(model)
        return [bytes(packer.pack(index).memory) for index in range(plan.num_buckets)]

    with ThreadPoolExecutor(3) as workers:
        for done in [workers.submit(work) for _ in range(3)]:
            assert done.result(timeout=60) == expected


@given(model=models(), **{k: OPTIONS[k] for k in ("layout", "wire", "bucket_bytes")})
@settings(max_examples=60, deadline=None)
def test_plans_survive_json_and_compare_by_digest(model, layout, wire, bucket_bytes):
    plan = build(model, layout=layout, wire_dtype=wire, bucket_bytes=bucket_bytes)
    again = BucketPlan.from_json(plan.to_json())
    assert again == plan
    assert plan.difference(again) is None
    statistics = plan.statistics()
    assert statistics.wire_bytes == sum(plan.bucket_nbytes(i) for i in range(plan.num_buckets))
    if layout == "vllm":
        assert statistics.padding_bytes == 0
    else:
        assert plan.max_bucket_nbytes <= max(bucket_bytes, 16)
