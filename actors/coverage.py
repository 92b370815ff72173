"""What engines serve, by component."""

from __future__ import annotations

from weightsync.driver.controller import Controller
from weightsync.driver.fleet import Fleet
from weightsync.plan.explain import count_text
from weightsync.report import Covered, SyncReport


def coverage(component: str, controller: Controller, fleet: Fleet, last: SyncReport | None) -> list[Covered]:
    """Return a row for each engine, by the plan and the `last` update. Empty before connecting."""
    plan = controller.plan
    if plan is None:
        return []
    versions = {name: member.record.version for name, member in fleet.engines.items()}
    return [
        Covered(
            engine=name,
            component=component,
            version=version,
            num_tensors=len(plan.tensors),
            num_frozen=len(plan.frozen),
            nbytes=plan.total_nbytes,
            route=last.routes.get(name, "") if last else "",
            proof=last.proofs.get(name, "") if last and last.version == version else "",
        )
        for name, version in versions.items()
    ]


def draft_coverage(fleet: Fleet, last: SyncReport | None) -> list[Covered]:
    """Return a row for each engine with a draft model, which is frozen."""
    rows = []
    for name, member in fleet.engines.items():
        if not (ranks := fleet.drafts.by_engine.get(name)):
            continue
        version = member.record.version
        num_hidden = sum(rank.num_hidden for rank in ranks)
        compared = "live weights with those at its start"
        if num_hidden:
            compared += f"; not compared: {count_text(num_hidden, 'layer')} that the engine has repacked"
        rows.append(
            Covered(
                engine=name,
                component="draft",
                version=version,
                num_tensors=max(rank.num_tensors for rank in ranks),
                num_frozen=max(rank.num_tensors for rank in ranks),
                nbytes=sum(rank.nbytes for rank in ranks),
                route="",
                proof=compared if last and last.version == version else "",
            )
        )
    return rows
