"""A wrong bit anywhere in an engine's live memory, between load and verify, is found before it is served."""

from __future__ import annotations

import random

import torch
from torch import nn

from tests.fleets.loop import CONFIG, Loop, drive
from weightsync.memory.kernels.fingerprints import fingerprint

NUM_FLIPS = 300


class Mixed(Loop):
    """Tensors of every width of element, with ragged ends and of one element."""

    def make(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(40, 131), nn.Linear(131, 1), nn.Linear(97, 43).bfloat16())
        model.register_buffer("counts", torch.arange(77))
        model.register_buffer("mask", torch.arange(301) % 3 == 0)
        model.register_buffer("tokens", torch.arange(259, dtype=torch.uint8))
        return model


def _train(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()


def test_hundreds_of_flipped_bits_of_live_memory_are_all_found() -> None:
    draw = random.Random(7)

    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        _train(loop.model)
        await loop.controller.update(1)
        assert loop.holds_the_models_weights("e0")
        await loop.controller.snapshot_index.settled()
        engine = loop.engines["e0"]
        expected, whole = engine.digests(), loop.controller.snapshot_index.expected
        assert loop.controller.plan is not None
        names = [meta.name for meta in loop.controller.plan.tensors]
        assert (fingerprint(expected) == whole).all()
        for _ in range(NUM_FLIPS):
            victim = draw.choice(names)
            live = engine.tensors[victim].view(-1).view(torch.uint8)
            byte, bit = draw.randrange(len(live)), draw.randrange(8)
            live[byte] ^= 1 << bit
            found = engine.digests()
            wrong = found != expected
            live[byte] ^= 1 << bit
            assert (fingerprint(found) != whole).any()
            assert [name for name, is_wrong in zip(names, wrong, strict=True) if is_wrong] == [victim]
        assert (engine.digests() == expected).all()

    drive(work, CONFIG, Mixed)
