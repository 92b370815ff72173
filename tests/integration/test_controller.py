"""The lifecycle over real holders, sockets, shared memory and gloo; threads play the actors."""

from __future__ import annotations

import asyncio
import gc
import re
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import torch
from torch import nn

from tests.fleets.loop import CONFIG, Loop, drive
from tests.patience import patient
from weightsync.config import SyncConfig
from weightsync.driver.connecting.connect import FlatLayout
from weightsync.driver.engine_state import EngineState
from weightsync.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    PeerLostError,
    PlanError,
    ReadError,
    StateError,
)
from weightsync.holder.flat_snapshot import FlatSnapshot
from weightsync.holder.snapshots import SnapshotStore
from weightsync.holder.staging import HostStaging
from weightsync.protocol.messages import PublishTask
from weightsync.report import Link
from weightsync.testing import DictEngine, LocalPeer


def test_each_version_arrives_bit_for_bit_and_the_report_says_so() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        digests = set()
        for version in (1, 2, 7):
            loop.train()
            report = await loop.controller.update(version)
            assert loop.holds_the_models_weights("e0")
            assert loop.holds_the_models_weights("e1")
            assert report.verified
            assert report.engines == {"e0": version, "e1": version}
            assert list(report.phases) == ["publish", "pause", "move", "verify", "commit"]
            assert list(report.connect_phases) == [
                "layouts",
                "trial",
                "plan",
                "prepare",
                "join",
                "attach",
                "warm_up",
            ]
            assert report.nbytes == sum(t.nbytes for t in loop.model.state_dict().values())
            digests.add(report.digest)
            assert loop.engines["e0"].generate([[1]], {}).version == version
        assert len(digests) == 3

    drive(work)


def test_links_say_who_takes_how_much_from_how_far_away() -> None:
    async def work(loop: Loop) -> None:
        with pytest.raises(StateError, match="connect"):
            loop.controller.links()
        loop.fleet.nodes[:] = ["a", "a", "b"]
        await loop.controller.connect()
        sent = sum(t.nbytes for t in loop.model.state_dict().values())
        near, far = loop.controller.links()
        assert near.nbytes >= sent
        assert replace(near, nbytes=0) == Link("holder 0", "engine e0 rank 0", "same host", 0)
        assert far == Link("holder 0", "engine e1 rank 0", "other host", near.nbytes)

    drive(work)


def test_no_cyclic_garbage_is_searched_for_while_an_update_runs() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        seen = []
        await loop.controller.update(1, lambda: seen.append(gc.isenabled()))
        assert (seen, gc.isenabled()) == ([False], True)
        with pytest.raises(ConfigError):
            await loop.controller.update(1)
        assert gc.isenabled()

    drive(work)


def test_an_update_before_connect_and_a_version_that_does_not_grow_are_refused() -> None:
    async def work(loop: Loop) -> None:
        with pytest.raises(StateError, match="connect"):
            await loop.controller.update(1)
        await loop.controller.connect()
        await loop.controller.update(3)
        for version in (3, 2, 0, -1):
            with pytest.raises(ConfigError, match="more than 3"):
                await loop.controller.update(version)

    drive(work)


@pytest.mark.parametrize("which", ["first", "last"])
def test_an_engine_that_fails_in_any_bucket_is_stale_and_the_other_commits(which: str) -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        assert loop.controller.plan is not None
        tensors = [meta.name for meta in loop.controller.plan.tensors]
        victim = tensors[0 if which == "first" else -1]

        def fail(tensor: str) -> None:
            if tensor == victim:
                raise MemoryError(tensor)

        loop.engines["e1"].on_write = fail
        loop.train()
        report = await loop.controller.update(2)
        assert report.engines == {"e0": 2, "e1": 0}
        assert report.states == {"e0": "SERVING", "e1": "STALE"}
        assert "e1" in report.failures
        assert "MemoryError" in report.failures["e1"]
        with pytest.raises(StateError):
            loop.engines["e1"].generate([[1]], {})
        loop.engines["e1"].on_write = lambda _: None
        healed = await loop.controller.refill("e1")
        assert healed.engines == {"e0": 2, "e1": 2}
        assert loop.holds_the_models_weights("e1")

    drive(work)


