"""A source follows its model: it publishes what that holds now, or says which tensor is in the way."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.contract.source_ranks import plan_for
from weightsync.errors import ConfigError, MovedError, StateError
from weightsync.memory.host import SharedBuffer
from weightsync.memory.kernels.digests import tensor_digest
from weightsync.memory.tensors import named_tensors
from weightsync.protocol.messages import Digests, Published
from weightsync.sources import piece_copies
from weightsync.sources import tensors as tensor_source
from weightsync.sources.module import ModuleSource


class Model(nn.Module):
    """Tied weights, a bias that is left out, buffers that are saved and not, and weights in other strides."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed, self.tied = nn.Embedding(width, 4), nn.Linear(4, width, bias=False)
        self.tied.weight = self.embed.weight
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
        self.body[1].weight.data = torch.rand(4, 4).t()
        self.value = nn.Linear(4, 1)
        self.register_buffer("steps", torch.tensor(4.0))
        self.register_buffer("cache", torch.ones(2), persistent=False)


class Rig:
    """A source that is attached to a send buffer of its own."""

    def __init__(self, offloads: bool = False) -> None:
        self.source = ModuleSource(Model(), {"value.weight", "value.bias"}, offloads=offloads)
        self.send_buffer: SharedBuffer | None = None
        self.connect()

    @property
    def model(self) -> Model:
        return self.source.model  # type: ignore[return-value]

    def connect(self) -> None:
        self.close()
        self.plan = plan_for([self.source.layout()])
        self.send_buffer = SharedBuffer.create(self.plan.send_buffer_nbytes(0))
        self.source.attach(self.plan, 0, self.send_buffer.handle)

    def publishes_the_model(self) -> bool:
        """Whether send buffer and digests are of what the model holds."""
        assert self.send_buffer is not None
        self.send_buffer.tensor.fill_(255)
        digests = self.source.publish(True).digests
        live = named_tensors(self.model)[0]
        for piece in self.plan.trainer_pieces(0):
            meta = self.plan.tensors[piece.tensor]
            held = self.send_buffer.tensor[piece.send_buffer_offset : piece.send_buffer_offset + piece.nbytes]
            wanted = live[meta.name].detach().to(getattr(torch, meta.dtype))
            found = held.view(wanted.dtype).view(piece.box.extent)
            if not torch.equal(found, wanted[piece.box.slices()]):
                return False
            if digests[piece.tensor] != tensor_digest(wanted, meta.shape):
                return False
        return True

    def close(self) -> None:
        self.source.close()
        if self.send_buffer:
            self.send_buffer.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


Change = Callable[[Rig], object]


def other_model(rig: Rig) -> None:
    rig.source.replace(Model())


def assigned(rig: Rig) -> None:
    rig.model.load_state_dict(Model().state_dict(), assign=True)
    rig.model.tied.weight = rig.model.embed.weight


def moved_and_back(rig: Rig) -> None:
    rig.model.to(torch.float64).to(torch.float32)


def untied(rig: Rig) -> None:
    rig.model.tied.weight = nn.Parameter(rig.model.tied.weight.detach().clone())


