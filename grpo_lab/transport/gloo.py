"""Weights through gloo: engines on this or another host, without shared memory.

The payload is broadcast in a process group built directly on a TCP store, apart from torch's global group
(which the trainer's ranks may use). Beside it runs the control channel of ``control`` over TCP: it announces
and releases buckets and says by name who died, which gloo itself cannot. All blocking calls run in one
dedicated thread per side, each bounded by gloo's own time-out.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import secrets
import socket
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import ClassVar

import torch
from torch.distributed import (  # type: ignore[attr-defined]  # torch marks no re-exports
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

from grpo_lab.errors import PeerDied, TransportError, TransportTimeout
from grpo_lab.ports import Recorder
from grpo_lab.transport.channel import Channel, cancel_all, connect
from grpo_lab.transport.control import ControlServer
from grpo_lab.transport.frames import Announce, Begin
from grpo_lab.transport.geometry import MAX_WAIT_S, Invitation, field, is_wait, text
from grpo_lab.transport.receiver import JOIN_TIMEOUT_S, RingReceiver
from grpo_lab.transport.sender import RingTransport, Session
from grpo_lab.types import JsonDict

# When gloo loses a connection, the control channel has mostly seen it too and knows whose it was.
NAMING_GRACE_S = 0.5


class GlooGroup:
    """A gloo process group that only its own thread touches."""

    def __init__(self) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="grpo_lab_gloo")
        self._formed: concurrent.futures.Future[ProcessGroupGloo] | None = None

    def form(
        self,
        make_store: Callable[[], Store],
        rank: int,
        size: int,
        host: str,
        timeout_s: float,
    ) -> None:
        """Begins to connect to all other ranks from ``host``; the outcome shows in ``wait_formed``."""

        def connect_all() -> ProcessGroupGloo:
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = timedelta(seconds=timeout_s)
            options._devices = [ProcessGroupGloo.create_device(hostname=host)]
            return ProcessGroupGloo(make_store(), rank, size, options)

        self._formed = self._thread.submit(connect_all)

    async def wait_formed(self) -> ProcessGroupGloo:
        """Raises torch's ``RuntimeError`` when it could not be formed within its bound."""
        assert self._formed is not None, "form() comes first"
        return await asyncio.shield(asyncio.wrap_future(self._formed))

    async def broadcast(self, tensor: torch.Tensor, timeout_s: float) -> None:
        """From rank 0 to all others. Raises ``TransportTimeout`` or torch's ``RuntimeError``."""
        group = await self.wait_formed()
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=timeout_s)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            await loop.run_in_executor(self._thread, lambda: group.broadcast([tensor], options).wait())  # type: ignore[attr-defined]
        except RuntimeError as error:
            if loop.time() - began_s >= timeout_s:
                raise TransportTimeout(f"gloo moved no bucket within {timeout_s:g} s") from error
            raise

    def close(self) -> None:
        """Returns at once; a call that is still running ends with its time-out or the peer's connection."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._formed = None


class GlooTransport(RingTransport):
    """Sender. ``host`` is the address that engines reach; nothing listens on any other.

    The store itself knows no password: on anything but loopback, use it in a network that you trust.
    """

    backend: ClassVar[str] = "lab_gloo"

    def __init__(
        self,
        recorder: Recorder,
        *,
        slots: int = 2,
        accept_timeout_s: float = 30.0,
        progress_timeout_s: float = 30.0,
        host: str = "127.0.0.1",
    ) -> None:
        super().__init__(
            recorder, slots=slots, accept_timeout_s=accept_timeout_s, progress_timeout_s=progress_timeout_s
        )
        self.host = host
        self._control: ControlServer | None = None
        self._group: GlooGroup | None = None
        self._store: TCPStore | None = None
        self._buffers: list[torch.Tensor] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._info: JsonDict = {}

    async def _allocate(self, session: Session) -> str:
        self._buffers = touched_buffers(session.geometry.slots, session.geometry.slot_bytes)
        self._ring = [buffer.numpy().data for buffer in self._buffers]
        listener, store_listener = self._listen(), self._listen()
        self._control = ControlServer(listener, session.members, session.board)
        store_port = store_listener.getsockname()[1]
        try:
            self._store = TCPStore(
                self.host,
                store_port,
                is_master=True,
                timeout=timedelta(seconds=self.accept_timeout_s),
                wait_for_workers=False,
                master_listen_fd=store_listener.fileno(),
            )
        except RuntimeError as error:
            store_listener.close()
            raise TransportError(f"cannot start a store on {self.host}:{store_port}: {error}") from error
        store_listener.detach()  # the store owns and closes it now
        self._group = GlooGroup()
        self._info = {
            "host": self.host,
            "control_port": listener.getsockname()[1],
            "store_port": store_port,
            "group": secrets.token_hex(16),
            "world_size": len(session.members) + 1,
            "accept_timeout_s": self.accept_timeout_s,
        }
        return f"gloo:{self.host}:{store_port}"

    def _rendezvous(self, member: str) -> JsonDict:
        rank = self._require_session().members.index(member) + 1
        return {**self._info, "rank": rank, "token": self._server.token}

    async def _wait_joined(self, session: Session) -> None:
        await self._server.wait_joined(self.accept_timeout_s)
        group, store = self._group, self._store
        assert group is not None
        assert store is not None
        prefix, size = self._info["group"], self._info["world_size"]
        group.form(lambda: PrefixStore(prefix, store), 0, size, self.host, self.accept_timeout_s)
        formed = asyncio.Event()

        async def wait_formed() -> None:
            await self._blaming_by_name(session, group.wait_formed())
            formed.set()
            session.board.notify()

        self._tasks.append(asyncio.create_task(wait_formed(), name="gloo: form the group"))
        await session.board.wait_until(
            formed.is_set, self.accept_timeout_s + NAMING_GRACE_S, lambda: "gloo formed no group"
        )

    async def _begin(self, begin: Begin) -> None:
        await self._server.tell(begin)

    async def _dispatch(self, announce: Announce) -> None:
        await self._server.tell(announce)
        session, group = self._require_session(), self._group
        if not announce.nbytes or group is None:
            return
        payload = self._buffers[announce.slot][: announce.nbytes]
        broadcast = self._blaming_by_name(session, group.broadcast(payload, self.progress_timeout_s))
        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(asyncio.create_task(broadcast, name=f"gloo: bucket {announce.bucket}"))

    async def _release(self) -> None:
        control, self._control = self._control, None
        group, self._group = self._group, None
        tasks, self._tasks = self._tasks, []
        self._store, self._buffers = None, []
        try:
            if control is not None:
                await control.close()
            await cancel_all(tasks)
        finally:
            if group is not None:
                group.close()

    @staticmethod
    async def _blaming_by_name(session: Session, call: Awaitable[object]) -> None:
        """Awaits a gloo call; its failure fails the board, after those who know the member's name."""
        try:
            await call
        except TransportTimeout as error:
            session.board.fail(TransportTimeout(f"{error}: {session.board.blame()}"))
        except RuntimeError as error:
            await asyncio.sleep(NAMING_GRACE_S)
            session.board.fail(TransportError(f"gloo failed: {first_line(error)}"))

    @property
    def _server(self) -> ControlServer:
        if self._control is None:
            raise TransportError("the transport is not open: call open() first")
        return self._control

    def _listen(self) -> socket.socket:
        family = family_of(self.host)
        try:
            return socket.create_server((self.host, 0), family=family)
        except OSError as error:
            raise TransportError(
                f"cannot listen on host {self.host!r}: {error}; it must be an address of this machine"
            ) from error


