"""The benchmark measures what it says: every contender moves the same elements, and goals follow from the
rows.
"""

import dataclasses
import json

import numpy as np
import pytest
import torch
from rich.console import Console

from grpo_lab.cli import bench_pack
from grpo_lab.packing import benchmark, benchmark_report, instruction_sets
from grpo_lab.packing.benchmark import Case, Contenders, MiB, Row
from grpo_lab.packing.native import extension
from grpo_lab.packing.reference import raw_bytes
from grpo_lab.packing.shapes import MODELS

SMALL = {"threads": 1, "torch_threads": 1, "max_parameters": 300_000}


@pytest.fixture(autouse=True)
def torch_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("source", ["float32", "bfloat16"])
@pytest.mark.parametrize("strides", ["contiguous", "transposed"])
def test_every_contender_moves_the_same_elements(source, strides):
    case = Case(
        "pack", "moe-5000", source, "bfloat16", MiB, strides=strides, **SMALL | {"max_parameters": 1 << 19}
    )
    contenders = Contenders(case)
    assert len(contenders.tensors) >= 1
    ways = contenders.pack()
    for index in range(contenders.plan.num_buckets):
        expected = b"".join(
            raw_bytes(s.to(torch.bfloat16)).numpy().tobytes() for s in contenders.sources[index]
        )
        assert "with_hash" not in ways
        for name, way in ways.items():
            contenders.flat[index].view(torch.uint8).zero_()
            result = way(index)
            if name in ("cat_fresh", "flatten_dense"):
                found = raw_bytes(result).numpy().tobytes()
            elif name == "cat_out":
                found = raw_bytes(contenders.flat[index]).numpy().tobytes()
            else:
                found = b"".join(raw_bytes(s).numpy().tobytes() for s in contenders.slots[index])
            assert found == expected, name


def test_unpacking_contenders_restore_the_tensors():
    contenders = Contenders(Case("unpack", "tiny-20000", "float32", "float32", MiB, **SMALL))
    before = {name: tensor.clone() for name, tensor in contenders.tensors.items()}
    for name, way in contenders.unpack().items():
        if name == "verify":
            continue
        for tensor in contenders.tensors.values():
            tensor.zero_()
        for index in range(contenders.plan.num_buckets):
            contenders.packer.bind(before)
            contenders.packer.pack(index)
            way(index)
        assert all(torch.equal(t, before[n]) for n, t in contenders.tensors.items()), name


def test_model_shapes_have_the_published_sizes():
    def parameters(name):
        return sum(torch.Size(shape).numel() for _, shape in MODELS[name])

    assert parameters("qwen2.5-0.5b") == 494_032_768
    assert parameters("qwen3-0.6b") == 596_049_920
    assert parameters("llama-3.2-1b") == 1_235_814_400
    assert 4_900 < len(MODELS["moe-5000"]) < 5_200
    assert len(MODELS["tiny-20000"]) == 20_000


def row(**changes):
    peers = {"foreach_copy": 1.4, "cat_out": 1.6, "copy_views": 1.4, "cat_fresh": 6.0, "flatten_dense": 5.0}
    base = Row(
        "pack", "qwen2.5-0.5b", "bfloat16", "bfloat16", MiB, ours_s=1.0, peers_s=peers, flat_copy_s=0.9
    )
    return dataclasses.replace(base, **changes)


def test_goals_are_met_and_missed_by_the_rows():
    found = {g.name: g for g in benchmark_report.goals([row(), row(hash=False, ours_s=0.8, with_hash_s=1.0)])}
    assert found["pack, no cast, against _foreach_copy_"].met
    assert not found["pack without hash against with"].met
    assert found["pack without hash against with"].median == pytest.approx(0.8)
    assert "pack tiny tensors against _foreach_copy_" not in found
    slow = {g.name: g for g in benchmark_report.goals([row(), row(ours_s=2.0), row(ours_s=2.0)])}
    missed = slow["pack, no cast, against _foreach_copy_"]
    assert (missed.met, missed.rows, missed.worst) == (False, 3, pytest.approx(0.7))
    assert (missed.limit, missed.verdict) == (pytest.approx(1.4 / 0.9), "missed")


