"""One gRPC channel per address, and the options that both ends of a channel must agree on."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc
import grpc.aio

MIB = 1 << 20
Options = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class WireSettings:
    """How our channels and servers behave. Both ends take the same value.

    A silent connection is pinged every `keepalive_s`; no answer within `keepalive_timeout_s` ends
    it, so a hung peer is noticed (P8) and a silent call of many minutes lives (P28): servers allow
    pings at half that interval. Messages over `max_message_bytes` are RESOURCE_EXHAUSTED.
    """

    max_message_bytes: int = 32 * MIB
    keepalive_s: float = 10.0
    keepalive_timeout_s: float = 5.0
    connect_timeout_s: float = 2.0
    max_reconnect_backoff_s: float = 2.0

    def channel_options(self) -> Options:
        """Options of a client channel."""
        return (
            *self._shared_options(),
            ("grpc.initial_reconnect_backoff_ms", 100),
            # gRPC core takes this one as the time that a connection attempt may last, too.
            ("grpc.min_reconnect_backoff_ms", _ms(self.connect_timeout_s)),
            ("grpc.max_reconnect_backoff_ms", _ms(self.max_reconnect_backoff_s)),
            # A process's channels to one address are ours: never shared behind our back.
            ("grpc.use_local_subchannel_pool", 1),
            # Retries live in one place, the gateway.
            ("grpc.enable_retries", 0),
        )

    def server_options(self) -> Options:
        """Options of a server."""
        return (
            *self._shared_options(),
            ("grpc.http2.min_ping_interval_without_data_ms", _ms(self.keepalive_s / 2)),
            # With it a second server on the same port would silently take half of the calls.
            ("grpc.so_reuseport", 0),
        )

    def _shared_options(self) -> Options:
        return (
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.keepalive_time_ms", _ms(self.keepalive_s)),
            ("grpc.keepalive_timeout_ms", _ms(self.keepalive_timeout_s)),
            # Pings have a bound of their own, a minute by default, and it is the one that counts.
            ("grpc.http2.ping_timeout_ms", _ms(self.keepalive_timeout_s)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        )


class ChannelPool:
    """Channels by address (``host:port``), opened when first asked for. Use within one event loop.

    A channel reconnects by itself; calls on an unreachable address fail at once.
    """

    def __init__(
        self,
        settings: WireSettings | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._settings = settings or WireSettings()
        self._credentials = credentials
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closed = False

    def get(self, address: str) -> grpc.aio.Channel:
        """The channel to `address`; the same one each time, until `discard`."""
        if self._closed:
            raise RuntimeError("the channel pool is closed")
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._open(address)
        return channel

    def _open(self, address: str) -> grpc.aio.Channel:
        options = self._settings.channel_options()
        if self._credentials is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, self._credentials, options=options)

    async def discard(self, address: str) -> None:
        """Close the channel to a peer that will not come back; its calls are cancelled."""
        channel = self._channels.pop(address, None)
        if channel is not None:
            await channel.close()

    def __len__(self) -> int:
        return len(self._channels)

    async def aclose(self) -> None:
        """Close every channel; calls in flight are cancelled. Idempotent."""
        self._closed = True
        closing: list[Awaitable[None]] = [channel.close() for channel in self._channels.values()]
        self._channels.clear()
        for close in closing:
            await close

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
