"""Checks whether each engine of a pool works, with health reports, probes of failed engines, and trials of suspect
engines.

A failed engine gets no work. It is probed until it responds and has the policy's weights. An engine that has sent an
impossible reply is suspect until it has passed several trials. A suspect engine gets new sessions only if there is no
other engine. Invariant: after an engine has joined, only this module and the engine's removal change whether it serves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any, Protocol
from uuid import uuid4

import msgspec

from outrider.concurrency.chores import Chores
from outrider.concurrency.events import Feed, wait_for_event
from outrider.concurrency.retries import RetryPolicy
from outrider.engines.base import AnyEngine, AnyRequest, EngineHealth, chunks_of
from outrider.engines.pool.checks import MAX_QUOTED, check_health, check_of, mistake_of
from outrider.engines.pool.placement import EngineRecord, EngineTask, Placement
from outrider.engines.pool.policy import Policy
from outrider.errors import (
    ContextOverflow,
    EngineError,
    EngineMisbehaved,
    EngineRejected,
    EngineUnavailable,
    OutriderError,
)
from outrider.tokens.rendering.tokenizer import Vocabulary

EngineCheck = Callable[[AnyEngine], Awaitable[None]]

log = logging.getLogger("outrider.engine")

GOOD_REPLIES = 3
"""A suspect engine is trusted again after it has passed this number of trials in a row."""
HEALTH_SECONDS = 60.0
"""Maximum seconds for an engine's health report. The pool's `check` of the engine is not included."""
TRIAL_SECONDS = 60.0
TRIAL_TOKENS = 16
"""Maximum number of tokens in the reply of a trial."""


class MakesPolicy(Protocol):
    def __call__(
        self,
        members: Mapping[str, EngineRecord],
        *,
        lost: Callable[[EngineRecord, EngineError], None],
        found: Callable[[EngineRecord], None],
    ) -> Policy: ...


class HealthChecks:
    """Checks the engines in `members`, and records their health.

    `changes`: announces each change that followers need to know.
    `check`: may refuse an engine by raising an EngineError.
    `tasks`: runs the background work.
    `probing`: the waits between probes, and between trials."""

    def __init__(
        self,
        members: Mapping[str, EngineRecord],
        placement: Placement,
        tasks: Chores,
        changes: Feed[None],
        *,
        policy: MakesPolicy,
        vocabulary: Vocabulary,
        check: EngineCheck | None,
        probing: RetryPolicy,
    ) -> None:
        self.policy = policy(members, lost=self.mark_failed, found=self.mark_found)
        self._members = members
        self._placement = placement
        self._tasks = tasks
        self._changes = changes
        self._vocabulary = vocabulary
        self._check = check
        self._probing = probing

    def run(self, member: EngineRecord, what: EngineTask, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work on an engine in the background. The work is cancelled when the engine is removed."""
        member.tasks[what] = task = self._tasks.create_task(work, name=f"{what} {member.name}")
        return task

    def has_another(self, member: EngineRecord) -> bool:
        """Return True if another engine of the same kind takes new sessions and is not suspect."""
        return any(
            other is not member
            and other.takes_tokens == member.takes_tokens
            and other.takes_sessions
            and other.suspect is None
            for other in self._members.values()
        )

    def mark_failed(self, member: EngineRecord, error: EngineError) -> None:
        """Record a failure. The engine gets no more work, and is probed until it works again."""
        member.failures += 1
        member.detail = error.message
        if member.serves:
            self.keep_out(member)
            self.policy.note_failure(member)

    def keep_out(self, member: EngineRecord) -> None:
        member.ok = False
        self._placement.refresh(member)
        self._changes.publish(None)
        if (probe := member.tasks.get("probe")) is not None:  # this probe replaces an earlier one that still runs
            probe.cancel()
        member.tasks["probe"] = self._tasks.until_done(f"probe {member.name}", lambda: self._probe(member))

    def mark_found(self, member: EngineRecord) -> None:
        """Record that the engine serves again."""
        member.ok, member.behind, member.detail, member.silent = True, False, "", None
        self._placement.welcome(member)
        self._changes.publish(None)

    def mark_suspect(self, member: EngineRecord, error: EngineMisbehaved, request: AnyRequest) -> None:
        """Mark the engine as suspect and start trials. The session that got the impossible reply leaves the engine, and
        can then be assigned to another one."""
        self._placement.leave(request.session_key, member)
        member.misbehaved += 1
        if member.suspect is None:
            log.warning("engine %s is suspect: %s", member.name, error.message)
        member.suspect = error.message
        self._placement.refresh(member)
        if not member.runs("trial") and not member.removed:
            self.run(member, "trial", self._run_trials(member, request))

    def look(self, engine: str) -> None:
        """Check an engine in the background, because a follower could not use it or has reported a newer version. If it
        fails the check, it is marked as failed."""
        member = self._members.get(engine)
        if member is not None and member.serves and not member.runs("check"):
            self.run(member, "check", self._look(member))

    async def check(self, engine: AnyEngine) -> None:
        """Run the pool's `check` on an engine, or on one of its workers. Raises the errors of `check`."""
        if self._check is not None:
            await self._check(engine)

    async def vet(self, engine: AnyEngine) -> EngineHealth:
        """Request an engine's health report, run the pool's `check` on the engine, and return the report. Raises
        EngineUnavailable if the engine is not healthy or does not respond, EngineMisbehaved for impossible numbers, and
        the errors of `check`."""
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                health = await engine.health()
            if not health.ok:
                detail = health.detail[:MAX_QUOTED].removeprefix(f"engine {engine.name!r} ")
                raise EngineUnavailable(
                    f"engine {engine.name!r} is not healthy: {detail}",
                    field="url",
                    hint="is its server running at this address? A running service takes further engines:"
                    " `outrider engines add`",
                )
            await self.check(engine)
        except TimeoutError as error:
            raise EngineUnavailable(
                f"engine {engine.name!r} sent no health report within {HEALTH_SECONDS:.0f} s", field="url"
            ) from error
        except OutriderError:
            raise
        except Exception as error:  # an engine's code may raise any error
            raise mistake_of(engine.name, error) from error
        check_health(engine.name, health)
        return health

    async def prove(
        self, member: EngineRecord, request: AnyRequest, seconds: float, *, by_token: bool = False
    ) -> EngineHealth | None:
        """Check that an engine generates a token within `seconds`, and return its health. Unless `by_token` is set, an
        engine whose workers connect to the service only has to pass `vet`, because its workers may have a slow model. A
        pause of the policy does not wait for this check: the pause ends the check, and the check then returns None.
        Raises EngineError if the engine fails the check."""
        gate = self.policy.gate
        mode_changes, engine = gate.mode_changes, member.engine
        if gate.mode is not None:
            return None
        try:
            async with asyncio.timeout(seconds) as clock:
                with gate.ended_by_closing(clock):
                    health = await self.vet(engine)
                    if by_token or not member.awaits_workers:
                        # a refusal also shows that the engine responds
                        with suppress(EngineRejected, ContextOverflow):
                            await self._read_small_reply(engine, request, whole=False)
                    return health
        except TimeoutError:
            if gate.mode is not None or gate.mode_changes != mode_changes:
                return None
            raise EngineUnavailable(f"engine {engine.name!r} did not give one token within {seconds:.0f} s") from None
        except EngineError:
            raise
        except Exception as error:  # an engine's code may raise any error
            raise mistake_of(engine.name, error) from error

    async def _look(self, member: EngineRecord) -> None:
        try:
            health = await self.vet(member.engine)
            if (outdated := self.policy.outdated(member.engine, health)) is not None:
                raise outdated
            if (version := self.policy.version_of(member.engine, health)) > member.version:
                member.version = version
                self._changes.publish(None)
        except EngineError as error:
            self.mark_failed(member, error)

    async def _probe(self, member: EngineRecord) -> None:
        while not member.ok:
            await wait_for_event(member.probe_now, self._probing.wait(member.failed_probes))
            member.probe_now.clear()
            member.failed_probes += 1
            try:
                if member.silent is None:
                    member.health = await self.vet(member.engine)
                else:
                    await self.policy.gate.opened()
                    if (health := await self.prove(member, member.silent, TRIAL_SECONDS)) is None:
                        member.probe_now.set()
                        continue
                    member.health = health
            except EngineError as error:
                member.behind, member.detail = False, error.message
                continue
            try:
                version = await self.policy.catch_up(member, member.health)
            except EngineError as error:
                member.detail = error.message
            else:
                member.version = version
                self.mark_found(member)

    async def _run_trials(self, member: EngineRecord, request: AnyRequest) -> None:
        """Run trials of a suspect engine until it has passed GOOD_REPLIES in a row; then it is no longer suspect. The
        engine passes a trial if it is healthy, sends a valid short reply to the request that made it suspect, and
        misbehaves in no session meanwhile."""
        good = failed = 0
        while good < GOOD_REPLIES:
            before = member.misbehaved
            await asyncio.sleep(self._probing.wait(before - 1 + failed))
            await self.policy.gate.opened()
            try:
                async with asyncio.timeout(TRIAL_SECONDS):
                    await self.vet(member.engine)
                    await self._read_small_reply(member.engine, request)
            except EngineMisbehaved as error:
                good = 0
                member.misbehaved += 1
                member.suspect = error.message
            except Exception:  # the engine's code may raise any error; the trial has failed
                good, failed = 0, failed + 1
            else:
                good = good + 1 if member.misbehaved == before else 0
        log.warning("engine %s is trusted again", member.name)
        member.suspect = None
        self._placement.refresh(member)

    async def _read_small_reply(self, engine: AnyEngine, request: AnyRequest, *, whole: bool = True) -> None:
        """Send a copy of the request with few `max_tokens`, and check the whole reply. If `whole` is False, wait only
        for the first chunk, which shows that the engine is not silent. Raises the errors of the engine and of the
        check. Raises EngineUnavailable if the stream ends without a finish reason."""
        name = uuid4().hex
        few = msgspec.structs.replace(request.sampling, max_tokens=min(request.sampling.max_tokens, TRIAL_TOKENS))
        trial = msgspec.structs.replace(request, request_id=name, session_key=name, sampling=few)
        check, finished, gate = check_of(trial, engine.name, self._vocabulary), False, self.policy.gate
        await gate.opened()
        gate.enter(whole=True)
        try:
            async with aclosing(chunks_of(engine, trial)) as chunks:
                async for chunk in chunks:
                    if not whole:
                        return
                    check.take(chunk)
                    finished = chunk.finish is not None
        finally:
            gate.leave(whole=True)
        if not finished:
            raise EngineUnavailable(f"engine {engine.name!r} ended its stream before the reply's end")
