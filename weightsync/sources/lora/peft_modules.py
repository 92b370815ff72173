"""What PEFT makes of a model's modules, and what an adapter has there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weightsync.errors import ConfigError, nearest

_PEFT = "base_model.model."
_CHECKPOINTED = "_checkpoint_wrapped_module."
_WRAPPERS = (_CHECKPOINTED, "_orig_mod.")
"""What activation checkpoints and `torch.compile` add to the names of modules."""
_COPIES, _ORIGINAL = "modules_to_save", "original_module"
"""Children of what PEFT makes of a module that some adapters save whole."""
_MORE = {
    _COPIES: "modules_to_save",
    "lora_embedding_A": "an embedding's LoRA",
    "lora_magnitude_vector": "DoRA's magnitude",
    "trainable_tokens_delta": "trainable tokens",
}
"""What PEFT's modules have beside A and B, by attribute."""
_OF_A_AND_B = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""Values of ``init_lora_weights`` that leave the base as it is."""


def adapted_modules(model: torch.nn.Module, adapter: str, *, saves: bool = False) -> dict[str, Any]:
    """Return PEFT's modules that have `adapter`, by their paths in `model`.

    Raises ConfigError if there are none, or if the adapter does more than A and B. With `saves`, it may have
    copies of whole modules, too: `saved_modules` finds them.
    """
    found: dict[str, Any] = {}
    known: set[str] = set()
    for path, module in model.named_modules():
        known.update(getattr(module, "lora_A", ()))
        if reason := _more_than_lora(path, module, adapter, saves):
            raise ConfigError("adapter", adapter, f"leave {reason} out: A and B of linear layers are read")
        if adapter in getattr(module, "lora_A", ()):
            found[path] = module
    if not found:
        raise ConfigError("adapter", adapter, nearest(adapter, known) if known else "the model has none")
    return found


def require_plain_base(model: torch.nn.Module) -> None:
    """Raise ConfigError if PEFT changed the base when it made an adapter, as PiSSA and OLoRA do.

    Adapters share the base, so all of them are looked at.
    """
    for module in model.modules():
        configs: Any = getattr(module, "peft_config", None)
        for name, config in configs.items() if isinstance(configs, Mapping) else ():
            initialised = getattr(config, "init_lora_weights", True)
            if initialised not in _OF_A_AND_B:
                remedy = (
                    f"it changed the base of adapter {name}, and engines serve the base of their checkpoint: "
                    "send merged weights (merge=), or save the changed base for engines and set it to True"
                )
                raise ConfigError("init_lora_weights", initialised, remedy)


@dataclass(frozen=True, slots=True)
class SavedModule:
    """A module of which PEFT keeps a whole copy for each of some adapters (``modules_to_save``).

    Attributes:
        path: its name in the model's ``state_dict``.
        is_of_adapter: whether the adapter has a copy.
        prefix: begins the names of the tensors that the adapter computes with, its own or the original's.
    """

    path: str
    is_of_adapter: bool
    prefix: str

    def has(self, name: str) -> bool:
        """Return True if a module or tensor of this name is in it, in whichever copy."""
        return name.startswith(f"{self.path}.")

    def served_as(self, name: str) -> str | None:
        """Return the name without the copy's, for one of its tensors. None for one of another copy."""
        if not name.startswith(self.prefix):
            return None
        return f"{self.path}.{name.removeprefix(self.prefix)}"


def saved_modules(model: torch.nn.Module, adapter: str) -> list[SavedModule]:
    """Return the modules of which PEFT keeps copies, for `adapter` or for others."""
    found = []
    for path, module in model.named_modules():
        children = dict(module.named_children())
        if {_COPIES, _ORIGINAL} <= children.keys():
            is_of_adapter = adapter in dict(children[_COPIES].named_children())
            path = path_in_state(path)
            copy = f"{_COPIES}.{adapter}" if is_of_adapter else _ORIGINAL
            found.append(SavedModule(path, is_of_adapter, f"{path}.{copy}."))
    return found


def path_in_state(path: str) -> str:
    """Return a module's path in the names of ``state_dict``: activation checkpoints leave themselves out."""
    return path.replace(_CHECKPOINTED, "")


def base_name(name: str) -> str:
    """Return the name that a module or tensor has in the base's checkpoint.

    What wraps PEFT's model comes before its own prefix.
    """
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.split(_PEFT, 1)[-1]


def _more_than_lora(path: str, module: torch.nn.Module, adapter: str, saves: bool) -> str:
    """Return what an adapter has or does in a module beside A and B; "" for nothing."""
    for kind, called in _MORE.items():
        names: Collection[str] = getattr(module, kind, None) or ()
        if adapter in names and not (saves and kind == _COPIES):
            return f"{called} in {path}"
    variants: Mapping[str, object] = getattr(module, "lora_variant", None) or {}
    if adapter in variants:
        return f"{type(variants[adapter]).__name__} (a variant of LoRA) in {path}"
    flags: Mapping[str, bool] = getattr(module, "lora_bias", None) or {}
    if flags.get(adapter):
        return f"lora_bias in {path}"
    configs: Any = getattr(module, "peft_config", None) or {}
    trained = getattr(configs.get(adapter), "bias", "none") if isinstance(configs, Mapping) else "none"
    return "" if trained == "none" else f"bias={trained!r} in its configuration"
