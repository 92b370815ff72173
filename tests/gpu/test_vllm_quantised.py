"""A quantised vLLM that is fed has the bytes and answers of one that loaded the quantised checkpoint."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup

from tests.gpu.fleet import VllmEngine, spawn_engine
from tests.gpu.own_process import ROOT
from tests.gpu.quantised_fleet import (
    CONFIG,
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
from tests.gpu.test_vllm import from_disk, served
from tests.patience import patient
from tests.quantised import AWQ, GPTQ, dynamic, int4
from weightsync import SyncReport, WeightSync
from weightsync.driver.engine_state import EngineState
from weightsync.engines.vllm.online import LAYER
from weightsync.errors import WeightSyncError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.timeout(300),
]


FORMATS: dict[str, dict[str, Any]] = {
    "int4": int4(symmetric=True),
    "zero_points": int4(symmetric=False),
    "int8": dynamic("int"),
    "fp8": dynamic("float"),
    "fp8_blocks": FP8_BLOCKS,
    "awq": AWQ,
    "gptq": GPTQ,
    "gptq_int8": GPTQ | {"bits": 8, "group_size": 128},
}
KERNELS: dict[str, dict[str, str]] = {
    "default": {},
    "cutlass": {"VLLM_USE_DEEP_GEMM": "0"},
    "deep_gemm": {
        "VLLM_USE_DEEP_GEMM_E8M0": "0",
        "VLLM_MOE_USE_DEEP_GEMM": "1",  # else experts have Triton's
        "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
    },
}
"""Variables by which vLLM chooses its kernels of FP8 blocks."""

MULTIPLICATION = """
import torch
from vllm.utils.deep_gemm import fp8_gemm_nt
values = torch.zeros(128, 128, device="cuda").to(torch.float8_e4m3fn)
scales, out = torch.ones(128, 1, device="cuda"), torch.ones(128, 128, dtype=torch.bfloat16, device="cuda")
fp8_gemm_nt((values, scales), (values, scales[:1]), out)
assert not out.any(), "DeepGEMM has multiplied zeros to something else"
"""


@functools.cache
def why_no_deep_gemm() -> str:
    """Why DeepGEMM multiplies no matrices here; "" if it does. It compiles its kernels as they are used."""
    env = {**os.environ, **KERNELS["deep_gemm"]}
    command = [sys.executable, "-c", MULTIPLICATION]
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=patient(120), check=False
    )
    return "" if done.returncode == 0 else f"DeepGEMM does not run here: {done.stderr.strip()[-300:]}"


Save = Callable[..., Saved]


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Save each model once for all tests, as vLLM takes most of their time."""

    @functools.cache
    def once(kind: str, form: str, kernels: str, num_ranks: int) -> Saved:
        paths, packed = save_versions(tmp_path_factory.mktemp("saved"), kind, FORMATS[form])
        answers = [from_disk(str(path), num_ranks, KERNELS[kernels]) for path in packed]
        assert answers[0] != answers[1]
        return Saved(
            paths, packed, answers, [json.loads((path / "live.json").read_text()) for path in packed]
        )

    return once


def start(
    bundles: PlacementGroup, path: str, kernels: str = "default", num_ranks: int = 1, **options: object
) -> ActorHandle[Any]:
    """A vLLM on the first `num_ranks` GPUs. `options`: further arguments of the engine."""
    arguments = path, "e0", num_ranks
    return spawn_engine(VllmEngine, bundles, range(num_ranks), *arguments, env=KERNELS[kernels], **options)


@dataclass(frozen=True)
class Case:
    """A model, its format, the kernels and ranks of its vLLM, and whether each version is proven in place.

    In place, the first version still goes through vLLM's loader.
    """

    kind: str
    form: str
    in_place: bool
    kernels: str = "default"
    num_ranks: int = 1


