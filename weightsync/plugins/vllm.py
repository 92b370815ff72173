"""The workers' side of vLLM's weight transfer backend ``weightsync``.

vLLM's ``WeightTransferEngine`` documents the methods. Two versions are supported: in 0.24 the worker reloads
and passes a loader to `receive_weights`; from 0.25 on the backend reloads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from weightsync.collectives.tensor_stream import TensorStream
from weightsync.engines.serving.checks import check_version
from weightsync.engines.vllm.api import require_no_draft, require_updatable
from weightsync.engines.vllm.reload import LayerwiseReload, LoadAccount
from weightsync.errors import ConfigError, StateError
from weightsync.memory.stacked_experts import as_loaded
from weightsync.plugins.sender import Sender, device_of
from weightsync.transports import Transport, transport_class

if TYPE_CHECKING:
    Named = Iterable[tuple[str, torch.Tensor]]


@dataclass
class WeightSyncInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not followed
    """How a worker joins, see `Sender.init_info`. The rank is the worker's number plus `rank_offset`."""

    rendezvous: str
    world_size: int
    rank_offset: int = 1
    transport: str = "nccl"
    timeout_s: float = 600.0


@dataclass
class WeightSyncUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Optional information about an update.

    `shapes` has the shapes of the checkpoint's tensors by name, by which stacked experts are recognised.
    """

    shapes: dict[str, list[int]] = field(default_factory=dict)


class WeightSyncTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Loads whole tensors with vLLM's loader, after digests were compared."""

    init_info_cls = WeightSyncInitInfo
    update_info_cls = WeightSyncUpdateInfo

    _transport: Transport | None = None
    _stream: TensorStream | None = None
    _reload: LayerwiseReload | None = None

    def init_transfer_engine(self, init_info: WeightSyncInitInfo) -> None:
        """Join the trainer and the other workers. Raises ConfigError, see `require_updatable`."""
        check_version("vllm")
        # 0.24 passes no configuration.
        if config := getattr(self, "vllm_config", None) or get_current_vllm_config_or_none():
            require_no_draft(config)
            require_updatable(config, self.model)
        self.shutdown()
        # 0.24 does not pass the device, and during a reload parameters have no device.
        self._model_device = next(self.model.parameters()).device
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank + init_info.rank_offset
        if rank >= init_info.world_size:
            remedy = f"give the number of all workers plus {init_info.rank_offset}: this is rank {rank}"
            raise ConfigError("world_size", init_info.world_size, remedy)
        self._transport = transport_class(init_info.transport)()
        self._transport.open(init_info.rendezvous, rank, init_info.world_size, init_info.timeout_s)
        device = device_of(init_info.transport)
        self._stream = TensorStream(self._transport, rank, init_info.world_size, device)

    def start_weight_update(self) -> None:
        """Start a reload. Called from vLLM 0.25 on; 0.24 starts reloads itself."""
        self._reload = LayerwiseReload(self.model, self.model_config, self.device).witness()

    def finish_weight_update(self) -> None:
        """Finish the reload. Called from vLLM 0.25 on; from 0.28 on, vLLM then removes all LoRA adapters."""
        reload, self._reload = self._reload, None
        assert reload, "vLLM starts before it finishes"
        reload.finish()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive an update, and wait for the accelerator, if any. Called from vLLM 0.25 on."""
        self.receive_weights(self.parse_update_info(update_info))
        if self._model_device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(
        self, update_info: WeightSyncUpdateInfo, load_weights: Callable[[Named], object] | None = None
    ) -> None:
        """Receive and load the whole checkpoint.

        Raises VerifyError or TransportError, or RuntimeError if the loader left parameters out. The weights
        are then a mix, until the trainer initialises the transfer again and sends an update.
        """
        if self._stream is None:
            raise StateError("call init_weight_transfer_engine first")
        loading = self._reload or (LoadAccount(self.model, load_weights) if load_weights else None)
        assert loading, "vLLM starts before it updates"
        shapes = {name: tuple(shape) for name, shape in update_info.shapes.items()}
        try:
            for batch in self._stream.receiving():
                loading.load(
                    [each for name, data in self._own(batch) for each in as_loaded(name, data, shapes)]
                )
            loading.require_all()
        except BaseException:
            if self._reload:
                self._reload.abandon()
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Close the communicator."""
        self._stream = None
        if self._transport:
            self._transport.close()
            self._transport = None

    @staticmethod
    def trainer_send_weights(iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: Any) -> None:  # noqa: ANN401
        """Send an update, in vLLM 0.24. `trainer_args` is ``{"sender": Sender, "version": int}``."""
        sender: Sender = trainer_args["sender"]
        sender.send(iterator, trainer_args.get("version", 0))

    def _own(self, batch: Named) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield copies, since the loader keeps tensors until modules are complete.

        All copies have been made when the iterator ends.
        """
        yield from ((name, data.to(self._model_device, copy=True)) for name, data in batch)
        if self._model_device.type == "cuda":
            torch.cuda.current_stream().synchronize()
