"""The seam between the driver and a trainer rank's weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from weightsync.plan import Plan, RankLayout
from weightsync.protocol.handles import BufferHandle, DeviceHandle
from weightsync.protocol.messages import Attached, Compared, Published, Sample

Models: TypeAlias = tuple[Any, Any]
"""A rank's model and its draft, None for one that it does not have."""


class Source(Protocol):
    """One trainer rank's weights, in the process that owns them.

    The driver calls all methods through the trainer's actor. Methods block.
    """

    def layout(self) -> RankLayout:
        """Return the boxes of tensors that this rank holds, in the checkpoint's names.

        Called on each connect, before `attach`. `device` is set if that device's holder can read the memory
        in place.
        """

    def attach(self, plan: Plan, trainer: int, send_buffer: BufferHandle | None) -> Attached:
        """Map the send buffer of trainer rank `trainer`, or export the weights without one.

        Called once per membership epoch.
        """

    def publish(self, count: bool) -> Published:
        """Copy this rank's share of the plan to the send buffer, or finish writing it in place.

        Called in each update. The result is a consistent cut. With a send buffer, weights may change once
        this returns; weights read in place must not change until the update has moved them. Elements that are
        NaN or Inf are counted, in the dtype that travels, if `count` is set or if it is free.
        """

    def close(self) -> None:
        """Disconnect from the holder. Called before each `layout` too. Safe to call twice."""


class ModelSource(Source, Protocol):
    """A source that `TrainerShard` makes for ``self.model``, by the model's type.

    Arguments: the model, `exclude`, `names`, `frozen`, `offloads` and `hf_config`, as in `TrainerShard`.

    Attributes:
        model: the model. Its weights may change between calls.
    """

    model: Any

    def replace(self, model: Any) -> None:  # noqa: ANN401 - a framework's
        """Take the weights of `model` from now on. Called before any method, if ``self.model`` is another.

        `publish` raises StateError if the layout differs from the previous model's.
        """


@runtime_checkable
class ExportsWeights(Protocol):
    """A source whose memory holders can read in place, before `publish` has digested it.

    `publish` digests the boxes of `weightsync.plan.share_in_place`.
    """

    def trial_handle(self) -> DeviceHandle | None:
        """Return a handle of any memory that `attach` would export, or None if there is none.

        The driver calls it in each connect after `layout`, if that has a device. Holders map the memory, read
        a byte and unmap it before `attach`.
        """

    def ready(self) -> bool:
        """Finish writing the weights. Returns whether they are read in place.

        Called before `publish`, which then runs while holders already read: if it raises, engines that took
        bytes do not serve them. If this returns False, holders wait for `publish`. Raises as `publish`.
        """


@runtime_checkable
class ComparesReplicas(Protocol):
    """A source that also digests the boxes which other ranks hold.

    For a source without this method, nobody finds ranks that hold different bytes of one box.
    """

    def compare_replicas(self, rounds: Sequence[int]) -> Compared:
        """Digest the boxes of these rounds of ``plan.replicas.claims(trainer)``, as they travel.

        Called after `publish`, if `attach` was given a plan with `replicas`.
        """


@runtime_checkable
class MeasuresDensity(Protocol):
    """A source that samples how many elements change from one version to the next."""

    def changed(self) -> Mapping[str, Sample]:
        """Return samples of the changes since the last call, by group of tensors.

        Called after `publish`. Returns nothing the first time after `attach`.
        """


@runtime_checkable
class Offloads(Protocol):
    """A source that can release its GPU memory between updates, for `TrainerShard.offload`."""

    def offload(self) -> None:
        """Move the weights to host memory. Raises StateError if that is not possible; nothing was done."""

    def onload(self) -> None:
        """Undo `offload`. Safe to call twice."""
