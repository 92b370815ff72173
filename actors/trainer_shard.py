"""The trainer's side: a base class for an actor that owns one rank of a model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from torch import nn

from weightsync.actors.claim import Claimable
from weightsync.actors.seat import Seat
from weightsync.errors import StateError
from weightsync.faults import arm, strike
from weightsync.protocol.timing import PhaseClock, Span
from weightsync.sources.module import ModuleSource

if TYPE_CHECKING:
    from weightsync.faults import Fault
    from weightsync.plan import Plan, RankLayout
    from weightsync.protocol.handles import Attached, BufferHandle
    from weightsync.protocol.messages import Published

__all__ = ["TrainerShard"]


class TrainerShard(Claimable):
    """Derive your trainer actor from it and set ``self.model``, plain or wrapped by FSDP2::

        class Trainer(TrainerShard):
            def __init__(self, ...):
                self.model = build()

        trainer = ray.remote(Trainer).remote(...)

    Each update takes what ``self.model`` holds then. Another model, or other parameters, may take the
    place of those that were connected if names, shapes, dtypes and sharding are the same; otherwise the
    update raises a StateError that names the rank and the tensor, and `WeightSync.connect` has to come first.

    The methods below are called by WeightSync, between your own methods, as Ray orders them.

    Only for one of these, call ``super().__init__``.

    Args:
        slot: on a CPU host, the name of the slot; the engine with the same slot shares its holder.
        exclude: names of tensors that no engine wants, as a value head.
        offloads: it takes turns with an engine on its GPU, see `offload`: weights go by host memory.
    """

    model: nn.Module
    _slot: str | None = None
    _exclude: Collection[str] = ()
    _offloads: bool = False
    _source: ModuleSource | None = None

    def __init__(
        self, slot: str | None = None, exclude: Collection[str] = (), offloads: bool = False
    ) -> None:
        self._slot, self._exclude, self._offloads = slot, exclude, offloads

    def offload(self) -> None:
        """Give the memory of all parameters and persistent buffers of ``self.model`` back.

        An engine may use it then. What they hold goes to host memory, from which the next update takes it
        without another copy; gradients and the optimizer's state are yours to move. Until `onload` the model
        cannot be used. Call it when no update runs, and after `WeightSync.sleep` or `settle`: until then
        holders read the memory that it writes.

        Raises StateError, and has done nothing, without ``offloads=True`` or where memory is not torch's.
        """
        self._current_source().offload()

    def onload(self) -> None:
        """Take the memory again, with what was in it; after an out-of-memory error, call it again."""
        if self._source is not None:
            self._source.onload()

    def sync_seat(self) -> Seat:
        """Where this rank sits."""
        return Seat.here(self._slot)

    def sync_layout(self) -> RankLayout:
        """Which boxes of which tensors lie here."""
        source = self._current_source()
        source.close()
        return source.layout()

    def sync_attach(self, plan: Plan, trainer: int, arena: BufferHandle | None) -> Attached:
        """Map the holder's arena, or let it read this rank's memory in place."""
        return self._current_source().attach(plan, trainer, arena)

    def sync_publish(self, count: bool) -> tuple[Published, Sequence[Span]]:
        """Hand this rank's share to its holder: a copy, or, on a GPU, the memory as it is."""
        clock = PhaseClock()
        with clock.phase("publish"):
            strike("publish")
            published = self._current_source().publish(count)
        return published, clock.spans

    def _current_source(self) -> ModuleSource:
        if not hasattr(self, "model"):
            raise StateError(f"{type(self).__name__} has to set self.model before it is used")
        if self._source is None:
            self._source = ModuleSource(self.model, self._exclude, offloads=self._offloads)
        if self._source.model is not self.model:
            self._source.replace(self.model)
        return self._source

    def sync_arm(self, who: str, faults: Sequence[Fault], seed: int) -> None:
        """See `weightsync.faults.arm`."""
        arm(who, faults, seed)
