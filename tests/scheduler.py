"""How ``scripts/test`` gives test files to its processes."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

RAY = ("tests/actors/",)
FORKED = (
    "tests/contract/",
    "tests/integration/test_blame.py",
    "tests/integration/test_exhausted_descriptors.py",
    "tests/integration/test_feed.py",
    "tests/integration/test_follow.py",
    "tests/unit/memory/test_cuda.py",
    "tests/unit/memory/test_memory.py",
    "tests/unit/recipes/test_recipes_learner.py",
)
HOMES: tuple[tuple[str, ...], ...] = (RAY, FORKED, ())
"""What each process takes first: files that want a Ray cluster, those that fork from a process, or others."""


class ByFolder(LoadFileScheduling):  # type: ignore[misc]
    """Gives whole files to processes, so that few of them start the same things.

    A process takes files of its home first, then those that are at home nowhere. Only at the end does it take
    those of another home, and start what these want.
    """

    def _assign_work_unit(self, node: WorkerController) -> None:
        home = HOMES[min(self.nodes.index(node), len(HOMES) - 1)]
        self.workqueue.move_to_end(min(self.workqueue, key=lambda file: _rank(file, home)), last=False)
        super()._assign_work_unit(node)


def _rank(file: str, home: tuple[str, ...]) -> int:
    """How late a process takes `file`. The order decides between files of the same rank."""
    if file.startswith(home):
        return 0
    return 1 + sum(file.startswith(each) for each in HOMES)
