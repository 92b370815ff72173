"""Gives requests of SGLang's own server the slots of the adapters that they name."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing
from typing import Any

from weightsync.engines.lora.adapter_engine import AdapterEngine, ServedAdapter
from weightsync.engines.sglang.lora import slot_name
from weightsync.errors import StateError

adapters: Mapping[str, AdapterEngine] = {}
"""The adapters of this process's server, by the names that requests give."""


def serve(opened: Mapping[str, AdapterEngine]) -> None:
    """Serve the adapters in `opened`, also those that are opened later."""
    global adapters
    adapters = opened


async def answer(
    generate: Callable[..., AsyncGenerator[Any, None]],
    manager: Any,  # noqa: ANN401 - SGLang's
    asked: Any,  # noqa: ANN401
    *more: object,
    **options: object,
) -> AsyncGenerator[Any, None]:
    """Have SGLang's ``generate_request`` answer from the slots that serve the adapters of the request.

    Each slot keeps its version until the answer is complete, and the answer's ``meta_info`` has the versions.
    Raises ValueError, which SGLang's server answers with a 400, for an adapter without a version.
    """
    named = asked.lora_path
    names = [named] if isinstance(named, str) else named or []
    _refuse_slots(names)
    opened = {each: adapters[each] for each in {*names} if each in adapters}
    with ExitStack() as used:
        try:
            served = {each: used.enter_context(opened[each].use()) for each in opened}
        except StateError as error:
            raise ValueError(str(error)) from error
        if served:
            _name_slots(asked, names, served)
        versions = {name: each.version for name, each in served.items()}
        async with aclosing(generate(manager, asked, *more, **options)) as answers:
            async for made in answers:
                for each in made if isinstance(made, list) else [made]:
                    if versions:
                        each["meta_info"]["adapter_versions"] = versions
                yield made


def _refuse_slots(names: Sequence[str | None]) -> None:
    """Raise ValueError for a slot's own name: the slot may be written before the answer is complete."""
    slots = {slot_name(name, number): name for name, each in [*adapters.items()] for number in each.numbers}
    if taken := slots.keys() & {*names}:
        slot = min(taken)
        raise ValueError(f"lora_path: {slot!r} is a slot: name the adapter, {slots[slot]!r}")


def _name_slots(asked: Any, names: Sequence[str | None], served: Mapping[str, ServedAdapter]) -> None:  # noqa: ANN401
    """Put slots in place of adapters, and tell the prefixes of versions apart."""
    if not hasattr(asked, "extra_key"):
        raise ValueError(f"lora_path: adapter {min(served)!r} answers no embeddings")
    given = asked.extra_key
    is_one = isinstance(asked.lora_path, str)
    if is_one and isinstance(given, list):
        names = [*names] * len(given)
    given = given if isinstance(given, list) else [given] * len(names)
    slots, keys = list[str | None](), list[str]()
    for name, key in zip(names, given, strict=True):
        if name and name in served:
            slots.append(slot_name(name, served[name].number))
            keys.append(f"{slots[-1]} {served[name].version} {key or ''}")
        else:
            slots.append(name)
            keys.append(key or "")
    asked.lora_path, asked.extra_key = (slots[0], keys[0]) if is_one and len(names) == 1 else (slots, keys)
