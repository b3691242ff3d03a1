from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.directory_fakes import FINGERPRINT, make_record

from tandem.config.choices import DisaggregationMode
from tandem.directory.base import Role, WorkerRecord, WorkerState
from tandem.errors import NoWorker, OutOfBlocks
from tandem.ids import AttemptId, Epoch, WorkerId
from tandem.routing.query import Route, RouteQuery, RouteReason, RouterPolicy
from tandem.routing.router import Router

P0, P1 = make_record("p0", role=Role.PREFILL), make_record("p1", role=Role.PREFILL)
D0, D1 = make_record("d0"), make_record("d1")
ALWAYS = RouterPolicy(mode=DisaggregationMode.ALWAYS)
NEVER = RouterPolicy(mode=DisaggregationMode.NEVER)
NUMBERS = count()


def query(
    tokens: int = 1000, *, session: str = "", excluded: tuple[str, ...] = (), fingerprint: str = FINGERPRINT
) -> RouteQuery:
    return RouteQuery(
        AttemptId(f"attempt-{next(NUMBERS)}"),
        tokens,
        tokens // 16,
        fingerprint,
        session_id=session,
        excluded=frozenset(map(WorkerId, excluded)),
    )


def make_router(policy: RouterPolicy | None = None, seed: int = 0) -> Router:
    return Router(policy or RouterPolicy(), random.Random(seed).randrange)


def names(route: Route) -> tuple[str, str | None]:
    return route.decode.worker_id, route.prefill.worker_id if route.prefill else None


def route(
    workers: Sequence[WorkerRecord],
    asked: RouteQuery | None = None,
    *,
    policy: RouterPolicy | None = None,
    matches: Mapping[str, int] | None = None,
) -> Route:
    held = {WorkerId(name): blocks for name, blocks in (matches or {}).items()}
    return make_router(policy).route(asked or query(), workers, held, 0.0)


def test_a_long_prompt_takes_a_pair_and_a_short_one_stays_local() -> None:
    assert names(route([P0, D0])) == ("d0", "p0")
    short = route([P0, D0], query(16))
    assert names(short) == ("d0", None)
    assert short.reason is RouteReason.NOTHING_TO_COMPUTE_REMOTELY


@pytest.mark.parametrize(("tokens", "prefill"), [(511, None), (512, None), (513, "p0")])
def test_p40_the_longest_local_prompt_counts_uncached_tokens(tokens: int, prefill: str | None) -> None:
    assert names(route([P0, D0], query(tokens))) == ("d0", prefill)
    assert names(route([P0, D0], query(tokens + 160), matches={"d0": 10})) == ("d0", prefill)


@pytest.mark.parametrize("mode", DisaggregationMode)
def test_without_a_decode_worker_the_error_says_what_to_start(mode: DisaggregationMode) -> None:
    with pytest.raises(NoWorker, match=r"decode pool .* tandem up --decode 1"):
        route([P0], policy=RouterPolicy(mode=mode))


def test_without_a_prefill_worker_the_decode_worker_does_it_unless_it_must_not() -> None:
    found = route([D0])
    assert names(found) == ("d0", None)
    assert found.reason is RouteReason.NO_PREFILL_WORKER
    assert found.predicted_remote_s is None
    assert names(route([D0], policy=NEVER)) == ("d0", None)
    with pytest.raises(NoWorker, match=r"prefill pool .* tandem up --prefill 1"):
        route([D0], policy=ALWAYS)


def test_never_leaves_the_prefill_pool_alone_and_always_uses_it() -> None:
    assert names(route([P0, D0], query(5000), policy=NEVER)) == ("d0", None)
    assert names(route([P0, D0], query(1), policy=ALWAYS)) == ("d0", "p0")


@pytest.mark.parametrize("state", [WorkerState.STARTING, WorkerState.DRAINING])
def test_p23_only_ready_workers_get_work(state: WorkerState) -> None:
    unready = make_record("d0", state=state)
    assert names(route([unready, D1], policy=NEVER)) == ("d1", None)
    with pytest.raises(NoWorker, match=f"no ready worker .*d0 is {state.value}"):
        route([unready])


def test_p15_another_layout_is_never_chosen() -> None:
    with pytest.raises(NoWorker, match="KV layout fedcba"):
        route([P0, D0], query(fingerprint="fedcba9876543210"))


