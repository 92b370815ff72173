from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import pickle
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync import ConfigError, SyncConfig
from weightsync.config import Size, check_fields, load_dataclass, parse_size


@dataclass(frozen=True, kw_only=True)
class Wheel:
    spokes: int
    radius_m: float = 0.3
    kind: Literal["road", "track"] = "road"


@dataclass(frozen=True, kw_only=True)
class Tyre:
    pressure: int | Literal["soft", "hard"] | None = None
    width: int | Literal["wide"] = 28


@dataclass(frozen=True, kw_only=True)
class Bike:
    name: str
    wheels: dict[str, Wheel]
    gears: tuple[int, ...] = ()
    bell: bool = True
    lock: Wheel | None = None
    load: Size = 0
    notes: dict[str, str] = field(default_factory=dict)


BIKE = {"name": "b", "wheels": {"front": {"spokes": 3}}}


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("17B", 17),
        ("256MiB", 256 << 20),
        ("2 GiB", 2 << 30),
        ("3TiB", 3 << 40),
        ("8KB", 8000),
        ("8kB", 8000),
        ("1.5MB", 1_500_000),
        ("0.5KiB", 512),
    ],
)
def test_parse_size(value: object, nbytes: int) -> None:
    assert parse_size(value) == nbytes


@pytest.mark.parametrize(
    "value",
    [
        -1,
        True,
        1.5,
        None,
        "",
        "MiB",
        "-4KiB",
        "3Mb",
        "256M",
        "256mib",
        "1e6",
        "0.3B",
        "1.0001KiB",
        "٣MiB ",
        b"4",
    ],
)
def test_what_is_no_size_is_refused_by_name(value: object) -> None:
    with pytest.raises(
        ConfigError, match=r"^sync\.bucket_bytes: .* is not valid; give whole bytes"
    ) as caught:
        parse_size(value, field="sync.bucket_bytes")
    assert caught.value.value == value


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("256Mb", "256MB"),
        ("256mib", "256MiB"),
        ("1.5 g", "1.5GB"),
        ("4ki", "4KiB"),
        ("1.0001KiB", "1024"),
    ],
)
def test_the_nearest_size_is_named(given: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"did you mean {near}\?$"):
        parse_size(given)


