"""Has an ``sglang.launch_server`` that Ray did not start join the driver as an engine.

SGLang loads `weightsync.plugins.register_sglang` as a plug-in, which adds this to SGLang's application.
"""

from __future__ import annotations

import asyncio
from importlib import import_module
from typing import Any

from weightsync.actors.servers.app import JoinsDriver
from weightsync.engines import Engine
from weightsync.engines.sglang.adopted import AdoptedSglang


class JoinSglang(JoinsDriver):
    """An ASGI middleware that takes part in updates while SGLang's server runs. Passes all requests on."""

    async def _served(self, app: Any, loop: asyncio.AbstractEventLoop) -> tuple[Engine, int]:  # noqa: ANN401
        server = import_module("sglang.srt.entrypoints.http_server")
        engine, options = AdoptedSglang(server.get_global_state().tokenizer_manager, loop), app.server_args
        if options.load_format == "dummy":
            await engine.hold()
        return engine, options.port
