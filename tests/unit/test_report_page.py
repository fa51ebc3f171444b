"""The page, the figures, the timeline and the files of a report."""

from __future__ import annotations

import json
import math
import re
import shutil
from html.parser import HTMLParser

import pyarrow.parquet as pq
import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent
from report_trace import CHECKED, HOSTILE, Run, synthetic

from grpo_lab import events as ev
from grpo_lab.cli.report import report
from grpo_lab.errors import TraceError
from grpo_lab.events import Record
from grpo_lab.report.digest import Digest
from grpo_lab.report.figures import charts
from grpo_lab.report.files import read_trace, write_report
from grpo_lab.report.html import flat, number, seconds
from grpo_lab.report.style import thinned
from grpo_lab.report.timeline import timeline


class Page(HTMLParser):
    """Collects what a browser would load, run or show."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.references: list[str] = []
        self.handlers: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags[tag] = self.tags.get(tag, 0) + 1
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action", "data", "srcset"):
                self.references.append(value or "")
            if name.startswith("on"):
                self.handlers.append(name)

    def handle_data(self, data):
        self.text += data


def write_run(directory, records, **files):
    directory.mkdir(parents=True, exist_ok=True)
    lines = "".join(record.to_line() + "\n" for record in records).replace("\ud800", r"\ud800")
    (directory / "events.jsonl").write_text(lines, encoding="utf-8")
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value))
    return directory


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "quickstart-1"
    files = {"config": {"trainer": {"learning_rate": 0.001}}, "env": {"python": "3.11"}}
    write_run(directory, synthetic()[0], **files)
    write_report(directory, CHECKED)
    return directory


def test_the_page_needs_nothing_but_itself(run_dir):
    text = (run_dir / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.references
    assert all(reference.startswith("#") or reference == "data:," for reference in page.references)
    assert not {"script", "iframe", "object", "img", "embed"} & set(page.tags)
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert len(text.encode()) < 2_000_000
    assert page.tags["svg"] == 9  # every figure has data in a whole run


def test_references_inside_figures_are_defined(run_dir):
    text = (run_dir / "report.html").read_text(encoding="utf-8")
    defined = re.findall(r' id="([^"]+)"', text)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    assert used <= set(defined)
    assert len(defined) == len(set(defined))


def test_the_page_says_what_was_found(run_dir):
    page = Page((run_dir / "report.html").read_text(encoding="utf-8"))
    for words in (
        "quickstart-1",
        "measured",
        "ended: clean",
        "0.250 → 0.850",
        "208 = 160 + 48",
        "S18",
        "group <g7> is 5 > 4",
        "trainer:90",
        "engines of one rank",
        "structure and canary only, never verified by hash",
        "trainer.learning_rate",
    ):
        assert words in page.text, words


def test_hostile_strings_stay_text(tmp_path):
    records, _ = Run(engine_names=(HOSTILE, "$\\frac{a}{b}$ ]]> <!-- & \u4e2d")).play(cut_t=2.0)
    checked = {
        "violations": 1,
        "rules": [
            {
                "id": HOSTILE,
                "words": HOSTILE,
                "status": HOSTILE,
                "evaluations": 1,
                "violations": [{"message": HOSTILE, "event_ids": [HOSTILE], "t": 1.0}],
                "note": HOSTILE,
            }
        ],
    }
    ended = ev.RunEnded(outcome=HOSTILE, detail=HOSTILE)
    died = ev.MemberDied(member=HOSTILE, detail="\ud800")
    odd = ev.Evaluated(split=HOSTILE, accuracy=0.5, optimizer_step=1, version=1, prompts=1)
    drop = ev.GroupDropped(
        term=1, group="g", prompt_index=0, samples=("g0.0", "g1.0", "g2.0"), reason=HOSTILE
    )
    records += [Record(2.0, "late", seq, (), item) for seq, item in enumerate((died, odd, drop, ended))]
    directory = tmp_path / "run"
    write_run(directory, records, config={HOSTILE: HOSTILE}, env={"x": {HOSTILE: [HOSTILE]}})
    page = Page(write_report(directory, checked).read_text(encoding="utf-8"))
    assert "script" not in page.tags
    assert not page.handlers
    assert page.text.count(HOSTILE) >= 10
    assert timeline(Digest(records))  # a lone surrogate does not stop it


def test_figures_without_data_say_so_in_words():
    drawn = charts(Digest([]))
    assert {chart.svg for chart in drawn.values()} == {""}
    assert all(len(chart.words) > 20 for chart in drawn.values())


def test_figures_are_reproducible_and_leave_the_settings_alone():
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    digest = Digest(synthetic()[0])
    assert charts(digest) == charts(digest)
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize("cut_t", [0.0, 0.05, 0.13, 1.21])
def test_a_run_cut_off_anywhere_still_has_a_report(tmp_path, cut_t):
    directory = write_run(tmp_path / "run", synthetic(cut_t=cut_t)[0])
    with (directory / "events.jsonl").open("a") as trace:
        trace.write('{"t":9.0,"actor":"trai')  # the line in the making
    page = Page(write_report(directory).read_text(encoding="utf-8"))
    assert "ended: cut off" in page.text
    assert "not checked" in page.text
    assert sorted(path.name for path in directory.iterdir()) == [
        "events.jsonl",
        "metrics.parquet",
        "report.html",
        "timeline.pftrace",
    ]


def test_one_event_is_enough(tmp_path):
    directory = write_run(tmp_path / "run", [Record(0.0, "trainer", 0, (), ev.RunDeclared(world="sim"))])
    assert "simulated" in Page(write_report(directory).read_text(encoding="utf-8")).text


def test_numbers_that_are_not_finite_do_not_stop_the_report(tmp_path):
    step = ev.OptimizerStepApplied(
        term=1, optimizer_step=1, version=1, loss=math.nan, reward_mean=math.nan, duration_s=1.0
    )
    gap = ev.LogprobGapMeasured(version=1, gap_max=math.inf, gap_mean=math.nan, tokens=1)
    records = [Record(float(seq), "trainer", seq, (), item) for seq, item in enumerate((step, gap))]
    page = Page(write_report(write_run(tmp_path / "run", records)).read_text(encoding="utf-8"))
    assert "not finite" in page.text


def test_metrics_are_written(run_dir):
    assert pq.read_table(run_dir / "metrics.parquet").num_rows == 20


def test_timeline_parses_back_and_its_slices_nest(run_dir):
    trace = Trace.FromString((run_dir / "timeline.pftrace").read_bytes())
    described = [packet.track_descriptor for packet in trace.packet if packet.HasField("track_descriptor")]
    tracks = {track.uuid: track for track in described}
    names = [track.name for track in tracks.values()]
    assert {"trainer", "rollout worker", "weight syncs", "engine-0", "engine-1"} <= set(names)
    assert all(track.parent_uuid in tracks for track in tracks.values() if track.parent_uuid)
    events = [packet for packet in trace.packet if packet.HasField("track_event")]
    slices: dict[int, list[str]] = {uuid: [] for uuid in tracks}
    begun: list[str] = []
    last: dict[int, int] = {}
    for packet in events:
        event = packet.track_event
        assert packet.timestamp >= last.get(event.track_uuid, 0)
        last[event.track_uuid] = packet.timestamp
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            slices[event.track_uuid].append(event.name)
            begun.append(event.name)
        elif event.type == TrackEvent.TYPE_SLICE_END:
            slices[event.track_uuid].pop()
    assert not any(slices.values())
    assert [name for name in begun if name.startswith("step ")] == [f"step {n}" for n in range(1, 21)]
    assert begun.count("transferring") == begun.count("paused") / 2 == 11
    assert len(events) < len(synthetic()[0])  # steps of an engine are merged


def test_counters_give_the_samples_in_flight():
    trace = Trace.FromString(timeline(Digest(synthetic()[0])))
    tracks = [packet.track_descriptor for packet in trace.packet]
    (uuid,) = (track.uuid for track in tracks if track.name == "samples in flight")
    counts = [p.track_event.counter_value for p in trace.packet if p.track_event.track_uuid == uuid]
    assert max(counts) == 24
    assert counts[-1] == 0


def test_a_damaged_line_is_named(tmp_path):
    lines = [record.to_line() for record in synthetic(cut_t=0.2)[0]]
    lines[3] = lines[3][:20]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(TraceError, match="line 4"):
        write_report(tmp_path)


def test_kinds_of_a_newer_schema_are_skipped(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"t":0,"actor":"a","seq":0,"kind":"from_the_future"}\n')
    assert list(read_trace(path)) == []
    with pytest.raises(TraceError, match="no event"):
        write_report(tmp_path)


def test_summary_fills_in_what_the_trace_does_not_say(tmp_path):
    written = {"commit": "0123456789abcdef", "dispatched": 99, "violations": 0, "rules_evaluated": {"S1": 5}}
    directory = write_run(tmp_path / "run", synthetic(cut_t=1.0)[0], summary=written)
    page = Page(write_report(directory).read_text(encoding="utf-8"))
    assert "0123456789ab" in page.text
    assert "1 rule evaluated 5 times" in page.text
    assert "99 =" not in page.text  # the trace counts, not an older summary


def test_a_check_result_beside_the_trace_is_shown(tmp_path):
    directory = write_run(tmp_path / "run", synthetic(cut_t=0.2)[0], check=CHECKED)
    assert "staleness at consumption" in Page(write_report(directory).read_text(encoding="utf-8")).text
    (directory / "check.json").write_text('{"rules": 3}')
    with pytest.raises(TraceError, match=r"check\.json"):
        write_report(directory)


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_broken_side_file_is_named(tmp_path, content):
    directory = write_run(tmp_path / "run", synthetic(cut_t=0.2)[0])
    (directory / "config.json").write_text(content)
    with pytest.raises(TraceError, match=r"config\.json"):
        write_report(directory)


def test_command_makes_reports_again(run_dir, tmp_path, capsys):
    directory = tmp_path / "copy"
    shutil.copytree(run_dir, directory)
    (directory / "report.html").unlink()
    assert report((directory,)) == 0
    assert (directory / "report.html").is_file()
    assert str(directory / "report.html") in capsys.readouterr().out


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_command_refuses_a_directory_without_a_trace(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match=name) as caught:
        report((tmp_path / name,))
    assert caught.value.exit_code == 2


def test_figures_are_written_as_people_read_them():
    assert [number(value) for value in (0, 7, 12345, 0.25, 12.34, 2.5e-7, 1234.5)] == [
        "0",
        "7",
        "12,345",
        "0.250",
        "12.3",
        "2.5e-07",
        "1,234",
    ]
    assert [seconds(value) for value in (0.0123, 2.5, 75, 7260)] == [
        "12.3 ms",
        "2.5 s",
        "1 min 15 s",
        "2 h 1 min",
    ]
    assert list(flat({"a": {"b": 1, "c": {}}, "d": "x"})) == [("a.b", "1"), ("a.c", "{}"), ("d", "x")]


def test_thinning_keeps_the_extremes():
    points = [(float(i), math.sin(i / 50)) for i in range(10_000)]
    points[4321] = (4321.0, 9.0)
    kept = thinned(points, limit=400)
    assert len(kept) <= 404
    assert (4321.0, 9.0) in kept
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
