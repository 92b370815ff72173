"""Staged updates that go on to a second copy of the weights on the GPUs, of which doubles stand here."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.fleets.direct import Direct, Staging
from tests.fleets.loop import CONFIG, Loop, drive
from tests.kernel_doubles import DeviceBuffer, use_memory_doubles
from weightsync.driver.engine_state import EngineState
from weightsync.errors import ConfigError, StateError, VerifyError
from weightsync.holder.second_copy import SecondCopy
from weightsync.protocol.messages import StagedPart, StageTask

ON_DEVICE = replace(CONFIG, stage="device")
AUTO = replace(CONFIG, stage="auto")


class Apart(Direct):
    """Holders that write their engines' memory, each on its own host."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.fleet.nodes[:] = [f"host {i}" for i in range(len(self.holders))]

    def from_slots(self) -> list[int]:
        """Return how many buckets each engine got from its holder's slots."""
        stagings = [holder.staging for holder in self.holders[1:]]
        assert all(isinstance(each, Staging) for each in stagings)
        return [len(each.written) for each in stagings]  # type: ignore[union-attr]


@pytest.fixture(autouse=True)
def _doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    use_memory_doubles(monkeypatch)


async def updated(loop: Loop, version: int) -> list[str]:
    """Train and update. Returns the engines that hold the trainer's weights."""
    loop.train()
    report = await loop.controller.update(version)
    assert set(report.engines.values()) == {version}
    return [name for name in loop.engines if loop.holds_the_models_weights(name)]


@pytest.mark.parametrize("config", [ON_DEVICE, AUTO], ids=["device", "auto"])
def test_engines_serve_until_the_bytes_are_on_their_gpus(config: object) -> None:
    async def work(loop: Apart) -> None:
        serving = []

        def watch(holder: int) -> None:
            stage = loop.holders[holder].stage

            def staged(task: StageTask, timeout_s: float) -> Sequence[StagedPart]:
                done = stage(task, timeout_s)
                if task.to_device:
                    serving.append([engine.serving() for engine in loop.engines.values()])
                return done

            loop.holders[holder].stage = staged  # type: ignore[method-assign]

        await loop.controller.connect()
        for holder in (1, 2):
            watch(holder)
        for version in (1, 2, 3):
            assert await updated(loop, version) == ["e0", "e1"]
            assert serving == [[version - 1] * 2] * 2
            serving.clear()
        assert loop.from_slots() == [0, 0]
        loop.engines["e1"].tensors["0.weight"].zero_()
        assert (await loop.controller.refill("e1")).engines == {"e0": 3, "e1": 3}
        assert loop.holds_the_models_weights("e1")

    drive(work, config, Apart)  # type: ignore[arg-type]


def test_a_gpu_without_the_memory_is_named_or_takes_the_version_from_its_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refused(loop: Loop) -> None:
        monkeypatch.setattr(DeviceBuffer, "num_short", 1)
        with pytest.raises(
            ConfigError, match=r"sync\.stage: 'device'.*holder [12] .*no \d+ bytes.*give host"
        ):
            await loop.controller.connect()
        await loop.controller.connect()
        assert await updated(loop, 1) == ["e0", "e1"]

    async def taken(loop: Apart) -> None:
        monkeypatch.setattr(DeviceBuffer, "num_short", 1)
        await loop.controller.connect()
        for version in (1, 2):
            assert await updated(loop, version) == ["e0", "e1"]
        assert sorted(map(bool, loop.from_slots())) == [False, True]

    drive(refused, ON_DEVICE, Apart)
    drive(taken, AUTO, Apart)  # type: ignore[arg-type]


def test_what_did_not_reach_a_gpu_is_taken_from_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(loop: Apart) -> None:
        await loop.controller.connect()
        with monkeypatch.context() as patch:
            patch.setattr(SecondCopy, "fill", broken)
            with caplog.at_level(logging.WARNING, "weightsync.driver"):
                assert await updated(loop, 1) == ["e0", "e1"]
        assert "holder 1 copies from its host while its engine is paused: no stream" in caplog.text
        assert all(loop.from_slots())

    def broken(*_: object) -> None:
        raise StateError("no stream")

    drive(work, ON_DEVICE, Apart)  # type: ignore[arg-type]


def test_a_byte_that_changes_in_the_second_copy_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        assert await updated(loop, 1) == ["e0", "e1"]
        write = SecondCopy.write

        def struck(copy: SecondCopy) -> None:
            memory = copy.struck()
            assert memory is not None
            memory[0] ^= 1
            write(copy)

        monkeypatch.setattr(SecondCopy, "write", struck)
        with pytest.raises(VerifyError, match=r"0\.weight"):
            await updated(loop, 2)
        assert {each.record.state for each in loop.fleet.engines.values()} == {EngineState.STALE}

    drive(work, ON_DEVICE, Apart)


@pytest.mark.parametrize("changes", [{}, {"keep_versions": 1}, {"mode": "direct"}], ids=str)
def test_auto_stages_nothing_where_it_would_make_no_pause_shorter(changes: dict[str, object]) -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        loop.train()
        assert "stage" not in (await loop.controller.update(1)).phases
        assert loop.holds_the_models_weights("e0")

    class Near(Direct):
        def __init__(self, config: object) -> None:
            super().__init__(config)  # type: ignore[arg-type]
            self.source.in_place = True

    drive(work, replace(AUTO, **changes), Near)  # type: ignore[arg-type]
