"""Ranks read and quantise just their parts, which add up to all that trainers have."""

from __future__ import annotations

import pytest

from tests.kernel_doubles import Stream, use_doubles
from tests.quantised_reads_rig import ReadsRig
from weightsync.memory import quantizing_reads
from weightsync.plan import stored_reads
from weightsync.plan.formats import Format

FORMATS = (
    Format(rule="fp8", values="float8_e4m3fn", block=(128, 128)),
    Format(rule="vllm_online", values="float8_e4m3fn", block=(0, 0)),
)


@pytest.fixture(autouse=True)
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    use_doubles(monkeypatch)


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize(
    ("group_nbytes", "most_numel", "num_groups"), [(1 << 27, 1 << 25, 2), (1 << 16, 1 << 14, 9)]
)
def test_each_rank_gets_its_part_quantised_and_digests_add_up(
    monkeypatch: pytest.MonkeyPatch, form: Format, group_nbytes: int, most_numel: int, num_groups: int
) -> None:
    monkeypatch.setattr(quantizing_reads, "GROUP_NBYTES", group_nbytes)
    monkeypatch.setattr(stored_reads, "MOST_NUMEL", most_numel)
    rig = ReadsRig(form, "cpu", lambda memory: memory)
    assert min(rig.num_groups) >= num_groups
    for seed in (1, 2):
        rig.update(seed, Stream())  # type: ignore[arg-type]
