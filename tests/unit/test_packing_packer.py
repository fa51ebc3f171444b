"""Packing and unpacking: every kind of tensor, misuse by name, re-binding, foreign memory."""

import collections
import gc
import mmap
import threading
import weakref
from array import array

import pytest
import torch

from grpo_lab.errors import BucketCorrupt, PackingError
from grpo_lab.packing import BucketPlan, Packer, Unpacker, hash64, instruction_sets, native
from grpo_lab.packing.native import extension
from grpo_lab.packing.reference import pack_reference, raw_bytes
from grpo_lab.packing.ring import stays_in_cache


def everything():
    torch.manual_seed(0)
    base = torch.randn(64, 48)
    tensors = {
        "plain": torch.randn(1000, 33),
        "transposed": torch.randn(70, 50).t(),
        "permuted": torch.randn(3, 40, 5, 7).permute(2, 0, 3, 1),
        "sliced": base[3:60:2, 5:40:3],
        "expanded": torch.randn(1, 9).expand(30, 9),
        "scalar": torch.randn(()),
        "empty": torch.zeros(0, 5),
        "odd": torch.arange(7, dtype=torch.uint8),
        "half": torch.randn(129).half(),
        "brain": torch.randn(65, 3).bfloat16().t(),
        "mask": torch.rand(37) > 0.5,
        "steps": torch.arange(11) << 40,
        "q": torch.randn(33).to(torch.float8_e4m3fn),
        "big": torch.randn(100_000),
        "double": torch.randn(5, 4).double().t(),
        "complex": torch.randn(5, 4, dtype=torch.complex128).t(),
    }
    tensors["tied"] = tensors["plain"]
    return tensors


def sync(plan, tensors, into, **options):
    packer, unpacker = Packer(plan, **options), Unpacker(plan, num_threads=options.get("num_threads", 1))
    packer.bind(tensors)
    for index, expected in enumerate(pack_reference(plan, tensors)):
        bucket = packer.pack(index)
        assert bytes(bucket.memory) == expected
        assert bucket.nbytes == bucket.memory.nbytes == plan.bucket_nbytes(index)
        assert bucket.hash64 == hash64(bucket.memory)
        unpacker.verify(index, bucket.memory, bucket.hash64)
        unpacker.unpack(index, bucket.memory, into)


def same(a, b):
    return torch.equal(raw_bytes(a), raw_bytes(b))


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("bucket_bytes", [1000, 70_000, 64 << 20])
def test_every_kind_of_tensor_comes_back_bit_for_bit(isa, threads, bucket_bytes):
    tensors = everything()
    into = {name: torch.zeros_like(t, memory_format=torch.contiguous_format) for name, t in tensors.items()}
    sync(BucketPlan.build(tensors, bucket_bytes=bucket_bytes), tensors, into, isa=isa, num_threads=threads)
    for name, tensor in tensors.items():
        assert same(tensor, into[name]), name


