"""A fleet whose holders quantise into engines' memory after the first update."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fleets.loop import CONFIG
from tests.fleets.quantising import Mapped, Staging, Unable, drive_mapped, refuse_to_serve, use_exports
from tests.kernel_doubles import use_doubles
from weightsync.driver.engine_state import EngineState
from weightsync.engines.loading import whole_loads
from weightsync.errors import TransportError
from weightsync.protocol.messages import HolderDigests


@pytest.fixture(autouse=True)
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    use_doubles(monkeypatch)
    use_exports(monkeypatch)


def test_holders_quantise_once_an_update_has_shown_the_places(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(loop: Mapped) -> None:
        for version in (2, 3):
            loop.train()
            report = await loop.controller.update(version)
            assert report.engines == {"e0": version, "e1": version}
            proof = "live weights with what was quantised and with 1 engine alike"
            assert report.proofs == {"e0": proof, "e1": proof}
            assert [host.differ(loop.model) for host in loop.hosts] == [[], []]
            plan = loop.controller.plan
            assert plan
            written = [*range(plan.num_buckets)] * (version - 1)
            assert loop.buckets == {1: written, 2: written}, "from the second version on"
        await loop.controller.connect()  # what was shown holds for the next plan, too
        loop.train()
        await loop.controller.update(4)
        assert len(loop.buckets[1]) == len(loop.buckets[2]) == 3 * plan.num_buckets
        assert [host.differ(loop.model) for host in loop.hosts] == [[], []]
        assert [host.num_loads for host in loop.hosts] == [1, 1]

    def refuse(*_: object) -> None:
        raise AssertionError("an engine rank prepared to quantise")

    monkeypatch.setattr(whole_loads, "QuantizingTables", refuse)
    drive_mapped(work)


def test_where_a_holder_has_no_kernel_the_rank_quantises() -> None:
    async def work(loop: Mapped) -> None:
        for version in (2, 3):
            loop.train()
            report = await loop.controller.update(version)
            assert report.engines == {"e0": version, "e1": version}
            assert [host.differ(loop.model) for host in loop.hosts] == [[], []]
        assert loop.buckets == {1: [], 2: []}
        assert [host.num_loads for host in loop.hosts] == [1, 1]

    drive_mapped(work, cls=Unable)


def test_a_byte_that_a_holder_wrote_elsewhere_keeps_the_engine_from_serving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(loop: Mapped) -> None:
        staging = loop.holders[1].staging
        assert isinstance(staging, Staging)
        assert staging.tables
        finish = staging.tables.result

        def flipped() -> HolderDigests:
            made = finish()
            loop.hosts[0].live["0_weight_scale"].data[2] *= 2
            return made

        monkeypatch.setattr(staging.tables, "result", flipped)
        loop.train()
        await refuse_to_serve(loop, "0.weight_scale was written, and live memory holds other bytes")

    drive_mapped(work)


def test_parameters_that_moved_since_connect_are_not_served() -> None:
    async def work(loop: Mapped) -> None:
        host = loop.hosts[0]
        host.move()
        loop.train()
        await refuse_to_serve(loop, "live parameters are in other memory than when connected")
        await loop.controller.connect()
        loop.train()
        report = await loop.controller.update(3)
        assert report.engines == {"e0": 3, "e1": 3}
        assert [host.differ(loop.model) for host in loop.hosts] == [[], []]

    drive_mapped(work)


def test_holders_quantise_what_was_staged_and_what_fills_an_engine_again() -> None:
    async def work(loop: Mapped) -> None:
        loop.train()
        report = await loop.controller.update(2)
        assert report.engines == {"e0": 2, "e1": 2}
        plan = loop.controller.plan
        assert plan
        assert loop.buckets == {1: [*range(plan.num_buckets)], 2: [*range(plan.num_buckets)]}
        loop.hosts[1].live["0_weight"].data.zero_()
        await loop.controller.refill("e1")
        assert loop.buckets[2] == [*range(plan.num_buckets)] * 2
        assert [host.differ(loop.model) for host in loop.hosts] == [[], []]

    drive_mapped(work, replace(CONFIG, stage="host"))


def test_an_update_after_one_in_which_a_holder_failed_writes_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(loop: Mapped) -> None:
        write = Staging.write

        def fail(staging: Staging, bucket: int) -> None:
            if staging.live is loop.hosts[0].live and bucket == 1:
                raise TransportError("an illegal memory access was encountered")
            write(staging, bucket)

        with monkeypatch.context() as broken:
            broken.setattr(Staging, "write", fail)
            loop.train()
            with pytest.raises(TransportError, match="illegal memory access"):
                await loop.controller.update(2)
        states = [member.record.state for member in loop.fleet.engines.values()]
        assert EngineState.SERVING not in states
        await loop.controller.connect()
        report = await loop.controller.update(3)
        assert report.engines == {"e0": 3, "e1": 3}
        assert [host.differ(loop.model) for host in loop.hosts] == [[], []]
        assert [host.num_loads for host in loop.hosts] == [1, 1]

    drive_mapped(work)
