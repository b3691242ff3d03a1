from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.support.directory_fakes import block, blocks

from tandem.directory.prefix_map import Delta, PrefixMap, coalesce
from tandem.ids import BlockHash, WorkerId
from tandem.kv.events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent

NAMES = [WorkerId(name) for name in "abcd"]
HASHES = st.lists(st.integers(0, 7), max_size=5).map(lambda numbers: blocks(*numbers))
EVENTS = st.lists(
    st.one_of(
        HASHES.map(BlocksStored),
        HASHES.map(BlocksRemoved),
        st.just(CacheCleared()),
    ),
    max_size=6,
)


def replay(held: set[BlockHash], events: list[KvEvent]) -> set[BlockHash]:
    for event in events:
        match event:
            case CacheCleared():
                held = set()
            case BlocksStored(hashes):
                held = held | set(hashes)
            case BlocksRemoved(hashes):
                held = held - set(hashes)
    return held


def leading(held: set[BlockHash], chain: tuple[BlockHash, ...]) -> int:
    for length, each in enumerate(chain):
        if each not in held:
            return length
    return len(chain)


@given(st.lists(st.tuples(st.sampled_from(NAMES), EVENTS), max_size=12), HASHES)
def test_match_equals_a_naive_replay(
    batches: list[tuple[WorkerId, list[KvEvent]]], chain: tuple[BlockHash, ...]
) -> None:
    subject = PrefixMap()
    model: dict[WorkerId, set[BlockHash]] = {name: set() for name in NAMES}
    for name, events in batches:
        subject.apply(name, coalesce(events))
        model[name] = replay(model[name], events)
    expected = {name: leading(held, chain) for name, held in model.items() if leading(held, chain)}
    assert subject.match(chain) == expected
    assert subject.num_blocks == len(set().union(*model.values()))
    for name in NAMES:
        assert subject.held(name) == model[name]
        subject.drop(name)
    assert subject.num_blocks == 0
    assert subject._holders == {}
    assert subject._used_bits == 0


def test_coalesce_keeps_the_last_word_on_each_hash() -> None:
    delta = coalesce(
        [
            BlocksStored(blocks(1)),
            CacheCleared(),
            BlocksStored(blocks(2, 3)),
            BlocksRemoved(blocks(3, 4)),
            BlocksStored(blocks(4)),
        ]
    )
    assert delta == Delta(cleared=True, stored=blocks(2, 4), removed=blocks(3))


def test_a_bit_of_a_gone_worker_is_used_again_without_its_blocks() -> None:
    subject = PrefixMap()
    subject.store(NAMES[0], [block(1)])
    subject.drop(NAMES[0])
    subject.store(NAMES[1], [block(2)])
    assert subject.match([block(1)]) == {}
    assert subject.match([block(2)]) == {NAMES[1]: 1}