@pytest.mark.parametrize("wire", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float32"])
def test_casts_of_every_kind_of_tensor(wire):
    tensors = everything()
    into = {name: torch.zeros_like(t, memory_format=torch.contiguous_format) for name, t in tensors.items()}
    sync(BucketPlan.build(tensors, wire_dtype=wire, bucket_bytes=30_000), tensors, into, num_threads=2)
    for name, tensor in tensors.items():
        cast = tensor.dtype in (torch.float32, torch.float16, torch.bfloat16)
        assert same(tensor.to(getattr(torch, wire)).to(tensor.dtype) if cast else tensor, into[name]), name


def test_targets_may_be_strided_views_and_all_else_is_left_alone():
    tensors = {"w": torch.randn(40, 30), "b": torch.randn(1000)}
    home = torch.full((60, 90), 7.0)
    view = home.t()[10:70:2, 3:43].t()
    long = torch.full((2000,), 7.0)
    sync(BucketPlan.build(tensors, wire_dtype="bfloat16"), tensors, {"w": view, "b": long[::2]})
    assert torch.equal(view, tensors["w"].bfloat16().float())
    assert torch.equal(long[::2], tensors["b"].bfloat16().float())
    assert (home == 7.0).sum() == 60 * 90 - 40 * 30
    assert (long[1::2] == 7.0).all()


def test_untied_targets_are_both_written_and_one_name_is_enough():
    weight = torch.randn(300)
    plan = BucketPlan.build({"a": weight, "b": weight})
    both = {"a": torch.zeros(300), "b": torch.zeros(300)}
    sync(plan, {"a": weight, "b": weight}, both)
    assert torch.equal(both["a"], weight)
    assert torch.equal(both["b"], weight)
    one = {"b": torch.zeros(300)}
    sync(plan, {"a": weight}, one)
    assert torch.equal(one["b"], weight)


def test_wire_floats_widen_into_other_float_targets():
    tensors = {"w": torch.randn(5000)}
    into = {"w": torch.zeros(5000, dtype=torch.float16)}
    sync(BucketPlan.build(tensors, wire_dtype="bfloat16"), tensors, into)
    assert torch.equal(into["w"], tensors["w"].bfloat16().half())


def test_twenty_thousand_tiny_tensors():
    tensors = {f"t{i}": torch.randn(i % 9, 3) for i in range(20_000)}
    into = {name: torch.zeros_like(t) for name, t in tensors.items()}
    plan = BucketPlan.build(tensors, layout="vllm", bucket_bytes=1 << 18)
    sync(plan, tensors, into, num_threads=2)
    assert all(torch.equal(into[name], tensor) for name, tensor in tensors.items())


def test_buckets_in_any_order_into_any_slot():
    tensors = {f"t{i}": torch.full((64,), float(i)) for i in range(6)}
    plan = BucketPlan.build(tensors, bucket_bytes=256)
    packer = Packer(plan, slots=3)
    packer.bind(tensors)
    buckets = [packer.pack(i) for i in (5, 1, 3)]
    assert [b.slot for b in buckets] == [2, 1, 0]
    assert [torch.frombuffer(b.memory, dtype=torch.float32)[0].item() for b in buckets] == [5, 1, 3]
    assert packer.pack(4, slot=2).memory == pack_reference(plan, tensors)[4]
    for slot in (3, -1, True, "0"):
        with pytest.raises(PackingError, match="the ring has 3, counted from 0"):
            packer.pack(0, slot)


def test_foreign_memory_is_written_in_place_and_only_where_the_bucket_is():
    tensors = {"w": torch.randn(3000)}
    plan = BucketPlan.build(tensors)
    for offset in (0, 1, 63):  # any alignment
        slots = [mmap.mmap(-1, 20_000) for _ in range(2)]
        for slot in slots:
            slot.write(b"\xee" * 20_000)
        packer = Packer(plan, ring=[memoryview(slot)[offset : offset + 12_000] for slot in slots])
        packer.bind(tensors)
        assert packer.pack(0, 1).nbytes == 12_000
        assert slots[1][offset : offset + 12_000] == pack_reference(plan, tensors)[0]
        assert slots[1][:offset] + slots[1][offset + 12_000 :] == b"\xee" * 8_000
        assert slots[0][:] == b"\xee" * 20_000


def test_bad_rings_and_options_are_refused():
    plan = BucketPlan.build({"w": torch.randn(100)})
    for options, message in [
        (
            {"ring": [bytearray(400), bytearray(399)]},
            "slot 1 has 399 bytes; the plan's largest bucket needs 400",
        ),
        ({"ring": [bytes(400)]}, "slot 0 is read-only"),
        ({"ring": []}, "the ring has no slot"),
        ({"ring": [3]}, "slot 0 is not a contiguous buffer"),
        ({"slots": 0}, "slots is 0; it must be from 1"),
        ({"num_threads": 0}, "num_threads is 0; it must be from 1 to 256"),
        ({"num_threads": 1.5}, "num_threads is 1.5"),
        ({"isa": "sse"}, "isa 'sse' is not available"),
    ]:
        with pytest.raises(PackingError, match=message):
            Packer(plan, **options)


def test_moved_memory_is_noticed_and_replaced_tensors_are_bound_again():
    weight = torch.nn.Parameter(torch.zeros(100))
    plan = BucketPlan.build({"w": weight})
    packer = Packer(plan)
    packer.bind({"w": weight})
    weight.data = torch.ones(100)
    assert packer.pack(0).memory == pack_reference(plan, {"w": torch.ones(100)})[0]
    weight.data = torch.full((200,), 2.0)[::2]
    assert packer.pack(0).memory == pack_reference(plan, {"w": torch.full((100,), 2.0)})[0]
    weight.data = torch.ones(99)
    with pytest.raises(PackingError, match=r"'w' has shape \(99,\); the bucket plan has \(100,\)"):
        packer.pack(0)
    with pytest.raises(PackingError, match="no tensors are bound"):
        packer.pack(0)
    packer.bind({"w": torch.full((100,), 3.0)})
    assert packer.pack(0).memory == pack_reference(plan, {"w": torch.full((100,), 3.0)})[0]


@pytest.mark.parametrize("which", [0, 1, 57, 99])
def test_one_moved_tensor_among_many_is_noticed(which):
    weights = {f"w{i}": torch.nn.Parameter(torch.full((20,), float(i))) for i in range(100)}
    plan = BucketPlan.build(weights)
    packer, unpacker = Packer(plan), Unpacker(plan)
    packer.bind(weights)
    targets = unpacker.bind(weights)
    memory = bytes(packer.pack(0).memory)
    targets.unpack(0, memory)
    weights[f"w{which}"].data = torch.full((20,), -1.0)
    assert packer.pack(0).memory == pack_reference(plan, weights)[0]
    with pytest.raises(PackingError, match="targets of bucket 0 moved"):
        targets.unpack(0, memory)


@pytest.fixture(params=["one call in the extension", "a torch that the extension does not know"])
def every_way_to_look(request, monkeypatch):
    if request.param.startswith("a torch"):
        monkeypatch.setattr(native, "_watch", native._PythonWatch)
    else:
        assert isinstance(native._watch((torch.zeros(1),)), extension.Watch)


CHANGES = {  # of a (6, 4) bfloat16 tensor, at the address that it has
    "strides": lambda t: t.view(4, 6).t(),
    "shape": lambda t: t.view(4, 6),
    "fewer dimensions": lambda t: t.view(24),
    "dtype": lambda t: t.view(torch.float16),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_at_the_same_address_is_followed_or_refused(every_way_to_look, change):
    weight = torch.nn.Parameter(torch.arange(24, dtype=torch.bfloat16).view(6, 4))
    plan = BucketPlan.build({"w": weight})
    packer, unpacker = Packer(plan), Unpacker(plan)
    packer.bind({"w": weight})
    targets = unpacker.bind({"w": weight})
    memory = bytes(packer.pack(0).memory)
    at = weight.data_ptr()
    weight.data = CHANGES[change](weight.data)
    assert weight.data_ptr() == at
    with pytest.raises(PackingError, match="targets of bucket 0 moved in memory or changed"):
        targets.unpack(0, memory)
    if change == "strides":
        assert packer.pack(0).memory == pack_reference(plan, {"w": weight.detach()})[0] != memory
        return
    with pytest.raises(PackingError, match="'w' has dtype" if change == "dtype" else "'w' has shape"):
        packer.pack(0)


def test_a_tie_that_was_cut_is_refused_whichever_of_the_two_moved(every_way_to_look):
    for which in ("head", "embed"):
        weights = {"embed": torch.nn.Parameter(torch.zeros(20)), "head": torch.nn.Parameter(torch.zeros(20))}
        weights["head"].data = weights["embed"].data
        packer = Packer(BucketPlan.build(weights))
        packer.bind(weights)
        packer.pack(0)
        weights[which].data = torch.ones(20)
        with pytest.raises(PackingError, match="'head' was tied to 'embed' and is no more"):
            packer.pack(0)


def test_looking_for_changed_tensors_checks_its_arguments():
    memory = torch.zeros(100)
    watch = extension.Watch((memory,), torch.Tensor)
    assert len(watch) == 1
    assert not watch.changed(0, 1)
    memory.resize_(200)
    assert watch.changed(0, 1)
    assert not watch.changed(1, 1)
    for begin, end in [(0, 2), (1, 0), (2, 2)]:
        with pytest.raises(ValueError, match="no such tensors"):
            watch.changed(begin, end)
    with pytest.raises(ValueError, match="not a tensor"):
        extension.Watch((memory, 3), torch.Tensor)


class _Elsewhere:
    """Has a tensor's attributes, but holds no C++ tensor."""

    _cdata = 12345

    def untyped_storage(self):
        return self


def test_what_holds_no_tensor_of_torch_is_not_looked_into():
    for stranger in (_Elsewhere(), object()):
        with pytest.raises(NotImplementedError):
            extension.Watch((stranger,), type(stranger))


def test_tensors_that_were_swapped_under_their_python_objects_are_noticed():
    weights = {name: torch.nn.Parameter(torch.full((50,), value)) for name, value in (("a", 1.0), ("b", 2.0))}
    packer = Packer(BucketPlan.build(weights))
    packer.bind(weights)
    before = bytes(packer.pack(0).memory)
    torch.utils.swap_tensors(weights["a"], weights["b"])
    assert packer.pack(0).memory == pack_reference(packer.plan, weights)[0] != before


@pytest.mark.parametrize("rank", [0, 1, 5, 6, 9])
def test_tensors_of_many_dimensions_are_looked_at_too(every_way_to_look, rank):
    """torch keeps shapes of more than five dimensions in another place."""
    shape = (2, 3, *[1] * (rank - 2)) if rank > 1 else (6,) * rank
    weight = torch.nn.Parameter(torch.zeros(shape))
    packer = Packer(BucketPlan.build({"w": weight}))
    packer.bind({"w": weight})
    packer.pack(0)
    with torch.no_grad():
        weight += 1
    assert packer.pack(0).memory == pack_reference(packer.plan, {"w": weight.detach()})[0]
    weight.data = weight.data.view(*shape, 1)
    with pytest.raises(PackingError, match="'w' has shape"):
        packer.pack(0)


@pytest.mark.parametrize("device", ["meta", "sparse"])
def test_a_tensor_that_left_host_memory_is_refused(every_way_to_look, device):
    weight = torch.zeros(10)
    packer = Packer(BucketPlan.build({"w": weight}))
    packer.bind({"w": weight})
    packer.pack(0)
    torch.utils.swap_tensors(
        weight, torch.zeros(10, device="meta") if device == "meta" else weight.to_sparse()
    )
    with pytest.raises(PackingError, match="'w' is on meta" if device == "meta" else "'w' has layout"):
        packer.pack(0)


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("which", ["w0", "w3", "w7", "empty"])
def test_a_change_is_noticed_while_the_bucket_is_being_packed(threads, which):
    """Several tasks long: what comes before the change may be packed when it is seen."""
    sizes = {f"w{i}": 200_000 for i in range(4)} | {"empty": 0} | {f"w{i}": 200_000 for i in range(4, 8)}
    weights = {name: torch.nn.Parameter(torch.full((size,), 7.0)) for name, size in sizes.items()}
    plan = BucketPlan.build(weights, wire_dtype="bfloat16")
    packer = Packer(plan, num_threads=threads)
    packer.bind(weights)
    for value in (-1.0, -2.0):
        packer.pack(0)
        if which != "empty":
            weights[which].data = torch.full((200_000,), value)
        bucket = packer.pack(0)
        expected = pack_reference(plan, weights)[0]
        assert bucket.memory == expected
        assert bucket.hash64 == hash64(expected)
    weights[which].data = torch.zeros(3)
    with pytest.raises(PackingError, match=rf"'{which}' has shape \(3,\)"):
        packer.pack(0)


@pytest.mark.parametrize("which", ["first", "middle", "last"])
@pytest.mark.parametrize("bucket_bytes", [1024, 1 << 20])
def test_a_tensor_that_had_no_elements_and_gets_some_is_refused(every_way_to_look, which, bucket_bytes):
    """Its elements would be left out of every bucket."""
    sizes = {"first": 0, "a": 1000, "middle": 0, "b": 1000, "last": 0}
    weights = {name: torch.nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}
    plan = BucketPlan.build(weights, bucket_bytes=bucket_bytes)
    packer, unpacker = Packer(plan), Unpacker(plan)
    packer.bind(weights)
    targets = unpacker.bind(weights)
    memory = [bytes(packer.pack(index).memory) for index in range(plan.num_buckets)]
    weights[which].data = torch.ones(3)
    with pytest.raises(PackingError, match=r"targets of bucket \d+ moved"):
        collections.deque(map(targets.unpack, range(plan.num_buckets), memory))
    with pytest.raises(PackingError, match=rf"'{which}' has shape \(3,\); the bucket plan has \(0,\)"):
        collections.deque(map(packer.pack, range(plan.num_buckets)))


def test_packing_behind_a_watch_checks_its_arguments():
    memory = (torch.zeros(100), torch.ones(100))
    buckets = extension.Buckets([(0, 100)] * 2, [(0, 0, 0, 0, 100), (1, 0, 400, 0, 100)], [800])
    views, pool, out = extension.Views(buckets, False), extension.Pool(2), bytearray(800)
    for index, tensor in enumerate(memory):
        views.add(index, 0, [100], [1], (tensor.data_ptr(), tensor.data_ptr(), 400))
    watch = extension.Watch(memory, torch.Tensor)
    good = {"starts": array("Q", [0, 1, 2]), "tensors": (0, 2), "bucket": 0, "memory": out}

    def pack(**changes):
        options = {"pool": pool, "hash": True, "stream": False}
        return extension.pack_watched(views, watch, **(good | options | changes))

    for change, message in [
        ({"starts": array("Q", [0, 1])}, "one number for each tensor"),
        ({"starts": array("I", [0, 1, 2])}, "one number for each tensor"),
        ({"starts": array("Q", [0, 1, 3])}, "no such tensors"),
        ({"starts": array("Q", [1, 0, 2])}, "no such tensors"),
        ({"tensors": (-1, 2)}, "no such tensors in the plan"),
        ({"tensors": (2, 1)}, "no such tensors in the plan"),
        ({"tensors": (0, 3)}, "no such tensors in the plan"),
        ({"tensors": (0, 1)}, "would not be looked at"),
        ({"tensors": (1, 2)}, "would not be looked at"),
        ({"bucket": 1}, "no bucket 1"),
        ({"memory": bytearray(799)}, "smaller than the bucket"),
    ]:
        with pytest.raises(ValueError, match=message):
            pack(**change)
    assert pack() == hash64(out)
    memory[1].resize_(200)
    assert pack() is None


def test_freed_storage_is_noticed():
    weight = torch.ones(100)
    packer = Packer(BucketPlan.build({"w": weight}))
    packer.bind({"w": weight})
    weight.untyped_storage().resize_(0)
    with pytest.raises(PackingError, match="'w' has no memory behind it"):
        packer.pack(0)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "'w' of the bucket plan was not given"),
        ({"w": torch.zeros(10, 10), "x": torch.zeros(1)}, "'x' is not in the bucket plan"),
        ({"w": torch.zeros(10, 11)}, r"'w' has shape \(10, 11\)"),
        ({"w": torch.zeros(100)}, r"'w' has shape \(100,\)"),
        ({"w": torch.zeros(10, 10).half()}, "'w' has dtype float16; the bucket plan has float32"),
        ({"w": torch.zeros(10, 10, device="meta")}, "'w' is on meta"),
        ({"w": torch.zeros(10, 10), "v": torch.zeros(10, 10)}, "'v' was tied to 'w' and is no more"),
        ({"w": torch.zeros(10, 10), "v": torch.zeros(10)}, r"'v' has shape \(10,\)"),
        ({"w": torch.zeros(10, 10).to_sparse()}, "'w' has layout torch.sparse_coo"),
    ],
)
def test_bind_refuses_by_name(tensors, message):
    weight = torch.zeros(10, 10)
    packer = Packer(BucketPlan.build({"w": weight, "v": weight}))
    with pytest.raises(PackingError, match=message):
        packer.bind(tensors)


