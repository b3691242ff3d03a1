"""Where the prompt is computed: on a prefill worker, or on the decode worker itself."""

from __future__ import annotations

from tandem.config.choices import DisaggregationMode
from tandem.routing.query import RouteReason, RouterPolicy


def local_price_s(policy: RouterPolicy, local_s: float, num_running: int) -> float:
    """What a local prefill costs, with what it takes from the sequences that run there."""
    return local_s * (1.0 + policy.decode_slowdown * num_running)


def choose_place(
    policy: RouterPolicy,
    *,
    num_uncached_decode_tokens: int,
    block_size_tokens: int,
    local_s: float,
    remote_s: float,
    num_running: int,
) -> tuple[bool, RouteReason]:
    """(remote?, why) when both workers exist. Seconds are predicted times to the first token.

    Up to one block of uncached tokens the decode worker computes: a hand-off would carry less than
    it costs. Above `max_local_prefill_tokens` it never does. Between the two the prices decide, and
    equal prices go to the prefill worker, which leaves the running sequences alone.
    """
    if policy.mode is not DisaggregationMode.AUTO:
        return policy.mode is DisaggregationMode.ALWAYS, RouteReason.MODE
    if num_uncached_decode_tokens > policy.max_local_prefill_tokens:
        return True, RouteReason.TOO_LONG_FOR_LOCAL
    if num_uncached_decode_tokens <= block_size_tokens:
        return False, RouteReason.NOTHING_TO_COMPUTE_REMOTELY
    if local_price_s(policy, local_s, num_running) < remote_s:
        return False, RouteReason.LOCAL_FASTER
    return True, RouteReason.REMOTE_FASTER
