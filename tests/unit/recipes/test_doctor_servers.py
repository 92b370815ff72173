"""What the doctor says of engines' own servers, and that it changes nothing there."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from weightsync.errors import ConfigError
from weightsync.recipes import cli
from weightsync.recipes.doctor import probes
from weightsync.recipes.doctor.servers import server

VLLM = ("/pause", "/resume", "/sleep", "/update_weights", "/init_weight_transfer_engine", "/collective_rpc")
SGLANG = ("/pause_generation", "/release_memory_occupation", "/update_weights_from_disk")


class Server:
    """A server of HTTP, with what it was asked and what it has done.

    `paths` are its controls, `other` is the answer to others. With a `key` it asks for one, as SGLang does.
    """

    def __init__(self, paths: tuple[str, ...], key: str = "", other: int = 404) -> None:
        self.asked: list[tuple[str, str]] = []
        self.done: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None: ...

            def answer(self) -> None:
                outer.asked.append((self.command, self.path))
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(outer.status(self.command, self.path, body, key))
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_POST = do_OPTIONS = answer  # noqa: N815

        self._paths, self._other = paths, other
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def status(self, method: str, path: str, body: bytes, key: str) -> int:
        if path not in self._paths:
            return self._other
        if method == "OPTIONS":
            return 405
        if key:
            return 401
        try:
            json.loads(body)
        except ValueError:
            return 422
        self.done.append(path)
        return 200

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def serving(paths: tuple[str, ...], key: str = "", other: int = 404) -> Iterator[Server]:
    made = Server(paths, key, other)
    yield made
    made.close()
    assert made.done == [], "nothing was changed there"


def test_controls_of_vllm_are_named_with_the_variable() -> None:
    with serving(VLLM) as made:
        row = server(made.url + "/")
        assert {method for method, _ in made.asked} == {"OPTIONS"}
    assert row.name == made.url
    assert row.state == "warn"
    assert row.found == f"vLLM: everyone may call {', '.join(VLLM)}"
    assert "VLLM_SERVER_DEV_MODE" in row.remedy


def test_the_server_is_asked_and_not_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving((), other=403) as proxy, serving(VLLM) as made:
        for variable in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(variable, proxy.url)
        assert server(made.url).state == "warn"
        assert proxy.asked == []


@pytest.mark.parametrize("status", [503, 308])
def test_a_balancer_without_a_server_is_not_called_safe(status: int) -> None:
    with serving((), other=status) as made:
        row = server(made.url)
    assert (row.state, row.found) == ("missing", f"does not answer: {status} {http.client.responses[status]}")


def test_only_controls_that_are_there_are_named() -> None:
    with serving(("/pause", "/update_weights")) as made:
        assert server(made.url).found == "vLLM: everyone may call /pause, /update_weights"


def test_controls_of_sglang_without_a_key_are_named() -> None:
    with serving(SGLANG) as made:
        row = server(made.url)
    assert row.state == "warn"
    assert row.found == f"SGLang: everyone may call {', '.join(SGLANG)}"
    assert "--admin-api-key" in row.remedy


def test_sglang_with_a_key_is_fine() -> None:
    with serving(SGLANG, key="k") as made:
        row = server(made.url)
    assert (row.state, row.remedy) == ("ok", "")
    assert row.found == "SGLang: its controls ask for a key"


def test_a_server_without_controls_is_fine() -> None:
    with serving(()) as made:
        assert server(made.url).state == "ok"


def test_a_server_that_is_not_there_is_missing() -> None:
    with serving(()) as made:
        url = made.url
    row = server(url)
    assert row.state == "missing"
    assert "does not answer" in row.found
    assert "refused" in row.found


@pytest.mark.parametrize(
    "url", ["10.0.0.2:8000", "http://", "file:///etc/passwd", "", "http://[::1", "http://a b"]
)
def test_a_text_that_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="give the address of a server, such as http://"):
        server(url)


def test_the_command_shows_each_server_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "diagnose", list)
    with serving(VLLM) as one, serving(()) as two:
        done = CliRunner().invoke(cli.app, ["doctor", "--server", one.url, "--server", two.url])
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert lines[0].startswith(f"warn     {one.url}")
    assert lines[2].startswith(f"ok       {two.url}")
