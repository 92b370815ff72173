"""vLLM's weight transfer backend ``weightsync``: what runs in each of its workers.

vLLM's own documentation of ``WeightTransferEngine`` says what each method is for. Two shapes of it are met:
that of 0.24, where the worker reloads and hands `receive_weights` its loader, and that of 0.32 and later,
where the backend reloads.
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
from weightsync.engines.vllm.api import LoadAccount, Reload, require_updatable
from weightsync.engines.whole_sink import as_loaded
from weightsync.errors import StateError
from weightsync.plugins.sender import Sender, device_of
from weightsync.transports import Transport, transport_class

if TYPE_CHECKING:
    Named = Iterable[tuple[str, torch.Tensor]]

__all__ = ["WeightSyncInitInfo", "WeightSyncTransferEngine", "WeightSyncUpdateInfo"]


@dataclass
class WeightSyncInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not followed
    """How a worker joins: see `Sender.init_info`. Its rank is its number among all plus `rank_offset`."""

    rendezvous: str
    world_size: int
    rank_offset: int = 1
    transport: str = "nccl"
    timeout_s: float = 600.0


@dataclass
class WeightSyncUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Nothing has to be said before the tensors come.

    `shapes` of the checkpoint's tensors by name: experts that are stacked are told by them.
    """

    shapes: dict[str, list[int]] = field(default_factory=dict)


class WeightSyncTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Takes whole tensors through vLLM's loader, none before its digest was compared."""

    init_info_cls = WeightSyncInitInfo
    update_info_cls = WeightSyncUpdateInfo

    _transport: Transport | None = None
    _stream: TensorStream | None = None
    _reload: Reload | None = None

    def init_transfer_engine(self, init_info: WeightSyncInitInfo) -> None:
        """Join the trainer and the other workers. Raises ConfigError, see `require_updatable`."""
        # 0.24 gives no configuration of its own.
        if config := getattr(self, "vllm_config", None) or get_current_vllm_config_or_none():
            require_updatable(config, self.model)
        self.shutdown()
        # 0.24 does not say it, and in a reload the parameters are on none.
        self._model_device = next(self.model.parameters()).device
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank + init_info.rank_offset
        self._transport = transport_class(init_info.transport)()
        self._transport.open(init_info.rendezvous, rank, init_info.world_size, init_info.timeout_s)
        device = device_of(init_info.transport)
        self._stream = TensorStream(self._transport, rank, init_info.world_size, device)

    def start_weight_update(self) -> None:
        """From 0.32 on; 0.24 starts the reload itself."""
        self._reload = Reload(self.model, self.model_config, self.device)

    def finish_weight_update(self) -> None:
        """From 0.32 on."""
        reload, self._reload = self._reload, None
        assert reload, "vLLM starts before it finishes"
        reload.finish()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """From 0.32 on. Unlike the base class's, it does not wait for an accelerator where there is none."""
        self.receive_weights(self.parse_update_info(update_info))
        if self._model_device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(
        self, update_info: WeightSyncUpdateInfo, load_weights: Callable[[Named], object] | None = None
    ) -> None:
        """All of the checkpoint in one call.

        Raises VerifyError, TransportError, or, where the loader left parameters out, RuntimeError. The
        weights are a mix then, until an update by a trainer that has initialised the transfer anew.
        """
        if self._stream is None:
            raise StateError("init_weight_transfer_engine has to come first")
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
        """Leave the communicator."""
        self._stream = None
        if self._transport:
            self._transport.close()
            self._transport = None

    @staticmethod
    def trainer_send_weights(iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: Any) -> None:  # noqa: ANN401
        """Of 0.24. `trainer_args`: ``{"sender": Sender, "version": int}``."""
        sender: Sender = trainer_args["sender"]
        sender.send(iterator, trainer_args.get("version", 0))

    def _own(self, batch: Named) -> Iterator[tuple[str, torch.Tensor]]:
        """Copies, since the loader keeps them until a module is complete; made when this ends."""
        yield from ((name, data.to(self._model_device, copy=True)) for name, data in batch)
        if self._model_device.type == "cuda":
            torch.cuda.current_stream().synchronize()
