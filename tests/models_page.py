"""Runs the suite of model families and makes docs/models.md from what it found.

bash scripts/models [PYTEST OPTIONS, such as -k mixtral or -n 2]

Rows of families that did not run are those of earlier runs.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs/models.md", ROOT / "benchmarks/results/models.json"
COLUMNS = ("class", "tensors", "files", "torch", "vllm")
HEAD = """# Models

Made by `bash scripts/models`, which runs tests marked `models` (half an hour) and writes what they found.
A family is one entry of `tests/families.py`: a small model with random weights and the options of published
ones. A plain trainer sends two versions in float32 to an engine that started with the first.

| column | what was compared |
|---|---|
| files | `save_pretrained` writes the trainer's tensors, so that `register_checkpoint` takes the folder |
| torch | all that the transformers engine computes with, byte for byte, and greedy tokens |
| vllm | the same in vLLM's CPU build in bfloat16, and logits; the second version came twice |

Both are equal to those of the same model when it has loaded the files of the second version, without us. The
cell says what the engine compared in each update, as `SyncReport.proofs` does. Vision towers are compared; no
images were asked about. *not served* has the words of vLLM alone, *refused* those of `connect()`.

"""


TAIL = """
## On a GPU

`tests/gpu/test_families_on_gpu.py` compares the same in bfloat16 with engines that loaded the files. On one
H200 on 2026-11-28 it passed with vLLM 0.24.0 (DeepSeek-V3 with YaRN and CUDA graphs, and Qwen3-VL: their
loader; Mixtral: live weights) and with SGLang 0.5.17 (DeepSeek-V3: its loader; Mixtral: live weights). vLLM
0.24 itself does not load a GPT-OSS that is not in MXFP4 (`KeyError`); no GPU has run it here.

## Loaders that write for themselves

Most loaders of vLLM give each tensor to a parameter's `weight_loader`, which vLLM repeats once the
parameter has memory. These of vLLM 0.32 also write parameters or buffers directly: `bailing_moe_v3`,
`bert`, `colbert`, `gpt_oss`, `llama_eagle3`, `longcat_flash_ngram`, `mimo_v2`, `mllama4`, `qwen3_eagle3`,
`step3_text`, `step3p5`. Such writes are led to memory that becomes live, and counted; where that cannot be,
`connect()` names the tensor. These replace a parameter, and are refused by its name: `adapters`
(`score.bias`), `cohere_asr`, `medusa` (`token_map`), and the transformers backend for an output head with a
bias (Phi).
"""


class Found:
    """A plugin of pytest that collects what tests record of their families."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        family = report.nodeid.rpartition("[")[2].rstrip("]")
        if "backend" in report.nodeid:
            return  # a family by another class, which has no column
        row = self.rows.setdefault(family, {})
        if report.when == "call":
            row.update({name: str(value) for name, value in report.user_properties})
        if report.failed:
            row[_column(report.nodeid)] = "**wrong**"


def _column(nodeid: str) -> str:
    name = nodeid.rpartition("::")[2]
    return "vllm" if "vllm" in name else "torch" if "transformers" in name else "files"


def versions() -> str:
    """Return what ran, and when."""
    names = ("torch", "transformers", "vllm")
    found = [(name, _version(name)) for name in names]
    return ", ".join(f"{name} {number}" for name, number in found) + time.strftime(", %Y-%m-%d")


def _version(name: str) -> str:
    # vLLM's build for CPUs is a distribution of another name.
    (distribution,) = {*importlib.metadata.packages_distributions()[name]}
    return importlib.metadata.version(distribution)


def page(rows: Mapping[str, Mapping[str, str]]) -> str:
    """Return the whole of docs/models.md."""
    ran = sorted({row["ran"] for row in rows.values()})
    lines = [f"{HEAD}Ran with {'; '.join(ran)}.", "", f"| family | {' | '.join(COLUMNS)} |"]
    lines.append("|---" * (len(COLUMNS) + 1) + "|")
    for family, row in sorted(rows.items()):
        lines.append(f"| {family} | {' | '.join(row.get(name, '') for name in COLUMNS)} |")
    return "\n".join(lines) + "\n" + TAIL


def main(*options: str) -> int:
    found = Found()
    status = pytest.main(["tests/contract/test_families.py", "-m", "models", *options], plugins=[found])
    ran, rows = versions(), json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for family, row in found.rows.items():
        rows[family] = {**rows.get(family, {}), **row, "ran": ran}
    RESULTS.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(rows))
    return int(status)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
