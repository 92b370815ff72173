"""Either all models may commit, or none."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.driver.updating.joint_commit import JointCommit
from weightsync.errors import StateError

ENDS = st.dictionaries(st.sampled_from("abcde"), st.tuples(st.booleans(), st.integers(0, 8)), min_size=1)


async def outcomes(ends: dict[str, tuple[bool, int]]) -> dict[str, BaseException | None]:
    """Have each model meet the others, or fail, after so many turns of the loop."""
    joint, staged = JointCommit(ends), set[str]()

    async def update(model: str) -> None:
        fails, turns = ends[model]
        staging, moving = divmod(turns, 3)
        if fails and not moving:
            joint.fail(model)
            raise RuntimeError(model)
        for _ in range(staging):
            await asyncio.sleep(0)
        staged.add(model)
        await joint.member(model).before_pause()
        assert staged == ends.keys(), "nobody pauses before all are staged"
        for _ in range(moving):
            await asyncio.sleep(0)
        if fails:
            joint.fail(model)
            raise RuntimeError(model)
        await joint.member(model).before_commit()

    done = await asyncio.gather(*map(update, ends), return_exceptions=True)
    assert not joint.failed or ends[joint.failed][0]
    return dict(zip(ends, done, strict=True))


@given(ENDS)
def test_all_commit_or_none(ends: dict[str, tuple[bool, int]]) -> None:
    found = asyncio.run(outcomes(ends))
    if not any(fails for fails, _ in ends.values()):
        assert set(found.values()) == {None}
    for model, (fails, _) in ends.items():
        if not fails and any(other for other, _ in ends.values()):
            assert isinstance(found[model], StateError)
            assert f"{model} was to commit with it" in str(found[model])


def test_a_failure_after_all_have_met_keeps_nobody_from_the_commit() -> None:
    async def both() -> None:
        joint = JointCommit("ab")
        await asyncio.gather(joint.member("a").before_commit(), joint.member("b").before_commit())
        joint.fail("a")
        await joint.member("b").before_commit()

    asyncio.run(both())


def test_the_error_names_the_first_that_failed() -> None:
    async def failed() -> None:
        joint = JointCommit(["policy", "reward"])
        joint.fail("reward")
        await joint.member("policy").before_commit()

    with pytest.raises(StateError, match="reward failed, and policy was to commit with it"):
        asyncio.run(failed())
