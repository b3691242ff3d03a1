import asyncio
import logging

from tandem.tasks import Background


async def test_tasks_run_and_are_forgotten():
    background, done = Background(), asyncio.Event()

    async def work() -> None:
        done.set()

    await background.spawn(work(), "work")
    assert done.is_set()
    await asyncio.sleep(0)
    assert len(background) == 0


async def test_a_failure_is_logged(caplog):
    background = Background()

    async def fail() -> None:
        raise ValueError("broken")

    with caplog.at_level(logging.ERROR):
        background.spawn(fail(), "the work")
        assert await background.join(1.0)
        await asyncio.sleep(0)
    assert "the work failed: broken" in caplog.text


async def test_closing_cancels_what_is_left_also_what_it_spawns_then():
    background = Background()
    cancelled: list[str] = []

    async def wait(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(name)
            if name == "first":
                background.spawn(wait("second"), "second")

    background.spawn(wait("first"), "first")
    await asyncio.sleep(0)
    await background.aclose()
    assert cancelled[0] == "first"
    assert len(background) == 0


async def test_closing_with_grace_lets_work_end():
    background, go_on = Background(), asyncio.Event()
    ended: list[bool] = []

    async def work() -> None:
        await go_on.wait()
        ended.append(True)

    background.spawn(work(), "work")
    asyncio.get_running_loop().call_soon(go_on.set)
    await background.aclose(grace_s=5.0)
    assert ended == [True]
