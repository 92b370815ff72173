"""Settings: frozen dataclasses that check their values, and a strict loader.

    SyncConfig(bucket_bytes="64MiB", timeout_s=30)                      # from Python
    SyncConfig.from_dict({"bucket_bytes": "64MiB", "timeout_s": 30})    # from YAML

A mistake in either raises a :class:`~weightsync.errors.ConfigError` that names the field, the value and a
remedy. An unknown key is a mistake.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import wraps
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from weightsync.errors import ConfigError, nearest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

Component = Literal["draft"]
Treatment = Literal["frozen", "trained"]
Components = Mapping[Component, Treatment]
PrefixCache = Literal["drop", "salt"]

_Remedies = Mapping[object, str]
"""The remedy for a value of the wrong type, by the right type."""

Size = Annotated[int, "bytes"]
"""A number of bytes, also given as a text such as ``256MiB``, see :func:`parse_size`."""

Ports = Annotated[tuple[int, int], "ports"]
"""The first and the last port of a range, also as ``"29600-29699"``, see :func:`parse_ports`."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A condition that a field's values meet, in its annotation: ``Annotated[int, Limit(…)]``."""

    holds: Callable[[Any], bool]
    remedy: str


def at_least(least: int) -> Limit:
    """Return the limit of numbers that are not below `least`."""
    return Limit(least.__le__, f"give at least {least}")


Natural = Annotated[int, at_least(0)]
Positive = Annotated[int, at_least(1)]
Seconds = Annotated[float, Limit(lambda value: 0 < value < math.inf, "give seconds, more than 0 and finite")]
Delay = Annotated[float, Limit(lambda value: 0 <= value < math.inf, "give seconds, 0 or more and finite")]
Port = Annotated[int, Limit(range(1024, 65536).__contains__, "give a port, 1024 to 65535")]
BucketSize = Annotated[Size, Limit((4096).__le__, "give at least 4KiB")]
StagingSize = Annotated[Size, Limit((1).__le__, "give at least one byte")]
OneOrTwo = Annotated[int, Limit((1, 2).__contains__, "give 1 or 2")]

_UNITS: dict[str, int] = {"": 1, "B": 1, "kB": 1000} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}
_NEAR_UNITS = {unit.lower().removesuffix(end): unit for end in ("b", "") for unit in _UNITS}
"""The unit that ``mib``, ``m`` and similar spellings mean."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)")
_SIZE_REMEDY = "give whole bytes, as a number or a text such as 256MiB or 2GB"

_PORTS = re.compile(r"([0-9]+) ?- ?([0-9]+)")
_LEAST_PORT, _MOST_PORT = 1024, 65535


def parse_size(value: object, *, field: str = "size") -> int:
    """Parse a number of bytes from an int or a text such as ``"256MiB"``.

    Args:
        value: ``4096``, ``"4096"``, ``"256MiB"`` or ``"1.5 GB"``. KiB, MiB, GiB and TiB are powers of 1024,
            KB (or kB), MB, GB and TB of 1000. Other spellings, such as ``256M``, are refused.
        field: the name that an error gives to the value.

    Returns:
        The number of bytes.

    Raises:
        ConfigError: the value is not a size, is negative, or is not a whole number of bytes. The error names
            the nearest size, if there is one.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ConfigError(field, value, _SIZE_REMEDY)
    if match[2] not in _UNITS:
        unit = _NEAR_UNITS.get(match[2].lower())
        hint = f"; did you mean {match[1]}{unit}?" if unit else ""
        raise ConfigError(field, value, _SIZE_REMEDY + hint)
    whole, _, fraction = match[1].partition(".")
    scale: int = 10 ** len(fraction)
    nbytes, rest = divmod(int(whole + fraction) * _UNITS[match[2]], scale)
    if rest:
        raise ConfigError(field, value, f"{_SIZE_REMEDY}; did you mean {nbytes}?")
    return nbytes


def parse_ports(value: object, *, field: str = "ports") -> tuple[int, int]:
    """Parse a range of ports from a text such as ``"29600-29699"`` or a pair of numbers.

    Args:
        value: the first and the last port, both included.
        field: the name that an error gives to the value.

    Raises:
        ConfigError: the value is no range, or has ports that need privileges or do not exist. The error names
            the nearest range.
    """
    match = _PORTS.fullmatch(value) if isinstance(value, str) else None
    pair = [int(match[1]), int(match[2])] if match else value
    if not isinstance(pair, (list, tuple)) or [type(port) for port in pair] != [int, int]:
        raise ConfigError(field, value, "give the first and the last port, such as 29600-29699")
    first, last = sorted(min(max(_LEAST_PORT, port), _MOST_PORT) for port in pair)
    if (first, last) != tuple(pair):
        limits = f"ports are {_LEAST_PORT} to {_MOST_PORT}, and the lower one comes first"
        raise ConfigError(field, value, f"the nearest range is {first}-{last}: {limits}")
    return first, last


