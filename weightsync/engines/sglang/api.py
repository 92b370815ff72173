"""All imports from SGLang: the engine, requests, and the loader of weights.

Sources: SGLang's documentation of weight updates for reinforcement learning, and SGLang's code of 0.5.17 and
0.5.23.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import json
import os
import pickle
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from weightsync.engines.loading.live_digest import parameters_of
from weightsync.engines.loading.loader_fill import FillCount, ToFill
from weightsync.engines.loading.model_folder import ModelFolder
from weightsync.engines.loading.wrapped import is_lora, unwrapped
from weightsync.engines.serving.checks import refuse_sizes
from weightsync.engines.serving.sampling import Sampling
from weightsync.engines.serving.server_thread import Made
from weightsync.engines.serving.texts import Tokenizer
from weightsync.engines.sglang.fused_parts import FusedParts
from weightsync.engines.sglang.lora import Adapted
from weightsync.engines.sglang.rank_calls import Call
from weightsync.engines.sglang.storage import derive_again
from weightsync.errors import ConfigError, nearest

LOADER = "weightsync.engines.sglang.worker.receive"
# These would put weights or ranks out of our reach.
_FIXED = (
    "model_path",
    "load_format",
    "weight_version",
    "dp_size",
    "pp_size",
    "nnodes",
    "node_rank",
    "tokenizer_worker_num",
    "incremental_streaming_output",
    "weight_cache_mode",
)
_LATE = "leave it out: a token has the version that serves as it comes"
_ONE = {
    "dp_size": "leave it out: register an engine for each replica",
    "pp_size": "leave it out: cut the model by tensor_parallel_size",
    "nnodes": "leave it out: an engine's ranks are on one host",
    "stream_interval": _LATE,
}
"""Sizes that are 1, with remedies."""
_NOT_FOLLOWED = {
    "enable_eplb": "it moves experts between ranks, and updates would go to their old places",
    "ep_num_redundant_experts": "SGLang's digests would count each copy of an expert",
}
"""Options that updates do not follow, with the reason."""
_DRAFT = "draft"
_PORTS = range(20_000, 32_768)
_DTYPES = ("bfloat16", "float16", "float32")
_INTERNAL = ("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized")
_REFUSED = {
    "max_new_tokens": "give max_tokens",
    "sampling_seed": "give seed",
    "stream_interval": _LATE,
    **dict.fromkeys(_INTERNAL, "leave it out: SGLang sets it"),
}
"""Settings that are refused, with remedies."""
_LOGPROBS = "return_logprob"
"""An argument of a request that is not a sampling parameter."""
_ANY_TOKEN = 1 << 62
"""A vocabulary's size for checks before SGLang's own checks."""
_PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Layers that are one for several of a checkpoint. Only some of SGLang's models say theirs."""


def has_sessions() -> bool:
    """Return True if SGLang has ``begin_weight_update`` and ``end_weight_update`` (from 0.5.21).

    Such an SGLang can also drop cached prefixes while paused requests wait.
    """
    from sglang.srt.entrypoints.engine import Engine

    return hasattr(Engine, "begin_weight_update")


def server_args(model_path: str, options: Mapping[str, Any], sessions: bool) -> dict[str, Any]:
    """Return arguments of an engine that starts with dummy weights and takes our calls.

    Raises:
        ConfigError: an option that SGLang does not have, or that it cannot be updated with.
    """
    refuse_sizes(options, _ONE)
    from sglang.srt.server_args import ServerArgs

    given = dict(options)
    if "tensor_parallel_size" in given:
        given["tp_size"] = given.pop("tensor_parallel_size")
    known = set(inspect.signature(ServerArgs).parameters) - set(_FIXED)
    for key, value in given.items():
        if key not in known:
            raise ConfigError(f"options.{key}", value, nearest(key, known | {"tensor_parallel_size"}))
    for key, why in _NOT_FOLLOWED.items():
        if given.get(key):
            raise ConfigError(f"options.{key}", given[key], f"leave it out: {why}")
    folder = model_folder(model_path, bool(given.get("trust_remote_code")), given.get("revision"))
    settings = {"dtype": "auto", "log_level": "warning", "tp_size": 1, **given}
    has_tokenizer = given.get("tokenizer_path") or folder.has_tokenizer()
    if not settings.setdefault("skip_tokenizer_init", not (sessions and has_tokenizer)) and not sessions:
        remedy = "give true: before 0.5.21 SGLang does not say which version made tokens that come late"
        raise ConfigError("options.skip_tokenizer_init", False, remedy)
    if settings["dtype"] == "auto":
        # SGLang's own "auto" turns float32 into float16.
        dtype = folder.config().dtype or torch.bfloat16
        settings["dtype"] = str(dtype).removeprefix("torch.")
    if settings["dtype"] not in _DTYPES:
        raise ConfigError("options.dtype", settings["dtype"], f"SGLang holds {', '.join(_DTYPES)}")
    if not sessions and not settings.setdefault("disable_radix_cache", True):
        raise ConfigError(
            "options.disable_radix_cache",
            False,
            "SGLang before 0.5.21 cannot forget prefixes of old weights while requests wait: leave it out",
        )
    loaders = [*(settings.pop("custom_weight_loader", None) or ()), LOADER]
    settings.setdefault("nccl_port", unasked_port())
    return {"model_path": model_path, "load_format": "dummy", "custom_weight_loader": loaders, **settings}


