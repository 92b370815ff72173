"""Updates several components, such as two models, in one commit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, replace

from weightsync.driver.updating.joint_commit import JointCommit, JointMember
from weightsync.report import SyncReport


@dataclass(frozen=True, slots=True)
class JointPart:
    """A component in a joint update.

    Attributes:
        version: the newest version that committed, or that engines may serve.
        prepare: waits for everything that an update needs, such as a checkpoint that is still read.
        exclusive: keeps other work on the component's engines out.
        move: moves a version to the component's engines, within `exclusive`. It calls the second argument
            once trainers may change their weights, and waits for the other components by the third.
    """

    version: int
    prepare: Callable[[], Awaitable[None]]
    exclusive: Callable[[], AbstractAsyncContextManager[None]]
    move: Callable[[int, Callable[[], None], JointMember | None], Awaitable[SyncReport]]


async def update_together(parts: Mapping[str, JointPart], version: int, held: Future[None]) -> SyncReport:
    """Update all `parts` at the same time. No part commits before the engines of all are verified.

    `held` is resolved once all trainers may change their weights. Returns the first part's report, with all
    reports if there are several. Raises the error of the first part that failed. If this part failed before
    the commit, no other part has committed.
    """

    def when_held() -> None:  # again, if the update is repeated since weights moved
        if not held.done():
            held.set_result(None)

    if len(parts) == 1:  # as in most updates: no task, so that the caller's future is resolved at once
        (part,) = parts.values()
        await part.prepare()
        async with part.exclusive():
            return await part.move(version, when_held, None)
    joint, left = JointCommit(parts), len(parts)

    def part_held() -> None:
        nonlocal left
        left -= 1
        if not left:
            when_held()

    async def move(name: str, part: JointPart) -> SyncReport:
        try:
            return await part.move(version, part_held, joint.member(name))
        except BaseException:  # cancelled, too: the others would wait for ever
            joint.fail(name)
            raise

    await asyncio.gather(*(part.prepare() for part in parts.values()))
    async with AsyncExitStack() as stack:
        for part in parts.values():
            await stack.enter_async_context(part.exclusive())
        moves = (move(name, part) for name, part in parts.items())
        done = dict(zip(parts, await asyncio.gather(*moves, return_exceptions=True), strict=True))
    errors = {name: its for name, its in done.items() if isinstance(its, BaseException)}
    if errors:
        raise errors.get(joint.failed) or next(iter(errors.values()))
    reports = {name: made for name, made in done.items() if not isinstance(made, BaseException)}
    return replace(next(iter(reports.values())), components=reports)
