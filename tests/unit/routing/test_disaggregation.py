from __future__ import annotations

import pytest

from tandem.config.choices import DisaggregationMode
from tandem.routing.disaggregation import choose_place, local_price_s
from tandem.routing.query import RouteReason, RouterPolicy

AUTO = RouterPolicy(max_local_prefill_tokens=512, decode_slowdown=0.5)


def place(
    policy: RouterPolicy = AUTO,
    *,
    uncached: int = 100,
    local_s: float = 1.0,
    remote_s: float = 1.0,
    running: int = 0,
) -> tuple[bool, RouteReason]:
    return choose_place(
        policy,
        num_uncached_decode_tokens=uncached,
        block_size_tokens=16,
        local_s=local_s,
        remote_s=remote_s,
        num_running=running,
    )


@pytest.mark.parametrize(("uncached", "remote"), [(15, False), (16, False), (17, True)])
def test_p40_up_to_one_block_stays_local(uncached: int, remote: bool) -> None:
    assert place(uncached=uncached, local_s=9.0, remote_s=1.0)[0] == remote


@pytest.mark.parametrize(("uncached", "remote"), [(511, False), (512, False), (513, True)])
def test_p40_above_the_longest_local_prompt_goes_remote(uncached: int, remote: bool) -> None:
    chosen, reason = place(uncached=uncached, local_s=1.0, remote_s=9.0)
    assert chosen == remote
    assert (reason is RouteReason.TOO_LONG_FOR_LOCAL) == remote


@pytest.mark.parametrize(
    ("local_s", "reason"),
    [
        (0.999, RouteReason.LOCAL_FASTER),
        (1.0, RouteReason.REMOTE_FASTER),
        (1.001, RouteReason.REMOTE_FASTER),
    ],
)
def test_p40_between_them_the_lower_price_wins_and_a_tie_goes_remote(
    local_s: float, reason: RouteReason
) -> None:
    assert place(local_s=local_s) == (reason is RouteReason.REMOTE_FASTER, reason)


def test_running_sequences_make_a_local_prefill_dearer() -> None:
    assert not place(local_s=0.6, running=0)[0]
    assert not place(local_s=0.6, running=1)[0]
    assert place(local_s=0.6, running=2)[0]
    assert local_price_s(AUTO, 2.0, 3) == 5.0


@pytest.mark.parametrize("uncached", [1, 5000])
def test_the_other_modes_do_not_calculate(uncached: int) -> None:
    always = RouterPolicy(mode=DisaggregationMode.ALWAYS)
    never = RouterPolicy(mode=DisaggregationMode.NEVER)
    assert place(always, uncached=uncached, local_s=0.0, remote_s=9.0) == (True, RouteReason.MODE)
    assert place(never, uncached=uncached, local_s=9.0, remote_s=0.0) == (False, RouteReason.MODE)
