"""A platform of verl for CPUs; verl imports this module if ``VERL_USE_EXTERNAL_MODULES`` names it."""

from __future__ import annotations

from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformRegistry
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.utils.distributed import initialize_global_process_group_ray


class _Device(ModuleType):
    """Has no memory that could be counted."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name, lambda *_, **__: 0)

    def get_device_name(self, *_: object) -> str:
        return "CPU"

    def mem_get_info(self, *_: object) -> tuple[int, int]:
        return 1, 1


@PlatformRegistry.register(platform="cpu")
class OnCpus(PlatformCUDA):
    """Ray counts GPUs that nobody uses."""

    device_name = "cpu"
    device_module = _Device("cpus")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def nothing(self, *_: object) -> None: ...

    set_device = synchronize = manual_seed = manual_seed_all = set_allocator_settings = empty_cache = nothing

    def communication_backend_name(self) -> str:
        """Make verl's process group, which verl would make next with CPUs named twice."""
        initialize_global_process_group_ray(backend="cpu:gloo")
        return "gloo"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def nvtx_range(self, msg: str) -> Any:
        return nullcontext()
