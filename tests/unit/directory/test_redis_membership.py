"""The mirror's rules on time, without a Redis: what it serves in an outage and after it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.directory_fakes import ManualClock, make_record

from tandem.directory.base import WorkerRecord
from tandem.directory.record_codec import encode_record
from tandem.directory.redis_membership import RedisMembership, epoch_text
from tandem.directory.watch import Watch
from tandem.errors import ConfigError
from tandem.ids import Epoch, WorkerId


class SnapshotStore:
    def __init__(self) -> None:
        self.snapshot: list[list[bytes | int]] = []

    async def script(self, lua: str, keys: object, arguments: object) -> Any:
        return self.snapshot


class Mirror:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = SnapshotStore()
        self.subject = RedisMembership(self.store, self.clock, Watch(), outage_grace_s=60.0)  # type: ignore[arg-type]

    def renew(self, record: WorkerRecord, ttl_s: float = 10.0) -> None:
        self.subject.apply({b"record": encode_record(record), b"ttl_ms": b"%d" % (ttl_s * 1000)})
        self.subject.tick()

    def names(self) -> list[WorkerId]:
        return [record.worker_id for record in self.subject.workers()]


def test_p18_a_lease_ends_by_local_time_at_its_very_end() -> None:
    mirror = Mirror()
    mirror.renew(make_record("a"))
    mirror.clock.now_s += 9.999
    assert mirror.names() == ["a"]
    assert mirror.subject.epoch_of(WorkerId("a")) == 1
    mirror.clock.now_s += 0.001
    assert mirror.names() == []
    assert mirror.subject.epoch_of(WorkerId("a")) is None
    mirror.subject.tick()
    assert mirror.subject._leases == {}


def test_p20_leases_stand_still_in_an_outage_up_to_the_grace() -> None:
    mirror = Mirror()
    mirror.renew(make_record("a"))
    mirror.clock.now_s += 1.5
    mirror.subject.lost()
    mirror.clock.now_s += 58.5
    mirror.subject.lost()
    assert mirror.names() == ["a"]
    assert not mirror.subject.in_contact
    mirror.clock.now_s += 0.001
    assert mirror.names() == []


async def test_p20_after_an_outage_a_known_worker_has_one_more_lease_to_come_back() -> None:
    mirror = Mirror()
    mirror.renew(make_record("a"))
    mirror.renew(make_record("b"))
    mirror.subject.lost()
    mirror.clock.now_s += 30.0
    mirror.store.snapshot = [[encode_record(make_record("b", epoch=2)), b"10000", 4000]]
    await mirror.subject.rebuild(after_outage=True)
    mirror.subject.tick()
    assert mirror.names() == ["a", "b"]
    assert mirror.subject.epoch_of(WorkerId("b")) == 2
    mirror.clock.now_s += 4.0
    assert mirror.names() == ["a"]
    mirror.clock.now_s += 6.0
    assert mirror.names() == []


async def test_a_rebuild_without_an_outage_is_the_whole_truth() -> None:
    mirror = Mirror()
    mirror.renew(make_record("a"))
    mirror.store.snapshot = [
        [b"not a record", b"10000", 4000],
        [encode_record(make_record("b")), b"10000", 4000],
    ]
    await mirror.subject.rebuild(after_outage=False)
    assert mirror.names() == ["b"]


def test_leaving_counts_only_for_the_same_life() -> None:
    mirror = Mirror()
    mirror.renew(make_record("a", epoch=7))
    mirror.subject.apply({b"left": b"a", b"epoch": epoch_text(Epoch(6)).encode()})
    assert mirror.names() == ["a"]
    mirror.subject.apply({b"left": b"a", b"epoch": epoch_text(Epoch(7)).encode()})
    assert mirror.names() == []


def test_a_mirror_that_never_had_contact_serves_nobody() -> None:
    mirror = Mirror()
    mirror.subject.lost()
    assert mirror.names() == []
    assert not mirror.subject.in_contact


def test_epochs_compare_as_text() -> None:
    assert epoch_text(Epoch(9)) < epoch_text(Epoch(10)) < epoch_text(Epoch(2**63))
    with pytest.raises(ConfigError):
        epoch_text(Epoch(-1))
