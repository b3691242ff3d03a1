"""KV blocks over UCX: shared memory, RDMA, NVLink or TCP, as UCX finds them. Python side: UCXX.

Peers connect by UCX worker address, which is ten times faster here than the host:port listener.
Messages are matched here, by probing, and only then received: UCX has been told of no buffer before
the right message for it has arrived, so a posted receive can be taken back at any time, a message of
the wrong size never touches memory, and one that nobody waits for is discarded, which ends its send.

Progress is made when UCX's event descriptor says so, within the event loop: an idle worker sleeps.
"""

from __future__ import annotations

import asyncio
import os
import struct
import zlib
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from tandem.clock import Deadline
from tandem.errors import ConfigError, PeerLost
from tandem.transport.base import Buffer
from tandem.transport.ucx_messages import Pending, UcxEndpoint, UcxReceive

# UCX warns of every variable it doesn't know, such as those of Kubernetes' service links.
os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")

_CONFIG = {
    # Shared memory only reports a dead peer with this on; without it UCX falls back to TCP (1 GB/s).
    "MM_ERROR_HANDLING": "y",
    # SysV segments outlive a killed process; POSIX ones are as fast and don't.
    "TLS": "^sysv",
    "KEEPALIVE_INTERVAL": "200ms",
}
_MAGIC = b"TUCX\x01"
_HEADER = struct.Struct("!5sHI")
_STEPS_A_TURN = 32
_MAX_TURNS = 8
"""Turns of progress and completions before the event loop gets its own."""
_LOOK_S = 0.25
_LOOK_STEPS = 64
"""UCX looks whether its peers live in every 32nd progress call: an idle worker would never get there."""


def _load() -> tuple[Any, Any]:
    try:
        from ucxx._lib import libucxx
        from ucxx._lib.arr import Array
    except ImportError as error:
        raise ConfigError(
            f"UCX can't be loaded ({error}); `pip install ucxx-cu12` on Linux, or set "
            "transfer.transport=inproc where all workers share one process"
        ) from error
    return libucxx, Array


