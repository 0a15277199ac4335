"""The models of one session attempt: the policy and the frozen models, each with its own conversation.

Invariant: calls of a frozen model do not appear in the policy's conversation and do not count towards the policy's
limits.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING

import msgspec

from outrider.counts import OTHER
from outrider.dialects.base import Completion, ModelRequest, RequestedSampling
from outrider.errors import ContextOverflow, EngineUnavailable, NotFound, OutriderError
from outrider.harnesses.base import ModelRefused
from outrider.logs import LoggedSession
from outrider.messages import Message, ParsedMessages, ToolSpec
from outrider.sessions.calls.limits import Bodies, LimitReached
from outrider.timeline import Timeline

if TYPE_CHECKING:
    from outrider.sessions.conversation import Conversation


GENERATE = "generate"
"""In the timeline, the name of a model call that requests a reply."""
INPROCESS = "inprocess"
"""The dialect (request format) of calls by an agent in this process. Such an agent sends messages without HTTP."""


MOST_FAILURES = 64
"""Maximum number of names in `FailureCounts`. Further names are counted as `other`. The limit is needed because names
contain paths, and clients could request any number of paths."""
MAX_NAME = 100


class FailureCounts:
    """Counts an attempt's model calls that were answered with an error, by name. The name is the error's code, followed
    by the faulty field of the request if there is one. If the gateway does not serve the called path, the name is the
    code, the method and the path."""

    def __init__(self) -> None:
        self.counted: dict[str, int] = {}

    def note(self, error: OutriderError, unserved: str | None = None) -> None:
        """Count a call that was answered with `error`. If the gateway does not serve the called path, `unserved` is the
        call's method and path; else None."""
        about = unserved or error.field
        name = f"{error.code}: {about}" if about else error.code
        name = "".join(char if char.isprintable() else "?" for char in name[:MAX_NAME])
        if name not in self.counted and len(self.counted) >= MOST_FAILURES:
            name = OTHER
        self.counted[name] = self.counted.get(name, 0) + 1

    def summary(self) -> str:
        """Return a summary of the counted calls, to be appended to an error message, or "" if there are none."""
        if not self.counted:
            return ""
        return f"; calls answered with an error: {', '.join(f'{name} ({n})' for name, n in self.counted.items())}"


class SessionModels:
    """The conversations of an attempt: `policy`, and `frozen` by model name.

    bodies: counts the bytes of the request bodies of all unfinished calls.
    under_way: the number of unfinished calls. The gateway keeps it up to date.
    failed_calls: counts the calls that were answered with an error."""

    def __init__(
        self,
        policy: Conversation,
        frozen: Mapping[str, Conversation] = {},
        *,
        logged: LoggedSession | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        """`logged` identifies the session in log lines about calls. Failed calls are added to `timeline`."""
        self.policy = policy
        self.logged = logged
        self.bodies = Bodies(policy.backend.intake)
        self.under_way = 0
        self.timeline = timeline
        self.failed_calls = FailureCounts()
        self.frozen = frozen
        self._all = (policy, *frozen.values())

    def named(self, name: str | None) -> Conversation:
        """Return the conversation with the model called `name`, or with the policy if `name` is None. Raises NotFound
        for an unknown name."""
        if name is None or name == self.policy.backend.model:
            return self.policy
        if name not in self.frozen:
            known = ", ".join(map(repr, (self.policy.backend.model, *self.frozen)))
            raise NotFound(f"no model {name!r} is served", field="model", hint=f"the models are {known}")
        return self.frozen[name]

    async def contexts(self) -> dict[str, int | None]:
        """Return the context length of each model by the model's name. An unknown length is None. Waits until the
        policy has an engine, unless the settings have the policy's context length. Does not wait for engines of frozen
        models."""
        found = {self.policy.backend.model: await self.policy.context_tokens()}
        for name, conversation in self.frozen.items():
            backend = conversation.backend
            reported = (engine.context_tokens for engine in backend.pool.status())
            found[name] = backend.context_tokens or next(filter(None, reported), None)
        return found

    @property
    def broken(self) -> OutriderError | None:
        """The error `broken` of the first conversation that has one, or None (see `Conversation`)."""
        return next((one.broken for one in self._all if one.broken is not None), None)

    @property
    def hung_up(self) -> bool:
        """True if a client has given up a call to any of the models."""
        return any(one.hung_up for one in self._all)

    @property
    def failure(self) -> OutriderError | None:
        """The error with which the run would end now, or None. A prompt that was too long does not count, because the
        agent wrote it."""
        failures = (one.failure for one in self._all)
        return next((found for found in failures if found and not isinstance(found, ContextOverflow)), None)

    def begin_step(self) -> None:
        """Accept calls again after `close`, because the task's next step begins."""
        for one in self._all:
            one.begin_step()

    async def close(self) -> None:
        """End the run: later calls are refused, and running calls are cancelled and recorded. Idempotent."""
        for one in self._all:
            one.end()
        async with AsyncExitStack() as stack:
            for one in self._all:
                stack.push_async_callback(one.close)


class InProcessClient:
    """A `harnesses.base.ModelClient` for agents that run in this process and call the models without HTTP. Calls are
    admitted, recorded and limited like calls through the gateway. The client gives agents no access to the other
    methods of a conversation.
    """

    def __init__(self, models: SessionModels) -> None:
        self._models = models

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        model: str | None = None,
    ) -> Message:
        conversation = self._models.named(model)
        began = time.time()
        try:
            completion = await completed(conversation, messages, tools=tools, max_tokens=max_tokens, stop=stop)
        except OutriderError as error:
            self._models.failed_calls.note(error)
            if self._models.timeline is not None:
                self._models.timeline.note_failed_call(
                    error, began, action=GENERATE, dialect=INPROCESS, status=error.http_status
                )
            if conversation is self._models.policy or not isinstance(error, LimitReached | ContextOverflow):
                raise
            raise ModelRefused(error.message, hint=error.hint) from error
        return completion.reply


async def completed(
    conversation: Conversation,
    messages: Sequence[Message],
    *,
    tools: Sequence[ToolSpec] = (),
    max_tokens: int | None = None,
    stop: Sequence[str] = (),
) -> Completion:
    """Run one model call and return its completion. Raises the errors of `Conversation.call`, and EngineUnavailable if
    there is no completion."""
    request = ModelRequest(
        model=conversation.backend.model,
        messages=ParsedMessages(tuple(messages)),
        tools=tuple(tools),
        tools_raw=msgspec.json.encode(list(tools)) if tools else b"",
        sampling=RequestedSampling(max_tokens=max_tokens, stop=tuple(stop)),
        # Agents in this process send images only as screenshots of a desktop that they control. Without the images,
        # they cannot control the desktop.
        needs_images=True,
    )
    async with aclosing(conversation.call(request, dialect=INPROCESS)) as batches:
        async for steps in batches:
            if isinstance(steps[-1], Completion):
                return steps[-1]
    raise EngineUnavailable("the model call ended without a reply")
