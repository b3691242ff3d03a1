"""From a setting to a transport. Libraries are imported only when their transport is asked for."""

from __future__ import annotations

from tandem.config.choices import TransportKind
from tandem.transport.base import Transport


def open_transport(kind: TransportKind) -> Transport:
    """A transport, to be closed by the caller. Raises `ConfigError` where it can't be had."""
    if kind is TransportKind.INPROC:
        from tandem.transport.inproc import InprocTransport

        return InprocTransport()
    from tandem.transport.ucx import UcxTransport

    return UcxTransport()
