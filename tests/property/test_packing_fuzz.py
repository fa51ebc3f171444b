"""The extension under arbitrary numbers: it refuses or works, and never touches a byte outside what it was
given.

Run under AddressSanitizer by `make sanitize`; the nightly run takes many more examples.
"""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lab.errors import PackingError
from grpo_lab.packing import BucketPlan, Packer, Unpacker, instruction_sets
from grpo_lab.packing.native import extension

GUARD, LARGEST = 64, 1 << 20
small = st.integers(-2, 40)
edge = st.one_of(
    small, st.sampled_from([1 << 31, (1 << 31) - 1, 1 << 32, 1 << 61, 1 << 62, (1 << 63) - 1, -(1 << 63)])
)
code = st.integers(-1, 10)


def number(draw, likely):
    """Mostly what fits, now and then anything."""
    return draw(edge) if draw(st.integers(0, 40)) == 40 else likely


@st.composite
def scenarios(draw):
    sizes = {0: 4, 1: 2, 2: 2, 3: 1, 4: 1, 5: 1, 6: 2, 7: 4, 8: 8, 9: 16}
    tensors, pieces, views, used, bucket = [], [], [], 0, 0
    for index in range(draw(st.integers(1, 4))):
        dtype = draw(st.integers(0, 9))
        rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 9))
        count = rows * columns
        tensors.append((number(draw, dtype), number(draw, count)))
        first = 0
        while first < count:
            share = draw(st.integers(1, count - first))
            used = -(-used // sizes[dtype]) * sizes[dtype]
            pieces.append(tuple(number(draw, n) for n in (index, bucket, used, first, share)))
            used += share * sizes[dtype]
            first += share
        source = draw(st.sampled_from([dtype, *range(5)])) if dtype < 5 else dtype
        turned = draw(st.booleans())
        strides = [number(draw, s) for s in ((1, rows) if turned else (columns, 1))]
        shape = [number(draw, s) for s in (rows, columns)]
        views.append((number(draw, index), number(draw, source), shape, strides, count * sizes[source]))
    return tensors, pieces, [number(draw, used)], views


def attempt(scenario, threads, isa):
    """Packs and unpacks between guarded buffers. ValueError is a refusal, and pybind's TypeError too."""
    tensors, pieces, bucket_bytes, views = scenario
    try:
        buckets = extension.Buckets(tensors, pieces, bucket_bytes)
    except (ValueError, TypeError):
        return False
    nbytes = min(bucket_bytes[0], LARGEST)  # a bucket that was declared larger must be refused this memory
    memory = torch.full((nbytes + 2 * GUARD,), 0xEE, dtype=torch.uint8)
    inside = memoryview(memory.numpy())[GUARD : GUARD + nbytes]
    pool = extension.Pool(threads)
    homes = []
    try:
        bound = {target: extension.Views(buckets, target) for target in (False, True)}
        for tensor, dtype, shape, strides, size in views:
            home = torch.zeros(size + 2 * GUARD, dtype=torch.uint8)
            home[:GUARD] = home[-GUARD:] = 0xEE
            homes.append(home)
            at = home.data_ptr() + GUARD
            for each in bound.values():
                each.add(tensor, dtype, shape, strides, (at, at, size))
        packed = extension.pack(bound[False], pool, 0, inside, True, True, isa)
        assert nbytes == bucket_bytes[0]
        assert packed == extension.hash64(inside, pool)
        extension.unpack(bound[True], pool, 0, inside, True, isa)
    except (ValueError, TypeError):
        return False
    finally:
        assert (memory[:GUARD] == 0xEE).all()
        assert (memory[GUARD + nbytes :] == 0xEE).all()
        assert all((home[:GUARD] == 0xEE).all() and (home[-GUARD:] == 0xEE).all() for home in homes)
    return True


reached = {"worked": 0, "refused": 0}


@given(scenario=scenarios(), threads=st.integers(1, 2), isa=st.sampled_from(instruction_sets()))
@settings(max_examples=300, deadline=None)
def test_arbitrary_numbers(scenario, threads, isa):
    reached["worked" if attempt(scenario, threads, isa) else "refused"] += 1


def test_the_fuzzer_reaches_both_outcomes():
    if not sum(reached.values()):
        pytest.skip("runs after test_arbitrary_numbers only")
    assert reached["worked"] > 20, reached
    assert reached["refused"] > 20, reached


@pytest.mark.nightly
@pytest.mark.timeout(900)
@given(scenario=scenarios(), threads=st.integers(1, 3), isa=st.sampled_from(instruction_sets()))
@settings(max_examples=20_000, deadline=None)
def test_arbitrary_numbers_for_long(scenario, threads, isa):
    attempt(scenario, threads, isa)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(
    field=st.sampled_from(["format", "layout", "bucket_bytes", "wire_dtype", "tensors", "digest"]),
    value=json_values,
)
@settings(max_examples=150, deadline=None)
def test_a_plan_from_the_wire_is_refused_or_used(field, value):
    data = BucketPlan.build({"a": torch.zeros(3, 4), "b": torch.zeros(2)}).to_json()
    data[field] = value
    try:
        plan = BucketPlan.from_json(data)
    except PackingError:
        return
    Packer(plan, slots=1)
    Unpacker(plan)


@given(
    field=st.sampled_from(["name", "shape", "strides", "source_dtype", "wire_dtype", "aliases"]),
    value=json_values,
)
@settings(max_examples=150, deadline=None)
def test_a_tensor_from_the_wire_is_refused_or_used(field, value):
    data = BucketPlan.build({"a": torch.zeros(3, 4), "b": torch.zeros(2)}).to_json()
    data["tensors"][0][field] = value
    with contextlib.suppress(PackingError):
        BucketPlan.from_json(data)
