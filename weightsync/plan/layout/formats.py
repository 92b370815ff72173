"""Formats of quantised weights, read from the ``quantization_config`` of a model's config.json.

Sources: compressed-tensors' ``QuantizationConfig`` of 0.17, and the keys of vLLM's ``Fp8Config``,
``AutoAWQConfig`` and ``AutoGPTQConfig`` of 0.24 and 0.32.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

from weightsync.errors import ConfigError, PlanError, nearest
from weightsync.plan.layout.segment import TensorMeta

FIELD = "quantization_config"
_METHODS = ("awq", "compressed-tensors", "fp8", "gptq")
_LAYOUTS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
FP4 = "float4_e2m1fn"
TOGETHER = ("sglang_experts", "vllm_online")
"""Rules of a scale that several matrices may share."""

ONLINE = ("sglang", *TOGETHER)
"""Rules by which SGLang and vLLM quantise when they start. No checkpoint has them."""

MICROSCALING = ("mx", "nvfp4")
"""Rules for small groups of FP4 or FP8 values with scales of 8 bits."""

NEAREST = ("awq", "gptq")
"""Rules that round to the nearest value, where the format's own tools calibrate by data."""

_GROUP_SIZES = (128, 64, 32, -1)
"""Columns of a group of AWQ and GPTQ; -1 stands for all."""

_AWQ_LEFT, _GPTQ_LAYERS = "modules_to_not_convert", "modules_in_block_to_quantize"