def test_too_few_engines_is_an_error_and_the_next_update_works() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()

        def fail(tensor: str) -> None:
            raise ValueError(tensor)

        loop.engines["e0"].on_write = fail
        with pytest.raises(EngineError, match="ValueError"):
            await loop.controller.update(1)
        states = {name: member.record.state for name, member in loop.fleet.engines.items()}
        assert states == {"e0": EngineState.STALE, "e1": EngineState.STALE}
        assert loop.controller.version == 0
        loop.engines["e0"].on_write = lambda _: None
        assert (await loop.controller.update(2)).engines == {"e0": 2, "e1": 2}

    drive(work, SyncConfig(bucket_bytes=4096, timeout_s=patient(5), min_engines=2))


def test_a_flipped_bit_is_caught_before_commit_and_names_the_tensor() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()

        def flip(tensor: str) -> None:
            if tensor == "1.weight":
                loop.engines["e1"].tensors["0.weight"].view(torch.int32)[3, 4] ^= 1

        loop.engines["e1"].on_write = flip
        report = await loop.controller.update(1)
        assert report.engines == {"e0": 1, "e1": 0}
        assert "wrong bytes in 0.weight" in report.failures["e1"]
        assert "(engine e1, version 1, verify)" in report.failures["e1"]
        assert not loop.engines["e1"].serving()

    drive(work)


def test_an_engine_that_hangs_is_named_and_the_others_do_not_wait_for_it_longer_than_the_deadline() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        release = asyncio.Event()
        running = asyncio.get_running_loop()

        def hang(_: str) -> None:
            asyncio.run_coroutine_threadsafe(release.wait(), running).result(patient(20))

        loop.engines["e1"].on_write = hang
        report = await loop.controller.update(1)
        release.set()
        assert report.engines == {"e0": 1, "e1": 0}
        assert "engine e1" in report.failures["e1"]

    drive(work, SyncConfig(bucket_bytes=4096, timeout_s=patient(1)))


def test_a_holder_that_is_gone_is_named_and_every_engine_is_stale_until_the_next_connect() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)

        class Gone:
            def move(self, *_: object) -> float:
                for transport in loop.holders[2].transports.values():
                    transport.close()
                raise PeerLostError("holder 2", "killed")

            def abort(self, cause: str) -> None:
                raise PeerLostError("holder 2", "killed")

        whole, told = loop.fleet.holders[2], list[str]()
        loop.fleet.holders[2] = LocalPeer(Gone())
        loop.holders[1].abort = told.append  # type: ignore[method-assign]
        with pytest.raises(PeerLostError, match="holder 2"):
            await loop.controller.update(2)
        assert "holder 2 is gone: killed" in told, "beside what it finds itself"
        assert not loop.controller.connected
        loop.fleet.holders[2] = whole
        await loop.controller.connect()
        assert (await loop.controller.update(3)).engines == {"e0": 3, "e1": 3}

    drive(work, replace(CONFIG, timeout_s=patient(2)))


def test_a_failed_publish_leaves_the_engines_serving() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        whole = loop.fleet.trainers[0]

        class Silent:
            async def publish(self, task: PublishTask, readable: asyncio.Future[None]) -> None:
                await asyncio.sleep(60)

        loop.fleet.trainers[0] = (Silent(), 0)
        with pytest.raises(DeadlineError, match="trainer 0") as caught:
            await loop.controller.update(2)
        assert caught.value.phase == "publish"
        assert loop.engines["e0"].generate([[1]], {}).version == 1
        loop.fleet.trainers[0] = whole
        assert (await loop.controller.update(2)).engines == {"e0": 2, "e1": 2}

    drive(work, SyncConfig(bucket_bytes=4096, timeout_s=patient(1)))


def refuse_to_pause(mode: str, timeout_s: float) -> None:
    raise DeadlineError("pause", ("engine e1",), timeout_s)


def test_engines_paused_in_vain_go_on_with_the_version_that_they_have() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)

        loop.engines["e1"].pause = refuse_to_pause
        with pytest.raises(DeadlineError, match="engine e1"):
            await loop.controller.update(2)
        assert loop.engines["e0"].generate([[1]], {}).version == 1
        assert loop.fleet.engines["e0"].record.state is EngineState.SERVING
        with pytest.raises(DeadlineError, match="engine e1"):
            await loop.controller.refill("e1")
        del loop.engines["e1"].pause
        assert (await loop.controller.update(3)).engines == {"e0": 3, "e1": 3}

    drive(work, SyncConfig(bucket_bytes=4096, timeout_s=patient(5), min_engines=2))


def test_an_engine_that_does_not_pause_goes_on_with_its_version_and_the_others_commit() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)

        loop.engines["e1"].pause = refuse_to_pause
        report = await loop.controller.update(2)
        assert report.engines == {"e0": 2, "e1": 1}
        assert report.states == {"e0": "SERVING", "e1": "SERVING"}
        assert "engine e1" in report.failures["e1"]
        del loop.engines["e1"].pause
        assert (await loop.controller.refill("e1")).engines == {"e0": 2, "e1": 2}

    drive(work)


