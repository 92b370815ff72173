"""Builds transformers' model of a folder, from the configuration that is stored there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from weightsync.engines.serving.texts import Tokenizer
from weightsync.errors import ConfigError
from weightsync.memory.tensors import named_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_KINDS = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM", "AutoModel")
"""Transformers' classes that choose a model by configuration, in the order of asking."""

_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json")

_MOST = 300
"""Characters of an error of transformers, which may have a paragraph or hundreds of names."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """The place of a model's own configuration. An engine may have changed its copy.

    Attributes:
        path: a folder, or a name on the hub.
        trust_remote_code: run the code that comes with the model, if it has any.
        revision: of a model on the hub.
        overrides: fields of the configuration that a user has changed.
        change: changes the configuration after that.
    """

    path: str
    trust_remote_code: bool = False
    revision: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[Any], Any] | None = None

    def config(self) -> PreTrainedConfig:
        """Read the configuration. Raises ConfigError if transformers does not know the model's type."""
        return self._read()[0]

    def has_tokenizer(self) -> bool:
        """Return whether the folder has a tokenizer's files. A hub is not asked."""
        return any((Path(self.path) / name).exists() for name in _TOKENIZERS)

    def tokenizer(self) -> Tokenizer | None:
        """Read the tokenizer, if the folder has one."""
        import transformers

        if not self.has_tokenizer():
            return None
        found: Tokenizer = transformers.AutoTokenizer.from_pretrained(
            self.path, trust_remote_code=self.trust_remote_code, revision=self.revision
        )
        return found

    def end_tokens(self) -> list[int]:
        """Return the tokens that end a text: the folder's own, or else the configuration's."""
        import transformers

        try:
            stored = transformers.GenerationConfig.from_pretrained(self.path, revision=self.revision)
        except OSError:  # there is no generation_config.json
            stored = transformers.GenerationConfig.from_model_config(self.config())
        ends = stored.eos_token_id
        return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)

    def build(self, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
        """Build the model, with random weights. Raises ConfigError if transformers has no class for it."""
        config, kind = self._read()
        with torch.device(device):
            if kind:
                model: PreTrainedModel = kind._from_config(config, dtype=dtype)
            else:
                auto = self._auto(config)
                model = auto.from_config(config, dtype=dtype, trust_remote_code=self.trust_remote_code)
        keep_float32(model, dtype)
        return model

    def _read(self) -> tuple[PreTrainedConfig, type[PreTrainedModel] | None]:
        """Return the configuration, and the class that it names, if transformers has that itself."""
        import transformers

        of_hub = {"revision": self.revision} if self.revision else {}
        try:
            stored, _ = transformers.PreTrainedConfig.get_config_dict(self.path, **of_hub)
            has_code = self.trust_remote_code and stored.get("auto_map")
            kind = None if has_code else _named_class({**stored, **self.overrides})
            given = {**of_hub, **self.overrides}
            if kind is None:
                given["trust_remote_code"] = self.trust_remote_code
            reader = kind.config_class if kind else transformers.AutoConfig
            config = reader.from_pretrained(self.path, **given)
        except Exception as error:  # transformers, the hub and a model's own code raise many kinds
            raise ConfigError("model", self.path, _remedy(str(error))) from error
        return self.change(config) if self.change else config, kind

    def _auto(self, config: Any) -> Any:  # noqa: ANN401 - transformers'
        """Return the first of transformers' classes that maps the type of `config`."""
        import transformers

        mapped: Mapping[str, str] = getattr(config, "auto_map", None) or {}
        for name in _KINDS:
            auto = getattr(transformers, name)
            if (self.trust_remote_code and name in mapped) or type(config) in auto._model_mapping:
                return auto
        raise ConfigError("model", self.path, _remedy(f"it has no model of type {config.model_type}"))


@torch.no_grad()
def keep_float32(model: Any, dtype: torch.dtype) -> None:  # noqa: ANN401 - transformers' model
    """Give tensors of a model in `dtype` float32 if ``from_pretrained`` loads them so, such as router biases.

    ``from_config`` does not. The values are not read: weights come later.
    """
    kept: set[str] = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        kept.update(getattr(model, "_keep_in_fp32_modules", None) or ())
    if not kept or dtype == torch.float32:
        return
    held = re.compile("|".join(f"(?:{each.replace('*', '.*')})" for each in sorted(kept)))
    for name, tensor in named_tensors(model)[0].items():
        if held.search(name) and tensor.is_floating_point():
            tensor.data = tensor.data.float()


def _named_class(stored: Mapping[str, Any]) -> type[PreTrainedModel] | None:
    """Return transformers' class of the first of ``architectures``, which engines take, too."""
    import transformers

    names: Iterator[str] = iter(stored.get("architectures") or ())
    kind = getattr(transformers, next(names, ""), None)
    return kind if getattr(kind, "config_class", None) else None


def _remedy(reason: str) -> str:
    import transformers

    line = " ".join(reason.split())[:_MOST]
    remedy = "give a folder with its config.json, update transformers, or set trust_remote_code for its code"
    return f"transformers {transformers.__version__} says: {line}; {remedy}"
