"""Every exception that grpo_lab raises on purpose.

    GrpoLabError                       exit code 3: the run failed
    |- UserError                       exit code 2: bad input, nothing was started or lost
    |  |- ConfigError                  a field, its value, the range, the fix
    |  |- DataError                    a data set or file that cannot be used
    |  |- ModelError                   a model or tokenizer that cannot be used
    |  `- TraceError                   a trace that cannot be read
    |- PackingError                    tensors that do not fit the plan
    |  `- BucketCorrupt                a bucket whose size or hash is not the declared one
    |- HandshakeError                  the two sides of a weight transfer disagree (H1)
    |- TransportError                  bytes did not arrive
    |  |- TransportTimeout
    |  `- PeerDied
    |- EngineError                     an inference engine did not do what was asked
    |  |- EngineUnreachable
    |  |- EngineTimeout
    |  `- EngineRefused                an HTTP status other than 2xx, with the server's body
    |- WorkerError                     the rollout worker cannot go on
    |  |- WorkerDied
    |  `- WorkerStalled
    |- RewardError                     a reward function raised or returned the wrong shape
    |- PhaseTimeout                    a bounded wait ran out; says who waited for what
    |- SyncError                       a weight sync failed and training cannot continue
    |- SimulationError                 a simulated world cannot go on
    |  |- Deadlock                     nothing is ready, no timer is set, the main task has not ended
    |  |- EscapedSimulation            simulated code reached for the real world
    |  |- SimulationBoundExceeded      virtual time or callbacks ran past their bound
    |  `- Nondeterminism               two runs of one case differ
    `- InvariantViolation              exit code 1: a rule of the protocol was broken

Messages name the value, the limit and the fix.
"""

from __future__ import annotations

from typing import ClassVar


class GrpoLabError(Exception):
    """Base of the tree. ``exit_code`` is what the command line returns for it."""

    exit_code: ClassVar[int] = 3


class UserError(GrpoLabError):
    """The caller can fix this; nothing was started or lost."""

    exit_code: ClassVar[int] = 2


class ConfigError(UserError, ValueError):
    """A configuration field has a value that cannot work."""

    def __init__(self, field: str, value: object, expected: str, fix: str = "") -> None:
        self.field = field
        self.value = value
        message = f"{field}={value!r}: expected {expected}"
        super().__init__(f"{message}. {fix}" if fix else message)

    def __reduce__(self) -> tuple[type[Exception], tuple[str]]:
        # Its constructor takes four arguments, so the default pickling of exceptions would fail.
        return (UserError, (str(self),))


class DataError(UserError):
    """A data set, column or file that cannot be used."""


class ModelError(UserError):
    """A model directory or tokenizer that cannot be used."""


class TraceError(UserError):
    """A trace file that is missing, damaged or of an unknown schema."""


class PackingError(GrpoLabError):
    """Tensors, buckets or buffers do not fit the bucket plan."""


class BucketCorrupt(PackingError):
    """A bucket's size or hash differs from what its sender declared."""


class HandshakeError(GrpoLabError):
    """Both sides of a weight transfer must agree on the plan; this names the first difference."""


class TransportError(GrpoLabError):
    """A weight transport could not move a bucket."""


class TransportTimeout(TransportError):
    """The other side did not answer within its bound."""


class PeerDied(TransportError):
    """The other side closed the connection."""


class EngineError(GrpoLabError):
    """An inference engine did not do what was asked."""


class EngineUnreachable(EngineError):
    """No connection to the engine."""


class EngineTimeout(EngineError):
    """The engine did not answer within its bound."""


class EngineRefused(EngineError):
    """The engine answered with an error status.

    Attributes:
        status: the HTTP status.
        body: the server's own words, shortened to 2,000 characters.
    """

    def __init__(self, message: str, status: int = 0, body: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.body = body[:2000]


class WorkerError(GrpoLabError):
    """The rollout worker cannot go on."""


class WorkerDied(WorkerError):
    """The rollout worker's process ended without being asked to."""


class WorkerStalled(WorkerError):
    """The rollout worker lives but makes no progress."""


class RewardError(GrpoLabError):
    """A reward function raised, or returned something that is not one number or None per sample."""


class PhaseTimeout(GrpoLabError):
    """A bounded wait ran out."""


class SyncError(GrpoLabError):
    """A weight sync failed for good: too few engines are left."""


class SimulationError(GrpoLabError):
    """A simulated world cannot go on."""


class Deadlock(SimulationError):
    """Nothing is ready, no timer is set and the main task has not ended. Names every waiter."""


class EscapedSimulation(SimulationError):
    """Simulated code reached for a socket, process, thread, signal or the wall clock."""


class SimulationBoundExceeded(SimulationError):
    """Virtual time or the number of callbacks ran past its bound."""


class Nondeterminism(SimulationError):
    """Two runs of one case differ; names the first record that does."""


class InvariantViolation(GrpoLabError):
    """A rule was broken. Carries the rule's id and the events that prove it."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, rule: str = "", event_ids: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.rule = rule
        self.event_ids = event_ids
