"""Valid runs of several shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from check_syncs import NBYTES, TOKENS, Engine
from check_world import World

from grpo_lab import events as ev
from grpo_lab.events import Record


def fresh_run(**options: Any) -> World:
    world = World(**options)
    world.begin_term()
    world.sync()
    world.start_worker()
    world.rounds(3)
    return world


def finished(world: World) -> World:
    world.end()
    return world


def resumed_run() -> World:
    """The trainer dies two steps after a checkpoint; the next term goes back to it."""
    world = World()
    world.begin_term()
    world.sync()
    world.start_worker()
    world.rounds(2)
    saved = world.checkpoint()
    world.rounds(1)
    lost = world.group()
    world.ready.remove(lost)
    world.drop(lost, "shutdown")
    world.emit("run", ev.MemberDied(member="trainer", detail="killed"), after="trainer")
    world.emit("run", ev.MemberStopped(member="worker"), after="worker")
    world.emit("run", ev.MemberStarted(member="trainer", role="trainer", incarnation=2))
    world.others.append("trainer")
    world.begin_term(saved)
    world.sync()
    world.start_worker()
    world.rounds(2)
    return world


def trained_twice() -> World:
    world = World()
    for _ in range(2):
        world.begin_term()
        world.sync()
        world.start_worker()
        world.rounds(2)
        world.stop_worker()
    world.begin_term()
    world.sync()
    world.start_worker()
    return world


def retried_sync() -> World:
    world = World()
    world.begin_term()
    world.sync(failures=2)
    world.start_worker()
    world.rounds(2, failures=1)
    return world


def fenced_engine() -> World:
    world = World(engines=3)
    world.begin_term()
    world.sync()
    world.start_worker()
    world.rounds(3, failures=2, fence="engine-2")
    return world


def aborted_sync() -> World:
    """Every attempt fails: all run on with the previous version, and the next sync takes the same number."""
    world = fresh_run()
    version = world.version + 1
    world.emit(
        "trainer",
        ev.SyncBegan(
            term=1, version=version, attempt=1, view=1, members=world.names, optimizer_step=world.steps
        ),
    )
    world.state("running", "pausing")
    for engine in world.live:
        world.pause(engine)
    world.state("pausing", "paused")
    world.attempt(version, 1, fails=True)
    place = {"term": 1, "version": version, "attempt": 1}
    world.emit("trainer", ev.SyncAborted(**place, reason="corrupt", final=True), after="engine-0")
    world.state("paused", "aborting")
    world.state("aborting", "resuming")
    for engine in world.live:
        world.resume(engine)
    world.state("resuming", "running")
    world.sync_ended(version, "aborted")
    world.rounds(2)
    return world


def pause_in_the_middle() -> World:
    """Requests frozen by keep decode on under the new version: two spans a sample."""
    world = fresh_run()
    group = world.admit()
    engine = world.engines[0]
    spans: dict[str, list[tuple[int, ...]]] = {}
    for sample in group["samples"]:
        world.dispatch(group, sample, engine)
    for sample in group["samples"]:
        group.setdefault("first", {})[sample] = engine.version[1]
        spans[sample] = [world.decode(engine, 0, 3)]
    held = len(group["samples"])
    world.group(world.engines[1])
    other = world.group(world.engines[1])
    assert other["number"] > group["number"]
    with_counts(world, engine, running=held)
    for sample in group["samples"]:
        group.setdefault("last", {})[sample] = engine.version[1]
        spans[sample].append(world.decode(engine, 3, TOKENS))
        rows = tuple(spans[sample])
        world.request_finished(sample, engine, "stop", TOKENS, rows)
        world.completed(group, sample, engine, tuple(row[:4] for row in rows))
    world.emit("worker", ev.GroupScored(term=1, group=group["group"], rewards=(0.0, 1.0)))
    world.ready.insert(0, group)
    world.emit("worker", ev.GroupQueued(term=1, group=group["group"], number=group["number"], depth=3))
    world.step()
    world.sync()
    return world


def with_counts(world: World, engine: Engine, running: int) -> None:
    """A sync during which ``engine`` holds ``running`` requests."""
    place = len(world.records)
    world.sync()
    for index in range(place, len(world.records)):
        record = world.records[index]
        if isinstance(record.event, ev.EnginePaused) and record.event.engine == engine.name:
            event = dataclasses.replace(record.event, running=running)
            world.records[index] = dataclasses.replace(record, event=event)


def aborted_and_continued() -> World:
    """pause(abort) returns requests with their partial tokens; the worker takes them up again."""
    world = fresh_run(pause_mode="abort")
    group = world.admit()
    engine = world.engines[0]
    for sample in group["samples"]:
        world.dispatch(group, sample, engine)
    parts: dict[str, list[tuple[int, ...]]] = {}
    for sample in group["samples"]:
        group.setdefault("first", {})[sample] = engine.version[1]
        parts[sample] = [world.decode(engine, 0, 3)]
    place = len(world.records)
    world.sync()
    pause = next(
        index
        for index in range(place, len(world.records))
        if isinstance(world.records[index].event, ev.EnginePaused)
        and world.records[index].event.engine == engine.name
    )
    insert_aborts(world, pause, engine, group, parts)
    for sample in group["samples"]:
        request = f"{sample}.c1"
        world.request_admitted(request, engine)
        row = world.decode(engine, 0, 5)
        world.request_finished(request, engine, "stop", 5, (row,))
        group.setdefault("last", {})[sample] = engine.version[1]
        first = parts[sample][0]
        world.completed(group, sample, engine, (first[:4], (row[0], row[1], 3, TOKENS)))
    world.emit("worker", ev.GroupScored(term=1, group=group["group"], rewards=(0.0, 1.0)))
    world.ready.append(group)
    world.emit("worker", ev.GroupQueued(term=1, group=group["group"], number=group["number"], depth=1))
    world.group()
    world.step()
    world.sync()
    return world


def insert_aborts(
    world: World, pause: int, engine: Engine, group: dict[str, Any], parts: dict[str, list[tuple[int, ...]]]
) -> None:
    """The engine's answers to the aborted requests, just before its pause is told."""
    told = world.records[pause]
    inserted = [
        Record(
            told.t,
            engine.name,
            0,
            (),
            ev.RequestFinished(
                engine=engine.name,
                request=sample,
                finish_reason="abort",
                tokens=3,
                spans=(parts[sample][0],),
                kv_version=parts[sample][0][1],
            ),
        )
        for sample in group["samples"]
    ]
    event = dataclasses.replace(told.event, aborted=tuple(group["samples"]))  # type: ignore[arg-type]
    world.records[pause] = dataclasses.replace(told, event=event)
    world.records[pause:pause] = inserted
    renumber(world, engine.name)


