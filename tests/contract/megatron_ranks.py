"""Trainer ranks with models of Megatron-Core on the CPU, filled from a checkpoint by plain loops."""

from __future__ import annotations

import multiprocessing
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from traceback import format_exception
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.contract.source_ranks import publish
from tests.forked import import_megatron
from weightsync.errors import StateError
from weightsync.memory.tensors import segment_view
from weightsync.plan import Layout, Members, Plan, RankLayout, Segment, make_plan
from weightsync.sources import make_source
from weightsync.sources.megatron import MegatronSource, finish, local_weights

WORLD = 4
TOKENS = [5, 17, 102, 0, 33, 64, 5, 99]
VOCAB, DIVISOR = 103, 8
"""Tokens of the checkpoint, and what Megatron pads them to a multiple of, times the tensor-parallel size."""


@dataclass(frozen=True)
class Held:
    """What one rank declares, copies of its segments, what it published, and its logits of `TOKENS`.

    In `sent`, which the plan is made of, experts are parts of stacks.
    """

    layout: RankLayout
    sent: RankLayout
    views: list[npt.NDArray[np.float32]]
    share: bytes
    digests: list[int]
    logits: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True)
class Case:
    """A model and how it is cut over `WORLD` ranks; data parallelism takes the rest.

    If `is_stale`, Megatron's DDP wraps it, and a step doubles each rank's share after the layout was made.
    """

    name: str
    family: str
    tp: int = 1
    pp: int = 1
    chunks: int = 1
    ep: int = 1
    etp: int = 1
    is_stacked: bool = False
    is_stale: bool = False
    answers: bool = False


def run_all(meeting: str, cases: Sequence[Case], folders: Mapping[str, Path], results: Any) -> None:
    """Import Megatron once, then fork its ranks. Puts each case's `Held` of all ranks, or an error."""
    import_megatron()
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=_run_rank, args=(n, meeting, cases, folders, results), daemon=True)
        for n in range(WORLD)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()


def stay_on_the_host() -> None:
    """Have Megatron make on the host what it makes on the current GPU: a few buffers, and copies."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.Tensor.cuda = lambda self: self  # type: ignore[assignment, method-assign]
    torch.cuda.current_stream = lambda: None  # type: ignore[assignment, return-value]  # 0.19 asks, and waits for nothing


def _run_rank(
    rank: int, meeting: str, cases: Sequence[Case], folders: Mapping[str, Path], results: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD)
    stay_on_the_host()
    found: dict[str, list[Held]] = {}
    for case in cases:
        held: list[Held] = [None] * WORLD  # type: ignore[list-item]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                mine = _hold(case, folders[case.family])
            except Exception as error:
                results.put(RuntimeError(f"rank {rank}, {case.name}: {''.join(format_exception(error))}"))
                raise
            dist.all_gather_object(held, mine)
        found[case.name] = held
    if rank == 0:
        results.put(found)
    dist.destroy_process_group()


def _hold(case: Case, folder: Path) -> Held:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.chunks if case.chunks > 1 else None,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
    )
    checkpoint = load_file(folder / "model.safetensors")
    chunks = build(case, folder)
    for chunk in chunks:
        fill(chunk, checkpoint)
    held = _publish(case, [_wrap(chunk, True) for chunk in chunks] if case.is_stale else chunks, folder)
    parallel_state.destroy_model_parallel()
    return held


def _publish(case: Case, chunks: list[nn.Module], folder: Path) -> Held:
    from transformers import AutoConfig

    model = chunks if case.chunks > 1 else chunks[0]
    source = make_source(model, hf_config=AutoConfig.from_pretrained(folder))
    layouts: list[RankLayout] = [None] * WORLD  # type: ignore[list-item]
    sent = source.layout()
    dist.all_gather_object(layouts, sent)
    held = local_weights(model, case.family, vocab_size=VOCAB)
    views = [segment_view(held.tensors[s.buffer], s).numpy().copy() for s in held.layout.segments]
    if case.is_stale:
        _step(chunks[0])
    share, _ = publish(source, plan_for(layouts), dist.get_rank())
    if case.is_stale:
        _check_complete(chunks[0])
        with AsOnGpus():
            _check_trained(*(_wrap(_filled(case, folder), overlaps) for overlaps in (True, False)))
    return Held(held.layout, sent, views, *share, logits=_answer(chunks[0]) if case.answers else None)


@torch.no_grad()
def _answer(model: nn.Module) -> npt.NDArray[np.float32]:
    """Return the logits of `TOKENS`, [1, tokens, vocabulary], by Megatron's own forward pass."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.moe import moe_utils

    # It has markers, random states and a kernel for GPUs alone.
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None  # type: ignore[assignment]
    tensor_parallel.get_cuda_rng_tracker = lambda: SimpleNamespace(fork=nullcontext)
    moe_utils.te_general_gemm = None
    count = len(TOKENS)
    mask = torch.ones(count, count, dtype=torch.bool).triu(1)[None, None]
    part = model.eval()(torch.tensor([TOKENS]), torch.arange(count)[None], mask)
    peers = parallel_state.get_tensor_model_parallel_group()
    parts: list[torch.Tensor] = [torch.empty_like(part) for _ in range(peers.size())]
    dist.all_gather(parts, part.contiguous(), group=peers)
    return torch.cat(parts, -1)[..., :VOCAB].numpy()


