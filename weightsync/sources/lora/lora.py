"""Publishes a LoRA adapter that PEFT trains, in a model that is plain or sharded by FSDP2 or ZeRO-3."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from weightsync.errors import ConfigError, StateError
from weightsync.memory.addresses import AddressGuard, attached_part
from weightsync.memory.tensors import byte_strides, meta_of, named_tensors
from weightsync.plan import RankLayout, Segment, TensorMeta
from weightsync.protocol.adapters import LORA_A, LORA_B, AdapterSpec, is_of_expert
from weightsync.sources.local_weights import LocalWeights
from weightsync.sources.lora.peft_modules import adapted_modules, base_name, require_plain_base
from weightsync.sources.lora.stacked_lora import StackedExperts
from weightsync.sources.module import declare
from weightsync.sources.tensors import TensorSource
from weightsync.sources.zero.deepspeed import check_engine
from weightsync.sources.zero_partitions import (
    PART,
    check_partition,
    is_partitioned,
    part_of,
    part_segments,
    require_current,
    run_of,
    with_memory,
)

_KINDS = {LORA_A: "lora_A", LORA_B: "lora_B"}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Trained:
    """A or B of one of PEFT's modules.

    Attributes:
        name: the name in a checkpoint, or one name for all stacked experts.
        module: PEFT's module.
        parameter: the parameter that the trainer optimises.
        suffix: `LORA_A` or `LORA_B`.
        experts: the stacked experts that the parameter adapts, if any.
    """

    name: str
    module: Any
    parameter: torch.Tensor
    suffix: str
    experts: StackedExperts | None

    @property
    def is_b(self) -> bool:
        """Return True for B, which the module's scaling multiplies."""
        return self.suffix == LORA_B

    def metas(self) -> Iterator[TensorMeta]:
        """Yield the tensors that engines get, in the parameter's dtype."""
        whole, _ = declare(self.name, self.parameter)
        if self.experts:
            yield from self.experts.metas(whole, self.suffix)
        else:
            yield whole

    def local(self) -> torch.Tensor:
        """Return the tensor that has this rank's part. DeepSpeed may give a partition other memory."""
        return attached_part(part_of(self.parameter))

    def live(self) -> torch.Tensor:
        """Return a view of this rank's part in the order of the copy."""
        return self.cut(self.local())

    def cut(self, local: torch.Tensor) -> torch.Tensor:
        """Return a view of `local`, the result of `local()`, in the order of the copy."""
        if is_partitioned(self.parameter):
            start, stop = run_of(self.parameter)
            return local[: stop - start]
        return self.experts.by_expert(local, self.suffix) if self.experts else local

    def segments(self, held: torch.Tensor) -> Iterator[Segment]:
        """Yield the segments of `held`, a copy of `live` without gaps."""
        whole, segments = declare(self.name, self.parameter)
        copied = dataclasses.replace(whole, dtype=meta_of(self.name, held).dtype)
        if is_partitioned(self.parameter):
            yield from part_segments(copied, self.parameter)
        elif self.experts:
            yield from self.experts.segments(copied, segments[0], self.suffix)
        else:
            yield from (dataclasses.replace(each, strides=byte_strides(held)) for each in segments)


