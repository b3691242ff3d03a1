"""Domain errors to gRPC statuses and back, so that a client raises the very error the server raised.

A status carries `google.rpc.Status` in the ``grpc-status-details-bin`` trailer (the richer error
model, google/rpc/error_details.proto): `ErrorInfo` names our error class, `BadRequest` the field of
an `InvalidRequest`, `RetryInfo` the wait of an `Overloaded`. Clients in other languages read the
same trailer with their usual helpers. Only messages of `TandemError` cross: those are safe to show.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2 as details  # type: ignore[import-untyped]
from google.rpc import status_pb2

from tandem import errors
from tandem.errors import InvalidRequest, OutOfBlocks, Overloaded, TandemError

DOMAIN = "tandem"
DETAILS_KEY = "grpc-status-details-bin"
MAX_MESSAGE_BYTES = 1024
"""A status travels in trailers, which peers bound at 8 KiB: percent-encoded text, and the details."""

INTERNAL_MESSAGE = "internal error; the server's log has the details under this request's trace id"
MAX_RETRY_AFTER_S = 86_400.0

_CODES: dict[type[TandemError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnknownModel: grpc.StatusCode.NOT_FOUND,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.MessageTooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.Refused: grpc.StatusCode.FAILED_PRECONDITION,
    errors.TransferFailed: grpc.StatusCode.UNAVAILABLE,
    errors.ModelLoadError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.InternalError: grpc.StatusCode.INTERNAL,
}
"""The drawing in `tandem.errors`; a class that is not here has the code of the nearest one above it."""


def _reason(kind: type) -> str:
    """The class name in the form that `ErrorInfo.reason` asks for: ``OUT_OF_BLOCKS``."""
    name = kind.__name__
    return "".join(f"_{c}" if c.isupper() and at else c for at, c in enumerate(name)).upper()


_BY_REASON = {
    _reason(kind): kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, TandemError)
}


@dataclass(frozen=True, slots=True)
class RpcStatus:
    """What `context.abort` takes."""

    code: grpc.StatusCode
    message: str
    trailers: tuple[tuple[str, bytes], ...]


def code_of(error: BaseException) -> grpc.StatusCode:
    """The code of an error or of the nearest class above it that has one; INTERNAL for others."""
    return next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), grpc.StatusCode.INTERNAL)


def to_status(error: BaseException) -> RpcStatus:
    """Anything that is not a `TandemError` becomes INTERNAL and its text stays here."""
    kind = next((kind for kind in type(error).__mro__ if _BY_REASON.get(_reason(kind)) is kind), None)
    if kind is None:
        error, kind = errors.InternalError(INTERNAL_MESSAGE), errors.InternalError
    code = code_of(error)
    message = _shorten(str(error))
    status = status_pb2.Status(code=code.value[0], message=message)
    info = details.ErrorInfo(reason=_reason(kind), domain=DOMAIN)
    if isinstance(error, OutOfBlocks):
        info.metadata.update(wanted=str(error.wanted), free=str(error.free))
    status.details.add().Pack(info)
    if isinstance(error, InvalidRequest):
        bad = details.BadRequest()
        bad.field_violations.add(field=_shorten(error.field), description=_shorten(error.problem))
        status.details.add().Pack(bad)
    if isinstance(error, Overloaded):
        retry = details.RetryInfo()
        # `min` and `max` in this order also make NaN harmless.
        wait_s = min(MAX_RETRY_AFTER_S, max(0.0, error.retry_after_s))
        retry.retry_delay.FromNanoseconds(round(wait_s * 1e9))
        status.details.add().Pack(retry)
    return RpcStatus(code, message, ((DETAILS_KEY, status.SerializeToString()),))


def from_rpc_error(error: grpc.aio.AioRpcError, peer: str) -> TandemError:
    """The domain error behind a failed call to `peer` (its address, for the message).

    Without our details the status came from gRPC itself or from something between.
    """
    rebuilt = _rebuild(error.trailing_metadata() or ())
    return rebuilt or _foreign(error.code(), error.details() or "no details", peer)


def _shorten(text: str) -> str:
    raw = text.encode(errors="replace")
    if len(raw) <= MAX_MESSAGE_BYTES:
        return raw.decode()
    return raw[: MAX_MESSAGE_BYTES - 3].decode(errors="ignore") + "…"


def _rebuild(trailers: Iterable[tuple[str, str | bytes]]) -> TandemError | None:
    raw = next((value for key, value in trailers if key == DETAILS_KEY), None)
    if not isinstance(raw, bytes):
        return None
    info, bad, retry = details.ErrorInfo(), details.BadRequest(), details.RetryInfo()
    try:
        status = status_pb2.Status.FromString(raw)
        for packed in status.details:
            for kind in (info, bad, retry):
                packed.Unpack(kind)
    except DecodeError:
        return None
    if info.domain != DOMAIN:
        return None
    retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    error = _BY_REASON.get(info.reason)
    if error is None:  # a newer server's error
        return None
    if error is InvalidRequest and bad.field_violations:
        return InvalidRequest(bad.field_violations[0].field, bad.field_violations[0].description)
    if error is OutOfBlocks and info.metadata["wanted"].isdigit() and info.metadata["free"].isdigit():
        return OutOfBlocks(
            wanted=int(info.metadata["wanted"]),
            free=int(info.metadata["free"]),
            retry_after_s=retry_after_s,
        )
    if error is Overloaded:
        return Overloaded(status.message, retry_after_s=retry_after_s)
    return None if error in (InvalidRequest, OutOfBlocks) else error(status.message)


_FOREIGN: dict[grpc.StatusCode, type[TandemError]] = {
    grpc.StatusCode.NOT_FOUND: errors.UnknownModel,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Overloaded,
    grpc.StatusCode.UNAVAILABLE: errors.PeerLost,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    # We did not cancel, or this would be no AioRpcError: a stopping server did.
    grpc.StatusCode.CANCELLED: errors.PeerLost,
    grpc.StatusCode.FAILED_PRECONDITION: errors.Refused,
    grpc.StatusCode.UNIMPLEMENTED: errors.Refused,
    grpc.StatusCode.UNAUTHENTICATED: errors.Refused,
    grpc.StatusCode.PERMISSION_DENIED: errors.Refused,
}


def _foreign(code: grpc.StatusCode, text: str, peer: str) -> TandemError:
    message = _shorten(f"{peer} answered {code.name}: {text}")
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidRequest("request", message)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in text:
        return errors.MessageTooLarge(f"{message}; shorten the request")
    return _FOREIGN.get(code, errors.InternalError)(message)