_SMALL_GROUPS = {
    "mxfp4-pack-quantized": ("mx", FP4, 32, "uint8"),
    "mxfp8-quantized": ("mx", "float8_e4m3fn", 32, "uint8"),
    "nvfp4-pack-quantized": ("nvfp4", FP4, 16, "float8_e4m3fn"),
}
"""Layouts of compressed-tensors: the rule, the values, columns of a group, and the scales' dtype."""
_STRATEGIES = ("block", "channel", "group", "tensor")
_ORDERS = (None, False, "static", "weight")
"""Orders of columns that leave them where they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The stored form of one quantised matrix [rows, columns]: rounded values, and scales.

    Attributes:
        rule: the arithmetic that makes the bytes: of ``compressed-tensors``, or ``fp8`` (vLLM's blocks);
            ``sglang`` and ``sglang_experts`` (rows, and whole experts, as SGLang quantises them when it
            starts) and ``vllm_online`` (a rank's whole layer, as vLLM does), which no checkpoint has;
            ``mx`` (E8M0 exponents as scales) or ``nvfp4`` (E4M3 scales, and a float32 one for the tensor);
            ``awq`` or ``gptq``, which store the transposed matrix.
        values: int4, int8, float8_e4m3fn or float4_e2m1fn.
        block: rows and columns that share a scale. 0 stands for all rows or columns.
        packed: whether an int32 word holds several values, the first in the lowest bits. FP4 values are
            packed in pairs, in uint8.
        symmetric: whether zero is stored as 0. If not, blocks have zero points, too; only packed blocks do.
        powers_of_two: whether scales are rounded up to powers of two (UE8M0).
        together: the names of layers beside each other that share scales, such as ``gate_proj`` and
            ``up_proj`` of an expert. All these layers have formats with as many blocks. Empty: the layer has
            its own scales.
    """

    rule: str
    values: str
    block: tuple[int, int]
    packed: bool = False
    symmetric: bool = True
    powers_of_two: bool = False
    together: tuple[str, ...] = ()

    @property
    def num_bits(self) -> int:
        """The bits of a value."""
        return 4 if self.values in ("int4", FP4) else 8

    @property
    def scale_suffix(self) -> str:
        """The last part of the name of the scales."""
        if self.rule in NEAREST:
            return "scales"
        return "weight_scale_inv" if self.rule == "fp8" else "weight_scale"

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The last parts of the names of the tensors that `stored` returns."""
        if not self.packed:
            return "weight", self.scale_suffix
        if self.rule in NEAREST:
            return ("qweight", "qzeros", "scales", *(("g_idx",) if self.rule == "gptq" else ()))
        if self.rule in MICROSCALING:
            whole = ("weight_global_scale",) if self.rule == "nvfp4" else ()
            return ("weight_packed", self.scale_suffix, *whole)
        zero_points = () if self.symmetric else ("weight_zero_point",)
        return ("weight_packed", self.scale_suffix, *zero_points, "weight_shape")

    def grid(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the numbers of blocks along rows and columns of a matrix of `shape`."""
        rows, columns = (
            -(-size // block) if block else 1 for size, block in zip(shape, self.block, strict=True)
        )
        return rows, columns

    def stored(self, weight: TensorMeta) -> tuple[TensorMeta, ...]:
        """Return the tensors that a checkpoint has in place of `weight`, ``….weight`` [rows, columns].

        Raises:
            PlanError: it is no such matrix, or groups or words do not divide it.
        """
        self._check(weight)
        rows, columns = weight.shape
        base = weight.name.removesuffix("weight")
        if self.rule in NEAREST:
            packed = self._transposed(weight)
            return tuple(TensorMeta(base + suffix, *packed[suffix]) for suffix in self.suffixes)
        scales = (1,) if self.block == (0, 0) else self.grid(weight.shape)
        dtypes = {"mx": "uint8", "nvfp4": "float8_e4m3fn"} | dict.fromkeys(("fp8", *ONLINE), "float32")
        words = ("uint8", columns // 2) if self.values == FP4 else ("int32", self._num_words(columns))
        parts: dict[str, tuple[str, tuple[int, ...]]] = {
            "weight": (self.values, weight.shape),
            "weight_packed": (words[0], (rows, words[1])),
            "weight_global_scale": ("float32", (1,)),
            self.scale_suffix: (dtypes.get(self.rule, weight.dtype), scales),
            "weight_zero_point": ("int32", (self._num_words(rows), scales[-1])),
            "weight_shape": ("int64", (2,)),
        }
        return tuple(TensorMeta(base + suffix, *parts[suffix]) for suffix in self.suffixes)

    def _transposed(self, weight: TensorMeta) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return dtypes and shapes of AWQ's or GPTQ's tensors: AWQ packs along rows, GPTQ along columns."""
        rows, columns = weight.shape
        groups, words = self.grid(weight.shape)[1], self._num_words(rows)
        values = (columns, words) if self.rule == "awq" else (self._num_words(columns), rows)
        return {
            "qweight": ("int32", values),
            "qzeros": ("int32", (groups, words)),
            "scales": (weight.dtype, (groups, rows)),
            "g_idx": ("int32", (columns,)),
        }

    def _num_words(self, num_values: int) -> int:
        return -(-num_values // (32 // self.num_bits))

    def _check(self, weight: TensorMeta) -> None:
        if not weight.name.endswith(".weight") or len(weight.shape) != 2:
            raise PlanError(
                weight.name,
                f"shape {weight.shape} is none of a matrix, as {self} needs; list its module as ignored",
            )
        (rows, columns), group = weight.shape, self.block[1]
        if self.block[0] == 1 and group and columns % group:
            fits = "that does"
            if self.rule in NEAREST:
                fits = f"of {next(size for size in _GROUP_SIZES if columns % size == 0)}"
            problem = f"groups of {group} do not divide its {columns} columns; give a group_size {fits}"
            raise PlanError(weight.name, problem)
        word = 32 // self.num_bits
        if self.rule in NEAREST and (rows % word or (self.rule == "gptq" and columns % word)):
            problem = f"words of {word} values do not divide its shape {weight.shape}, as {self} needs"
            raise PlanError(weight.name, f"{problem}; serve it in another format")

    def __str__(self) -> str:
        values = f"{self.values} ({self.rule.upper()})" if self.rule in NEAREST else self.values
        rows, columns = (size or "all" for size in self.block)
        scale = "a scale" if self.symmetric else "a scale and a zero point"
        whole = ", and one for all" if self.rule == "nvfp4" else ""
        shared = f" of {' and '.join(self.together)} together" if self.together else ""
        return f"{values} with {scale} for {rows} x {columns}{whole}{shared}"

    def sharing(self, weight: str) -> tuple[str, ...]:
        """Return the names of all matrices that share their scales with `weight`, itself among them."""
        if not self.together:
            return (weight,)
        module = weight.removesuffix(".weight").rpartition(".")[0]
        return tuple(f"{module}.{last}.weight" for last in self.together)


def unproven(weight: str, form: Format) -> str:
    """Return why no engine is offered `weight` in its format; "" if engines accept it."""
    if form.rule in MICROSCALING:
        return "no engine has been shown to take this format"
    is_expert = ".experts." in weight
    return "no engine has been shown to take experts of it" if form.rule in NEAREST and is_expert else ""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Linear layers of one format. `targets` are ``Linear``, paths, or ``re:`` and an expression."""

    targets: tuple[str, ...]
    format: Format


@dataclass(frozen=True, slots=True)
class Quantization:
    """Which weights of linear layers a checkpoint quantises, and how. Empty, it quantises none."""

    groups: tuple[LayerGroup, ...] = ()
    ignored: tuple[str, ...] = ()

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Quantization:
        """Read a ``quantization_config``.

        Raises:
            ConfigError: a format that is not known here, or one with scales that a bf16 trainer cannot give.
        """
        try:
            found = cls._read(config)
            for patterns in (found.ignored, *(group.targets for group in found.groups)):
                _sorted_out(patterns)
        except (AttributeError, TypeError, re.error) as error:  # a number in place of a list, for example
            remedy = f"give it as the config.json of a quantised model has it: {error}"
            raise ConfigError(FIELD, config, remedy) from error
        return found

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> Quantization:
        method = config.get("quant_method")
        if method == "compressed-tensors":
            return cls(tuple(_read_groups(config)), tuple(config.get("ignore") or ()))
        if method == "fp8":
            ignored = config.get("modules_to_not_convert") or config.get("ignored_layers") or ()
            return cls((LayerGroup(("Linear",), _read_fp8(config)),), ("lm_head", *ignored))
        if method == "awq":
            return cls(
                (LayerGroup(("Linear",), _read_awq(config)),), ("lm_head", *_paths_with(config, _AWQ_LEFT))
            )
        if method == "gptq":
            targets = _paths_with(config, _GPTQ_LAYERS) or ("Linear",)
            return cls((LayerGroup(targets, _read_gptq(config)),), ("lm_head",))
        _refuse("quant_method", method, nearest(str(method), _METHODS))

    def of(self, weight: str) -> Format | None:
        """Return the format of a linear layer's ``….weight``, None if it is not quantised."""
        path = weight.removesuffix(".weight")
        if _matches(path, self.ignored):
            return None
        return next((each.format for each in self.groups if _matches(path, each.targets)), None)


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    names, expressions = _sorted_out(patterns)
    return path in names or "Linear" in names or any(each.match(path) for each in expressions)


@cache
def _sorted_out(patterns: tuple[str, ...]) -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
    """Return plain names, then compiled expressions: each is looked for in the names of all tensors."""
    expressions = tuple(re.compile(each[3:]) for each in patterns if each.startswith("re:"))
    return frozenset(each for each in patterns if not each.startswith("re:")), expressions


def _read_groups(config: Mapping[str, Any]) -> list[LayerGroup]:
    for key in ("transform_config", "sparsity_config"):
        if config.get(key) and config[key].get("format") != "dense":
            _refuse(key, config[key], "leave it out: a bf16 trainer has no such weights")
    groups: Mapping[str, Mapping[str, Any]] = config.get("config_groups") or {}
    if not groups:
        _refuse("config_groups", groups, "give one group with its targets and weights")
    found = []
    for name, group in groups.items():
        where = f"config_groups.{name}"
        _check_activations(where, group)
        layout = group.get("format") or config.get("format")
        if layout not in (*_LAYOUTS, *_SMALL_GROUPS):
            _refuse(f"{where}.format", layout, nearest(str(layout), (*_LAYOUTS, *_SMALL_GROUPS)))
        targets, weights = group.get("targets"), group.get("weights")
        if not targets:
            _refuse(f"{where}.targets", targets, "[Linear], or paths of modules")
        if weights:
            read = _read_small_groups if layout in _SMALL_GROUPS else _read_weights
            found.append(LayerGroup(tuple(targets), read(f"{where}.weights", layout, weights)))
    return found


def _check_activations(where: str, group: Mapping[str, Any]) -> None:
    for key in ("input_activations", "output_activations"):
        if group.get(key) and group[key].get("dynamic") is not True:  # "local" has a calibrated scale, too
            remedy = "true: scales that data calibrates are no weights of a trainer"
            _refuse(f"{where}.{key}.dynamic", group[key].get("dynamic", False), remedy)


def _read_weights(where: str, layout: str, weights: Mapping[str, Any]) -> Format:
    packed = layout == "pack-quantized"
    kind, num_bits = weights.get("type", "int"), weights.get("num_bits", 8)
    values = {("int", 4): "int4", ("int", 8): "int8", ("float", 8): "float8_e4m3fn"}.get((kind, num_bits))
    fits = {"pack-quantized": ("int4", "int8"), "int-quantized": ("int8",)}.get(
        layout, ("float8_e4m3fn",) if layout == "float-quantized" else ("int8", "float8_e4m3fn")
    )
    if values not in fits:
        _refuse(where, f"{kind}{num_bits}", f"{layout} holds {' or '.join(fits)}")
    symmetric = bool(weights.get("symmetric", True))
    if not symmetric and not packed:
        _refuse(f"{where}.symmetric", False, "true, or pack-quantized as the format")
    if weights.get("actorder") not in _ORDERS:
        _refuse(
            f"{where}.actorder", weights["actorder"], "leave it out: columns are not put in another order"
        )
    if weights.get("scale_dtype"):
        _refuse(
            f"{where}.scale_dtype", weights["scale_dtype"], "leave it out: scales have the weights' dtype"
        )
    return Format(
        rule="compressed-tensors",
        values=values,
        block=_read_block(where, weights),
        packed=packed,
        symmetric=symmetric,
    )


def _read_small_groups(where: str, layout: str, weights: Mapping[str, Any]) -> Format:
    rule, values, group, scales = _SMALL_GROUPS[layout]
    wanted = {"type": "float", "num_bits": 4 if values == FP4 else 8, "group_size": group, "symmetric": True}
    for key, value in wanted.items():
        if weights.get(key, value) != value:
            _refuse(f"{where}.{key}", weights[key], f"{value}, as {layout} has it")
    if str(weights.get("scale_dtype") or scales).removeprefix("torch.") != scales:
        _refuse(f"{where}.scale_dtype", weights["scale_dtype"], f"{scales}, as {layout} has it")
    return Format(rule=rule, values=values, block=(1, group), packed=values == FP4)


def _read_block(where: str, weights: Mapping[str, Any]) -> tuple[int, int]:
    group, block = weights.get("group_size"), weights.get("block_structure")
    strategy = weights.get("strategy") or ("group" if group and group > 0 else "tensor")
    if strategy == "block" and block:
        return _pair(f"{where}.block_structure", block)
    if strategy == "group" and group and group > 0:
        return 1, int(group)
    if strategy in ("tensor", "channel"):
        return (0, 0) if strategy == "tensor" else (1, 0)
    if strategy in _STRATEGIES:
        key = "block_structure" if strategy == "block" else "group_size"
        _refuse(f"{where}.{key}", weights.get(key), f"a size is needed where strategy is {strategy}")
    _refuse(f"{where}.strategy", strategy, nearest(str(strategy), _STRATEGIES))


def _read_fp8(config: Mapping[str, Any]) -> Format:
    block = config.get("weight_block_size")
    if not block:
        remedy = (
            "[128, 128]; for one scale for each tensor leave quantization_config out, "
            "and start the engine with quantization='fp8'"
        )
        _refuse("weight_block_size", block, remedy)
    if config.get("activation_scheme", "dynamic") != "dynamic":
        remedy = "dynamic: scales that data calibrates are no weights of a trainer"
        _refuse("activation_scheme", config["activation_scheme"], remedy)
    scales = config.get("scale_fmt")
    if scales not in (None, "float", "ue8m0"):
        _refuse("scale_fmt", scales, nearest(str(scales), ("float", "ue8m0")))
    return Format(
        rule="fp8",
        values="float8_e4m3fn",
        block=_pair("weight_block_size", block),
        powers_of_two=scales == "ue8m0",
    )


def _read_awq(config: Mapping[str, Any]) -> Format:
    _require_number(config, "bits", (4,))
    _require(config, "zero_point", (True,), "AWQ has zero points; quant_method: gptq has none")
    _require(config, "version", ("gemm", None), "vLLM reads values in this order")
    return _read_nearest(config, "int4", symmetric=False)


def _read_gptq(config: Mapping[str, Any]) -> Format:
    _require_number(config, "bits", (4, 8))
    _require(config, "sym", (True,), "vLLM serves GPTQ without zero points; quant_method: awq has them")
    _require(config, "desc_act", (False, None), "an order of columns comes from data that calibrates")
    _require(config, "checkpoint_format", ("gptq", None), "other layouts are not known here")
    if config.get("dynamic"):
        _refuse("dynamic", config["dynamic"], f"leave it out; {_GPTQ_LAYERS} says what is quantised")
    return _read_nearest(config, f"int{config['bits']}", symmetric=True)


def _read_nearest(config: Mapping[str, Any], values: str, *, symmetric: bool) -> Format:
    _require_number(config, "group_size", _GROUP_SIZES)
    _require(config, "lm_head", (False, None), "the output head stays as it is")
    block = (1, max(config["group_size"], 0))
    return Format(rule=config["quant_method"], values=values, block=block, packed=True, symmetric=symmetric)


def _require(config: Mapping[str, Any], key: str, valid: Sequence[object], why: str) -> None:
    if config.get(key) not in valid:
        _refuse(key, config.get(key), f"{str(valid[0]).lower()}: {why}")


def _require_number(config: Mapping[str, Any], key: str, valid: Sequence[int]) -> None:
    value = config.get(key)
    if value not in valid:
        near = min(valid, key=lambda each: abs(each - value)) if isinstance(value, int) else valid[0]
        _refuse(key, value, f"{near}; valid: {', '.join(map(str, valid))}")


def _paths_with(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return expressions for paths with one of the names under `key`, which GPTQ may have in lists."""
    given = config.get(key) or ()
    names = [name for each in given for name in ([each] if isinstance(each, str) else each)]
    return tuple(f"re:.*{re.escape(name)}" for name in names)


def _pair(where: str, block: Sequence[int]) -> tuple[int, int]:
    if len(block) != 2 or min(block) < 1:
        _refuse(where, block, "two sizes of 1 or more, such as [128, 128]")
    return int(block[0]), int(block[1])


def _refuse(key: str, value: object, remedy: str) -> NoReturn:
    raise ConfigError(f"{FIELD}.{key}", value, remedy)
