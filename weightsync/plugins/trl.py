"""TRL's server mode with the backend ``weightsync`` of a plain vLLM server.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "weightsync"}'

    import weightsync.plugins.trl
    weightsync.plugins.trl.install()    # before the trainer is made

For `GRPOTrainer` and other trainers that use TRL's `VLLMGeneration`. vLLM has this interface from 0.28
on, and TRL supports vLLM up to 0.31. Tested with TRL 1.16.0 and vLLM 0.31.0.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import requests
import torch
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from vllm.distributed.weight_transfer.base import ParamMeta
from vllm.utils.network_utils import get_ip

from weightsync.errors import ConfigError, StateError, TransportError
from weightsync.plugins.vllm_trainer import WeightSyncTrainerEngine, WeightSyncTrainerInitInfo

_SERVER = """start it with --weight-transfer-config '{"backend": "weightsync"}'"""


def install(timeout_s: float = 600.0) -> None:
    """Replace the client of trainers that are made from now on.

    `timeout_s` has the seconds for all workers of the server to join, and for one bucket.
    """
    Client.timeout_s = timeout_s
    vllm_generation.VLLMClient = Client


@dataclass(frozen=True, slots=True)
class _Weights:
    """One pass over TRL's tensors."""

    metadata: Sequence[ParamMeta]
    tensors: Iterator[tuple[str, torch.Tensor]]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.tensors


class Client(VLLMClient):  # type: ignore[misc]  # TRL is not followed
    """Sends weights to one server. TRL's class documents the methods; four more are vLLM's client."""

    timeout_s = 600.0
    _engine: WeightSyncTrainerEngine | None = None

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """Join the server's workers: over NCCL if `device` is a GPU, else over gloo.

        Raises ConfigError for a server with another backend, and TransportError that names the server.
        """
        transfer = self.get_server_info()["weight_transfer_config"]
        if not transfer or transfer["backend"] != "weightsync":
            raise ConfigError(f"weight_transfer_config of {self.base_url}", transfer, _SERVER)
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)
        self.close_communicator()
        info = WeightSyncTrainerInitInfo(
            host=get_ip(),
            world_size=self.get_world_size() + 1,
            transport="nccl" if device.type == "cuda" else "gloo",
            timeout_s=self.timeout_s,
            ports=f"{self.group_port}-{self.group_port}",
            rank=0,
        )
        with _naming(self.base_url):
            self._engine = WeightSyncTrainerEngine.trainer_init(
                info, client=self, source=_Weights((), iter(()))
            )
        atexit.register(self.close_communicator)

    def update_named_params(
        self, metadata: list[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        """Send the whole checkpoint. Returns when all workers have verified and loaded it.

        Raises TransportError that names the server; then call `init_communicator` before another update.
        """
        if self._engine is None:
            raise StateError("call init_communicator first")
        shapes = [ParamMeta(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in metadata]
        self._engine.source = _Weights(shapes, named_params)
        with _naming(self.base_url):
            self._engine.send_weights()

    def close_communicator(self) -> None:
        atexit.unregister(self.close_communicator)  # each init registers it
        engine, self._engine = self._engine, None
        if engine:
            engine.shutdown()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update")

    def _call(self, path: str, body: Mapping[str, object] | None = None) -> None:
        """Post once: TRL's session repeats failed calls, and a worker cannot join or receive twice."""
        # Buckets have deadlines of their own; all workers join or none.
        within_s = None if path == "update_weights" else 2 * self.timeout_s
        answer = requests.post(f"{self.base_url}/{path}", json=body or {}, timeout=(self.timeout_s, within_s))
        if answer.status_code != HTTPStatus.OK:
            raise TransportError(f"{path} failed with {answer.status_code}: {answer.text}")


@contextmanager
def _naming(server: str) -> Iterator[None]:
    """Name the server in errors of the connection, of vLLM and of the transport."""
    try:
        yield
    except (TransportError, requests.RequestException) as error:
        raise TransportError(f"vLLM server {server}: {error}") from error
