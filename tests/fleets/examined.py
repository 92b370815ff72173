"""Two Ray nodes on this machine, examined: python -m tests.fleets.examined."""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

import psutil
from ray.cluster_utils import Cluster
from typer.testing import CliRunner

from tests.fleets.local_cluster import starting_workers
from tests.patience import patient
from weightsync.recipes import cli

PORTS = "29700-29799"


def main() -> None:
    with starting_workers():
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        node = cluster.add_node(num_cpus=1)
    try:
        code, found = examine(cluster.address, patient(10))
        assert code == 1  # two nodes on one machine look alike
        assert len(found["hosts"]) == 2
        assert len({host["node"] for host in found["hosts"]}) == 2
        # All nodes try these ports at the same moment, and may meet one that another tries.
        assert all(90 < host["free_ports"] <= 100 for host in found["hosts"])
        assert all(host["versions"]["weightsync"] and host["versions"]["torch"] for host in found["hosts"])
        assert all(abs(host["offset_ms"]) <= host["uncertainty_ms"] + 50 for host in found["hosts"])
        assert len({(pair["sender"], pair["receiver"]) for pair in found["pairs"]}) == 2
        for pair in found["pairs"]:
            assert (pair["problem"], pair["broadcast"], pair["refill"]) == ("", "gloo", "mapped"), pair
            assert pair["gb_per_s"] > 0
        assert len(found["problems"]) == 1
        assert all("two Ray nodes with the same address" in each for each in found["problems"])

        raylet = stop(node)
        code, found = examine(cluster.address, patient(2))
        raylet.send_signal(signal.SIGCONT)
        name = node.node_id[:8]
        assert code == 1
        late = [each for each in found["problems"] if "no answer within" in each]
        assert len(late) == 1, found["problems"]
        assert f"node {name}" in late[0]
        assert len(found["hosts"]) == 1
        assert not found["pairs"]
    finally:
        cluster.shutdown()


def examine(address: str, timeout_s: float) -> tuple[int, dict[str, Any]]:
    """Run the command in this process. Returns its exit code and what it found."""
    command = ["doctor", "--cluster", "--json", "--address", address, "--ports", PORTS]
    done = CliRunner().invoke(cli.app, [*command, "--timeout", f"{timeout_s:g}"])
    sys.stdout.write(done.output)
    return done.exit_code, json.loads(done.stdout)


def stop(node: Any) -> psutil.Process:
    """Stop a node's raylet, so that no actor starts there."""
    (raylet,) = [each.process for each in node.all_processes["raylet"]]
    process = psutil.Process(raylet.pid)
    process.suspend()
    return process


if __name__ == "__main__":
    main()
