"""Buckets quantised into live parameters in place have the bytes of the reference on a CPU."""

from __future__ import annotations

import pytest

from tests.quantised_rig import FORMATS, Rig

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", FORMATS)
def test_live_bytes_are_those_of_the_reference(name: str) -> None:
    Rig(FORMATS[name], "cuda").check_updates()


def test_what_trainers_have_quantised_is_written_as_it_is() -> None:
    Rig(FORMATS["fp8 blocks"], "cuda", sends_stored=True).check_updates()