class GlooReceiver(RingReceiver):
    """Receives into a ring of its own, as large as the sender's."""

    backend: ClassVar[str] = "lab_gloo"

    def __init__(self) -> None:
        super().__init__()
        self._buffers: list[torch.Tensor] = []
        self._group: GlooGroup | None = None

    async def _connect(self, invitation: Invitation, info: JsonDict, greeting: JsonDict) -> Channel:
        host, prefix = text(info, "host"), text(info, "group")
        control_port, store_port = (_port(info, name) for name in ("control_port", "store_port"))
        size = field(info, "world_size", lambda v: type(v) is int and 2 <= v <= 65536, "2 to 65536")
        rank = field(info, "rank", lambda v: type(v) is int and 1 <= v < size, f"1 to {size - 1}")
        timeout_s = float(field(info, "accept_timeout_s", is_wait, f"seconds up to {MAX_WAIT_S:g}"))
        channel = await connect(
            family_of(host),
            (host, control_port),
            greeting,
            timeout_s=JOIN_TIMEOUT_S,
            check_uid=False,
        )

        def make_store() -> Store:
            timeout = timedelta(seconds=timeout_s)
            return PrefixStore(prefix, TCPStore(host, store_port, timeout=timeout, wait_for_workers=False))

        self._buffers = touched_buffers(invitation.geometry.slots, invitation.geometry.slot_bytes)
        self._group = GlooGroup()
        # In the background: the group is complete only when all members have been invited.
        self._group.form(make_store, rank, size, channel.local_host, timeout_s)
        return channel

    async def _land(self, announce: Announce, channel: Channel, timeout_s: float) -> None:
        if not announce.nbytes:
            return
        assert self._group is not None
        try:
            await self._group.broadcast(self._buffers[announce.slot][: announce.nbytes], timeout_s)
        except RuntimeError as error:
            raise await self._explain(error, channel) from error

    async def _explain(self, error: RuntimeError, channel: Channel) -> TransportError:
        """The control channel says whether it was the sender that died."""
        try:
            await channel.receive(NAMING_GRACE_S, "a reason")
        except PeerDied as died:
            return died
        except TransportError:
            pass
        return TransportError(f"gloo failed, though the sender lives: {first_line(error)}")

    def _slot(self, slot: int) -> memoryview:
        return self._buffers[slot].numpy().data.toreadonly()

    async def _release(self) -> None:
        group, self._group = self._group, None
        self._buffers = []
        if group is not None:
            group.close()


def touched_buffers(slots: int, nbytes: int) -> list[torch.Tensor]:
    """Byte tensors whose pages are all there (``torch.zeros`` would leave them to the first writer)."""
    return [torch.empty(nbytes, dtype=torch.uint8).fill_(0) for _ in range(slots)]


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def first_line(error: Exception) -> str:
    """torch's messages go on with a stack trace."""
    return str(error).strip().partition("\n")[0][:300]


def _port(info: JsonDict, name: str) -> int:
    return int(field(info, name, lambda v: type(v) is int and 0 < v < 65536, "a port"))
