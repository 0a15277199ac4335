"""HTTP client for agent services: programs of the operator that run agents outside of Outrider.

Requests are signed like callbacks. aiohttp is imported only when a run begins, because the import takes a seventh of
the processor time that Outrider needs to start. Invariants: an error message contains neither the address nor the key
of a service; a reply has at most MAX_STATE bytes.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Collection, Mapping
from importlib import import_module
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

import msgspec

from outrider.callbacks import signed_headers
from outrider.concurrency.retries import RetryPolicy
from outrider.config import AgentServiceConfig
from outrider.environment import environment
from outrider.errors import HarnessError
from outrider.redaction import redacted

if TYPE_CHECKING:
    import aiohttp

MAX_STATE = 4 << 20
"""Maximum size of a reply in bytes."""
REQUEST_SECONDS = 60.0
REACH = RetryPolicy(first=0.5, longest=10.0)
"""Pauses between the attempts of a request: up to 0.5 s after the first attempt, growing to 10 s."""
MAX_EXCERPT = 2000
TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})

S = TypeVar("S")


class RemoteRunFailed(HarnessError):
    """A run on an agent service failed, was lost, or could not be started. The session may be retried."""

    code = "remote_run_failed"


class NotConnected(OSError):
    """No connection to the service could be opened, so the service has not received the request."""


class ConnectionLost(OSError):
    """The connection to the service broke, or the reply was not HTTP. The service may have received the request."""


class ServiceReply(NamedTuple):
    status: int
    content: bytes

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def excerpt(self) -> str | None:
        """The beginning of the reply's text, without secrets, for error messages."""
        return redacted(self.content.decode("utf-8", "replace"))[:MAX_EXCERPT] or None


class ServiceCalls:
    """Sends the requests of one run to its agent service. `async with` opens and closes the connections.

    The path of each request is appended to `url`. `signed_as` is the message id in the signature of each request."""

    def __init__(self, service: AgentServiceConfig, url: str, signed_as: str) -> None:
        self.name = service.name
        self._service = service
        self._url = url
        self._signed_as = signed_as
        self._http: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(import_module, "aiohttp")
        import aiohttp

        self._http = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        kind: str = "application/json",
        *,
        seconds: float = REQUEST_SECONDS,
        again_on: Collection[int] = TRANSIENT,
        any_answer: bool = False,
    ) -> bytes:
        """Send a request and return the content of the reply. The request is repeated for up to `patience_seconds`
        while no reply comes or the reply's status is in `again_on`.

        Raises RemoteRunFailed after this time and, unless `any_answer` is True, at once for any other status outside of
        200 to 299."""
        loop, name = asyncio.get_running_loop(), self.name
        give_up_at = loop.time() + self._service.patience_seconds
        for tries in count():
            try:
                reply = await self.once(method, path, body, kind, seconds=seconds)
                if reply.ok:
                    return reply.content
                failure = f"answered {reply.status}"
                if reply.status == 404 and method == "GET":
                    failure = "does not know the run any more"
                if reply.status not in again_on:
                    if any_answer:
                        return reply.content
                    raise RemoteRunFailed(f"agent service {name!r} {failure}", log_tail=reply.excerpt)
            except TimeoutError:
                failure = f"did not answer within {seconds:g} s"
            # only the type is shown, because the text of an OSError may contain the operator's address
            except OSError as error:
                failure = f"cannot be reached: {type(error).__name__}"
            await self.pause(tries, give_up_at, failure)
        raise AssertionError("count() has no end")

    def state(self, content: bytes, kind: type[S]) -> S:
        """Decode the state of the run from a reply's content. Raises RemoteRunFailed for invalid content."""
        try:
            return msgspec.json.decode(content, type=kind)
        except (msgspec.DecodeError, ValueError) as error:
            raise RemoteRunFailed(f"the state that agent service {self.name!r} gave: {error}") from error

    async def pause(self, tries: int, give_up_at: float, failure: str) -> None:
        """Wait before a request is repeated. Raises RemoteRunFailed if the event loop's clock has reached
        `give_up_at`."""
        left = give_up_at - asyncio.get_running_loop().time()
        if left <= 0:
            raise RemoteRunFailed(
                f"agent service {self.name!r} {failure}, for {self._service.patience_seconds:g} s",
                hint="see whether it runs, and the setting agents",
            )
        await asyncio.sleep(min(REACH.wait(tries), left))

    async def once(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        kind: str = "application/json",
        *,
        seconds: float = REQUEST_SECONDS,
        more: Mapping[str, str] | None = None,
    ) -> ServiceReply:
        """Send a request once, with the additional headers `more`. Raises NotConnected, ConnectionLost, TimeoutError or
        another OSError, and RemoteRunFailed for a reply that is too large."""
        import aiohttp

        headers = {"Content-Type": kind, "Accept-Encoding": "identity", **self._signature(body), **(more or {})}
        timeout = aiohttp.ClientTimeout(total=seconds)
        # a stream, because aiohttp writes a bytes object in one piece, even a large one
        data = io.BytesIO(body) if body else None
        try:
            async with self._http.request(
                method, self._url + path, data=data, headers=headers, timeout=timeout, allow_redirects=False
            ) as reply:
                content = bytearray()
                async for part in reply.content.iter_chunked(1 << 16):
                    content += part
                    if len(content) > MAX_STATE:
                        raise RemoteRunFailed(f"agent service {self.name!r} sent more than {MAX_STATE} bytes")
                return ServiceReply(reply.status, bytes(content))
        except aiohttp.ClientConnectorError as error:
            raise NotConnected(type(error).__name__) from error
        except aiohttp.ClientError as error:
            if isinstance(error, TimeoutError):
                raise
            raise ConnectionLost(type(error).__name__) from error

    def _signature(self, body: bytes) -> Mapping[str, str]:
        headers = {}
        if (key := self._variable(self._service.key_variable)) is not None:
            headers["Authorization"] = f"Bearer {key}"
        if (secret := self._variable(self._service.secret_variable)) is not None:
            headers |= signed_headers(secret, self._signed_as, body, now=time.time())
        return headers

    def _variable(self, name: str | None) -> str | None:
        if name is None:
            return None
        if not (value := (environment(name) or "").strip()):
            raise RemoteRunFailed(
                f"the variable {name} of agent service {self.name!r} is not set",
                hint="set it in the environment of `outrider serve`",
            )
        return value
