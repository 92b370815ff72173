"""The trainer's side of vLLM's weight transfer backend ``weightsync``, from vLLM 0.28 on.

trainer = WeightSyncTrainerEngine.trainer_init(
    WeightSyncTrainerInitInfo(host="10.0.0.1", world_size=1 + num_workers, rank=0),
    client=RayVLLMWeightSyncClient(engines), source=ModuleSource(model))
trainer.send_weights()
"""

from __future__ import annotations

from concurrent.futures import FIRST_EXCEPTION, wait
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from weightsync.errors import TransportError
from weightsync.plugins.sender import Sender
from weightsync.protocol.daemon import on_daemon

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import Future

    import torch
    from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient, WeightSource


@dataclass
class WeightSyncTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]  # vLLM is not followed
    """Arguments of `Sender`, and this trainer's ``rank``; rank 0 sends."""

    backend: ClassVar[str] = "weightsync"

    host: str
    world_size: int
    transport: str = "nccl"
    bucket_nbytes: int = 256 << 20
    timeout_s: float = 600.0
    ports: str | None = None


class WeightSyncTrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """The engine of one trainer rank. Rank 0 drives vLLM through the client, and sends."""

    init_info_cls = WeightSyncTrainerInitInfo

    _sender: Sender | None = None
    _timeout_s = 0.0
    _version = 0

    @classmethod
    def trainer_init(
        cls,
        init_info: WeightSyncTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> WeightSyncTrainerEngine:
        """Make the engine. Returns when all workers have joined.

        Raises ValueError without a source, and TransportError.
        """
        if source is None:
            raise ValueError("source is missing: pass a WeightSource")
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        if engine.is_sender:
            sender = Sender(
                init_info.host,
                init_info.world_size,
                init_info.transport,
                init_info.bucket_nbytes,
                init_info.timeout_s,
                init_info.ports,
            )
            joining = on_daemon(lambda: client.init_weight_transfer_engine(sender.init_info))
            try:
                # vLLM may refuse: then no worker comes, and opening ends only at the deadline.
                for done in wait([on_daemon(sender.open), joining], return_when=FIRST_EXCEPTION).done:
                    done.result()
            except BaseException:
                sender.close()
                raise
            engine._sender, engine._timeout_s = sender, init_info.timeout_s
        return engine

    def send_weights(self) -> None:
        """Send one update. Raises TransportError with the cause, also if a worker failed."""
        shapes = shapes_of(self.source)  # on every rank, like the tensors: making them may be collective
        if self._sender is None:
            for _ in tensors_of(self.source):
                pass
            return
        sender = self._sender
        self._version += 1
        self.client.start_weight_update()
        updating = on_daemon(lambda: self.client.update_weights({"shapes": shapes}))

        def abort(done: Future[None]) -> None:
            if error := done.exception():
                sender.abort(f"vLLM: {type(error).__name__}: {error}")

        updating.add_done_callback(abort)
        sender.send(tensors_of(self.source), self._version)
        try:
            updating.result(self._timeout_s)
        except Late as error:
            sender.abort("vLLM is late")
            raise TransportError(
                f"vLLM has verified version {self._version} and did not load it within {self._timeout_s:g} s"
            ) from error
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        """Close the communicator."""
        if self._sender:
            self._sender.close()


def shapes_of(source: WeightSource) -> dict[str, list[int]]:
    """Return the shapes of all tensors. ``metadata`` is a method in vLLM 0.32, a property in 0.33."""
    metadata = source.metadata() if callable(source.metadata) else source.metadata
    return {each.name: list(each.shape) for each in metadata}


def tensors_of(source: WeightSource) -> Iterable[tuple[str, torch.Tensor]]:
    """Start a pass over whole tensors. In vLLM 0.32, the source itself is the iterable."""
    tensors: Iterable[tuple[str, torch.Tensor]]
    tensors = source.iter_full() if hasattr(source, "iter_full") else source
    return tensors
