"""What one rank declares, on stand-ins with the names of both of Megatron's layer specifications."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.megatron_standin import Place, model_of
from weightsync.errors import ConfigError, PlanError
from weightsync.memory.tensors import segment_view
from weightsync.sources.local_weights import LocalWeights
from weightsync.sources.megatron import FAMILIES, Cut, Rule, local_weights

VOCAB = 11
LAYER = "decoder.layers.0."


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def assemble(ranks: Sequence[LocalWeights]) -> dict[str, torch.Tensor]:
    """Join the boxes of all ranks; replicas must be equal, and nothing may be missing."""
    found: dict[str, torch.Tensor] = {}
    for held in ranks:
        for meta in held.layout.tensors:
            found.setdefault(meta.name, torch.full(meta.shape, float("nan")))
        for segment in held.layout.segments:
            target = found[segment.tensor][segment.box.slices()]
            view = segment_view(held.tensors[segment.buffer], segment)
            assert target.isnan().all() or torch.equal(target, view)
            target.copy_(view)
    assert not any(tensor.isnan().any() for tensor in found.values())
    return found


def check(ranks: Sequence[LocalWeights], wanted: Mapping[str, torch.Tensor]) -> None:
    found = assemble(ranks)
    assert sorted(found) == sorted(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def of_one(parameters: Mapping[str, torch.Tensor], family: str = "llama", **settings: Any) -> LocalWeights:
    return local_weights(model_of(parameters, **settings), family, vocab_size=VOCAB)


def test_a_dense_layer_of_transformer_engine() -> None:
    q, k, v = drawn(8, 8), drawn(4, 8), drawn(4, 8)
    gate, up, down, norms = drawn(6, 8), drawn(6, 8), drawn(8, 6), drawn(2, 8)
    ranks = [
        {
            "self_attention.linear_qkv.layer_norm_weight": norms[0],
            "self_attention.linear_qkv.weight": torch.cat(
                [q[4 * rank : 4 * rank + 4], k[2 * rank : 2 * rank + 2], v[2 * rank : 2 * rank + 2]]
            ),
            "mlp.linear_fc1.layer_norm_weight": norms[1],
            "mlp.linear_fc1.weight": torch.cat([gate[3 * rank : 3 * rank + 3], up[3 * rank : 3 * rank + 3]]),
            "mlp.linear_fc2.weight": down[:, 3 * rank : 3 * rank + 3],
        }
        for rank in range(2)
    ]
    held = [
        of_one({LAYER + name: each for name, each in parameters.items()}, groups={"tp": Place(rank, 2)})
        for rank, parameters in enumerate(ranks)
    ]
    layer = "model.layers.0."
    wanted = {
        "input_layernorm.weight": norms[0],
        "self_attn.q_proj.weight": q,
        "self_attn.k_proj.weight": k,
        "self_attn.v_proj.weight": v,
        "post_attention_layernorm.weight": norms[1],
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": down,
    }
    check(held, {layer + name: tensor for name, tensor in wanted.items()})


@pytest.mark.parametrize("etp", [1, 2])
def test_grouped_experts_of_transformer_engine(etp: int) -> None:
    gates, ups, downs, router = drawn(4, 6, 8), drawn(4, 6, 8), drawn(4, 8, 6), drawn(4, 8)
    held = []
    for ep in range(2):
        for part in range(etp):
            parameters = {LAYER + "mlp.router.weight": router}
            for local in range(2):
                gate, up = (each[2 * ep + local].chunk(etp)[part] for each in (gates, ups))
                home = f"{LAYER}mlp.experts.linear_fc"
                parameters[f"{home}1.weight{local}"] = torch.cat([gate, up])
                parameters[f"{home}2.weight{local}"] = downs[2 * ep + local].chunk(etp, 1)[part]
            groups = {"ep": Place(ep, 2), "expt_tp": Place(part, etp), "tp": Place(part, 2)}
            held.append(of_one(parameters, "qwen3_moe", groups=groups, num_moe_experts=4))
    wanted = {"model.layers.0.mlp.gate.weight": router}
    for leaf, stack in (("gate_proj", gates), ("up_proj", ups), ("down_proj", downs)):
        wanted |= {f"model.layers.0.mlp.experts.{n}.{leaf}.weight": each for n, each in enumerate(stack)}
    check(held, wanted)


def test_latent_attention_of_transformer_engine_whose_down_projections_are_whole() -> None:
    names = {
        "self_attention.linear_q_down_proj.weight": ("q_a_proj", drawn(6, 8)),
        "self_attention.linear_kv_down_proj.weight": ("kv_a_proj_with_mqa", drawn(5, 8)),
        "self_attention.linear_q_up_proj.layer_norm_weight": ("q_a_layernorm", drawn(6)),
        "self_attention.linear_kv_up_proj.layer_norm_weight": ("kv_a_layernorm", drawn(3)),
    }
    q_up, kv_up, out = drawn(8, 6), drawn(12, 3), drawn(8, 8)
    latent = {"multi_latent_attention": True, "q_lora_rank": 6, "kv_lora_rank": 3, "qk_pos_emb_head_dim": 2}
    held = []
    for rank in range(2):
        parameters = {
            **{LAYER + name: tensor for name, (_, tensor) in names.items()},
            LAYER + "self_attention.linear_q_up_proj.weight": q_up.chunk(2)[rank],
            LAYER + "self_attention.linear_kv_up_proj.weight": kv_up.chunk(2)[rank],
            LAYER + "self_attention.linear_proj.weight": out.chunk(2, 1)[rank],
        }
        model = model_of(parameters, groups={"tp": Place(rank, 2)}, **latent)
        for tensor in model.parameters():  # Transformer Engine says it of what is whole, too
            tensor.tensor_model_parallel, tensor.partition_dim = tensor.dim() == 2, 0
        model.get_parameter(LAYER + "self_attention.linear_proj.weight").partition_dim = 1  # type: ignore[attr-defined]
        held.append(local_weights(model, "kimi_k2", vocab_size=VOCAB))
    wanted = {f"model.layers.0.self_attn.{title}.weight": tensor for title, tensor in names.values()}
    for leaf, tensor in (("q_b_proj", q_up), ("kv_b_proj", kv_up), ("o_proj", out)):
        wanted[f"model.layers.0.self_attn.{leaf}.weight"] = tensor
    check(held, wanted)


def test_latent_attention_without_a_down_projection_of_the_query() -> None:
    query = drawn(8, 8)
    latent = {
        "multi_latent_attention": True,
        "q_lora_rank": None,
        "kv_lora_rank": 3,
        "qk_pos_emb_head_dim": 2,
    }
    held = [
        of_one(
            {LAYER + "self_attention.linear_q_proj.weight": query.chunk(2)[rank]},
            "deepseek_v2",
            groups={"tp": Place(rank, 2)},
            **latent,
        )
        for rank in range(2)
    ]
    check(held, {"model.layers.0.self_attn.q_proj.weight": query})


@pytest.mark.parametrize("inner", ["transformer_layer", "mtp_model_layer"])
def test_layers_that_predict_more_tokens_follow_the_last_layer(inner: str) -> None:
    parameters = {
        "mtp.layers.0.enorm.weight": drawn(8),
        "mtp.layers.0.eh_proj.weight": drawn(8, 16),
        f"mtp.layers.0.{inner}.input_layernorm.weight": drawn(8),
        f"mtp.layers.0.{inner}.mlp.router.expert_bias": drawn(4),
        "mtp.layers.0.final_layernorm.weight": drawn(8),
    }
    held = of_one(parameters, "glm4_moe", num_layers=5)
    titles = ("enorm.weight", "eh_proj.weight", "input_layernorm.weight")
    titles += ("mlp.gate.e_score_correction_bias", "shared_head.norm.weight")
    wanted = zip(titles, parameters.values(), strict=True)
    check([held], {f"model.layers.5.{title}": tensor for title, tensor in wanted})


def test_layers_are_numbered_by_their_stage_and_chunks_are_kept_apart() -> None:
    chunks = [
        model_of({LAYER + "input_layernorm.weight": drawn(8)}, first_layer=n, num_layers=8) for n in (2, 6)
    ]
    held = local_weights(chunks, "llama", vocab_size=VOCAB)
    assert [(segment.tensor, segment.buffer) for segment in held.layout.segments] == [
        ("model.layers.2.input_layernorm.weight", "0.decoder.layers.0.input_layernorm.weight"),
        ("model.layers.6.input_layernorm.weight", "1.decoder.layers.0.input_layernorm.weight"),
    ]


def test_wrappers_and_state_that_modules_pack_are_left_out() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    model = model_of({LAYER + "mlp.router.expert_bias": drawn(4)})
    assert "_extra_state" in model.state_dict()
    held = local_weights(Wrapper(Wrapper(model)), "deepseek_v3", vocab_size=VOCAB)
    assert [*held.tensors] == [LAYER + "mlp.router.expert_bias"]


def test_a_tied_head_is_declared_as_the_embedding() -> None:
    table = drawn(12, 8)
    stages = [
        of_one({name: table.clone()}, is_tied=True)
        for name in ("embedding.word_embeddings.weight", "output_layer.weight")
    ]
    assert stages[0].layout.segments[0].box == stages[1].layout.segments[0].box
    assert [stage.layout.tied for stage in stages] == [(("lm_head.weight", "model.embed_tokens.weight"),)] * 2
    check(stages, {"model.embed_tokens.weight": table[:VOCAB]})


def test_both_ends_of_a_tied_model_on_one_rank_are_declared_once() -> None:
    table = drawn(12, 8)
    chunks = [
        model_of({name: table.clone()}, is_tied=True)
        for name in ("embedding.word_embeddings.weight", "output_layer.weight")
    ]
    held = local_weights(chunks, "llama", vocab_size=VOCAB)
    assert [segment.buffer for segment in held.layout.segments] == ["0.embedding.word_embeddings.weight"]


def test_a_family_of_ones_own_takes_a_few_lines() -> None:
    mine = FAMILIES["llama"].extended(
        "mine",
        Rule("decoder.layers.{layer}.mlp.linear_fc1.weight", "h.{layer}.up.weight", Cut.ROWS),
        Rule("decoder.layers.{layer}.mlp.linear_fc1.bias", "h.{layer}.up.bias", Cut.ROWS),
    )
    weight, bias = drawn(6, 8), drawn(6)
    held = [
        local_weights(
            model_of(
                {
                    LAYER + "mlp.linear_fc1.weight": weight.chunk(2)[rank],
                    LAYER + "mlp.linear_fc1.bias": bias.chunk(2)[rank],
                },
                groups={"tp": Place(rank, 2)},
            ),
            mine,
            vocab_size=VOCAB,
        )
        for rank in range(2)
    ]
    check(held, {"h.0.up.weight": weight, "h.0.up.bias": bias})


def test_excluded_names_are_left_out_parameters_and_tensors() -> None:
    model = model_of({"value_head.weight": drawn(1, 8), LAYER + "mlp.linear_fc1.weight": drawn(4, 8)})
    excluded = {"value_head.*", "model.layers.0.mlp.up_proj.weight"}
    held = local_weights(model, "llama", vocab_size=VOCAB, exclude=excluded)
    assert [meta.name for meta in held.layout.tensors] == ["model.layers.0.mlp.gate_proj.weight"]


def test_a_parameter_without_a_rule_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"family llama: 'decoder\.layers\.0\.mlp\.linear_fc3\.weight' .*docs/tr"
    ):
        of_one({LAYER + "mlp.linear_fc3.weight": drawn(4, 8)})


def test_an_unknown_family_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"family: 'qwen3_mo' .*docs/trainers\.md.*did you mean 'qwen3_moe'"
    ):
        of_one({}, "qwen3_mo")


@pytest.mark.parametrize("given", [None, 0])
def test_an_unknown_vocabulary_is_refused(given: int | None) -> None:
    with pytest.raises(ConfigError, match=r"vocab_size.*padded"):
        local_weights(model_of({}), "llama", vocab_size=given)


def test_a_vocabulary_larger_than_the_embedding_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"vocab_size: 11 .*embedding\.word_embeddings\.weight has 8 rows"):
        of_one({"embedding.word_embeddings.weight": drawn(4, 8)}, groups={"tp": Place(0, 2)})


def test_chunks_with_the_same_layer_are_refused() -> None:
    chunks = [model_of({LAYER + "input_layernorm.weight": drawn(8)}) for _ in range(2)]
    with pytest.raises(
        PlanError, match=r"layers\.0\.input_layernorm\.weight: 0\.dec.* and 1\.dec.* both hold"
    ):
        local_weights(chunks, "llama", vocab_size=VOCAB)


def test_one_tensor_in_two_boxes_is_refused() -> None:
    parameters = {LAYER + name: drawn(8) for name in ("input_layernorm.weight",)}
    parameters[LAYER + "self_attention.linear_qkv.layer_norm_weight"] = drawn(4)
    with pytest.raises(PlanError, match="in different boxes"):
        of_one(parameters)


@pytest.mark.parametrize(
    "setting", ["attention_output_gate", "layernorm_zero_centered_gamma", "moe_mlp_glu_interleave_size"]
)
def test_settings_whose_parameters_are_not_the_checkpoints_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"the model's {setting}: True .*train without it"):
        of_one({}, **{setting: True})


@pytest.mark.parametrize("model", [nn.Linear(2, 2), []])
def test_other_models_are_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"self\.model.*GPTModel"):
        local_weights(model, "llama", vocab_size=VOCAB)


def test_a_layer_without_a_number_is_refused() -> None:
    model = model_of({LAYER + "input_layernorm.weight": drawn(8)})
    del model.get_submodule("decoder.layers.0").layer_number
    with pytest.raises(ConfigError, match=r"'decoder\.layers\.0' .*layer_number"):
        local_weights(model, "llama", vocab_size=VOCAB)


def test_quantised_parameters_are_refused() -> None:
    class Float8(nn.Parameter): ...

    model = model_of({})
    model.output_layer = nn.Module()
    model.output_layer.weight = Float8(drawn(12, 8))
    with pytest.raises(ConfigError, match=r"output_layer\.weight: 'Float8' .*scales"):
        local_weights(model, "llama", vocab_size=VOCAB)


def test_a_rule_that_contradicts_megatron_is_refused() -> None:
    model = model_of({LAYER + "mlp.linear_fc2.weight": drawn(8, 3)}, groups={"tp": Place(0, 2)})
    parameter: Any = model.get_parameter(LAYER + "mlp.linear_fc2.weight")
    parameter.tensor_model_parallel, parameter.partition_dim = True, 0
    with pytest.raises(ConfigError, match=r"rule for decoder.*'columns' .*along dimension 0"):
        local_weights(model, "llama", vocab_size=VOCAB)
