"""Bucket plans: where tensors go, what is refused, and how two plans are compared."""

import json
import subprocess
import sys

import pytest
import torch

from grpo_lab.errors import PackingError
from grpo_lab.packing import BucketPlan
from grpo_lab.packing.reference import vllm_reference


def places(plan):
    return {e.name: [(p.bucket, p.offset, p.first, p.count) for p in e.pieces] for e in plan.tensors}


def test_aligned_tensors_begin_at_multiples_of_256_bytes():
    plan = BucketPlan.build(
        {"a": torch.zeros(3), "b": torch.zeros(65), "c": torch.zeros(1)}, bucket_bytes=1024
    )
    assert places(plan) == {"a": [(0, 0, 0, 3)], "b": [(0, 256, 0, 65)], "c": [(0, 768, 0, 1)]}
    assert plan.num_buckets == 1
    assert plan.bucket_nbytes(0) == plan.max_bucket_nbytes == 772
    statistics = plan.statistics()
    assert (statistics.payload_bytes, statistics.padding_bytes, statistics.wire_bytes) == (276, 496, 772)
    assert (statistics.largest_tensor, statistics.largest_tensor_bytes) == ("b", 260)


def test_a_tensor_that_does_not_fit_opens_a_bucket_and_a_larger_one_is_split():
    tensors = {"a": torch.zeros(60), "b": torch.zeros(10), "c": torch.zeros(150), "d": torch.zeros(2)}
    plan = BucketPlan.build(tensors, wire_dtype="bfloat16", bucket_bytes=128)
    assert places(plan) == {
        "a": [(0, 0, 0, 60)],
        "b": [(1, 0, 0, 10)],
        "c": [(2, 0, 0, 64), (3, 0, 64, 64), (4, 0, 128, 22)],
        "d": [(5, 0, 0, 2)],
    }
    assert max(plan.bucket_nbytes(i) for i in range(plan.num_buckets)) <= 128
    assert plan.statistics().split_tensors == 1


def test_tied_tensors_are_sent_once_and_views_of_other_shape_are_not_tied():
    weight = torch.zeros(4, 4)
    plan = BucketPlan.build(
        {"embed": weight, "norm": torch.zeros(4), "head": weight, "t": weight.t(), "row": weight[0]}
    )
    assert [(e.name, e.aliases) for e in plan.tensors] == [
        ("embed", ("head",)),
        ("norm", ()),
        ("t", ()),
        ("row", ()),
    ]
    assert plan.by_name["head"].name == "embed"
    assert plan.statistics().aliases == 1


def test_tensors_without_elements_belong_to_the_bucket_before_them():
    sizes = {"e0": 0, "a": 100, "e1": 0, "b": 1000, "e2": 0, "c": 1, "e3": 0, "e4": 0}
    plan = BucketPlan.build({name: torch.zeros(size) for name, size in sizes.items()}, bucket_bytes=1024)
    names = [[plan.tensors[p].name for p in span] for span in plan.tensors_of_bucket]
    assert sorted({name for bucket in names for name in bucket}) == sorted(sizes)
    assert names[0] == ["e0", "a", "e1"]  # b begins a bucket and is split
    assert names[-2] == ["b", "e2"]
    assert names[-1] == ["c", "e3", "e4"]
    assert BucketPlan.build({"none": torch.zeros(0)}).tensors_of_bucket == ()


@pytest.mark.parametrize("change", ["missing", "renamed", "moved", "reshaped", "wire dtype"])
def test_a_change_of_a_tensor_without_elements_is_a_difference_of_plans(change):
    """No bucket's hash knows of it, so the plans of both sides must."""
    zeros, empty = torch.zeros(4), torch.zeros(0, 3)
    model = {"a": zeros, "b": torch.zeros(5), "empty": empty}
    changed = {
        "missing": {"a": zeros, "b": model["b"]},
        "renamed": {"a": zeros, "b": model["b"], "void": empty},
        "moved": {"a": zeros, "empty": empty, "b": model["b"]},
        "reshaped": model | {"empty": torch.zeros(0, 4)},
        "wire dtype": model | {"empty": empty.half()},
    }[change]
    plan, other = BucketPlan.build(model), BucketPlan.build(changed)
    assert plan.digest() != other.digest()
    difference = plan.difference(other)
    assert difference is not None
    assert "empty" in difference


