"""Asks an engine's HTTP server which of its own controls it leaves open. No request changes anything."""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from weightsync.errors import ConfigError
from weightsync.recipes.doctor.doctor import Row

_VLLM = ("/pause", "/resume", "/sleep", "/update_weights", "/init_weight_transfer_engine", "/collective_rpc")
_SGLANG = (
    "/pause_generation",
    "/release_memory_occupation",
    "/update_weights_from_disk",
    "/update_weights_from_tensor",
    "/update_weights_from_distributed",
)
_ASKS_FOR_KEYS = "/update_weights_from_disk"
_REFUSED = (401, 403)
_TIMEOUT_S = 5.0
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Asks the server itself, not the proxy that the environment may name."""


def server(url: str, timeout_s: float = _TIMEOUT_S) -> Row:
    """Return what a stranger without a key may call at the server of `url`, of vLLM or SGLang.

    Raises ConfigError for a text that is no URL.
    """
    if not _is_address(url):
        raise ConfigError("--server", url, "give the address of a server, such as http://10.0.0.2:8000")
    base = url.rstrip("/")
    try:
        if found := _there(base, _VLLM, timeout_s):
            remedy = "unset VLLM_SERVER_DEV_MODE, or let no other host reach the port: no key guards these"
            return Row(base, f"vLLM: everyone may call {', '.join(found)}", "warn", remedy)
        if found := _there(base, _SGLANG, timeout_s):
            # What is no JSON is refused before anything is done, but after the key.
            if _status(base + _ASKS_FOR_KEYS, "POST", timeout_s, b"{") in _REFUSED:
                return Row(base, "SGLang: its controls ask for a key")
            remedy = "start it with --admin-api-key, and let no other host reach the port"
            return Row(base, f"SGLang: everyone may call {', '.join(found)}", "warn", remedy)
    except OSError as error:
        return Row(base, f"does not answer: {error}", "missing", "give the address of a server that runs")
    return Row(base, "no controls of vLLM or SGLang that we know")


def _is_address(url: str) -> bool:
    try:
        where = urlsplit(url)
    except ValueError:  # a bracket that is not closed
        return False
    return (
        where.scheme in ("http", "https") and bool(where.hostname) and re.fullmatch("[!-~]+", url) is not None
    )


def _there(base: str, paths: tuple[str, ...], timeout_s: float) -> list[str]:
    """Return the paths that exist and do not ask for a key: OPTIONS is not allowed there.

    Raises OSError if the server does not say so, as a balancer that has no server, or that names another URL.
    """
    statuses = {path: _status(base + path, "OPTIONS", timeout_s) for path in paths}
    for status in statuses.values():
        if status >= 500 or 300 <= status < 400:
            raise OSError(f"{status} {http.client.responses.get(status, '')}")
    return [path for path, status in statuses.items() if status == 405]


def _status(url: str, method: str, timeout_s: float, data: bytes | None = None) -> int:
    """Return the status of an answer. Raises OSError if there is none."""
    headers = {"Content-Type": "application/json"} if data else {}
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with _direct.open(request, timeout=timeout_s) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
