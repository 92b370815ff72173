"""Runs a scenario on hosts of its own: unshare … python -m tests.hosts.lab SCENARIO.

The scenario is a process on the first host. It asks for what only the outside can do, such as cutting a
link, by a line on its output, and reads the answer from its input. Faults `link_down` ask by files.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.fleets.joined import TORCHRUN, JoinedProcess
from tests.fleets.served import ServedProcess
from tests.hosts import servers
from tests.hosts.network import DEFAULT, HASTY, PATIENT, Network
from weightsync.faults import LINK_DOWN

__all__ = ["main"]

NAMES = ("head", "west", "east")
DESK = "desk"
"""A host outside the cluster, from which jobs are submitted."""
_SETTINGS = {"hasty_ray": HASTY, "quickstart_loop": DEFAULT}
_FROM_DESK = ("quickstart_loop",)
_WITHOUT_RAY = ("servers",)
"""Scenarios of which only the first host has Ray."""
_SCRIPT = Path(__file__).with_name("cut.sh")
_POLL_S = 0.01


class Links:
    """The hosts' links, which a scenario and its faults cut: ``west``, or ``west/east`` between two.

    Attributes:
        cut_at: when the last link was cut, in seconds of `time.monotonic`, which all processes share.
    """

    def __init__(self, network: Network, folder: Path) -> None:
        """`folder`: where faults ask, see cut.sh."""
        self._network, self._folder = network, folder
        self._lock, self._cut = threading.Lock(), dict[str, threading.Timer]()
        self.cut_at = 0.0
        threading.Thread(target=self._answer_faults, daemon=True).start()

    def cut(self, link: str, seconds: float) -> None:
        """Cut a link until `seconds` have passed, or `mend`."""
        with self._lock:
            self._set(link, up=False)
            self.cut_at = time.monotonic()
            self._cut[link] = threading.Timer(seconds, self.mend, [link])
            self._cut[link].daemon = True
            self._cut[link].start()

    def mend(self, link: str) -> None:
        """Mend a link, if it is cut."""
        with self._lock:
            if timer := self._cut.pop(link, None):
                timer.cancel()
                self._set(link, up=True)

    def _set(self, link: str, up: bool) -> None:
        one, *other = [self._network.hosts[name] for name in link.split("/")]
        if other:
            one.lose(other[0], not up)
            other[0].lose(one, not up)
        else:
            one.link(up)

    def _answer_faults(self) -> None:
        while True:
            for asked in self._folder.glob("*.ask"):
                link, seconds = asked.read_text().split()
                self.cut(link, float(seconds))
                asked.rename(asked.with_suffix(".done"))
            time.sleep(_POLL_S)  # no event crosses the hosts' namespaces


def main(scenario: str) -> int:
    """Run `scenario`. Returns its exit status."""
    with _folder() as folder:
        env = {LINK_DOWN: f"sh {_SCRIPT} {folder}"}
        from_desk = scenario in _FROM_DESK
        network = Network((*NAMES, DESK) if from_desk else NAMES)
        links, served = Links(network, folder), dict[str, ServedProcess]()
        head, *others = [network.hosts[name] for name in NAMES]
        head.start_ray(settings=_SETTINGS.get(scenario, PATIENT), env=env, dashboard=from_desk)
        for host in others if scenario not in _WITHOUT_RAY else ():
            host.start_ray(head.address, env=env)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": os.environ | env}
        at = network.hosts[DESK] if from_desk else head
        running = at.start([sys.executable, "-m", "tests.hosts.scenarios", scenario, head.address], **pipes)
        assert running.stdout
        assert running.stdin
        for line in running.stdout:
            words = line.split()
            if words[:1] != ["ASK"]:
                sys.stdout.write(line)
                sys.stdout.flush()
                continue
            running.stdin.write(f"{_answer(network, links, served, env, *words[1:])}\n")
            running.stdin.flush()
        return running.wait()


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A folder that all hosts see: each has a /tmp of its own."""
    folder = Path(tempfile.mkdtemp(prefix="weightsync-lab-", dir="/var/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _answer(
    network: Network,
    links: Links,
    served: dict[str, ServedProcess],
    env: dict[str, str],
    what: str,
    name: str = "",
    *values: str,
) -> int:
    if what == "cut":
        links.cut(name, float(values[0]))
    elif what == "mend":
        links.mend(name)
    elif what == "cut_at":
        return int(links.cut_at * 1e3)
    elif what == "nbytes":
        return network.hosts[name].nbytes()
    elif what == "count":
        return network.hosts[name].count(values[0])
    elif what == "ray":
        network.hosts[name].start_ray(network.hosts[NAMES[0]].address, env=env)
    elif what == "address":
        network.hosts[name].add_address()
    elif what == "unroute":
        network.hosts[name].lose_route(network.hosts[values[0]].address)
    elif what == "rate":
        network.hosts[name].set_rate(int(values[0]))
    elif what == "sending_rate":
        network.hosts[name].set_sending_rate(int(values[0]))
    elif what == "kill":
        network.hosts[name].kill(int(values[0]))
    elif what in ("serve", "torchrun"):
        driver = {"WEIGHTSYNC_JOIN": f"{network.hosts[NAMES[0]].address}:{servers.JOIN_PORT}"}
        mine = os.environ | servers.ENV | driver
        at = network.hosts[name].prefix
        if what == "serve":
            served[name] = ServedProcess(servers.SERVER_PORT, servers.WIDTH, mine, [*at, sys.executable])
        else:
            JoinedProcess(servers.WIDTH, mine, [*at, *TORCHRUN])
    elif what == "unserve":
        served.pop(name).kill()
    elif what == "version":
        return served[name].holds()[0]
    elif what == "digest":
        return servers.number(served[name].holds()[1])
    elif what == "crash":
        network.crash(name)
    elif what == "boot":
        network.boot(name)
    else:
        raise ValueError(what)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