def test_excluded_workers_are_not_chosen() -> None:
    for _ in range(5):
        assert names(route([P0, P1, D0, D1], query(excluded=("p0", "d1")))) == ("d0", "p1")
    with pytest.raises(NoWorker, match="d0 already failed this request"):
        route([D0], query(excluded=("d0",)))


@pytest.mark.parametrize(("tokens", "fits"), [(62, True), (63, True), (64, False)])
def test_p40_a_prompt_that_can_never_fit_is_refused_with_the_numbers(tokens: int, fits: bool) -> None:
    small = make_record("d0", num_blocks=4)
    if fits:
        assert names(route([small], query(tokens))) == ("d0", None)
    else:
        with pytest.raises(OutOfBlocks, match="4 free blocks and 5 are needed"):
            route([small], query(tokens))


@pytest.mark.parametrize(("tokens", "fits"), [(99, True), (100, False), (101, False)])
def test_p40_the_context_must_leave_a_token_for_the_answer(tokens: int, fits: bool) -> None:
    short = make_record("d0", max_context_tokens=100)
    if fits:
        assert names(route([short], query(tokens))) == ("d0", None)
    else:
        with pytest.raises(NoWorker, match="longest context is 100"):
            route([short], query(tokens))


def test_p12_a_failed_worker_is_avoided_at_once_and_for_five_seconds() -> None:
    router = make_router(NEVER)
    router.report_failure(D0.worker_id, 100.0)
    for _ in range(5):
        assert names(router.route(query(), [D0, D1], {}, 100.0)) == ("d1", None)
    with pytest.raises(NoWorker, match=r"d0 failed and is avoided for 0\.1 s more"):
        router.route(query(), [D0], {}, 104.9)
    assert names(router.route(query(), [D0], {}, 105.0)) == ("d0", None)
    assert router._inhibitions == {}


def test_p9_a_newer_life_or_a_probe_ends_the_inhibition() -> None:
    router = make_router(NEVER)
    router.report_failure(D0.worker_id, 0.0, Epoch(1))
    with pytest.raises(NoWorker):
        router.route(query(), [D0], {}, 1.0)
    assert names(router.route(query(), [make_record("d0", epoch=2)], {}, 1.0)) == ("d0", None)
    router.report_failure(D0.worker_id, 1.0, Epoch(1))
    router.report_success(D0.worker_id)
    assert names(router.route(query(), [D0], {}, 1.0)) == ("d0", None)


def test_p12_a_failed_prefill_worker_is_replaced_by_another_or_by_the_decode_worker() -> None:
    router = make_router()
    router.report_failure(P0.worker_id, 0.0)
    assert names(router.route(query(), [P0, P1, D0], {}, 0.0)) == ("d0", "p1")
    assert names(router.route(query(), [P0, D0], {}, 0.0)) == ("d0", None)


def test_p21_a_pair_is_booked_whole_or_not_at_all() -> None:
    router = make_router(ALWAYS)
    with pytest.raises(NoWorker):
        router.route(query(), [D0], {}, 0.0)
    with pytest.raises(NoWorker):
        router.route(query(), [P0], {}, 0.0)
    assert router.book.num_open == 0
    asked = query(1000)
    router.route(asked, [P0, D0], {WorkerId("p0"): 10}, 0.0)
    assert router.book.load_of(P0.worker_id).num_prefill_tokens == 840
    assert router.book.load_of(D0.worker_id).num_blocks == 63
    router.prompt_done(asked.attempt_id)
    assert router.book.load_of(P0.worker_id).num_prefill_tokens == 0
    assert router.settle(asked.attempt_id)
    assert not router.settle(asked.attempt_id)
    assert router.book.load_of(D0.worker_id).num_blocks == 0


def test_the_prefill_worker_that_holds_the_prefix_wins_until_its_queue_is_longer() -> None:
    assert route([P0, P1, D0], matches={"p1": 40}).prefill == P1
    busy = make_record("p1", role=Role.PREFILL, queued_tokens=5000)
    assert route([P0, busy, D0], matches={"p1": 40}).prefill == P0


def test_the_decode_worker_that_holds_the_prefix_wins_until_it_is_loaded() -> None:
    assert route([P0, D0, D1], matches={"d1": 60}).decode == D1
    busy = make_record("d1", running=500)
    assert route([P0, D0, busy], matches={"d1": 60}).decode == D0


