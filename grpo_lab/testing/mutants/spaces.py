"""The clusters in which mutants are searched. Each exposes one kind of trouble and is small otherwise."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import strategies as st

from grpo_lab.sim.scenario import BUCKET_CALL, TRAINER, Fault, Scenario
from grpo_lab.testing.mutants.clusters import Clusters, varied

BASE = Scenario(
    engines=2, steps=3, prompts_per_step=1, generations=2, max_inflight=8, checkpoint_every_steps=1
)
_PAUSES = st.sampled_from(("keep", "abort", "wait"))
_NETWORK_S = st.sampled_from((0.0, 0.005, 0.05))


def work(**more: Any) -> dict[str, Any]:
    """What varies nearly everywhere."""
    return {
        "engines": st.integers(1, 2),
        "steps": st.integers(2, 4),
        "pause_mode": _PAUSES,
        "max_staleness": st.integers(0, 2),
        "weight_sync_steps": st.integers(1, 2),
        "prompts_per_step": st.integers(1, 2),
        "lengths": st.sampled_from(("geometric", "fixed", "heavy")),
        "network_s": _NETWORK_S,
        "jitter": st.sampled_from((0.0, 1.0, 10.0)),
        "seed": st.integers(0, 3),
        **more,
    }


def _fault(
    kinds: tuple[str, ...],
    calls: tuple[str, ...],
    targets: tuple[str, ...],
    durations_s: tuple[float, ...] = (0.5, 8.0),
    most: int = 4,
) -> st.SearchStrategy[Fault]:
    return st.builds(
        Fault,
        kind=st.sampled_from(kinds),
        target=st.sampled_from(targets),
        call=st.sampled_from(calls),
        occurrence=st.integers(1, most),
        duration_s=st.sampled_from(durations_s),
    )


def _some(fault: st.SearchStrategy[Fault], most: int = 2) -> st.SearchStrategy[tuple[Fault, ...]]:
    return st.lists(fault, min_size=1, max_size=most).map(tuple)


ENGINES = ("engine-0", "engine-1")
_SYNC_CALLS = ("start_update", "update", "finish_update")
_TRAINER_CALLS = ("pause", "start_update", "update", "finish_update", "resume")

QUIET = Clusters("quiet", varied(BASE, **work()))
"""No fault: what is broken is broken always, or under some schedule."""

CANARY = Clusters("canary", varied(dataclasses.replace(BASE, canary=True), **work()))
"""No fault; the engines' scores are compared with the trainer's own."""

LONG_REQUESTS = Clusters(
    "long requests",
    varied(
        dataclasses.replace(BASE, token_s=0.1, step_s=0.05, slots=6, queue_capacity=4, max_inflight=12),
        **work(
            mean_tokens=st.sampled_from((16, 32)), max_tokens=st.just(64), max_staleness=st.integers(1, 2)
        ),
    ),
)
"""Requests that are under way when weights change."""

FREE_ADMISSION = Clusters(
    "free admission",
    varied(
        dataclasses.replace(BASE, staleness_policy="drop", token_s=0.05, slots=8, max_inflight=12),
        **work(
            steps=st.integers(3, 6),
            staleness_policy=st.sampled_from(("drop", "freshest")),
            lengths=st.just("heavy"),
            max_tokens=st.just(64),
        ),
    ),
)
"""Nothing is held back; what has become too old is dropped at the end."""

UPDATE_ERRORS = Clusters(
    "update errors",
    varied(
        BASE,
        **work(
            engines=st.just(2),
            faults=_some(_fault(("error", "unavailable", "hang_reply", "lose_reply"), _SYNC_CALLS, ENGINES)),
        ),
    ),
)
"""Some call of an update is answered with 500 or 503, or not at all."""

SYNC_ERRORS = Clusters(
    "sync errors",
    varied(
        BASE,
        **work(
            engines=st.just(2),
            sync_attempts=st.integers(1, 2),
            min_engines=st.integers(1, 2),
            faults=_some(
                st.one_of(
                    _fault(("error", "hang_reply"), ("pause", *_SYNC_CALLS), ENGINES),
                    _fault(("oom",), ("finish_update",), ENGINES),
                )
            ),
        ),
    ),
)
"""A sync fails in some phase, also for good."""

BAD_BUCKETS = Clusters(
    "bad buckets",
    varied(
        BASE,
        **work(
            engines=st.just(2),
            faults=_some(_fault(("flip", "truncate", "lose", "repeat", "swap"), (BUCKET_CALL,), ENGINES)),
        ),
    ),
)
"""Buckets are damaged, lost, repeated or reordered on their way."""

REPEATED_CALLS = Clusters(
    "repeated calls",
    varied(
        BASE,
        **work(faults=_some(_fault(("duplicate", "lose_reply"), (*_SYNC_CALLS, "generate"), ("engine-0",)))),
    ),
)
"""Calls arrive twice, or are asked again because the answer was lost."""

DYING_ENGINE = Clusters(
    "dying engine",
    varied(
        dataclasses.replace(BASE, max_staleness=2),
        **work(
            engines=st.integers(1, 2),
            steps=st.integers(3, 6),
            step_s=st.sampled_from((0.5, 2.0)),
            faults=_some(
                _fault(
                    ("crash_before", "crash_after"), ("generate", *_TRAINER_CALLS), ENGINES[:1], (0.5, 2.0)
                ),
                1,
            ),
        ),
    ),
)
"""An engine dies and starts again."""

DYING_TRAINER = Clusters(
    "dying trainer",
    varied(
        BASE,
        **work(
            engines=st.just(1),
            steps=st.integers(3, 5),
            weight_sync_steps=st.just(1),
            faults=_some(_fault(("crash_before", "crash_after"), _TRAINER_CALLS, (TRAINER,), (0.5,)), 1),
        ),
    ),
)
"""The trainer dies and goes on from its newest checkpoint."""


def _overtaken(call: str, number: int, delay_s: float) -> tuple[Fault, ...]:
    """A call to the first engine is under way for ``delay_s``; the trainer dies in that to the second."""
    return (
        Fault("delay", ENGINES[0], call, number, delay_s),
        Fault("crash_before", TRAINER, call, 2 * number, 0.5),
    )


DELAYED_TERM = Clusters(
    "delayed messages of a dead trainer",
    varied(
        BASE,
        **work(
            engines=st.just(2),
            steps=st.integers(3, 4),
            step_s=st.sampled_from((2.0, 8.0)),
            faults=st.builds(
                _overtaken,
                st.sampled_from(("pause", "start_update", "resume")),
                st.integers(1, 3),
                st.sampled_from((4.0, 8.0)),
            ),
        ),
    ),
)
"""A message of a trainer that has died arrives when its successor is at work."""

BUSY_ENGINE = Clusters(
    "failing requests",
    varied(
        BASE,
        **work(
            steps=st.integers(3, 5),
            faults=_some(
                st.one_of(
                    _fault(("error",), ("generate",), ENGINES[:1], (0.5,), 8),
                    st.builds(
                        Fault,
                        kind=st.just("reward_error"),
                        target=st.just("worker"),
                        call=st.just("score_reward"),
                        occurrence=st.integers(1, 4),
                    ),
                )
            ),
            engines=st.just(1),
        ),
    ),
)
"""A rollout or its reward fails."""

SLOW_TRAINER = Clusters(
    "slow trainer",
    varied(
        dataclasses.replace(BASE, faults=(Fault("delay", "engine-0", "health", 1, 0.5),)),
        **work(steps=st.integers(4, 6), step_s=st.sampled_from((20.0, 40.0))),
    ),
)
"""Minutes of virtual time, in which little happens."""

LONG_LIFE = Clusters(
    "an engine that dies in a long run",
    varied(
        dataclasses.replace(BASE, engines=2, steps=10, step_s=60.0, mean_tokens=4),
        faults=_some(_fault(("crash_before",), ("pause", "start_update", "finish_update"), ENGINES[:1]), 1),
        seed=st.integers(0, 3),
        pause_mode=_PAUSES,
    ),
)
"""Ten minutes after an engine has started again."""

ROLLING = Clusters(
    "rolling syncs",
    varied(
        dataclasses.replace(
            BASE, sync_scope="rolling", token_s=0.1, step_s=0.05, slots=6, queue_capacity=4, max_inflight=12
        ),
        **work(
            engines=st.just(2),
            mean_tokens=st.sampled_from((16, 32)),
            max_tokens=st.just(64),
            max_staleness=st.integers(1, 2),
            sync_attempts=st.integers(1, 2),
            min_engines=st.integers(1, 2),
            faults=_some(_fault(("error", "lose_reply"), ("pause", *_SYNC_CALLS), ENGINES)),
        ),
    ),
)
"""Engines take turns while requests are under way, and some call of a sync fails."""

HEIRS = Clusters(
    "what a dead trainer has left",
    varied(
        dataclasses.replace(BASE, engines=1),
        faults=st.tuples(
            _fault(("crash_after", "crash_before"), ("finish_update", "resume"), (TRAINER,), (0.5,)),
            _fault(("refuse", "error"), ("pause",), ENGINES[:1], (0.5,)),
        ),
        pause_mode=_PAUSES,
        seed=st.integers(0, 3),
    ),
)
"""A trainer dies about a commit, and the next one's sync is given up."""