def renumber(world: World, actor: str) -> None:
    """Gives the actor's records their numbers again, and everything that refers to them follows."""
    new: dict[int, int] = {}
    seq = 0
    for index, record in enumerate(world.records):
        if record.actor == actor:
            if record.cause or record.seq or not new:
                new.setdefault(record.seq, seq)
            world.records[index] = dataclasses.replace(record, seq=seq)
            seq += 1
    shift = sorted(new.items())

    def moved(old: int) -> int:
        return max((after for before, after in shift if before <= old), default=old)

    for index, record in enumerate(world.records):
        cause = tuple(
            f"{actor}:{moved(int(item.rpartition(':')[2]))}" if item.rpartition(":")[0] == actor else item
            for item in record.cause
        )
        event = record.event
        if isinstance(event, ev.ModelStep) and record.actor == actor:
            event = dataclasses.replace(event, began_seq=record.seq)
        world.records[index] = dataclasses.replace(record, cause=cause, event=event)
    recorder = world.by[actor]
    recorder._next_seq = seq


def rolling_run() -> World:
    """Engine by engine: while one takes the new version, the other serves the old one."""
    world = World(scope="rolling")
    world.begin_term()
    world.sync()
    world.start_worker()
    world.rounds(1)
    world.group()
    world.group()
    world.step()
    version = world.version + 1
    world.emit(
        "trainer",
        ev.SyncBegan(
            term=1, version=version, attempt=1, view=1, members=world.names, scope="rolling", optimizer_step=2
        ),
    )
    place = {"term": 1, "version": version, "attempt": 1}
    hashes = tuple(1000 + 10 * version + bucket for bucket in range(2))
    for engine in world.engines:
        world.pause(engine)
        world.emit(engine.name, ev.UpdateStarted(engine=engine.name, **place), after="trainer")
        if engine is world.engines[0]:
            for bucket, nbytes in enumerate(NBYTES):
                slot = {"bucket": bucket, "slot": bucket}
                world.emit("trainer", ev.BucketPackBegan(**place, **slot))
                packed = ev.BucketPacked(**place, **slot, nbytes=nbytes, hash64=hashes[bucket])
                world.emit("trainer", packed)
            world.emit(
                "trainer",
                ev.WeightsPublished(
                    **place, plan_digest="plan", tensors=9, bucket_nbytes=NBYTES, bucket_hashes=hashes
                ),
            )
        world.receive(engine, place, hashes)
        world.load(engine, place)
        world.prove(engine, place)
        world.resume(engine)
    for bucket in range(2):
        world.emit("trainer", ev.SlotReleased(slot=bucket, bucket=bucket))
    world.commit(version, 1)
    world.sync_ended(version, "committed")
    return world


