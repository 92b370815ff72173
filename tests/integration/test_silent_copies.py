"""A holder that hangs while it keeps a version is noticed before the next update."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from tests.fleets.loop import CONFIG, Loop, drive
from tests.patience import patient


@pytest.mark.parametrize("ends", ["settled", "writable"])
def test_a_holder_that_hangs_while_it_keeps_a_version_is_noticed(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = threading.Event()

    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        await loop.controller.snapshot_index.settled()
        assert loop.controller.connected
        monkeypatch.setattr(loop.holders[0], "snapshot", lambda *_: hangs.wait(patient(20)))
        await loop.controller.update(2)
        await getattr(loop.controller.snapshot_index, ends)()
        assert not loop.controller.connected, "so that the next update connects again, without it"
        hangs.set()

    drive(work, replace(CONFIG, timeout_s=patient(0.5)))