def plan_for(layouts: Sequence[RankLayout]) -> Plan:
    """One engine on a holder of its own, which takes everything that all ranks declare."""
    metas = tuple({meta.name: meta for layout in layouts for meta in layout.tensors}.values())
    tied = tuple({pair for layout in layouts for pair in layout.tied})
    needs = RankLayout(metas, tuple(Segment.whole(meta) for meta in metas), tied)
    return make_plan(
        Layout.from_ranks(layouts),
        {"e0": Layout.from_ranks([needs])},
        Members(WORLD + 1, tuple(range(WORLD)), (("e0", (WORLD,)),)),
        bucket_bytes=4096,
        max_staging_bytes=1 << 20,
    )


def _filled(case: Case, folder: Path) -> nn.Module:
    (model,) = build(case, folder)
    fill(model, load_file(folder / "model.safetensors"))
    return model


class AsOnGpus(TorchFunctionMode):
    """Has Megatron's distributed optimizer run on the host: it takes parameters of a GPU's type alone."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if str(given.get("device")).startswith("cuda"):
            given["device"] = "cpu"
        found = function(*args, **given)
        if function is torch.Tensor.type and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.", 1)
        return found


def _check_trained(wrapped: Any, twin: Any) -> None:
    """Take a step of Megatron's, and compare with a twin that does not overlap its gather."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    for each in (wrapped, twin):
        overlaps = each.ddp_config.overlap_param_gather
        settings = OptimizerConfig(
            optimizer="adam", lr=0.1, use_distributed_optimizer=True, overlap_param_gather=overlaps
        )
        optimizer = get_megatron_optimizer(settings, [each], use_gloo_process_groups=False)
        for number, parameter in enumerate(each.parameters()):
            draw = torch.Generator().manual_seed(number)
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=draw))
        each.finish_grad_sync()
        optimizer.step()
    wanted = dict(twin.named_parameters())
    differ = [name for name, tensor in wrapped.named_parameters() if not same(tensor, wanted[name])]
    assert differ, "the step left nothing to gather"
    finish(wrapped)
    for name, tensor in wrapped.named_parameters():
        assert same(tensor, wanted[name]), name


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both have the same bits, NaN among them."""
    return torch.equal(one.detach().view(torch.int32), other.detach().view(torch.int32))


def _wrap(model: Any, overlaps: bool) -> nn.Module:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_param_gather=overlaps,
        overlap_grad_reduce=True,
        bucket_size=2000,
    )
    return DistributedDataParallel(model.config, settings, model)


@torch.no_grad()
def _step(wrapped: Any) -> None:
    """Double this rank's share of each bucket, as the distributed optimizer changes it."""
    for group in (*wrapped.bucket_groups, *wrapped.expert_parallel_bucket_groups):
        group.param_gather_dispatched = False  # as finish_grad_sync does before the step
        for bucket in group.buckets:
            peers = group.intra_distributed_optimizer_instance_group
            bucket.param_data.chunk(peers.size())[peers.rank()].mul_(2)


