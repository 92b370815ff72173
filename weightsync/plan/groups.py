"""Which holders form a communicator."""

from __future__ import annotations

from weightsync.plan.members import Members

__all__ = ["broadcast_groups"]


def broadcast_groups(members: Members, *, together: bool = False) -> dict[int, tuple[int, ...]]:
    """Per sending holder, ascending: itself and all that receive.

    A holder that only sends stays out of the others' broadcasts. Senders that also receive, as all
    do when trainers and engines share devices, have one group between them. So do all `together`:
    they receive what they have no use for, and there is one communicator however many they are.
    """
    if together:
        everybody = tuple(sorted({*members.senders, *members.receivers}))
        return dict.fromkeys(members.senders, everybody)
    return {sender: tuple(sorted({sender, *members.receivers})) for sender in members.senders}
