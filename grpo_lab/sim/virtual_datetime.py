"""``datetime.now`` and ``utcnow`` in virtual time, under whatever name a module holds the class."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone, tzinfo
from typing import Any


@contextmanager
def virtual_datetime(virtual: Callable[[], bool], unix_s: Callable[[], float]) -> Iterator[None]:
    """Within the block, where ``virtual()`` holds, the class reads ``unix_s()``; a naive time is in UTC.

    The methods are exchanged in the class itself. A substitute class would miss every module that has
    said ``from datetime import datetime``, and could not be pickled. ``date.today`` and
    ``datetime.today`` need nothing: they ask ``time.time``.
    """
    methods = _methods_of(datetime)
    real_now, real_utcnow = methods["now"], methods["utcnow"]

    def now(cls: type[datetime], tz: tzinfo | None = None) -> datetime:
        if not virtual():
            return real_now.__get__(None, cls)(tz)  # type: ignore[no-any-return]
        at = cls.fromtimestamp(unix_s(), tz or timezone.utc)  # noqa: UP017 - the alias is no older
        return at if tz is not None else at.replace(tzinfo=None)

    def utcnow(cls: type[datetime]) -> datetime:
        return now(cls) if virtual() else real_utcnow.__get__(None, cls)()

    _set(methods, now=classmethod(now), utcnow=classmethod(utcnow))
    try:
        yield
    finally:
        _set(methods, now=real_now, utcnow=real_utcnow)


def _methods_of(cls: type) -> dict[str, Any]:
    """The dictionary behind ``cls.__dict__``, which by itself can only be read."""
    (methods,) = gc.get_referents(cls.__dict__)
    assert isinstance(methods, dict)
    return methods


def _set(methods: dict[str, Any], **replaced: Any) -> None:
    methods.update(replaced)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(datetime))  # method caches must look again