def unasked_port() -> int:
    """Return a free port outside the ranges from which the kernel and Ray choose ports.

    SGLang's ranks bind their rendezvous port only after their imports, tens of seconds after it was chosen.
    By then another process on a busy host may have a port that the kernel chose. Engines that start at the
    same time have different process ids, so they choose different ports.
    """
    for number in range(os.getpid(), os.getpid() + len(_PORTS)):
        port = _PORTS[number % len(_PORTS)]
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise ConfigError(
        "options.nccl_port", None, f"all of {_PORTS.start}-{_PORTS.stop - 1} are taken: give one"
    )


def sampling_params(settings: Sampling, index: int, draws_by_seeds: bool) -> dict[str, Any]:
    """Return SGLang's parameters for completion number `index` of a call.

    With `ignore_eos`, stop tokens are left out: SGLang would ignore them, too. SGLang that `draws_by_seeds`
    draws all requests without a seed by the same one, so each completion gets a random seed.

    Raises ConfigError for a setting or a value that SGLang does not know.
    """
    from sglang.srt.sampling.sampling_params import SamplingParams

    settings.require_known(inspect.signature(SamplingParams).parameters.keys(), _REFUSED)
    params: dict[str, Any] = {
        **settings.passed,
        "max_new_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "ignore_eos": settings.ignore_eos,
    }
    if settings.stop:
        params["stop"] = settings.stops
    if settings.stop_token_ids and not settings.ignore_eos:
        params["stop_token_ids"] = list(settings.stop_token_ids)
    if settings.seed is not None:
        params["sampling_seed"] = settings.seed + index
    elif draws_by_seeds:
        params["sampling_seed"] = secrets.randbits(31)
    try:
        SamplingParams(**params).verify(_ANY_TOKEN)
    except (ValueError, TypeError) as error:
        raise settings.refusal("SGLang", error) from error
    return {**params, _LOGPROBS: settings.logprobs}


