"""What DeepSpeed's ranks publish is what DeepSpeed itself gathers, byte for byte."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path

import pytest
import torch

from tests.contract.deepspeed_ranks import Memory, Version, run_all
from tests.forked import forking
from tests.patience import patient
from weightsync.memory.kernels.digests import tensor_digest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]

CASES = [
    (3, 0, "none"),
    (3, 60, "none"),
    (3, 100_000, "none"),
    (3, 60, "cpu"),
    (3, 60, "secondary"),
    (1, 0, ""),
    (2, 0, ""),
    (0, 0, ""),
]
"""ZeRO's stage, elements of the largest parameter that stays whole, and where partitions are offloaded to.

"secondary" is ZeRO++ with a second partition within each host.
"""

FEW = [case for case in CASES if case not in ((3, 100_000, "none"), (2, 0, ""))]
"""Cases that run by default. With other numbers of ranks, on demand, all do."""

Found = dict[tuple[int, int, str], list[Version]]


def cases_of(num_ranks: int) -> list[tuple[int, int, str]]:
    return FEW if num_ranks == 3 else CASES


@pytest.fixture(
    scope="module",
    params=[
        3,
        pytest.param(2, marks=pytest.mark.faults),
        pytest.param(5, marks=pytest.mark.faults),
    ],
)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """The number of ranks, and what they saved."""
    cases = cases_of(request.param)
    folder = tmp_path_factory.mktemp("deepspeed")
    process = forking().Process(target=run_all, args=(request.param, cases, folder))
    process.start()
    process.join(patient(200))
    process.kill()
    assert process.exitcode == 0
    return request.param, folder


@pytest.fixture(scope="module")
def versions(saved: tuple[int, Path]) -> Found:
    return dict(zip(cases_of(saved[0]), torch.load(saved[1] / "versions", weights_only=False), strict=True))


def in_engine(version: Version) -> dict[str, torch.Tensor]:
    """Put what the ranks published together."""
    plan, dtypes = version.plan, {meta.name: getattr(torch, meta.dtype) for meta in version.plan.tensors}
    found = {meta.name: torch.full(meta.shape, torch.nan, dtype=dtypes[meta.name]) for meta in plan.tensors}
    for trainer, (data, _) in enumerate(version.shares):
        send_buffer = torch.frombuffer(bytearray(data + b"\0"), dtype=torch.uint8)
        for piece in plan.trainer_pieces(trainer):
            target = found[plan.tensors[piece.tensor].name]
            cut = send_buffer[piece.send_buffer_offset : piece.send_buffer_offset + piece.nbytes]
            target[piece.box.slices()] = cut.view(target.dtype).view(piece.box.extent)
    return found


def test_each_version_is_what_deepspeed_gathers(versions) -> None:
    for case, found in versions.items():
        published = [version for version in found if version.shares]
        assert len(published) == 3 + (case[0] == 3)
        for version in published:
            for name, tensor in in_engine(version).items():
                assert torch.equal(tensor, version.whole[name].to(tensor.dtype)), (case, name)
        for one, next_one in itertools.pairwise(published):
            assert not torch.equal(one.whole["embed.weight"], next_one.whole["embed.weight"]), case


def test_the_ranks_digests_add_up_to_the_models(versions) -> None:
    for case, found in versions.items():
        for version in (each for each in found if each.shares):
            for index, meta in enumerate(version.plan.tensors):
                whole = version.whole[meta.name].to(getattr(torch, meta.dtype))
                total = sum(digests[index] for _, digests in version.shares) % 2**64
                assert total == tensor_digest(whole, meta.shape), (case, meta.name)


def test_every_rank_sends_a_part_of_what_is_partitioned(versions) -> None:
    plan = versions[3, 0, "none"][0].plan
    for trainer in range(len(versions[3, 0, "none"][0].shares)):
        names = {plan.tensors[piece.tensor].name for piece in plan.trainer_pieces(trainer)}
        assert {"embed.weight", "block.0.weight", "block.1.weight", "head.weight"} <= names


def test_gathered_parameters_are_refused_and_changed_ones_are(versions) -> None:
    for case, found in versions.items():
        for version in (each for each in found if each.errors):
            within, changed, after = version.errors
            assert within.startswith("StateError: trainer "), case
            assert "leave deepspeed.zero.GatheredParameters" in within
            assert "was changed while it was gathered" in changed
            assert after == "none"


def test_a_rank_gathers_nothing(saved: tuple[int, Path]) -> None:
    num_ranks, folder = saved
    ranks: list[Memory] = torch.load(folder / "memory", weights_only=False)
    assert len(ranks) == num_ranks
    for rank in ranks:
        assert rank.send_buffer == pytest.approx(rank.model / num_ranks, rel=0.01)
        assert rank.extra < rank.model // 8
