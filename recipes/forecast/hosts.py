"""Bandwidths of the hosts of a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weightsync.config import Positive, check_fields
from weightsync.errors import ConfigError
from weightsync.plan.figures.estimate import LinkRates


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """A bandwidth in 1e9 bytes per second, measured or from a datasheet."""

    gb_per_s: float
    source: Literal["measured", "datasheet"]

    def __post_init__(self) -> None:
        check_fields(self, field="cluster")
        if not self.gb_per_s > 0:
            raise ConfigError("cluster: gb_per_s", self.gb_per_s, "give a number above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSpec:
    """One of the equal hosts of a cluster.

    Rates are per GPU, and per direction if there are two.

    Attributes:
        hbm: GPU memory, read and written bytes together.
        nvlink: to the other GPUs of the host.
        host: between the host's memory and the GPU.
        nic: from the GPU to other hosts.
    """

    gpu: str
    gpus_per_host: Positive
    hbm: Rate
    nvlink: Rate
    host: Rate
    nic: Rate

    def __post_init__(self) -> None:
        check_fields(self, field="cluster")

    def num_hosts(self, num_gpus: int) -> int:
        """Return the number of hosts that `num_gpus` GPUs fill, the last perhaps in part."""
        return -(-num_gpus // self.gpus_per_host)

    def link_rates(self, name: str) -> LinkRates:
        """Return the rates that floors are computed with, under a display `name`."""
        return LinkRates(name=name, hbm=self.hbm.gb_per_s, nvlink=self.nvlink.gb_per_s, nic=self.nic.gb_per_s)