def load_dataclass(cls: type[T], data: object, *, field: str) -> T:
    """Make a `cls` from the mapping `data`, strictly.

    Args:
        cls: a dataclass whose annotations are ``int``, ``float``, ``bool``, ``str``, :data:`Size`,
            :data:`Ports`, ``Literal``, ``X | Y | None``, ``dict[str, X]``, ``tuple[X, ...]`` or another such
            dataclass, also with a `Limit`.
        data: the result of ``yaml.safe_load``.
        field: path of `data` in the file, for errors; ``""`` at the top.

    Raises:
        ConfigError: a key is unknown or missing, or a value has another type or is beyond a limit. Two
            conversions are allowed: an ``int`` to a ``float``, and a text to a :data:`Size` or :data:`Ports`.
    """
    given = _mapping(data, field)
    known = {f.name: f for f in fields(cls) if f.init}
    for key, value in given.items():
        if key not in known:
            raise ConfigError(_join(field, key), value, f"the key is unknown; {nearest(key, known)}")
    hints = get_type_hints(cls, include_extras=True)
    values = {key: _convert(hints[key], value, _join(field, key), _YAML) for key, value in given.items()}
    for name, spec in known.items():
        if name not in values and spec.default is MISSING and spec.default_factory is MISSING:
            raise ConfigError(_join(field, name), None, "it is required")
    return cls(**values)


def check_fields(instance: DataclassInstance, *, field: str) -> None:
    """Check a dataclass built in Python as :func:`load_dataclass` does, and convert texts.

    A text becomes a :data:`Size` or :data:`Ports`.

    Raises:
        ConfigError: names the first field whose value has another type, or is beyond a limit.
    """
    hints = get_type_hints(type(instance), include_extras=True)
    for spec in fields(instance):
        value, name = getattr(instance, spec.name), _join(field, spec.name)
        object.__setattr__(instance, spec.name, _convert(hints[spec.name], value, name, _PYTHON))


def _convert(hint: object, value: object, field: str, remedies: _Remedies) -> object:
    origin, args = get_origin(hint), get_args(hint)
    if are_ports(hint):
        return parse_ports(value, field=field)
    if origin is Annotated:
        found = parse_size(value, field=field) if is_size(hint) else _convert(args[0], value, field, remedies)
        for limit in args[1:]:
            if isinstance(limit, Limit) and not limit.holds(found):
                raise ConfigError(field, found, limit.remedy)
        return found
    if origin is Literal:
        return _choice(args, value, field)
    if origin in (Union, UnionType):
        return _either(args, value, field, remedies)
    if origin in (dict, Mapping):
        return {
            _key(args[0], key, item, field): _convert(args[1], item, _join(field, key), remedies)
            for key, item in _mapping(value, field).items()
        }
    if origin is tuple:
        items = enumerate(_sequence(value, field))
        return tuple(_convert(args[0], item, f"{field}[{index}]", remedies) for index, item in items)
    if isinstance(hint, type) and is_dataclass(hint):
        return value if isinstance(value, hint) else load_dataclass(hint, value, field=field)
    return _scalar(hint, value, field, remedies)


_PYTHON: _Remedies = {
    bool: "give True or False",
    int: "give a whole number",
    float: "give a number",
    str: "give a text",
}
_YAML: _Remedies = {
    bool: "give true or false",
    int: "give a whole number",
    float: "give a number; YAML wants the dot in 1.0e-5",
    str: "give a text, in quotes if YAML takes it for something else",
}


def is_size(hint: object) -> bool:
    """Return True if an annotation is a :data:`Size`, with or without limits."""
    return "bytes" in getattr(hint, "__metadata__", ())


def are_ports(hint: object) -> bool:
    """Return True if an annotation is :data:`Ports`."""
    return "ports" in getattr(hint, "__metadata__", ())


def _scalar(hint: object, value: object, field: str, remedies: _Remedies) -> object:
    assert hint in remedies, f"{field}: the loader does not know {hint}"
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ConfigError(field, value, remedies[hint])
    return value


def _key(hint: object, key: str, item: object, field: str) -> str:
    """Return a key of a mapping. Raises ConfigError, with the item, if `hint` does not allow the key."""
    known = get_args(hint)
    if known and key not in known:
        raise ConfigError(_join(field, key), item, f"the key is unknown; {nearest(key, known)}")
    return key


def _choice(choices: tuple[object, ...], value: object, field: str) -> object:
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ConfigError(field, value, nearest(str(value), map(str, choices)))
    return value


