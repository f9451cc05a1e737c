"""Requests to a service that is slow, busy, wrong or gone; the server here is a few lines that answer what a test says."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from hybridflow.config import ConfigError
from hybridflow.models import AdapterForm
from hybridflow.rollout.adapters import ServedAdapter
from hybridflow.rollout.requests import ServedModel
from hybridflow.rollout.service import RefusedError, Service, ServiceError
from hybridflow.rollout.vllm import VllmSettings
from hybridflow.rollout.vllm_service import VllmServiceEngine, connect_vllm_service

Answer = tuple[int, Any]


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[str, Any], Answer]], str]]:
    """Starts a server whose answers are `answer(path, body)`; its address."""
    servers: list[ThreadingHTTPServer] = []

    def start(answer: Callable[[str, Any], Answer]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                status, content = answer(self.path, json.loads(self.rfile.read(length)) if length else None)
                encoded = json.dumps(content).encode()
                # Whoever asked may be gone.
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(encoded)))
                    self.end_headers()
                    self.wfile.write(encoded)

            do_POST = do_GET

            def log_message(self, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_busy_service_is_asked_again(serve):
    asked = []

    def answer(path: str, body: Any) -> Answer:
        asked.append((path, body))
        return (503, "busy") if len(asked) < 3 else (200, {"done": body["n"]})

    assert Service(serve(answer), 10.0).post("/work", {"n": 7}, level=2) == {"done": 7}
    assert asked == [("/work?level=2", {"n": 7})] * 3


def test_an_error_of_the_service_is_told_and_not_asked_for_again(serve):
    asked = []

    def answer(path: str, body: Any) -> Answer:
        asked.append(path)
        return 400, {"error": {"message": "the prompt is too long"}}

    with pytest.raises(RefusedError, match="/work answered 400: the prompt is too long") as caught:
        Service(serve(answer), 10.0).post("/work", {})
    assert asked == ["/work"] and caught.value.status == 400


def test_a_service_that_is_gone_is_named_after_a_few_tries():
    service = Service("http://127.0.0.1:9", 5.0)
    start = time.monotonic()
    with pytest.raises(ServiceError, match=r"http://127.0.0.1:9/work cannot be reached \(ConnectionRefusedError"):
        service.post("/work", {})
    assert 1.5 < time.monotonic() - start < 10.0
    with pytest.raises(ServiceError, match=r"was not ready within 0.3 s .*start the server first"):
        service.wait_until_ready("/health", 0.3)


def test_a_long_wait_for_a_server_that_starts_is_told_once(serve, caplog):
    ready_s = time.monotonic() + 2.6
    url = serve(lambda path, body: (200, "ok") if time.monotonic() > ready_s else (503, "loading"))
    Service(url, 10.0).wait_until_ready("/health", 30.0)
    assert time.monotonic() > ready_s
    (told,) = [record.getMessage() for record in caplog.records]
    assert told == f'waiting for the server at {url}, 30 s at most ({url}/health answered 503: "loading")'
    caplog.clear()
    Service(url, 10.0).wait_until_ready("/health", 30.0)
    assert not caplog.records


def test_the_wait_for_an_answer_is_bounded(serve):
    url = serve(lambda path, body: time.sleep(2.0) or (200, {}))
    start = time.monotonic()
    with pytest.raises(ServiceError, match="did not answer within 0.3 s"):
        Service(url, 0.3).post("/work", {})
    assert time.monotonic() - start < 1.5


def test_a_wait_can_be_broken_off_from_another_thread_and_is_not_begun_again(serve):
    asked = []

    def answer(path: str, body: Any) -> Answer:
        asked.append(path)
        time.sleep(1.0 if path == "/slow" else 0.0)
        return 200, path

    service = Service(serve(answer), 30.0)
    timer = threading.Timer(0.2, service.interrupt)
    timer.start()
    start = time.monotonic()
    with pytest.raises(ServiceError, match="/slow was broken off"):
        service.post("/slow", {})
    assert time.monotonic() - start < 0.9
    with pytest.raises(ServiceError, match="/late was broken off"):
        service.post("/late", {})
    service.resume()
    assert service.post("/again", {}) == "/again" and asked == ["/slow", "/again"]


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ({"token_ids": [5], "logprobs": {"token_logprobs": [-0.4]}}, "--logprobs-mode processed_logprobs"),
        ({"logprobs": {"token_logprobs": [0.0]}}, "needs vLLM 0.20 or newer"),
    ],
)
def test_a_server_whose_answers_could_not_be_used_is_refused_at_once(serve, tmp_path, choice, told):
    answers = {
        "/health": None,
        "/v1/models": {"data": [{"max_model_len": 64}]},
        "/v1/completions": {"choices": [choice]},
    }
    url = serve(lambda path, body: (200, answers[path]))
    with pytest.raises(ConfigError, match=told):
        connect_vllm_service(tmp_path, VllmSettings(url=url))


@pytest.mark.parametrize("has_it", [True, False], ids=["has it", "refuses it"])
def test_an_adapter_whose_answer_was_lost_is_not_refused_when_it_is_asked_for_again(serve, has_it):
    asked, there = [], []

    def answer(path: str, body: Any) -> Answer:
        asked.append((path, body))
        if path == "/v1/load_lora_adapter":
            there.extend([body["lora_name"]] if has_it else [])
            return 400, {"error": {"message": "it has already been loaded"}}
        if path == "/v1/models":
            return 200, {"data": [{"id": name} for name in ("base", *there)]}
        return (404, "not there") if path == "/v1/unload_lora_adapter" else (200, None)

    shapes = {f"a.q_proj.lora_{side}.weight": torch.Size([2, 2]) for side in "AB"}
    adapter = ServedAdapter(AdapterForm(2, 4.0, False, "all-linear"), shapes)
    sent = [(name, torch.ones(shape)) for name, shape in shapes.items()]
    model = ServedModel(None, frozenset(), 8, 8, {})  # type: ignore[arg-type]
    engine = VllmServiceEngine(Service(serve(answer), 10.0), model, VllmSettings(url="http://x:1"), adapter)
    if not has_it:
        with pytest.raises(ConfigError, match="takes no adapter .* already been loaded.* --max-lora-rank 8, or set"):
            engine.load_adapter(1, sent)
        assert engine.version == 0
        return
    for version in (1, 2):
        engine.load_adapter(version, sent)
        assert engine.version == version
    # Each has a name of its own, the one before goes though the server no longer knows it, and prefixes go last.
    assert len(set(there)) == 2 and ("/v1/unload_lora_adapter", {"lora_name": there[0]}) in asked
    assert [path for path, _ in asked[-2:]] == ["/v1/unload_lora_adapter", "/reset_prefix_cache"]
