"""The engine's end of the talk: what breaks there is told to whoever waits, and stays with its own connection."""

from __future__ import annotations

import asyncio

import pytest
from tests.conformance.test_engines import batch, loaded
from tests.rollout.hosts import SECRET, InThread

from gropius.rollout.remote import EngineLost, RemoteEngine


def test_a_request_that_breaks_the_engine_ends_its_connection_with_the_cause_and_no_other() -> None:
    host = InThread(0, loaded("llama"))
    complete, broken = host.engine.complete, batch()[0].stream

    async def breaks(request):
        if request.stream == broken:
            raise ValueError("no such thing")
        return await complete(request)

    async def both():
        first, second = (RemoteEngine(host.address, SECRET) for _ in range(2))
        mine = [asyncio.create_task(first.complete(request)) for request in batch()]
        theirs = [asyncio.create_task(second.complete(request)) for request in batch()[1:]]
        found = await asyncio.gather(*mine, return_exceptions=True), await asyncio.gather(*theirs)
        with pytest.raises(EngineLost, match="no such thing"):  # it stays broken; whoever lost it makes another
            await first.complete(batch()[1])
        await asyncio.gather(first.close(), second.close())
        return found

    host.engine.complete = breaks  # type: ignore[method-assign]
    try:
        lost, drawn = asyncio.run(both())
    finally:
        host.end()
    assert lost and all(isinstance(one, EngineLost) for one in lost)
    assert {str(one) for one in lost} == {
        f"engine 0 at {host.address.host}:{host.address.port} was lost: ValueError: no such thing"
    }
    assert len(drawn) == len(batch()) - 1 and all(len(one.token_ids) for one in drawn)
