"""vLLM's CPU as a device that Ray counts as GPUs: vLLM's executor ``ray`` knows no CPUs.

A plug-in of vLLM (``vllm.platform_plugins``).
"""

from __future__ import annotations


def platform() -> str:
    """Return the name of the class, as vLLM asks for it."""
    return "tests.fleets.rayed_cpu.RayedCpu"


def __getattr__(name: str) -> type:
    if name != "RayedCpu":
        raise AttributeError(name)
    from vllm.platforms.cpu import CpuPlatform  # which imports vLLM's platforms, that is to say this one

    return type("RayedCpu", (CpuPlatform,), {"ray_device_key": "GPU", "__module__": __name__})
