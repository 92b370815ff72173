"""What engines serve, by component."""

from __future__ import annotations

from weightsync.driver.controller import Controller
from weightsync.driver.fleet import Fleet
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
