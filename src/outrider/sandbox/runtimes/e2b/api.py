"""The calls of the E2B API that sandboxes need, and the settings with the API's address and key.

This module repeats no call and undoes none. https://e2b.dev/docs/api-reference describes the API. Invariants:

- The API key is sent only to the API's own address, and no error contains it.
- Every failure is an `E2BError` with the service's own text and status. The status is 0 if it is unknown whether the
  service carried out the call.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from outrider.environment import environment
from outrider.errors import RuntimeUnavailable

DOMAIN = "e2b.app"
ENVD_PORT = 49983
"""The port of `envd`, a program in every E2B sandbox that starts processes and copies files."""
CALL_SECONDS = 60.0
CONNECT_SECONDS = 10.0
MAX_REPLY = 16 << 20
LIST = "/v2/sandboxes"
PAGE = 100
"""Number of sandboxes in one page of the list. The service allows no more."""
MAX_PAGES = 1000
NEXT_TOKEN = "x-next-token"
"""The response header with the token for the next page of a list. The last page does not have this header."""
PORT_CLOSED = "port is not open"
"""Text in the error message of the service's proxy if a sandbox runs, but no program in it listens on the requested
port."""
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""The errors of decoding a reply. RecursionError: the reply has thousands of lists within each other."""
TEXT_MAX = 500
ID = re.compile(r"[A-Za-z0-9_-]{1,128}")

T = TypeVar("T")


