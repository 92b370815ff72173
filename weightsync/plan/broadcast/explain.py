"""The costs of a plan, in figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from weightsync.plan.layout.column import Column
from weightsync.plan.layout.members import Members
from weightsync.text import count_text, size_text, time_text


@dataclass(frozen=True, slots=True)
class Cluster:
    """Bandwidths of a cluster, in 1e9 bytes per second and per holder.

    `link_gb_per_s` is for receiving from peers. `host_gb_per_s` is for copies from the host send buffer to
    the device; None if links read the send buffers themselves.
    """

    name: str
    link_gb_per_s: float
    host_gb_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Figures of one plan; `str()` prints them.

    Bytes are wire bytes, alignment included, except `payload_nbytes`. Mappings are by holder.

    Attributes:
        sent: bytes per root; a pipelined broadcast sends each byte once.
        received: bytes per receiver, without the receiver's own trainers' bytes.
        imbalance: max / mean of the trainers' sent bytes; 1.0 is even.
        stage_seconds: expected time per stage if stages do not overlap; broadcasts run one after another,
            host copies run on all holders in parallel.
        floor_seconds: lower bound of any schedule: the busiest holder's bytes over its link.
    """

    num_tensors: int
    num_buckets: int
    num_steps: int
    num_pieces: int
    payload_nbytes: int
    sent: Mapping[int, int]
    received: Mapping[int, int]
    imbalance: float
    staging: Mapping[int, int]
    send_buffer: Mapping[int, int]
    cluster: Cluster | None = None
    floor_seconds: float | None = None
    stage_seconds: Mapping[str, float] | None = None

    @classmethod
    def of(
        cls,
        members: Members,
        sent: Column,
        send_buffer: Column,
        staging_nbytes: int,
        cluster: Cluster | None,
        *,
        num_tensors: int,
        num_buckets: int,
        num_steps: int,
        num_pieces: int,
        payload_nbytes: int,
    ) -> Explanation:
        """Make the figures of a plan for `members`.

        Args:
            members: which holder serves which rank.
            sent, send_buffer: int64[num_trainers], each trainer rank's sent bytes, and the send buffer's
                bytes.
            staging_nbytes: bytes of a receiver's buckets.
            cluster: bandwidths; without them there are no times.
        """
        roots, total = np.array(members.trainers, np.int64), int(sent.sum())
        by_root, send_buffers = (
            np.bincount(roots, each, members.num_holders).astype(np.int64).tolist()
            for each in (sent, send_buffer)
        )
        by_sender = {holder: by_root[holder] for holder in members.senders}
        received = {holder: total - by_root[holder] for holder in members.receivers}
        floor, stages = _times(cluster, by_sender, received, max(send_buffers), total)
        return cls(
            num_tensors=num_tensors,
            num_buckets=num_buckets,
            num_steps=num_steps,
            num_pieces=num_pieces,
            payload_nbytes=payload_nbytes,
            sent=by_sender,
            received=received,
            imbalance=float(sent.max() / sent.mean()) if total else 1.0,
            staging=dict.fromkeys(range(members.num_holders), 0) | dict.fromkeys(received, staging_nbytes),
            send_buffer=dict(enumerate(send_buffers)),
            cluster=cluster,
            floor_seconds=floor,
            stage_seconds=stages,
        )

    @property
    def edges(self) -> dict[tuple[int, int], int]:
        """Bytes by (root, receiver). A broadcast's bytes count on all edges of the broadcast."""
        return {(s, r): n for s, n in self.sent.items() if n for r in self.received if r != s}

    def __str__(self) -> str:
        lines = [
            f"{count_text(self.num_tensors, 'tensor')}, {size_text(self.payload_nbytes)}, "
            f"in {count_text(self.num_pieces, 'piece')}, "
            f"{count_text(self.num_buckets, 'bucket')}, {count_text(self.num_steps, 'broadcast')}",
            f"{count_text(len(self.sent), 'root')} {'sends' if len(self.sent) == 1 else 'send'} up to "
            f"{size_text(max(self.sent.values(), default=0))} each (imbalance {self.imbalance:.2f})",
            f"{count_text(len(self.received), 'holder')} "
            f"{'receives' if len(self.received) == 1 else 'receive'} up to "
            f"{size_text(max(self.received.values(), default=0))}",
            f"memory per holder: staging up to {size_text(max(self.staging.values(), default=0))}, "
            f"send buffer up to {size_text(max(self.send_buffer.values(), default=0))}",
        ]
        if self.cluster is not None and self.stage_seconds is not None:
            stages = ", ".join(f"{name} {time_text(value)}" for name, value in self.stage_seconds.items())
            lines.append(f"on {self.cluster.name}: floor {time_text(self.floor_seconds or 0.0)}; {stages}")
        return "\n".join(lines)


def _times(
    cluster: Cluster | None,
    sent: Mapping[int, int],
    received: Mapping[int, int],
    send_buffer: int,
    total: int,
) -> tuple[float | None, dict[str, float] | None]:
    """Return the floor and the time of each stage. `send_buffer` is the largest one."""
    if cluster is None:
        return None, None
    link = cluster.link_gb_per_s * 1e9
    stages = {"broadcast": total / link}
    if cluster.host_gb_per_s is not None:
        stages["host to device"] = send_buffer / (cluster.host_gb_per_s * 1e9)
    return max(*sent.values(), *received.values()) / link, stages
