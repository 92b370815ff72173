"""An actor that is a member of its own WeightSync: refused at once if it could not answer, else it works."""

from __future__ import annotations

import pytest
import ray

from tests.fleets.actors import Engine, Trainer, spawn
from tests.fleets.own_driver import DrivingEngine, DrivingTrainer
from tests.patience import patient
from weightsync.actors.ray.actor_class import actor_class

pytestmark = pytest.mark.usefixtures("cluster")
WIDTH = 16


def test_a_trainer_that_would_wait_for_itself_is_refused_at_once() -> None:
    trainer, engine = spawn(DrivingTrainer, WIDTH, "t"), spawn(Engine, WIDTH, "e0", "e")
    said, seconds = ray.get(trainer.drive.remote(engine))
    assert said.startswith("trainers[0]: ")
    assert "it is the actor that makes this call" in said
    assert seconds < patient(5)


def test_an_engine_that_would_wait_for_itself_is_refused_and_in_another_thread_it_works() -> None:
    trainer, engine = spawn(Trainer, WIDTH, "t"), spawn(DrivingEngine, WIDTH, "e0", "e")
    said, _ = ray.get(engine.drive.remote(trainer))
    assert said.startswith("engines['e0']: ")
    assert ray.get(engine.drive_in_a_thread.remote(trainer))[0] == "{'e0': 1}"


def test_a_trainer_of_several_threads_can_be_the_driver() -> None:
    trainer = actor_class(DrivingTrainer).options(num_cpus=0, max_concurrency=8).remote(WIDTH, "t")
    engine = spawn(Engine, WIDTH, "e0", "e")
    assert ray.get(trainer.drive.remote(engine))[0] == "{'e0': 1}"
