"""The served versions of engines, by component."""

from __future__ import annotations

from weightsync.driver.connecting.connect import Connection
from weightsync.driver.engine_state import EngineRecord
from weightsync.driver.fleet import Fleet
from weightsync.driver.updating.controller import Controller
from weightsync.plan.layout.conversion import conversion_of
from weightsync.plan.layout.draft import DRAFT
from weightsync.report import Covered, SyncReport
from weightsync.text import count_text


def coverage(component: str, controller: Controller, fleet: Fleet, last: SyncReport | None) -> list[Covered]:
    """Return a row for each engine, by the plan and the `last` update. Empty before connecting."""
    if controller.plan is None:
        return []
    return [_updated(component, controller.connection(), name, fleet, last) for name in fleet.engines]


def _updated(
    component: str, connection: Connection, name: str, fleet: Fleet, last: SyncReport | None
) -> Covered:
    """Return the row of a component that is in the plan: a draft, or all that is no draft's."""
    plan, engine, converts = connection.plan, connection.joined.get(name), ""
    of_draft, record = component == "draft", fleet.engines[name].record
    held = {i: meta for i, meta in enumerate(plan.tensors) if meta.name.startswith(DRAFT) is of_draft}
    if engine is not None:
        converts = conversion_of(connection.stated, [*held.values()], engine, connection.converts[name])
    return Covered.of(
        name,
        component,
        held.values(),
        connection.router.routes.get(name, ""),
        converts,
        num_frozen=len(held.keys() & set(plan.frozen)),
        version=record.version,
        proof=last.proofs.get(name, "") if last and _is_compared(record, last) else "",
    )


def _is_compared(record: EngineRecord, last: SyncReport | None) -> bool:
    """Return True if the `last` update brought the version, and the engine has not been asleep since."""
    return last is not None and last.version == record.version and record.compared


def draft_coverage(controller: Controller, fleet: Fleet, last: SyncReport | None) -> list[Covered]:
    """Return a row for each engine with a draft model."""
    rows = []
    for name, member in fleet.engines.items():
        if not (ranks := fleet.drafts.by_engine.get(name)):
            continue
        if controller.plan and all(rank.trained for rank in ranks):
            rows.append(_updated("draft", controller.connection(), name, fleet, last))
            continue
        num_hidden = sum(rank.num_hidden for rank in ranks)
        compared = "live weights with those at its start"
        if num_hidden:
            compared += f"; not compared: {count_text(num_hidden, 'layer')} that the engine has repacked"
        rows.append(
            Covered(
                engine=name,
                component="draft",
                version=member.record.version,
                num_tensors=max(rank.num_tensors for rank in ranks),
                num_frozen=max(rank.num_tensors for rank in ranks),
                nbytes=sum(rank.nbytes for rank in ranks),
                route="",
                proof=compared if _is_compared(member.record, last) else "",
            )
        )
    return rows
