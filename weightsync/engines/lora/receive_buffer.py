"""Device memory in which an adapter arrives, and the kernel that copies it to the slot that is free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from weightsync.engines.loading.live_writer import LiveWriter
from weightsync.memory.kernels.device_kernels import CopyTable
from weightsync.memory.tensors import device_id
from weightsync.plan import Plan, RankLayout, TensorMeta
from weightsync.plan.layout.copies import Copies, box_copies

_NAME = "received"


class ReceiveBuffer:
    """The boxes of an adapter that an engine rank needs, one after another without gaps.

    Holders write this buffer. The buffer's address stays the same in all updates, unlike the address of the
    written slot.

    Attributes:
        layout: the places of the boxes in the buffer.
        live: the memory, by the name of the layout's only buffer.
    """

    def __init__(self, layout: RankLayout, device: torch.device) -> None:
        """Allocate it for the boxes of `layout`, a slot's layout whose tensors have one dtype."""
        metas = {meta.name: meta for meta in layout.tensors}
        kind = layout.tensors[0].dtype
        segments, end = [], 0
        for segment in layout.segments:
            box, itemsize = segment.box, metas[segment.tensor].itemsize
            strides = tuple(n * itemsize for n in torch.empty(box.extent, device="meta").stride())
            segments.append(replace(segment, buffer=_NAME, byte_offset=end, strides=strides))
            end += box.numel * itemsize
        count = end // layout.tensors[0].itemsize
        self.live = {_NAME: torch.zeros(count, dtype=getattr(torch, kind), device=device)}
        buffers = (TensorMeta(_NAME, kind, (count,)),)
        name = device_id(device) if device.type == "cuda" else ""
        self.layout = replace(layout, segments=tuple(segments), buffers=buffers, device=name)

    def copies_to(self, layout: RankLayout, live: Mapping[str, torch.Tensor]) -> Copies:
        """Return the copies to a slot's memory `live`, of the layout that this was made for."""
        itemsize = layout.tensors[0].itemsize
        start = self.live[_NAME].data_ptr()
        table, _ = box_copies(
            [
                (
                    held.box.extent,
                    itemsize,
                    start + held.byte_offset,
                    held.strides,
                    live[segment.buffer].data_ptr() + segment.byte_offset,
                    segment.strides,
                )
                for held, segment in zip(self.layout.segments, layout.segments, strict=True)
            ]
        )
        return Copies(*table.T)


class SlotSink:
    """A Sink that takes an adapter in a `ReceiveBuffer`, and then has a kernel copy it to one slot.

    Digests are of the slot.
    """

    def __init__(
        self,
        plan: Plan,
        received: ReceiveBuffer,
        writer: LiveWriter,
        layout: RankLayout,
        live: Mapping[str, torch.Tensor],
        slots: Sequence[torch.Tensor],
    ) -> None:
        """Prepare the kernels' tables. `writer` writes `received`; the rest is as in `LiveWriter`."""
        self._finish = writer.finish
        self.begin, self.take, self.written = writer.begin, writer.take, writer.written
        self.digests = LiveWriter(plan, layout, live, slots).digests
        copies = received.copies_to(layout, live)
        self._copies = CopyTable(copies, (0, len(copies)))
        self._stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        """Check that every bucket came, and copy them to the slot."""
        self._finish()
        self._copies.launch(0, self._stream)
        self._stream.synchronize()
