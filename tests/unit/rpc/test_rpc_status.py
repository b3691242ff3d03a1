"""An error crosses the wire and is the same error; nothing of anybody's prompt crosses with it."""

from __future__ import annotations

import inspect
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2 as details
from google.rpc import status_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem import errors
from tandem.errors import InvalidRequest, OutOfBlocks, Overloaded, TandemError
from tandem.rpc.status import (
    DETAILS_KEY,
    INTERNAL_MESSAGE,
    MAX_RETRY_AFTER_S,
    RpcStatus,
    code_of,
    from_rpc_error,
    to_status,
)

ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, TandemError)]


def example(kind: type[TandemError], text: str = "why, and the cure") -> TandemError:
    special: dict[type[TandemError], Any] = {
        InvalidRequest: lambda: InvalidRequest("sampling.top_p", text),
        OutOfBlocks: lambda: OutOfBlocks(wanted=9, free=2, retry_after_s=0.1),
        Overloaded: lambda: Overloaded(text, retry_after_s=2.25),
    }
    return special.get(kind, lambda: kind(text))()


def received(status: RpcStatus) -> grpc.aio.AioRpcError:
    """What a client's gRPC raises for that status."""
    return grpc.aio.AioRpcError(
        status.code, grpc.aio.Metadata(), grpc.aio.Metadata(*status.trailers), status.message
    )


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_error_of_the_tree_comes_back_as_itself(kind: type[TandemError]) -> None:
    sent = example(kind)
    got = from_rpc_error(received(to_status(sent)), "peer")
    assert type(got) is kind
    assert str(got) == str(sent)
    assert vars(got) == vars(sent)


def test_the_codes_are_those_drawn_in_errors() -> None:
    drawn = {}
    code = ""
    for line in (errors.__doc__ or "").splitlines():
        _, dash, rest = line.partition("── ")
        if dash:
            name = rest.split()[0]
            last = rest.split()[-1]
            # Children are drawn without a code: they have their parent's.
            code = last if last.isupper() and last.isascii() else code
            drawn[name] = code
    assert set(drawn) == {kind.__name__ for kind in ALL} - {"TandemError"}
    for kind in ALL:
        if kind is not TandemError:
            assert code_of(example(kind)).name == drawn[kind.__name__], kind


@given(st.text(max_size=2000), st.text(max_size=2000))
@settings(max_examples=50)
def test_any_text_fits_into_the_trailers(field: str, problem: str) -> None:
    status = to_status(InvalidRequest(field, problem))
    # Percent-encoding triples, base64 adds a third; peers take 8 KiB in all.
    wire_bytes = 3 * len(status.message.encode()) + len(status.trailers[0][1]) * 4 / 3
    assert wire_bytes < 8000
    got = from_rpc_error(received(status), "peer")
    assert isinstance(got, InvalidRequest)
    if len(field.encode()) < 300 and len(problem.encode()) < 300:
        assert (got.field, got.problem) == (field, problem)


@given(st.floats())
def test_any_wait_becomes_a_finite_one(retry_after_s: float) -> None:
    got = from_rpc_error(received(to_status(Overloaded("full", retry_after_s=retry_after_s))), "peer")
    assert isinstance(got, Overloaded)
    assert 0.0 <= got.retry_after_s <= MAX_RETRY_AFTER_S
    if 0 <= retry_after_s <= MAX_RETRY_AFTER_S:
        assert got.retry_after_s == pytest.approx(retry_after_s, abs=1e-9)


def test_p31_an_unexpected_error_becomes_internal_without_its_text() -> None:
    status = to_status(ValueError("canary prompt"))
    assert status.code is grpc.StatusCode.INTERNAL
    assert b"canary" not in status.trailers[0][1]
    got = from_rpc_error(received(status), "peer")
    assert type(got) is errors.InternalError
    assert str(got) == INTERNAL_MESSAGE


def test_a_subclass_from_elsewhere_crosses_as_the_nearest_error_of_the_tree() -> None:
    class Special(errors.PeerLost):
        pass

    got = from_rpc_error(received(to_status(Special("gone"))), "peer")
    assert type(got) is errors.PeerLost


def test_other_languages_find_the_standard_details() -> None:
    status = status_pb2.Status.FromString(to_status(InvalidRequest("n", "is odd")).trailers[0][1])
    info, bad = details.ErrorInfo(), details.BadRequest()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(bad)
    assert (status.code, info.domain, info.reason) == (3, "tandem", "INVALID_REQUEST")
    assert bad.field_violations[0].field == "n"
    retry = details.RetryInfo()
    status = status_pb2.Status.FromString(to_status(Overloaded("full", retry_after_s=1.5)).trailers[0][1])
    assert status.details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1500


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "failed to connect", errors.PeerLost),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", errors.DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, "CANCELLED", errors.PeerLost),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", errors.Refused),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "CLIENT: Received message larger than max (9 vs. 4)",
         errors.MessageTooLarge),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "proxy says no", errors.Overloaded),
        (grpc.StatusCode.INVALID_ARGUMENT, "proxy says no", errors.InvalidRequest),
        (grpc.StatusCode.DATA_LOSS, "?", errors.InternalError),
    ],
)  # fmt: skip
def test_a_status_without_our_details_is_mapped_by_its_code(
    code: grpc.StatusCode, text: str, kind: type[TandemError]
) -> None:
    got = from_rpc_error(received(RpcStatus(code, text, ())), "10.0.0.1:5000")
    assert type(got) is kind
    assert "10.0.0.1:5000" in str(got)


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff\xff not protobuf",
        b"",
        status_pb2.Status(code=14, message="from elsewhere").SerializeToString(),
    ],
)
def test_foreign_or_broken_details_fall_back_to_the_code(raw: bytes) -> None:
    status = RpcStatus(grpc.StatusCode.UNAVAILABLE, "gone", ((DETAILS_KEY, raw),))
    assert type(from_rpc_error(received(status), "peer")) is errors.PeerLost


def test_details_of_a_newer_server_or_cut_short_fall_back_to_the_code() -> None:
    for reason in ("NOT_YET_INVENTED", "INVALID_REQUEST", "OUT_OF_BLOCKS"):
        status = status_pb2.Status(code=14, message="text")
        status.details.add().Pack(details.ErrorInfo(reason=reason, domain="tandem"))
        sent = RpcStatus(grpc.StatusCode.UNAVAILABLE, "gone", ((DETAILS_KEY, status.SerializeToString()),))
        assert type(from_rpc_error(received(sent), "peer")) is errors.PeerLost
