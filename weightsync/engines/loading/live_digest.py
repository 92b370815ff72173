"""Parameters that an engine's own loader has converted, such as packed int4 weights: digest and export."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from weightsync.engines.loading.kernel_state import tensors_beside
from weightsync.errors import StateError, TransportError
from weightsync.memory.device import export_tensors
from weightsync.memory.kernels.device_kernels import DigestTable
from weightsync.memory.kernels.digests import digest_table, tensor_digests
from weightsync.memory.tensors import extent_nbytes
from weightsync.protocol.device_memory import LiveMemory
from weightsync.protocol.messages import Digests, LiveDigest
from weightsync.quantising.stored_places import StoredPlaces

_OF_CACHES = ("kv_cache_dtype", "k_scale_float")
"""Attributes of attention layers in vLLM and in SGLang, which have scales of the cache."""
_OF_RANKS = (
    "_expert_map",
    "expert_mask",
    "expert_global_to_physical",
    "expert_physical_to_global",
    "expert_local_to_global",
)
"""Buffers of vLLM that say which rank has which experts. No checkpoint has them, and no loader fills them."""
_LIBRARIES = ("vllm", "sglang", "torch")
"""Other versions of these may store the same parameters in another order."""


class TensorDigests:
    """Digests of tensors that mostly stay where they are. On a GPU they then take one launch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._places: Sequence[object] | None = None
        self._table: DigestTable | None = None

    def follow(self, held: Sequence[torch.Tensor]) -> bool:
        """Prepare again if a tensor is elsewhere, or otherwise. Returns whether one is."""
        places = [(each.data_ptr(), each.shape, each.stride(), each.dtype) for each in held]
        if places == self._places:
            return False
        self._places = places
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                self._table = digest_table(held)
        return True

    def of(self, held: Sequence[torch.Tensor]) -> Digests:
        """Return the digest of each tensor."""
        self.follow(held)
        return self.last(held)

    def last(self, held: Sequence[torch.Tensor]) -> Digests:
        """Return the same of tensors that the last `follow` had."""
        if self._table is None:
            return tensor_digests(held)
        with torch.cuda.device(self._device):
            self._table.launch(torch.cuda.current_stream())
            return self._table.result()


class LiveParameters:
    """The `parameters_of` a model whose loader converts tensors to the layout that kernels read.

    Attributes:
        model: the model that serves.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self.model, self._device = model, device
        self._digests = TensorDigests(device)
        self._kind = ""
        self._found: Sequence[torch.Tensor] | None = None
        self._places: StoredPlaces | None = None

    def use(self, places: StoredPlaces) -> None:
        """Digest the stored tensors instead of parameters that hold nothing else.

        When an update has compared the live parameters, it already has these digests.
        """
        self._places, self._kind = places, ""

    def find(self) -> None:
        """Find them. For thousands it takes as long as their digest."""
        held = {name: parameter.detach() for name, parameter in parameters_of(self.model)}
        if self._places:
            self._places = self._places.in_memory(held)
        self._found = self._beside(held)
        self._follow(self._found)

    def digest(self, is_found: bool = False, stored: Digests | None = None) -> LiveDigest:
        """Return the parameters' digest. On a GPU this takes one launch, except for the first time.

        Args:
            is_found: no parameter was replaced or moved since the last `find`.
            stored: the digests of the stored tensors, by the used places, if they were just taken.
        """
        if not is_found or self._found is None:
            self.find()
        held, self._found = self._found or (), None
        digests = [self._digests.last(held)]
        if self._places:
            digests.append(self._places.digests() if stored is None else stored)
        return LiveDigest(
            self._kind, hashlib.sha256(b"".join(each.tobytes() for each in digests)).hexdigest()
        )

    @property
    def can_export(self) -> bool:
        """Return True if they are in memory that holders map."""
        return self._device.type == "cuda"

    def export(self) -> LiveMemory:
        """Export them, so that a copy of their bytes brings them back.

        Raises TransportError: the memory cannot be shared, or the kernels read more than these bytes.
        """
        require_complete(self.model)
        held = {name: parameter.detach() for name, parameter in parameters_of(self.model)}
        memory = export_tensors(held)
        self._follow(self._beside(held))  # now, while no update waits for it
        return LiveMemory(self._kind, memory)

    def _beside(self, held: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters that hold more than stored tensors, each as one dimension."""
        num_stored = self._places.num_elements if self._places else {}
        return [in_order(each) for name, each in held.items() if num_stored.get(name) != each.numel()]

    def _follow(self, held: Sequence[torch.Tensor]) -> None:
        if self._digests.follow(held) or not self._kind:
            how = "stored " if self._places else ""
            self._kind = how + kind_of(parameters_of(self.model), self._device)