def test_lazy_conjugates_are_refused():
    value = torch.zeros(3, dtype=torch.complex64)
    packer = Packer(BucketPlan.build({"c": value}))
    with pytest.raises(PackingError, match="lazy conjugate"):
        packer.bind({"c": value.conj()})


@pytest.mark.parametrize(
    ("into", "message"),
    [
        ({}, "no target for tensor 'w'; give one under one of w"),
        ({"w": torch.zeros(99)}, r"'w' has shape \(99,\)"),
        (
            {"w": torch.zeros(100, dtype=torch.int32)},
            r"target 'w' \(int32, sent as float32\): the dtype cannot",
        ),
        ({"w": torch.zeros(1).expand(100)}, "elements of the target share memory"),
        ({"w": torch.zeros(200).as_strided((100,), (0,))}, "elements of the target share memory"),
        ({"w": torch.zeros(100, device="meta")}, "'w' is on meta"),
    ],
)
def test_unpack_refuses_by_name(into, message):
    plan = BucketPlan.build({"w": torch.zeros(100)})
    with pytest.raises(PackingError, match=message):
        Unpacker(plan).unpack(0, bytes(400), into)


def test_overlapping_strided_target_is_refused():
    plan = BucketPlan.build({"w": torch.zeros(4, 3)})
    with pytest.raises(PackingError, match="share memory"):
        Unpacker(plan).unpack(0, bytes(48), {"w": torch.zeros(20).as_strided((4, 3), (2, 1))})


