"""The names of mbridge and of Megatron-Bridge, as a family.

Both say what a parameter of Megatron's is called in a checkpoint. How it is cut stays ours: a bridge gathers
whole parameters, and a part of one has to be found in place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weightsync.errors import ConfigError
from weightsync.sources.megatron.cuts import Cut
from weightsync.sources.megatron.rules import Family, Rule, RuleMatch
from weightsync.sources.tested import warn_untested

_LAYER, _EXPERT = 1_000_003, 1_000_033
"""Numbers that a bridge is asked about. They are found again in its answer, and no model has so many."""

_ALIASES = (
    (re.compile(r"experts\.local_experts\.(\d+)\.(linear_fc[12])\.(\w+)$"), r"experts.\2.\3\1"),
    (re.compile(r"\.input_layernorm\.weight$"), ".self_attention.linear_qkv.layer_norm_weight"),
    (re.compile(r"\.pre_mlp_layernorm\.weight$"), ".mlp.linear_fc1.layer_norm_weight"),
)
"""What Megatron's own modules are called in Transformer Engine's, whose names bridges know best."""

_COPIES = {
    "AutoMapping",
    "ColumnParallelMapping",
    "DirectMapping",
    "GatedMLPMapping",
    "QKVMapping",
    "ReplicatedMapping",
    "RowParallelMapping",
}
"""Mappings of Megatron-Bridge that leave values and their order as they are."""

_CHANGES = (
    "it changes values or their order on the way to the checkpoint, so the parameter is not what it holds"
)
_REMEDY = "give a Family with rules for its parameters, as docs/trainers.md shows"


@dataclass(frozen=True)
class BridgedFamily(Family):
    """A family that asks a bridge where it has no rule of its own.

    Attributes:
        ask: returns the checkpoint's names of what a parameter holds, none if it is unknown. Numbers of
            layers and experts in the parameter's name are those of the whole model.
        cuts: how parameters are cut, by their names with ``{layer}`` and ``{expert}``.
    """

    ask: Callable[[str], Sequence[str]] = field(repr=False)
    cuts: Mapping[str, Cut] = field(repr=False)

    def extended(self, name: str, *rules: Rule) -> BridgedFamily:
        """Return the family `name`, in which these rules count before the bridge."""
        return replace(self, name=name, rules=super().extended(name, *rules).rules)

    def match(self, parameter: str) -> RuleMatch:
        """Return a rule of the family's own, or one that is made of the bridge's answer.

        Raises:
            ConfigError: the bridge does not know the parameter, or changes its values.
        """
        if own := self.find(parameter):
            return own
        layer = re.match(r"decoder\.layers\.(\d+)", parameter)
        pattern, expert = _numbered(parameter, layer)
        names = self._names(parameter, pattern)
        cut = self.cuts.get(pattern) or {2: Cut.GATED, 3: Cut.QKV}.get(len(names), Cut.WHOLE)
        return RuleMatch(Rule(pattern, tuple(names), cut), layer.end() if layer else 0, expert)

    def tensor(self, parameter: str) -> str | None:
        """Return the checkpoint's name of a parameter outside of all layers, or None if there is none."""
        return super().tensor(parameter) or next(iter(self.ask(parameter)), None)

    def _names(self, parameter: str, pattern: str) -> list[str]:
        asked = pattern.format(layer=_LAYER, expert=_EXPERT)
        for name in dict.fromkeys((asked, _aliased(asked))):
            if found := self.ask(name):
                fields = (str(_LAYER), "{layer}"), (str(_EXPERT), "{expert}")
                return [each.replace(*fields[0]).replace(*fields[1]) for each in found]
        remedy = "add a rule by extended(), as docs/trainers.md shows, or name it in exclude"
        raise ConfigError(f"a name of {self.name}", parameter, remedy)


def bridged_family(bridge: Any, cuts: Mapping[str, Cut]) -> BridgedFamily:  # noqa: ANN401 - one of two libraries'
    """Return the family of a bridge: mbridge's, or Megatron-Bridge's ``AutoBridge``.

    Raises:
        ConfigError: it is neither, or it changes values.
    """
    title = f"{type(bridge).__module__}.{type(bridge).__qualname__}"
    if hasattr(bridge, "_weight_name_mapping_mcore_to_hf"):
        return BridgedFamily(title, (), _ask_mbridge(bridge, title), cuts)
    if hasattr(bridge, "_model_bridge"):
        return BridgedFamily(title, (), _ask_registry(bridge._model_bridge.mapping_registry()), cuts)
    remedy = "give a model_type, a Family, or a bridge of mbridge or Megatron-Bridge"
    raise ConfigError("family", title, remedy)


def config_of(bridge: Any) -> Any:  # noqa: ANN401 - transformers' configuration
    """Return the checkpoint's configuration that a bridge was made of."""
    if hasattr(bridge, "hf_config"):
        return bridge.hf_config
    made_of = getattr(bridge, "hf_pretrained", None)
    return getattr(made_of, "config", made_of)


def _ask_mbridge(bridge: Any, title: str) -> Callable[[str], Sequence[str]]:  # noqa: ANN401 - mbridge's
    """Return the names of mbridge. It has no public call for them."""
    warn_untested("mbridge")
    converts = type(bridge)._weight_to_hf_format.__module__
    if converts not in ("mbridge.core.bridge", "mbridge.models.deepseek_v3"):
        raise ConfigError("family", title, f"{_REMEDY}: {_CHANGES}")

    def ask(parameter: str) -> Sequence[str]:
        try:
            names: Sequence[str] = bridge._weight_name_mapping_mcore_to_hf(parameter)
        # What mbridge raises for a name that it does not know.
        except (NotImplementedError, AssertionError, IndexError):
            return ()
        return names

    return ask


def _ask_registry(registry: Any) -> Callable[[str], Sequence[str]]:  # noqa: ANN401 - Megatron-Bridge's
    def ask(parameter: str) -> Sequence[str]:
        mapping = registry.megatron_to_hf_lookup(parameter)
        if mapping is None:
            return ()
        kind = type(mapping).__name__
        if kind not in _COPIES or getattr(mapping, "permute_dims", None):
            raise ConfigError(f"{kind} of {parameter}", mapping.hf_param, f"{_REMEDY}: {_CHANGES}")
        found = mapping.hf_param
        return (found,) if isinstance(found, str) else tuple(found.values())

    return ask


def _numbered(parameter: str, layer: re.Match[str] | None) -> tuple[str, int]:
    """Return a parameter's name with ``{layer}`` and ``{expert}``, and the expert's number, or 0.

    Layers that predict more tokens keep their number: bridges know them by it.
    """
    text = f"decoder.layers.{{layer}}{parameter[layer.end() :]}" if layer else parameter
    for pattern in (r"(\.local_experts\.)(\d+)(\..+)", r"(\.experts\.linear_fc[12]\.[a-z]+)(\d+)($)"):
        if found := re.search(pattern, text):
            start, number, rest = found.groups()
            return f"{text[: found.start()]}{start}{{expert}}{rest}", int(number)
    return text, 0


def _aliased(parameter: str) -> str:
    for pattern, alias in _ALIASES:
        parameter = pattern.sub(alias, parameter)
    return parameter
