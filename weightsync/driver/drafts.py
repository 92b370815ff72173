"""Draft models of engines: trained, or frozen on purpose, with the same bytes in all that have the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weightsync.config import SyncConfig
from weightsync.errors import ConfigError
from weightsync.plan.layout.draft import Draft
from weightsync.plan.layout.layout_table import LayoutTable

_REMEDY = (
    'SyncConfig(components={"draft": "frozen"}) freezes it on purpose and has each update compare it, '
    '{"draft": "trained"} has trainers update it, or leave speculative decoding out'
)
_CANNOT = "freeze it: updates do not reach drafts in engines of this kind"


class Drafts:
    """The drafts that engines reported. Digests are remembered after an engine is gone.

    Attributes:
        by_engine: the drafts of each engine's ranks, without ranks that have no draft.
    """

    def __init__(self) -> None:
        self.by_engine: dict[str, Sequence[Draft]] = {}
        self._first: dict[tuple[str, str, int, str], tuple[str, str]] = {}

    def check(self, engines: Mapping[str, Sequence[LayoutTable]], config: SyncConfig) -> None:
        """Store the drafts that engines serve now.

        Raises ConfigError if a draft is neither trained nor frozen, or is frozen and has other bytes.
        """
        treatment = config.components.get("draft")
        for name, ranks in engines.items():
            found = {rank: table.draft for rank, table in enumerate(ranks) if table.draft}
            for rank, draft in found.items():
                if treatment is None:
                    raise _error(name, draft, _REMEDY)
                if treatment == "frozen":
                    self._compare(name, rank, draft)
                elif not draft.trained:
                    raise _error(name, draft, _CANNOT)
            self.by_engine[name] = [*found.values()]

    def _compare(self, name: str, rank: int, draft: Draft) -> None:
        key = draft.method, draft.model, rank, draft.kind
        engine, digest = self._first.setdefault(key, (name, draft.digest))
        if digest != draft.digest:
            other = "it had others before" if engine == name else f"engine {engine} has others"
            remedy = (
                f"its bytes in rank {rank} are not those that this draft had: {other}. Give all engines the "
                "same files, or give another draft a path of its own"
            )
            raise _error(name, draft, remedy)


def _error(engine: str, draft: Draft, remedy: str) -> ConfigError:
    value = {"method": draft.method, "model": draft.model}
    return ConfigError(f"speculative_config of engine {engine}", value, remedy)
