"""grpc.health.v1: what probes, load balancers and our own launcher ask before they send anything."""

from __future__ import annotations

from collections.abc import Iterable

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio

_STATUS = {
    True: health_pb2.HealthCheckResponse.SERVING,
    False: health_pb2.HealthCheckResponse.NOT_SERVING,
}


class Health:
    """One answer for the whole server (service "") and for each of its services."""

    def __init__(self, services: Iterable[str], *, serving: bool) -> None:
        self._servicer = aio.HealthServicer()
        self._services = ("", *services)
        self._serving = serving

    @property
    def serving(self) -> bool:
        """What is answered now."""
        return self._serving

    async def install(self, server: grpc.aio.Server) -> None:
        """Add the servicer to a server that is not started yet."""
        await self.set_serving(self._serving)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_serving(self, serving: bool) -> None:
        """Change the answer; watchers are told. Without effect after `shut_down`."""
        self._serving = serving
        for service in self._services:
            await self._servicer.set(service, _STATUS[serving])

    async def shut_down(self) -> None:
        """Answer NOT_SERVING from now on, whatever is set later."""
        self._serving = False
        await self._servicer.enter_graceful_shutdown()


async def is_serving(channel: grpc.aio.Channel, *, timeout_s: float, service: str = "") -> bool:
    """Ask a server; unreachable, late or unknown service is False."""
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
    except grpc.aio.AioRpcError:
        return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