def test_a_damaged_bucket_is_named():
    plan = BucketPlan.build({"w": torch.arange(100.0)})
    packer, unpacker = Packer(plan), Unpacker(plan)
    packer.bind({"w": torch.arange(100.0)})
    bucket = packer.pack(0)
    damaged = bytearray(bucket.memory)
    damaged[77] ^= 4
    with pytest.raises(BucketCorrupt, match=f"bucket 0: expected hash {bucket.hash64:#018x}, found 0x"):
        unpacker.verify(0, damaged, bucket.hash64)
    for wrong in (bytes(399), bytes(401), b""):
        with pytest.raises(BucketCorrupt, match=f"bucket 0: expected 400 bytes, found {len(wrong)}"):
            unpacker.verify(0, wrong, bucket.hash64)
        with pytest.raises(BucketCorrupt, match="expected 400 bytes"):
            unpacker.unpack(0, wrong, {"w": torch.zeros(100)})


def test_without_hash_the_bytes_are_the_same():
    tensors = everything()
    plan = BucketPlan.build(tensors, wire_dtype="bfloat16", bucket_bytes=50_000)
    packer = Packer(plan, hash=False, num_threads=2)
    packer.bind(tensors)
    for index, expected in enumerate(pack_reference(plan, tensors)):
        bucket = packer.pack(index)
        assert bucket.hash64 == 0
        assert bucket.memory == expected


