"""A judge on loopback that speaks the OpenAI API: scores by content, misbehaves as the instruction says.

It checks every body it gets; what is wrong is in `violations`. Sizes, frame counts and rates are expected as
the test sets them.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import av
import numpy as np
from PIL import Image

MODEL = "tiny-judge"
TRIAL = "Nothing happens."
"""The instruction of the verdict that a run asks for at its start."""
INSTRUCTION = re.compile(r"<instruction>\n(.*)\n</instruction>", re.DOTALL)
SCHEMA = "JSON schema:\n"


@dataclass(frozen=True)
class Seen:
    """One request as it came: the whole body, and what its first message holds."""

    body: dict[str, Any]
    text: str
    image: np.ndarray | None
    frames: np.ndarray
    fps: Fraction

    @property
    def instruction(self) -> str:
        """The prompt of the sample."""
        found = INSTRUCTION.search(self.text)
        assert found is not None, self.text
        return found.group(1)

    @property
    def schema(self) -> dict[str, Any]:
        """The form of the answer, as the text states it."""
        return json.loads(self.text.rpartition(SCHEMA)[2])

    @property
    def turns(self) -> int:
        """Requests of this conversation so far, as far as the judge has answered them."""
        return sum(message["role"] == "user" for message in self.body["messages"])

    @property
    def share(self) -> float:
        """What the clip is worth, 0 to 1: its brightness, of the last frame above all."""
        means = self.frames.reshape(len(self.frames), -1).mean(axis=1) / 255
        return float(0.25 * means.mean() + 0.75 * means[-1])


def read_request(body: dict[str, Any]) -> Seen:
    """The request of `body`. Raises AssertionError for a form that no judge could use."""
    messages = body["messages"]
    assert messages[0]["role"] == "user" and messages[-1]["role"] == "user"
    parts = messages[0]["content"]
    kinds = [part["type"] for part in parts]
    assert kinds in (["text", "image_url", "video_url"], ["text", "video_url"]), kinds
    assert all(isinstance(message["content"], str) for message in messages[1:]), "media travel once"
    image = None
    if "image_url" in kinds:
        url = parts[1]["image_url"]["url"]
        assert url.startswith("data:image/jpeg;base64,"), url[:40]
        image = np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2], validate=True))))
    url = parts[-1]["video_url"]["url"]
    assert url.startswith("data:video/mp4;base64,"), url[:40]
    with av.open(io.BytesIO(base64.b64decode(url.partition(",")[2], validate=True))) as container:
        stream = container.streams.video[0]
        assert stream.codec_context.name == "h264" and len(container.streams.video) == 1
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)])
        assert stream.average_rate is not None
        return Seen(body, parts[0]["text"], image, frames, stream.average_rate)


def verdict(seen: Seen, share: float | None = None) -> dict[str, Any]:
    """A verdict in the form that was asked for, worth `share` of the full mark."""
    share = seen.share if share is None else share
    properties = seen.schema["properties"]
    answer: dict[str, Any] = {"reason": "it is as bright as that"}
    if "criteria" in properties:
        marks = properties["criteria"]["properties"]
        weights = {name: mark["properties"]["weight"]["enum"][0] for name, mark in marks.items()}
        answer["criteria"] = {
            name: {"weight": weight, "score": weight * share} for name, weight in weights.items()
        }
    return {**answer, "score": properties["score"]["maximum"] * share}


def completion(content: object) -> bytes:
    """The body of a chat completion."""
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    return json.dumps({"id": "1", "object": "chat.completion", "model": MODEL, "choices": [choice]}).encode()


@dataclass(frozen=True)
class Expected:
    """What every body must hold."""

    frames: int
    fps: int
    longest_edge: int


Reply = Callable[["JudgeServer", "Handler", Seen, int], None]


class JudgeServer(ThreadingHTTPServer):
    """The judge. replies: by the sample's instruction, how to answer it instead of well; `count` is how often
    it was asked, this time included."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self,
        replies: dict[str, Reply] | None = None,
        expected: Expected | None = None,
        model: str = MODEL,
    ) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies, self.expected, self.model = replies or {}, expected, model
        self.violations: list[str] = []
        self.seen: list[Seen] = []
        self.counts: Counter[str] = Counter()
        self.keys: set[str | None] = set()
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """The endpoint's root."""
        return f"http://127.0.0.1:{self.server_port}/v1"

    def stop(self) -> None:
        """Let go of every hanging request and end."""
        self.ended.set()
        self.shutdown()
        self.server_close()

    def check(self, seen: Seen) -> None:
        """Note what is wrong with a request."""
        if self.expected is None or seen.instruction == TRIAL:
            return
        if (len(seen.frames), seen.fps) != (self.expected.frames, self.expected.fps):
            self.violations.append(f"{len(seen.frames)} frames at {seen.fps} a second")
        if seen.image is not None and max(seen.image.shape[:2]) > self.expected.longest_edge:
            self.violations.append(f"an image of {seen.image.shape}")

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that leave are part of the tests."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: JudgeServer

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        models = {"object": "list", "data": [{"id": self.server.model, "object": "model"}]}
        body = b"" if self.path == "/health" else json.dumps(models).encode()
        self.reply(200 if self.path in ("/health", "/v1/models") else 404, body)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        try:
            assert self.path == "/v1/chat/completions" and body["model"] == server.model
            seen = read_request(body)
        except (AssertionError, KeyError, ValueError, OSError) as error:
            server.violations.append(repr(error))
            self.reply(400, b'{"error": {"message": "no such request"}}')
            return
        with server.lock:
            server.check(seen)
            server.keys.add(self.headers["Authorization"])
            server.seen.append(seen)
            server.counts[seen.instruction] += 1
            count = server.counts[seen.instruction]
            server.in_flight += 1
            server.most_in_flight = max(server.in_flight, server.most_in_flight)
        try:
            reply = server.replies.get(seen.instruction)
            if reply is None:
                self.answer(verdict(seen))
            else:
                reply(server, self, seen, count)
        finally:
            with server.lock:
                server.in_flight -= 1

    def answer(self, value: object) -> None:
        """A completion whose text is `value` as JSON."""
        self.reply(200, completion(json.dumps(value)))

    def reply(self, status: int, body: bytes, **headers: str) -> None:
        """Everything at once."""
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def drop(self) -> None:
        """Close the connection without a word."""
        self.close_connection = True


