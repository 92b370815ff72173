from __future__ import annotations

import asyncio

from weightsync.driver.update_lock import UpdateLock


def test_two_updates_and_work_on_an_engine_never_run_at_once() -> None:
    """An engine may join with another layout, and so connect again, while its adapter is updated."""
    running, most = set[str](), 0

    async def runs(name: str) -> None:
        nonlocal most
        running.add(name)
        most = max(most, len(running))
        await asyncio.sleep(0)
        running.remove(name)

    async def update(lock: UpdateLock, name: str) -> None:
        async with lock.exclusive():
            await runs(name)

    async def heal(lock: UpdateLock) -> None:
        async with lock.shared("e0"):
            await runs("heal")

    async def all_at_once() -> None:
        lock = UpdateLock(1)
        await asyncio.gather(update(lock, "first"), heal(lock), update(lock, "second"))

    asyncio.run(all_at_once())
    assert most == 1
