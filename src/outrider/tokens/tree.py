"""The token tree of one session: every id the engine was given or gave, once, and where each request joins it.

Pure: it awaits nothing and reads no clock. A request whose history is a recorded one plus new messages gets the
recorded ids verbatim, sampled ones included, and only the new messages are rendered: a turn costs its own tokens.
Invariant: a node's ids never change, and a prompt that has a parent begins with all of its parent's ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from outrider.aside import Steps, whole
from outrider.errors import ContextOverflow
from outrider.messages import Message, Role, ToolSpec, WireMessages
from outrider.tokens.canonical import extend, message_key
from outrider.tokens.nodes import PromptNode, TurnNode
from outrider.tokens.reading import Request, RequestReader
from outrider.tokens.renderer import History, Renderer
from outrider.trajectory import ForkCause, JoinKind, pack_ids, unpack_ids

LONG_TEXT = 256 << 10
"""Characters. A longer text is measured in parts before it is encoded whole."""
SEAM = 16


class Joined(msgspec.Struct, frozen=True):
    """Where a request joined. `forked_from` is the turn whose request shares the longest history with it; `added` are
    the messages that it has beyond the conversation of its prompt's parent, all of them where there is none."""

    kind: JoinKind
    cause: ForkCause | None
    prompt: PromptNode
    forked_from: int | None
    added: tuple[Message, ...] = ()


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

    def join(self, messages: WireMessages, tools: Sequence[ToolSpec], tools_raw: bytes) -> Joined:
        """Find or make the request's prompt. Raises RequestError for a message that cannot be read or
        rendered; the tree is then unchanged."""
        return whole(self.joining(messages, tools, tools_raw))

    def measure(self, messages: WireMessages, tools: Sequence[ToolSpec], tools_raw: bytes) -> int:
        """The length of the prompt that `join` would give; nothing is recorded. Raises as `join` does."""
        return whole(self.measuring(messages, tools, tools_raw))

    def joining(
        self, messages: WireMessages, tools: Sequence[ToolSpec], tools_raw: bytes, *, context: int | None = None
    ) -> Steps[Joined]:
        """`join` in pieces. Raises ContextOverflow for a prompt that leaves no room in a context of so many tokens;
        the tree is then unchanged, too."""
        request = yield from self._read(messages, tools, tools_raw)
        known = self._known(request)
        if known is None:
            if context is not None:
                yield from self._check_long_texts(request, context)
            joined = yield from self._place(request)
        else:
            joined = Joined(JoinKind.RETRY, None, known, known.first_turn)
            yield request.size(0)  # to parse what it added, which the tree has not kept
        prompt = joined.prompt
        if context is not None and prompt.length >= context:
            raise ContextOverflow(f"the prompt has {prompt.length} tokens; the model's context is {context}")
        start = prompt.parent.prompt.messages + 1 if prompt.parent is not None else 0
        joined = msgspec.structs.replace(joined, added=tuple(request.parsed(start)))
        if known is None:
            self._add(request, joined)
        return joined

    def measuring(self, messages: WireMessages, tools: Sequence[ToolSpec], tools_raw: bytes) -> Steps[int]:
        """`measure` in pieces."""
        request = yield from self._read(messages, tools, tools_raw)
        if (known := self._known(request)) is not None:
            return known.length
        joined = yield from self._place(request)
        return joined.prompt.length

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

    def _read(self, messages: WireMessages, tools: Sequence[ToolSpec], tools_raw: bytes) -> Steps[Request]:
        request = yield from self._reader.read(messages, tools, tools_raw)
        request.match(self._turns)
        return request

    def _add(self, request: Request, joined: Joined) -> None:
        """Record the prompt of a request that was not there before."""
        prompt = joined.prompt
        if joined.kind is JoinKind.ROOT:
            prompt.conversation = self._conversations
            self._conversations += 1
        self._reader.remember(request, prompt)
        self._prompts.setdefault(request.paths[-1], []).append(prompt)
        for path in reversed(request.paths):  # a path was seen with all that lead to it
            if self._seen.setdefault(path, prompt) is not prompt:
                break
        if prompt.parent is not None:
            prompt.parent.children += 1
        if joined.cause is not None:
            self.forks[joined.cause] = self.forks.get(joined.cause, 0) + 1

    def _check_long_texts(self, request: Request, context: int) -> Steps[None]:
        """Raises ContextOverflow where the new texts alone do not fit. To encode a text of many megabytes in one piece
        takes seconds and a hundred times its memory."""
        tokens = 0
        for message in request.fresh.values():
            for text in (message.content, message.reasoning or "", *(call.arguments for call in message.tool_calls)):
                for start in range(0, len(text) if len(text) > LONG_TEXT else 0, LONG_TEXT):
                    yield LONG_TEXT
                    # The whole may have a few tokens less than its parts, where they meet.
                    tokens += len(self._renderer.tokenizer.encode(text[start : start + LONG_TEXT])) - SEAM
                    if tokens > context:
                        raise ContextOverflow(f"the prompt has over {tokens} tokens; the model's context is {context}")

    def _known(self, request: Request) -> PromptNode | None:
        """The prompt of an earlier request that was the same."""
        prompts = self._prompts.get(request.paths[-1], ())
        return next((prompt for prompt in prompts if request.repeats(prompt)), None)

    def _place(self, request: Request) -> Steps[Joined]:
        """Keep the recorded ids where the renderer can prove that the rest only appends; otherwise render
        everything, and say why."""
        matched = request.matched
        if matched is not None:
            yield request.size(0 if request.rewritten else request.covered)
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
        yield request.size(0)
        rendered = self._renderer.render(request.parsed(0), request.tools)
        prompt = request.prompt(None, rendered)
        shared = self._shared(request)
        if shared is None:
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
