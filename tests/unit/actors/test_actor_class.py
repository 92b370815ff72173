"""An actor class is made once."""

from __future__ import annotations

from weightsync.actors.ray.actor_class import actor_class


class One: ...


class Another(One): ...


def test_each_class_has_one_actor_class() -> None:
    assert actor_class(One) is actor_class(One)
    assert actor_class(Another) is not actor_class(One)
    assert not isinstance(actor_class(One), type), "it is Ray's"
