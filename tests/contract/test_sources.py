"""One suite for every way that a model may be sharded: what is published is the model, once."""

from __future__ import annotations

import pytest
import torch

from tests.contract.source_ranks import Case, Model, Share, engine_needs, plan_for, publish, run_ranks
from tests.forked import forking
from tests.patience import patient
from weightsync.errors import ConfigError
from weightsync.memory.kernels.digests import tensor_digest
from weightsync.memory.tensors import named_tensors
from weightsync.plan import Plan
from weightsync.sources.module import ModuleSource

CASES: list[Case] = [
    ("plain", 1),
    ("plain", 2),
    ("fsdp2", 2),
    ("fsdp2", 3),
    ("offloaded fsdp2", 3),
    ("tp", 2),
    ("fsdp2 tp", 4),
    ("hsdp", 4),
    ("hsdp tp", 4),
]


@pytest.fixture(scope="module")
def all_published(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, tuple[Plan, list[Share]]]:
    """What each case published. The same processes run all of them."""
    context = forking()
    results = context.Queue()
    meeting = str(tmp_path_factory.mktemp("meeting") / "file")
    ranks = [
        context.Process(target=run_ranks, args=(rank, CASES, meeting, results), daemon=True)
        for rank in range(max(num_ranks for _, num_ranks in CASES))
    ]
    for rank in ranks:
        rank.start()
    found: dict[Case, tuple[Plan, list[Share]]] = {}
    for _ in CASES:
        case, each = results.get(timeout=patient(90))
        if isinstance(each, Exception):
            for rank in ranks:
                rank.kill()
            raise each
        found[case] = each
    for rank in ranks:
        rank.join(patient(30))
    return found


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0].replace(' ', '-')}-{case[1]}")
def published(
    request: pytest.FixtureRequest, all_published: dict[Case, tuple[Plan, list[Share]]]
) -> tuple[Plan, list[Share]]:
    return all_published[request.param]


def wanted(plan: Plan) -> dict[str, torch.Tensor]:
    tensors = named_tensors(Model())[0]
    return {m.name: tensors[m.name].detach().to(getattr(torch, m.dtype)) for m in plan.tensors}


def test_the_send_buffers_hold_each_byte_of_the_model_once_in_the_engines_dtype(published) -> None:
    plan, shares = published
    found = {name: torch.full_like(t, float("nan")) for name, t in wanted(plan).items()}
    for trainer, (data, _) in enumerate(shares):
        send_buffer = torch.frombuffer(bytearray(data + b"\0"), dtype=torch.uint8)
        for piece in plan.trainer_pieces(trainer):
            target = found[plan.tensors[piece.tensor].name]
            cut = send_buffer[piece.send_buffer_offset : piece.send_buffer_offset + piece.nbytes]
            target[piece.box.slices()] = cut.view(target.dtype).view(piece.box.extent)
    for name, tensor in wanted(plan).items():
        assert torch.equal(found[name], tensor), name
    assert {"tied.weight"} == {alias for alias, _ in plan.tied}


def test_the_ranks_digests_add_up_to_the_models(published) -> None:
    plan, shares = published
    for index, meta in enumerate(plan.tensors):
        total = sum(digests[index] for _, digests in shares) % 2**64
        assert total == tensor_digest(wanted(plan)[meta.name], meta.shape), meta.name


def test_replicas_share_the_work(published) -> None:
    plan, shares = published
    sizes = [plan.send_buffer_nbytes(trainer) for trainer in range(len(shares))]
    assert min(sizes) > 0


def test_the_cut_is_consistent_the_model_may_change_after_publish() -> None:
    model = Model()
    source = ModuleSource(model)
    plan = plan_for([source.layout()])
    (before, _), digests = publish(source, plan, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    (after, _), changed = publish(source, plan, 0)
    assert before != after
    assert (digests != changed).sum() == len(list(model.parameters()))


def test_excluded_tensors_do_not_travel_and_unknown_ones_are_refused() -> None:
    layout = ModuleSource(Model(), exclude={"head.weight"}).layout()
    assert "head.weight" not in {meta.name for meta in engine_needs(layout).tensors}
    with pytest.raises(ConfigError, match=r"did you mean 'head\.weight'"):
        ModuleSource(Model(), exclude={"haed.weight"}).layout()
