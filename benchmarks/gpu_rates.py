"""Rates of this host's GPU memory and NVLink, by bare copies.

    python -m benchmarks.gpu_rates

Prints `LinkRates` as JSON. A rate is the best of several copies of 1 GiB of random data between CUDA events:
within the first GPU for memory, with read and written bytes counted, and from the second to the first GPU for
NVLink. Needs 2 GiB of memory on the first GPU, and 1 GiB on the second.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from weightsync.plan.figures.estimate import LinkRates

__all__ = ["measured_rates"]

_NBYTES = 1 << 30
_REPEATS = 15
_NIC = 50.0
"""Not measured: a benchmark has one host."""


@functools.cache
def measured_rates() -> LinkRates:
    """Measure in a separate process, which leaves no CUDA context behind."""
    command = [sys.executable, "-m", "benchmarks.gpu_rates"]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    return LinkRates(**json.loads(done.stdout.splitlines()[-1]))


def _main() -> None:
    within = 2 * _rate("cuda:0")
    between = _rate("cuda:1") if torch.cuda.device_count() > 1 else within
    rates = LinkRates(name=torch.cuda.get_device_name(), hbm=within, nvlink=between, nic=_NIC)
    print(json.dumps(asdict(rates)))


def _rate(source: str) -> float:
    """Return the bytes per nanosecond of a copy from `source` to the first GPU."""
    there = torch.empty(_NBYTES // 4, dtype=torch.int32, device=source).random_()
    here = torch.empty_like(there, device="cuda:0")
    milliseconds: list[float] = []
    for _ in range(_REPEATS):
        torch.cuda.synchronize(source)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        here.copy_(there)
        end.record()
        end.synchronize()
        milliseconds.append(start.elapsed_time(end))
    if not torch.equal(here.cpu(), there.cpu()):
        raise RuntimeError(f"a copy from {source} arrived wrong")
    return _NBYTES / min(milliseconds) / 1e6


if __name__ == "__main__":
    _main()