class Manager:
    """SGLang's own ``TokenizerManager`` behind coroutines, which must be awaited on its loop.

    Attributes:
        manager: SGLang's own.
        forgets: see `has_sessions`.
    """

    _selected = ""  # the model that the open session is for

    def __init__(self, manager: Any, num_ranks: int, has_draft: bool = False) -> None:  # noqa: ANN401 - SGLang's
        self.manager, self.num_ranks, self._has_draft = manager, num_ranks, has_draft
        self.forgets = has_sessions()

    async def pause(self, mode: str) -> None:
        """Pause. ``retract`` drops running requests' cache, ``in_place`` keeps it."""
        await self.ask("pause_generation", "PauseGenerationReqInput", mode=mode)

    async def go_on(self) -> None:
        """End a pause."""
        await self.ask("continue_generation", "ContinueGenerationReqInput", torch_empty_cache=False)

    async def forget(self) -> bool:
        """Drop cached prefixes. Returns False if SGLang does not, since requests hold them."""
        flushed = await self.manager.flush_cache()
        return bool(flushed.success)

    async def label(self, version: str) -> None:
        """Set SGLang's own label of the weights, which answers to SGLang's own calls carry."""
        if hasattr(self.manager, "update_weight_version"):  # not in 0.5.17; in 0.5.23 ranks have a label, too
            await self.ask(
                *("update_weight_version", "UpdateWeightVersionReqInput"),
                new_version=version,
                abort_all_requests=False,
            )
        else:  # as SGLang's HTTP server does
            self.manager.record_config_updates("weightsync", weight_version=version)

    async def on_ranks(self, calls: Sequence[Call]) -> None:
        """Deliver a call to each rank's model or draft, and return when all ran.

        Before 0.5.21, SGLang also delivers a draft's call to the target, after the draft.

        Raises RuntimeError if SGLang refuses.
        """
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        nothing, to_draft = torch.empty(0, dtype=torch.uint8), calls[0].to_draft
        selector: dict[str, object] = {}
        if self.forgets:
            selector = {"selector": _DRAFT if to_draft else "target"}
        elif self._has_draft:
            selector = {"disable_draft_model": not to_draft}
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[
                MultiprocessingSerializer.serialize([(pack(call), nothing)]) for call in calls
            ],
            load_format=LOADER,
            flush_cache=False,
            **selector,
        )
        # The session stays open: SGLang only accepts weights in a session. So SGLang neither restores the
        # model's weights before this call nor processes them after it, which our proofs would not see. A
        # draft's weights are plain.
        await self.select(_DRAFT)
        _require(await self.manager.update_weights_from_tensor(request, None))

    async def load_lora(
        self, name: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], pinned: bool
    ) -> str:
        """Have SGLang load an adapter, which the first request of it puts into a slot.

        A `pinned` adapter stays in its slot. Returns why SGLang refuses, "" if it does not.
        """
        from sglang.srt.utils import MultiprocessingSerializer

        payloads = [MultiprocessingSerializer.serialize(dict(tensors)) for _ in range(self.num_ranks)]
        outcome = await self.ask(
            "load_lora_adapter_from_tensors",
            "LoadLoRAAdapterFromTensorsReqInput",
            lora_name=name,
            config_dict=dict(config),
            serialized_named_tensors=payloads,
            pinned=pinned,
        )
        return "" if outcome.success else str(outcome.error_message)

    async def unload_lora(self, name: str) -> None:
        """Have SGLang drop an adapter after its requests have ended. The slot is then empty."""
        await self.ask("unload_lora_adapter", "UnloadLoRAAdapterReqInput", lora_name=name)

    async def ask(self, method: str, request: str, **fields: object) -> Any:  # noqa: ANN401 - SGLang's
        """Make one of SGLang's own calls with a request of class `request`. Returns the result."""
        from sglang.srt.managers import io_struct

        return await getattr(self.manager, method)(getattr(io_struct, request)(**fields))

    @asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        """Open a session for SGLang's own updates, if it has sessions.

        At the end of a session, SGLang processes weights.
        """
        await self.select("all")
        try:
            yield
        finally:
            await self.select("")

    async def select(self, models: str) -> None:
        """End SGLang's session if it is for others than `models`, and open one for these, if any.

        `models`: ``all``, ``draft`` or none. There are no sessions before 0.5.21.
        """
        if models == self._selected or not self.forgets:
            return
        if self._selected:
            _require(await self.ask("end_weight_update", "EndWeightUpdateReqInput"))
        self._selected = ""
        if models:
            _require(await self.ask("begin_weight_update", "BeginWeightUpdateReqInput", selector=models))
        self._selected = models

    async def update_from_group(self, **fields: object) -> None:
        """Call ``update_weights_from_distributed``, in a session if there are any. Raises RuntimeError."""
        request = "UpdateWeightsFromDistributedReqInput"
        # Before 0.5.21, SGLang ends if it cannot flush because it holds requests.
        given: Mapping[str, Any] = {"flush_cache": False, **fields}
        async with self.session():
            _require(await self.ask("update_weights_from_distributed", request, **given))

    async def run(
        self,
        name: str,
        prompt: Sequence[int],
        params: Mapping[str, Any] | Adapted,
        on_made: Callable[[Made], object],
        salt: str,
    ) -> None:
        """Run a request until it ends or is aborted, see `AsyncServer.run`.

        Raises ValueError or RuntimeError if SGLang refuses the request.
        """
        from sglang.srt.managers.io_struct import GenerateReqInput

        lora = {}
        if isinstance(params, Adapted):
            lora, params = {"lora_path": params.lora, "extra_key": params.key}, params.sampling
        sampling = dict(params)
        more = {_LOGPROBS: sampling.pop(_LOGPROBS, False), **lora}
        request = GenerateReqInput(
            input_ids=list(prompt), sampling_params=sampling, rid=name, stream=True, **more
        )
        async for out in self.manager.generate_request(request, None):
            reason = out["meta_info"].get("finish_reason") or {}
            if reason.get("status_code"):  # not set if we aborted it
                raise RuntimeError(reason.get("message", "SGLang refused it"))
            on_made(_made(out, reason.get("type", "")))


