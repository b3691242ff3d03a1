"""Addresses to listen at: how they are written, and why one can't be bound."""

from __future__ import annotations

import asyncio
import errno
import socket

from tandem.errors import ConfigError


def split_address(address: str) -> tuple[str, int]:
    """``host:port`` or ``[v6]:port`` to host and port. Raises `ConfigError`."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isdecimal() and int(port) < 1 << 16):
        raise ConfigError(f"address {address!r} is not host:port, e.g. 127.0.0.1:50051 or [::1]:50051")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The opposite of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def check_bindable(host: str, port: int) -> None:
    """Raise a `ConfigError` that says why gRPC could not listen there; its own error doesn't.

    Of a name's addresses none may be taken (gRPC is content with one, and a client may try
    another), and one at least must be ours: ``localhost`` often has an IPv6 address that isn't.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"host {host!r} can't be resolved: {error.strerror}") from None
    tried = [_try_to_bind(family, address) for family, _, _, _, address in found]
    failures = [failure for failure in tried if failure is not None]
    absent = [failure for failure in failures if failure.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)]
    for failure in failures:
        if failure not in absent or len(absent) == len(found):
            raise ConfigError(_why(host, port, failure))


def _try_to_bind(family: int, address: tuple[object, ...]) -> OSError | None:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        return error
    return None


def _why(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return in_use_message(host, port)
    if error.errno == errno.EADDRNOTAVAIL:
        return f"host {host} is not an address of this machine; use 127.0.0.1, or 0.0.0.0 for all of them"
    if error.errno == errno.EACCES:
        return f"port {port} on {host} needs privileges; choose one above 1023, or 0 for any free one"
    return f"port {port} on {host} can't be used: {error.strerror}"


def in_use_message(host: str, port: int) -> str:
    """What a user is told of a taken port."""
    return f"port {port} on {host} is in use: stop what listens there, or choose another (0: any free one)"
