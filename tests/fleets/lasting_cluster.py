"""A cluster that outlives its drivers: says its address, and ends with its standard input.

python -m tests.fleets.lasting_cluster [dashboard]        # with one, its address is what is said
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster


def main() -> None:
    dashboard = sys.argv[1:] == ["dashboard"]
    ports = ("dashboard_port", "dashboard_agent_listen_port")
    port = dict.fromkeys(ports, 0) | {"dashboard_host": "127.0.0.1"} if dashboard else {}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": dashboard, **port}
    )
    sys.stdout.write(f"{cluster.head_node.webui_url if dashboard else cluster.address}\n")
    sys.stdout.flush()
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main()
