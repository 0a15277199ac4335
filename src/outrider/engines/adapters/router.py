"""Routers in front of engine servers: the list of their workers, and orders to each worker.

A router forwards a generation to one worker, or to two if prefill and decode are separate. It forwards an order, such
as a pause, to one worker or to none, so orders are sent to the workers themselves. Tested with vllm-router 0.1.17 and
sglang-router 0.3.2. Invariant: when an order returns without an error, at least one worker has carried it out, and so
has every listed worker that accepts connections.
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
    """A worker in a router's list. `worker_type` is `regular`, or `prefill` or `decode` if prefill and decode are
    separate."""

    url: str
    worker_type: str = "regular"

    @property
    def server(self) -> str:
        """The URL of the worker's server. For a server with data parallelism the router lists each rank, as
        `http://host:port@1`."""
        return _RANK.sub("", self.url).rstrip("/")


class _WorkerList(msgspec.Struct):
    workers: list[ListedWorker]


class WorkersOutOfReach(EngineRejected):
    """The error for a router that lists workers, none of which this service can connect to."""


class Servers:
    """The servers behind an engine's URL: the server at the URL or, if a router is there, all workers of the router."""

    def __init__(self, engine: str, front: HttpClient, connect: Callable[[str], HttpClient]) -> None:
        self.routed = False
        """True if the URL is a router's, as of the latest `find`."""
        self._engine = engine
        self._front = front
        self._connect = connect
        self._workers: dict[str, HttpClient] = {}
        self._reached = False

    @property
    def urls(self) -> list[str]:
        """The URLs of the servers that receive orders, as of the latest `find`."""
        return list(self._workers) if self.routed else [self._front.url]

    async def close(self) -> None:
        while self._workers:
            await self._workers.popitem()[1].close()

    async def find(self) -> None:
        """Find out whether the URL is a router's, and its current workers. Raises EngineError and StatusFailure."""
        workers = await _listed_workers(self._front)
        self.routed = workers is not None
        urls = {worker.server for worker in workers or ()}
        for url in self._workers.keys() - urls:
            await self._workers.pop(url).close()
        for url in urls - self._workers.keys():
            if urlsplit(url).scheme not in ("http", "https"):
                raise EngineRejected(
                    f"engine {self._engine!r} is a router with a worker {url}, which cannot be told to pause",
                    hint="only workers with http:// URLs can",
                )
            client = self._connect(url)
            await client.start()
            self._workers[url] = client

    async def order_all(self, order: Callable[[HttpClient], Awaitable[T]]) -> list[T]:
        """Send one order to all servers concurrently, and return their replies. Workers that cannot be connected to are
        skipped: they generate nothing, and the router does not use them.

        Raises the order's errors, WorkersOutOfReach, and EngineUnavailable if a router lists no worker.
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
        """Send one question to all servers, like `order_all`. If no worker was ever reachable from here, the router
        gets the question instead."""
        try:
            return await self.order_all(question)
        except WorkersOutOfReach:
            if self._reached:  # the workers are gone, and the router's list may be outdated
                raise
            return [await question(self._front)]


class Router:
    """`ListsEngines`: every worker of a router as a separate engine of the given kind, with the router's options.

    Prefill and decode workers generate in pairs only, so a router of such workers is refused.
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
        """Return a spec for each worker. Raises InvalidField if the URL is no router's, or if prefill and decode are
        separate, and EngineError."""
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
    """Return the workers that a router lists; None if the server is no router. Raises EngineUnavailable and
    StatusFailure."""
    try:
        return msgspec.convert(await http.get("/workers"), _WorkerList).workers
    except StatusFailure as failure:
        # A router may require a key for its list (401 or 403), and must then not be taken for a server.
        if failure.transient or failure.status in (401, 403):
            raise
        return None
    except (EngineMisbehaved, msgspec.ValidationError):
        return None


def _not_connected(error: BaseException) -> bool:
    """Return True if no connection was made. A connection that broke or was too slow does not count, because the worker
    may still run."""
    cause = error.__cause__
    broken = isinstance(cause, TimeoutError | ConnectionError | ssl.SSLError)
    return isinstance(cause, ConnectionRefusedError) or (isinstance(cause, OSError) and not broken)