def test_a_ring_up_to_half_of_the_cache_is_filled_through_it(tmp_path):
    size = tmp_path / "size"
    for told, largest in [("32768K\n", 16 << 20), ("512K", 256 << 10), ("many", 2 << 20), (None, 2 << 20)]:
        size.unlink(missing_ok=True)
        if told is not None:
            size.write_text(told)
        assert stays_in_cache(largest, size)
        assert not stays_in_cache(largest + 1, size)


@pytest.mark.parametrize("in_cache", [True, False])
def test_streaming_and_ordinary_stores_give_the_same_bytes(monkeypatch, in_cache):
    monkeypatch.setattr("grpo_lab.packing.packer.stays_in_cache", lambda ring_bytes: in_cache)
    torch.manual_seed(0)
    tensors = {"a": torch.randn(700_000), "b": torch.randn(300, 500).t(), "c": torch.randn(77)}
    for wire in (None, "bfloat16"):
        plan = BucketPlan.build(tensors, wire_dtype=wire)
        assert plan.bucket_nbytes(0) > 1 << 20
        into = {name: torch.zeros_like(t) for name, t in tensors.items()}
        for isa in instruction_sets():
            sync(plan, tensors, into, isa=isa, num_threads=2)


def test_bound_tensors_live_as_long_as_the_packer_and_memory_outlives_it():
    weight = torch.ones(100)
    storage = weakref.ref(weight.untyped_storage())
    packer = Packer(BucketPlan.build({"w": weight}))
    packer.bind({"w": weight})
    del weight
    gc.collect()
    memory = packer.pack(0).memory
    del packer
    gc.collect()
    assert torch.frombuffer(memory, dtype=torch.float32).sum() == 100
    assert storage() is None