class SglangServer(Manager):
    """SGLang's engine behind coroutines, which must be awaited on `loop`.

    Attributes:
        tokenizer: SGLang's own, None if it was started without one.
    """

    broken = False

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """Start SGLang, which may take minutes. `loop` is not running yet."""
        from sglang.srt.entrypoints.engine import Engine

        if arguments.get("enable_memory_saver"):
            _lead_to_cudart()
        # SGLang's processes then return log-probabilities before temperature, as vLLM does.
        os.environ.setdefault("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
        engine = Engine(**arguments)
        # It would end all children of this process. `pids` only has SGLang's processes.
        atexit.unregister(engine.shutdown)
        has_draft = "speculative_draft_load_format" in arguments
        super().__init__(engine.tokenizer_manager, arguments["tp_size"], has_draft)
        self.loop: asyncio.AbstractEventLoop = engine.loop
        self.pids: list[int] = engine.get_all_child_pids()
        self.tokenizer: Tokenizer | None = self.manager.tokenizer
        if watchdog := getattr(self.manager, "_subprocess_watchdog", None):
            watchdog.stop()  # it signals this process when one of them ends; `RankWatch` does this

    def abort(self, name: str) -> None:
        """End a request early. The request's stream ends soon."""
        self.manager.abort_request(name)


def _made(out: Mapping[str, Any], reason: str) -> Made:
    """Return SGLang's answer to a request. Lists grow, so log-probabilities are read at the end."""
    told = out["meta_info"]

    def logprobs() -> list[float]:
        return [each[0] for each in told.get("output_token_logprobs", ())]

    # The detokenizer may pass tokens on after the next version began.
    spans = told.get("weight_versions", ())
    labels = [each["version"] for each in spans for _ in range(each["start"], each["end"])]
    are_ours = all(map(str.isdecimal, labels))  # a server may have begun with another label
    return Made(out["output_ids"], logprobs, reason, [*map(int, labels)] if are_ours else ())


def pack(value: object) -> bytes:
    """Pickle a value that goes to a rank by SGLang's own channel."""
    return pickle.dumps(value)


def _lead_to_cudart() -> None:
    """Put libcudart's folder on LD_LIBRARY_PATH, for libraries that SGLang preloads before Python runs."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    folders = [os.path.dirname(line.split()[-1]) for line in maps if "/libcudart.so" in line]
    known = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if path]
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(dict.fromkeys([*known, *folders]))


def join_update_group(address: str, port: int, *, world_size: int, name: str) -> Any:  # noqa: ANN401 - torch's
    """Join ``init_weights_update_group`` as the trainer, NCCL's rank 0. Returns a torch process group."""
    from sglang.srt.utils import init_custom_process_group

    meeting = f"tcp://{address}:{port}"
    return init_custom_process_group("nccl", meeting, world_size=world_size, rank=0, group_name=name)


def _require(outcome: tuple[bool, str]) -> None:
    """Raise RuntimeError unless SGLang's (ok, message) is ok."""
    ok, message = outcome
    if not ok:
        raise RuntimeError(message)


def loaded_layers(model: torch.nn.Module) -> dict[str, Mapping[str, torch.Tensor]]:
    """Return the parameters of each module by path."""
    return {path: dict(each.named_parameters(recurse=False)) for path, each in model.named_modules()}


def packed_layers(model: torch.nn.Module) -> Mapping[str, Sequence[str]]:
    """Return the layers that are one for several of a checkpoint, by the last parts of their names."""
    return {**_PACKED, **getattr(model, "packed_modules_mapping", {})}


def model_folder(
    path: str, trust_remote_code: bool = False, revision: str | None = None, overrides: str = "{}"
) -> ModelFolder:
    """Return where a model's configuration is. `overrides` are ``json_model_override_args``."""

    def change(config: Any) -> Any:  # noqa: ANN401 - transformers'
        config.update(json.loads(overrides))
        return config

    return ModelFolder(path, trust_remote_code, revision, change=change)


class Loads:
    """Gives whole tensors to the model's own ``load_weights``, which copies them at once."""

    def __init__(self, model: torch.nn.Module, is_counted: bool = False) -> None:
        """`is_counted`: no trace has proven that the loader fills each parameter."""
        self._model = model
        self._count: FillCount | None = None
        self._fused: FusedParts | None = None
        if is_counted:
            wanted = {name: ToFill(each, 1) for name, each in parameters_of(model) if each.numel()}
            self._count = FillCount(wanted)
            self._fused = FusedParts(packed_layers(model))
        self._is_wrapped = any(map(is_lora, model.modules()))  # once, not for each batch of tensors

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load whole tensors. SGLang does not report the names that the loader used."""
        self._give(self._fused.complete(weights) if self._fused else weights)

    def _give(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        whole = unwrapped(self._model) if self._is_wrapped else nullcontext()
        with self._count or nullcontext(), whole:
            self._model.load_weights(weights)  # type: ignore[operator]

    def finish(self) -> None:
        """Derive tensors of a counted load.

        Raises RuntimeError, with names, if the loader wrote nothing to a parameter.
        """
        if self._fused:
            self._give(self._fused.rest())
        if not self._count:
            return
        if missing := self._count.missing():
            some = ", ".join(missing[:3])
            raise RuntimeError(f"SGLang's loader left out {some}: {len(missing)} tensors got nothing")
        derive_again(self._model)

    def abandon(self) -> None:
        """Do nothing: the next update writes all weights again."""