def restarted_engine() -> World:
    world = fresh_run()
    engine = world.engines[1]
    world.emit("run", ev.MemberDied(member=engine.name, detail="killed"))
    world.emit("trainer", ev.EngineFenced(engine=engine.name, reason="dead", term=1), after="run")
    engine.fenced = True
    world.declare_view()
    world.rounds(1)
    world.emit("run", ev.MemberStarted(member=engine.name, role="engine", incarnation=2))
    engine.fenced, engine.version, engine.step = False, (0, 0), 1
    world.declare_view()
    world.emit("trainer", ev.HandshakeCompared(engine=engine.name, ours="plan", theirs="plan"))
    world.group(world.engines[0])
    world.group(world.engines[0])
    world.step()
    world.sync()
    world.rounds(1)
    return world


def stock_engines() -> World:
    """Engines that write no events: only what their clients saw of them is in the trace."""
    return fresh_run(stock=True)


def foreign_trainer() -> list[Record]:
    """Another trainer's log: no parameters, no engines' events, commits and consumption only."""
    records = [
        Record(
            0.0, "log", 0, (), ev.RunDeclared(world="real", engine="other", parameters={"max_staleness": 2})
        )
    ]
    place = {"term": 1, "attempt": 1, "view": 1, "members": ("http://engine",)}
    for version in range(1, 4):
        records.append(
            Record(float(version), "log", len(records), (), ev.VersionCommitted(version=version, **place))
        )
        records.append(
            Record(
                version + 0.5,
                "log",
                len(records),
                (),
                ev.GroupConsumed(
                    term=1,
                    group=f"g{version}",
                    number=version,
                    prompt_index=version,
                    samples=(f"s{version}",),
                    versions_first=(max(1, version - 1),),
                    versions_last=(version,),
                    version=version,
                    optimizer_step=version,
                ),
            )
        )
    return records


SHAPES: dict[str, Callable[[], World]] = {
    "fresh run": fresh_run,
    "one engine": lambda: fresh_run(engines=1),
    "resumed with a higher term": resumed_run,
    "trained twice": trained_twice,
    "retried sync": retried_sync,
    "fenced engine": fenced_engine,
    "aborted sync": aborted_sync,
    "pause in the middle": pause_in_the_middle,
    "aborted and continued": aborted_and_continued,
    "rolling scope": rolling_run,
    "restarted engine": restarted_engine,
    "stock engines": stock_engines,
}
