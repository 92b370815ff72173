"""A real SGLang's drafts: what updates write of EAGLE-3's and MiMo's MTP layer, and why GLM-4 MoE is refused.

Its models and loaders run in processes of the test, without its kernels: tests/gpu has the tokens.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.contract.test_sglang_layers import Sglang
from tests.forked import said_by
from tests.models import build_tiny_eagle, build_tiny_qwen3
from tests.mtp_models import build_tiny_mtp
from tests.quantised import same_bits
from weightsync.engines.rank.rank import Rank
from weightsync.engines.sglang.draft import Speculation
from weightsync.engines.sglang.worker import RankSettings, SglangHost
from weightsync.errors import ConfigError
from weightsync.plan import RankLayout
from weightsync.plan.layout.draft import DRAFT

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("sglang"), reason="sglang is not installed"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]

CPU = torch.device("cpu")


class Pair(Sglang):
    """A rank of an SGLang with models and drafts."""

    def pair(self, folder: Path, drafts: Path, load_format: str) -> tuple[nn.Module, nn.Module]:
        """Return a model, and the draft in the folder `drafts` with what it has of the model."""
        target, draft = self.model(folder, load_format), self.draft(drafts)
        embed, head = target.get_embed_and_head()  # type: ignore[operator]
        if hasattr(draft, "hot_token_id"):  # EAGLE-3 has a head of its own
            draft.set_embed(embed)  # type: ignore[operator]
        else:
            draft.set_embed_and_head(embed, head)  # type: ignore[operator]
        return target, draft

    def draft(self, folder: Path) -> nn.Module:
        """Return a draft as SGLang starts it, from files."""
        from sglang.srt.configs.device_config import DeviceConfig
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.model_loader.loader import get_model_loader

        config = ModelConfig(str(folder), dtype="bfloat16", is_draft_model=True)
        loader = get_model_loader(LoadConfig(load_format="safetensors"), config)
        model: nn.Module = loader.load_model(model_config=config, device_config=DeviceConfig("cpu"))
        return model


def write(layout: RankLayout, live: nn.Module, draft: nn.Module, given: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors to where the layout says that they are, with nothing but offsets and strides."""
    held = dict(live.named_parameters()) | {f"{DRAFT}{n}": each for n, each in draft.named_parameters()}
    for segment in layout.segments:
        buffer, box = held[segment.buffer].detach(), segment.box
        part = given[segment.tensor][box.slices()].to(buffer.dtype)
        strides = [each // buffer.itemsize for each in segment.strides]
        start = segment.byte_offset // buffer.itemsize
        torch.as_strided(buffer, box.extent, strides, buffer.storage_offset() + start).copy_(part)


def checked(pipe: Connection, folder: Path, algorithm: str, number: int, num_ranks: int) -> None:
    """Send the layout's names of the draft, and what is tied, once three versions have been compared."""
    paths = [
        (folder / f"{seed}", folder / (f"{seed}-draft" if algorithm == "EAGLE3" else f"{seed}"))
        for seed in range(2)
    ]
    sglang = Pair(paths[0][0], folder / "meeting", number, num_ranks)
    wanted = [sglang.pair(*each, "safetensors") for each in paths]
    path, draft_path = paths[1]  # its draft has been read, and is written over
    target, draft = sglang.pair(path, draft_path, "dummy")
    speculation = Speculation(algorithm, str(draft_path), None)
    settings = RankSettings("e0", str(path), "bfloat16", speculation)
    rank = Rank("sglang", number, CPU, SglangHost(target, CPU, settings, draft))
    rank.treat("trained")
    layout = rank.layout().rank_layout()
    assert layout.buffers, "its layout is proven"
    addresses = [each.data_ptr() for each in (*target.parameters(), *draft.parameters())]
    for seed in (0, 1, 0):
        given = [load_file(each / "model.safetensors") for each in paths[seed]]
        write(layout, target, draft, {**given[0], **{DRAFT + name: each for name, each in given[1].items()}})
        for ours, theirs in zip((target, draft), wanted[seed], strict=True):
            expected = dict(theirs.named_parameters())
            assert [n for n, each in ours.named_parameters() if not same_bits(each, expected[n])] == []
    assert any(
        not same_bits(ours, theirs)
        for ours, theirs in zip(draft.parameters(), wanted[1][1].parameters(), strict=True)
    )
    assert [each.data_ptr() for each in (*target.parameters(), *draft.parameters())] == addresses
    tied = sorted(alias for alias, _ in layout.tied if alias.startswith(f"{DRAFT}"))
    pipe.send((sorted(meta.name for meta in layout.tensors if meta.name.startswith(DRAFT)), tied))


def names_of_ranks(folder: Path, algorithm: str, num_ranks: int) -> list[tuple[list[str], list[str]]]:
    def of_rank(number: int) -> tuple[list[str], list[str]]:
        found: tuple[list[str], list[str]] = said_by(checked, folder, algorithm, number, num_ranks)
        return found

    with ThreadPoolExecutor(num_ranks) as threads:
        return [*threads.map(of_rank, range(num_ranks))]


TWO_RANKS = pytest.param(2, marks=pytest.mark.faults)


@pytest.mark.parametrize("num_ranks", [1, TWO_RANKS])
def test_three_versions_of_mimos_layer_are_what_sglang_loads(num_ranks: int, tmp_path: Path) -> None:
    for seed in range(2):
        build_tiny_mtp(tmp_path / str(seed), "mimo", 1 + seed, mtp_seed=5 + seed)
    held = load_file(tmp_path / "0" / "model.safetensors")
    own = sorted(f"{DRAFT}{name}" for name in held if ".mtp_layers." in name)
    assert len(own) > 10
    for names, tied in names_of_ranks(tmp_path, "NEXTN", num_ranks):
        assert names == own
        assert {f"{DRAFT}model.embed_tokens.weight", f"{DRAFT}lm_head.weight"} <= {*tied}


@pytest.mark.parametrize("num_ranks", [1, TWO_RANKS])
def test_three_versions_of_an_eagle3_are_what_sglang_loads(num_ranks: int, tmp_path: Path) -> None:
    for seed in range(2):
        build_tiny_qwen3(tmp_path / str(seed), seed=seed)
        build_tiny_eagle(tmp_path / f"{seed}-draft", third=True, seed=5 + seed, vocab_size=128)
    held = load_file(tmp_path / "0-draft" / "model.safetensors")
    own = sorted(f"{DRAFT}{name}" for name in held if name not in ("d2t", "t2d"))
    for names, tied in names_of_ranks(tmp_path, "EAGLE3", num_ranks):
        assert names == own
        assert f"{DRAFT}embed_tokens.weight" in tied
        assert f"{DRAFT}lm_head.weight" not in tied


def refused(pipe: Connection, folder: Path) -> None:
    """Send why a GLM-4 MoE is refused, once its router has answered by a weight that is no longer there."""
    target = Pair(folder, folder / "meeting", 0, 1).model(folder, "dummy")
    gate = target.model.layers[1].mlp.gate
    states = torch.ones(1, gate.weight.shape[1])
    with torch.no_grad():
        before = gate(states)
        gate.weight.zero_()
        assert torch.equal(gate(states), before)
        assert before.any()
    host = SglangHost(target, CPU, RankSettings("e0", str(folder), "bfloat16", False))
    with pytest.raises(ConfigError) as caught:
        host.checkpoint()
    pipe.send(str(caught.value))


def test_routers_that_keep_a_copy_of_their_weight_are_refused(tmp_path: Path) -> None:
    build_tiny_mtp(tmp_path / "glm", "glm")
    told = said_by(refused, tmp_path / "glm")
    assert "Glm4MoeForCausalLM" in told
    assert "model.layers.1.mlp.gate._weight_fp32 once and no update reaches it: serve" in told
