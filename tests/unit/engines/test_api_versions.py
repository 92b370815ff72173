"""The versions of tokens that SGLang tells."""

from __future__ import annotations

import pytest

from weightsync.engines.sglang.api import _made


@pytest.mark.parametrize(
    ("labels", "versions"), [(("3", "4"), [3, 3, 4]), (("default", "4"), ()), ((), [])], ids=str
)
def test_only_labels_of_ours_are_versions(labels: tuple[str, ...], versions: object) -> None:
    """A server may have begun with another label."""
    spans = [{"version": label, "start": 2 * i, "end": 2 + i} for i, label in enumerate(labels)]
    told = {"weight_versions": spans} if labels else {}
    assert _made({"output_ids": [7, 8, 9], "meta_info": told}, "length").versions == versions
