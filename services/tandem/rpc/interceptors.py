"""What every call gets on the server: its status, its place in the in-flight count, its observer.

Our own interceptor, as the contrib aio instrumentation loses cancellation. It wraps what this
project serves (unary calls and server streams written as coroutines); reflection passes through.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import grpc
import grpc.aio

from tandem.clock import Clock
from tandem.errors import TandemError
from tandem.rpc.metadata import trace_headers
from tandem.rpc.status import RpcStatus, code_of, to_status

logger = logging.getLogger(__name__)

_Behaviour = Callable[[Any, Any], Awaitable[Any]]


class CallObserver(Protocol):
    """Is told of every call. Both methods run in the call's own task: a context variable set in
    `started` is seen by the service and by `ended`. Neither may raise or block.
    """

    def started(self, method: str, headers: Mapping[str, str]) -> None:
        """A call came in. `method` is ``/package.Service/Method``; `headers` its W3C trace context."""
        ...

    def ended(self, method: str, code: grpc.StatusCode, duration_s: float) -> None:
        """It ended. CANCELLED: the client went away or the server stopped."""
        ...


class NullObserver:
    """Observes nothing."""

    def started(self, method: str, headers: Mapping[str, str]) -> None:
        """Nothing."""

    def ended(self, method: str, code: grpc.StatusCode, duration_s: float) -> None:
        """Nothing."""


class InFlight:
    """Counts calls, and tells when there are none."""

    def __init__(self) -> None:
        self._num = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num(self) -> int:
        """Calls whose code is still running."""
        return self._num

    def enter(self) -> None:
        """One more."""
        self._num += 1
        self._idle.clear()

    def leave(self) -> None:
        """One less."""
        self._num -= 1
        if not self._num:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Return when no call's code is running."""
        await self._idle.wait()


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Maps errors to statuses, counts, and tells the observer."""

    def __init__(self, clock: Clock, in_flight: InFlight, observer: CallObserver | None = None) -> None:
        self._clock = clock
        self._in_flight = in_flight
        self._observer = observer or NullObserver()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the handler that gRPC found; unknown methods stay unknown."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        for shape in ("unary_unary", "unary_stream"):
            inner = getattr(handler, shape)
            if inner is not None and inspect.iscoroutinefunction(inner):
                make = getattr(grpc, f"{shape}_rpc_method_handler")
                wrapped: grpc.RpcMethodHandler[Any, Any] = make(
                    self._wrap(method, inner), handler.request_deserializer, handler.response_serializer
                )
                return wrapped
        return handler

    def _wrap(self, method: str, inner: _Behaviour) -> _Behaviour:
        async def behaviour(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            begun_s = self._clock.monotonic_s()
            code = grpc.StatusCode.OK
            self._in_flight.enter()
            self._observer.started(method, trace_headers(context.invocation_metadata()))
            try:
                return await inner(request, context)
            except asyncio.CancelledError:
                code = _why_cancelled(context)
                raise
            except grpc.aio.AbortError:  # the health servicer says NOT_FOUND this way
                code = context.code()
                raise
            except Exception as error:
                code = code_of(error)
                _log(method, error)
                return await _abort(context, to_status(error))
            finally:
                self._in_flight.leave()
                self._observer.ended(method, code, self._clock.monotonic_s() - begun_s)

        return behaviour


async def _abort(context: grpc.aio.ServicerContext[Any, Any], status: RpcStatus) -> None:
    await context.abort(status.code, status.message, status.trailers)


def _why_cancelled(context: grpc.aio.ServicerContext[Any, Any]) -> grpc.StatusCode:
    remaining_s: float | None = context.time_remaining()
    late = remaining_s is not None and remaining_s <= 0
    return grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED


def _log(method: str, error: Exception) -> None:
    """Unexpected errors with their place, never their text: it could quote a prompt (P31)."""
    if isinstance(error, TandemError):
        logger.debug("%s: %s", method, type(error).__name__)
        return
    frames = "".join(traceback.format_list(traceback.extract_tb(error.__traceback__)))
    logger.error("%s raised %s at\n%s", method, type(error).__qualname__, frames)
