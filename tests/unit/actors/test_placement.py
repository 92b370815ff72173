"""GPUs by names that another process understands."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from weightsync.actors.ray.placement import Placement
from weightsync.memory.tensors import device_id

UUID = "8932f937-d72c-4106-c12f-20bd9faed9f6"
OTHER = "63feeb45-94c6-b9cb-78ea-98e9b7a5be6b"


@pytest.mark.parametrize("visible", [None, "", "0,1", f"GPU-{OTHER},GPU-{UUID}"])
def test_a_gpu_is_named_by_its_uuid(monkeypatch: pytest.MonkeyPatch, visible: str | None) -> None:
    assert _gpu(monkeypatch, visible) == f"GPU-{UUID}"


@pytest.mark.parametrize("name", [f"MIG-{OTHER}", f"MIG-GPU-{UUID}/1/0"])
@pytest.mark.parametrize("more", ["", f",MIG-{UUID}"])
def test_a_mig_instance_keeps_its_own_name(monkeypatch: pytest.MonkeyPatch, name: str, more: str) -> None:
    assert _gpu(monkeypatch, name + more) == name


def test_a_slot_has_no_gpu() -> None:
    assert Placement("node", "10.0.0.1", "slot:0", 1).gpu == ""


def _gpu(monkeypatch: pytest.MonkeyPatch, visible: str | None) -> str:
    """Return what ``CUDA_VISIBLE_DEVICES`` of a holder is when a rank's own was `visible`."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=UUID))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    return Placement("node", "10.0.0.1", device_id(torch.device("cuda", 0)), 1).gpu