@pytest.mark.parametrize(
    ("flat_copy_s", "verdict"), [(1.01, "missed; as fast as memory"), (0.9, "missed"), (1.2, "met")]
)
def test_a_goal_that_memory_does_not_allow_is_missed_but_told_apart(flat_copy_s, verdict):
    ours_s = 1.0 if verdict == "met" else 1.05  # the goal, 1.35, wants 1.4 s / 1.35 = 1.037 s
    found = benchmark_report.goals([row(ours_s=ours_s, flat_copy_s=flat_copy_s)])
    assert next(g for g in found if g.name == "pack, no cast, against _foreach_copy_").verdict == verdict
    assert next(g for g in found if g.name.startswith("pack against a flat copy")).limit is None


def test_each_ratio_stands_beside_that_of_a_flat_copy(capsys):
    measured = row(ours_s=0.7, flat_copy_s=0.5)
    shown = benchmark_report.ratios(measured)
    assert shown["ratios"]["foreach_copy"] == pytest.approx(2.0)
    assert shown["limits"]["foreach_copy"] == pytest.approx(2.8)
    console = Console(width=170)
    console.print(benchmark_report.table([measured]))
    console.print(benchmark_report.goals_table(benchmark_report.goals([measured])))
    out = capsys.readouterr().out
    assert "2.00 (2.80)" in out
    assert "limit" in out


def test_the_command_writes_rows_goals_and_a_plot(tmp_path, monkeypatch, capsys):
    few = [Case("pack", "tiny-20000", "float32", "bfloat16", MiB, **SMALL)]
    few.append(dataclasses.replace(few[0], op="unpack"))
    monkeypatch.setattr(benchmark_report, "cases", lambda quick: few)
    monkeypatch.setattr(benchmark_report, "peak_rss_in_child", lambda: [3, 4, 4])
    out, plot = tmp_path / "pack.json", tmp_path / "pack.svg"
    assert bench_pack.main(["--json", str(out), "--plot", str(plot), "--repeats", "1"]) == 0
    data = json.loads(out.read_text())
    assert set(data) == {"machine", "rows", "goals", "peak_rss_bytes"}
    assert [r["op"] for r in data["rows"]] == ["pack", "unpack"]
    assert data["rows"][0]["ours_s"] > 0
    assert set(data["rows"][0]["limits"]) == set(data["rows"][0]["ratios"]) == set(data["rows"][0]["peers_s"])
    assert {"limit", "met", "verdict"} <= set(data["goals"][0])
    assert set(data["rows"][0]["peers_s"]) == {
        "foreach_copy",
        "cat_out",
        "copy_views",
        "cat_fresh",
        "flatten_dense",
    }
    assert data["rows"][1]["verify_s"] > 0
    assert plot.read_text().lstrip().startswith("<?xml")
    assert "goals" in capsys.readouterr().out


@pytest.mark.slow
def test_syncs_need_no_more_memory_after_the_second(monkeypatch):
    monkeypatch.setitem(MODELS, "qwen2.5-0.5b", MODELS["tiny-20000"][:2000])
    peaks = benchmark.peak_rss_of_syncs(12)
    assert peaks[-1] - peaks[1] < 1 << 20


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize(("reads", "writes"), [(1, 1), (2, 1), (1, 2)])
def test_the_pass_that_sets_the_limit_moves_all_that_it_should(isa, reads, writes):
    """600 blocks are more than one task; the rest of a block is not moved, nor anything behind it written."""
    written = 600 * 1024
    source = np.frombuffer(np.random.default_rng(0).bytes(written // writes * reads + 100), np.uint8)
    memory = np.full(written + 64 + 200, 7, np.uint8)
    start = -memory.ctypes.data % 64
    target = memory[start : start + written + 100]
    moved = extension.move(target, source, extension.Pool(2), reads, writes, isa)
    assert moved == written
    lines = source[: written // writes * reads].reshape(-1, 64)
    expected = {(1, 1): lines, (2, 1): lines[::2], (1, 2): lines.repeat(2, axis=0)}[reads, writes]
    assert (target[:written] == expected.reshape(-1)).all()
    assert (memory[start + written :] == 7).all()
    assert (memory[:start] == 7).all()


def test_the_pass_that_sets_the_limit_refuses_other_ratios_and_misaligned_memory():
    pool, memory = extension.Pool(1), np.zeros(5000, np.uint8)
    aligned = memory[-memory.ctypes.data % 64 :]
    for reads, writes in [(0, 1), (1, 0), (2, 2), (3, 1), (-1, -1)]:
        with pytest.raises(ValueError, match="reads and writes must be"):
            extension.move(aligned, bytes(4096), pool, reads, writes)
    with pytest.raises(ValueError, match="cache line"):
        extension.move(aligned[1:], bytes(4096), pool)
    assert extension.move(aligned, bytes(1000), pool) == 0
