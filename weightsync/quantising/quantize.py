"""Quantises matrices, bit for bit as the libraries of the formats do on a CPU.

On GPUs, the bytes are the same, although a library's bytes may differ there: see `divided`. The rule
``sglang`` is the exception: SGLang only quantises on GPUs, with Hopper's approximate reciprocal. Our kernel
has the same instruction. A CPU rounds the reciprocal correctly, so a few values are neighbours of the GPU's
values. The rules `TOGETHER` only have correctly rounded operations, as SGLang and vLLM compile these kernels.

Sources: compressed-tensors 0.17 (``calculate_qparams``, ``quantize``, ``pack_to_int32``), for blocks of
the rule ``fp8`` vLLM 0.32 (``per_block_cast_to_fp8``), for the rule ``sglang`` the machine code of
``per_token_quant_fp8_kernel`` in sglang-kernel 0.4.5, which SGLang 0.5.17 requires, for the rule
``sglang_experts`` SGLang's ``per_tensor_quant_fp8.cuh``, and for ``vllm_online`` the same kernel in vLLM's
``quantization/w8a8/fp8/common.cu``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from weightsync.plan.layout.formats import MICROSCALING, NEAREST, TOGETHER, Format
from weightsync.quantising.division import divided
from weightsync.quantising.group_kernels import can_quantize_groups, quantize_groups
from weightsync.quantising.microscaling import microscale
from weightsync.quantising.quantize_kernels import can_quantize, quantize_into
from weightsync.quantising.round_to_nearest import round_to_nearest
from weightsync.quantising.shared_scales import can_share_scales, largest_of_blocks, scaled_values
from weightsync.quantising.words import in_words

_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
_LEAST_FP8 = 1e-4
"""The least maximum of a block in vLLM's rule, so that a block of zeros has a scale."""
_LEAST_NORMAL = torch.finfo(torch.float32).tiny


def quantize(weight: torch.Tensor, form: Format) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that a checkpoint stores for a matrix, with the last parts of their names.

    Args:
        weight: [rows, columns], in a floating dtype, on any device. `Format.stored` accepts the shape.

    Yields:
        The tensors of `Format.stored`, in the same order, on the matrix's device.
    """
    assert not form.together, "matrices that share scales are quantised by `quantize_together`"
    if form.rule in TOGETHER:
        (stored,) = quantize_together([weight], [form])
        yield from stored
        return
    if form.rule in MICROSCALING:
        yield from microscale(weight, form)
        return
    if can_quantize_groups(weight, form):
        yield from quantize_groups(weight, form)
        return
    if form.rule in NEAREST:
        yield from round_to_nearest(weight, form)
        return
    if can_quantize(weight, form):
        yield from _by_kernel(weight, form)
        return
    blocks = _in_blocks(weight, form)
    if form.rule == "fp8":
        scales = _fp8_scales(blocks, form)
        values = blocks * (1.0 / scales)
    elif form.rule == "sglang":
        scales, values = _as_sglang(blocks)
    else:
        scales, zero_points = _scales_and_zero_points(blocks, form)
        # Like the library, add a zero point of 0 too: this turns -0 to 0.
        values = _rounded(blocks / scales + zero_points.to(weight.dtype), form)
    values = _from_blocks(values, weight.shape)
    scales = scales.reshape(form.grid(weight.shape))
    if form.packed:
        yield "weight_packed", _pack(values, form.num_bits)
    else:
        yield "weight", values.to(getattr(torch, form.values)).contiguous()
    yield form.scale_suffix, scales.flatten() if form.block == (0, 0) else scales
    if not form.symmetric:
        yield "weight_zero_point", _pack(zero_points.reshape(scales.shape).T, form.num_bits).T.contiguous()
    if form.packed:
        yield "weight_shape", torch.tensor(weight.shape, device=weight.device)


def quantize_together(
    weights: Sequence[torch.Tensor], forms: Sequence[Format]
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Quantise matrices whose blocks share scales. Yields a list per matrix, as `quantize` does.

    Args:
        weights: as for `quantize`, on one device.
        forms: the matrices' formats, of a rule in `TOGETHER`. All have equally many blocks along both axes.
    """
    by_kernel = can_share_scales(weights, forms)
    find = largest_of_blocks if by_kernel else _largest
    scales = divided(find(weights, forms), _FP8_MAX)
    scale, inverses = scaled_values if by_kernel else _scaled, 1.0 / scales
    for weight, form in zip(weights, forms, strict=True):
        stored = scales if form.block == (0, 0) else scales.reshape(form.grid(weight.shape))
        yield [("weight", scale(weight, form, inverses)), (form.scale_suffix, stored)]


