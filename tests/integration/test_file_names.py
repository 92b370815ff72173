"""A trainer and an engine whose modules have other names than their files."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

from tests.families import build_family
from tests.models import redraw
from tests.patience import patient
from weightsync.config import SyncConfig
from weightsync.driver.fleet import EngineMember, Fleet
from weightsync.driver.updating.controller import Controller
from weightsync.engines.torch.torch_module import TorchEngine
from weightsync.holder.holder import Holder
from weightsync.sources.checkpoint.checkpoint_store import CheckpointStore
from weightsync.sources.module import ModuleSource
from weightsync.testing import LocalEngine, LocalPeer, LocalTrainer

CONFIG = SyncConfig(timeout_s=patient(15), connect_timeout_s=patient(30))


def test_a_mixtral_takes_its_trainers_weights_by_the_names_of_files(tmp_path: Path) -> None:
    model = build_family(tmp_path, "mixtral")
    source, engine, holder = (
        ModuleSource(model),
        TorchEngine(str(tmp_path), "e", {}),
        Holder("h", "127.0.0.1"),
    )

    async def drive() -> None:
        members = {"e": EngineMember(LocalEngine(engine), (0,))}
        controller = Controller(CONFIG, Fleet([(LocalTrainer(source), 0)], members, [LocalPeer(holder)]))
        await controller.connect()
        for version in (1, 2):
            redraw(model, version)
            report = await controller.update(version)
            assert report.verified
            wanted = model.state_dict()
            assert all(torch.equal(each, wanted[name]) for name, each in engine.model.state_dict().items())

    try:
        asyncio.run(drive())
        names = {meta.name for meta in source.layout().tensors}
    finally:
        for part in (source, engine, holder):
            part.close()
    assert names == {meta.name for meta in CheckpointStore([str(tmp_path)]).tensors}
    assert "model.layers.0.block_sparse_moe.experts.w1_w3" in names
