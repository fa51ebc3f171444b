"""Weight updates on the engine: init -> start -> update -> finish, staged, verified, idempotent.

==========  ==============================  ====================================================
state       reached by                      what is served
==========  ==============================  ====================================================
closed      the beginning, finish, failure  the newest finished version
started     start                           the same; staging is empty
receiving   update                          the same; buckets are verified and unpacked to staging
received    update's end                    the same; staging is whole
closed      finish                          the new version, switched between two steps
==========  ==============================  ====================================================

A failure in any state closes the session and drops the staging: the previous weights were never
touched and go on being served. A retried ``start``, ``update`` or ``finish`` of the same identity
succeeds and applies nothing twice (S14). A newer identity supersedes a session that its sender gave up.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field

from grpo_lab.engine.core import EngineCore
from grpo_lab.engine.failures import UpdateError
from grpo_lab.engine.handshake import checked_plan, targets
from grpo_lab.engine.request import WeightIdentity
from grpo_lab.engine.runner import InlineRunner, StepRunner
from grpo_lab.errors import GrpoLabError, HandshakeError
from grpo_lab.events import BucketReceived, UpdateFailed, UpdateStarted, WeightsLoaded
from grpo_lab.packing import BucketPlan, Unpacker, hash64
from grpo_lab.ports import WeightReceiver
from grpo_lab.types import Bucket, JsonDict, SyncId

ReceiverFactory = Callable[[], WeightReceiver]


@dataclass(slots=True)
class Session:
    """One update from start to finish. ``hashes[i]`` is that of bucket i once it was accepted."""

    sync: SyncId | None
    plan_digest: str = ""
    hashes: dict[int, int] = field(default_factory=dict)
    receiving: asyncio.Task[None] | None = None
    received: bool = False
    end: str = ""


class RlState:
    """The RL state machine of one engine.

    ``receivers`` maps a backend's name to a factory of its receiving end; ``runner`` does the hashing
    and unpacking (in a thread of its own in real time), so that generation goes on meanwhile.
    """

    def __init__(
        self, core: EngineCore, receivers: Mapping[str, ReceiverFactory], runner: StepRunner | None = None
    ) -> None:
        self.core = core
        self._receivers = receivers
        self._runner: StepRunner = runner or InlineRunner()
        self._receiver: WeightReceiver | None = None
        self._plan: BucketPlan | None = None
        self._unpacker: Unpacker | None = None
        self._session: Session | None = None
        self._finishing = asyncio.Lock()

    @property
    def weight_version(self) -> str:
        return self.core.identity.label

    async def init(self, info: JsonDict, term: int = 0) -> str:
        """Joins the transfer that ``info`` describes, and returns the digest of its plan as it arrived here
        and fits this model; a second call replaces the first.

        Raises ``HandshakeError`` when the plan is not this model's, naming the parameters that differ.
        """
        self.core.check_alive()
        self.core.observe_term(term)
        backend = info.get("backend")
        factory = self._receivers.get(backend) if isinstance(backend, str) else None
        if factory is None:
            raise UpdateError(
                f"Invalid init_info: backend={backend!r}; this engine has {sorted(self._receivers)}"
            )
        plan = checked_plan(info, self.core.policy)
        session = self._session
        if session is not None and session.receiving is not None and not session.receiving.done():
            await self._drop("the transfer was joined again")
        await self._close_receiver()
        receiver = factory()
        try:
            await receiver.join(info)
        except BaseException:
            await receiver.close()
            raise
        self._receiver, self._plan, self._unpacker = receiver, plan, Unpacker(plan)
        return plan.digest()

    async def start(self, sync: SyncId | None, term: int = 0) -> None:
        """Opens a session. Raises ``UpdateError`` while one of the same or a newer identity is open."""
        self.core.check_alive()
        self.core.observe_term(sync.term if sync else term)
        session = self._session
        if session is not None:
            if sync is not None and session.sync == sync and session.receiving is None:
                return
            if sync is None or (session.sync is not None and sync <= session.sync):
                raise UpdateError(
                    "start_weight_update called while a weight update is already active. "
                    "Call finish_weight_update first."
                )
            await self._drop(f"superseded by {sync}")
        if sync is not None and sync.weights < self.core.identity.weights:
            raise UpdateError(f"start_weight_update of {sync}, but the newer {self.weight_version} is served")
        self._session = Session(sync)
        self.core.recorder.emit(UpdateStarted(engine=self.core.config.name, **_fields(sync)))

    async def update(self, info: JsonDict, sync: SyncId | None = None, term: int = 0) -> None:
        """Returns when every bucket was received, verified and staged; otherwise the session is closed."""
        self.core.check_alive()
        sync = sync or _parsed(info.get("sync"))
        self.core.observe_term(sync.term if sync else term)
        session = self._session
        if session is None:
            raise UpdateError("start_weight_update must be called before update_weights.")
        if sync is None or (session.sync is not None and session.sync != sync):
            raise UpdateError(f"update_weights of {sync}, but the open weight update is {session.sync}")
        session.sync = sync
        if session.receiving is None:
            name = f"{self.core.config.name}-receive"
            session.receiving = asyncio.get_running_loop().create_task(
                self._receive(session, info), name=name
            )
            session.receiving.add_done_callback(_retrieve)
        try:
            # Shielded, as a client that goes away and retries must find the transfer going on.
            await asyncio.shield(session.receiving)
        except asyncio.CancelledError:
            if session.receiving.cancelled():
                raise UpdateError(f"update_weights of {sync} was given up: {session.end}") from None
            raise

    async def finish(self, label: str | None, sync: SyncId | None = None, term: int = 0) -> None:
        """Switches to the staged weights; if they are not whole, closes the session with ``UpdateError``."""
        async with self._finishing:
            self.core.check_alive()
            sync = sync or _parsed(label)
            self.core.observe_term(sync.term if sync else term)
            if sync is not None and self.core.identity.label == str(sync):
                return
            session = self._session
            if session is None:
                raise UpdateError("finish_weight_update called without a matching start_weight_update.")
            problem = self._incomplete(session, sync)
            if problem:
                await self._drop(problem)
                raise UpdateError(problem)
            await self._switch(session)

    async def abandon(self, sync: SyncId | None = None, term: int = 0) -> None:
        """Drops the open session, if it is that of ``sync`` or older; nothing to drop is fine.

        Raises ``UpdateError`` when it comes too late: a finish that was under way has made the version of
        ``sync`` the active one, and whoever gave that sync up must not take this engine for the previous one.
        """
        async with self._finishing:
            self.core.check_alive()
            self.core.observe_term(sync.term if sync else term)
            session = self._session
            if sync is not None and self.core.identity.weights == (sync.term, sync.version):
                raise UpdateError(f"abandon of {sync}, but {self.core.identity.label} is active already")
            if session is None:
                return
            if sync is not None and session.sync is not None and sync < session.sync:
                raise UpdateError(f"abandon of {sync}, but the open weight update is {session.sync}")
            await self._drop("abandoned by the trainer")

    async def shutdown(self) -> None:
        """Leaves the transfer. Raises ``UpdateError`` while an update is open."""
        if self._session is not None:
            raise UpdateError("Cannot release a trainer connection during a weight update")
        await self._close_receiver()

    async def close(self) -> None:
        """Ends everything, on every path."""
        try:
            if self._session is not None:
                await self._drop("the engine was closed")
            await self._close_receiver()
        finally:
            self._runner.close()

    # --- inside ---------------------------------------------------------------------------------------

    async def _receive(self, session: Session, info: JsonDict) -> None:
        try:
            await self._receive_all(session, info)
            session.received = True
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._close_session(session, f"{type(error).__name__}: {error}")
            raise UpdateError(str(error)) from error

    async def _receive_all(self, session: Session, info: JsonDict) -> None:
        sync, plan = session.sync, self._plan
        assert sync is not None
        if self._receiver is None or plan is None:
            raise UpdateError("weight transfer not initialized. Call init_weight_transfer_engine first.")
        session.plan_digest = plan.digest()
        declared = info.get("num_buckets", plan.num_buckets)
        if declared != plan.num_buckets:
            raise HandshakeError(f"update_info names {declared} buckets, the plan has {plan.num_buckets}")
        buckets = self._receiver.receive(sync, info)
        try:
            async for bucket in buckets:
                await self._take(session, sync, bucket)
        finally:
            if isinstance(buckets, AsyncGenerator):
                await buckets.aclose()  # now, not when it is collected: the sender waits for it
        missing = [index for index in range(plan.num_buckets) if index not in session.hashes]
        if missing:
            raise UpdateError(f"{len(missing)} of {plan.num_buckets} buckets never came: {missing[:8]}")

    async def _take(self, session: Session, sync: SyncId, bucket: Bucket) -> None:
        """Hashes one bucket where it landed; unpacks it only if it is the one that was sent."""
        unpacker, index = self._unpacker, bucket.index
        assert unpacker is not None
        expected = unpacker.plan.bucket_nbytes(index)  # raises for an index that the plan does not have
        found = await self._runner.run(lambda: hash64(bucket.memory))
        twice, nbytes = index in session.hashes, len(bucket.memory)
        accepted = found == bucket.hash64 and nbytes == expected and not twice
        self.core.recorder.emit(
            BucketReceived(
                engine=self.core.config.name,
                **_fields(sync),
                bucket=index,
                nbytes=nbytes,
                hash64=found,
                expected_hash64=bucket.hash64,
                accepted=accepted,
            )
        )
        if twice:
            raise UpdateError(f"bucket {index} came twice")
        if not accepted:
            raise UpdateError(
                f"bucket {index} is corrupt: {nbytes} bytes with hash {found:#018x}; "
                f"{expected} bytes with hash {bucket.hash64:#018x} were sent"
            )
        policy = self.core.policy
        staging = targets(policy.staging(), policy.tied)
        await self._runner.run(lambda: unpacker.unpack(index, bucket.memory, staging))
        session.hashes[index] = found

    def _incomplete(self, session: Session, sync: SyncId | None) -> str:
        if session.sync is None or session.receiving is None:
            return "finish_weight_update, but update_weights was never called: no bucket came"
        if sync is not None and sync != session.sync:
            return f"finish_weight_update of {sync}, but the open weight update is {session.sync}"
        if not session.received:
            return f"finish_weight_update of {session.sync}, but its buckets are still coming"
        return ""

    async def _switch(self, session: Session) -> None:
        sync = session.sync
        assert sync is not None
        digest = hashlib.blake2b(session.plan_digest.encode(), digest_size=16)
        for index in sorted(session.hashes):
            digest.update(session.hashes[index].to_bytes(8, "little"))

        def loaded() -> None:
            self.core.recorder.emit(
                WeightsLoaded(
                    engine=self.core.config.name,
                    **_fields(sync),
                    hashes_verified=True,
                    buckets=len(session.hashes),
                    weights_hash=digest.hexdigest(),
                )
            )

        await self.core.switch_weights(WeightIdentity.of(sync), digest.hexdigest(), loaded)
        self._session = None

    async def _drop(self, reason: str) -> None:
        session = self._session
        if session is None:
            return
        session.end = reason
        if session.receiving is not None and not session.receiving.done():
            session.receiving.cancel()
            await asyncio.gather(session.receiving, return_exceptions=True)
        self._close_session(session, reason)

    def _close_session(self, session: Session, reason: str) -> None:
        if self._session is not session:
            return
        self._session = None
        self.core.recorder.emit(
            UpdateFailed(
                engine=self.core.config.name, **_fields(session.sync), reason=reason[:500], weights="previous"
            )
        )

    async def _close_receiver(self) -> None:
        receiver, self._receiver = self._receiver, None
        self._plan = self._unpacker = None
        if receiver is not None:
            try:
                await receiver.close()
            except GrpoLabError as error:
                raise UpdateError(f"the old transfer could not be left: {error}") from error


def _fields(sync: SyncId | None) -> dict[str, int]:
    if sync is None:
        return {"term": 0, "version": 0, "attempt": 0}
    return {"term": sync.term, "version": sync.version, "attempt": sync.attempt}


def _parsed(text: object) -> SyncId | None:
    """The identity that ``text`` stands for, or None for other text (a stock client's own labels)."""
    try:
        return SyncId.parse(text) if isinstance(text, str) else None
    except ValueError:
        return None


def _retrieve(task: asyncio.Task[None]) -> None:
    """A failed receive is reported as an event; here its exception only counts as seen."""
    if not task.cancelled():
        task.exception()
