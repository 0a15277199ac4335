"""The token tree of one session: every id the engine was given or gave, once, and where each request joins it.

Pure: it awaits nothing and reads no clock. A request whose history is a recorded one plus new messages gets the
recorded ids verbatim, sampled ones included, and only the new messages are rendered: a turn costs its own tokens.
Invariant: a node's ids never change, and a prompt that has a parent begins with all of its parent's ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from outrider.messages import Message, Role, ToolSpec, WireMessages
from outrider.tokens.canonical import extend, message_key
from outrider.tokens.nodes import PromptNode, TurnNode
from outrider.tokens.reading import Request, RequestReader
from outrider.tokens.renderer import History, Renderer
from outrider.trajectory import ForkCause, JoinKind, pack_ids, unpack_ids


class Joined(msgspec.Struct, frozen=True):
    """Where a request joined. `forked_from` is the turn whose request shares the longest history with it."""

    kind: JoinKind
    cause: ForkCause | None
    prompt: PromptNode
    forked_from: int | None


class TokenTree:
    """One session attempt's tree. `join` a request, generate, then `commit` what was sampled."""

    def __init__(self, renderer: Renderer, history: History) -> None:
        self._renderer = renderer
        self._history: History = history
        self._reader = RequestReader(renderer.shown)
        self._turns: dict[bytes, list[TurnNode]] = {}
        self._prompts: dict[bytes, list[PromptNode]] = {}
        self._seen: dict[bytes, PromptNode] = {}
        self._next = 0
        self._conversations = 0
        self.forks: dict[ForkCause, int] = {}

    def join(
        self, messages: WireMessages, tools: Sequence[ToolSpec], tools_raw: bytes, *, thinking: bool | None = None
    ) -> Joined:
        """Find or make the request's prompt. `thinking` switches the model's reasoning, for this turn alone. Raises
        RequestError for a message that cannot be read or rendered; the tree is then unchanged."""
        request = self._read(messages, tools, tools_raw, thinking)
        if (known := self._known(request)) is not None:
            return Joined(JoinKind.RETRY, None, known, known.first_turn)
        joined = self._place(request)
        self._reader.remember(request, joined.prompt)
        self._prompts.setdefault(request.paths[-1], []).append(joined.prompt)
        for path in reversed(request.paths):  # a path was seen with all that lead to it
            if self._seen.setdefault(path, joined.prompt) is not joined.prompt:
                break
        if joined.prompt.parent is not None:
            joined.prompt.parent.children += 1
        if joined.cause is not None:
            self.forks[joined.cause] = self.forks.get(joined.cause, 0) + 1
        return joined

    def measure(
        self, messages: WireMessages, tools: Sequence[ToolSpec], tools_raw: bytes, *, thinking: bool | None = None
    ) -> int:
        """The length of the prompt that `join` would give; nothing is recorded. Raises as `join` does."""
        request = self._read(messages, tools, tools_raw, thinking)
        if (known := self._known(request)) is not None:
            return known.length
        if request.matched is not None and (added := self._appended(request.matched, request)) is not None:
            return request.matched.length + len(request.opened(added))
        return len(request.opened(self._renderer.render(request.parsed(0), tools)))

    def commit(self, prompt: PromptNode, output: Sequence[int], reply: Message | None) -> TurnNode:
        """Record a turn's sampled ids. `reply` is the message the client was given: None when it was given
        none (it hung up), and the turn can then have no continuation."""
        key = message_key(reply, self._renderer.shown) if reply is not None else None
        turn = TurnNode(self._next, prompt, pack_ids(output), key)
        self._next += 1
        if prompt.first_turn is None:
            prompt.first_turn = turn.index
        if key is not None:
            self._turns.setdefault(extend(prompt.path, key.body), []).append(turn)
        return turn

    def _read(
        self, messages: WireMessages, tools: Sequence[ToolSpec], tools_raw: bytes, thinking: bool | None
    ) -> Request:
        request = self._reader.read(messages, tools, tools_raw)
        request.opening = self._renderer.opening(thinking)
        request.match(self._turns)
        return request

    def _known(self, request: Request) -> PromptNode | None:
        """The prompt of an earlier request that was the same."""
        prompts = self._prompts.get(request.paths[-1], ())
        return next((prompt for prompt in prompts if request.repeats(prompt)), None)

    def _place(self, request: Request) -> Joined:
        """Keep the recorded ids where the renderer can prove that the rest only appends; otherwise render
        everything, and say why."""
        matched = request.matched
        if matched is not None and (added := self._appended(matched, request)) is not None:
            prompt = request.prompt(matched, added)
            prompt.conversation = matched.prompt.conversation
            if request.rewritten:
                shared = self._shared(request)
                away = shared.first_turn if shared is not None else None
                return Joined(
                    JoinKind.FORK, ForkCause.HISTORY_REWRITTEN, prompt, matched.index if away is None else away
                )
            if matched.children:
                return Joined(JoinKind.FORK, ForkCause.SIBLING, prompt, matched.index)
            return Joined(JoinKind.APPEND, None, prompt, None)
        rendered = self._renderer.render(request.parsed(0), request.tools)
        prompt = request.prompt(None, rendered)
        shared = self._shared(request)
        if shared is None:
            prompt.conversation = self._conversations
            self._conversations += 1
            return Joined(JoinKind.ROOT, None, prompt, None)
        prompt.conversation = shared.conversation
        return Joined(JoinKind.FORK, self._cause(request), prompt, shared.first_turn)

    def _appended(self, parent: TurnNode, request: Request) -> list[int] | None:
        """The ids that show, behind those of `parent`, what the request has beyond its conversation."""
        output = unpack_ids(parent.output).tolist()
        tail = parent.prompt.tail(self._renderer)
        if request.rewritten:
            messages = request.parsed(0)
            return self._renderer.rejoin(tail, output, messages, request.covered, request.tools, self._history)
        return self._renderer.bridge(tail, output, request.parsed(request.covered), request.tools, self._history)

    def _cause(self, request: Request) -> ForkCause:
        if any(request.shares_messages(prompt) for prompt in self._prompts.get(request.paths[-1], ())):
            return ForkCause.SIBLING  # the same messages with thinking switched
        roles = {key.role for key in request.keys[request.covered :]}
        if request.matched is None or request.rewritten or not roles:
            return ForkCause.HISTORY_REWRITTEN
        if self._history == "template" and roles & {Role.USER, Role.SYSTEM}:
            return ForkCause.TEMPLATE_HISTORY
        return ForkCause.BRIDGE_REFUSED

    def _shared(self, request: Request) -> PromptNode | None:
        """The first prompt that had the longest shared history. None when nothing but system messages is
        shared: then the request begins a conversation of its own."""
        found: PromptNode | None = None
        shared = 0
        for path in request.paths[1:]:
            node = self._seen.get(path)
            if node is None:
                break
            found, shared = node, shared + 1
        if found is None or all(key.role is Role.SYSTEM for key in request.keys[:shared]):
            return None
        return found
