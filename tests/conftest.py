"""Settings of all tests.

Tests that interrupt a run need SIGINT: a shell that starts pytest in the background ignores it, for all
children too.

Property tests draw the same cases in every ``make test``, so that a change is judged by what it
changed. ``make nightly`` (profile ``nightly``) draws new ones each time: new bugs are looked for there.
"""

from __future__ import annotations

import signal

from hypothesis import settings

signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("repeatable", derandomize=True, database=None)
settings.register_profile("nightly", derandomize=False, print_blob=True)
settings.load_profile("repeatable")
