"""A trainer of a model and of a draft on one GPU, and engines that speculate with the draft."""

from __future__ import annotations

import asyncio
import json
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.actors.draft_trainer import module_of
from tests.gpu import sglang_probe, vllm_probe
from weightsync.actors.engine import EngineActor
from weightsync.actors.trainer_shard import TrainerShard


class DraftTrainer(TrainerShard):
    """One rank, in bfloat16. For equal seeds, its draft equals its model."""

    def start(self, path: str) -> None:
        """Read both from one checkpoint."""
        from transformers import AutoModelForCausalLM

        self.model, self.draft = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).cuda() for _ in range(2)
        )

    @torch.no_grad()
    def train(self, part: str, seed: int) -> None:
        """Give the model, or the draft, other weights."""
        draw = torch.Generator(device="cuda").manual_seed(seed)
        for name, each in getattr(self, part).named_parameters():
            if "norm" not in name:
                scale = 0.02 if "embed" in name else 2 * each.shape[-1] ** -0.5
                each.copy_(torch.randn(each.shape, generator=draw, device="cuda") * scale)

    def weights(self, part: str) -> Mapping[str, torch.Tensor]:
        """Copy the weights of the model, or of the draft, to the host."""
        return {name: each.detach().cpu() for name, each in getattr(self, part).named_parameters()}


class VllmDrafts(EngineActor):
    """A vLLM with CUDA graphs, started with dummy weights. Its draft is a model of its own."""

    def __init__(self, path: str, name: str) -> None:
        speculative = {"method": "draft_model", "model": path, "num_speculative_tokens": 2}
        options = {**vllm_probe.OPTIONS, "speculative_config": speculative, "disable_log_stats": False}
        super().__init__("vllm", path, name, options)

    async def share_accepted(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Answer `prompts`. Returns the part of the drafted tokens that the model accepts."""
        before = await self._counted()
        await self.generate(prompts, {"max_tokens": num_tokens, "temperature": 0.0})
        drafted, accepted = (now - then for now, then in zip(await self._counted(), before, strict=True))
        return accepted / drafted

    async def _counted(self) -> tuple[int, int]:
        metrics = await asyncio.to_thread(self._engine.call, lambda engine: engine.get_metrics())
        values = {each.name: int(each.value) for each in metrics if hasattr(each, "value")}
        return values["vllm:spec_decode_num_draft_tokens"], values["vllm:spec_decode_num_accepted_tokens"]

    async def live_draft(self) -> Mapping[str, torch.Tensor]:
        """Copy what the draft's kernels read."""
        return (await asyncio.to_thread(self._engine.call, lambda llm: llm.collective_rpc(_live)))[0]


class EagleTrainer(DraftTrainer):
    """One rank with an EAGLE draft. For equal seeds, the draft predicts what the model says.

    Layers of both add nothing to the last token's embedding, which the model's last norm, or the draft's
    projection, multiplies with signs.
    """

    def start(self, path: str) -> None:
        """Read the model, and the draft beside it."""
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).cuda()
        self.draft = module_of(load_file(Path(eagle_path(path)) / "model.safetensors")).cuda()

    @torch.no_grad()
    def train(self, part: str, seed: int) -> None:
        """Give the model, or the draft, other weights."""
        draw = torch.Generator().manual_seed(seed)
        hidden = self.model.config.hidden_size
        signs = torch.randint(0, 2, (hidden,), generator=draw) * 2.0 - 1
        for name, each in getattr(self, part).named_parameters():
            drawn = torch.randn(each.shape, generator=draw) * each.shape[-1] ** -0.5
            if name == "model.norm.weight":
                drawn = signs
            elif name == "fc.weight":
                drawn = torch.cat([torch.diag(signs), torch.zeros(hidden, hidden)], dim=1)
            elif "norm" in name:
                drawn.fill_(1)
            elif "o_proj" in name or "down_proj" in name or name == "fc.bias":
                drawn.zero_()
            each.copy_(drawn)