@given(
    count=st.integers(0, 1 << 40), unit=st.sampled_from([("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40)])
)
def test_binary_sizes_are_exact(count: int, unit: tuple[str, int]) -> None:
    assert parse_size(f"{count}{unit[0]}") == count << unit[1]


@given(thousandths=st.integers(0, 10**15))
def test_decimal_fractions_are_exact(thousandths: int) -> None:
    whole, rest = divmod(thousandths, 1000)
    assert parse_size(f"{whole}.{rest:03}GB") == thousandths * 10**6


def test_a_complete_mapping_fills_every_kind_of_field() -> None:
    data = {
        "name": "b",
        "wheels": {"front": {"spokes": 3, "radius_m": 1, "kind": "track"}},
        "gears": [1, 2],
        "bell": False,
        "lock": {"spokes": 0},
        "load": "2KiB",
        "notes": {"a": "b"},
    }
    bike = load_dataclass(Bike, data, field="bike")
    wheel = Wheel(spokes=3, radius_m=1.0, kind="track")
    assert bike == Bike(
        name="b",
        wheels={"front": wheel},
        gears=(1, 2),
        bell=False,
        lock=Wheel(spokes=0),
        load=2048,
        notes={"a": "b"},
    )
    assert isinstance(bike.wheels["front"].radius_m, float)


def test_what_is_left_out_keeps_its_default() -> None:
    assert load_dataclass(Bike, BIKE, field="bike") == Bike(name="b", wheels={"front": Wheel(spokes=3)})


@pytest.mark.parametrize(
    ("change", "where", "remedy"),
    [
        ({"wheel": {}}, "bike.wheel", "did you mean 'wheels'?"),
        (
            {"wheels": {"front": {"spokes": 3, "spoke": 1}}},
            "bike.wheels.front.spoke",
            "did you mean 'spokes'?",
        ),
        ({"wheels": {"front": {}}}, "bike.wheels.front.spokes", "it is required"),
        ({"wheels": {1: {"spokes": 3}}}, "bike.wheels.1", "quote it in YAML"),
        ({"wheels": [3]}, "bike.wheels", "give a mapping"),
        (
            {"wheels": {"front": {"spokes": 3, "kind": "rode"}}},
            "bike.wheels.front.kind",
            "did you mean 'road'?",
        ),
        ({"wheels": {"front": {"spokes": True}}}, "bike.wheels.front.spokes", "give a whole number"),
        ({"wheels": {"front": {"spokes": 3.0}}}, "bike.wheels.front.spokes", "give a whole number"),
        ({"wheels": {"front": {"spokes": 3, "radius_m": "1e-5"}}}, "bike.wheels.front.radius_m", "1.0e-5"),
        ({"gears": [1, "2"]}, "bike.gears[1]", "give a whole number"),
        ({"gears": "12"}, "bike.gears", "give a list"),
        ({"bell": 1}, "bike.bell", "give true or false"),
        ({"name": None}, "bike.name", "give a text"),
        ({"lock": 3}, "bike.lock", "give a mapping"),
        ({"load": "3M"}, "bike.load", "give whole bytes"),
        ({"notes": {"a": 1}}, "bike.notes.a", "give a text"),
    ],
)
def test_a_mistake_is_refused_by_its_full_name(change: dict[str, object], where: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_dataclass(Bike, BIKE | change, field="bike")
    assert caught.value.field == where
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(("where", "shown"), [("bike", "bike"), ("", "top level")])
def test_no_mapping_at_all(where: str, shown: str) -> None:
    with pytest.raises(ConfigError, match=f"^{shown}: None is not valid; give a mapping"):
        load_dataclass(Bike, None, field=where)


def test_at_the_top_level_fields_stand_alone() -> None:
    with pytest.raises(ConfigError) as caught:
        load_dataclass(Bike, {"nam": "b"}, field="")
    assert caught.value.field == "nam"


def test_check_fields_holds_python_to_the_same_types() -> None:
    with pytest.raises(ConfigError) as caught:
        check_fields(Wheel(spokes="3"), field="wheel")
    assert caught.value.field == "wheel.spokes"


@pytest.mark.parametrize("pressure", [3, "soft", None])
def test_a_field_may_have_several_kinds(pressure: Any) -> None:
    assert load_dataclass(Tyre, {"pressure": pressure}, field="tyre") == Tyre(pressure=pressure)


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"pressure": "sotf"}, "give a whole number, or did you mean 'soft'?"),
        ({"pressure": True}, "give a whole number, or valid: hard, soft"),
        ({"width": None}, "give a whole number, or valid: wide"),
    ],
)
def test_what_is_none_of_several_kinds_is_told_of_all(change: dict[str, object], remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_dataclass(Tyre, change, field="tyre")
    assert remedy in caught.value.remedy


def test_sync_config_from_yaml_equals_the_one_from_python() -> None:
    given = {"bucket_bytes": "64MiB", "timeout_s": 30, "pause": "wait"}
    assert SyncConfig.from_dict(given) == SyncConfig(bucket_bytes=64 << 20, timeout_s=30.0, pause="wait")
    assert SyncConfig.from_dict({}) == SyncConfig()


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("mode", "brodcast", "did you mean 'broadcast'?"),
        ("bucket_bytes", 4095, "at least 4KiB"),
        ("max_staging_bytes", 0, "at least one byte"),
        ("timeout_s", 0, "more than 0"),
        ("timeout_s", math.nan, "finite"),
        ("connect_timeout_s", math.inf, "finite"),
        ("min_engines", 0, "at least 1"),
        ("num_slots", 0, "at least 1"),
        ("pause", "drop", "abort"),
        ("keep_versions", 0, "give 1 or 2"),
        ("keep_versions", 3, "give 1 or 2"),
        ("keep_versions", True, "a whole number"),
        ("mirrors", -1, "at least 0"),
        ("heal_attempts", -1, "at least 0"),
        ("heal_backoff_s", -0.5, "0 or more"),
        ("heal_backoff_s", math.inf, "finite"),
        ("heartbeat_s", 0.0, "more than 0"),
        ("respawn_timeout_s", 0, "more than 0"),
        ("refill", "rmda", "did you mean 'rdma'?"),
        ("rdma_device", None, "give a text"),
        ("ports", "29600", "give the first and the last port, such as 29600-29699"),
        ("ports", 29600, "give the first and the last port"),
        ("ports", [29600], "give the first and the last port"),
        ("ports", [29600, 29650, 29699], "give the first and the last port"),
        ("ports", [29600, True], "give the first and the last port"),
        ("ports", "a-b", "give the first and the last port"),
        ("ports", "29699-29600", "the nearest range is 29600-29699"),
        ("ports", "80-90", "the nearest range is 1024-1024: ports are 1024 to 65535"),
        ("ports", [29600, 70000], "the nearest range is 29600-65535"),
    ],
)
def test_sync_config_refuses(name: str, value: object, remedy: str) -> None:
    for build in (lambda: SyncConfig(**{name: value}), lambda: SyncConfig.from_dict({name: value})):
        with pytest.raises(ConfigError) as caught:
            build()
        assert caught.value.field == f"sync.{name}"
        assert remedy in caught.value.remedy