def test_one_packer_and_several_packers_in_several_threads():
    tensors = {f"t{i}": torch.randn(50_000) for i in range(8)}
    plan = BucketPlan.build(tensors, wire_dtype="bfloat16", bucket_bytes=100_000)
    expected = pack_reference(plan, tensors)
    shared = Packer(plan, slots=plan.num_buckets, num_threads=2)
    shared.bind(tensors)
    own = [Packer(plan, num_threads=2) for _ in range(3)]
    for packer in own:
        packer.bind(tensors)
    failures = []

    def work(packer, indices):
        for _ in range(10):
            for index in indices:
                bucket = packer.pack(index)
                if bucket.memory != expected[index] or bucket.hash64 != hash64(expected[index]):
                    failures.append(index)

    jobs = [(shared, range(0, 4)), (shared, range(4, 8)), *((packer, range(8)) for packer in own)]
    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


class Shards:
    """What the packer uses of a DTensor."""

    def __init__(self, full, log, name):
        self.full, self.log, self.name = full, log, name
        self.shape, self.dtype, self.local = full.shape, full.dtype, torch.zeros(1)

    def to_local(self):
        return self.local

    def full_tensor(self):
        self.log.append(self.name)
        return self.full.clone()


def test_sharded_tensors_are_gathered_once_each_in_order_and_released():
    log = []
    full = {"a": torch.randn(30, 20), "b": torch.randn(500), "c": torch.randn(10)}
    tensors = {"a": Shards(full["a"].t(), log, "a"), "b": Shards(full["b"], log, "b"), "c": full["c"]}
    reference = {"a": full["a"].t(), "b": full["b"], "c": full["c"]}
    plan = BucketPlan.build(tensors, bucket_bytes=512)
    packer = Packer(plan)
    packer.bind(tensors)
    assert log == []
    for index, expected in enumerate(pack_reference(plan, reference)):
        assert packer.pack(index).memory == expected
        assert len(packer._gathered) <= 1
    assert log == ["a", "b"]
    for index in range(plan.num_buckets):  # a rank that only takes part
        packer.gather(index)
    assert log == ["a", "b"] * 2


