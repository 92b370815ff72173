"""Quantises matrices to MXFP4, MXFP8 and NVFP4, bit for bit as compressed-tensors 0.17 does on a CPU.

Sources: ``generate_mx_scales``, ``generate_gparam``, ``cast_to_fp4`` and ``pack_fp4_to_uint8`` of
compressed-tensors; OCP Microscaling Formats, version 1.0, for E8M0 and E2M1.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from weightsync.plan.layout.formats import FP4, Format
from weightsync.quantising.division import divided

_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
_FP4_MAX = 6.0
_LARGEST_EXPONENT = {FP4: 2, "float8_e4m3fn": 8}
"""Exponent of the greatest value of each element type."""

_E8M0_BIAS, _E8M0_NAN = 127, 255
_LEAST_FP8 = 0.125
"""Replaces a scale of zero."""

_UP_TO, _BELOW = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)
"""Midpoints between neighbours in E2M1, rounded to even: `_UP_TO` down, `_BELOW` up."""

_INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def microscale(weight: torch.Tensor, form: Format) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that a checkpoint stores for a matrix, with the last parts of their names.

    The library does not define NaN and infinities. With NaN or an infinity, a group of MXFP4 or MXFP8 has a
    NaN as scale, and an NVFP4 matrix is undefined.

    Args:
        weight: [rows, columns], of bfloat16, float16 or float32, on any device. `Format.stored` accepts its
            shape.
        form: of the rule ``mx`` or ``nvfp4``.

    Yields:
        The tensors of `Format.stored`, in the same order, on the matrix's device.
    """
    groups = weight.reshape(len(weight), -1, form.block[1])
    most = groups.abs().amax(2)
    if form.rule == "mx":
        stored, scales = _power_scales(most, form)
        rest = {}
    else:
        stored, scales, whole = _two_level_scales(most)
        rest = {"weight_global_scale": whole}
    scaled = (groups / scales.unsqueeze(2)).flatten(1)
    if form.packed:
        yield "weight_packed", _pack_fp4(scaled)
    else:
        # The library adds a zero point of 0, which turns -0 to 0.
        yield "weight", (scaled + 0.0).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    yield "weight_scale", stored
    yield from rest.items()


def _power_scales(most: torch.Tensor, form: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Return E8M0 exponents, and their powers of two in the weights' dtype.

    A maximum of 1.75 times a power of two or more counts as the next power.
    """
    mantissa = -int(torch.tensor(torch.finfo(most.dtype).eps).log2())
    bias = 15 if most.dtype == torch.float16 else 127
    bits = most.contiguous().view(_INTEGERS[most.dtype]).to(torch.int32)
    exponents = (bits + (1 << (mantissa - 2))) >> mantissa
    stored = exponents - bias - _LARGEST_EXPONENT[form.values] + _E8M0_BIAS
    stored = torch.where(exponents == 0, 0, stored).clamp(0)
    scales = torch.exp2((stored - _E8M0_BIAS).double()).to(most.dtype)
    stored = torch.where(scales == 0, _E8M0_BIAS, stored)  # float16 has no such power: its scale is 1
    scales = torch.where(scales == 0, 1.0, scales)
    finite = most.isfinite()
    stored = torch.where(finite, stored, _E8M0_NAN).to(torch.uint8)
    return stored, torch.where(finite, scales, torch.nan)


def _two_level_scales(most: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return E4M3 scales for groups, the groups' divisors, and the tensor's float32 scale [1]."""
    whole = _FP8_MAX * _FP4_MAX / most.amax().clamp(min=torch.finfo(most.dtype).tiny)
    whole = whole.nan_to_num(nan=1.0, posinf=1.0, neginf=1.0).float().reshape(1)
    scales = divided(most, _FP4_MAX) * whole
    stored = scales.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    stored = torch.where(stored.float() == 0, _LEAST_FP8, stored.float()).to(torch.float8_e4m3fn)
    return stored, stored.float() / whole, whole


def _pack_fp4(values: torch.Tensor) -> torch.Tensor:
    """Round [rows, columns] to E2M1 and pack pairs along rows, the first value in the lower bits."""
    size = values.abs()
    codes = torch.zeros_like(size, dtype=torch.uint8)
    for middle in _UP_TO:
        codes += size > middle
    for middle in _BELOW:
        codes += size >= middle
    codes |= (values < 0).to(torch.uint8) << 3
    return codes[:, ::2] | (codes[:, 1::2] << 4)
