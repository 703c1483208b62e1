"""One request to an OpenAI-compatible service, bounded in time and in size, and why it failed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import httpx2
from openai import APIConnectionError, APIStatusError, APITimeoutError, AsyncOpenAI, DefaultAsyncHttpxClient

from wan_trainer.config.specs import VlmRewardSpec
from wan_trainer.rewards.messages import one_line

LARGEST_BODY = 1 << 20
"""Bytes of a service's answer that are read, of an error's too; a verdict has a few hundred."""

MASK = "********"
RETRIED = (408, 409, 425, 429)
"""Statuses below 500 after which the same request may succeed."""

LONGEST_RETRY_AFTER_S = 60.0


class RequestFailed(Exception):
    """A request without an answer. again: the same may succeed later, after_s seconds at the least."""

    def __init__(self, reason: str, *, again: bool, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.again = again
        self.after_s = after_s


class JudgeClient:
    """The service of a specification. It belongs to the event loop that uses it first.

    No error text holds the key. openai's own retries are off: attempts are counted by the caller.
    """

    def __init__(self, spec: VlmRewardSpec) -> None:
        self._key = spec.api_key
        self._timeout_s = spec.request_timeout_s
        self._http = DefaultAsyncHttpxClient(
            # A proxy of the environment cannot reach a service on this machine.
            trust_env=not spec.is_local,
            follow_redirects=False,
            event_hooks={"response": [_bound_body]},
        )
        self._client = AsyncOpenAI(
            base_url=spec.base_url,
            api_key=spec.api_key or "EMPTY",
            max_retries=0,
            timeout=spec.request_timeout_s,
            http_client=self._http,
            default_headers={"Accept-Encoding": "identity"},
        )

    async def complete(self, body: dict[str, Any]) -> str:
        """The text of the answer, possibly empty. Raises RequestFailed."""
        content = await self._send(self._client.chat.completions.with_raw_response.create(**body))
        return self._answer(content)

    async def models(self) -> list[str]:
        """The names that the service serves. Raises RequestFailed."""
        listed = _parsed(await self._send(self._client.models.with_raw_response.list()))
        entries = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(entries, list):
            raise RequestFailed("the list of models is not one", again=True)
        return [str(entry["id"]) for entry in entries if isinstance(entry, dict) and "id" in entry]

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _send(self, request: Any) -> bytes:
        try:
            # The client's own limit counts from byte to byte: a trickle would never meet it.
            async with asyncio.timeout(self._timeout_s):
                return (await request).content
        except (TimeoutError, APITimeoutError):
            raise RequestFailed(f"no answer within {self._timeout_s:g} s", again=True) from None
        except APIStatusError as error:
            raise self._status_failure(error) from None
        except APIConnectionError as error:
            cause = error.__cause__ or error
            raise RequestFailed(self._clean(str(cause)), again=True) from None

    def _status_failure(self, error: APIStatusError) -> RequestFailed:
        status = error.status_code
        again = status in RETRIED or status >= 500
        said = self._clean(error.message)
        return RequestFailed(
            said if str(status) in said else f"status {status}: {said}",
            again=again,
            after_s=_retry_after(error.response.headers.get("retry-after")),
        )

    def _answer(self, content: bytes) -> str:
        completion = _parsed(content)
        choices = completion.get("choices") if isinstance(completion, dict) else None
        first = choices[0] if isinstance(choices, list) and choices else None
        message = first.get("message") if isinstance(first, dict) else None
        if not isinstance(message, dict):
            raise RequestFailed("the service answered without a choice", again=True)
        text = message.get("content")
        if text is None:
            return ""  # all tokens went into thoughts
        if not isinstance(text, str):
            raise RequestFailed("the service answered with something other than text", again=True)
        return text

    def _clean(self, text: str) -> str:
        """`text` on one line, without the key: services like to quote it."""
        if self._key not in ("", "EMPTY"):
            for spelling in (self._key, repr(self._key)[1:-1]):
                text = text.replace(spelling, MASK)
        return one_line(text) or "the connection failed"


def served_models(spec: VlmRewardSpec, timeout_s: float) -> list[str]:
    """The names that the service of `spec` serves, asked once. Raises RequestFailed."""

    async def ask() -> list[str]:
        client = JudgeClient(replace(spec, request_timeout_s=timeout_s))
        try:
            return await client.models()
        finally:
            await client.close()

    return asyncio.run(ask())


class _BoundedStream(httpx2.AsyncByteStream):
    """A body that fails instead of growing past LARGEST_BODY."""

    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in self._stream:
            size += len(chunk)
            if size > LARGEST_BODY:
                raise httpx2.ReadError(f"the answer is larger than {LARGEST_BODY} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


async def _bound_body(response: httpx2.Response) -> None:
    encoding = response.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        # A small compressed body can unpack to any size.
        raise httpx2.ReadError(f"the answer is encoded with {encoding[:40]}, which was not asked for")
    response.stream = _BoundedStream(cast("httpx2.AsyncByteStream", response.stream))


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise RequestFailed("the service's answer is not JSON", again=True) from None


def _retry_after(header: str | None) -> float:
    """Seconds of a Retry-After header; a date or nonsense counts as none."""
    try:
        seconds = float(header or 0)
    except ValueError:
        return 0.0
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER_S) if seconds == seconds else 0.0
