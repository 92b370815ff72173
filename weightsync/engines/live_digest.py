"""Parameters that an engine's own loader has converted, such as packed int4 weights: digest and export."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator

import torch

from weightsync.errors import TransportError
from weightsync.memory.device import export_tensor
from weightsync.memory.digests import tensor_digest
from weightsync.memory.tensors import extent_nbytes
from weightsync.protocol.handles import LiveExport
from weightsync.protocol.messages import LiveDigest

_LIBRARIES = ("vllm", "sglang", "torch")
"""Other versions of these may store the same parameters in another order."""


def live_digest(model: torch.nn.Module, device: torch.device) -> LiveDigest:
    """Return the digest of all live parameters of `model`, in the layout that its kernels read.

    Scales of a cache are left out: no checkpoint has to have them.
    """
    digest = hashlib.sha256()
    for _, parameter in _parameters(model):
        digest.update(tensor_digest(parameter.detach(), tuple(parameter.shape)).to_bytes(8, "little"))
    return LiveDigest(_kind(model, device), digest.hexdigest())


def live_export(model: torch.nn.Module, device: torch.device) -> LiveExport:
    """Export all live parameters of `model`, so that a copy of their bytes brings them back.

    Raises TransportError: the memory cannot be shared, or the kernels read more than these bytes.
    """
    parameters = dict(_parameters(model))
    require_complete(model)
    handles = {name: export_tensor(each) for name, each in parameters.items() if each.numel()}
    return LiveExport(_kind(model, device), handles)


def require_complete(model: torch.nn.Module) -> None:
    """Raise TransportError if a copy of all parameters' bytes would not be all that was loaded.

    Some layers keep tensors that they made of parameters beside them, as the absorbed projections of MLA.
    """
    for name, parameter in _parameters(model):
        if extent_nbytes(parameter) != parameter.numel() * parameter.element_size():
            raise TransportError(f"{name} has gaps, or elements that share memory")
    for path, module in model.named_modules():
        saved = module._buffers.keys() - module._non_persistent_buffers_set
        made = {name for name, each in vars(module).items() if _may_be_made_of_weights(name, each)}
        if not hasattr(module, "kv_cache_dtype"):
            made |= {name for name in saved if module._buffers[name] is not None}
        for name in sorted(made):
            raise TransportError(f"{path}.{name} is no parameter, and may be made of some")


def _may_be_made_of_weights(name: str, value: object) -> bool:
    if not isinstance(value, torch.Tensor) or value.numel() < 2 or name.endswith("kv_cache"):
        return False
    return value.is_floating_point() or value.element_size() == 1


def _kind(model: torch.nn.Module, device: torch.device) -> str:
    kind = hashlib.sha256(_where(device).encode())
    for name, each in _parameters(model):
        kind.update(f"{name} {tuple(each.shape)} {each.stride()} {each.dtype};".encode())
    return kind.hexdigest()


def _parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for path, module in model.named_modules():
        if not hasattr(module, "kv_cache_dtype"):
            yield from module.named_parameters(path, recurse=False)


def _where(device: torch.device) -> str:
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else torch.backends.cpu.get_cpu_capability()
    versions = [getattr(sys.modules.get(library), "__version__", "") for library in _LIBRARIES]
    return f"{device.type} {name} {versions};"
