"""Real kernels read trainers' tensors, quantise each rank's part, and digest both."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from tests.quantised_reads_rig import ReadsRig
from weightsync.memory.device import export_tensors
from weightsync.plan.direct import stored_reads
from weightsync.plan.layout.formats import Format
from weightsync.protocol.handles import DeviceHandle
from weightsync.quantising import quantizing_reads

pytestmark = pytest.mark.gpu

FORMATS = (
    Format(rule="fp8", values="float8_e4m3fn", block=(128, 128)),
    Format(rule="vllm_online", values="float8_e4m3fn", block=(0, 0)),
)


def exported(memory: Mapping[tuple[int, str], torch.Tensor]) -> dict[tuple[int, str], DeviceHandle]:
    handles = export_tensors({str(key): each for key, each in memory.items()}).handles()
    return {key: handles[str(key)] for key in memory}


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize(("num_trainers", "near"), [(3, False), (3, True), (1, True)])
@pytest.mark.parametrize(("group_nbytes", "most_numel"), [(1 << 27, 1 << 25), (1 << 16, 1 << 14)])
def test_each_rank_gets_its_part_quantised_and_digests_add_up(
    monkeypatch: pytest.MonkeyPatch,
    form: Format,
    num_trainers: int,
    near: bool,
    group_nbytes: int,
    most_numel: int,
) -> None:
    monkeypatch.setattr(quantizing_reads, "GROUP_NBYTES", group_nbytes)
    monkeypatch.setattr(stored_reads, "MOST_NUMEL", most_numel)
    rig = ReadsRig(form, "cuda", exported, num_trainers, near)
    for seed in range(5):
        rig.update(seed, torch.cuda.Stream())