SAME: dict[str, Change] = {
    "other values": lambda r: [p.data.normal_() for p in r.model.parameters()],
    "another model": other_model,
    "a state dict assigned": assigned,
    "there and back": moved_and_back,
    "other data": lambda r: setattr(r.model.body[0].weight, "data", torch.rand(4, 4)),
    "other strides": lambda r: setattr(r.model.body[0].weight, "data", r.model.body[0].weight.data.t()),
    "another parameter": lambda r: setattr(r.model.body[0], "weight", nn.Parameter(torch.rand(4, 4))),
    "another module": lambda r: r.model.body.__setitem__(0, nn.Linear(4, 4)),
    "another buffer": lambda r: setattr(r.model, "steps", torch.tensor(7.0)),
    "what is not saved": lambda r: setattr(r.model, "cache", torch.ones(5)),
    "what is left out": lambda r: setattr(r.model, "value", nn.Linear(4, 1)),
    "a buffer that is not saved": lambda r: r.model.body.register_buffer(
        "a", torch.ones(1), persistent=False
    ),
    "frozen": lambda r: r.model.requires_grad_(False),
}
OTHER: dict[str, tuple[Change, str]] = {
    "another dtype": (
        lambda r: r.model.to(torch.bfloat16),
        "steps is bfloat16 (), and was float32 ()",
    ),
    "a larger model": (
        lambda r: r.source.replace(Model(8)),
        "embed.weight is float32 (8, 4), and was float32 (6",
    ),
    "another architecture": (lambda r: r.source.replace(nn.Linear(4, 4)), "steps is gone"),
    "untied": (untied, "tied.weight is no longer tied to embed.weight"),
    "tied": (
        lambda r: setattr(r.model.body[1], "weight", r.model.body[0].weight),
        "body.1.weight is now tied to body.0.weight",
    ),
    "a tie gone": (lambda r: delattr(r.model, "tied"), "tied.weight is gone; it was tied to embed.weight"),
    "a tie more": (
        lambda r: r.model.body.register_parameter("more", r.model.embed.weight),
        "body.more is now tied to embed.weight",
    ),
    "a parameter more": (
        lambda r: r.model.body.register_parameter("scale", nn.Parameter(torch.ones(1))),
        "body.scale is new",
    ),
    "a buffer more": (lambda r: r.model.register_buffer("seen", torch.ones(1)), "seen is new"),
    "a buffer less": (lambda r: delattr(r.model, "steps"), "steps is gone"),
    "a module more": (lambda r: r.model.body.append(nn.Linear(4, 4)), "body.2.weight is new"),
    "a module less": (lambda r: r.model.body.pop(1), "body.1.weight is gone"),
    "a bias less": (lambda r: setattr(r.model.body[0], "bias", None), "body.0.bias is gone"),
    "fewer rows": (
        lambda r: setattr(r.model.body[0].weight, "data", r.model.body[0].weight.data[:2]),
        "body.0.weight is float32 (2, 4), and was float32 (4, 4)",
    ),
    "another shape of the same bytes": (
        lambda r: setattr(r.model.body[0].weight, "data", r.model.body[0].weight.data.view(2, 8)),
        "body.0.weight is float32 (2, 8), and was float32 (4, 4)",
    ),
    "saved from now on": (lambda r: r.model._non_persistent_buffers_set.clear(), "cache is new"),
}


@pytest.mark.parametrize("change", SAME)
def test_what_has_the_same_layout_is_published(rig: Rig, change: str) -> None:
    assert rig.publishes_the_model()
    SAME[change](rig)
    assert rig.publishes_the_model()
    [each.data.normal_() for each in rig.model.parameters()]
    assert rig.publishes_the_model()


@pytest.mark.parametrize("change", OTHER)
def test_another_layout_is_refused_until_it_is_connected(rig: Rig, change: str) -> None:
    apply, message = OTHER[change]
    apply(rig)
    for _ in range(2):
        with pytest.raises(StateError, match=f"^trainer 0: {re.escape(message)}.*: connect\\(\\) again$"):
            rig.source.publish(True)
    if change != "another architecture":
        rig.connect()
        assert rig.publishes_the_model()


@given(st.lists(st.sampled_from([*SAME, *OTHER, "connect"]), min_size=2, max_size=6))
def test_after_any_changes_what_is_published_is_what_the_model_holds(changes: list[str]) -> None:
    rig = Rig()
    try:
        for change in changes:
            apply = SAME.get(change) or (OTHER[change][0] if change in OTHER else Rig.connect)
            with suppress(AttributeError, IndexError, KeyError, TypeError, RuntimeError, ConfigError):
                apply(rig)  # what it changes may be gone already
            if not refused(rig):
                assert rig.publishes_the_model()
    finally:
        rig.close()


def refused(rig: Rig) -> bool:
    try:
        rig.source.publish(True)
    except StateError:
        return True
    return False


def test_it_says_what_it_attached_again(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "weightsync.sources"):
        rig.source.publish(True)
        SAME["what is not saved"](rig)
        rig.source.publish(True)
        assert caplog.records == []
        SAME["another model"](rig)
        rig.source.publish(True)
        rig.source.publish(True)
    (record,) = caplog.records
    assert record.getMessage() == (
        "[trainer 0] attached again: steps and 4 more are in other memory than when it was connected"
    )


