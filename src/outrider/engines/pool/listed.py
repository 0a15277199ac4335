"""Keeps the engines of a pool up to date with an external list, such as a router's list of workers: adds new engines,
and removes engines that are no longer listed.

Invariant: an engine leaves the pool only after it was missing from MISSES lists in a row. So sessions keep their
engines while a router restarts with an empty list.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from outrider.engines.base import ListsEngines
from outrider.engines.pool.checks import mistake_of
from outrider.errors import OutriderError
from outrider.redaction import redacted
from outrider.schemas import EngineStatus
from outrider.spec import EngineSpec
from outrider.trajectory import TokenMode

LOOK_SECONDS = 5.0
MISSES = 3
"""An engine is removed from the pool when it is missing from this number of lists in a row."""


class Listing:
    """The engines of one external list.

    - `source`: reads the list.
    - `spec`: describes the list.
    - `engines`: the names that the list's engines have in the pool, by URL.
    - `add`: adds an engine to the pool.
    - `leave`: called with the name of an engine that is to be removed from the pool.
    - `urls`: returns the URLs of all engines in the pool, so that no server is added twice."""

    def __init__(
        self,
        source: ListsEngines,
        spec: EngineSpec,
        add: Callable[[EngineSpec], Awaitable[EngineStatus]],
        leave: Callable[[str], None],
        urls: Callable[[], Collection[str | None]],
    ) -> None:
        self.source = source
        self.engines: dict[str, str] = {}
        self.draining = False
        self.task: asyncio.Task[None] | None = None
        """The task that runs `follow`, None before it is started."""
        self._spec = spec
        self._add = add
        self._leave = leave
        self._urls = urls
        self._misses: dict[str, int] = {}
        self._answers = False
        self._detail = ""

    async def begin(self) -> None:
        """Add the engines that are listed now. Raises the errors of the source. If all engines are refused, raises the
        error of the first one."""
        failures = await self._look()
        if failures and not self.engines:
            raise next(iter(failures.values()))

    async def follow(self, every: float) -> None:
        """Read the list every `every` seconds until cancelled, to add new engines and to remove engines that are no
        longer listed."""
        while True:
            await asyncio.sleep(every)
            try:
                await self._look()
            except OutriderError as error:
                self._answers, self._detail = False, error.message
            except Exception as error:  # a source's code may raise any error
                self._answers, self._detail = False, mistake_of(self.source.name, error).message

    def drain(self) -> None:
        """Stop following the list: add and remove no more engines."""
        self.draining = True
        if self.task is not None:
            self.task.cancel()

    async def end(self) -> Sequence[str]:
        """Stop following the list, and return the names that its engines have in the pool."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait([self.task])
        return tuple(self.engines.values())

    def status(self, serving: Collection[str], serves: str | None, version: int) -> EngineStatus:
        """Return the status of the list itself. Its counts are 0, because each engine has its own status. `ok` is True
        while the source responds and one of the list's engines serves. `serving` has the names of all serving engines.
        `serves` is the frozen model of the engines, or None for the policy."""
        return EngineStatus(
            name=self.source.name,
            kind=self._spec.kind,
            serves=serves,
            url=self._spec.url and redacted(self._spec.url),
            mode=TokenMode.TOKENS,
            ok=self._answers and any(name in serving for name in self.engines.values()),
            detail=redacted(self._detail),
            draining=self.draining,
            in_flight=0,
            sessions=0,
            assigned_tokens=0,
            generated_tokens=0,
            failures=0,
            version=version,
            model=None,
            context_tokens=None,
        )

    async def _look(self) -> Mapping[str, OutriderError]:
        """Read the list once, and add and remove engines. Returns the errors of refused engines, by URL. A refused
        engine is tried again with the next list. If a user has removed a listed engine from the pool, it is not added
        again."""
        listed = {spec.url or "": spec for spec in await self.source.list_engines()}
        for url in listed:
            self._misses.pop(url, None)
        for url in self.engines.keys() - listed.keys():
            self._misses[url] = self._misses.get(url, 0) + 1
            if self._misses[url] >= MISSES:
                del self._misses[url]
                self._leave(self.engines.pop(url))
        failures: dict[str, OutriderError] = {}

        async def admit(url: str, spec: EngineSpec) -> None:
            try:
                self.engines[url] = (await self._add(spec)).name
            except OutriderError as error:
                failures[url] = error

        new = listed.keys() - self.engines.keys() - set(self._urls())
        await asyncio.gather(*(admit(url, listed[url]) for url in listed if url in new))
        self._answers = True
        self._detail = "; ".join(f"{url}: {error.message}" for url, error in failures.items())
        if not listed:
            self._detail = "it lists no engine"
        return failures
