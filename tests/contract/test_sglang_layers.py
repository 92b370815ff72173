"""A real SGLang's layers of compressed-tensors hold what SGLang itself loads from a quantised checkpoint.

Its models and loaders run in processes of the test, without its kernels: tests/gpu has the tokens.
"""

from __future__ import annotations

import copy
import importlib.util
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.forked import said_by
from tests.models import build_tiny_qwen3
from tests.quantised import dynamic, same_bits, save_quantised
from weightsync.engines.loading.live_digest import LiveParameters, parameters_of
from weightsync.engines.sglang.worker import RankSettings, SglangHost

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("sglang"), reason="sglang is not installed"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]

CPU = torch.device("cpu")


class Sglang:
    """The models of one rank, which SGLang loads."""

    def __init__(self, folder: Path, meeting: Path, rank: int, num_ranks: int) -> None:
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
        from sglang.srt.layers.dp_attention import initialize_dp_attention
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

        if not torch.cuda.is_available():
            torch.cuda.get_device_capability = lambda _=None: (9, 0)  # it chooses schemes by it
        without = {"device": "cpu", "attention_backend": "torch_native", "disable_cuda_graph": True}
        arguments = ServerArgs(str(folder), dtype="bfloat16", tp_size=num_ranks, **without)
        set_global_server_args_for_scheduler(arguments)
        init_distributed_environment(num_ranks, rank, f"file://{meeting}", rank, backend="gloo")
        initialize_model_parallel(num_ranks)
        self._config = ModelConfig.from_server_args(arguments)
        initialize_dp_attention(arguments, self._config)

    def model(self, folder: Path, load_format: str) -> nn.Module:
        """Return a model as SGLang starts it."""
        from sglang.srt.configs.device_config import DeviceConfig
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.model_loader.loader import get_model_loader

        config = copy.copy(self._config)
        config.model_path = str(folder)
        loader = get_model_loader(LoadConfig(load_format=load_format), config)
        model: nn.Module = loader.load_model(model_config=config, device_config=DeviceConfig("cpu"))
        return model


def checked(pipe: Connection, folder: Path, number: int, num_ranks: int) -> None:
    """Send what a rank converts, once its parameters have been compared over three versions."""
    packed = [folder / f"{seed}-packed" for seed in range(2)]
    sglang = Sglang(packed[0], folder / "meeting", number, num_ranks)
    wanted: list[Any] = [sglang.model(each, "safetensors") for each in packed]
    model = sglang.model(packed[0], "dummy")
    host = SglangHost(model, CPU, RankSettings("e0", str(packed[0]), "bfloat16"))
    converts = host.checkpoint().converts
    addresses = {name: each.data_ptr() for name, each in model.named_parameters()}
    for seed in (0, 1, 0):
        tensors = load_file(folder / str(seed) / "model.safetensors")
        loader = host.loader(stored=False)
        with torch.no_grad():
            loader.load((name, each.to(torch.bfloat16)) for name, each in tensors.items())
            loader.finish()
        live = dict(parameters_of(wanted[seed]))
        assert [name for name, each in parameters_of(model) if not same_bits(each, live[name])] == []
        assert LiveParameters(model, CPU).digest() == LiveParameters(wanted[seed], CPU).digest()
    assert LiveParameters(model, CPU).digest() != LiveParameters(wanted[1], CPU).digest()
    assert {name: each.data_ptr() for name, each in model.named_parameters()} == addresses
    pipe.send(converts)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.faults)])
@pytest.mark.parametrize(
    ("kind", "moe", "says"),
    [
        ("float", False, "14 become float8_e4m3fn"),
        ("float", True, "56 become"),
        ("int", False, "14 become int8"),
    ],
)
def test_three_versions_are_what_sglang_loads(
    kind: str, moe: bool, says: str, num_ranks: int, tmp_path: Path
) -> None:
    for seed in range(2):
        build_tiny_qwen3(tmp_path / str(seed), moe, seed)
        save_quantised(tmp_path / str(seed), tmp_path / f"{seed}-packed", dynamic(kind))

    def of_rank(number: int) -> str:
        found: str = said_by(checked, tmp_path, number, num_ranks)
        return found

    with ThreadPoolExecutor(num_ranks) as threads:
        for converts in threads.map(of_rank, range(num_ranks)):
            assert converts.startswith(says)