def _check_complete(wrapped: Any) -> None:
    """Check that only what is missing is gathered, and that a gather which runs is awaited."""
    groups = (*wrapped.bucket_groups, *wrapped.expert_parallel_bucket_groups)
    assert len(wrapped.bucket_groups) > 1
    assert wrapped.expert_parallel_bucket_groups
    assert all(group.param_gather_dispatched and group.param_gather_handle is None for group in groups)
    if dist.get_rank() == 0:
        finish(wrapped)  # a gather would wait for the others
    before = {name: tensor.clone() for name, tensor in wrapped.named_parameters()}
    _step(wrapped)
    wrapped.bucket_groups[0].start_param_sync()
    finish([wrapped])
    for name, tensor in wrapped.named_parameters():
        torch.testing.assert_close(tensor, 2 * before[name], rtol=0, atol=0, equal_nan=True)
    bare = MegatronSource(wrapped.module, family="qwen3_moe", vocab_size=VOCAB)
    for call in (lambda: finish([wrapped.module]), bare.layout):
        with pytest.raises(StateError, match="give the model in that wrapper"):
            call()


def build(case: Case, folder: Path) -> list[nn.Module]:
    """Make this rank's chunks of a model with the sizes of a checkpoint's configuration."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from transformers import AutoConfig

    wanted = AutoConfig.from_pretrained(folder)
    config = _config(case, wanted)
    step = DIVISOR * case.tp
    models: list[nn.Module] = []
    for number in range(case.chunks):
        stage = number if case.chunks > 1 else None
        spec = get_gpt_decoder_block_spec(config, False, normalization="RMSNorm", vp_stage=stage)
        if case.is_stacked:
            _stack_experts(spec)
        if case.family == "deepseek_v3":
            _leave_out_kernels(spec)
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        models.append(
            GPTModel(
                config=config,
                transformer_layer_spec=spec,
                vocab_size=-(-wanted.vocab_size // step) * step,
                max_sequence_length=32,
                pre_process=first,
                post_process=last,
                share_embeddings_and_output_weights=wanted.tie_word_embeddings,
                position_embedding_type="rope",
                rotary_base=int(wanted.rope_parameters["rope_theta"]),
                rotary_percent=wanted.rope_parameters.get("partial_rotary_factor", 1.0),
                vp_stage=stage,
            )
        )
    return models


def _config(case: Case, wanted: Any) -> Any:
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    settings: dict[str, Any] = {
        "num_layers": wanted.num_hidden_layers,
        "hidden_size": wanted.hidden_size,
        "num_attention_heads": wanted.num_attention_heads,
        "num_query_groups": wanted.num_key_value_heads,
        "ffn_hidden_size": wanted.intermediate_size,
        "tensor_model_parallel_size": case.tp,
        "pipeline_model_parallel_size": case.pp,
        "virtual_pipeline_model_parallel_size": case.chunks if case.chunks > 1 else None,
        "expert_model_parallel_size": case.ep,
        "expert_tensor_parallel_size": case.etp,
        "pipeline_dtype": torch.float32,
        "use_cpu_initialization": True,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "layernorm_epsilon": wanted.rms_norm_eps,
        "add_qkv_bias": case.family in ("qwen2", "glm4_moe"),
        "qk_layernorm": case.family in ("qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3"),
    }
    num_experts = getattr(wanted, "num_local_experts", None) or getattr(wanted, "n_routed_experts", None)
    if num_experts := num_experts or getattr(wanted, "num_experts", None):
        width = getattr(wanted, "moe_intermediate_size", wanted.intermediate_size)
        dense = getattr(wanted, "first_k_dense_replace", 0)
        settings |= {
            "num_moe_experts": num_experts,
            "moe_ffn_hidden_size": width,
            "moe_grouped_gemm": False,
            "moe_layer_freq": [int(layer >= dense) for layer in range(wanted.num_hidden_layers)],
            "moe_router_topk": wanted.num_experts_per_tok,
            "moe_router_load_balancing_type": "none",
        }
        if shared := getattr(wanted, "n_shared_experts", 0):
            settings |= {
                "moe_shared_expert_intermediate_size": shared * width,
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_topk_scaling_factor": wanted.routed_scaling_factor,
            }
    if case.family == "deepseek_v3":
        latent = ("q_lora_rank", "kv_lora_rank", "v_head_dim")
        settings |= {name: getattr(wanted, name) for name in latent}
        settings |= {"qk_head_dim": wanted.qk_nope_head_dim, "qk_pos_emb_head_dim": wanted.qk_rope_head_dim}
        return MLATransformerConfig(**settings, rope_type="rope", multi_latent_attention=True)
    return TransformerConfig(**settings, kv_channels=getattr(wanted, "head_dim", None))


def _stack_experts(block: Any) -> None:
    """Have the block's layers stack experts, as for the older grouped kernel, which need not be there."""
    from megatron.core.transformer.moe import experts
    from megatron.core.transformer.spec_utils import ModuleSpec

    experts.gg.assert_grouped_gemm_is_available = lambda: None
    for layer in block.layer_specs:
        layer.submodules.mlp.submodules.experts = ModuleSpec(module=experts.GroupedMLP)


