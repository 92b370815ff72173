"""Kernels that a rank loads before they are needed."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tests.patience import patient
from weightsync.engines.rank import rank as ranks
from weightsync.engines.rank.rank import Rank
from weightsync.errors import TransportError


@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_of_an_engine_that_starts_loads_kernels_and_does_not_wait_for_them(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    joined, loaded, itemsizes = threading.Event(), threading.Event(), list[int]()

    def load(its: Collection[int]) -> None:
        assert joined.wait(patient(10)), "it waits for them"
        itemsizes.extend(its)
        loaded.set()
        if fails:
            raise TransportError("the GPU path needs CuPy")

    monkeypatch.setattr(ranks, "load_digests", load)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    rank = Rank("vllm", 0, torch.device("cuda", 0), SimpleNamespace())  # type: ignore[arg-type]
    assert rank.answer("join", (os.getpid(),)) is None
    joined.set()
    assert loaded.wait(patient(10))
    assert itemsizes == [2]


def test_a_rank_on_the_host_loads_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "on_daemon", lambda *_: pytest.fail("there is no GPU"))
    rank = Rank("vllm", 0, torch.device("cpu"), SimpleNamespace())  # type: ignore[arg-type]
    assert rank.answer("join", (os.getpid(),)) is None
