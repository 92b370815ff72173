"""A trainer that gives its memory back: what it publishes meanwhile, and what it has afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from tests.contract.source_ranks import Model, plan_for
from weightsync.errors import StateError
from weightsync.memory.host import SharedBuffer
from weightsync.memory.offload import Offload
from weightsync.memory.tensors import named_tensors
from weightsync.plan import Plan
from weightsync.sources.module import ModuleSource


class Rig:
    """A model whose head travels in another dtype, and the send buffer that it publishes into."""

    def __init__(self) -> None:
        self.model = Model()
        self.source = ModuleSource(self.model, {"steps"}, offloads=True)
        self.plan: Plan = plan_for([self.source.layout()])
        self.send_buffers: list[SharedBuffer] = []
        self.values = {name: t.detach().clone() for name, t in named_tensors(self.model)[0].items()}

    def attach(self) -> None:
        """To a send buffer that has nothing yet."""
        self.send_buffers.append(SharedBuffer.create(self.plan.send_buffer_nbytes(0)))
        self.source.attach(self.plan, 0, self.send_buffers[-1].handle)

    def live_nbytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in named_tensors(self.model)[0].values())

    def has_its_values(self) -> bool:
        found = named_tensors(self.model)[0]
        return all(torch.equal(found[name], value) for name, value in self.values.items())

    def close(self) -> None:
        self.source.close()
        for send_buffer in self.send_buffers:
            send_buffer.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def test_what_is_offloaded_lies_in_the_send_buffer_and_is_published_without_another_copy(rig: Rig) -> None:
    rig.attach()
    published = rig.source.publish(True).digests
    sent = bytes(rig.send_buffers[0].tensor.tolist())
    rig.send_buffers[0].tensor.zero_()
    rig.source.offload()
    rig.source.offload()  # is nothing new
    assert rig.live_nbytes() == 0
    assert bytes(rig.send_buffers[0].tensor.tolist()) == sent
    rig.send_buffers[0].tensor[0] ^= 1  # a second copy would put it right
    np.testing.assert_array_equal(rig.source.publish(True).digests, published)
    assert bytes(rig.send_buffers[0].tensor.tolist()) != sent
    rig.send_buffers[0].tensor[0] ^= 1
    rig.source.onload()
    rig.source.onload()
    assert rig.live_nbytes() > 0
    assert rig.has_its_values()
    with torch.no_grad():
        rig.model.head.weight.add_(1)
    assert (rig.source.publish(True).digests != published).sum() == 1


def test_weights_come_back_out_of_the_send_buffer(rig: Rig) -> None:
    rig.attach()
    rig.source.offload()
    rig.send_buffers[0].tensor.zero_()
    rig.source.onload()
    kept = {"head.weight", "steps"}
    for name, tensor in named_tensors(rig.model)[0].items():
        assert torch.equal(tensor, rig.values[name] if name in kept else torch.zeros_like(tensor)), name


def test_it_is_connected_anew_while_it_is_offloaded(rig: Rig) -> None:
    rig.attach()
    published = rig.source.publish(True).digests
    sent = rig.send_buffers[0].tensor.clone()
    rig.source.offload()
    rig.source.close()
    rig.send_buffers[0].tensor.zero_()  # its holder's own by now
    assert rig.source.layout() == rig.source.layout()
    for _ in range(2):
        rig.attach()
        np.testing.assert_array_equal(rig.source.publish(True).digests, published)
        assert torch.equal(rig.send_buffers[-1].tensor, sent)
        assert rig.live_nbytes() == 0
    rig.source.onload()
    assert rig.has_its_values()
    np.testing.assert_array_equal(rig.source.publish(True).digests, published)


def test_it_may_be_offloaded_before_it_is_connected(rig: Rig) -> None:
    rig.source.offload()
    assert rig.live_nbytes() == 0
    rig.attach()
    published = rig.source.publish(True).digests
    rig.source.onload()
    assert rig.has_its_values()
    np.testing.assert_array_equal(rig.source.publish(True).digests, published)


def test_who_may_be_read_in_place_is_not_offloaded() -> None:
    with pytest.raises(StateError, match="offloads=True"):
        ModuleSource(Model()).offload()


class Flat(nn.Module):
    """Two weights in one stretch of memory; the head travels in another dtype."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.arange(12.0)
        self.body, self.head = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
        self.body.weight, self.head.weight = (nn.Parameter(each.view(2, 3)) for each in flat.split(6))


def test_what_shares_memory_with_what_the_send_buffer_has_not_is_kept_too() -> None:
    model = Flat()
    source = ModuleSource(model, offloads=True)
    plan = plan_for([source.layout()])
    send_buffer = SharedBuffer.create(plan.send_buffer_nbytes(0))
    source.attach(plan, 0, send_buffer.handle)
    source.offload()
    source.onload()
    assert model.body.weight.flatten().tolist() + model.head.weight.flatten().tolist() == [*range(12)]
    source.close()
    send_buffer.close()


def test_tensors_that_share_memory_are_kept_as_they_share_it() -> None:
    whole = torch.arange(6.0)
    parts = [whole[:3], whole[3:].view(1, 3)]
    away = Offload(parts, keep=parts)
    assert whole.untyped_storage().nbytes() == 0
    assert away.on_host(parts[1]).tolist() == [[3.0, 4.0, 5.0]]
    away.undo()
    assert whole.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    dropped = Offload(parts, keep=())
    dropped.undo()
    assert whole.tolist() == [0.0] * 6


def test_memory_that_is_not_torchs_is_refused_and_nothing_has_changed(rig: Rig) -> None:
    rig.attach()
    published = rig.source.publish(True).digests
    rig.model.head.weight.data = torch.from_numpy(rig.model.head.weight.detach().numpy().copy())
    with pytest.raises(StateError, match="another library"):
        rig.source.offload()
    rig.source.onload()
    assert rig.has_its_values()
    with torch.no_grad():
        rig.model.head.weight.add_(1)
    assert (rig.source.publish(True).digests != published).sum() == 1, (
        "what the send buffer had is not what it publishes"
    )


def test_memory_that_is_short_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.arange(3.0), torch.arange(4.0)]
    away = Offload(tensors, keep=tensors)
    resize, asked = torch.UntypedStorage.resize_, []

    def short(storage: torch.UntypedStorage, nbytes: int) -> None:
        asked.append(nbytes)
        if len(asked) == 2:
            raise torch.OutOfMemoryError
        resize(storage, nbytes)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", short)
    with pytest.raises(torch.OutOfMemoryError):
        away.undo()
    away.undo()
    away.undo()
    assert [each.tolist() for each in tensors] == [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0, 3.0]]