def test_empty_tensors_and_an_empty_model_have_a_plan():
    plan = BucketPlan.build({"none": torch.zeros(0, 4), "scalar": torch.zeros(())})
    assert places(plan) == {"none": [], "scalar": [(0, 0, 0, 1)]}
    assert BucketPlan.build({}).num_buckets == 0
    assert BucketPlan.build({"none": torch.zeros(0)}).max_bucket_nbytes == 0


def test_vllm_layout_closes_a_bucket_with_the_tensor_that_exceeds_it():
    tensors = {"a": torch.zeros(4), "b": torch.zeros(4), "c": torch.zeros(100), "d": torch.zeros(1)}
    plan = BucketPlan.build(tensors, layout="vllm", bucket_bytes=32)
    assert places(plan) == {
        "a": [(0, 0, 0, 4)],
        "b": [(0, 16, 0, 4)],
        "c": [(0, 32, 0, 100)],
        "d": [(1, 0, 0, 1)],
    }
    assert plan.max_bucket_nbytes == 432
    assert [len(b) for b in vllm_reference(list(tensors.values()), 32)] == [432, 4]


def test_vllm_layout_names_what_its_consumer_cannot_view():
    with pytest.raises(PackingError, match="'scale' has no dimension"):
        BucketPlan.build({"scale": torch.zeros(())}, layout="vllm")
    odd = {"q": torch.zeros(3, dtype=torch.uint8), "w": torch.zeros(2).bfloat16()}
    with pytest.raises(PackingError, match=r"'w' \(bfloat16\) would begin at byte 3"):
        BucketPlan.build(odd, layout="vllm")
    BucketPlan.build(dict(reversed(odd.items())), layout="vllm")


def test_100_gigabytes_on_the_meta_device():
    layers = {f"layer.{i}": torch.empty(1 << 30, dtype=torch.bfloat16, device="meta") for i in range(50)}
    plan = BucketPlan.build(layers, bucket_bytes=256 << 20)
    assert plan.statistics().wire_bytes == 50 << 31
    assert plan.num_buckets == 400
    assert places(plan)["layer.49"][-1] == (399, 0, 7 << 27, 1 << 27)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "other"}, "layout 'other' is unknown"),
        ({"bucket_bytes": 8}, "bucket_bytes is 8; it must be an integer from 16"),
        ({"bucket_bytes": True}, "bucket_bytes is True"),
        ({"bucket_bytes": 1 << 62}, "bucket_bytes is"),
        ({"wire_dtype": "int8"}, "wire_dtype 'int8' is not a float dtype"),
        ({"wire_dtype": "bf16"}, "wire_dtype has dtype 'bf16'; the packer knows float32"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(PackingError, match=message):
        BucketPlan.build({"a": torch.zeros(4)}, **options)


def test_unknown_dtypes_and_names_are_refused():
    with pytest.raises(PackingError, match="'q' has dtype 'bits8'"):
        BucketPlan.build({"q": torch.empty(2, dtype=torch.bits8)})
    with pytest.raises(PackingError, match="'' is not a non-empty string"):
        BucketPlan.build({"": torch.zeros(1)})


def model():
    weight = torch.zeros(8, 8)
    return {"embed": weight, "norm": torch.zeros(8), "head": weight, "t": torch.zeros(3, 5).t()}


def test_json_round_trip_is_equal():
    plan = BucketPlan.build(model(), wire_dtype="float16", bucket_bytes=100)
    assert BucketPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def damage(**changes):
    data = BucketPlan.build(model()).to_json()
    for path, value in changes.items():
        *keys, last = path.split("__")
        target = data
        for key in keys:
            target = target[int(key) if key.isdigit() else key]
        if value is KeyError:
            del target[last]
        else:
            target[last] = value
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "not a bucket plan"),
        ([], "not a bucket plan"),
        (damage(format=2), "not a bucket plan of format 1"),
        (damage(layout="x"), "layout 'x' is unknown"),
        (damage(bucket_bytes="64"), "bucket_bytes is '64'"),
        (damage(tensors={}), "'tensors' of the bucket plan must be a list"),
        (damage(tensors__0__name=KeyError), "has no name"),
        (damage(tensors__0__shape=[-1]), "'embed': field 'shape'"),
        (damage(tensors__0__shape=[8, 8.0]), "'embed': field 'shape'"),
        (damage(tensors__0__shape=[1 << 61, 8]), "the limit is"),
        (damage(tensors__0__shape=[1 << 50]), "a stride for each size"),
        (damage(tensors__1__shape=[1 << 55]), "use larger buckets"),
        (damage(tensors__0__strides=[1]), "a stride for each size"),
        (damage(tensors__0__aliases="head"), "field 'aliases'"),
        (damage(tensors__1__name="head"), "'head' appears twice"),
        (damage(tensors__0__wire_dtype="int64"), "float32 cannot be sent as int64"),
        (damage(tensors__0__wire_dtype=["float32"]), "has dtype"),
        (damage(tensors__0__wire_dtype="float16"), "digest"),
        (damage(digest=""), "digest is ''"),
    ],
)
def test_a_damaged_plan_is_refused_by_field(data, message):
    with pytest.raises(PackingError, match=message):
        BucketPlan.from_json(data)


