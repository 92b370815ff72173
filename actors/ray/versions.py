"""Versions that the hosts of a run should share: weightsync, torch and NCCL."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

import weightsync

REMEDY = "install one version on all hosts"


def own_versions() -> dict[str, str]:
    """Return this process's versions of weightsync, torch and NCCL.

    NCCL's is the one that torch loads, as ``2.28.9``, and is empty for a torch without CUDA.
    """
    return {"weightsync": weightsync.__version__, "torch": str(torch.__version__), "nccl": _nccl()}


def _nccl() -> str:
    if not torch.version.cuda or not torch.distributed.is_nccl_available():
        return ""
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version[:3]))


def by_version(library: str, hosts: Iterable[tuple[str, Mapping[str, str]]]) -> dict[str, list[str]]:
    """Return the hosts of each version of `library`.

    Hosts without the library are left out. A build suffix, as in ``2.11.0+cpu``, does not count.
    """
    found: dict[str, list[str]] = {}
    for host, versions in hosts:
        if version := versions.get(library, "").partition("+")[0]:
            found.setdefault(version, []).append(host)
    return found