class E2BError(Exception):
    """A failed call. `status` is the HTTP status, or 0 without a usable reply. `wait` is how many seconds the service
    asks clients to wait before the next call, or None if it does not ask."""

    def __init__(self, status: int, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.wait = wait


@dataclass(frozen=True)
class E2BSettings:
    """The addresses of an E2B service, and its API key. `sandbox_url` is the common address of all sandboxes. It is ""
    if each sandbox has its own address below `domain`."""

    key: str = field(repr=False)
    url: str
    domain: str
    sandbox_url: str

    @classmethod
    def read(cls) -> E2BSettings:
        """Read the environment variables that E2B's own SDK uses. Raises RuntimeUnavailable."""
        key = (environment("E2B_API_KEY") or "").strip()
        if not key:
            raise RuntimeUnavailable(
                "E2B_API_KEY is not set",
                hint="set E2B_API_KEY in the service's environment; E2B_DOMAIN or E2B_API_URL name another service",
            )
        domain = environment("E2B_DOMAIN") or DOMAIN
        url = (environment("E2B_API_URL") or f"https://api.{domain}").rstrip("/")
        sandbox_url = (environment("E2B_SANDBOX_URL") or "").rstrip("/")
        for name, address in (("E2B_API_URL", url), ("E2B_SANDBOX_URL", sandbox_url or url)):
            if urlsplit(address).scheme not in ("http", "https") or not urlsplit(address).hostname:
                raise RuntimeUnavailable(f"{name} is not an http address", hint="write it as https://host[:port]")
        return cls(key, url, domain, sandbox_url)


class MadeSandbox(msgspec.Struct, frozen=True, rename="camel"):
    """A sandbox that the service has just created. `envd_access_token` is the credential for starting processes and
    copying files in it."""

    sandbox_id: str = msgspec.field(name="sandboxID")
    envd_access_token: str | None = None
    traffic_access_token: str | None = None
    domain: str | None = None


class ListedSandbox(msgspec.Struct, frozen=True):
    id: str = msgspec.field(name="sandboxID")
    metadata: dict[str, str] | None = None


@dataclass(frozen=True)
class ApiReply(Generic[T]):
    """The decoded reply to a call. `next` is the token for the list's next page, or "" on the last page."""

    value: T
    next: str


class Problem(msgspec.Struct, frozen=True):
    """The body of the reply to a failed call."""

    message: str = ""


class E2BApi:
    """A client of one E2B service. Close it after use. A failed call raises E2BError."""

    def __init__(self, settings: E2BSettings, *, seconds: float = CALL_SECONDS, max_pages: int = MAX_PAGES) -> None:
        """`seconds` is the time limit of each call, including its whole reply. `max_pages` is the maximum number of
        pages of a list."""
        self.settings = settings
        self._max_pages = max_pages
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        self.http = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        """The client for calls of the API and for calls to sandboxes. The calls to sandboxes carry no API key."""

    async def close(self) -> None:
        await self.http.close()

    async def create(self, template: str, metadata: Mapping[str, str], *, seconds: int, key: str) -> MadeSandbox:
        """Create a sandbox that has no internet access. The service ends the sandbox after `seconds`. `key` is an
        idempotency key. If the service supports such keys, repeated requests with the same key create only one
        sandbox."""
        body = {
            "templateID": template,
            "timeout": seconds,
            "autoPause": False,
            "secure": True,
            "allow_internet_access": False,
            "metadata": dict(metadata),
        }
        made = (await self._call("POST", "/sandboxes", MadeSandbox, body, {"Idempotency-Key": key})).value
        if ID.fullmatch(made.sandbox_id) is None:
            raise E2BError(0, "the service gave a sandbox an id that cannot be part of an address")
        return made

    async def labelled(self, label: str, value: str | None = None) -> list[ListedSandbox]:
        """Return all sandboxes with the label. If `value` is given, return only those whose label has this value."""
        found = await self._pages({} if value is None else {"metadata": f"{label}={value}"})
        own = [one for one in found if label in (one.metadata or {}) and ID.fullmatch(one.id)]
        return [one for one in own if value is None or (one.metadata or {})[label] == value]

    async def _pages(self, query: Mapping[str, str]) -> list[ListedSandbox]:
        """Return the sandboxes in all pages of the list."""
        found: list[ListedSandbox] = []
        query = {**query, "limit": str(PAGE)}
        for _ in range(self._max_pages):
            page = await self._call("GET", LIST, list[ListedSandbox], query=query)
            found += page.value
            if not page.next:
                return found
            query["nextToken"] = page.next
        raise E2BError(0, f"the list of sandboxes has more than {self._max_pages} pages")

    async def exists(self, sandbox: str) -> bool:
        try:
            await self._call("GET", f"/sandboxes/{sandbox}", ListedSandbox)
        except E2BError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def extend(self, sandbox: str, seconds: int) -> None:
        """Set the time at which the service ends the sandbox to `seconds` from now."""
        await self._call("POST", f"/sandboxes/{sandbox}/timeout", None, {"timeout": seconds})

    async def delete(self, sandbox: str) -> bool:
        """Kill a sandbox. Returns False if it does not exist."""
        try:
            await self._call("DELETE", f"/sandboxes/{sandbox}", None)
        except E2BError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def _call(
        self,
        method: str,
        path: str,
        reply: type[T] | None,
        body: object = None,
        headers: Mapping[str, str] = {},
        *,
        query: Mapping[str, str] = {},
    ) -> ApiReply[T]:
        sent = {"X-API-Key": self.settings.key, **headers}
        async with (
            translated(),
            self.http.request(
                method, self.settings.url + path, json=body, params=query, headers=sent, allow_redirects=False
            ) as answer,
        ):
            data = await bounded(answer)
            if answer.status >= 300:
                raise refusal(answer, data)
            value: T = None if reply is None else msgspec.json.decode(data, type=reply)  # type: ignore[assignment]  # a call without a `reply` type has no value
            return ApiReply(value, answer.headers.get(NEXT_TOKEN, ""))


async def bounded(answer: aiohttp.ClientResponse, limit: int = MAX_REPLY) -> bytes:
    """Return the body of a reply. Raises E2BError if it has more than `limit` bytes."""
    data = bytearray()
    async for piece in answer.content.iter_any():
        data += piece
        if len(data) > limit:
            raise E2BError(0, f"the reply has more than {limit} bytes")
    return bytes(data)


def refusal(answer: aiohttp.ClientResponse, data: bytes) -> E2BError:
    """Return the error for an unsuccessful reply."""
    try:
        text = msgspec.json.decode(data, type=Problem).message
    except UNREADABLE:
        text = data.decode("utf-8", "replace")
    wait = answer.headers.get("Retry-After", "")
    seconds = float(wait) if wait.isascii() and wait.isdigit() else None
    return E2BError(answer.status, f"status {answer.status}: {text.strip()[:TEXT_MAX] or answer.reason}", seconds)


@asynccontextmanager
async def translated() -> AsyncIterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise E2BError(0, "no reply in time") from error
    except (aiohttp.ClientError, OSError, *UNREADABLE) as error:
        raise E2BError(0, f"{type(error).__name__}: {error}") from error
