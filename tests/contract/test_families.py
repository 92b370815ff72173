"""Families of models in real engines: what docs/models.md says of each.

A trainer sends two versions to an engine. The engine then has, byte for byte, what it has after it loaded the
files of the second version.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.contract.live_model import differing, held, logits_of
from tests.contract.test_vllm_quantized import Served
from tests.families import FAMILIES, build_family
from tests.models_page import RESULTS
from tests.patience import patient
from weightsync.config import SyncConfig
from weightsync.driver.fleet import EngineMember, Fleet
from weightsync.driver.updating.controller import Controller
from weightsync.engines import Engine
from weightsync.engines.torch.torch_module import TorchEngine
from weightsync.engines.vllm.adapter import VllmEngine
from weightsync.errors import ConfigError, PlanError
from weightsync.holder.holder import Holder
from weightsync.memory.tensors import named_tensors
from weightsync.plan.layout.layout import Layout
from weightsync.plan.layout.match import match
from weightsync.report import SyncReport
from weightsync.sources.checkpoint.checkpoint_store import CheckpointStore
from weightsync.sources.module import ModuleSource
from weightsync.testing import LocalEngine, LocalPeer, LocalTrainer

pytestmark = [
    pytest.mark.models,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.is_available(), reason="engines run on the GPU here"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]
CONFIG = SyncConfig(timeout_s=patient(120), connect_timeout_s=patient(120))
PROMPT = [5, 6, 7]
NUM_TOKENS = 8
SAMPLING = {"max_tokens": NUM_TOKENS, "temperature": 0.0}
needs_vllm = pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vLLM is not installed")
OPTIONS: Mapping[str, Any] = {"max_model_len": 64, "enforce_eager": True, "dtype": "bfloat16"}
TEXT_ONLY = {"limit_mm_per_prompt": {"image": 0, "video": 0}, "skip_mm_profiling": True}
LOADED = "what its loader got"
REFUSED: Mapping[str, str] = {"phi": r"vLLM makes lm_head\.bias anew in each load"}
"""Families that vLLM serves and our engine refuses when it connects, and a part of the error."""
COMPUTED: Mapping[str, str] = {
    "kimi_linear": "conv1d",
    "longcat_flash": "experts",
    "olmo_hybrid": "conv1d",
}
"""Families whose files have other tensors than transformers' model, and a word of the error."""
EARLIER: Mapping[str, Mapping[str, str]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
"""Results of earlier runs: a family that was right once must be served again."""


@pytest.fixture
def models(family: str, tmp_path: Path) -> Sequence[PreTrainedModel]:
    """Two versions of a family's model, whose files are in folders 0 and 1."""
    return [build_family(tmp_path / str(seed), family, seed) for seed in range(2)]


async def update(engine: Engine, models: Sequence[PreTrainedModel], check: Callable[[], None]) -> SyncReport:
    """Move all versions from a trainer to an engine, and then `check`. Return the last report."""
    holder, source = Holder("holder", "127.0.0.1"), ModuleSource(models[0])
    try:
        members = {"e": EngineMember(LocalEngine(engine), (0,))}
        controller = Controller(CONFIG, Fleet([(LocalTrainer(source), 0)], members, [LocalPeer(holder)]))
        await controller.connect()
        for version, model in enumerate(models, 1):
            source.replace(model)
            report = await controller.update(version)
            assert report.verified
            check()
        return report
    finally:
        source.close()
        holder.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_files_and_trainer_have_the_same_tensors(
    family: str,
    models: Sequence[PreTrainedModel],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """So that `register_checkpoint` takes the files that transformers saves."""
    engine = Layout.from_ranks([ModuleSource(models[1]).layout()])
    files = Layout.from_ranks([CheckpointStore([str(tmp_path / "1")]).layout(0, 1)])
    if family in COMPUTED:
        with pytest.raises(PlanError, match=COMPUTED[family]) as refused:
            match(files, [("e", engine)])
        record_property("files", f"refused: {_line(refused.value)}")
        return
    assert [*match(files, [("e", engine)]).tensors] == [*engine.tensors]
    assert {*files.tensors} == {*engine.tensors}
    record_property("files", "right")


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_computes_with_what_the_files_have(
    models: Sequence[PreTrainedModel], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    engine = TorchEngine(str(tmp_path / "0"), "e", {})
    try:
        report = asyncio.run(update(engine, models, lambda: None))
        trained = models[1]
        loaded = type(trained).from_pretrained(tmp_path / "1", config=trained.config, dtype=torch.float32)
        assert differing(held(engine.model), held(loaded)) == []
        with torch.no_grad():
            said = loaded.generate(
                torch.tensor([PROMPT]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
            )
        assert engine.generate([PROMPT], SAMPLING).tokens[0] == said[0, len(PROMPT) :].tolist()
    finally:
        engine.close()
    record_property("torch", report.proofs["e"])
    record_property("class", type(loaded).__name__)
    record_property("tensors", len(named_tensors(loaded)[0]))


@needs_vllm
@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_computes_with_what_the_files_have(
    family: str,
    models: Sequence[PreTrainedModel],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    options = OPTIONS
    if hasattr(models[0].config, "vision_config"):
        pytest.importorskip("torchvision", reason="vLLM imports these models with torchvision alone")
        options = {**OPTIONS, **TEXT_ONLY}
    try:
        wanted = served_from(tmp_path / "1", options)
    except Exception as error:  # whatever vLLM raises
        if EARLIER.get(family, {}).get("vllm") == LOADED:
            raise
        record_property("vllm", f"not served: {_line(error)}")
        forget_groups()
        pytest.skip(f"vLLM does not serve it: {_line(error)}")
    engine = VllmEngine(str(tmp_path / "0"), "e", options)
    try:
        if family in REFUSED:
            with pytest.raises(ConfigError, match=REFUSED[family]) as refused:
                engine.layout()
            record_property("vllm", f"refused: {_line(refused.value)}")
        else:
            record_property("vllm", check(engine, models, wanted).proofs["e"])
    finally:
        engine.close()


@needs_vllm
@pytest.mark.parametrize("family", ["deepseek_v3", "gemma2", "llama", "mixtral", "qwen3_moe"])
def test_vllms_transformers_backend_does_so_too(models: Sequence[PreTrainedModel], tmp_path: Path) -> None:
    options = {**OPTIONS, "model_impl": "transformers"}
    wanted = served_from(tmp_path / "1", options)
    engine = VllmEngine(str(tmp_path / "0"), "e", options)
    try:
        check(engine, models, wanted)
    finally:
        engine.close()


@dataclass(frozen=True)
class Loaded:
    """What a vLLM that loaded files holds, the logits of its steps, and its greedy tokens."""

    held: Mapping[str, torch.Tensor]
    logits: Sequence[torch.Tensor]
    tokens: Sequence[int]


def check(engine: VllmEngine, models: Sequence[PreTrainedModel], wanted: Loaded) -> SyncReport:
    """Move all versions to an engine, the last one twice, which changes nothing. Return the last report."""
    after: list[dict[str, torch.Tensor]] = []
    report = asyncio.run(update(engine, [*models, models[-1]], lambda: after.append(engine.call(_held))))
    assert differing(after[1], wanted.held) == []
    assert differing(after[2], wanted.held) == [], "an equal update changes it"
    logits = engine.call(_logits_of)
    assert engine.generate([PROMPT], SAMPLING).tokens[0] == wanted.tokens[:NUM_TOKENS]
    assert len(logits) >= NUM_TOKENS
    assert all(torch.equal(*pair) for pair in zip(logits, wanted.logits, strict=False))
    return report


def forget_groups() -> None:
    """End the groups of ranks of a vLLM that did not start, which the next one would take for its own."""
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()


def served_from(folder: Path, options: Mapping[str, Any]) -> Loaded:
    served = Served(folder, "auto", **options)
    try:
        model = served.runner.get_model()
        found, logits = held(model), logits_of(model)
        return Loaded(found, logits, served.says())
    finally:
        served.close()


def _model(llm: Any) -> torch.nn.Module:
    model: torch.nn.Module = (
        llm.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.get_model()
    )
    return model


def _held(llm: Any) -> dict[str, torch.Tensor]:
    return held(_model(llm))


def _logits_of(llm: Any) -> list[torch.Tensor]:
    return logits_of(_model(llm))


def _line(error: BaseException) -> str:
    """Return an error as one line of a table."""
    said = " ".join(str(error).split()).rpartition("vLLM says of it: ")[2].replace("|", "/")
    return said[:160] or type(error).__name__
