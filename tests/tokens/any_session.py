"""Random sessions of several clients side by side. `Rollout` checks every join."""

from __future__ import annotations

from random import Random

import msgspec
from hypothesis import strategies as st

from outrider.messages import Message, Role, ToolSpec
from outrider.tokens.tree.tree import Joined
from outrider.trajectory import FinishReason, ForkCause, JoinKind

from .clients import echoed, news, rewritten, sampled
from .rollout import Rollout, leading
from .strategies import TOOLS

SYSTEMS = ("You are a helpful assistant.", "Write a title.")
TOOL_LISTS: tuple[tuple[ToolSpec, ...], ...] = (TOOLS, (), TOOLS * 2)
HEADS: tuple[tuple[str, ...], ...] = ((), *((text,) for text in SYSTEMS), SYSTEMS)
QUESTIONS = ("Where is it?", "Read the file.")
ACTIONS = ("begin", "go on", "go on", "go on", "rewrite", "retry", "hand over", "hand over", "take back")

Move = tuple[str, int, str, int]
moves = st.tuples(
    st.sampled_from(ACTIONS),
    st.integers(0, 3),  # which of the newest conversations
    st.sampled_from(["answer", "answer", "answer", "abort", "wait"]),
    st.integers(0, 2**32),  # seed of the texts
)


class Request(msgspec.Struct, frozen=True):
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]


class Clients:
    """The clients of one session; `finished` holds conversations that end with a reply, `open` the calls in
    flight."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout
        self.sent: list[Request] = []
        self.finished: list[Request] = []
        self.open: list[tuple[Request, Joined, Random, bool]] = []

    def act(self, action: str, pick: int, fate: str, seed: int) -> None:
        rng = Random(seed)
        if action == "retry" and self.sent:
            request = self.sent[-1 - pick % len(self.sent)]
            joined = self.ask(request := Request(echoed(rng, request.messages), request.tools))
        elif action == "rewrite" and self.finished:
            old = self.finished[-1 - pick % len(self.finished)]
            messages = (*rewritten(rng, old.messages), *news(rng, old.messages[-1]))
            joined = self.ask(request := Request(messages, old.tools))
        elif action == "go on" and self.finished:
            old = self.finished[-1 - pick % len(self.finished)]
            added = news(rng, old.messages[-1])
            joined = self.ask(request := Request((*echoed(rng, old.messages), *added), old.tools))
            self.check_going_on(joined, request, added)
        elif action in ("hand over", "take back") and self.finished:
            old = self.finished[-1 - pick % len(self.finished)]
            joined = self.ask(request := self.under_another_head(rng, old, action))
        else:
            opening = Message(role=Role.SYSTEM, content=rng.choice(SYSTEMS))
            user = Message(role=Role.USER, content=rng.choice(QUESTIONS))
            messages = (opening, user) if rng.random() < 0.7 else (user,)
            joined = self.ask(request := Request(messages, rng.choice([TOOLS, ()])))
        self.open.append((request, joined, rng, fate == "abort"))
        if fate != "wait":
            self.finish(-1)

    def under_another_head(self, rng: Random, old: Request, action: str) -> Request:
        """A request with the history of `old`, sometimes edited, behind another head: one of HEADS or, for "take back",
        the head of an earlier request."""
        history = old.messages[len(leading(old.messages)) :]
        if rng.random() < 0.2:
            history = rewritten(rng, history)
        head, tools = [Message(role=Role.SYSTEM, content=text) for text in rng.choice(HEADS)], rng.choice(TOOL_LISTS)
        if action == "take back":
            before = rng.choice(self.finished)
            head, tools = leading(before.messages), before.tools
        return Request((*head, *echoed(rng, history), *news(rng, old.messages[-1])), tools)

    def ask(self, request: Request) -> Joined:
        self.sent.append(request)
        return self.rollout.join(request.messages, request.tools)

    def check_going_on(self, joined: Joined, request: Request, added: tuple[Message, ...]) -> None:
        """Check a request that only adds messages: it keeps the sampled ids unless the family cannot append to them."""
        if joined.prompt.parent is not None or joined.kind is JoinKind.RETRY:
            return
        assert joined.cause in (ForkCause.BRIDGE_REFUSED, ForkCause.TEMPLATE_HISTORY)
        matched = joined.prompt.matched
        assert matched is not None
        run = self.rollout
        ids = run.given[matched.index], run.gave[matched.index]
        assert run.renderer.bridge(*ids, added, request.tools, run.history) is None
        if joined.cause is ForkCause.TEMPLATE_HISTORY:
            assert run.history == "template"
            assert any(message.role is Role.USER for message in added)

    def finish(self, which: int) -> None:
        request, joined, rng, abort = self.open.pop(which)
        finish = FinishReason.ABORT if abort else FinishReason.STOP
        reply = self.rollout.answer(joined, sampled(rng), tools=request.tools, finish=finish)
        if not abort:
            self.finished.append(Request((*request.messages, reply), request.tools))

    def finish_all(self) -> None:
        while self.open:
            self.finish(-1)
