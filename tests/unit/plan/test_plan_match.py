"""Which tensors travel, in which order, and which pairs of sides are refused."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from weightsync.errors import ConfigError, PlanError
from weightsync.plan import (
    Box,
    Layout,
    Members,
    Plan,
    RankLayout,
    Segment,
    TensorMeta,
    make_plan,
    same_dtype_tensors,
)
from weightsync.plan.broadcast.plan import by_tensor
from weightsync.plan.layout.replicas import Replicas

A, B, C = (TensorMeta(name, "bfloat16", (4, 2)) for name in "abc")


def whole(
    *metas: TensorMeta, tied: tuple[tuple[str, str], ...] = (), known: tuple[TensorMeta, ...] = ()
) -> Layout:
    """One rank that holds `metas` whole, in this order; `known` are declared without segments."""
    segments = tuple(Segment(m.name, Box((0,) * len(m.shape), m.shape), m.name, 0, (4, 2)) for m in metas)
    return Layout.from_ranks([RankLayout((*known, *metas), segments, tied)])


def plan(source: Layout, *engines: Layout, **changes: int) -> Plan:
    names = [f"e{number}" for number in range(len(engines))]
    members = Members(1, (0,), tuple((name, (0,)) for name in names))
    settings = {"bucket_bytes": 1 << 10, "max_staging_bytes": 1 << 20, **changes}
    return make_plan(source, dict(zip(names, engines, strict=True)), members, **settings)


def names(made: Plan) -> list[str]:
    return [meta.name for meta in made.tensors]


def test_tensors_travel_as_the_engine_lists_them() -> None:
    assert names(plan(whole(A, B, C), whole(C, A, B), whole(A, B, C))) == ["c", "a", "b"]
    assert names(plan(whole(A, B, C), whole(C, known=(B, A)))) == ["c", "b", "a"]


def test_the_order_in_which_engines_are_registered_is_of_no_matter() -> None:
    engines = {"e0": whole(C, A, B), "e1": whole(A, B, C)}
    ranks = (("e0", (0,)), ("e1", (1,)))
    first, second = (
        make_plan(whole(A, B, C), layouts, fleet, bucket_bytes=256, max_staging_bytes=1 << 20)
        for layouts, fleet in [
            (engines, Members(2, (0,), ranks)),
            (dict(reversed(engines.items())), Members(2, (0,), ranks[::-1])),
        ]
    )
    assert names(first) == names(second) == ["c", "a", "b"]
    assert first.digest() == second.digest()


@pytest.mark.parametrize("field", [field.name for field in fields(Plan)])
def test_the_digest_covers_each_field(field: str) -> None:
    made = plan(whole(A, B), whole(A, B), bucket_bytes=256)
    value = getattr(made, field)
    other: object
    if isinstance(value, np.ndarray):
        other = value.copy()
        other.reshape(-1)[-1] += 1
    elif field == "members":
        made, other = replace(made, members=Members(2, (0,), value.engines)), Members(2, (1,), value.engines)
    elif field == "replicas":
        boxes = (np.array([0, 1]), *np.zeros((4, 2), np.int64), np.zeros((2, 1), np.int64))
        made, other = replace(made, replicas=Replicas(*boxes)), Replicas(*boxes[:4], boxes[4] + 1, boxes[5])
    elif isinstance(value, int):
        other = value + 1
    else:
        other = (*value, A if field == "tensors" else ("x", "a"))
    assert replace(made, **{field: other}).digest() != made.digest()


def test_the_digest_covers_the_holders_of_engines() -> None:
    made = plan(whole(A), whole(A))
    one, other = (Members(2, (0,), (("e0", (holder,)),)) for holder in (0, 1))
    assert replace(made, members=one).digest() != replace(made, members=other).digest()


def test_floating_dtypes_are_cast_by_the_source() -> None:
    wide = TensorMeta("a", "float32", (4, 2))
    made = plan(whole(wide), whole(A))
    assert made.tensors == (A,)
    assert made.total_nbytes == made.bucket(0).pieces[0].nbytes == 16


@pytest.mark.parametrize(
    ("ours", "theirs"), [("int8", "uint8"), ("float32", "int32"), ("bool", "bfloat16"), ("int64", "int32")]
)
def test_other_dtypes_must_agree(ours: str, theirs: str) -> None:
    with pytest.raises(PlanError, match=f"a: dtype {ours} at the source, {theirs} at the engine"):
        plan(whole(TensorMeta("a", ours, (4, 2))), whole(TensorMeta("a", theirs, (4, 2))))


FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


@pytest.mark.parametrize("float8", FLOAT8)
@pytest.mark.parametrize("other", ["bfloat16", "float16", "float32", "float64"])
def test_a_float8_is_never_cast_since_its_values_need_a_scale(float8: str, other: str) -> None:
    for ours, theirs in ((other, float8), (float8, other)):
        args = whole(TensorMeta("a", ours, (4, 2))), whole(TensorMeta("a", theirs, (4, 2)))
        told = f"a: dtype {ours} at the source, {theirs} at the engine; a float8 is not cast.* scale"
        with pytest.raises(PlanError, match=told):
            plan(*args)
        with pytest.raises(PlanError, match=told):
            same_dtype_tensors(args[0], "e0", args[1])


@pytest.mark.parametrize("float8", FLOAT8)
def test_the_same_float8_on_both_sides_travels_as_it_is(float8: str) -> None:
    meta = TensorMeta("a", float8, (4, 2))
    assert plan(whole(meta), whole(meta)).tensors == (meta,)
    assert same_dtype_tensors(whole(meta), "e0", whole(meta)) == (frozenset("a"), {})
    with pytest.raises(PlanError, match="a float8 is not cast"):
        plan(whole(meta), whole(TensorMeta("a", FLOAT8[float8 == FLOAT8[0]], (4, 2))))


def test_missing_and_extra_tensors_name_the_nearest() -> None:
    layer = TensorMeta("model.layers.0.up.weight", "bfloat16", (4, 2))
    typo = TensorMeta("model.layer.0.up.weight", "bfloat16", (4, 2))
    with pytest.raises(
        PlanError, match=r"no trainer or checkpoint declares it; did you mean 'model\.layer\.0\.up"
    ):
        plan(whole(typo, A), whole(layer, A, B))
    with pytest.raises(
        PlanError, match=r'declares it; give TrainerShard names=\{"model\.layer\.": "model\.layers\."\}'
    ):
        plan(whole(typo, A), whole(layer, A))
    part = replace(typo, shape=(2, 2))  # of what the engine has, which another name does not make whole
    with pytest.raises(PlanError, match=r"did you mean 'model\.layer\.0\.up"):
        plan(whole(part, A), whole(layer, A))
    with pytest.raises(
        PlanError, match="b: a trainer or checkpoint declares it, but no engine has it; leave it out"
    ):
        plan(whole(A, B), whole(A))


TEXT = tuple(TensorMeta(f"model.language_model.{name}", "bfloat16", (4, 2)) for name in ("a", "b"))
TOWER = tuple(TensorMeta(f"model.visual.blocks.{i}.weight", "bfloat16", (4, 2)) for i in range(3))


def test_a_tower_that_no_trainer_has_is_named_with_what_may_hold_it() -> None:
    says = (
        r"^model\.visual\.blocks\.0\.weight: the engine needs it, .* declares it; .*"
        r"If nobody trains model\.visual\.\* \(3 tensors\), register one more trainer .* frozen=\[\"\*\"\]$"
    )
    with pytest.raises(PlanError, match=says):
        plan(whole(*TEXT), whole(*TOWER, *TEXT))
    with pytest.raises(
        PlanError, match=r"model\.language_model\.b: .*declares it; [^.]*'model\.language_model\.a'"
    ):
        plan(whole(*TEXT[:1]), whole(*TEXT))


def test_a_tower_that_no_engine_has_is_named_with_the_pattern_that_excludes_it() -> None:
    with pytest.raises(
        PlanError, match=r'^model\.visual\.blocks\.0.* exclude=\["model\.visual\.\*"\], or rename'
    ):
        plan(whole(*TEXT, *TOWER), whole(*TEXT))
    with pytest.raises(PlanError, match=r'exclude=\["model\.language_model\.b"\]'):
        plan(whole(*TEXT), whole(*TEXT[:1]))


@pytest.mark.parametrize(("ours", "theirs"), [(32, 30), (30, 32)])
def test_vocabularies_of_different_sizes_have_their_remedy(ours: int, theirs: int) -> None:
    sides = (whole(TensorMeta("embed", "bfloat16", (rows, 8))) for rows in (ours, theirs))
    with pytest.raises(PlanError, match="folder whose configuration has the trainer's vocab_size"):
        plan(*sides)
    with pytest.raises(PlanError) as told:
        plan(whole(TensorMeta("bias", "bfloat16", (ours,))), whole(TensorMeta("bias", "bfloat16", (theirs,))))
    assert "vocab" not in str(told.value)


def test_engines_must_take_the_same() -> None:
    with pytest.raises(PlanError, match="b: engine e1 needs it, engine e0 does not"):
        plan(whole(A, B), whole(A), whole(A, B))
    with pytest.raises(PlanError, match="b: engine e0 needs it, engine e1 does not"):
        plan(whole(A, B), whole(A, B), whole(A))
    longer = TensorMeta("a", "float16", (5, 2))
    with pytest.raises(
        PlanError, match=r"a: engine e0 says bfloat16 \(4, 2\), engine e1 says float16 \(5, 2"
    ):
        plan(whole(A), whole(A), whole(longer))


@pytest.mark.parametrize("trained", ["bfloat16", "float32", "float64"])
def test_a_tensor_that_engines_hold_in_different_floats_travels_as_the_source_has_it(trained: str) -> None:
    ours, wide = replace(A, dtype=trained), replace(A, dtype="float32")
    made = plan(whole(ours, B), whole(A, B), whole(wide, B))
    assert made.tensors == (ours, B)
    assert plan(whole(ours, B), whole(wide, B), whole(wide, B)).tensors == (wide, B)


@pytest.mark.parametrize("dtype", ["int16", "float8_e4m3fn"])
def test_what_cannot_be_cast_names_both_engines_and_remedies(dtype: str) -> None:
    wrong = "a: engine e0 holds it as bfloat16, engine e1 as .*; only bfloat16.*two WeightSyncs.*add_model"
    with pytest.raises(PlanError, match=wrong):
        plan(whole(A), whole(A), whole(replace(A, dtype=dtype)))


def test_a_tensor_tied_on_both_sides_is_sent_once() -> None:
    made = plan(whole(A, tied=(("b", "a"),)), whole(A, tied=(("b", "a"),)))
    assert names(made) == ["a"]
    assert made.tied == (("b", "a"),)


def test_sides_may_call_either_name_canonical() -> None:
    made = plan(whole(A, tied=(("b", "a"),)), whole(B, tied=(("a", "b"),)))
    assert names(made) == ["b"]


def test_an_engine_that_ties_what_the_trainers_do_not_know() -> None:
    assert names(plan(whole(A), whole(A, tied=(("b", "a"),)))) == ["a"]


def test_a_tied_source_serves_an_engine_with_two_tensors() -> None:
    made = plan(whole(A, tied=(("b", "a"),)), whole(B, A))
    assert names(made) == ["b", "a"]
    assert [(p.tensor, p.box, p.send_buffer_offset) for p in made.trainer_pieces(0)] == [
        (0, Box((0, 0), (4, 2)), 0),
        (1, Box((0, 0), (4, 2)), 16),
    ]


def test_an_engine_must_not_tie_two_tensors() -> None:
    with pytest.raises(
        PlanError,
        match=r"b: engine e0 ties it to a, the trainers hold two .* exclude=\['b'\] if they are equal",
    ):
        plan(whole(A, B), whole(A, tied=(("b", "a"),)))


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"bucket_bytes": 255}, "sync.bucket_bytes", "largest element has 2 bytes"),
        ({"slots": -1}, "sync.slots", "at least 0"),
        ({"max_staging_bytes": 511}, "sync.max_staging_bytes", "need 512"),
        ({"max_staging_bytes": 767, "slots": 3}, "sync.max_staging_bytes", "need 768"),
    ],
)
def test_limits_name_their_setting_and_a_remedy(changes: dict[str, int], field: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        plan(whole(A), whole(A), **changes)
    assert caught.value.field == field
    assert caught.value.value == changes[field.removeprefix("sync.")]


def test_the_named_limit_is_enough() -> None:
    assert plan(whole(A), whole(A), max_staging_bytes=512).staging_nbytes(0) == 512


@pytest.mark.parametrize(
    ("trainers", "engines", "field"),
    [
        ((), (("e0", (0,)),), "members.trainers"),
        ((0,), (), "members.engines"),
        ((1,), (("e0", (0,)),), "members.trainers"),
        ((0,), (("e0", (-1,)),), "members.engines[e0]"),
        ((0,), (("e0", ()),), "members.engines[e0]"),
        ((0,), (("e0", (0,)), ("e0", (0,))), "members.engines"),
        ((0, 0), (("e0", (0,)),), "members.trainers"),
        ((0,), (("e1", (0,)),), "members.engines"),
        ((0,), (("e0", (0, 0)),), "members.engines[e0]"),
    ],
)
def test_members_must_fit(trainers: tuple[int, ...], engines: tuple, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(
            whole(A),
            {"e0": whole(A)},
            Members(1, trainers, engines),
            bucket_bytes=256,
            max_staging_bytes=1 << 20,
        )
    assert caught.value.field == field


DRAFT_A, DRAFT_B = (TensorMeta(f"draft/{name}", "bfloat16", (4, 2)) for name in "ab")


def test_a_draft_is_sent_to_engines_that_train_theirs() -> None:
    assert plan(whole(A, DRAFT_A), whole(A, DRAFT_A)).tensors == (A, DRAFT_A)


def test_a_draft_that_one_side_lacks_is_refused_with_the_remedies() -> None:
    told = r"draft/a: engines have a trained draft.*register trainers that hold it.*\{\"draft\": \"frozen\"\}"
    with pytest.raises(PlanError, match=told):
        plan(whole(A), whole(A, DRAFT_A))
    with pytest.raises(PlanError, match=r"draft/a: .*no engine takes one; .*\{\"draft\": \"trained\"\}"):
        plan(whole(A, DRAFT_A), whole(A))
    for engines in ((whole(A), whole(A, DRAFT_A)), (whole(A, DRAFT_A), whole(A))):
        with pytest.raises(
            PlanError, match=r"draft/a: engine e. needs it, .*have all engines of a WeightSync"
        ):
            plan(whole(A, DRAFT_A), *engines)


def test_a_part_of_a_draft_that_one_side_lacks_is_named_as_any_tensor() -> None:
    with pytest.raises(PlanError, match=r"draft/b: .*no trainer or checkpoint declares it; "):
        plan(whole(A, DRAFT_A), whole(A, DRAFT_A, DRAFT_B))
    with pytest.raises(PlanError, match=r"draft/b: .*but no engine has it; leave it out"):
        plan(whole(A, DRAFT_A, DRAFT_B), whole(A, DRAFT_A))


def test_what_the_draft_shares_with_the_model_need_not_come_and_must_not_come_twice() -> None:
    tied = (("draft/a", "a"),)
    assert plan(whole(A, DRAFT_B), whole(A, DRAFT_B, tied=tied)).tensors == (A, DRAFT_B)
    assert plan(whole(A, DRAFT_B, tied=tied), whole(A, DRAFT_B, tied=tied)).tensors == (A, DRAFT_B)
    told = r"draft/a: the draft of engine e0 .*uses the model's a\. Leave it out.*exclude=\['draft/a'\]"
    with pytest.raises(PlanError, match=told):
        plan(whole(A, DRAFT_A, DRAFT_B), whole(A, DRAFT_B, tied=tied))


MTP, OF_DRAFT = (TensorMeta(f"{prefix}mtp.a", "bfloat16", (4, 2)) for prefix in ("", "draft/"))


def held(made: Plan, *metas: TensorMeta) -> list[list[str]]:
    """Return what a rank with these tensors holds of each tensor of the plan."""
    layout = RankLayout(metas, tuple(map(Segment.whole, metas)))
    return [[segment.tensor for segment in segments] for segments in by_tensor(made, layout)]


def test_a_draft_may_come_from_the_trainers_model_as_mtp_layers_do() -> None:
    made = plan(whole(A, MTP), whole(A, OF_DRAFT))
    assert made.tensors == (A, OF_DRAFT)
    assert held(made, A, MTP) == [["a"], ["mtp.a"]]
    assert held(made, A, OF_DRAFT) == [["a"], ["draft/mtp.a"]]


def test_a_tensor_of_the_model_stands_for_no_draft() -> None:
    both = whole(A, DRAFT_A)
    assert held(plan(both, both), A) == [["a"], []]
    with pytest.raises(
        PlanError, match=r"draft/a: engines have a trained draft.*MTP layers may be in the model"
    ):
        plan(whole(A), both)
    with pytest.raises(PlanError, match=r"^mtp\.a: .*but no engine has it"):
        plan(whole(A, MTP, OF_DRAFT), whole(A, OF_DRAFT))


def test_what_an_mtp_layer_shares_is_refused_in_the_model_too() -> None:
    tied = (("draft/mtp.a", "a"),)
    assert plan(whole(A, DRAFT_B), whole(A, DRAFT_B, tied=tied)).tensors == (A, DRAFT_B)
    told = r"^mtp\.a: the draft of engine e0 .*uses the model's a\. Leave it out.*exclude=\['mtp\.a'\]"
    with pytest.raises(PlanError, match=told):
        plan(whole(A, MTP, DRAFT_B), whole(A, DRAFT_B, tied=tied))