class LoraSource(TensorSource):
    """Publishes one adapter of a PEFT model: A, and B times the scaling.

    Each version is a copy on the model's device. Engines need not know ``lora_alpha``, nor whether PEFT
    divides by the rank or by the rank's root. On a GPU, holders read the copy in place.
    """

    def __init__(self, model: Any, adapter: str) -> None:  # noqa: ANN401 - PEFT's, or what wraps it
        """Raises ConfigError if `model` is no module."""
        if not isinstance(model, torch.nn.Module):
            remedy = "adapters are read from a module that PEFT made"
            raise ConfigError("self.model", type(model).__name__, remedy)
        super().__init__(model)
        self._adapter, self._dtype = adapter, ""
        self._adapter_copies: _Copies | None = None
        self._guarded: AddressGuard | None = None
        self._held: dict[str, torch.Tensor] = {}

    def spec(self, name: str) -> AdapterSpec:
        """Return the adapter's tensors, for engines that call it `name`. Raises ConfigError as `layout`."""
        found = self._look_up().values()
        are_stacked = [its.experts is not None for its in found if its.experts or is_of_expert(its.name)]
        shares_a = bool(are_stacked) and all(are_stacked)
        return AdapterSpec.of(name, [meta for its in found for meta in its.metas()], shares_a)

    def cast(self, dtype: str) -> None:
        """Copy to the dtype of the engines' slots, such as ``bfloat16``, from the next `layout` on."""
        self._dtype = dtype

    @property
    def is_on_gpu(self) -> bool:
        """Return True if all of the adapter is on a GPU."""
        return all(its.local().is_cuda for its in self._look_up().values())

    def _look_up(self) -> Mapping[str, _Trained]:
        """Return the adapter's parameters by name.

        Raises ConfigError if there are none, if the adapter does more than A and B, if PEFT changed the base,
        or if a rank's part of a parameter cannot be read.
        """
        if hasattr(self.model, "autotp_size"):  # as DeepSpeed's engines have
            check_engine(self.model)
        self.model.state_dict(keep_vars=True)  # FSDP shards again what it has gathered
        found: dict[str, _Trained] = {}
        adapted = adapted_modules(self.model, self._adapter)
        require_plain_base(self.model)
        for path, module in adapted.items():
            found |= {its.name: its for its in _trained(base_name(path), module, self._adapter)}
        return found

    def _weights(self) -> LocalWeights:
        segments: list[Segment] = []
        metas: list[TensorMeta] = []
        self._held, self._adapter_copies, self._guarded = {}, None, None
        for name, its in self._look_up().items():
            live = its.live()
            dtype = getattr(torch, self._dtype) if self._dtype else live.dtype
            held = self._held[name] = torch.empty(live.shape, dtype=dtype, device=live.device)
            kind = meta_of(name, held).dtype
            metas += (dataclasses.replace(meta, dtype=kind) for meta in its.metas())
            segments += its.segments(held)
        return LocalWeights(RankLayout(tuple(metas), tuple(segments)), {}, computed=self._held)

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        return {}

    def _watch(self, weights: LocalWeights) -> AddressGuard:
        return AddressGuard(torch.nn.Module(), {})  # the copies never move, and `_follow` watches parameters

    def _follow(self) -> bool:
        """Look the parameters up again if tensors of the model were replaced. Returns whether they were.

        Raises StateError if the adapter has other modules or shapes than before.
        """
        if self._guarded and self._guarded.as_before(self.model):
            return False
        self._adapter_copies = _Copies(self._same(self._look_up()), self._held, self._adapter)
        self._guarded = AddressGuard(self.model, with_memory(named_tensors(self.model)[0]), part=PART)
        return True

    def _finish(self) -> None:
        """Copy the adapter as it is now. Raises StateError if partitions are out of date."""
        if self._adapter_copies is None or not self._adapter_copies.have_memory():
            self._follow()
        assert self._adapter_copies
        require_current(self._rank, self._adapter_copies.partitioned)
        self._adapter_copies.run()

    def _same(self, now: Mapping[str, _Trained]) -> Mapping[str, _Trained]:
        """Return `now`. Raises StateError if it has other names or shapes than before."""
        for name in sorted(now.keys() ^ self._held.keys()):
            where = "is new" if name in now else "is gone"
            raise StateError(f"{name} of adapter {self._adapter} {where}: register the adapter again")
        for name, its in now.items():
            held, live = self._held[name], its.live()
            if held.shape != live.shape:
                was = f"{tuple(held.shape)} before, and is {tuple(live.shape)}"
                raise StateError(f"{name} of adapter {self._adapter} was {was}: register it again")
        return now


def _trained(path: str, module: Any, adapter: str) -> Iterator[_Trained]:  # noqa: ANN401 - PEFT's
    """Yield A and B of one of PEFT's modules. Raises ConfigError if they cannot be read."""
    lives = {suffix: getattr(module, kind)[adapter].weight for suffix, kind in _KINDS.items()}
    parameter = getattr(module, "parameter_name", "")
    if parameter and any(map(is_partitioned, lives.values())):
        remedy = "leave it out: under ZeRO-3, adapters of modules are read"
        raise ConfigError("target_parameters", f"{path}.{parameter}", remedy)
    experts = StackedExperts.of(path, module)
    for suffix, live in lives.items():
        if is_partitioned(live):
            check_partition(path + suffix, live)
        yield _Trained((experts.name if experts else path) + suffix, module, live, suffix, experts)


class _Copies:
    """Copies A and B, trained on any stream, to memory that does not move.

    Attributes:
        partitioned: names and parameters that ZeRO-3 has partitioned.
    """

    def __init__(self, found: Mapping[str, _Trained], held: Mapping[str, torch.Tensor], adapter: str) -> None:
        """`held` has the memory of each parameter in `found`."""
        self._adapter, self._held = adapter, [*held.values()]
        self._found = [found[name] for name in held]
        self._locals = [its.local() for its in self._found]
        self.partitioned = [(its.name, its.parameter) for its in self._found if is_partitioned(its.parameter)]
        self._addresses = self._find()
        self._rows_of_b = [number for number, its in enumerate(self._found) if its.is_b]
        self._modules_of_b = [its.module for its in self._found if its.is_b]
        self._devices = {copied.device for copied in self._held if copied.is_cuda}

    def have_memory(self) -> bool:
        """Return True if the parameters are still at the same addresses."""
        return self._find() == self._addresses

    @torch.no_grad()
    def run(self) -> None:
        """Copy all parameters in few kernels: hundreds of small copies would take longer than the bytes."""
        for device in self._devices:
            torch.cuda.synchronize(device)
        values = [its.cut(local) for its, local in zip(self._found, self._locals, strict=True)]
        factors = [float(module.scaling[self._adapter]) for module in self._modules_of_b]
        # B is rounded once, after the product. Holders may read the copy at any time, so the copy
        # must never have B without the factor.
        products = torch._foreach_mul([values[number] for number in self._rows_of_b], factors)
        for number, product in zip(self._rows_of_b, products, strict=True):
            values[number] = product
        torch._foreach_copy_(self._held, values)

    def _find(self) -> list[int]:
        return list(map(torch.Tensor.data_ptr, self._locals))