RESUME_ERRORS = Clusters(
    "resume errors",
    varied(
        BASE,
        **work(engines=st.just(2), faults=_some(_fault(("error", "unavailable"), ("resume",), ENGINES))),
    ),
)
"""A resume is refused."""

FAILED_SYNCS = Clusters(
    "syncs that bad buckets end",
    varied(
        BASE,
        **work(
            engines=st.just(2),
            sync_attempts=st.just(1),
            faults=_some(_fault(("flip", "truncate", "lose"), (BUCKET_CALL,), ENGINES, most=8), 1),
        ),
    ),
)
"""A damaged bucket, and no second attempt."""

SLOW_LINKS = Clusters("slow links", varied(BASE, **work(bandwidth_bytes_s=st.sampled_from((5e3, 2e4)))))
"""Weights take longer than messages."""

OUT_OF_ORDER = Clusters(
    "out of order",
    varied(
        dataclasses.replace(BASE, lengths="heavy", slots=8, queue_capacity=6, max_inflight=12, token_s=0.05),
        **work(
            lengths=st.just("heavy"),
            mean_tokens=st.just(8),
            max_tokens=st.just(64),
            max_staleness=st.integers(1, 3),
            staleness_policy=st.sampled_from(("admission", "window")),
            steps=st.integers(3, 6),
        ),
    ),
)
"""Groups are complete in another order than that in which they were sent."""

