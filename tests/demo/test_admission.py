"""The front's queue: bounded, first come first served, and nobody's place is lost."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from admission import Admission, Overloaded


def test_places_waiting_and_refusal():
    async def main() -> None:
        admission, order = Admission(2, 3), []
        leave = [asyncio.Event() for _ in range(5)]

        async def visit(index: int) -> None:
            async with admission.place():
                order.append(index)
                await leave[index].wait()

        visits = [asyncio.create_task(visit(index)) for index in range(5)]
        await asyncio.sleep(0)
        assert admission.to_dict() == {"running": 2, "waiting": 3, "refused": 0}
        with pytest.raises(Overloaded) as caught:
            async with admission.place():
                pass
        assert caught.value.retry_after_s >= 1
        visits[2].cancel()  # a client that waits no longer
        await asyncio.gather(visits[2], return_exceptions=True)
        assert admission.to_dict() == {"running": 2, "waiting": 2, "refused": 1}
        for event in leave:
            event.set()
        await asyncio.gather(*visits, return_exceptions=True)
        assert order == [0, 1, 3, 4]
        assert admission.to_dict() == {"running": 0, "waiting": 0, "refused": 1}

    asyncio.run(main())


def test_a_client_that_goes_away_as_its_turn_comes():
    async def main() -> None:
        admission = Admission(1, 2)
        async with AsyncExitStack() as first:
            await first.enter_async_context(admission.place())

            async def visit() -> str:
                async with admission.place():
                    return "served"

            waiting, next_one = asyncio.create_task(visit()), asyncio.create_task(visit())
            await asyncio.sleep(0)
        waiting.cancel()  # the place is its already, and it has not run since
        assert await next_one == "served"
        assert admission.running == 0

    asyncio.run(main())
