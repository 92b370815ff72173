"""Buckets quantised in place, with the GPU's kernels replaced by the reference on a CPU.

`tests/gpu/test_quantised_in_place_on_gpu.py` runs the kernels.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernel_doubles import use_doubles
from tests.quantised_rig import FORMATS, Rig, trained
from weightsync.errors import TransportError
from weightsync.plan.layout.formats import Format
from weightsync.quantising.quantizing_tables import NoKernelError


@pytest.fixture(autouse=True)
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    use_doubles(monkeypatch)


@pytest.mark.parametrize("name", FORMATS)
def test_live_bytes_are_those_of_the_reference(name: str) -> None:
    Rig(FORMATS[name], "cpu").check_updates()


def test_what_trainers_have_quantised_is_written_as_it_is() -> None:
    Rig(FORMATS["fp8 blocks"], "cpu", sends_stored=True).check_updates()


def test_a_byte_that_changes_before_verification_fails_the_update() -> None:
    rig = Rig(FORMATS["fp8 blocks"], "cpu")
    sink = rig.sink()
    rig.take(sink, trained(0))
    rig.model.get_parameter("a_weight").data.view(torch.uint8)[3, 5] ^= 1
    with pytest.raises(TransportError, match=r"a\.weight was written, and live memory holds other bytes"):
        sink.finish()


def test_live_parameters_that_a_holder_copied_are_digested_as_they_are() -> None:
    rig = Rig(FORMATS["fp8 channels"], "cpu")
    sink = rig.sink()
    sink.written()
    sink.finish()
    assert sink.is_copied
    assert not sink.digests().any()
    assert sink.live == rig.parameters.digest()


def test_a_bucket_that_does_not_come_fails_the_update() -> None:
    rig = Rig(FORMATS["fp8 blocks"], "cpu")
    with pytest.raises(TransportError, match=r"0 of \d+ buckets came"):
        rig.sink().finish()


def test_what_no_kernel_makes_is_named() -> None:
    packed = Format(rule="compressed-tensors", values="int4", block=(1, 8), packed=True)
    with pytest.raises(NoKernelError, match=r"a\.weight: no kernel quantises bfloat16 to int4"):
        Rig(packed, "cpu")
    with pytest.raises(
        NoKernelError, match=r"experts\.0\.gate_proj\.weight: a block of 100 rows would reach"
    ):
        Rig(Format(rule="fp8", values="float8_e4m3fn", block=(100, 96)), "cpu")


def test_an_update_after_one_that_ended_early_writes_everything() -> None:
    rig = Rig(FORMATS["fp8 blocks"], "cpu")
    rig.take(rig.sink(), trained(0))
    early = rig.sink()
    rig.take(early, trained(1), num_buckets=4)
    early.abandon()
    assert rig.differ(trained(0)) != []
    sink = rig.sink()
    rig.take(sink, trained(2))
    sink.finish()
    assert rig.differ(trained(2)) == []