class EqualLoads:
    """Compares the live parameters after a load with those after the last load of equal tensors."""

    def __init__(self, parameters: LiveParameters | None) -> None:
        """`parameters` are digested after a load that has not digested them. None: such loads pass."""
        self._parameters = parameters
        self._last: tuple[bytes, LiveDigest] | None = None

    def require(self, given: Digests, live: LiveDigest | None) -> None:
        """Raise StateError if equal tensors made other bytes, as if a loader packs packed bytes.

        Args:
            given: the digests of the tensors that the loader got.
            live: the digest of the resulting parameters, if it was taken.
        """
        live = live or (self._parameters.digest() if self._parameters else None)
        if live is None:
            return
        before, now = self._last, (given.tobytes(), live)
        if before and before[0] == now[0] and before[1].kind == live.kind and before[1] != live:
            raise StateError("the loader made other live bytes of the same tensors than in the last update")
        self._last = now  # a load that was refused is no measure of later loads


def in_order(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor without gaps in memory order, as one dimension.

    Transposed tensors are read far faster in memory order.
    """
    if extent_nbytes(tensor) != tensor.numel() * tensor.element_size():
        return tensor
    return tensor.as_strided((tensor.numel(),), (1,))


def parameters_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield a model's parameters by name, without scales of caches, which no checkpoint has to have."""
    for path, module in model.named_modules():
        if not _has_cache(module):
            yield from module.named_parameters(path, recurse=False)


def obstacle(model: torch.nn.Module, device: torch.device, of: Callable[[torch.nn.Module], str]) -> str:
    """Return the first parameter that is not on `device`, or the first module with an obstacle, as `of` says.

    Returns "" if there is none.
    """
    away = next((name for name, each in model.named_parameters() if each.device != device), None)
    if away:
        return f"{away} is not on {device}"
    reasons = ((name, of(module)) for name, module in model.named_modules())
    return next((f"{name}: {reason}" for name, reason in reasons if reason), "")


def addresses_of(model: torch.nn.Module) -> list[int]:
    """Return the addresses of `parameters_of` a model."""
    return [each.data_ptr() for _, each in parameters_of(model)]


def _has_cache(module: torch.nn.Module) -> bool:
    return any(hasattr(module, name) for name in _OF_CACHES)


def require_complete(model: torch.nn.Module) -> None:
    """Raise TransportError if a copy of all parameters' bytes would not be all that was loaded.

    Some layers keep tensors that they made of parameters beside them, as the absorbed projections of MLA.
    """
    for name, parameter in parameters_of(model):
        if extent_nbytes(parameter) != parameter.numel() * parameter.element_size():
            raise TransportError(f"{name} has gaps, or elements that share memory")
    for path, module in model.named_modules():
        saved = module._buffers.keys() - module._non_persistent_buffers_set - {*_OF_RANKS}
        made = {name for name, each in vars(module).items() if _may_be_made_of_weights(name, each)}
        if not _has_cache(module):
            made |= {name for name in saved if module._buffers[name] is not None}
        if made:
            raise TransportError(f"{path}.{min(made)} is no parameter, and may be made of some")
    if beside := next(tensors_beside(model), None):
        raise TransportError(f"{beside} is no parameter, and may be made of some")


def _may_be_made_of_weights(name: str, value: object) -> bool:
    if not isinstance(value, torch.Tensor) or value.numel() < 2 or name.endswith("kv_cache"):
        return False
    return value.is_floating_point() or value.element_size() == 1


def kind_of(tensors: Iterable[tuple[str, torch.Tensor]], device: torch.device) -> str:
    """Return a key of names, shapes, strides, dtypes and the kind of memory."""
    kind = hashlib.sha256(_where(device).encode())
    for name, each in tensors:
        kind.update(f"{name} {tuple(each.shape)} {each.stride()} {each.dtype};".encode())
    return kind.hexdigest()


def _where(device: torch.device) -> str:
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else torch.backends.cpu.get_cpu_capability()
    versions = [getattr(sys.modules.get(library), "__version__", "") for library in _LIBRARIES]
    return f"{device.type} {name} {versions};"