MANY_PREFIXES = Clusters(
    "repeated prefixes",
    varied(
        dataclasses.replace(BASE, engines=1, prompts_per_step=4, max_inflight=16, queue_capacity=6),
        **work(engines=st.just(1), steps=st.integers(3, 5), prompts_per_step=st.just(4)),
    ),
)
"""Every fourth prompt begins with the same tokens, over several versions."""

CROWDED = Clusters(
    "more requests than places",
    varied(
        dataclasses.replace(
            BASE, token_s=0.1, step_s=0.05, prompts_per_step=2, generations=3, queue_capacity=6
        ),
        **work(
            engines=st.just(1),
            slots=st.integers(1, 2),
            max_inflight=st.sampled_from((12, 18)),
            prompts_per_step=st.just(2),
            mean_tokens=st.just(16),
            max_tokens=st.just(64),
            max_staleness=st.integers(1, 2),
        ),
    ),
)
"""Requests wait for a place in the engine when it pauses."""

SCHEDULES = Clusters(
    "schedules",
    st.just(
        dataclasses.replace(
            BASE,
            engines=1,
            steps=3,
            network_s=0.0,
            jitter=0.0,
            step_s=0.05,
            token_s=0.2,
            mean_tokens=16,
            max_tokens=64,
            max_staleness=1,
        )
    ),
)
"""One cluster without delays or faults; only the order of events that are due together varies."""

MANY_SYNCS = Clusters(
    "many syncs",
    varied(
        dataclasses.replace(BASE, engines=1, steps=14, step_s=0.05, generations=1, checkpoint_every_steps=0),
        seed=st.integers(0, 3),
        pause_mode=_PAUSES,
        network_s=_NETWORK_S,
    ),
)
"""Enough syncs for a detector that takes a mean."""
