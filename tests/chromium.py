"""A headless Chromium, driven through its debugging protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.patience import patient

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_LIMIT_S = patient(60)


@dataclass
class Shown:
    """A page's requests and complaints, and the answers of evaluated scripts."""

    answers: Mapping[str, Any]
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


@contextmanager
def chromium(profile: Path) -> Iterator[int]:
    """Start Chromium with its files in `profile`.

    Yields its port; skips the test without Chromium.
    """
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip(f"no Chromium here: none of {', '.join(_NAMES)} is on the PATH")
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    process = subprocess.Popen(
        [found, *arguments, f"--user-data-dir={profile}", "--remote-debugging-port=0"],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield _port(profile, process)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _port(profile: Path, process: subprocess.Popen[bytes]) -> int:
    """Wait for the port, which Chromium chooses and writes to its profile."""
    path, deadline = profile / "DevToolsActivePort", time.monotonic() + _LIMIT_S
    while not (path.exists() and path.read_text().count("\n")):
        assert process.poll() is None, "Chromium ended"
        assert time.monotonic() < deadline, "Chromium does not start"
        time.sleep(0.02)
    return int(path.read_text().splitlines()[0])


def show(port: int, page: Path, scripts: Sequence[str], *, width: int, dark: bool, to: Path) -> Shown:
    """Open `page` in a window of `width` and evaluate `scripts`.

    Saves a full screenshot to `to`.
    """
    return asyncio.run(asyncio.wait_for(_show(port, page, scripts, width, dark, to), _LIMIT_S))


async def _show(port: int, page: Path, scripts: Sequence[str], width: int, dark: bool, to: Path) -> Shown:
    async with aiohttp.ClientSession() as session:
        async with session.put(f"http://127.0.0.1:{port}/json/new") as answer:
            url = (await answer.json())["webSocketDebuggerUrl"]
        async with session.ws_connect(url, max_msg_size=0) as socket:
            tab = _Tab(socket)
            for domain in ("Page", "Network", "Runtime", "Log"):
                await tab.ask(f"{domain}.enable")
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
            await tab.ask("Emulation.setDeviceMetricsOverride", **size)
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            await tab.ask("Emulation.setEmulatedMedia", features=[scheme])
            await tab.ask("Page.navigate", url=page.as_uri())
            await tab.wait_for("Page.loadEventFired")
            answers = {}
            for script in scripts:
                evaluated = await tab.ask("Runtime.evaluate", expression=script, returnByValue=True)
                answers[script] = evaluated["result"].get("value")
            picture = await tab.ask("Page.captureScreenshot", captureBeyondViewport=True)
            to.write_bytes(base64.b64decode(picture["data"]))
            await tab.ask("Page.close")
            return tab.told(answers)


class _Tab:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._ids = socket, itertools.count(1)
        self._events: list[dict[str, Any]] = []

    async def ask(self, method: str, **params: object) -> dict[str, Any]:
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while (message := await self._socket.receive_json()).get("id") != number:
            self._events.append(message)
        assert "error" not in message, message
        result: dict[str, Any] = message["result"]
        return result

    async def wait_for(self, event: str) -> None:
        while all(each["method"] != event for each in self._events):
            self._events.append(await self._socket.receive_json())

    def told(self, answers: Mapping[str, Any]) -> Shown:
        shown = Shown(answers)
        for event in self._events:
            params = event["params"]
            if event["method"] == "Network.requestWillBeSent":
                shown.requests.append(params["request"]["url"])
            if event["method"] in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                shown.complaints.append(str(params))
        return shown
