"""Routers in front of engine servers: lists a router's workers, and sends orders (such as a pause) to each worker.

A router forwards a generation to one worker, or to two if prefill and decode are separate. A router forwards an order
to at most one worker, so orders are sent to the workers directly. Tested with vllm-router 0.1.17 and sglang-router
0.3.2. Invariant: when an order returns without an error, every listed worker that accepts connections has executed the
order, and there is at least one such worker.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from outrider.engines.adapters.options import ServerOptions, read_options, server_url
from outrider.engines.base import EngineOptions
from outrider.engines.http.client import HttpClient
from outrider.engines.http.failures import StatusFailure, translate
from outrider.errors import EngineMisbehaved, EngineRejected, EngineUnavailable, InvalidField
from outrider.spec import EngineSpec

T = TypeVar("T")

_RANK = re.compile(r"@\d+$")


class ListedWorker(msgspec.Struct, frozen=True):
    """A worker in a router's list. `worker_type` is `prefill` or `decode` if separate workers do these two steps,
    otherwise `regular`."""

    url: str
    worker_type: str = "regular"

    @property
    def server(self) -> str:
        """The URL of the worker's server, without the rank at its end. If a server uses data parallelism, a router
        lists each rank as a worker, such as `http://host:port@1`."""
        return _RANK.sub("", self.url).rstrip("/")


class _WorkerList(msgspec.Struct):
    workers: list[ListedWorker]


class WorkersOutOfReach(EngineRejected):
    """Raised if a router lists workers, but this service can connect to none of them."""


class Servers:
    """The servers behind an engine's URL: all workers of a router, or the one server at the URL."""

    def __init__(self, engine: str, front: HttpClient, connect: Callable[[str], HttpClient]) -> None:
        self.routed = False
        """True if the latest `find` has found a router at the URL."""
        self._engine = engine
        self._front = front
        self._connect = connect
        self._workers: dict[str, HttpClient] = {}
        self._reached = False

    @property
    def urls(self) -> list[str]:
        """The URLs of the servers that receive orders, as found by the latest `find`."""
        return list(self._workers) if self.routed else [self._front.url]

    async def close(self) -> None:
        while self._workers:
            await self._workers.popitem()[1].close()

    async def find(self) -> None:
        """Check whether the URL is a router's, and connect to the router's current workers. Raises EngineError and
        StatusFailure."""
        workers = await _listed_workers(self._front)
        self.routed = workers is not None
        urls = {worker.server for worker in workers or ()}
        for url in self._workers.keys() - urls:
            await self._workers.pop(url).close()
        for url in urls - self._workers.keys():
            if urlsplit(url).scheme not in ("http", "https"):
                raise EngineRejected(
                    f"engine {self._engine!r} is a router with a worker {url}, which cannot be told to pause",
                    hint="only workers with http:// or https:// URLs can",
                )
            client = self._connect(url)
            await client.start()
            self._workers[url] = client

    async def order_all(self, order: Callable[[HttpClient], Awaitable[T]]) -> list[T]:
        """Send one order to all servers concurrently, and return their replies. Workers that accept no connection are
        skipped, because they generate nothing and the router does not use them.

        Raises the order's errors, WorkersOutOfReach if no worker accepts a connection, and EngineUnavailable if a
        router lists no worker.
        """
        if not self.routed:
            return [await order(self._front)]
        await self.find()
        if not self._workers:
            raise EngineUnavailable(f"engine {self._engine!r} is a router without workers")
        outcomes = await asyncio.gather(*map(order, self._workers.values()), return_exceptions=True)
        answers: list[T] = []
        for outcome in outcomes:
            if not isinstance(outcome, BaseException):
                answers.append(outcome)
            elif not _not_connected(outcome):
                raise outcome
        if not answers:
            raise WorkersOutOfReach(
                f"engine {self._engine!r} is a router, and none of its workers can be reached from here:"
                f" {', '.join(self._workers)}",
                hint="pauses and weights go to the workers themselves: let the service connect to the addresses that"
                " the router lists",
            )
        self._reached = True
        return answers

    async def query_all(self, question: Callable[[HttpClient], Awaitable[T]]) -> list[T]:
        """Send one query to all servers, like `order_all`. If this process has never reached any of the workers, the
        query is sent to the router instead."""
        try:
            return await self.order_all(question)
        except WorkersOutOfReach:
            if self._reached:  # the workers were reachable before, so the router's list may be outdated
                raise
            return [await question(self._front)]


class Router:
    """Implements `ListsEngines`: each worker of a router becomes an engine of the given kind, with the router's
    options.

    Separate prefill and decode workers generate only in pairs, so a router of such workers is refused.
    """

    def __init__(self, kind: str, options: EngineOptions) -> None:
        own = {key: value for key, value in options.options.items() if key == "api_key"}
        self.name = options.name
        self._kind = kind
        self._url = server_url(options)
        self._options = options
        self._http = HttpClient(options.name, self._url, api_key=read_options(ServerOptions, own).api_key)

    async def start(self) -> None:
        await self._http.start()

    async def close(self) -> None:
        await self._http.close()

    async def list_engines(self) -> list[EngineSpec]:
        """Return an engine spec for each worker's server. Raises EngineError, and InvalidField if there is no router at
        the URL, or if prefill and decode are separate."""
        try:
            workers = await _listed_workers(self._http)
        except StatusFailure as failure:
            raise translate(failure, self.name) from None
        instead = f"add it as {self._kind}={self._url}"
        if workers is None:
            raise InvalidField(f"{self._url} lists no workers: it is not a router", field="url", hint=instead)
        if any(worker.worker_type != "regular" for worker in workers):
            raise InvalidField(
                f"the workers of {self._url} generate in pairs only: prefill and decode are apart",
                field="kind",
                hint=f"{instead}, to generate through the router",
            )
        return [
            EngineSpec(
                kind=self._kind,
                name=f"{self.name}-{urlsplit(url).netloc}",
                url=url,
                model=self._options.model,
                options=self._options.options,
            )
            for url in dict.fromkeys(worker.server for worker in workers)
        ]


VLLM_ROUTER = partial(Router, "vllm")
SGLANG_ROUTER = partial(Router, "sglang")


async def _listed_workers(http: HttpClient) -> list[ListedWorker] | None:
    """Return the workers that a router lists, None if the server is not a router. Raises EngineUnavailable, and
    StatusFailure for a transient status or a refused key."""
    try:
        return msgspec.convert(await http.get("/workers"), _WorkerList).workers
    except StatusFailure as failure:
        # 401 and 403 are raised, because a router may require a key for its list.
        if failure.transient or failure.status in (401, 403):
            raise
        return None
    except (EngineMisbehaved, msgspec.ValidationError):
        return None


def _not_connected(error: BaseException) -> bool:
    """Return True if the error shows that the server accepts no connection. Returns False for a timeout or a broken
    connection, because the worker may still run."""
    cause = error.__cause__
    broken = isinstance(cause, TimeoutError | ConnectionError | ssl.SSLError)
    return isinstance(cause, ConnectionRefusedError) or (isinstance(cause, OSError) and not broken)