def test_a_tensor_that_is_not_on_the_gpu_of_the_others_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def pretended(tensor: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(device=torch.device("cuda:0" if tensor.ndim else "cpu"))

    source = ModuleSource(Model())
    monkeypatch.setattr(tensor_source, "local_tensor", pretended)
    assert source.layout().device == ""
    assert "through the host: steps is on cpu, not on cuda:0 (1 of 7 tensors)" in caplog.text


def test_weights_read_in_place_that_moved_have_to_be_connected_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stand:
        """Reads in place what is on no GPU."""

        num_begun = 0
        is_there = True

        def __init__(self, *_: object) -> None: ...

        def has_memory(self) -> bool:
            return Stand.is_there

        def wait_written(self) -> None: ...

        def begin(self) -> None:
            Stand.num_begun += 1

        def result(self, count: bool) -> Published:
            return published

        def digest_again(self) -> Digests:
            return published.digests

    published = Published(np.zeros(len(rig.plan.tensors), np.uint64), {})
    monkeypatch.setattr(tensor_source, "InPlace", Stand)
    rig.source.attach(rig.plan, 0, None)
    assert rig.source.publish(True) is published
    assert rig.source.ready()
    assert rig.source.publish(True) is published
    assert Stand.num_begun == 2, "once for each version"
    SAME["what is left out"](rig)
    assert rig.source.publish(True) is published
    assert Stand.num_begun == 4, "again, since the weights were described again"
    Stand.is_there = False
    assert rig.source.publish(True) is published
    assert Stand.num_begun == 5, "once the model was looked through"
    SAME["other strides"](rig)
    moved = r"trainer 0: body\.0\.weight is in other memory"
    for call in (rig.source.ready, partial(rig.source.publish, True)):
        with pytest.raises(MovedError, match=moved):
            call()
    Stand.is_there = True
    assert rig.source.ready(), "holders may read what they have mapped before the model is looked through"
    with pytest.raises(MovedError, match=moved):
        rig.source.publish(True)
    rig.source.replace(rig.source.model)
    with pytest.raises(MovedError, match=moved):
        rig.source.ready()
    OTHER["untied"][0](rig)
    with pytest.raises(StateError, match="no longer tied"):
        rig.source.publish(True)


def test_what_changes_while_it_is_offloaded_is_refused() -> None:
    rig = Rig(offloads=True)
    try:
        rig.source.offload()
        rig.source.publish(True)
        SAME["what is not saved"](rig)
        rig.source.publish(True)
        SAME["another parameter"](rig)
        refused = r"trainer 0: body\.0\.weight is in other memory.*onload\(\) first"
        for refuses in (partial(rig.source.publish, True), rig.source.layout):
            with pytest.raises(StateError, match=refused):
                refuses()
        with pytest.raises(StateError, match=r"trainer 0: another model.*onload\(\) first"):
            rig.source.replace(Model())
        rig.source.onload()
        assert rig.publishes_the_model()
        SAME["another model"](rig)
        rig.source.offload()
        published = rig.source.publish(True).digests
        rig.source.onload()
        assert (rig.source.publish(True).digests == published).all()
        assert rig.publishes_the_model()
        OTHER["untied"][0](rig)
        with pytest.raises(StateError, match="no longer tied"):
            rig.source.offload()
    finally:
        rig.close()


def test_many_small_tensors_are_published_without_python_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> int:
        raise AssertionError("a tensor was digested by itself")

    model = nn.ParameterList([nn.Parameter(torch.rand(1 + i % 7)) for i in range(2000)])
    source = ModuleSource(model)
    plan = plan_for([source.layout()])
    send_buffer = SharedBuffer.create(plan.send_buffer_nbytes(0))
    source.attach(plan, 0, send_buffer.handle)
    wanted = [tensor_digest(model[int(meta.name)], meta.shape) for meta in plan.tensors]
    monkeypatch.setattr(piece_copies, "tensor_digest", none)
    with torch.no_grad():
        model[5].view(-1)[0] = float("inf")
    published = source.publish(True)
    assert published.nonfinite == {"5": 1}
    assert sum(published.digests.tolist()[i] != wanted[i] for i in range(2000)) == 1
    source.close()
    send_buffer.close()