def _either(hints: tuple[object, ...], value: object, field: str, remedies: _Remedies) -> object:
    if value is None and NoneType in hints:
        return None
    kinds = [hint for hint in hints if hint is not NoneType]
    if len(kinds) == 1:
        return _convert(kinds[0], value, field, remedies)
    refused = []
    for kind in kinds:
        try:
            return _convert(kind, value, field, remedies)
        except ConfigError as error:
            refused.append(error.remedy)
    raise ConfigError(field, value, ", or ".join(refused))


def _mapping(value: object, field: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ConfigError(field or "top level", value, "give a mapping of names to values")
    for key in value:
        if not isinstance(key, str):
            raise ConfigError(_join(field, key), key, "give a text as the name; quote it in YAML")
    return cast("Mapping[str, object]", value)


def _sequence(value: object, field: str) -> list[object] | tuple[object, ...]:
    if not isinstance(value, (list, tuple)):
        raise ConfigError(field, value, "give a list")
    return value


def _join(field: str, key: object) -> str:
    return f"{field}.{key}" if field else str(key)


def _names_checked(cls: type[T]) -> type[T]:
    """Make the constructor of `cls` suggest the nearest setting for an unknown name."""
    init = cls.__init__

    @wraps(init)
    def checked(self: T, *given: object, **named: object) -> None:
        known = [spec.name for spec in fields(cls)]
        for name, value in named.items():
            if name not in known:
                raise ConfigError(f"sync.{name}", value, f"there is no such setting; {nearest(name, known)}")
        init(self, *given, **named)

    cls.__init__ = checked  # type: ignore[method-assign,assignment]
    return cls


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsFiles:
    """Files in PEM by which the processes of a run know each other. Each host has files at these paths.

    Attributes:
        ca: the certificate of the CA that signed the certificates of all hosts.
        certificate: this host's certificate.
        key: the private key of this host's certificate.
    """

    ca: str
    certificate: str
    key: str

    def __post_init__(self) -> None:
        check_fields(self, field="sync.tls")
        for name in ("ca", "certificate", "key"):  # processes on other hosts have other working directories
            object.__setattr__(self, name, os.path.abspath(getattr(self, name)))

    @classmethod
    def within(cls, folder: str) -> TlsFiles:
        """Return the files in a folder that ``weightsync keys`` has made."""
        ca, certificate, key = (f"{folder}/{name}.pem" for name in ("ca", "certificate", "key"))
        return cls(ca=ca, certificate=certificate, key=key)

    @property
    def paths(self) -> tuple[str, str, str]:
        """All three."""
        return self.ca, self.certificate, self.key


@_names_checked
@dataclass(frozen=True, kw_only=True, slots=True)
class SyncConfig:
    """How weights are moved. The defaults are a good start.

    Sizes are bytes, or texts such as ``"256MiB"``; see `parse_size`.

    Attributes:
        mode: ``broadcast`` sends whole tensors to every engine. With ``direct``, an engine's GPU only reads
            the part that it needs from the trainers' GPU memory, or receives this part from other hosts. If
            an engine cannot, ``direct`` fails. ``auto`` decides per engine.
        transport: between holders, ``nccl`` (GPU memory) or ``gloo`` (host memory). ``auto`` is nccl if
            every trainer and engine has a GPU.
        stage: ``host`` sends a version to memory of the engines' hosts, and compares digests there, while
            engines serve. Engines only pause to copy the version from this memory. Use it for links that are
            slower than host memory. Hosts of engines then store two copies of the model, and trainers publish
            to host memory, also from GPUs. ``device`` also copies the weights to spare memory on every
            engine's GPU, so that the pause is as short as a copy within the GPU. ``auto`` is device if an
            engine is on a host without a trainer, host for GPUs without enough spare memory, and none for
            other fleets. ``none`` sends weights to paused engines.
        deltas: send only what changed since the committed version to hosts for which versions are staged.
            ``auto`` decides for each link, by its rate and by the bytes that changed; ``always`` does it if a
            host has the committed version. For links that are slower than memory. See docs/deltas.md.
        bucket_bytes: the most bytes of one message.
        num_slots: buckets per holder. One bucket is read while the other buckets are filled.
        max_staging_bytes: the most bytes of buckets per holder. A plan that needs more is refused.
        timeout_s: seconds that one phase of an update may take.
        connect_timeout_s: seconds for one step of connecting, and for the allocation of memory for
            ``keep_versions`` after ``connect``.
        min_engines: the fewest engines with which a version commits.
        pause: running requests: ``keep`` freezes them and continues with the new weights, ``wait`` lets them
            finish first, ``abort`` ends them with the tokens that they have.
        prefix_cache: what engines do with the KV of earlier weights at a commit. ``drop`` drops this KV, so
            that running requests are computed again from the first token. ``salt`` separates this KV:
            requests that begin after a commit never hit it, and running requests continue on it. For vLLM
            behind `EngineActor`. See docs/components.md.
        keep_versions: 2 stores a copy of the committed version in the holders' host memory, from which
            engines are refilled. Holders allocate this memory after ``connect`` has returned. 1 stores no
            copy: if holders write an engine's memory, the engine is refilled from engines of the same layout,
            and otherwise the engine waits for the next update.
        mirrors: further copies of the committed version on other hosts, if there are other hosts.
        heal_attempts: how many times a failed engine is healed before it is given up; 0 heals no engine.
        heal_backoff_s: the first attempt starts at once. The second waits twice this many seconds, and every
            further attempt twice as long as the attempt before, at most 60 seconds.
        respawn_timeout_s: seconds for ``respawn=`` to return an engine's new actor. After this time the
            engine stays DEAD. The new actor has ``connect_timeout_s`` to answer.
        heartbeat_s: an idle engine that does not answer for this many seconds counts as hung.
        refill: how holders read copies of other holders: ``rdma`` or ``tcp`` (Mooncake), or ``zeromq``.
            ``auto`` maps memory of the same host, and uses the first way that works for other hosts.
        density: sample how many elements an update changes, for ``report.density``. See docs/deltas.md.
        nonfinite: NaN and Inf in published weights: ``warn`` logs the tensors, ``refuse`` fails the update
            while engines continue to serve, ``ignore`` does not look. ``auto`` warns for a model, and refuses
            for an adapter: engines may give an adapter's NaN to requests without this adapter.
        rdma_device: the network devices for ``rdma``, separated by commas; empty allows any device.
        components: further models that engines serve, by kind. ``{"draft": "frozen"}``: engines speculate
            with a draft model, and updates compare the draft but never write it. ``{"draft": "trained"}``:
            trainers publish the draft, and every update writes model and draft. See docs/drafts.md.
        join_port: the port on which servers and trainers that Ray did not start dial in, see docs/servers.md.
        ports: the first and the last port on which holders listen, such as ``29600-29699``, for a firewall.
            By default holders listen on any free port. See docs/hosts.md for the ports of gloo and NCCL.
        tls: encrypt connections between hosts with TLS 1.3, and refuse processes without a certificate. The
            folder that ``weightsync keys`` made, or the paths of `ca`, `certificate` and `key`. Each host
            needs the files at the same path. gloo, NCCL and Mooncake stay unencrypted. See docs/security.md.

    Raises:
        ConfigError: a value is not valid. The error names the field, such as ``sync.timeout_s``.
    """

    mode: Literal["auto", "broadcast", "direct"] = "auto"
    transport: Literal["auto", "gloo", "nccl"] = "auto"
    stage: Literal["none", "host", "device", "auto"] = "none"
    deltas: Literal["none", "auto", "always"] = "none"
    bucket_bytes: BucketSize = 256 << 20
    num_slots: Positive = 2
    max_staging_bytes: StagingSize = 2 << 30
    timeout_s: Seconds = 60.0
    connect_timeout_s: Seconds = 300.0
    min_engines: Positive = 1
    pause: Literal["keep", "wait", "abort"] = "keep"
    prefix_cache: PrefixCache = "drop"
    keep_versions: OneOrTwo = 2
    mirrors: Natural = 1
    heal_attempts: Natural = 3
    heal_backoff_s: Delay = 1.0
    respawn_timeout_s: Seconds = 600.0
    heartbeat_s: Seconds = 10.0
    refill: Literal["auto", "rdma", "tcp", "zeromq"] = "auto"
    nonfinite: Literal["auto", "warn", "refuse", "ignore"] = "auto"
    rdma_device: str = ""
    density: bool = False
    components: Components = field(default_factory=dict, hash=False)
    join_port: Port | None = None
    ports: Ports | None = None
    tls: str | TlsFiles | None = None

    def __post_init__(self) -> None:
        check_fields(self, field="sync")
        if self.stage in ("host", "device") and self.keep_versions < 2:
            raise ConfigError("sync.keep_versions", self.keep_versions, "give 2, or sync.stage none")
        if self.stage in ("host", "device") and self.mode == "direct":
            raise ConfigError("sync.stage", self.stage, "give none, or sync.mode auto or broadcast")
        if self.deltas != "none" and self.stage == "none":
            raise ConfigError("sync.deltas", self.deltas, "give none, or stage versions: sync.stage auto")

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> SyncConfig:
        """Make a SyncConfig from a mapping, such as the ``sync`` section of a recipe.

        Args:
            data: values by field; sizes may be texts, such as ``"256MiB"``.

        Raises:
            ConfigError: a key is unknown, or a value has another type or is not valid.
        """
        return load_dataclass(cls, data, field="sync")

    @property
    def tls_files(self) -> TlsFiles | None:
        """The files of `tls`, None without TLS."""
        return TlsFiles.within(self.tls) if isinstance(self.tls, str) else self.tls
