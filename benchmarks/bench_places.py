"""Cost of checking that a module is unchanged, against comparing addresses alone. CPU only.

    python -m benchmarks.bench_places [--tensors 20000] [--rounds 80]

Both check the same module in turns. ``addresses`` compares children and addresses. It misses a changed dtype
and an added parameter, which ``AddressGuard.as_before`` notices.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from operator import is_

from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks.common import environment, print_table
from weightsync.memory.addresses import AddressGuard
from weightsync.memory.tensors import named_tensors

__all__ = ["main"]


def main() -> None:
    """Measure two kinds of module and print the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensors", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=80)
    args = parser.parse_args()
    rows = [
        _row("linear layers with biases", _dense(args.tensors), args.rounds),
        _row("experts without biases", _experts(args.tensors), args.rounds),
    ]
    print_table("Places", rows, environment())


def _dense(num_tensors: int) -> nn.Module:
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(num_tensors // 2)])


def _experts(num_tensors: int) -> nn.Module:
    def expert() -> nn.Module:
        parts = {name: nn.Linear(4, 4, bias=False) for name in ("gate_proj", "up_proj", "down_proj")}
        return nn.ModuleDict(parts | {"act": nn.SiLU()})

    return nn.Sequential(*[expert() for _ in range(num_tensors // 3)])


def _row(kind: str, module: nn.Module, num_rounds: int) -> dict[str, object]:
    tensors = named_tensors(module)[0]
    guard = AddressGuard(module, tensors)
    ways: dict[str, Callable[[], bool]] = {"addresses": _addresses(module)}
    ways["as_before"] = lambda: guard.as_before(module)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    gc.freeze()
    for _ in range(num_rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            assert way()
            seconds[name].append(time.perf_counter() - started)
    row: dict[str, object] = {"module": kind, "tensors": len(tensors), "modules": len(list(module.modules()))}
    for name, taken in seconds.items():
        row |= {f"{name} ms": statistics.median(taken) * 1e3, f"{name} best": min(taken) * 1e3}
    return row


def _addresses(module: nn.Module) -> Callable[[], bool]:
    """Return the check that `AddressGuard` did until 6e6a236: same children, same addresses."""
    modules = list(module.modules())
    inner = [(each._modules, key) for each in modules for key in each._modules]
    parents, names = [home for home, _ in inner], [key for _, key in inner]
    children = list(map(dict.get, parents, names))
    slots = [(home, key) for each in modules for home in (each._parameters, each._buffers) for key in home]
    homes = [home for home, key in slots if home[key] is not None]
    keys = [key for home, key in slots if home[key] is not None]

    def found() -> list[int | None]:
        held = [home.get(key) for home, key in zip(homes, keys, strict=True)]
        local = (each._local_tensor if isinstance(each, DTensor) else each for each in held)
        return [each.data_ptr() if each is not None else None for each in local]

    addresses = found()
    return lambda: all(map(is_, map(dict.get, parents, names), children)) and found() == addresses


if __name__ == "__main__":
    main()