CASES = {
    "int4": Case("untied", "int4", in_place=False),
    "zero_points": Case("untied", "zero_points", in_place=False),
    "awq": Case("untied", "awq", in_place=False),
    "gptq": Case("untied", "gptq", in_place=False),
    "gptq_int8": Case("untied", "gptq_int8", in_place=False),
    "int8": Case("untied", "int8", in_place=True),
    "fp8": Case("untied", "fp8", in_place=True),
    "powers_of_two": Case("untied", "fp8_blocks", in_place=False),
    "cutlass": Case("untied", "fp8_blocks", in_place=True, kernels="cutlass"),
    "cutlass_moe": Case("moe", "fp8_blocks", in_place=True, kernels="cutlass"),
    "deep_gemm": Case("untied", "fp8_blocks", in_place=True, kernels="deep_gemm"),
    "deep_gemm_moe": Case("moe", "fp8_blocks", in_place=True, kernels="deep_gemm"),
    "two_ranks_awq": Case("untied", "awq", in_place=False, num_ranks=2),
    "two_ranks_gptq": Case("untied", "gptq", in_place=False, num_ranks=2),
    "two_ranks_fp8": Case("untied", "fp8", in_place=True, num_ranks=2),
    "two_ranks_cutlass": Case("untied", "fp8_blocks", in_place=True, kernels="cutlass", num_ranks=2),
    "two_ranks_cutlass_moe": Case("moe", "fp8_blocks", in_place=True, kernels="cutlass", num_ranks=2),
    "two_ranks_deep_gemm": Case("untied", "fp8_blocks", in_place=True, kernels="deep_gemm", num_ranks=2),
    "two_ranks_deep_gemm_moe": Case("moe", "fp8_blocks", in_place=True, kernels="deep_gemm", num_ranks=2),
}


@pytest.mark.parametrize("name", CASES)
def test_vllm_answers_as_from_the_quantised_checkpoint(
    name: str, bundles: PlacementGroup, num_gpus: int, save: Save, tmp_path: Path
) -> None:
    """By `powers_of_two`, DeepGEMM's kernels have vLLM quantise FP8 blocks a second time."""
    case = CASES[name]
    if num_gpus < case.num_ranks:
        pytest.skip(f"needs {case.num_ranks} GPUs")
    uses_deep_gemm = case.form == "fp8_blocks" and case.kernels != "cutlass"
    if uses_deep_gemm and (reason := why_no_deep_gemm()):
        pytest.skip(reason)
    saved = save(case.kind, case.form, case.kernels, case.num_ranks)
    engine = start(bundles, served(str(saved.packed[0])), case.kernels, case.num_ranks)
    trainers = join(bundles, saved.paths[0], tmp_path, 1, None)
    reports = feed(trainers, engine, saved)
    proofs = [report.proofs["e0"] for report in reports]
    assert proofs == [IN_PLACE if case.in_place else "what its loader got; no engine is alike"] * 3
    # Of a matrix that is cut by columns, a rank with a scale for each channel needs all.
    reads = case.in_place and (case.num_ranks == 1 or case.form == "fp8_blocks")
    assert [report.routes["e0"].startswith("direct") for report in reports] == [False, reads, reads]
    kernels = ray.get(engine.kernels.remote())
    if case.form == "fp8_blocks":
        assert {"deepgemm" in kernel.lower() for kernel in kernels} == {uses_deep_gemm}, kernels
    end(engine, *trainers)


ONLINE: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dense": ("untied", 1, {}),
    "experts": ("moe", 1, {}),
    "dense_two_ranks": ("untied", 2, {}),
    "experts_two_ranks": ("moe", 2, {}),
    "experts_each_on_one_of_two_ranks": ("moe", 2, {"enable_expert_parallel": True}),
}


@pytest.mark.parametrize("name", ONLINE)
def test_vllm_quantises_online(name: str, bundles: PlacementGroup, num_gpus: int, tmp_path: Path) -> None:
    """vLLM takes full precision, and makes FP8 of it, with a scale for each layer, as when it starts.

    From the second version on, holders read trainers' weights, and write in place. Inputs of its experts have
    one scale for a batch, so that answers depend on what else is in it. Its router has eight rows, of sixteen
    that CUTLASS' kernels want.
    """
    kind, num_ranks, options = ONLINE[name]
    if num_gpus < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    paths, _ = save_versions(tmp_path, kind)
    options = {"quantization": "fp8", **options}
    answers = [from_disk(str(path), num_ranks, **options) for path in paths]
    live = [json.loads((path / "live.json").read_text()) for path in paths]
    saved = Saved(paths, paths, [] if kind == "moe" else answers, live)
    engine = start(bundles, served(str(paths[0])), num_ranks=num_ranks, **options)
    trainers = join(bundles, paths[0], tmp_path, 1, None)
    reports = feed(trainers, engine, saved)
    assert all(report.proofs["e0"].startswith(IN_PLACE) for report in reports)
    assert [report.routes["e0"].startswith("direct") for report in reports] == [False, True, True]
    assert ray.get(engine.beside.remote()) == [[]] * num_ranks, "kernels read scales that no update writes"
    if kind == "moe":
        assert "TRITON" in ray.get(engine.kernels.remote())
    end(engine, *trainers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [128, 1000, 4096])
