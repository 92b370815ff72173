"""Trainers of a model and a draft that predicts it, and how many drafted tokens an engine then accepts.

Layers of a pair add nothing to the last token's embedding, so that the last token says the next. The model's
last norm multiplies the embedding with signs, and so does the draft. For equal signs both say the same.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.actors.draft_trainer import module_of
from tests.models import redraw
from tests.mtp_models import build_tiny_mtp, mtp_weights
from tests.patience import patient
from weightsync import SyncReport, TrainerShard, WeightSync

PROMPTS = [[5, 9, 3, 7], [11] * 9, [*range(200, 230)]]
NUM_TOKENS = 32
STEPS = (("model", "draft"), 1), (("model",), 2), (("draft",), 2), (("model", "draft"), 3)
"""Which parts get other weights before each version, and by which seed. Version 2 leaves the draft behind."""

NUM_SPECULATIVE_TOKENS = {"draft_model": 2, "eagle": 2, "mtp": 1}
"""Tokens that a draft proposes in a step of the model. vLLM's MiMo takes one from its layer."""

_MTP_LAYER = "model.mtp_layers.0"
_HEADS = "num_attention_heads", "num_key_value_heads"
_MTP_SHAPE = {
    "vocab_size": 5003,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}


class PairTrainer(TrainerShard):
    """One rank with a model and a draft, in bfloat16."""

    def start(self, path: str, device: str = "cuda") -> None:
        """Read the model, and the draft that belongs to it."""
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(device)
        self.draft = self._read_draft(path).to(device, torch.bfloat16)

    def _read_draft(self, path: str) -> nn.Module:
        raise NotImplementedError

    @torch.no_grad()
    def train(self, part: str, seed: int) -> None:
        """Give the model, or the draft, other weights. For equal seeds, it predicts what the model says."""
        draw = torch.Generator().manual_seed(seed)
        signs = torch.randint(0, 2, (self.model.config.hidden_size,), generator=draw) * 2.0 - 1
        for name, each in getattr(self, part).named_parameters():
            each.copy_(_paired(name, each.shape, signs, draw))

    def weights(self, part: str) -> Mapping[str, torch.Tensor]:
        """Copy the weights of the model, or of the draft, to the host."""
        return {name: each.detach().cpu() for name, each in getattr(self, part).named_parameters()}


class TwinTrainer(PairTrainer):
    """Its draft is a model of the same form. For equal seeds, both have equal random weights."""

    def _read_draft(self, path: str) -> nn.Module:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(path)

    def train(self, part: str, seed: int) -> None:
        redraw(getattr(self, part), seed)


class EagleTrainer(PairTrainer):
    """Its draft is an EAGLE of one layer. The projection has the signs."""

    def _read_draft(self, path: str) -> nn.Module:
        return module_of(load_file(Path(eagle_path(path)) / "model.safetensors"))


class MtpTrainer(PairTrainer):
    """Its draft is an MTP layer of MiMo. The last norm has the signs."""

    def _read_draft(self, path: str) -> nn.Module:
        return module_of(mtp_weights(Path(path), "mimo", 5))


def _paired(name: str, shape: torch.Size, signs: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    nothing = torch.zeros(len(signs), len(signs))
    if name in ("model.norm.weight", f"{_MTP_LAYER}.final_layernorm.weight"):
        return signs
    if name == "fc.weight":
        return torch.cat([torch.diag(signs), nothing], dim=1)
    if name == f"{_MTP_LAYER}.input_proj.weight":
        return torch.cat([nothing, torch.eye(len(signs))], dim=1)
    if "norm" in name:
        return torch.ones(shape)
    if "o_proj" in name or "down_proj" in name or name == "fc.bias":
        return torch.zeros(shape)
    return torch.randn(shape, generator=draw) * shape[-1] ** -0.5


def eagle_path(path: str) -> str:
    """Return where the EAGLE draft of the model in `path` is."""
    return f"{path}-eagle"


def save_eagle(path: str, engine: str) -> None:
    """Save an EAGLE draft of one layer, as `engine` reads it, for the model of `save_qwen3` in `path`."""
    config = json.loads((Path(path) / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, groups = (config[name] * config["head_dim"] for name in _HEADS)
    shapes = {
        "fc.weight": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj.weight": (heads, hidden),
        "layers.0.self_attn.k_proj.weight": (groups, hidden),
        "layers.0.self_attn.v_proj.weight": (groups, hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, heads),
        "layers.0.mlp.gate_proj.weight": (inner, hidden),
        "layers.0.mlp.up_proj.weight": (inner, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, inner),
        "layers.0.post_attention_layernorm.weight": (hidden,),
    }
    architecture = "LlamaForCausalLM"
    if engine == "sglang":
        shapes["fc.bias"], architecture = (hidden,), "LlamaForCausalLMEagle"
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    settings = {"architectures": [architecture], "model_type": "llama", "num_hidden_layers": 1}
    folder = Path(eagle_path(path))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, **settings, "layer_types": None}))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def save_mtp(path: str) -> None:
    """Save a model with an MTP layer, as MiMo has it, of a size that GPU kernels take."""
    build_tiny_mtp(Path(path), "mimo", seed=1, mtp_seed=6, **_MTP_SHAPE)


def speculative_config(path: str, method: str) -> dict[str, Any]:
    """Return how a vLLM with the model in `path` speculates by `method`."""
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": NUM_SPECULATIVE_TOKENS[method]}
    if method != "mtp":  # the layer of MTP is in the model's files
        config["model"] = path if method == "draft_model" else eagle_path(path)
    return config


def follow(
    sync: WeightSync,
    trainer: Any,
    share_accepted: Callable[[], float],
    check: Callable[[SyncReport], None],
    num_speculative_tokens: int,
) -> None:
    """Update by `STEPS`: the acceptance length falls where the draft is left behind, and else holds.

    `check` gets each update's report. The acceptance length is the number of tokens that a step of the
    engine's model makes.
    """
    shares = []
    for parts, seed in STEPS:
        ray.get([trainer.train.remote(part, seed) for part in parts], timeout=patient(60))
        report = sync.update_weights()
        check(report)
        shares.append(share_accepted())
        length = 1 + num_speculative_tokens * shares[-1]
        sys.stdout.write(f"{report}: {shares[-1]:.3f} of the drafted tokens accepted, length {length:.2f}\n")
    sys.stdout.write("\n".join(map(str, sync.coverage())))
    together, alone, *again = shares
    assert min(together, *again) > 0.75, shares  # a length of at least 1.75
    assert alone < 0.25, "the model moved away from it"