class UcxTransport:
    """Implements `Transport`. Belongs to the event loop that runs when it is made."""

    def __init__(self) -> None:
        """Raises `ConfigError` where UCX can't be used."""
        self._ucx, self._array = _load()
        features = (self._ucx.Feature.TAG, self._ucx.Feature.WAKEUP)
        try:
            self._context = self._ucx.UCXContext(_CONFIG, features)
            self._worker = self._ucx.UCXWorker(self._context)
            self._worker.init_blocking_progress_mode()
            raw = self._ucx.UCXAddress.create_from_worker(self._worker).tobytes()
        except self._ucx.UCXError as error:
            raise ConfigError(f"UCX can't start ({error}); `tandem doctor` tells more") from error
        self._address: bytes = _HEADER.pack(_MAGIC, len(raw), zlib.crc32(raw)) + raw
        self._any_tag, self._no_mask = self._ucx.UCXXTag(0), self._ucx.UCXXTagMask(0)
        self._posted: dict[int, UcxReceive] = {}
        self._pending: list[Pending] = []
        self._endpoints: list[UcxEndpoint] = []
        self._closed = False
        self._kicked = False
        self._looking: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._fd: int = self._worker.epoll_file_descriptor
        self._loop.add_reader(self._fd, self._progress)
        self._kick()

    @property
    def name(self) -> str:
        """See `Transport`."""
        return "ucx"

    @property
    def address(self) -> bytes:
        """See `Transport`. UCX's worker address behind a header of ours: a damaged one would crash UCX."""
        return self._address

    async def connect(self, address: bytes, deadline: Deadline) -> UcxEndpoint:
        """See `Transport`. Bound the call: a frozen peer never answers."""
        if self._closed:
            raise PeerLost("this transport is closed")
        raw = _checked(address)
        try:
            endpoint = self._ucx.UCXEndpoint.create_from_worker_address(
                self._worker, self._ucx.UCXAddress.create_from_buffer(raw), endpoint_error_handling=True
            )
        except self._ucx.UCXError as error:
            raise PeerLost(f"UCX can't reach the peer: {error}") from error
        made = UcxEndpoint(self._track, endpoint, self._array, self._ucx.UCXXTag)
        self._endpoints = [other for other in self._endpoints if not other.closed]
        self._endpoints.append(made)
        await made.greet()
        return made

    def post_receive(self, tag: int, into: Buffer) -> UcxReceive:
        """See `Transport`."""
        if self._closed:
            raise PeerLost("this transport is closed")
        view = memoryview(into).cast("B")  # type: ignore[arg-type]
        receive = UcxReceive(view, lambda: self._withdraw(tag, receive))
        self._posted[tag] = receive
        return receive

    async def aclose(self) -> None:
        """See `Transport`."""
        if self._closed:
            return
        self._closed = True
        for receive in self._posted.values():
            receive.fail("ended: the transport was closed")
        self._posted.clear()
        await asyncio.gather(*(endpoint.aclose() for endpoint in self._endpoints))
        self._worker.cancel_inflight_requests()
        for _ in range(_STEPS_A_TURN * _MAX_TURNS):
            self._worker.progress_once()
            self._settle()
            if not self._pending:
                break
        self._loop.remove_reader(self._fd)
        if self._looking is not None:
            self._looking.cancel()
        for pending in self._pending:
            pending.done(-1)
        # In this order: UCX's parts must go before what they were made from.
        self._pending.clear()
        self._endpoints.clear()
        del self._worker, self._context

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def _track(self, pending: Pending) -> None:
        """Watch a request that was just given to UCX."""
        self._pending.append(pending)
        self._kick()
        if self._looking is None:
            self._looking = self._loop.call_later(_LOOK_S, self._look_after_peers)

    def _look_after_peers(self) -> None:
        """As long as something is under way, find out whether the other end still lives."""
        self._looking = None
        if self._closed or not self._pending:
            return
        for _ in range(_LOOK_STEPS):
            self._worker.progress_once()
        self._progress()
        self._looking = self._loop.call_later(_LOOK_S, self._look_after_peers)

    def _withdraw(self, tag: int, receive: UcxReceive) -> None:
        if self._posted.get(tag) is receive:
            del self._posted[tag]

    def _kick(self) -> None:
        """Make progress soon, without waiting for the descriptor: a new request needs a first push."""
        if not self._kicked and not self._loop.is_closed():
            self._kicked = True
            self._loop.call_soon(self._progress)

    def _progress(self) -> None:
        """Do what there is to do, then arm the descriptor for what will come."""
        self._kicked = False
        if self._closed and not self._pending:
            return
        for _ in range(_MAX_TURNS):
            busy = False
            for _ in range(_STEPS_A_TURN):
                if not (self._worker.progress_once() or self._accept()):
                    break
                busy = True
            self._settle()
            if not busy and self._worker.arm():
                return
        self._kick()

    def _accept(self) -> bool:
        """Match one message that has arrived; false if there is none."""
        probe = self._worker.tag_probe(self._any_tag, self._no_mask, True)
        if not probe.matched:
            return False
        receive = self._posted.pop(probe.sender_tag.value, None)
        if receive is not None and len(receive.into) == probe.length:
            receive.begin()
            self._receive(probe, receive.into, receive.end)
            return True
        if receive is not None:
            receive.fail(f"got {probe.length} bytes, not {len(receive.into)}")
        self._receive(probe, memoryview(bytearray(1)), _ignore)
        return True

    def _receive(self, probe: Any, into: memoryview, done: Callable[[int], None]) -> None:
        array = self._array(into)
        self._track(Pending(self._worker.tag_recv_with_handle(array, probe), array, done))

    def _settle(self) -> None:
        """Tell those whose requests are complete."""
        complete, self._pending = _partition(self._pending)
        for pending in complete:
            pending.done(int(pending.request.status))


def _partition(pending: list[Pending]) -> tuple[list[Pending], list[Pending]]:
    """Those that are complete, and the others; each asked once."""
    complete: list[Pending] = []
    others: list[Pending] = []
    for one in pending:
        (complete if one.request.completed else others).append(one)
    return complete, others


def _ignore(status: int) -> None:
    """A message that nobody waits for: received into a byte, it is cut off, and its sender goes on."""


def _checked(address: bytes) -> bytes:
    """The UCX address behind our header. Raises `PeerLost` for anything else."""
    try:
        magic, length, checksum = _HEADER.unpack_from(address)
    except struct.error:
        magic, length, checksum = b"", 0, 0
    raw = address[_HEADER.size :]
    if magic != _MAGIC or length != len(raw) or checksum != zlib.crc32(raw):
        raise PeerLost(
            "this is not the address of a UCX transport of this release; is the peer an older one?"
        )
    return raw
