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

from tests.fleets.draft_trainer import module_of
from tests.models import redraw
from tests.mtp_models import build_tiny_mtp, mtp_weights
from tests.patience import patient
from weightsync import SyncReport, TrainerShard, WeightSync

PROMPTS = [[5, 9, 3, 7], [11] * 9, [*range(200, 230)]]
NUM_TOKENS = 32
STEPS = (("model", "draft"), 1), (("model",), 2), (("draft",), 2), (("model", "draft"), 3)
"""Which parts get other weights before each version, and by which seed. Version 2 leaves the draft behind."""

NUM_SPECULATIVE_TOKENS = {"draft_model": 2, "eagle": 2, "eagle3": 1, "mtp": 1}
"""Tokens that a draft proposes in a step of the model. vLLM's MiMo takes one from its layer.

An EAGLE-3 adds to its own state from the second one on, so that these weights would not say the next.
"""

_LAST_NORMS = "final_layernorm.weight", "shared_head.norm.weight"
"""Those of MTP layers of MiMo and GLM-4 MoE."""
_HEADS = "num_attention_heads", "num_key_value_heads"
_FIRST_TOKEN, _NUM_DRAFT_TOKENS = 1000, 2560
"""The tokens that EAGLE-3's draft says, and its model: as many, from the first one on."""
_HEAD_DIM = 64
_MTP_SHAPE = {
    "vocab_size": 5003,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
_EXPERTS_SHAPE = {"head_dim": 64, "n_routed_experts": 8, "moe_intermediate_size": 256}


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
            each.copy_(self._drawn(name, each.shape, signs, draw))

    def _drawn(
        self, name: str, shape: torch.Size, signs: torch.Tensor, draw: torch.Generator
    ) -> torch.Tensor:
        return _paired(name, shape, signs, draw)

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


class Eagle3Trainer(PairTrainer):
    """Its draft is an EAGLE-3 of one layer, with a smaller vocabulary, and has the map to the model's.

    An EAGLE-3 gets the last token's embedding by attention alone: each token attends to itself. Values have
    half of the model's width, and so do embeddings here.
    """

    def _read_draft(self, path: str) -> nn.Module:
        return module_of(load_file(Path(eagle_path(path)) / "model.safetensors"))

    def _drawn(
        self, name: str, shape: torch.Size, signs: torch.Tensor, draw: torch.Generator
    ) -> torch.Tensor:
        if name == "d2t":
            return torch.full(shape, _FIRST_TOKEN)
        if name == "lm_head.weight":
            return _head(shape, draw.initial_seed())
        if name == "fc.weight":  # the states of the model say nothing more
            return torch.randn(shape, generator=draw) * 1e-3
        if name.startswith("midlayer.self_attn."):
            return _attention_to_itself(name, signs)
        drawn = _paired(name, shape, signs, draw)
        if "embed_tokens" in name:
            drawn[:, len(signs) // 2 :] = 0
        return drawn


class SglangEagle3Trainer(Eagle3Trainer):
    """Its draft is without the map, which SGLang reads from files."""

    def _read_draft(self, path: str) -> nn.Module:
        draft = super()._read_draft(path)
        del draft.d2t
        return draft


class MtpTrainer(PairTrainer):
    """Its draft is an MTP layer of MiMo. The last norm has the signs."""

    family = "mimo"

    def _read_draft(self, path: str) -> nn.Module:
        return module_of(mtp_weights(Path(path), self.family, 5))


class GlmTrainer(MtpTrainer):
    """Its draft is an MTP layer of GLM-4 MoE. Routers are in float32, as engines hold them."""

    family = "glm"

    def start(self, path: str, device: str = "cuda") -> None:
        super().start(path, device)
        for part in (self.model, self.draft):
            for name, module in part.named_modules():
                if name.endswith("mlp.gate"):
                    module.float()


def _paired(name: str, shape: torch.Size, signs: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    nothing = torch.zeros(len(signs), len(signs))
    if name == "model.norm.weight" or name.endswith(_LAST_NORMS):
        return signs
    if name == "fc.weight":
        return torch.cat([torch.diag(signs), nothing], dim=1)
    if name.endswith("input_proj.weight"):
        return torch.cat([nothing, torch.eye(len(signs))], dim=1)
    if name.endswith("eh_proj.weight"):
        return torch.cat([torch.eye(len(signs)), nothing], dim=1)
    if "norm" in name:
        return torch.ones(shape)
    if "o_proj" in name or "down_proj" in name or name == "fc.bias":
        return torch.zeros(shape)
    return torch.randn(shape, generator=draw) * shape[-1] ** -0.5


def _head(shape: torch.Size, seed: int) -> torch.Tensor:
    """Return a head of the model, or of EAGLE-3's draft, which for equal seeds has the same rows."""
    rows = torch.randn((_NUM_DRAFT_TOKENS, shape[1]), generator=torch.Generator().manual_seed(seed))
    head = torch.zeros(shape)
    first = 0 if len(head) == len(rows) else _FIRST_TOKEN
    head[first : first + len(rows)] = rows * shape[1] ** -0.5
    return head


def _attention_to_itself(name: str, signs: torch.Tensor) -> torch.Tensor:
    """Return a weight of EAGLE-3's attention, which gives the embedding of each token, times the signs."""
    hidden = len(signs)
    key = torch.eye(hidden // 2, 2 * hidden)  # of the embedding, and not of the model's state
    heads = 2, hidden // 2 // _HEAD_DIM, _HEAD_DIM  # queries of a key, keys, elements
    if "q_proj" in name:
        return 4 * key.view(*heads[1:], -1).repeat_interleave(2, dim=0).flatten(0, 1)
    if "k_proj" in name:
        return 4 * key
    if "v_proj" in name:
        return key
    first = torch.eye(hidden).view(heads[1], heads[0], heads[2], hidden)[:, 0].flatten(0, 1)
    return torch.diag(signs)[:, : hidden // 2] @ first


def eagle_path(path: str) -> str:
    """Return where the EAGLE draft of the model in `path` is."""
    return f"{path}-eagle"


def save_draft(path: str, method: str, engine: str) -> None:
    """Save a draft of `method`, EAGLE or EAGLE-3, for the model of `save_qwen3` in `path`."""
    if method == "eagle3":
        _save_eagle3(path)
    else:
        _save_eagle(path, engine)


def _save_eagle(path: str, engine: str) -> None:
    """Save an EAGLE draft of one layer, as `engine` reads it, for the model of `save_qwen3` in `path`."""
    config = json.loads((Path(path) / "config.json").read_text())
    hidden = config["hidden_size"]
    shapes = {"fc.weight": (hidden, 2 * hidden), **_layer("layers.0", config, hidden)}
    architecture = "LlamaForCausalLM"
    if engine == "sglang":
        shapes["fc.bias"], architecture = (hidden,), "LlamaForCausalLMEagle"
    _save_draft(path, _zeros(shapes), {**config, "architectures": [architecture]})


def _save_eagle3(path: str) -> None:
    """Save an EAGLE-3 draft of one layer for the model of `save_qwen3` in `path`."""
    config = json.loads((Path(path) / "config.json").read_text())
    hidden = config["hidden_size"]
    shapes = {"fc.weight": (hidden, 3 * hidden), **_layer("midlayer", config, 2 * hidden)}
    shapes |= {f"midlayer.{name}.weight": (hidden,) for name in ("input_layernorm", "hidden_norm")}
    shapes |= {"norm.weight": (hidden,), "lm_head.weight": (_NUM_DRAFT_TOKENS, hidden)}
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}  # each engine reads it elsewhere
    settings = {"draft_vocab_size": _NUM_DRAFT_TOKENS, "eagle_config": layers, **layers}
    tensors = _zeros(shapes) | {"d2t": torch.full((_NUM_DRAFT_TOKENS,), _FIRST_TOKEN)}
    _save_draft(path, tensors, {**config, **settings, "architectures": ["LlamaForCausalLMEagle3"]})


def _layer(name: str, config: Mapping[str, Any], width: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer of Llama, whose attention reads `width` elements of a token."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, groups = (config[each] * config["head_dim"] for each in _HEADS)
    return {
        f"{name}.self_attn.q_proj.weight": (heads, width),
        f"{name}.self_attn.k_proj.weight": (groups, width),
        f"{name}.self_attn.v_proj.weight": (groups, width),
        f"{name}.self_attn.o_proj.weight": (hidden, heads),
        f"{name}.mlp.gate_proj.weight": (inner, hidden),
        f"{name}.mlp.up_proj.weight": (inner, hidden),
        f"{name}.mlp.down_proj.weight": (hidden, inner),
        f"{name}.post_attention_layernorm.weight": (hidden,),
    }


def _zeros(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


def _save_draft(path: str, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    settings = {"model_type": "llama", "num_hidden_layers": 1, "layer_types": None}
    folder = Path(eagle_path(path))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})


def save_mtp(path: str, family: str) -> None:
    """Save a model of a family with an MTP layer, of a size that GPU kernels take."""
    shape = {**_MTP_SHAPE, **(_EXPERTS_SHAPE if family == "glm" else {})}
    build_tiny_mtp(Path(path), family, seed=1, mtp_seed=6, **shape)


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