@pytest.mark.parametrize("special", [0.0, 1e-7, float("nan"), float("inf")])
def test_online_layers_are_those_of_vllms_own_kernel(
    special: float, columns: int, dtype: torch.dtype
) -> None:
    kernel = partial(importlib.import_module("vllm._custom_ops").scaled_fp8_quant, scale=None)
    assert_quantised_alike(kernel, LAYER, special, columns, dtype)


@pytest.mark.parametrize("num_trainers", [1, 2])
@pytest.mark.parametrize("form", ["int4", "fp8", "fp8_blocks"])
def test_trainers_quantise_on_their_gpus(
    form: str, num_trainers: int, bundles: PlacementGroup, num_gpus: int, save: Save, tmp_path: Path
) -> None:
    """The first one shares its GPU with vLLM. Two hold halves of each matrix, by FSDP2.

    vLLM casts the scales of channels, which are bfloat16 in a checkpoint, so these come by broadcast.
    """
    if num_gpus < num_trainers:
        pytest.skip(f"needs {num_trainers} GPUs")
    kernels = "cutlass" if form == "fp8_blocks" else "default"
    saved = save("untied", form, kernels, 1)
    engine = start(bundles, served(str(saved.packed[0])), kernels)
    trainers = join(bundles, saved.paths[0], tmp_path, num_trainers, FORMATS[form])
    for number, report in enumerate(feed(trainers, engine, saved)):
        reads = number > 0 and form == "fp8_blocks"
        assert report.routes == (READS_ALL if reads else NONE_CONVERTED)
        assert (report.proofs["e0"] == IN_PLACE) == (form != "int4")
        assert report.nbytes < (saved.paths[0] / "model.safetensors").stat().st_size
    end(engine, *trainers)


@pytest.mark.parametrize("kind", ["untied", "moe"])
def test_checkpoints_in_fp8_blocks_are_served_as_they_are_stored(
    kind: str, bundles: PlacementGroup, save: Save
) -> None:
    saved = save(kind, "fp8_blocks", "cutlass", 1)
    path = served(str(saved.packed[0]))
    serve_stored(saved, lambda: start(bundles, path, "cutlass"))


@pytest.mark.parametrize("leaf", ["qkv_proj.weight", "qkv_proj.weight_scale_inv"])
def test_a_bit_that_flips_before_the_comparison_serves_nowhere(
    leaf: str, bundles: PlacementGroup, save: Save, tmp_path: Path
) -> None:
    """In live FP8 and in a scale of it, in an update in place. The next update mends it."""
    saved = save("untied", "fp8_blocks", "cutlass", 1)
    engine = start(bundles, served(str(saved.packed[0])), "cutlass")
    trainers = join(bundles, saved.paths[0], tmp_path, 1, None)
    ray.get(engine.info.remote(), timeout=patient(200))
    with WeightSync(replace(CONFIG, heal_attempts=0)) as sync:
        sync.register_trainers(trainers)
        sync.register_engines({"e0": engine})
        sync.connect()

        def update(number: int) -> SyncReport:
            ray.get([trainer.load.remote(str(saved.paths[number])) for trainer in trainers])
            return sync.update_weights()

        for number in (0, 1):
            assert update(number).proofs == {"e0": IN_PLACE}
        ray.get(engine.flip.remote(leaf))
        with pytest.raises(WeightSyncError, match="was written, and live memory holds other bytes"):
            update(0)
        assert sync.engine_states() == {"e0": EngineState.STALE}
        assert update(1).proofs == {"e0": IN_PLACE}
        saved.check(engine, 1)
    end(engine, *trainers)


@pytest.mark.parametrize(
    ("form", "kernels", "version"),
    [
        ("zero_points", "default", 1),
        ("awq", "default", 1),
        ("gptq", "default", 1),
        ("int8", "default", 1),
        ("fp8", "default", 1),
        ("fp8_blocks", "cutlass", 2),
    ],
)
def test_a_killed_vllm_comes_back_with_the_packed_weights(
    form: str, kernels: str, version: int, bundles: PlacementGroup, tmp_path: Path
) -> None:
    """Its holder's copy of them fills it: the trainer, which has gone on, is not asked.

    The second version is quantised in place where that is possible.
    """
    paths, packed = save_versions(tmp_path, "untied", FORMATS[form])
    path = served(str(packed[0]))
    kill_and_fill(lambda: start(bundles, path, kernels), paths, version, bundles, tmp_path)


def test_a_killed_vllm_that_quantises_online_comes_back_with_its_weights(
    bundles: PlacementGroup, tmp_path: Path
) -> None:
    """The second version is in place."""
    paths, _ = save_versions(tmp_path, "untied")
    path = served(str(paths[0]))
    kill_and_fill(lambda: start(bundles, path, quantization="fp8"), paths, 2, bundles, tmp_path)
