"""The Ray cluster of a run: an existing one, or this process's own."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from weightsync.errors import ConfigError
from weightsync.recipes.report.run_folder import RunFolder

_ACTOR = ":actor_name:"
_HEAD_LINES = 20
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
OBJECT_STORE_BYTES = 256 << 20  # rollouts and reports only; weights never pass through it


def existing_cluster() -> str:
    """Return the address in ``RAY_ADDRESS``, which ``ray job submit`` sets; else an empty string."""
    address = os.environ.get("RAY_ADDRESS", "")
    return "" if address == "local" else address


@contextmanager
def local_cluster(folder: RunFolder, *, threads_per_actor: int) -> Iterator[None]:
    """Start Ray on this host and end it on exit, or join `existing_cluster`.

    Actors' output does not reach the terminal; it is in ``logs`` of `folder` afterwards. Import Ray only
    inside, since Ray reads credentials on import.

    Raises ConfigError for a cluster that cannot be reached.
    """
    with environment(_QUIET | _credentials()):
        import ray

        from weightsync.actors.holders.detached import (
            NAMESPACE,  # a later driver looks here for actors that this one leaves
        )

        session, job, address = None, "", existing_cluster()
        own = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
        try:
            context = ray.init(
                address=address or "local",
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env={"env_vars": _actor_environment(threads_per_actor)},
                **({} if address else own),
            )
            session, job = Path(context.address_info["session_dir"]), ray.get_runtime_context().get_job_id()
            yield
        except (ConnectionError, ValueError) as error:
            if session or not address:
                raise
            remedy = "give auto or host:port of one that runs (RAY_AUTH_MODE=token if it asks for a token)"
            raise ConfigError("RAY_ADDRESS", address, f"{remedy}, or unset it to start one here") from error
        finally:
            ray.shutdown()
            if session:
                folder.write("logs", lambda logs: _keep_logs(session / "logs", job, logs))


def _credentials() -> dict[str, str]:
    """Return environment variables with a token for this cluster only.

    Otherwise ``ray.init`` writes one to the home folder, and every later ``ray job submit`` from a
    shell without it is refused.
    """
    if existing_cluster() or "RAY_AUTH_MODE" in os.environ or "ray" in sys.modules:
        return {}
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def _actor_environment(num_threads: int) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process, and restore them on exit."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _keep_logs(session: Path, job: str, logs: Path) -> None:
    """Copy the logs of this job's actors on this host to `logs`, by actor."""
    logs.mkdir(parents=True, exist_ok=True)
    for source in sorted(session.glob(f"worker-*-{job}-*.[oe][ur][tr]")):
        if source.stat().st_size:
            shutil.copy(source, logs / _named(source))


def _named(log: Path) -> str:
    """Return a log's new name, such as ``EngineActor-main-0-4711.err``, with actor and process id."""
    with log.open(errors="replace") as lines:
        found = [line.strip() for line in islice(lines, _HEAD_LINES) if line.startswith(_ACTOR)]
    if not found:
        return log.name
    actor = re.sub(r"[^\w.]+", "-", found[-1].removeprefix(_ACTOR)).strip("-")
    return f"{actor}-{log.stem.rpartition('-')[2]}{log.suffix}"
