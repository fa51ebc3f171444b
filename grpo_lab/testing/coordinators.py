"""The coordinator that a name stands for. Imports no torch: a wrong name is told at once."""

from __future__ import annotations

import importlib

from grpo_lab.errors import ConfigError
from grpo_lab.protocol.coordinator import Coordinator

MUTANT = "mutant:"
"""Begins the name of a protocol that is no class but a planted fault."""


def load_coordinator(name: str) -> type[Coordinator]:
    """``module:Class``; "" is the protocol's own. Raises ``ConfigError`` for what is no coordinator."""
    if not name:
        return Coordinator
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError("coordinator", name, f"module:Class that can be imported ({error})") from error
    if not (isinstance(found, type) and issubclass(found, Coordinator)):
        raise ConfigError("coordinator", name, "a subclass of grpo_lab.protocol.coordinator.Coordinator")
    return found