def _leave_out_kernels(block: Any) -> None:
    """Leave out attention's kernel. For latent attention, Megatron has one with Transformer Engine alone."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.identity_op import IdentityOp

    multi_latent_attention.HAVE_TE = False  # it looks for Transformer Engine's classes, and has none
    for layer in block.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = IdentityOp


# What follows fills Megatron's parameters as a plain loader would: it composes each whole parameter, as on
# one rank, and cuts that as Megatron's own attributes of the parameter say.

_PLAIN = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "self_attention.linear_q_proj": "self_attn.q_proj",
    "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
    "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
    "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
    "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
    "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
}


@torch.no_grad()
def fill(model: Any, checkpoint: Mapping[str, torch.Tensor]) -> None:
    """Write a checkpoint into one chunk, NaN where the vocabulary is padded."""
    from megatron.core import parallel_state

    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in state.items():
        if name.endswith("tokens_per_expert"):
            continue
        if ".experts.weight" in name:
            tensor.copy_(_stack(model, name, checkpoint).view(tensor.shape))
            continue
        whole = _whole(model, name, checkpoint)
        is_expert = ".experts." in name
        rank = (
            parallel_state.get_expert_tensor_parallel_rank()
            if is_expert
            else parallel_state.get_tensor_model_parallel_rank()
        )
        size = (
            parallel_state.get_expert_tensor_parallel_world_size()
            if is_expert
            else parallel_state.get_tensor_model_parallel_world_size()
        )
        if "word_embeddings" in name or name.startswith("output_layer"):
            padding = torch.full((len(tensor) * size - len(whole), *whole.shape[1:]), float("nan"))
            whole = torch.cat([whole, padding])
        if getattr(tensor, "tensor_model_parallel", False) and size > 1:
            pieces = whole.chunk(size * tensor.partition_stride, tensor.partition_dim)
            whole = torch.cat(pieces[rank::size], tensor.partition_dim)
        assert whole.shape == tensor.shape, name
        tensor.copy_(whole)


def _whole(model: Any, name: str, checkpoint: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Compose one parameter as Megatron holds it on one rank."""
    if name.startswith("output_layer") and model.share_embeddings_and_output_weights:
        return checkpoint["model.embed_tokens.weight"]
    if name in ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"):
        title = {"em": "model.embed_tokens", "de": "model.norm", "ou": "lm_head"}[name[:2]]
        return checkpoint[f"{title}.weight"]
    number, inner = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name).groups()  # type: ignore[union-attr]
    module, _, what = inner.rpartition(".")
    home = f"model.layers.{model.decoder.layers[int(number)].layer_number - 1}"
    if module == "self_attention.linear_qkv":
        groups = model.config.num_query_groups
        q, k, v = (checkpoint[f"{home}.self_attn.{each}_proj.{what}"] for each in "qkv")
        split = [each.view(groups, -1, *each.shape[1:]) for each in (q, k, v)]
        return torch.cat(split, 1).reshape(-1, *q.shape[1:])
    if module.startswith("mlp"):
        return _mlp(module, what, home, checkpoint)
    if f"{home}.self_attn.q_a_layernorm.weight" in checkpoint and module == "self_attention.q_layernorm":
        return checkpoint[f"{home}.self_attn.q_a_layernorm.weight"]
    return checkpoint[f"{home}.{_PLAIN[module]}.{what}"]


