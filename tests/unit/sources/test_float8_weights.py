"""Checkpoints of float8 weights are served in bfloat16, with their scales multiplied in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.quantised import same_bits
from tests.unit.sources.test_checkpoint_store import held
from weightsync.errors import ConfigError, PlanError
from weightsync.memory.kernels.digests import tensor_digest
from weightsync.plan.layout.formats import Format, Quantization
from weightsync.quantising.quantize import quantize
from weightsync.sources.checkpoint.checkpoint_store import CheckpointStore
from weightsync.sources.checkpoint.safetensors_files import contents

BLOCKS: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [4, 8]}
CHANNELS: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    },
}
EXPERTS = {
    f"m.experts.{number}.{leaf}_proj.weight": (16, 6) if leaf == "down" else (6, 16)
    for number in range(2)
    for leaf in ("gate", "up", "down")
}
# The large and the wide one are read in several chunks, of which those of the wide one begin within a row.
LARGE = {"large.weight": (1030, 2310), "wide.weight": (2, 2_200_000)}
SHAPES = {"a.weight": (9, 21), "b.weight": (4, 8), "c.weight": (1, 3)} | LARGE | EXPERTS


def times_scales(stored: dict[str, torch.Tensor], name: str, form: Format) -> torch.Tensor:
    """Return each element times its block's scale, in float32, then in bfloat16."""
    values, scales = stored[name].float(), stored[f"{name.removesuffix('weight')}{form.scale_suffix}"].float()
    of_row, of_column = (
        torch.arange(whole) // (block or whole) for whole, block in zip(values.shape, form.block, strict=True)
    )
    return (values * scales[of_row][:, of_column]).bfloat16()


def save(folder: Path, config: dict[str, Any] | None) -> tuple[dict[str, torch.Tensor], Format]:
    """Save quantised matrices and a norm, in two files."""
    form = Quantization.read(config or BLOCKS).of("a.weight")
    assert form is not None
    draw = torch.Generator().manual_seed(0)
    stored = {"norm.weight": torch.randn(5, generator=draw).bfloat16()}
    for name, shape in SHAPES.items():
        weight = torch.randn(shape, generator=draw).bfloat16()
        stored |= {name.removesuffix("weight") + last: part for last, part in quantize(weight, form)}
    names = list(stored)
    save_file({name: stored[name] for name in names[::2]}, folder / "model-1.safetensors")
    save_file({name: stored[name] for name in names[1::2]}, folder / "model-2.safetensors")
    if config:
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return stored, form


@pytest.mark.parametrize("num_shares", [1, 3])
@pytest.mark.parametrize("config", [BLOCKS, CHANNELS], ids=["blocks", "channels"])
def test_weights_are_their_values_times_their_scales(
    config: dict[str, Any], num_shares: int, tmp_path: Path
) -> None:
    stored, form = save(tmp_path, config)
    sources = [CheckpointStore([str(tmp_path)], share, num_shares) for share in range(num_shares)]
    for source in sources:
        source.read()
    found = [held(source) for source in sources]
    whole = {name: torch.stack([each[name].float() for each in found]).sum(0).bfloat16() for name in found[0]}
    wanted = {name: times_scales(stored, name, form) for name in SHAPES}
    experts = [
        [wanted.pop(f"m.experts.{n}.{leaf}_proj.weight") for leaf in ("gate", "up", "down")] for n in (0, 1)
    ]
    wanted |= {
        "norm.weight": stored["norm.weight"],
        "m.experts.gate_up_proj": torch.stack([torch.cat([gate, up]) for gate, up, _ in experts]),
        "m.experts.down_proj": torch.stack([down for _, _, down in experts]),
    }
    assert whole.keys() == wanted.keys()
    assert {meta.dtype for meta in sources[0].tensors} == {"bfloat16"}
    for name, tensor in wanted.items():
        assert torch.equal(whole[name], tensor), name


def test_without_a_configuration_they_stay_as_they_are_stored(tmp_path: Path) -> None:
    stored, _ = save(tmp_path, None)
    found = contents([str(tmp_path)])
    assert "a.weight_scale_inv" in {meta.name for meta in found.tensors}
    assert {m.dtype for m in found.tensors if m.name == "a.weight"} == {"float8_e4m3fn"}
    assert len(found.files) == 2
    ignored = BLOCKS | {"modules_to_not_convert": ["a", "b"]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": ignored}))
    kept = {m.name for m in contents([str(tmp_path)]).tensors if m.dtype == "float8_e4m3fn"}
    assert kept == {"a.weight", "b.weight"}
    assert stored["a.weight"].dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("config", [BLOCKS, CHANNELS], ids=["blocks", "channels"])
def test_they_are_served_as_they_are_stored_if_asked(config: dict[str, Any], tmp_path: Path) -> None:
    stored, _ = save(tmp_path, config)
    source = CheckpointStore([str(tmp_path)], stored=True)
    source.read()
    found = held(source)
    assert found.keys() == stored.keys()
    assert all(same_bits(found[name], tensor) for name, tensor in stored.items())
    assert source.published(source.tensors).digests.tolist() == [
        tensor_digest(stored[meta.name], meta.shape) for meta in source.tensors
    ]


@pytest.mark.parametrize(
    ("config", "error", "problem"),
    [
        (BLOCKS | {"weight_block_size": [4, 4]}, PlanError, r"a\.weight_scale_inv.*shape \(3, 3\).*\(3, 6\)"),
        (CHANNELS, PlanError, r"a\.weight_scale.*no file has these scales"),
        ({"quant_method": "gguf"}, ConfigError, r"quant_method.*valid: awq, compressed-tensors, fp8, gptq"),
    ],
)
def test_scales_that_do_not_fit_are_named(
    config: dict[str, Any], error: type[Exception], problem: str, tmp_path: Path
) -> None:
    save(tmp_path, BLOCKS)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(error, match=problem):
        contents([str(tmp_path)])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "it is no JSON: "),
        ("[1]", "it is no JSON object"),
        ('{"quantization_config": 4}', "its quantization_config is no object"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_named(text: str, problem: str, tmp_path: Path) -> None:
    save(tmp_path, BLOCKS)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"config\.json.*{problem}"):
        contents([str(tmp_path)])


def test_scales_that_are_exponents_are_refused(tmp_path: Path) -> None:
    weights = {"num_bits": 8, "type": "float", "group_size": 32}
    group = {"targets": ["Linear"], "weights": weights}
    config = {"quant_method": "compressed-tensors", "format": "mxfp8-quantized"}
    config |= {"config_groups": {"group_0": group}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    form = Quantization.read(config).of("a.weight")
    assert form is not None
    save_file(
        {f"a.{last}": part for last, part in quantize(torch.ones(2, 32), form)}, tmp_path / "a.safetensors"
    )
    with pytest.raises(PlanError, match="with a scale for 1 x 32, which is not read"):
        contents([str(tmp_path)])
