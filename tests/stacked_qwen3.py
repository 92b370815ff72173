"""A plugin that has vLLM take Qwen3 for a model whose checkpoints stack experts.

Its slots for adapters of experts then have gate and up projections together, as those of Qwen3-VL.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["save_plugin"]

_PLUGIN = """
def stack():
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

    Qwen3MoeForCausalLM.is_3d_moe_weight = True
"""
_ENTRY = "[vllm.general_plugins]\nstacked_qwen3 = stacked_qwen3:stack\n"


def save_plugin(folder: Path) -> None:
    """Save it in `folder`, which is to be in `sys.path`; processes that are spawned have the same paths."""
    about = folder / "stacked_qwen3-1.dist-info"
    about.mkdir(parents=True)
    (folder / "stacked_qwen3.py").write_text(_PLUGIN)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: stacked-qwen3\nVersion: 1\n")
    (about / "entry_points.txt").write_text(_ENTRY)
