"""Which engines of a fleet take requests."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from weightsync.driver.engine_state import EngineRecord, EngineState
from weightsync.driver.fleet import EngineMember, Fleet

SERVES = (EngineState.SERVING, EngineState.PAUSED)
RECORDS = st.lists(st.builds(EngineRecord, st.sampled_from(EngineState), st.integers(0, 3)), max_size=5)


def fleet(records: list[EngineRecord]) -> Fleet:
    peer: Any = None
    return Fleet([], {f"e{i}": EngineMember(peer, (), record) for i, record in enumerate(records)}, [])


@given(RECORDS)
def test_requests_go_to_one_version_unless_any_is_asked_for(records: list[EngineRecord]) -> None:
    its = fleet(records)
    versions = {name: member.record.version for name, member in its.engines.items()}
    every, newest = its.serving(any_version=True), its.serving(any_version=False)
    assert every == [n for n, m in its.engines.items() if m.record.state in SERVES and versions[n]]
    assert newest == [n for n in every if versions[n] == max(versions[n] for n in every)]
