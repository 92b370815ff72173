"""The code of docs/shuffle.md does what the page says; ranks are threads."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tests.patience import patient
from weightsync.transports import transport_class

PAGE = Path(__file__).parents[2] / "docs/shuffle.md"


def test_rows_become_columns() -> None:
    names: dict = {}
    for code in re.findall(r"```python\n(.+?)```", PAGE.read_text(encoding="utf-8"), re.S):
        exec(compile(code, PAGE.name, "exec"), names)
    num_ranks = names["plan"].num_ranks
    transports = [transport_class("gloo")() for _ in range(num_ranks)]
    address = transports[0].offer("127.0.0.1")
    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [pool.submit(names["work"], rank, address, each) for rank, each in enumerate(transports)]
        held = [future.result(patient(60)) for future in futures]
    for transport in transports:
        transport.close()
    whole = torch.arange(24.0).reshape(4, 6)
    assert torch.equal(torch.cat(held[:2]), whole)
    assert torch.equal(torch.cat(held[2:], dim=1), whole)