@pytest.mark.parametrize("given", ["29600-29699", "29600 - 29699", [29600, 29699], (29600, 29699)])
def test_a_range_of_ports_is_a_pair_however_it_is_given(given: Any) -> None:
    for config in (SyncConfig(ports=given), SyncConfig.from_dict({"ports": given})):
        assert config.ports == (29600, 29699)
        assert hash(config) == hash(SyncConfig(ports=(29600, 29699)))
    assert SyncConfig.from_dict({"ports": None}).ports is SyncConfig().ports is None
    assert SyncConfig(ports=(29600, 29600)).ports == (29600, 29600)


def test_the_smallest_bucket_is_allowed() -> None:
    assert SyncConfig(bucket_bytes=4096, max_staging_bytes=1, min_engines=1).bucket_bytes == 4096


def test_healing_may_be_turned_off_and_need_not_wait() -> None:
    config = SyncConfig(heal_attempts=0, heal_backoff_s=0, mirrors=0, keep_versions=1)
    assert (config.heal_attempts, config.heal_backoff_s, config.mirrors) == (0, 0, 0)


@pytest.mark.parametrize(("given", "nbytes"), [("256MB", 256 * 10**6), ("256MiB", 256 << 20), ("8kB", 8000)])
def test_a_size_is_a_number_however_it_is_given(given: Any, nbytes: int) -> None:
    for config in (SyncConfig(bucket_bytes=given), SyncConfig.from_dict({"bucket_bytes": given})):
        assert config == SyncConfig(bucket_bytes=nbytes)
        assert dataclasses.replace(config, max_staging_bytes=given).max_staging_bytes == nbytes


def test_sync_config_is_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SyncConfig().mode = "broadcast"
    with pytest.raises(TypeError):
        SyncConfig("auto")
    assert list(inspect.signature(SyncConfig).parameters)[:2] == ["mode", "transport"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"timeout": 60},
            "sync.timeout: 60 is not valid; there is no such setting; did you mean 'timeout_s'?",
        ),
        ({"slots": 3}, "sync.slots: 3 is not valid; there is no such setting; did you mean 'num_slots'?"),
        ({"timeout_s": "60"}, "sync.timeout_s: '60' is not valid; give a number"),
        ({"rdma_device": 5}, "sync.rdma_device: 5 is not valid; give a text"),
    ],
)
def test_a_mistake_in_python_speaks_of_no_yaml(given: dict[str, Any], says: str) -> None:
    for build in (lambda: SyncConfig(**given), lambda: dataclasses.replace(SyncConfig(), **given)):
        with pytest.raises(ConfigError) as caught:
            build()
        assert str(caught.value).startswith(says)
        assert "YAML" not in str(caught.value)


def test_sync_config_travels() -> None:
    config = SyncConfig(timeout_s=7)
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert dataclasses.replace(config, num_slots=3).timeout_s == 7


@pytest.mark.parametrize(
    ("components", "says"),
    [
        ({"drafts": "frozen"}, r"sync\.components\.drafts: .* the key is unknown; did you mean 'draft'"),
        ({"draft": "frosen"}, r"sync\.components\.draft: 'frosen' .* did you mean 'frozen'"),
        (["draft"], r"sync\.components: .* give a mapping"),
    ],
)
def test_components_are_known_by_name(components: Any, says: str) -> None:
    for make in (
        lambda: SyncConfig(components=components),
        lambda: SyncConfig.from_dict({"components": components}),
    ):
        with pytest.raises(ConfigError, match=says):
            make()
    for treatment in ("frozen", "trained"):
        given = {"draft": treatment}
        assert SyncConfig.from_dict({"components": given}).components == given
