"""What Megatron's parameters are called in a checkpoint: rules, and families of models that have the same."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from weightsync.errors import ConfigError
from weightsync.plan.layout.segment import suggest
from weightsync.sources.megatron.cuts import Cut

_FIELDS = ("layer", "expert")


@dataclass(frozen=True)
class Rule:
    """What one parameter of Megatron's holds, and how it is cut.

    ``{layer}`` and ``{expert}`` stand for numbers. In `parameter` they are those of the pipeline stage and of
    the rank; in `tensors` those of the whole model, from 0::

        Rule("decoder.layers.{layer}.self_attention.linear_proj.weight",
             "model.layers.{layer}.self_attn.o_proj.weight", Cut.COLUMNS)

    Attributes:
        parameter: its name in one ``GPTModel``, such as ``decoder.layers.{layer}.mlp.router.weight``.
        tensors: the checkpoint's names of what it holds, in the order of `cut`; one may be a plain string.
            With ``{expert}`` in them, the parameter is an expert's.
        cut: how it is cut over ranks.

    Raises:
        ConfigError: `cut` needs another number of names, or a name has another number in braces.
    """

    parameter: str
    tensors: tuple[str, ...] | str
    cut: Cut = Cut.WHOLE

    def __post_init__(self) -> None:
        if len(self.names) != self.cut.num_tensors:
            raise ConfigError("tensors", self.tensors, f"{self.cut} needs {self.cut.num_tensors} names")
        for name in (self.parameter, *self.names):
            if unknown := set(re.findall(r"\{(.*?)\}", name)) - {*_FIELDS}:
                raise ConfigError("rule", name, f"{{{unknown.pop()}}}: give {{layer}} or {{expert}}")

    @property
    def names(self) -> tuple[str, ...]:
        """The names in `tensors`, of which there may be one."""
        return (self.tensors,) if isinstance(self.tensors, str) else self.tensors

    @property
    def is_expert(self) -> bool:
        """Return True if it is a routed expert's, which is cut over the expert-tensor-parallel group."""
        return "{expert}" in self.names[0]

    def pattern(self) -> str:
        """Return `parameter` as a regular expression with the groups ``layer`` and ``expert``."""
        text = re.escape(self.parameter)
        for each in _FIELDS:
            text = text.replace(rf"\{{{each}\}}", rf"(?P<{each}>\d+)")
        return text


@dataclass(frozen=True, slots=True)
class RuleMatch:
    """A rule that names a parameter, and the numbers in the parameter's name.

    Attributes:
        rule: the rule.
        layer_end: where the layer's name, such as ``decoder.layers.3``, ends in the parameter's, or 0.
        expert: number of the expert on this rank; 0 if the parameter is no single expert's.
    """

    rule: Rule
    layer_end: int
    expert: int


@dataclass(frozen=True)
class Family:
    """Models that have the same names.

    Make one of your own from a known one. Its rules count before those that it has for the same
    parameter::

        mine = FAMILIES["llama"].extended(
            "mine", Rule("decoder.layers.{layer}.mlp.router.weight", "model.layers.{layer}.mlp.gate.weight")
        )
        local_weights(model, mine, vocab_size=32000)

    Attributes:
        name: what errors call it.
        rules: one for each parameter. Those of parameters that a model lacks do no harm.
    """

    name: str
    rules: tuple[Rule, ...] = field(repr=False)

    def extended(self, name: str, *rules: Rule) -> Family:
        """Return the family `name` with these rules, too. They replace those of the same parameters."""
        known: Mapping[str, Rule] = {rule.parameter: rule for rule in (*self.rules, *rules)}
        return Family(name, tuple(known.values()))

    def match(self, parameter: str) -> RuleMatch:
        """Return the rule for a parameter's name in one ``GPTModel``.

        Raises:
            ConfigError: no rule names it.
        """
        if match := self.find(parameter):
            return match
        hint = suggest(parameter, [rule.parameter for rule in self.rules])
        remedy = f"add a rule, as docs/trainers.md shows, or name it in exclude; {hint}"
        raise ConfigError(f"a rule of the family {self.name}", parameter, remedy)

    def find(self, parameter: str) -> RuleMatch | None:
        """Return the rule for a parameter's name in one ``GPTModel``, or None."""
        for pattern, rule in self._patterns:
            if found := pattern.fullmatch(parameter):
                groups = found.groupdict()
                layer_end = found.end("layer") if groups.get("layer") else 0
                return RuleMatch(rule, layer_end, int(groups.get("expert") or 0))
        return None

    def tensor(self, parameter: str) -> str | None:
        """Return the checkpoint's name of a parameter outside of all layers, or None if no rule names it."""
        return next((rule.names[0] for rule in self.rules if rule.parameter == parameter), None)

    @cached_property
    def _patterns(self) -> tuple[tuple[re.Pattern[str], Rule], ...]:
        return tuple((re.compile(rule.pattern()), rule) for rule in self.rules)
