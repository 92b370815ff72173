"""The members of a plan: which holder serves which rank."""

from __future__ import annotations

from dataclasses import dataclass

from weightsync.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Members:
    """The holders of a plan, and the ranks that they serve.

    Attributes:
        num_holders: number of holders.
        trainers: holder of each trainer rank.
        engines: each engine's name, and the holders of the engine's ranks.

    Raises:
        ConfigError: no trainer or engine rank, a holder out of range, or a name given twice.
    """

    num_holders: int
    trainers: tuple[int, ...]
    engines: tuple[tuple[str, tuple[int, ...]], ...]

    def __post_init__(self) -> None:
        if not self.trainers:
            raise ConfigError("members.trainers", self.trainers, "register at least one trainer rank")
        if not self.engines:
            raise ConfigError("members.engines", self.engines, "register at least one engine")
        self._check_range("members.trainers", self.trainers)
        names = [name for name, _ in self.engines]
        if len(set(names)) < len(names):
            raise ConfigError("members.engines", tuple(names), "give each engine a name of its own")
        for name, ranks in self.engines:
            if not ranks:
                raise ConfigError(f"members.engines[{name}]", ranks, "give at least one engine rank")
            self._check_range(f"members.engines[{name}]", ranks)

    def _check_range(self, field: str, holders: tuple[int, ...]) -> None:
        if any(not 0 <= holder < self.num_holders for holder in holders):
            raise ConfigError(field, holders, f"holders are numbered 0 to {self.num_holders - 1}")

    @property
    def senders(self) -> tuple[int, ...]:
        """Holders that serve a trainer rank, ascending."""
        return tuple(sorted(set(self.trainers)))

    @property
    def receivers(self) -> tuple[int, ...]:
        """Holders that serve an engine rank, ascending."""
        return tuple(sorted({holder for _, ranks in self.engines for holder in ranks}))


def broadcast_groups(members: Members, *, together: bool = False) -> dict[int, tuple[int, ...]]:
    """Return the broadcast group of each sending holder: itself and all receivers, ascending.

    A holder that only sends is in no other group. Senders that also receive, as all do if trainers and
    engines share devices, have the same group. With `together`, all senders share one group, and so one
    communicator, but they receive bytes that they do not need.
    """
    if together:
        ranks = tuple(sorted({*members.senders, *members.receivers}))
        return dict.fromkeys(members.senders, ranks)
    return {sender: tuple(sorted({sender, *members.receivers})) for sender in members.senders}
