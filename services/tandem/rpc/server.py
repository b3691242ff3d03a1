"""A gRPC server with our services, health, limits and a clean end."""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType
from typing import Self

import grpc
import grpc.aio
from grpc_reflection.v1alpha import reflection

from tandem.clock import Clock
from tandem.errors import ConfigError
from tandem.internal.v1 import transfer_service_pb2, worker_service_pb2
from tandem.internal.v1.transfer_service_pb2_grpc import add_TransferServiceServicer_to_server
from tandem.internal.v1.worker_service_pb2_grpc import add_WorkerServiceServicer_to_server
from tandem.rpc.address import check_bindable, in_use_message, join_address, split_address
from tandem.rpc.channels import WireSettings
from tandem.rpc.health import Health
from tandem.rpc.interceptors import CallInterceptor, CallObserver, InFlight
from tandem.rpc.servicers import InferenceServicer, TransferServicer, WorkerServicer
from tandem.rpc.services import InferenceService, TransferService, WorkerService
from tandem.v1 import inference_service_pb2
from tandem.v1.inference_service_pb2_grpc import add_InferenceServiceServicer_to_server

logger = logging.getLogger(__name__)

CLEANUP_TIMEOUT_S = 10.0
"""How long `stop` waits for the code of cancelled calls to end."""


class RpcServer:
    """Serves whichever services it is given at `address` (``host:port``; port 0: a free one).

        async with RpcServer("127.0.0.1:0", clock=clock, inference=gateway) as server:
            print(server.address)

    `serving` is the first health answer; `set_serving` changes it (P23: a worker says so only once
    it is ready). Leaving the context turns health to NOT_SERVING, refuses new calls, lets those in
    flight go on for `grace_s`, cancels the rest and waits until their code has ended.
    """

    def __init__(
        self,
        address: str,
        *,
        clock: Clock,
        inference: InferenceService | None = None,
        worker: WorkerService | None = None,
        transfer: TransferService | None = None,
        settings: WireSettings | None = None,
        credentials: grpc.ServerCredentials | None = None,
        observer: CallObserver | None = None,
        reflect: bool = False,
        serving: bool = True,
        grace_s: float = 5.0,
    ) -> None:
        self._host, self._port = split_address(address)
        self._clock = clock
        self._inference, self._worker, self._transfer = inference, worker, transfer
        self._settings = settings or WireSettings()
        self._credentials = credentials
        self._observer = observer
        self._reflect = reflect
        self._grace_s = grace_s
        self._health = Health(self._names(), serving=serving)
        self._in_flight = InFlight()
        self._server: grpc.aio.Server | None = None

    @property
    def port(self) -> int:
        """The bound port; the wished one (perhaps 0) before `start`."""
        return self._port

    @property
    def address(self) -> str:
        """``host:port`` as bound."""
        return join_address(self._host, self._port)

    @property
    def num_in_flight(self) -> int:
        """Calls whose code is running, health watches included."""
        return self._in_flight.num

    async def start(self) -> None:
        """Bind and serve. Raises `ConfigError` when the address can't be bound."""
        await check_bindable(self._host, self._port)
        server = grpc.aio.server(
            interceptors=[CallInterceptor(self._clock, self._in_flight, self._observer)],
            options=self._settings.server_options(),
        )
        self._add_services(server)
        await self._health.install(server)
        try:
            self._port = self._bind(server)
            await server.start()
        except BaseException:
            await server.stop(None)
            raise
        self._server = server

    async def set_serving(self, serving: bool) -> None:
        """What health checks are told."""
        await self._health.set_serving(serving)

    async def wait_for_termination(self) -> None:
        """Return when `stop` has been called and is done."""
        if self._server is not None:
            await self._server.wait_for_termination()

    async def stop(self, grace_s: float | None = None) -> None:
        """End as the class says, within `grace_s` and the time that cancelled calls need. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        await self._health.shut_down()
        try:
            await server.stop(self._grace_s if grace_s is None else grace_s)
        except asyncio.CancelledError:  # whoever stops us has no more patience
            await server.stop(None)
            raise
        try:
            async with asyncio.timeout(CLEANUP_TIMEOUT_S):
                await self._in_flight.wait_idle()
        except TimeoutError:
            logger.error(
                "%d calls did not end %g s after they were cancelled", self._in_flight.num, CLEANUP_TIMEOUT_S
            )

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    def _names(self) -> list[str]:
        named = (
            (self._inference, inference_service_pb2.DESCRIPTOR, "InferenceService"),
            (self._worker, worker_service_pb2.DESCRIPTOR, "WorkerService"),
            (self._transfer, transfer_service_pb2.DESCRIPTOR, "TransferService"),
        )
        return [file.services_by_name[name].full_name for service, file, name in named if service is not None]

    def _add_services(self, server: grpc.aio.Server) -> None:
        if self._inference is not None:
            add_InferenceServiceServicer_to_server(InferenceServicer(self._inference, self._clock), server)
        if self._worker is not None:
            add_WorkerServiceServicer_to_server(WorkerServicer(self._worker, self._clock), server)
        if self._transfer is not None:
            add_TransferServiceServicer_to_server(TransferServicer(self._transfer, self._clock), server)
        if self._reflect:
            names = (*self._names(), "grpc.health.v1.Health", reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)

    def _bind(self, server: grpc.aio.Server) -> int:
        address = join_address(self._host, self._port)
        try:
            if self._credentials is None:
                return server.add_insecure_port(address)
            return server.add_secure_port(address, self._credentials)
        except RuntimeError:  # lost to another process since the check
            raise ConfigError(in_use_message(self._host, self._port)) from None
