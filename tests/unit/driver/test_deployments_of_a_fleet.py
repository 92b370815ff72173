"""Which engines of a fleet can take requests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weightsync.driver.engine_state import EngineRecord, EngineState
from weightsync.driver.fleet import EngineMember, Fleet

NAMES = "abcde"
SERVES = (EngineState.SERVING, EngineState.PAUSED)
RECORDS = st.builds(EngineRecord, st.sampled_from(EngineState), st.integers(0, 2))


@given(st.fixed_dictionaries(dict.fromkeys(NAMES, RECORDS)), st.booleans())
def test_a_deployment_is_served_as_a_whole_and_in_one_version(
    records: dict[str, EngineRecord], any_version: bool
) -> None:
    engines = {name: EngineMember(None, (), record) for name, record in records.items()}  # type: ignore[arg-type]
    fleet = Fleet([], engines, [], deployments={"x": ("a", "b"), "y": ("c", "d", "gone")})
    assert (fleet.together("b"), fleet.together("d"), fleet.together("e")) == (["a", "b"], ["c", "d"], ["e"])
    found = fleet.serving(any_version)
    for mates in ("ab", "cd", "e"):
        held = {(records[name].version if records[name].state in SERVES else 0) for name in mates}
        can = len(held) == 1 and held != {0}
        assert len({*mates} & {*found}) in (0, len(mates))
        if not can:
            assert not {*mates} & {*found}
        elif any_version:
            assert {*mates} <= {*found}
    assert any_version or len({records[name].version for name in found}) <= 1
    assert {*fleet.serving(False)} <= {*fleet.serving(True)}
    assert bool(fleet.serving(False)) == bool(fleet.serving(True))