def test_the_digest_covers_what_both_sides_share_and_nothing_else():
    here = BucketPlan.build(model(), wire_dtype="bfloat16")
    there = BucketPlan.build(
        {k: v.to(torch.bfloat16) for k, v in model().items() if k != "head"}, wire_dtype="bfloat16"
    )
    assert here.difference(there) == "aliases of tensor 0 (embed): ('head',) here, () there"
    contiguous = {k: v.contiguous() for k, v in model().items()}
    contiguous["head"] = contiguous["embed"]
    assert BucketPlan.build(contiguous, wire_dtype="bfloat16").digest() == here.digest()
    assert here.difference(BucketPlan.build(contiguous, wire_dtype="bfloat16")) is None


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (BucketPlan.build(model(), layout="vllm"), "layout: 'aligned' here, 'vllm' there"),
        (BucketPlan.build(model(), bucket_bytes=1 << 20), "bucket_bytes: 67108864 here, 1048576 there"),
        (
            BucketPlan.build(model() | {"norm": torch.zeros(9)}),
            r"shape of tensor 1 (norm): (8,) here, (9,) there",
        ),
        (
            BucketPlan.build(model() | {"more": torch.zeros(9)}),
            "3 tensors here, 4 there: 'more' is only there",
        ),
        (BucketPlan.build({"w": torch.zeros(8, 8)}), "name of tensor 0: 'embed' here, 'w' there"),
        (
            BucketPlan.build(model(), wire_dtype="float16"),
            "wire_dtype of tensor 0 (embed): 'float32' here, 'float16' there",
        ),
    ],
)
def test_the_first_difference_is_named(other, difference):
    assert BucketPlan.build(model()).difference(other) == difference


def test_plans_need_neither_torch_nor_the_extension():
    loaded = "{'torch', 'grpo_lab.packing._packing'} & set(sys.modules)"
    code = f"import sys; import grpo_lab.packing; assert not {loaded}, {loaded}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("index", [-1, 1, True, 0.0, "0"])
def test_a_bucket_index_out_of_range_is_refused(index):
    plan = BucketPlan.build({"a": torch.zeros(4)})
    with pytest.raises(PackingError, match="the plan has 1, counted from 0"):
        plan.bucket_nbytes(index)
