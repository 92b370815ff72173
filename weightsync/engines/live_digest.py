"""The digest of parameters that an engine's own loader has converted, such as packed int4 weights."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator

import torch

from weightsync.memory.digests import tensor_digest
from weightsync.protocol.messages import LiveDigest

_LIBRARIES = ("vllm", "sglang", "torch")
"""Other versions of these may store the same parameters in another order."""


def live_digest(model: torch.nn.Module, device: torch.device) -> LiveDigest:
    """Return the digest of all live parameters of `model`, in the layout that its kernels read.

    Scales of a cache are left out: no checkpoint has to have them.
    """
    kind, digest = hashlib.sha256(_where(device).encode()), hashlib.sha256()
    for name, parameter in _parameters(model):
        shape = tuple(parameter.shape)
        kind.update(f"{name} {shape} {parameter.stride()} {parameter.dtype};".encode())
        digest.update(tensor_digest(parameter.detach(), shape).to_bytes(8, "little"))
    return LiveDigest(kind.hexdigest(), digest.hexdigest())


def _parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for path, module in model.named_modules():
        if not hasattr(module, "kv_cache_dtype"):
            yield from module.named_parameters(path, recurse=False)


def _where(device: torch.device) -> str:
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else torch.backends.cpu.get_cpu_capability()
    versions = [getattr(sys.modules.get(library), "__version__", "") for library in _LIBRARIES]
    return f"{device.type} {name} {versions};"
