"""``timeline.pftrace``: the run as tracks for the Perfetto viewer.

Slices and counters are what the figures show, for the whole run: trainer steps and waits, syncs with
their states, engines' busy and paused times, samples in flight, queue depth and weight versions.
Format: perfetto.dev/docs/reference/synthetic-track-event, one packet for each begin, end or count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackDescriptor, TrackEvent
from perfetto.trace_builder.proto_builder import TraceProtoBuilder

from grpo_lab.report.digest import Digest
from grpo_lab.report.gantt import sync_slices
from grpo_lab.report.spans import Span, merged, without
from grpo_lab.report.training_log import Step

_SEQUENCE = 1  # all packets come from one writer
Notes = Mapping[str, int | float | str | None]


class Timeline:
    """Builds a trace of nested tracks; times are seconds since the run began."""

    def __init__(self) -> None:
        self._builder = TraceProtoBuilder()
        self._tracks = 0

    def track(self, name: str, parent: int = 0, *, counter_unit: str | None = None) -> int:
        """Adds a track below ``parent`` (0: at the top) and returns its number."""
        self._tracks += 1
        packet = self._builder.add_packet()
        packet.trusted_packet_sequence_id = _SEQUENCE
        descriptor = packet.track_descriptor
        descriptor.uuid, descriptor.name = self._tracks, _clean(name)
        descriptor.child_ordering = TrackDescriptor.EXPLICIT
        descriptor.sibling_order_rank = self._tracks
        if parent:
            descriptor.parent_uuid = parent
        if counter_unit is not None:
            descriptor.counter.unit_name = counter_unit
        return self._tracks

    def slice(self, track: int, name: str, span: Span, notes: Notes | None = None) -> None:
        """One slice. Slices of a track must nest;"""
        self.begin(track, name, span[0], notes)
        self.end(track, span[1])

    def begin(self, track: int, name: str, t: float, notes: Notes | None = None) -> None:
        event = self._event(track, t, TrackEvent.TYPE_SLICE_BEGIN)
        event.name = _clean(name)
        for key, value in (notes or {}).items():
            if value is None:
                continue
            annotation = event.debug_annotations.add()
            annotation.name = key
            if isinstance(value, str):
                annotation.string_value = _clean(value)
            elif isinstance(value, int):
                annotation.int_value = value
            else:
                annotation.double_value = value

    def end(self, track: int, t: float) -> None:
        self._event(track, t, TrackEvent.TYPE_SLICE_END)

    def instant(self, track: int, name: str, t: float) -> None:
        self._event(track, t, TrackEvent.TYPE_INSTANT).name = _clean(name)

    def count(self, track: int, series: Iterable[tuple[float, int]]) -> None:
        """A counter's changes; of several at one time only the last can be seen."""
        last: dict[int, int] = {}
        for t, value in sorted(series, key=lambda point: point[0]):
            last[_nanoseconds(t)] = value
        for at, value in last.items():
            self._event(track, at * 1e-9, TrackEvent.TYPE_COUNTER).counter_value = value

    def serialize(self) -> bytes:
        return bytes(self._builder.serialize())

    def _event(self, track: int, t: float, kind: TrackEvent.Type) -> TrackEvent:
        packet = self._builder.add_packet()
        packet.timestamp = _nanoseconds(t)
        packet.trusted_packet_sequence_id = _SEQUENCE
        packet.track_event.type = kind
        packet.track_event.track_uuid = track
        return packet.track_event


def timeline(digest: Digest) -> bytes:
    """The bytes of ``timeline.pftrace``."""
    line = Timeline()
    _trainer(line, digest)
    _syncs(line, digest)
    _worker(line, digest)
    for engine in digest.engines:
        top = line.track(engine.name)
        activity = line.track(
            "activity" if engine.seen_by == "engine" else "activity (seen by the client)", top
        )
        # A step may end after a pause began; slices of one track may not overlap.
        slices = [("generating", span) for span in without(engine.busy, engine.paused)]
        _in_order(line, activity, slices + [("paused", span) for span in engine.paused])
        if engine.versions:
            line.count(line.track("active version", top, counter_unit="version"), engine.versions)
        if engine.fenced_t is not None:
            line.instant(activity, "fenced", engine.fenced_t)
    if digest.incidents:
        track = line.track("incidents")
        for t, words in digest.incidents:
            line.instant(track, words, t)
    return line.serialize()


def _trainer(line: Timeline, digest: Digest) -> None:
    training = digest.training
    top = line.track(training.actor or "trainer")
    steps = line.track("optimizer steps", top)
    for step in training.steps:
        if step.begin_t is not None:
            line.slice(steps, f"step {step.step}", (step.begin_t, step.t), _step_notes(step))
    waits = line.track("waiting for samples", top)
    for span in merged(training.waiting):
        line.slice(waits, "waiting", span)
    committed = [(t, version) for t, _, version in digest.syncs.commits]
    if committed:
        line.count(line.track("committed version", top, counter_unit="version"), committed)


def _step_notes(step: Step) -> Notes:
    return {
        "version": step.version,
        "loss": step.loss,
        "reward_mean": step.reward_mean,
        "tokens": step.tokens,
        "samples": step.samples,
        "staleness_versions_max": max(step.staleness_versions, default=None),
    }


def _syncs(line: Timeline, digest: Digest) -> None:
    track = line.track("weight syncs")
    for sync in digest.syncs.syncs:
        end = sync.end_t if sync.end_t is not None else digest.end_t
        slices = sync_slices(sync, digest.end_t)
        begin = min(sync.begin_t, slices[0][1][0])
        phases = {f"{name}_s": seconds for name, seconds in sync.phases_s.items()}
        notes: Notes = {"outcome": sync.outcome, "attempts": sync.attempts, **phases}
        line.begin(track, f"sync v{sync.version}", begin, notes)
        for state, span in slices:
            line.slice(track, state, span)
        line.end(track, end)


def _worker(line: Timeline, digest: Digest) -> None:
    rollouts = digest.rollouts
    top = line.track("rollout worker")
    line.count(line.track("samples in flight", top, counter_unit="samples"), rollouts.in_flight_series)
    line.count(line.track("groups queued", top, counter_unit="groups"), rollouts.queue_series)


def _in_order(line: Timeline, track: int, slices: Sequence[tuple[str, Span]]) -> None:
    for name, span in sorted(slices, key=lambda item: item[1]):
        line.slice(track, name, span)


def _clean(text: str) -> str:
    """Protocol buffers take no lone surrogates, which JSON can hold."""
    return text.encode("utf-8", "replace").decode()


def _nanoseconds(t: float) -> int:
    return max(0, round(t * 1e9))
