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

Made by `bash scripts/models`, which runs the tests marked `models` (ten minutes) and writes what they found.
A family is one entry of `tests/families.py`: a small model with random weights and the options of published
ones. A plain trainer sends two versions in float32 to an engine that started with the first.

| column | what was compared |
|---|---|
| files | `save_pretrained` writes the trainer's tensors, so that `register_checkpoint` takes the folder |
| torch | all tensors of the transformers engine, byte for byte, and greedy tokens |
| vllm | the same in vLLM's CPU build in bfloat16, and logits; the second version came twice |

The engine was compared with the same engine after that had loaded the files of the second version itself.
A cell repeats `SyncReport.proofs`: what each update compared. Vision towers are compared, but no test sends
images. *not served* quotes vLLM, which does not run the model here even when it loads the files itself.
*refused* quotes the error of `connect()`.

"""

TAIL = """
vLLM needs torchvision for models with images. These rows ran with torchvision 0.28.0 without its compiled
operators, since they do not load beside a CPU build of torch. Without torchvision the tests skip.

## On a GPU

`tests/gpu/test_families_on_gpu.py` compares the same in bfloat16, with CUDA graphs in SGLang and for
DeepSeek-V3 in vLLM. These families passed on one H200 on 2026-11-28 and 29, with
vLLM 0.33 all that are tested:

| engine | families | commit |
|---|---|---|
| vLLM 0.33.0, torch 2.14.1 | GPT-OSS (loader), Qwen3-VL (loader) | b6395191 |
| vLLM 0.33.0, torch 2.14.1 | DeepSeek-V3 with YaRN (loader), Mixtral (live weights) | c793cf1f |
| vLLM 0.33.0, torch 2.14.1 | Llama, Gemma 3 | 6888e13d |
| vLLM 0.33.0, torch 2.14.1 | OLMoE, Qwen2 (live weights) | b2b54e58 |
| vLLM 0.33.0, torch 2.14.1 | GLM-4 mixture, Qwen3-Next, Qwen3.5 (live weights) | 1d00d43d |
| vLLM 0.33.0, torch 2.14.1 | Nemotron-H (loader) | 1d00d43d |
| vLLM 0.24.0 | DeepSeek-V3 with YaRN (loader), Qwen3-VL (loader), Mixtral (live weights) | ab555972 |
| SGLang 0.5.23, torch 2.14.1 | DeepSeek-V3 (loader) | c793cf1f |
| SGLang 0.5.23, torch 2.14.1 | Llama | 6888e13d |
| SGLang 0.5.23, torch 2.14.1 | Gemma 3, Mixtral, Qwen2 (live weights) | b2b54e58 |
| SGLang 0.5.23, torch 2.14.1 | GLM-4 mixture, OLMoE, Phi-3, Qwen2 mixture (live weights) | 1d00d43d |
| SGLang 0.5.23, torch 2.14.1 | GPT-OSS (loader) | 1d00d43d |
| SGLang 0.5.17 | DeepSeek-V3 (loader), Mixtral (live weights) | ab555972 |

SGLang 0.5.23 cannot load Gemma 2 with transformers 5.17, also from files: its configuration has no
`hidden_act`. vLLM 0.24 raises a `KeyError` for a GPT-OSS in bfloat16, also when it loads the files itself.

## Loaders that write directly

Most loaders of vLLM give each tensor to the `weight_loader` of a parameter. vLLM repeats this call once the
parameter has memory. By their source, these loaders of vLLM 0.32 also write parameters or buffers directly:
`bailing_moe_v3`, `bert`, `colbert`, `gpt_oss`, `llama_eagle3`, `longcat_flash_ngram`, `mimo_v2`, `mllama4`,
`qwen3_eagle3`, `step3_text`, `step3p5`. Updates lead such writes to memory that becomes live, and count
them. Where that cannot be, `connect()` names the tensor. By their source, `adapters`, `cohere_asr`,
`medusa` and the transformers backend (an output head with a bias, as in Phi) replace a parameter.
`connect()` refuses a model whose loader does that; the tests show it with Phi and with a small loader.
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