def _largest(weights: Sequence[torch.Tensor], forms: Sequence[Format]) -> torch.Tensor:
    """Return the greatest magnitude of each block in any of the matrices, without NaN: float32, row-major."""
    blocks = (_in_blocks(weight, form) for weight, form in zip(weights, forms, strict=True))
    largest = [each.abs().nan_to_num_(0.0, torch.inf).amax((1, 3)).float() for each in blocks]
    return torch.stack(largest).amax(0).flatten()


def _scaled(weight: torch.Tensor, form: Format, inverses: torch.Tensor) -> torch.Tensor:
    """Return a matrix in float8, with blocks multiplied by `inverses`."""
    blocks = _in_blocks(weight, form)
    # If a product is not a number, such as 0 with a scale of 0, these kernels store the greatest value.
    scaled = (blocks * inverses.view(len(blocks), 1, -1, 1)).nan_to_num_(_FP8_MAX).clamp_(-_FP8_MAX, _FP8_MAX)
    return _from_blocks(scaled, weight.shape).to(getattr(torch, form.values)).contiguous()


def _by_kernel(weight: torch.Tensor, form: Format) -> Iterator[tuple[str, torch.Tensor]]:
    values = torch.empty(weight.shape, dtype=getattr(torch, form.values), device=weight.device)
    scales = torch.empty(form.grid(weight.shape), dtype=torch.float32, device=weight.device)
    quantize_into(weight, form, values, scales)
    yield "weight", values
    yield form.scale_suffix, scales.to(weight.dtype) if form.rule == "compressed-tensors" else scales


def _in_blocks(weight: torch.Tensor, form: Format) -> torch.Tensor:
    """Return [blocks of rows, rows, blocks of columns, columns], with zeros where blocks jut out."""
    rows, columns = (block or size for block, size in zip(form.block, weight.shape, strict=True))
    down, across = form.grid(weight.shape)
    padding = (0, across * columns - weight.shape[1], 0, down * rows - weight.shape[0])
    return torch.nn.functional.pad(weight, padding).view(down, rows, across, columns)


def _from_blocks(blocks: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    down, rows, across, columns = blocks.shape
    return blocks.reshape(down * rows, across * columns)[: shape[0], : shape[1]]


def _scales_and_zero_points(blocks: torch.Tensor, form: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales in the weights' dtype, and int8 zero points."""
    least = blocks.amin((1, 3), keepdim=True).clamp(max=0)
    most = blocks.amax((1, 3), keepdim=True).clamp(min=0)
    zero_points = torch.zeros_like(least, dtype=torch.int8)
    if form.symmetric:
        half_range = _FP8_MAX if form.values == "float8_e4m3fn" else (2**form.num_bits - 1) / 2
        scales = divided(torch.maximum(least.abs(), most), half_range)
    else:
        half = 2 ** (form.num_bits - 1)
        scales = divided(most - least, 2 * half - 1)
        zero_points = (-half - least / scales).clamp(-half, half - 1).round().to(torch.int8)
    return torch.where(scales == 0, torch.finfo(scales.dtype).eps, scales), zero_points


def _rounded(scaled: torch.Tensor, form: Format) -> torch.Tensor:
    if form.values == "float8_e4m3fn":
        return scaled.clamp(-_FP8_MAX, _FP8_MAX)
    half = 2 ** (form.num_bits - 1)
    return scaled.clamp(-half, half - 1).round().to(torch.int8)


def _fp8_scales(blocks: torch.Tensor, form: Format) -> torch.Tensor:
    """Return float32 scales, by vLLM's rule."""
    scales = divided(blocks.abs().float().amax((1, 3), keepdim=True).clamp(_LEAST_FP8), _FP8_MAX)
    return torch.exp2(scales.log2().ceil()) if form.powers_of_two else scales


def _as_sglang(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 scales, and values before rounding. Denormals count as zero."""
    given = _normal(blocks.float())
    # Compiled with fast math, SGLang's division by 448 is a product.
    scales = _normal(given.abs().amax((1, 3), keepdim=True) * (1.0 / _FP8_MAX))
    inverses = torch.where(scales == 0, 0.0, 1.0 / scales)
    return scales, (given * inverses).clamp(-_FP8_MAX, _FP8_MAX)


def _normal(tensor: torch.Tensor) -> torch.Tensor:
    """Replace float32 denormals by zeros of the same sign."""
    return torch.where(tensor.abs() < _LEAST_NORMAL, torch.copysign(torch.zeros_like(tensor), tensor), tensor)


def _pack(values: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Pack int8[rows, columns] along rows into int32: made unsigned, the first value in the lowest bits."""
    return in_words((values + (1 << (num_bits - 1))).to(torch.uint8), num_bits)