def test_one_bucket_is_gathered_anew_for_each_sync():
    log = []
    shards = Shards(torch.zeros(10), log, "a")
    packer = Packer(BucketPlan.build({"a": shards}))
    packer.bind({"a": shards})
    packer.pack(0)
    shards.full = torch.ones(10)
    assert packer.pack(0).memory == pack_reference(packer.plan, {"a": torch.ones(10)})[0]
    assert log == ["a", "a"]


def test_a_tensor_that_moved_does_not_make_others_be_gathered_again():
    """Other ranks would not take part in that."""
    log = []
    full, plain = torch.randn(100), torch.nn.Parameter(torch.randn(50))
    tensors = {"a": Shards(full, log, "a"), "b": plain}
    plan = BucketPlan.build(tensors, bucket_bytes=300)
    packer = Packer(plan)
    packer.bind(tensors)
    packer.pack(0)
    plain.data = torch.randn(50)
    expected = pack_reference(plan, {"a": full, "b": plain.detach()})
    assert [packer.pack(index).memory for index in range(1, plan.num_buckets)] == expected[1:]
    assert log == ["a"]


def test_the_extension_checks_bounds_itself():
    f32, bf16 = 0, 2
    good = {"tensors": [(f32, 100)], "pieces": [(0, 0, 0, 0, 100)], "bucket_bytes": [400]}
    for change, message in [
        ({"tensors": [(99, 100)]}, "unknown dtype code 99"),
        ({"tensors": [(f32, -1)]}, "element count out of range"),
        ({"tensors": [(f32, 101)]}, "pieces do not cover a tensor"),
        ({"bucket_bytes": [399]}, "piece ends outside its bucket"),
        ({"bucket_bytes": [-1]}, "bucket size out of range"),
        ({"bucket_bytes": []}, "not sorted by bucket"),
        ({"pieces": [(1, 0, 0, 0, 100)]}, "unknown tensor"),
        ({"pieces": [(0, 0, 2, 0, 99)]}, "not aligned to their elements"),
        ({"pieces": [(0, 0, 0, 1, 99)]}, "do not cover a tensor in order"),
        ({"pieces": [(0, 0, 0, 0, 50), (0, 0, 196, 50, 50)]}, "pieces overlap"),
        ({"pieces": [(0, 0, 1 << 62, 0, 100)]}, "piece ends outside its bucket"),
    ]:
        with pytest.raises(ValueError, match=message):
            extension.Buckets(**(good | change))
    buckets, pool = extension.Buckets(**good), extension.Pool(1)
    memory = torch.zeros(100)
    at = memory.data_ptr()
    for arguments, message in [
        ((1, f32, [100], [1], (at, at, 400)), "no such tensor"),
        ((0, f32, [99], [1], (at, at, 400)), "element count differs"),
        ((0, f32, [100], [2], (at, at, 400)), "outside its storage"),
        ((0, f32, [100], [1], (at, at, 399)), "outside its storage"),
        ((0, f32, [100], [1], (at + 4, at, 400)), "outside its storage"),
        ((0, f32, [100], [1], (at - 4, at, 400)), "no memory behind"),
        ((0, f32, [100], [1], (at + 2, at, 4000)), "not aligned"),
        ((0, f32, [100], [-1], (at, at, 400)), "negative size or stride"),
        ((0, f32, [100, 1], [1], (at, at, 400)), "one length"),
        ((0, f32, [1 << 40, 1 << 40], [1, 1], (at, at, 400)), "overflows 64 bits"),
        ((0, f32, [100], [1 << 60], (at, at, 400)), "overflow"),
        ((0, 5, [100], [1], (at, at, 400)), "dtype cannot be converted"),
    ]:
        with pytest.raises(ValueError, match=message):
            extension.Views(buckets, False).add(*arguments)
    views = extension.Views(buckets, False)
    out = bytearray(400)
    with pytest.raises(ValueError, match="not bound"):
        extension.pack(views, pool, 0, out, True, False)
    views.add(0, f32, [100], [1], (at, at, 400))
    for bucket, target, message in [
        (1, out, "no bucket 1"),
        (-1, out, "no bucket -1"),
        (0, bytearray(399), "smaller than the bucket"),
    ]:
        with pytest.raises(ValueError, match=message):
            extension.pack(views, pool, bucket, target, True, False)
    with pytest.raises((BufferError, ValueError)):
        extension.pack(views, pool, 0, bytes(400), True, False)
    with pytest.raises(ValueError, match="sources, not targets"):
        extension.unpack(views, pool, 0, out, False)
    assert bf16 != f32