def test_a_decode_worker_without_room_is_passed_over() -> None:
    full = make_record("d0", running=4, free_blocks=10)
    for seed in range(5):
        found = make_router(seed=seed).route(query(), [P0, full, make_record("d1", running=4)], {}, 0.0)
        assert found.decode.worker_id == "d1"
    assert route([P0, full]).decode == full  # alone, it queues


@pytest.mark.parametrize(("free", "has_room"), [(62, False), (63, True), (64, True)])
def test_p40_room_is_judged_at_the_very_block(free: int, has_room: bool) -> None:
    tight = make_record("d0", free_blocks=free)
    slower = make_record("d1", running=60)
    assert (route([P0, tight, slower]).decode == tight) == has_room


def test_bookings_spread_a_burst_before_any_heartbeat() -> None:
    router = make_router(ALWAYS)
    taken = [names(router.route(query(), [P0, P1, D0, D1], {}, 0.0)) for _ in range(20)]
    assert 8 <= sum(prefill == "p0" for _, prefill in taken) <= 12
    assert 6 <= sum(decode == "d0" for decode, _ in taken) <= 14


def test_p40_ties_are_broken_at_random() -> None:
    router = make_router(NEVER)
    taken = []
    for _ in range(40):
        asked = query()
        taken.append(router.route(asked, [D0, D1], {}, 0.0).decode.worker_id)
        router.settle(asked.attempt_id)
    assert 10 <= taken.count(WorkerId("d0")) <= 30
    assert taken != sorted(taken)


def test_p21_a_session_keeps_its_worker_among_equals_and_gives_way_to_load() -> None:
    def decode_of(workers: list[WorkerRecord], session: str, seed: int) -> str:
        asked = query(session=session)
        return make_router(NEVER, seed).route(asked, workers, {}, 0.0).decode.worker_id

    homes = {session: decode_of([D0, D1], session, 0) for session in map(str, range(20))}
    assert set(homes.values()) == {"d0", "d1"}
    for session, home in homes.items():
        assert decode_of([D1, D0], session, 1) == home
        other = "d1" if home == "d0" else "d0"
        loaded = [make_record(home, running=50), make_record(other)]
        assert decode_of(loaded, session, 2) == other


def test_the_last_prompt_token_is_always_computed() -> None:
    found = route([P0, D0], query(64), matches={"d0": 4, "p0": 99})
    assert found.num_cached_decode_tokens == 48
    assert found.num_cached_prefill_tokens == 48


def test_profiles_of_names_that_never_return_are_forgotten() -> None:
    router = make_router(NEVER)
    for number in range(200):
        router.profiles.observe_prefill(WorkerId(f"gone-{number}"), 10, 0.1)
    router.route(query(), [D0], {}, 0.0)
    assert router.profiles.num_workers == 0


WORKERS = st.lists(
    st.builds(
        make_record,
        st.sampled_from([f"w{number}" for number in range(6)]),
        role=st.sampled_from(Role),
        state=st.sampled_from(WorkerState),
        free_blocks=st.integers(0, 1000),
        running=st.integers(0, 50),
        queued_tokens=st.integers(0, 10_000),
    ),
    max_size=6,
    unique_by=lambda record: record.worker_id,
)


@given(
    st.lists(st.tuples(WORKERS, st.integers(1, 20_000), st.integers(0, 600)), max_size=8),
    st.sampled_from(DisaggregationMode),
    st.integers(0, 99),
)
def test_p6_whatever_is_routed_the_book_returns_to_zero(
    rounds: list[tuple[list[WorkerRecord], int, int]], mode: DisaggregationMode, seed: int
) -> None:
    router = make_router(RouterPolicy(mode=mode), seed)
    booked = []
    for now_s, (workers, tokens, matched) in enumerate(rounds):
        asked = query(tokens)
        num_before = router.book.num_open
        try:
            found = router.route(asked, workers, {worker.worker_id: matched for worker in workers}, now_s)
        except (NoWorker, OutOfBlocks):
            assert router.book.num_open == num_before
            continue
        booked.append(asked.attempt_id)
        assert found.decode.role is Role.DECODE
        assert found.decode.state is WorkerState.READY
        if found.prefill is not None:
            assert found.prefill.role is Role.PREFILL
            assert found.prefill.state is WorkerState.READY
        assert (found.prefill is not None) or mode is not DisaggregationMode.ALWAYS
        router.report_failure(found.decode.worker_id, now_s)
    for attempt_id in booked:
        assert router.settle(attempt_id)
    assert router.book.num_open == 0
    assert router.book._loads == {}