def _mlp(module: str, what: str, home: str, checkpoint: Mapping[str, torch.Tensor]) -> torch.Tensor:
    block = "block_sparse_moe" if f"{home}.block_sparse_moe.gate.weight" in checkpoint else "mlp"
    if module == "mlp.router":
        return checkpoint[
            f"{home}.{block}.gate." + ("weight" if what == "weight" else "e_score_correction_bias")
        ]
    leaves = ("w1", "w3", "w2") if block != "mlp" else ("gate_proj", "up_proj", "down_proj")
    base = f"{home}.mlp"
    if "shared_experts" in module:
        base = f"{home}.mlp.shared_experts"
    elif found := re.search(r"local_experts\.(\d+)", module):
        base = f"{home}.{block}.experts.{_expert(int(found[1]), home, block, checkpoint)}"
    gate, up, down = (checkpoint[f"{base}.{leaf}.weight"] for leaf in leaves)
    return torch.cat([gate, up]) if module.endswith("linear_fc1") else down


def _expert(local: int, home: str, block: str, checkpoint: Mapping[str, torch.Tensor]) -> int:
    from megatron.core import parallel_state

    experts = checkpoint[f"{home}.{block}.gate.weight"].shape[0]
    per_rank = experts // parallel_state.get_expert_model_parallel_world_size()
    return parallel_state.get_expert_model_parallel_rank() * per_rank + local


def _stack(model: Any, name: str, checkpoint: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Stack this rank's experts input-major, [experts, inputs, outputs]."""
    from megatron.core import parallel_state

    rank = parallel_state.get_expert_tensor_parallel_rank()
    size = parallel_state.get_expert_tensor_parallel_world_size()
    number = int(name.split(".")[2])
    home = f"model.layers.{model.decoder.layers[number].layer_number - 1}"
    count = model.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    stacked = []
    for local in range(count):
        base = f"{home}.mlp.experts.{_expert(local, home, 'mlp', checkpoint)}"
        gate, up, down = (checkpoint[f"{base}.{leaf}_proj.weight"] for leaf in ("gate", "up", "down"))
        if name.endswith("weight1"):
            stacked.append(torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]]).T)
        else:
            stacked.append(down.chunk(size, 1)[rank].T)
    return torch.stack(stacked)


def assemble(held: Sequence[Held]) -> dict[str, torch.Tensor]:
    """Join the boxes of all ranks. What no rank declares is NaN; replicas must be equal."""
    found: dict[str, torch.Tensor] = {}
    for each in held:
        for meta in each.layout.tensors:
            found.setdefault(meta.name, torch.full(meta.shape, float("nan")))
        for segment, view in zip(each.layout.segments, each.views, strict=True):
            _place(found[segment.tensor], segment, torch.from_numpy(view))
    return found


def _place(tensor: torch.Tensor, segment: Segment, view: torch.Tensor) -> None:
    target = tensor[segment.box.slices()]
    assert target.isnan().all() or torch.equal(target, view), segment
    target.copy_(view)


def received(plan: Plan, held: Sequence[Held]) -> dict[str, torch.Tensor]:
    """Put together what the ranks published. What nobody sent is NaN."""
    found = {meta.name: torch.full(meta.shape, float("nan")) for meta in plan.tensors}
    for trainer, each in enumerate(held):
        sent = torch.frombuffer(bytearray(each.share + bytes(1)), dtype=torch.uint8)
        for piece in plan.trainer_pieces(trainer):
            data = sent[piece.send_buffer_offset : piece.send_buffer_offset + piece.nbytes]
            target = found[plan.tensors[piece.tensor].name][piece.box.slices()]
            target.copy_(data.view(torch.float32).view(piece.box.extent))
    return found
