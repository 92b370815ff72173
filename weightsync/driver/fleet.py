"""The members of a fleet, and the state of each engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from weightsync.driver.drafts import Drafts
from weightsync.driver.engine_state import EngineRecord, EngineState
from weightsync.errors import ConfigError
from weightsync.protocol.peers import EnginePeer, HolderPeer, RelayPeer, TrainerPeer


@dataclass(slots=True)
class EngineMember:
    """An engine with its state, and the holders of the ranks in order.

    `attached`: whether the ranks are connected with the holders.
    """

    peer: EnginePeer
    holders: tuple[int, ...]
    record: EngineRecord = field(default_factory=EngineRecord)
    attached: bool = False


@dataclass(slots=True)
class Fleet:
    """All members. Errors name them ``trainer 0``, ``holder 0`` and ``engine <name>``.

    Attributes:
        trainers: trainer ranks in order, each with the index of its holder.
        engines: by name.
        holders: in order; holders from the plan's `num_holders` on were added after the plan was made.
        nodes: the host of each holder, under any name; holders beyond the end of this list share one host.
        share: replaces a value that many peers get by the object that calls carry; by default the value
            itself.
        relays: ask trainers to publish for the driver. The driver asks ranks without a relay directly.
        drafts: the draft models of engines that were connected.
        deployments: engines that serve one version together, by the name of the deployment.
        served: the newest versions of earlier drivers that engines served, by process.
    """

    trainers: list[tuple[TrainerPeer, int]]
    engines: dict[str, EngineMember]
    holders: list[HolderPeer]
    nodes: list[str] = field(default_factory=list)
    share: Callable[[object], object] = lambda value: value
    relays: list[RelayPeer] = field(default_factory=list)
    drafts: Drafts = field(default_factory=Drafts)
    deployments: Mapping[str, Sequence[str]] = field(default_factory=dict)
    served: Mapping[str, int] = field(default_factory=dict)

    def live(self) -> dict[str, EngineMember]:
        """Return every engine that is not DEAD."""
        return {
            n: member for n, member in self.engines.items() if member.record.state is not EngineState.DEAD
        }

    def together(self, name: str) -> list[str]:
        """Return all engines of the deployment of `name`, or only `name` without a deployment."""
        mates = next((names for names in self.deployments.values() if name in names), (name,))
        return [each for each in mates if each in self.engines]

    def whole(self, names: Collection[str]) -> list[str]:
        """Return the engines of `names` in no deployment, or in one that is complete in `names`."""
        return [name for name in names if all(each in names for each in self.together(name))]

    def serving(self, any_version: bool) -> list[str]:
        """Return the engines that can take requests, by default only of the newest version.

        The engines of a deployment can take requests if all of them serve the same version.
        """
        serves = (EngineState.SERVING, EngineState.PAUSED)
        versions = {n: m.record.version for n, m in self.engines.items() if m.record.state in serves}
        whole = {
            name: version
            for name, version in versions.items()
            if version and all(versions.get(each) == version for each in self.together(name))
        }
        newest = max(whole.values(), default=0)
        return [name for name, version in whole.items() if any_version or version == newest]

    def newest(self, committed: int) -> int:
        """Return the newest version that is `committed`, or that an engine `served`. 0 if there is none."""
        return max(committed, *self.served.values(), 0)

    def require_newer(self, version: int, committed: int) -> None:
        """Raise ConfigError unless `version` is greater than `newest`: rollouts would repeat numbers."""
        if version <= committed:
            raise ConfigError("version", version, f"versions grow: give more than {committed}")
        if version <= (highest := self.newest(committed)):
            name = next(name for name, served in self.served.items() if served == highest)
            last = f"{name} served version {highest} of an earlier WeightSync"
            raise ConfigError("version", version, f"{last}: give more than {highest}, or nothing")

    def named_holders(self) -> dict[str, HolderPeer]:
        """Return holders by the names that errors give them."""
        return {f"holder {i}": holder for i, holder in enumerate(self.holders)}

    def node(self, holder: int) -> str:
        """Return the host of a holder, "" if it is not known."""
        return self.nodes[holder] if holder < len(self.nodes) else ""