@pytest.mark.parametrize("change", ["name", "shape", "dtype"])
def test_sides_that_do_not_fit_are_refused_by_the_tensors_name(change: str) -> None:
    async def work(loop: Loop) -> None:
        tensors = loop.engines["e1"].tensors
        if change == "name":
            tensors["1.wheight"] = tensors.pop("1.weight")
        elif change == "shape":
            tensors["1.weight"] = torch.zeros(6, 30)
        else:
            tensors["1.weight"] = torch.zeros(5, 30, dtype=torch.int32)
        with pytest.raises(PlanError, match=r"1\.w"):
            await loop.controller.connect()
        assert not loop.controller.connected

    drive(work)


def test_a_float8_is_never_a_cast_but_travels_as_it_is() -> None:
    async def work(loop: Loop) -> None:
        for engine in loop.engines.values():
            engine.tensors["1.weight"] = torch.zeros(5, 30, dtype=torch.float8_e4m3fn)
        with pytest.raises(PlanError, match=r"1\.weight: dtype float32 .*, float8_e4m3fn .* scale"):
            await loop.controller.connect()
        layer = loop.model[1]
        layer.weight = nn.Parameter(layer.weight.to(torch.float8_e4m3fn), requires_grad=False)
        await loop.controller.connect()
        assert (await loop.controller.update(1)).engines == {"e0": 1, "e1": 1}
        held = loop.engines["e1"].tensors["1.weight"]
        assert torch.equal(held.view(torch.uint8), layer.weight.view(torch.uint8))

    drive(work)


def test_engines_that_hold_another_float_get_the_cast_value() -> None:
    async def work(loop: Loop) -> None:
        for engine in loop.engines.values():
            engine.tensors = {name: tensor.bfloat16() for name, tensor in engine.tensors.items()}
        await loop.controller.connect()
        await loop.controller.update(1)
        for name, tensor in loop.model.state_dict().items():
            assert torch.equal(tensor.bfloat16(), loop.engines["e0"].tensors[name])

    drive(work)


def test_a_trainer_and_an_engine_on_one_holder_share_its_memory() -> None:
    async def work(loop: Loop) -> None:
        loop.fleet.engines["e0"].holders = (0,)
        await loop.controller.connect()
        for version in (1, 2):
            loop.train()
            assert (await loop.controller.update(version)).engines == {"e0": version, "e1": version}
            assert loop.holds_the_models_weights("e0")
            assert loop.holds_the_models_weights("e1")

    drive(work)


def snapshots(loop: Loop, holder: int) -> SnapshotStore:
    found = loop.holders[holder].snapshot_store
    assert found is not None
    return found


def read_in_place(loop: Loop) -> None:
    """As if the trainers' memory were read where it is: what then is different in the order of things."""
    assert loop.controller._connection is not None
    loop.controller._connection = replace(loop.controller._connection, in_place=True)


def test_what_is_read_in_place_is_held_only_once_it_was_moved_and_may_not_be_kept() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        read_in_place(loop)
        loop.train()
        states = []
        report = await loop.controller.update(
            1, lambda: states.append({member.record.state for member in loop.fleet.engines.values()})
        )
        assert states == [{EngineState.WRITING}]
        assert list(report.phases) == ["publish", "move", "verify", "commit"]
        assert loop.holds_the_models_weights("e0")
        assert not loop.controller.can_refill("e0")
        with pytest.raises(StateError, match="keeps the committed version"):
            await loop.controller.refill("e0")

    drive(work)


class Imaged(Loop):
    """Holders that write their engine ranks' memory, and keep images of it."""

    async def connected(self) -> None:
        """As if the engines' ranks had exported their memory."""
        assert self.controller._connection is not None
        flat = FlatLayout("the model's", 0)
        self.controller._connection = replace(
            self.controller._connection, in_place=True, flat_layouts=dict.fromkeys(self.engines, flat)
        )
        for index, engine in enumerate(self.engines.values(), start=1):
            self.show(index, engine)
        await self.controller.snapshot_index.ended()
        self.controller.snapshot_index.reserve(self.controller._connection)

    def show(self, holder: int, engine: DictEngine) -> None:
        staging = self.holders[holder].staging
        assert isinstance(staging, HostStaging)
        flat = FlatSnapshot({n: t.view(torch.uint8).flatten() for n, t in engine.tensors.items()})
        staging.mapped = SimpleNamespace(flat=flat, writes=False, quantizing=None, link=lambda _: None)  # type: ignore[assignment]

    def writes(self, name: str) -> None:
        """From now on its holder does; an update would copy into slots that nobody reads."""
        mapped = self.holders[1 + [*self.engines].index(name)].staging.mapped  # type: ignore[union-attr]
        mapped.writes, mapped.wait_written = True, lambda _: None  # type: ignore[misc, method-assign, union-attr]
        self.engines[name].written = lambda _=None: None  # type: ignore[method-assign]


