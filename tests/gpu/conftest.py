"""One Ray cluster for the tests that want one, with a bundle of resources for each GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from transformers import Qwen3Config

from tests.patience import patient

pytest.register_assert_rewrite("tests.gpu.quantised_fleet")  # else a failure there says nothing
ROOT = str(Path(__file__).parents[2])
# For every process that a test starts: vLLM's compiler would otherwise choose among kernels by timing
# them, and two vLLMs that are to agree bit for bit could choose differently.
os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
    ray.init(
        address="local",
        num_gpus=torch.cuda.device_count(),
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=512 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}},
        # A host that gives its guest memory as it is used looks full when it is not.
        _system_config={"memory_monitor_refresh_ms": 0},
    )
    yield
    ray.shutdown()


@pytest.fixture
def bundles(cluster: None) -> Iterator[PlacementGroup]:
    """As many bundles of one GPU as there are."""
    group = placement_group([{"GPU": 1, "CPU": 1}] * torch.cuda.device_count(), strategy="STRICT_PACK")
    ray.get(group.ready(), timeout=patient(60))
    yield group
    remove_placement_group(group)


@pytest.fixture
def num_gpus() -> int:
    return torch.cuda.device_count()


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A Qwen3 of 90 MB in bfloat16; its vocabulary divides by no number of shards."""
    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=10007,
        tie_word_embeddings=False,
        dtype="bfloat16",
    ).save_pretrained(tmp_path)
    return str(tmp_path)
