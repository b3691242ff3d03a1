from __future__ import annotations

import pytest
from tests.support.directory_fakes import make_record

from tandem.directory.base import Role, WorkerState
from tandem.directory.record_codec import decode_record, encode_record
from tandem.errors import InternalError


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("state", WorkerState)
def test_a_record_survives_the_round_trip(role: Role, state: WorkerState) -> None:
    record = make_record("w", epoch=2**63, role=role, state=state, running=3, waiting=2, queued_tokens=9)
    assert decode_record(encode_record(record)) == record


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\x80\x04.", encode_record(make_record())[:-1]])
def test_anything_else_is_refused_with_the_cure(data: bytes) -> None:
    with pytest.raises(InternalError, match="same version"):
        decode_record(data)
