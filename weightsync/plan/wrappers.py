"""Names that wrappers of a module put before the names of the module's tensors."""

from __future__ import annotations

import re

_WRAPPERS = re.compile(
    r"(?<![^./])(?:module|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module|base_model\.model)\."
)


def unwrapped(name: str) -> str:
    """Return a tensor's name without wrappers: ``module.layers.0._orig_mod.bias`` is ``layers.0.bias``.

    DDP, `torch.compile`, activation checkpoints, FSDP1 and PEFT add wrappers.
    """
    # Most names, of ten thousands, have none, and the pattern is slow.
    may_have = "module." in name or "_orig_mod." in name or "base_model." in name
    return _WRAPPERS.sub("", name) if may_have else name
