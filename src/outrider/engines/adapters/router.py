"""Routers in front of engine servers. Lists the workers (servers) behind a router, and sends orders, such as a pause,
to every worker.

A router passes a generation to one worker, or to two workers if they divide prefill and decode. It passes an order to
at most one worker, so orders are sent to the workers directly. Tested with vllm-router 0.1.17 and sglang-router 0.3.2.
Invariant: when an order returns without an error, every listed worker that accepts connections has carried out the
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
        """The URL of the worker's server. A router lists each rank of a data-parallel server as a worker, such as
        `http://host:port@1`; here the rank (`@1`) is removed."""
        return _RANK.sub("", self.url).rstrip("/")


class _WorkerList(msgspec.Struct):
    workers: list[ListedWorker]


class WorkersOutOfReach(EngineRejected):
    """A router lists workers, but this process can connect to none of them."""


class Servers:
    """The servers behind an engine's URL: all workers if the URL is a router's, otherwise the server itself."""

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
        """The URLs of the servers to which orders, such as a pause, are sent. `find` updates them."""
        return list(self._workers) if self.routed else [self._front.url]

    async def close(self) -> None:
        while self._workers:
            await self._workers.popitem()[1].close()

    async def find(self) -> None:
        """Find out whether there is a router at the URL, and connect to its current workers. Raises EngineError and
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
        """Send an order to all servers concurrently, and return their replies. A worker that accepts no connection is
        skipped, because it generates nothing and the router does not use it.

        Raises the errors of the order, WorkersOutOfReach if no worker accepts a connection, and EngineUnavailable if a
        router lists no workers.
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
        """Send a query to all servers, like `order_all`. If no worker accepts a connection, and this process has never
        reached one, the query goes to the router instead."""
        try:
            return await self.order_all(question)
        except WorkersOutOfReach:
            if self._reached:  # workers were reached before, so they have failed, or the router's list is outdated
                raise
            return [await question(self._front)]


class Router:
    """Implements `ListsEngines` with a router: each of its workers becomes an engine of the given kind, with the
    router's options.

    Workers that divide prefill and decode generate only in pairs, so their router is refused.
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
        """Return an engine spec for each worker's server. Raises EngineError. Raises InvalidField if there is no router
        at the URL, or if its workers divide prefill and decode."""
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
    """Return the workers that a router lists, or None if the server is not a router. Raises EngineUnavailable. Raises
    StatusFailure for a transient status, and for 401 or 403."""
    try:
        return msgspec.convert(await http.get("/workers"), _WorkerList).workers
    except StatusFailure as failure:
        # 401 and 403 do not show that there is no router: a router may require a key for its list.
        if failure.transient or failure.status in (401, 403):
            raise
        return None
    except (EngineMisbehaved, msgspec.ValidationError):
        return None


def _not_connected(error: BaseException) -> bool:
    """Return True if the error shows that the server accepts no connections. After a timeout or a broken connection,
    the server may still be running, so return False."""
    cause = error.__cause__
    broken = isinstance(cause, TimeoutError | ConnectionError | ssl.SSLError)
    return isinstance(cause, ConnectionRefusedError) or (isinstance(cause, OSError) and not broken)
