import asyncio

import pytest

from tandem.gateway.merge import merge


class Stream:
    """Yields what is put in; remembers whether it was closed."""

    def __init__(self, *items: int, then: Exception | None = None) -> None:
        self.closed = False
        self.num_taken = 0
        self._items = items
        self._then = then

    async def run(self):
        try:
            for item in self._items:
                self.num_taken += 1
                yield item
            if self._then is not None:
                raise self._then
        finally:
            self.closed = True


async def endless(closed: asyncio.Event):
    try:
        yield 0
        await asyncio.Event().wait()
    finally:
        closed.set()


@pytest.mark.parametrize("num_streams", [1, 3])
async def test_everything_comes_and_order_within_a_stream_holds(num_streams):
    streams = [Stream(*range(10 * at, 10 * at + 5)) for at in range(num_streams)]
    seen = [item async for item in merge([stream.run() for stream in streams])]
    for at in range(num_streams):
        assert [item for item in seen if item // 10 == at] == list(range(10 * at, 10 * at + 5))
    assert len(seen) == 5 * num_streams
    assert all(stream.closed for stream in streams)


async def test_an_error_of_one_closes_all():
    closed = asyncio.Event()
    with pytest.raises(ValueError, match="broken"):
        async for _ in merge([endless(closed), Stream(1, then=ValueError("broken")).run()]):
            pass
    assert closed.is_set()


@pytest.mark.parametrize("num_streams", [1, 2])
async def test_closing_it_closes_all(num_streams):
    closed = [asyncio.Event() for _ in range(num_streams)]
    merged = merge([endless(event) for event in closed])
    await anext(merged)
    await merged.aclose()
    assert all(event.is_set() for event in closed)


async def test_p32_a_slow_reader_holds_the_streams_back():
    stream, other = Stream(*range(1000)), Stream()
    merged = merge([stream.run(), other.run()])
    await anext(merged)
    for _ in range(50):
        await asyncio.sleep(0)
    assert stream.num_taken <= 3
    await merged.aclose()
