"""What DeepSpeed's ranks publish of a LoRA adapter is what PEFT saves of it, byte for byte."""

from __future__ import annotations

import importlib.util
import itertools

import pytest
import torch

from tests.contract.deepspeed_adapter_ranks import ADAPTERS, ALPHA, Base, Case, Found, Version, run_all
from tests.forked import forking
from tests.patience import patient

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft"),
]

CASES = [
    Case(stage=3),
    Case(stage=3, threshold=40, dtype="float32"),
    Case(stage=3, threshold=100_000, by_engine=False),
    Case(stage=3, offload="cpu"),
    Case(stage=2),
    Case(stage=1, by_engine=False),
    Case(stage=0, dtype="float32"),
]
MERGED = [
    Case(stage=3, merges=True),
    Case(stage=3, threshold=40, offload="cpu", merges=True),
    Case(stage=2, merges=True),
]
All = dict[Case, Found]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.faults)])
def everything(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> All:
    cases = CASES + MERGED
    folder = tmp_path_factory.mktemp("deepspeed")
    process = forking().Process(target=run_all, args=(request.param, cases, folder))
    process.start()
    process.join(patient(200))
    process.kill()
    assert process.exitcode == 0
    return dict(zip(cases, torch.load(folder / "found", weights_only=False), strict=True))


@pytest.fixture(scope="module")
def found(everything: All) -> All:
    return {case: everything[case] for case in CASES}


def arrived(version: Version) -> dict[str, torch.Tensor]:
    """Put what the ranks published together."""
    plan = version.plan
    found = {
        meta.name: torch.full(meta.shape, torch.nan, dtype=getattr(torch, meta.dtype))
        for meta in plan.tensors
    }
    for trainer, data in enumerate(version.buffers):
        send_buffer = torch.frombuffer(bytearray(data + b"\0"), dtype=torch.uint8)
        for piece in plan.trainer_pieces(trainer):
            target = found[plan.tensors[piece.tensor].name]
            cut = send_buffer[piece.send_buffer_offset : piece.send_buffer_offset + piece.nbytes]
            target[piece.box.slices()] = cut.view(target.dtype).view(piece.box.extent)
    return found


def test_each_version_is_what_peft_saves_with_b_times_its_scaling(found: All) -> None:
    for case, each in found.items():
        for adapter, rank in ADAPTERS.items():
            for version in each.versions[adapter]:
                tensors = arrived(version)
                assert tensors.keys() == version.saved.keys()
                for name, tensor in tensors.items():
                    value = version.saved[name] * (ALPHA / rank if ".lora_B" in name else 1)
                    assert tensor.dtype == (getattr(torch, case.dtype) if case.dtype else value.dtype)
                    assert torch.equal(tensor, value.to(tensor.dtype)), (case, adapter, name)


def test_each_step_changes_the_adapter_that_is_trained(found: All) -> None:
    for case, each in found.items():
        assert len(each.versions["default"]) == 3 + (case.stage == 3)
        for one, next_one in itertools.pairwise(each.versions["default"]):
            assert not any(torch.equal(one.saved[name], next_one.saved[name]) for name in one.saved), case
        first, *others = each.versions["second"]
        assert all(torch.equal(first.saved[name], its.saved[name]) for its in others for name in its.saved)


def test_every_rank_sends_a_part_of_what_is_partitioned(found: All) -> None:
    for case, each in found.items():
        version = each.versions["default"][0]
        for trainer in range(len(version.buffers) if case.stage == 3 else 0):
            pieces = version.plan.trainer_pieces(trainer)
            assert {version.plan.tensors[piece.tensor].name for piece in pieces} == version.saved.keys()


def test_gathered_parameters_are_refused_and_changed_ones_are(everything: All) -> None:
    for case, each in everything.items():
        if case.stage == 3:
            within, changed, after = each.errors
            assert "leave deepspeed.zero.GatheredParameters" in within
            assert "was changed while it was gathered" in changed
            assert after == "none"


def merged(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The base's tensors with the first adapter, from those of PEFT's model."""
    wanted = {}
    for name, tensor in state.items():
        if ".lora_" in name or ".original_module." in name or ".modules_to_save.second." in name:
            continue
        path = name.removesuffix(".base_layer.weight")
        if path != name:
            a, b = (state[f"{path}.lora_{kind}.default.weight"].float() for kind in "AB")
            tensor = (tensor.float() + b @ a * (ALPHA / ADAPTERS["default"])).to(tensor.dtype)
        plain = name.removeprefix("base_model.model.").replace(".modules_to_save.default.", ".")
        wanted[plain.replace(".base_layer.", ".")] = tensor
    return wanted


def test_what_is_merged_is_the_base_with_the_adapter_and_the_modules_that_it_saves(everything: All) -> None:
    for case in MERGED:
        each = everything[case]
        assert len(each.versions["default"]) == 3 + (case.stage == 3)
        for version in each.versions["default"]:
            tensors, wanted = arrived(version), merged(version.saved)
            assert tensors.keys() == wanted.keys() == Base().state_dict().keys()
            for name, tensor in tensors.items():
                assert tensor.dtype == wanted[name].dtype
                assert torch.equal(tensor, wanted[name]), (case, name)
        assert set(each.frozen) == {name for name in Base().state_dict() if name.endswith(".bias")}


def test_each_step_changes_what_is_merged(everything: All) -> None:
    for case in MERGED:
        for one, next_one in itertools.pairwise(map(arrived, everything[case].versions["default"])):
            same = {name for name in one if torch.equal(one[name], next_one[name])}
            assert same == set(everything[case].frozen), case
