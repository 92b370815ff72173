"""Runs a scenario on hosts of its own: unshare … python -m tests.hosts.lab SCENARIO.

The scenario is a process on the first host. It asks for what only the outside can do, such as cutting a
link, by a line on its output, and reads the answer from its input.
"""

from __future__ import annotations

import subprocess
import sys

from tests.hosts.network import Network

__all__ = ["main"]

NAMES = ("head", "west", "east")


def main(scenario: str) -> int:
    """Run `scenario`. Returns its exit status."""
    network = Network(NAMES)
    head, *others = network.hosts.values()
    head.start_ray()
    for host in others:
        host.start_ray(head.address)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    running = head.start([sys.executable, "-m", "tests.hosts.scenarios", scenario, head.address], **pipes)
    assert running.stdout
    assert running.stdin
    for line in running.stdout:
        words = line.split()
        if words[:1] != ["ASK"]:
            sys.stdout.write(line)
            continue
        running.stdin.write(f"{_answer(network, *words[1:])}\n")
        running.stdin.flush()
    return running.wait()


def _answer(network: Network, what: str, name: str, *values: str) -> int:
    host = network.hosts[name]
    if what == "nbytes":
        return host.nbytes()
    if what == "link":
        host.link(values == ("up",))
    elif what == "rate":
        host.set_rate(int(values[0]))
    else:
        raise ValueError(what)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
