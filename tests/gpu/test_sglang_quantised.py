"""A quantised SGLang that is fed has the bytes and answers of one that loaded the quantised checkpoint."""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup

from tests.gpu.fleet import SglangEngine, spawn_engine
from tests.gpu.quantised_fleet import (
    FP8_BLOCKS,
    IN_PLACE,
    NONE_CONVERTED,
    READS_ALL,
    Saved,
    assert_quantised_alike,
    end,
    feed,
    join,
    kill_and_fill,
    save_versions,
    serve_stored,
)
from tests.gpu.test_sglang import from_disk
from tests.patience import patient
from tests.quantised import dynamic
from weightsync.engines.sglang.online import EXPERT, ROWS
from weightsync.quantising.quantize import quantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not importlib.util.find_spec("sglang"), reason="sglang is not installed"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(420),
]

KERNELS: dict[str, dict[str, str]] = {
    "triton": {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"},
    "deep_gemm": {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0"},  # it would compile for all batches, for minutes
}
"""Variables by which SGLang chooses its kernels of FP8 blocks on a Hopper GPU. Experts have Triton's."""

FORMATS: dict[str, dict[str, Any]] = {
    "fp8_blocks": FP8_BLOCKS,
    "fp8": dynamic("float"),
    "int8": dynamic("int"),
}

Save = Callable[..., Saved]


def note(what: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {what}\n")
    sys.stdout.flush()


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Save each model once for all tests, as SGLang takes most of their time."""

    @functools.cache
    def once(kind: str, form: str, kernels: str, num_ranks: int) -> Saved:
        paths, packed = save_versions(tmp_path_factory.mktemp("saved"), kind, FORMATS[form])
        # A matrix that it has transposed has no loader, so that SGLang starts again for each version.
        starts = [packed] if form == "fp8_blocks" else [[each] for each in packed]
        answers, live = [], []
        for its in starts:
            note("SGLang starts from the quantised checkpoint")
            answers += from_disk(list(map(str, its)), num_ranks, KERNELS[kernels])
            live += json.loads((its[0] / "live.json").read_text())
        assert answers[0] != answers[1]
        assert live[0] != live[1]
        return Saved(paths, packed, answers, live)

    return once


def start(
    bundles: PlacementGroup, path: Path, kernels: str = "triton", num_ranks: int = 1, **options: object
) -> Any:
    """An SGLang on the first `num_ranks` GPUs, with further options. `await_start` waits for it."""
    note("SGLang starts, to be fed")
    arguments = str(path), "e0", num_ranks
    return spawn_engine(SglangEngine, bundles, range(num_ranks), *arguments, env=KERNELS[kernels], **options)


def await_start(engine: ActorHandle[Any]) -> None:
    """Wait until it is there: SGLang measures free memory as it starts, and trainers come later."""
    ray.get(engine.info.remote(), timeout=patient(200))
    note("it is there")


@dataclass(frozen=True)
class Case:
    """A model, and the kernels, ranks and format of its SGLang."""

    kind: str
    kernels: str = "triton"
    num_ranks: int = 1
    form: str = "fp8_blocks"


CASES = {
    "triton": Case("untied"),
    "triton_moe": Case("moe"),
    "triton_tied": Case("tied"),
    "deep_gemm": Case("untied", "deep_gemm"),
    "two_ranks": Case("untied", num_ranks=2),
    "two_ranks_moe": Case("moe", num_ranks=2),
    "fp8": Case("untied", form="fp8"),
    "fp8_moe": Case("moe", form="fp8"),
    "int8": Case("untied", form="int8"),
    "two_ranks_fp8": Case("untied", num_ranks=2, form="fp8"),
    "two_ranks_fp8_moe": Case("moe", num_ranks=2, form="fp8"),
    "two_ranks_int8": Case("untied", num_ranks=2, form="int8"),
}


@pytest.mark.parametrize("name", CASES)
def test_sglang_answers_as_from_the_quantised_checkpoint(
    name: str, bundles: PlacementGroup, num_gpus: int, save: Save, tmp_path: Path
) -> None:
    """Three versions: of FP8 blocks, the first goes through its loader; all others are in place."""
    case = CASES[name]
    if num_gpus < case.num_ranks:
        pytest.skip(f"needs {case.num_ranks} GPUs")
    if case.kernels == "deep_gemm" and not importlib.util.find_spec("deep_gemm"):
        pytest.skip("deep_gemm is not installed")
    saved = save(case.kind, case.form, case.kernels, case.num_ranks)
    engine = start(bundles, saved.packed[0], case.kernels, case.num_ranks)
    await_start(engine)
    trainers = join(bundles, saved.paths[0], tmp_path, 1, None)
    proofs = [report.proofs["e0"] for report in feed(trainers, engine, saved)]
    assert proofs == [IN_PLACE] * 3
    end(engine, *trainers)


def test_a_trainer_quantises_for_sglang(bundles: PlacementGroup, save: Save, tmp_path: Path) -> None:
    saved = save("untied", "fp8_blocks", "triton", 1)
    engine = start(bundles, saved.packed[0])
    await_start(engine)
    trainers = join(bundles, saved.paths[0], tmp_path, 1, FP8_BLOCKS)
    for number, report in enumerate(feed(trainers, engine, saved)):
        assert report.routes == (READS_ALL if number else NONE_CONVERTED)
        assert report.proofs == {"e0": IN_PLACE}
        assert report.nbytes < (saved.paths[0] / "model.safetensors").stat().st_size
    end(engine, *trainers)


def test_checkpoints_are_served_as_they_are_stored_and_come_back_after_a_kill(
    bundles: PlacementGroup, save: Save
) -> None:
    saved = save("moe", "fp8_blocks", "triton", 1)
    serve_stored(saved, lambda: start(bundles, saved.packed[0]))


@dataclass(frozen=True)
class Online:
    """A model, and how an SGLang quantises it when it starts."""

    kind: str = "untied"
    quantization: str = "fp8"
    num_ranks: int = 1


ONLINE = {
    "fp8": Online(),
    "fp8_tied": Online("tied"),
    "w8a8_fp8": Online(quantization="w8a8_fp8"),
    "fp8_two_ranks": Online(num_ranks=2),
    "fp8_moe": Online("moe"),
    "fp8_moe_two_ranks": Online("moe", num_ranks=2),
}


def saved_online(folder: Path, case: Online) -> Saved:
    """Two versions in bfloat16, and what an SGLang says and holds that started from each of them.

    It scales the inputs of such experts by the whole batch, so that answers depend on what runs together.
    """
    paths, _ = save_versions(folder, case.kind)
    for path in paths:
        note("SGLang starts from the checkpoint in bfloat16, and quantises it")
        from_disk([str(path)], case.num_ranks, KERNELS["triton"], quantization=case.quantization)
    answers = [json.loads((path / "answers.json").read_text())[0] for path in paths]
    live = [json.loads((path / "live.json").read_text())[0] for path in paths]
    assert answers[0] != answers[1]
    assert live[0] != live[1]
    return Saved(paths, paths, [] if case.kind == "moe" else answers, live)


@pytest.mark.parametrize("name", ONLINE)
def test_sglang_answers_as_if_it_had_quantised_when_it_started(
    name: str, bundles: PlacementGroup, num_gpus: int, tmp_path: Path
) -> None:
    """Three versions in place: SGLang itself does not quantise again."""
    case = ONLINE[name]
    if num_gpus < case.num_ranks:
        pytest.skip(f"needs {case.num_ranks} GPUs")
    saved = saved_online(tmp_path, case)
    options = {"num_ranks": case.num_ranks, "quantization": case.quantization}
    engine = start(bundles, saved.paths[0], **options)
    await_start(engine)
    trainers = join(bundles, saved.paths[0], tmp_path, 1, None)
    for report in feed(trainers, engine, saved):
        assert report.proofs["e0"] == IN_PLACE
        assert report.routes["e0"].startswith("direct")
        assert "become float8_e4m3fn with a scale for 1 x all" in report.routes["e0"]
        assert ("of gate_proj and up_proj together" in report.routes["e0"]) == (case.kind == "moe")
    end(engine, *trainers)


@pytest.mark.parametrize(("kind", "form"), [("untied", ""), ("moe", ""), ("untied", "int8")])
def test_a_killed_sglang_without_a_loader_comes_back(
    kind: str, form: str, bundles: PlacementGroup, tmp_path: Path
) -> None:
    """Its holder's copy fills it: the trainer has gone on. Those with experts do not answer alike twice.

    Without a format, it quantises online.
    """
    paths, packed = save_versions(tmp_path, kind, FORMATS[form] if form else None)
    options: dict[str, Any] = {} if form else {"quantization": "fp8"}
    kill_and_fill(lambda: start(bundles, packed[0], **options), paths, 1, bundles, tmp_path, kind != "moe")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [96, 516, 1000, 4096])
@pytest.mark.parametrize("rows", [64, 2048, 5000])
def test_rows_are_those_of_sglangs_own_kernels(rows: int, columns: int, dtype: torch.dtype) -> None:
    """It has one kernel for few rows, another for many, and each for multiples of 4, 8 and 16 columns."""
    from sglang.srt.layers.quantization.fp8 import per_token_group_quant_fp8

    for seed in range(4):
        draw = torch.Generator("cuda").manual_seed(seed)
        weight = torch.randn(rows, columns, generator=draw, device="cuda") * 10.0 ** (seed - 3)
        weight = weight.to(dtype)
        values, scales = per_token_group_quant_fp8(weight, columns)
        (_, found), (_, found_scales) = quantize(weight, ROWS)
        assert torch.equal(found_scales, scales)
        assert torch.equal(found.view(torch.uint8), values.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [96, 516, 1001])
@pytest.mark.parametrize("special", [0.0, 1e-7, float("nan"), float("inf")])
def test_experts_are_those_of_sglangs_own_kernel(special: float, columns: int, dtype: torch.dtype) -> None:
    from sglang.srt.layers.quantization.fp8 import scaled_fp8_quant

    assert_quantised_alike(scaled_fp8_quant, EXPERT, special, columns, dtype)
