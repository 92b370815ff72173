"""What becomes of tensors on their way, in words."""

from __future__ import annotations

import pytest

from weightsync.plan import Layout, RankLayout, Segment, TensorMeta
from weightsync.plan.layout.conversion import conversion_of
from weightsync.plan.layout.segment import AS_STORED

WIDE, NARROW = (
    [TensorMeta(name, dtype, (2, 3)) for name in "ab"] + [TensorMeta("n", "int32", (1,))]
    for dtype in ("float32", "bfloat16")
)


def layout(*metas: TensorMeta, live: bool = True, tied: tuple[tuple[str, str], ...] = ()) -> Layout:
    buffers = metas if live else ()
    return Layout.from_ranks([RankLayout(metas, tuple(map(Segment.whole, metas)), tied, buffers=buffers)])


AT_SOURCE = "cast: 2 tensors from float32 to bfloat16 at the source"
AT_ENGINE = "cast: 2 tensors from float32 to bfloat16 at the engine"


@pytest.mark.parametrize(
    ("travels", "holds", "converts", "live", "said"),
    [
        (WIDE, WIDE, "", True, "identity"),
        (WIDE, WIDE, "", False, "load"),
        (NARROW, NARROW, "", True, AT_SOURCE),
        (NARROW, NARROW, "", False, f"{AT_SOURCE}; load"),
        (WIDE, NARROW, "", True, AT_ENGINE),
        (WIDE, NARROW, "2 become int4", False, f"{AT_ENGINE}; quantise: 2 become int4"),
        (WIDE, WIDE, AS_STORED, False, "load"),
        (
            [WIDE[0], NARROW[1]],
            NARROW[:2],
            "",
            True,
            "cast: 1 tensor from float32 to bfloat16 at the source; "
            "cast: 1 tensor from float32 to bfloat16 at the engine",
        ),
    ],
)
def test_each_conversion_says_what_and_where(
    travels: list[TensorMeta], holds: list[TensorMeta], converts: str, live: bool, said: str
) -> None:
    assert conversion_of(layout(*WIDE), travels, layout(*holds, live=live), converts) == said


def test_a_tensor_is_known_by_its_tied_name_and_others_do_not_count() -> None:
    source = layout(WIDE[0], tied=(("b", "a"),))
    assert conversion_of(source, [NARROW[1]], layout(*NARROW), "").startswith("cast: 1 tensor from float32")