def eagle_path(path: str) -> str:
    """Return where the EAGLE draft of the model in `path` is."""
    return f"{path}-eagle"


def save_eagle(path: str) -> None:
    """Save an EAGLE draft of one layer, as SGLang reads it, for the model of `save_qwen3` in `path`."""
    config = json.loads((Path(path) / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, groups = (config[name] * config["head_dim"] for name in _HEADS)
    shapes = {
        "fc.weight": (hidden, 2 * hidden),
        "fc.bias": (hidden,),
        "layers.0.self_attn.q_proj.weight": (heads, hidden),
        "layers.0.self_attn.k_proj.weight": (groups, hidden),
        "layers.0.self_attn.v_proj.weight": (groups, hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, heads),
        "layers.0.mlp.gate_proj.weight": (inner, hidden),
        "layers.0.mlp.up_proj.weight": (inner, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, inner),
        "layers.0.post_attention_layernorm.weight": (hidden,),
    }
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    settings = {"architectures": ["LlamaForCausalLMEagle"], "model_type": "llama", "num_hidden_layers": 1}
    folder = Path(eagle_path(path))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, **settings, "layer_types": None}))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


_HEADS = "num_attention_heads", "num_key_value_heads"


class SglangDrafts(EngineActor):
    """An SGLang with CUDA graphs, started with a dummy target, that speculates with an EAGLE draft."""

    def __init__(self, path: str, name: str, options: Mapping[str, Any] | None = None) -> None:
        speculative = {
            "speculative_algorithm": "EAGLE",
            "speculative_draft_model_path": eagle_path(path),
            "speculative_num_steps": 2,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 3,
            "custom_weight_loader": [_LOADER],
        }
        super().__init__("sglang", path, name, {**(options or sglang_probe.OPTIONS), **speculative})

    async def share_accepted(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Answer `prompts`. Returns the part of the drafted tokens that the model accepts."""
        server = self._engine.loop.server
        asked = asyncio.run_coroutine_threadsafe(_accepted(server.manager, prompts, num_tokens), server.loop)
        return await asyncio.wrap_future(asked)

    async def live_draft(self) -> Mapping[str, torch.Tensor]:
        """Copy what the draft's kernels read."""
        return await asyncio.to_thread(self._live_draft)

    def _live_draft(self) -> Mapping[str, torch.Tensor]:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        file = str(Path(tempfile.mkdtemp()) / "draft")
        blob = MultiprocessingSerializer.serialize([(file, torch.empty(0))])
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[blob], load_format=_LOADER, flush_cache=False
        )
        self._engine.loop.call(lambda server: server.manager.update_weights_from_tensor(request, None))
        return pickle.loads(Path(file).read_bytes())


_LOADER = "tests.gpu.draft_actors.dump"


def dump(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Write a model's parameters to a file, unless it is there. SGLang calls it for the draft first."""
    file = Path(named_tensors[0][0])
    if not file.exists():
        held = {name: each.detach().cpu() for name, each in model.named_parameters()}
        file.write_bytes(pickle.dumps(held))


async def _accepted(manager: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
    from sglang.srt.managers.io_struct import GenerateReqInput

    drafted = accepted = 0
    for prompt in prompts:
        sampling = {"max_new_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
        request = GenerateReqInput(input_ids=list(prompt), sampling_params=sampling)
        async for out in manager.generate_request(request, None):
            drafted += out["meta_info"]["spec_num_proposed_drafts"]
            accepted += out["meta_info"]["spec_num_correct_drafts"]
    return accepted / drafted


def _live(worker: Any) -> dict[str, torch.Tensor]:
    runner = worker.model_runner
    draft = runner.get_draft_model() if hasattr(runner, "get_draft_model") else runner.drafter.model
    return {name: each.detach().cpu().clone() for name, each in draft.named_parameters()}