def first(times: int, fault: Reply) -> Reply:
    """`fault` the first times, then a good verdict."""

    def reply(server: JudgeServer, handler: Handler, seen: Seen, count: int) -> None:
        if count <= times:
            fault(server, handler, seen, count)
        else:
            handler.answer(verdict(seen))

    return reply


def status(code: int, message: str = "no", **headers: str) -> Reply:
    """An error of the service."""
    body = json.dumps({"error": {"message": message, "code": code}}).encode()
    return lambda _server, handler, _seen, _count: handler.reply(code, body, **headers)


def body(content: bytes, code: int = 200, **headers: str) -> Reply:
    """A body as it is."""
    return lambda _server, handler, _seen, _count: handler.reply(code, content, **headers)


def text(content: object) -> Reply:
    """A completion with this text, whatever was asked."""
    return body(completion(content))


def changed(change: Callable[[dict[str, Any]], object]) -> Reply:
    """A good verdict after `change` has had it."""

    def reply(server: JudgeServer, handler: Handler, seen: Seen, count: int) -> None:
        answer = verdict(seen)
        change(answer)
        handler.answer(answer)

    return reply


def after(seconds: float) -> Reply:
    """A good verdict, late."""

    def reply(server: JudgeServer, handler: Handler, seen: Seen, count: int) -> None:
        server.ended.wait(seconds)
        handler.answer(verdict(seen))

    return reply


def hang(server: JudgeServer, handler: Handler, seen: Seen, count: int) -> None:
    """Never answer."""
    server.ended.wait(60)
    handler.drop()


def close(server: JudgeServer, handler: Handler, seen: Seen, count: int) -> None:
    """Close the connection."""
    handler.drop()


def trickle(server: JudgeServer, handler: Handler, seen: Seen, count: int) -> None:
    """A header line a moment, without end: no pause is long enough for a timeout between bytes."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not server.ended.wait(0.05):
        handler.wfile.write(b"X-Wait: 1\r\n")
        handler.wfile.flush()


def endless(server: JudgeServer, handler: Handler, seen: Seen, count: int) -> None:
    """64 MiB of answer."""
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(1 << 26))
    handler.end_headers()
    for _ in range(1 << 10):
        handler.wfile.write(b" " * (1 << 16))


ZIPPED = body(gzip.compress(b" " * (1 << 24)), Content_Encoding="gzip")
