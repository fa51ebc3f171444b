"""What `bench pack` measures, the goals it is held to, and how both are shown."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from grpo_lab.packing.benchmark import Case, MiB, Row
from grpo_lab.packing.packer import instruction_sets
from grpo_lab.packing.shapes import MODELS

DTYPE_PAIRS = [("bfloat16", "bfloat16"), ("float32", "float32"), ("float32", "bfloat16")]


def cases(quick: bool) -> Iterator[Case]:
    """The rows in order; `quick` takes two models, one bucket size, and less of them."""
    models = ["qwen2.5-0.5b", "tiny-20000"] if quick else list(MODELS)
    sizes = [64 * MiB] if quick else [16 * MiB, 64 * MiB, 256 * MiB]
    first, limit = models[0], 48 * MiB if quick else 64 * MiB
    for source, wire in DTYPE_PAIRS:
        usual = Case("pack", first, source, wire, 64 * MiB, max_parameters=limit)
        for model in models:
            for size in sizes:  # enough to fill a bucket
                yield replace(usual, model=model, bucket_bytes=size, max_parameters=max(limit, size // 2))
        yield from (replace(usual, op="unpack", model=model) for model in (models[:1] if quick else models))
        yield replace(usual, hash=False)
        yield replace(usual, threads=1, torch_threads=1)
        # torch's ways take long over these
        yield replace(usual, strides="transposed", max_parameters=16 * MiB)
        if not quick:
            yield replace(usual, layout="vllm")
        if not quick or source == wire == "bfloat16":
            yield replace(usual, model="tiny-20000", refresh=False)


AS_FAST_AS_MEMORY = 0.95  # of the flat copy's speed


@dataclass(frozen=True, slots=True)
class Goal:
    """A ratio that the packer is held to: the median over the rows that it concerns, and the worst.

    ``limit`` is the median of what it would be if ours took as long as the flat copy: a peer that is close to
    the flat copy itself cannot be beaten by more. None where no peer is compared with.
    """

    name: str
    wanted: float
    median: float
    worst: float
    rows: int
    limit: float | None = None

    @property
    def met(self) -> bool:
        return self.median >= self.wanted

    @property
    def verdict(self) -> str:
        if self.met:
            return "met"
        at_limit = self.limit is not None and self.median >= AS_FAST_AS_MEMORY * self.limit
        return "missed; as fast as memory" if at_limit else "missed"


def limit(row: Row, peer: str) -> float:
    """The peer's time over the flat copy's."""
    return row.peers_s[peer] / row.flat_copy_s


def ratios(row: Row) -> dict[str, dict[str, float]]:
    """Each peer's time over ours, and the same if ours were a flat copy."""
    return {
        "ratios": {peer: seconds / row.ours_s for peer, seconds in row.peers_s.items()},
        "limits": {peer: limit(row, peer) for peer in row.peers_s},
    }


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Every ratio is a peer's time over ours (larger is better), in rows where both had as many threads."""
    found: list[Goal] = []

    def goal(
        name: str,
        wanted: float,
        chosen: Sequence[Row],
        ratio: Callable[[Row], float],
        most: Callable[[Row], float] | None = None,
    ) -> None:
        if chosen:
            values = [ratio(row) for row in chosen]
            bound = statistics.median(map(most, chosen)) if most else None
            found.append(Goal(name, wanted, statistics.median(values), min(values), len(values), bound))

    def over(peer: str, name: str, wanted: float, chosen: Sequence[Row]) -> None:
        goal(name, wanted, chosen, lambda row: row.peers_s[peer] / row.ours_s, lambda row: limit(row, peer))

    plain = [r for r in rows if r.strides == "contiguous" and r.hash and r.refresh and r.layout == "aligned"]
    large = [r for r in plain if r.op == "pack" and r.model != "tiny-20000"]
    same = [r for r in large if r.source_dtype == r.wire_dtype]
    cast = [r for r in large if r.source_dtype != r.wire_dtype]
    tiny = [r for r in plain if r.op == "pack" and r.model == "tiny-20000"]
    unpack = [r for r in plain if r.op == "unpack" and r.model != "tiny-20000"]
    transposed = [r for r in rows if r.strides == "transposed" and r.source_dtype == r.wire_dtype]
    over("foreach_copy", "pack, no cast, against _foreach_copy_", 1.35, same)
    over("cat_out", "pack, no cast, against cat(out=)", 1.5, same)
    over("foreach_copy", "pack, cast, against _foreach_copy_", 1.2, cast)
    over("cat_out", "pack, cast, against .to() and cat(out=)", 2.8, cast)
    over("cat_fresh", "pack against cat into fresh memory", 5.0, large)
    over("foreach_copy", "pack tiny tensors against _foreach_copy_", 5.0, tiny)
    bound = [r for r in rows if not r.refresh]
    over("foreach_copy", "pack tiny tensors that do not move against _foreach_copy_", 5.0, bound)
    goal("pack against a flat copy of as many bytes", 0.85, large, lambda row: row.flat_copy_s / row.ours_s)
    over("copy_views", "pack transposed against copy_", 1.0, transposed)
    over("copy_views", "unpack against copy_", 1.3, unpack)
    goal(
        "pack without hash against with",
        0.9,
        [row for row in rows if row.with_hash_s],
        lambda row: row.ours_s / (row.with_hash_s or row.ours_s),
    )
    return found


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    model = ""
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "cpu": model or platform.processor(),
        "cores": os.cpu_count(),
        "instruction_sets": instruction_sets(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "huge_pages": pages.read_text().strip() if pages.exists() else "",
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def peak_rss_in_child() -> list[int]:
    """As :func:`benchmark.peak_rss_of_syncs`, in a process that has done nothing else."""
    code = "import json; from grpo_lab.packing.benchmark import *; print(json.dumps(peak_rss_of_syncs()))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)  # noqa: S603
    peaks: list[int] = json.loads(done.stdout)
    return peaks


def label(row: Row) -> str:
    """A row in a few words."""
    dtypes = (
        row.source_dtype if row.source_dtype == row.wire_dtype else f"{row.source_dtype} to {row.wire_dtype}"
    )
    notes = [
        f"{row.bucket_bytes // MiB} MB",
        dtypes,
        "" if row.hash else "no hash",
        "" if row.refresh else "no refresh",
        f"{row.threads} threads",
    ]
    notes += [
        row.strides if row.strides != "contiguous" else "",
        row.layout if row.layout != "aligned" else "",
    ]
    return f"{row.op} {row.model}: " + ", ".join(filter(None, notes))


def table(rows: Sequence[Row]) -> Table:
    """Rates of ours, and each peer's time over ours."""
    shown = Table(title="peer's time / ours (more than 1: ours is faster); in brackets: / the flat copy's")
    peers = ["foreach_copy", "copy_views", "cat_out", "cat_fresh", "flatten_dense"]
    for column in ("case", "ours GB/s", "flat copy", *peers):
        shown.add_column(column, justify="left" if column == "case" else "right", no_wrap=True)
    for row in rows:
        cells = [
            f"{row.peers_s[name] / row.ours_s:.2f} ({limit(row, name):.2f})" if name in row.peers_s else ""
            for name in peers
        ]
        rate = f"{row.source_bytes / row.ours_s / 1e9:.1f}"
        shown.add_row(label(row), rate, f"{row.flat_copy_s / row.ours_s:.2f}", *cells)
    return shown


def goals_table(found: Sequence[Goal]) -> Table:
    shown = Table(title="goals")
    for column in ("goal", "wanted", "median", "limit", "worst", "rows", ""):
        shown.add_column(column, justify="left" if column == "goal" else "right", no_wrap=True)
    for g in found:
        bound = "" if g.limit is None else f"{g.limit:.2f}"
        figures = (f"{g.wanted:.2f}", f"{g.median:.2f}", bound, f"{g.worst:.2f}", str(g.rows))
        shown.add_row(g.name, *figures, g.verdict)
    return shown


def plot(rows: Sequence[Row], path: Path) -> None:
    """A bar for each contender's rate, a group for each row."""
    import matplotlib  # noqa: PLC0415 - slow to import, needed for the plot only

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.62 * len(rows)))
    names = ["ours", "flat copy", "foreach_copy", "copy_views", "cat_out", "cat_fresh", "flatten_dense"]
    height = 0.8 / len(names)
    for position, name in enumerate(names):
        seconds = [
            {"ours": r.ours_s, "flat copy": r.flat_copy_s}.get(name, r.peers_s.get(name)) for r in rows
        ]
        rates = [r.source_bytes / s / 1e9 if s else 0.0 for r, s in zip(rows, seconds, strict=True)]
        axes.barh([i + position * height for i in range(len(rows))], rates, height, label=name)
    axes.set_yticks([i + 0.4 for i in range(len(rows))], [label(r) for r in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("GB of source per second")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
