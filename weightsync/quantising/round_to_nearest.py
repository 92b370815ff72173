"""Quantises matrices to AWQ and GPTQ, by the least and greatest value of each group.

AutoAWQ and GPTQModel choose scales and values by calibration data, which a trainer's weights do not have. The
bytes equal the bytes of vLLM's ``quantize_weights``, ``awq_pack`` and ``gptq_pack`` on a CPU, with two
exceptions. The range of an AWQ group is widened to include zero: otherwise its zero point could not be
stored. A GPTQ group of zeros has a scale, since vLLM would divide by zero.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from weightsync.plan.layout.formats import Format
from weightsync.quantising.division import divided
from weightsync.quantising.words import in_words

_LEAST_RANGE = 1e-5
"""The least range of a group with a zero point, in vLLM and AutoAWQ."""

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The row of each of a word's eight values, from the lowest bits."""


def round_to_nearest(weight: torch.Tensor, form: Format) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that a checkpoint stores for a matrix, with the last parts of their names.

    A group with NaN or infinities has a scale that is not finite. NaN become zeros.

    Args:
        weight: [rows, columns], in a floating dtype, on any device. `Format.stored` accepts the shape.
        form: of the rule ``awq`` or ``gptq``.

    Yields:
        The tensors of `Format.stored`, in the same order, on the matrix's device.
    """
    groups = weight.reshape(len(weight), -1, form.block[1] or weight.shape[1])
    scales, zero_points = _scales_and_zero_points(groups, form)
    values = _rounded(groups, scales, zero_points, form.num_bits).flatten(1)
    zero_points = zero_points.squeeze(2).T
    if form.rule == "awq":
        yield "qweight", in_words(_interleaved(values.T), form.num_bits)
        yield "qzeros", in_words(_interleaved(zero_points), form.num_bits)
    else:
        yield "qweight", in_words(values, form.num_bits).T.contiguous()
        yield "qzeros", in_words(zero_points - 1, form.num_bits)  # as in the first version of the format
    yield "scales", scales.squeeze(2).T.contiguous()
    if form.rule == "gptq":
        columns = torch.arange(weight.shape[1], dtype=torch.int32, device=weight.device)
        yield "g_idx", columns // groups.shape[2]


def _scales_and_zero_points(groups: torch.Tensor, form: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [rows, groups, 1]: scales in the weights' dtype, and uint8 zero points."""
    least, most = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    half = 2 ** (form.num_bits - 1)
    if form.symmetric:
        scales = torch.maximum(divided(most, half - 1).abs(), divided(least, -half).abs())
        scales = torch.where(scales == 0, torch.finfo(scales.dtype).eps, scales)
        return scales, torch.full_like(scales, half, dtype=torch.uint8)
    least, most = least.clamp(max=0), most.clamp(min=0)
    scales = divided((most - least).clamp(min=_LEAST_RANGE), 2 * half - 1)
    zero_points = (least / scales).abs().round().clamp(0, 2 * half - 1)
    return scales, zero_points.nan_to_num(0.0).to(torch.uint8)


def _rounded(
    groups: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor, num_bits: int
) -> torch.Tensor:
    """Return uint8 values, relative to zero points."""
    most = 2**num_bits - 1
    steps = (groups / scales).round().clamp(-most, most).nan_to_num(0.0).to(torch.int16)
    return (steps + zero_points).clamp(0, most).to(torch.uint8)


def _interleaved(values: torch.Tensor) -> torch.Tensor:
    """Put columns in the order in which AWQ packs them."""
    order = torch.tensor(_AWQ_ORDER, device=values.device)
    return values.reshape(len(values), -1, len(_AWQ_ORDER))[:, :, order].flatten(1)