def test_a_version_read_in_place_is_kept_as_the_engines_serve_it_and_refills_them() -> None:
    async def work(loop: Loop) -> None:
        assert isinstance(loop, Imaged)
        await loop.controller.connect()
        await loop.connected()
        for version in (1, 2):
            loop.train()
            await loop.controller.update(version)
        await loop.controller.snapshot_index.settled()
        served = {name: tensor.clone() for name, tensor in loop.model.state_dict().items()}
        loop.train()
        copied = [i for i in (1, 2) if loop.holders[i].snapshots()]
        assert copied == [1], "one copy on a host suffices"
        (share,) = loop.holders[1].snapshots()
        mapped = snapshots(loop, 2).held(share.header)
        assert mapped is not None
        assert mapped.holder == "holder 1"
        for name, task in (("e0", "own"), ("e1", "mapped")):
            loop.writes(name)
            engine = loop.engines[name]
            for tensor in engine.tensors.values():
                tensor.fill_(7)
            loop.controller.engine_group.enter([name], EngineState.STALE)
            assert loop.controller.can_refill(name)
            report = await loop.controller.refill(name)
            assert report.verified
            assert report.engines[name] == 2
            assert report.ways == {"holder 1": task}
            assert sum(report.bytes_from.values()) == sum(tensor.nbytes for tensor in served.values())
            assert all(torch.equal(tensor, engine.tensors[n]) for n, tensor in served.items())

    drive(work, cls=Imaged)


def test_an_image_that_is_replaced_while_it_is_read_refills_nobody() -> None:
    async def work(loop: Loop) -> None:
        assert isinstance(loop, Imaged)
        await loop.controller.connect()
        await loop.connected()
        await loop.controller.update(1)
        await loop.controller.snapshot_index.settled()
        (share,) = loop.holders[1].snapshots()
        loop.writes("e1")
        flat_layouts = [holder.staging.mapped and holder.staging.mapped.flat for holder in loop.holders]
        newer = msgspec.structs.replace(share.header, version=2)
        flat_layouts[2].load = lambda *_: snapshots(loop, 1).snapshot(newer, share.expected, flat_layouts[1])
        loop.controller.engine_group.enter(["e0", "e1"], EngineState.STALE)
        with pytest.raises(ReadError, match=f"holder 1.*not {re.escape(str(share.header))}"):
            await loop.controller.refill("e1")
        assert loop.fleet.engines["e1"].record.state is EngineState.STALE

    drive(work, cls=Imaged)


def test_an_image_that_changed_after_it_was_kept_refills_nobody() -> None:
    async def work(loop: Loop) -> None:
        assert isinstance(loop, Imaged)
        await loop.controller.connect()
        await loop.connected()
        await loop.controller.update(1)
        await loop.controller.snapshot_index.settled()
        (share,) = loop.holders[1].snapshots()
        held = snapshots(loop, 1).held(share.header)
        assert held is not None
        held.bytes[-1] ^= 1
        loop.writes("e0")
        loop.controller.engine_group.enter(["e0", "e1"], EngineState.STALE)
        with pytest.raises(ReadError, match=r"holder 1 .* wrong bytes"):
            await loop.controller.refill("e0")
        assert loop.fleet.engines["e0"].record.state is EngineState.STALE

    drive(work, cls=Imaged)


def test_engines_that_paused_for_a_publish_that_failed_serve_on() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        read_in_place(loop)
        loop.source.publish = fail_to_publish
        with pytest.raises(StateError, match="moved"):
            await loop.controller.update(2)
        assert [member.record.state for member in loop.fleet.engines.values()] == [EngineState.SERVING] * 2
        assert all(engine.serving() == 1 for engine in loop.engines.values())
        del loop.source.publish
        assert (await loop.controller.update(2)).engines == {"e0": 2, "e1": 2}

    drive(work)


def fail_to_publish(count: bool) -> None:
    raise StateError("a tensor has moved")
