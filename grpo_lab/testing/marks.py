"""Situations that a long campaign must have met: where one was never reached, nothing was tested."""

from __future__ import annotations

MUST_BE_REACHED: dict[str, str] = {
    "admission-blocked-by-bound": "a prompt waited for the staleness bound",
    "admission-blocked-by-inflight": "a prompt waited for a place among those under way",
    "began-again-from-nothing": "a trainer died before its first checkpoint",
    "committed-by-restarted-trainer": "a later term committed",
    "committed-by-retry": "a version was committed by a second attempt",
    "consumed-stale-sample": "a sample of an older version was trained on",
    "died-engine": "an engine died",
    "died-trainer": "the trainer died",
    "died-worker": "the rollout worker died",
    "dropped-request_failed": "a group was lost to an engine's failure",
    "dropped-reward_failed": "a group was lost to a reward function",
    "dropped-shutdown": "a group was under way at the end",
    "dropped-stale": "a group grew too old",
    "dropped-term_ended": "a group was lost with its term",
    "engine-dropped-update": "an engine gave up an update",
    "engine-fenced": "an engine was taken out of service",
    "engine-taken-in-again": "a fenced engine restarted and serves again",
    "request-aborted": "a request was returned unfinished",
    "request-arrived-in-pause": "a request reached a paused engine",
    "request-refused-503": "a rollout reached an engine without synced weights",
    "restarted-engine": "an engine came back",
    "resumed-from-checkpoint": "a trainer went on from a checkpoint",
    "sample-over-two-versions": "a completion spans two versions",
    "sync-attempt-failed": "an attempt failed and another followed",
    "sync-given-up": "a sync was given up",
    "sync-under-traffic": "a sync began while requests were running",
    "trainer-starved": "the trainer waited for samples",
}


def marks_table(marks: dict[str, int]) -> str:
    """One line for each situation: how often it was met, its name, what it is."""
    return "\n".join(
        f"{marks.get(name, 0) or 'NEVER':>8}  {name:<32} {words}" for name, words in MUST_BE_REACHED.items()
    )
