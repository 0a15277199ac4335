"""The token tree of one session: every id the engine was given or gave, once, and where each request joins it.

Pure: it awaits nothing and reads no clock. A request whose history is a recorded one plus new messages gets the
recorded ids verbatim, sampled ones included, and only the new messages are rendered: a turn costs its own tokens.
Invariant: a node's ids never change, and a prompt that has a parent begins with all of its parent's ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from outrider.concurrency.offload import Steps
from outrider.errors import ContextOverflow, TooLarge
from outrider.messages import Message, Role, ToolSpec, WireMessages
from outrider.tokens.rendering.renderer import History, Renderer
from outrider.tokens.tree.canonical import extend, message_key
from outrider.tokens.tree.heads import Elsewhere, Histories, history_begin
from outrider.tokens.tree.nodes import PromptNode, Splice, TurnNode, recorded_reasoning
from outrider.tokens.tree.request_index import Request, RequestReader
from outrider.trajectory import ForkCause, JoinKind, pack_ids, unpack_ids

LONG_TEXT = 256 << 10
"""Characters. A longer text is measured in parts before it is encoded whole."""
SEAM = 16
SEEN_PATHS = 1 << 16
"""Beginnings of histories that are kept, 10 MB of them. A session that has sent more messages begins anew to tell what
its requests share."""


class Joined(msgspec.Struct, frozen=True):
    """Where a request joined. `forked_from` is the turn whose request shares the longest history with it; where the
    tools or the system prompt changed, the turn whose history it goes on from. `added` are the messages that it has
    beyond the conversation of its prompt's parent, all of them where there is none."""

    kind: JoinKind
    cause: ForkCause | None
    prompt: PromptNode
    forked_from: int | None
    added: tuple[Message, ...] = ()


class _LaidOut(msgspec.Struct, frozen=True, kw_only=True):
    """A request's ids: those of `parent`, then `added`. `elsewhere` is where its history was recorded, if that was
    behind another head; `splice` says how the recorded ids were put behind the new one, where they were."""

    parent: TurnNode | None
    added: list[int]
    elsewhere: Elsewhere | None = None
    splice: Splice | None = None


class TokenTree:
    """One session attempt's tree. `join` a request, generate, then `commit` what was sampled."""

    def __init__(self, renderer: Renderer, history: History) -> None:
        self._renderer = renderer
        self._history: History = history
        self._reader = RequestReader(renderer.shown)
        self._turns: dict[bytes, list[TurnNode]] = {}
        self._histories = Histories()
        self._prompts: dict[bytes, list[PromptNode]] = {}
        self._seen: dict[bytes, PromptNode] = {}
        self._next = 0
        self._conversations = 0
        self.forks: dict[ForkCause, int] = {}

    def join(
        self,
        messages: WireMessages,
        tools: Sequence[ToolSpec],
        tools_raw: bytes,
        *,
        thinking: bool | None = None,
        context: int | None = None,
    ) -> Steps[Joined]:
        """Find or make the request's prompt. `thinking` switches the model's reasoning for this turn alone.

        Raises RequestError for a message that cannot be read or rendered, TooLarge for a text that cannot be encoded,
        and ContextOverflow for a prompt that leaves no room in `context` tokens; the tree is then unchanged."""
        request = yield from self._read(messages, tools, tools_raw, thinking)
        known = self._known(request)
        if known is None:
            yield from self._check_long_texts(request, context)
            joined = yield from self._place(request)
        else:
            joined = _again(known)
            yield request.size(0)  # to parse what it added, which the tree has not kept
        prompt = joined.prompt
        if context is not None and prompt.length >= context:
            raise ContextOverflow(f"the prompt has {prompt.length} tokens; the model's context is {context}")
        start = prompt.parent.prompt.messages + 1 if prompt.parent is not None else 0
        joined = msgspec.structs.replace(joined, added=tuple(request.parsed(start)))
        if known is None:
            self._add(request, joined)
        return joined

    def measure(
        self, messages: WireMessages, tools: Sequence[ToolSpec], tools_raw: bytes, *, thinking: bool | None = None
    ) -> Steps[int]:
        """The length in tokens of the prompt that `join` would give; nothing is recorded. Raises as `join` does."""
        request = yield from self._read(messages, tools, tools_raw, thinking)
        if (known := self._known(request)) is not None:
            return known.length
        yield from self._check_long_texts(request, None)
        laid_out = yield from self._lay_out(request)
        return (laid_out.parent.length if laid_out.parent is not None else 0) + len(request.opened(laid_out.added))

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
            self._histories.add(turn)
        return turn

    def _read(
        self, messages: WireMessages, tools: Sequence[ToolSpec], tools_raw: bytes, thinking: bool | None
    ) -> Steps[Request]:
        request = yield from self._reader.read(messages, tools, tools_raw)
        request.opening = self._renderer.opening(thinking)
        request.match(self._turns)
        return request

    def _add(self, request: Request, joined: Joined) -> None:
        """Record the prompt of a request that was not there before."""
        prompt = joined.prompt
        self._conversations = max(self._conversations, prompt.conversation + 1)
        self._reader.remember(request, prompt)
        self._prompts.setdefault(request.paths[-1], []).append(prompt)
        if len(self._seen) > SEEN_PATHS:
            self._seen.clear()
        for path in reversed(request.paths):  # a path was seen with all that lead to it
            if self._seen.setdefault(path, prompt) is not prompt:
                break
        if prompt.parent is not None:
            prompt.parent.children += 1
        if joined.cause is not None:
            self.forks[joined.cause] = self.forks.get(joined.cause, 0) + 1

    def _check_long_texts(self, request: Request, context: int | None) -> Steps[None]:
        """Raises ContextOverflow where the new texts alone do not fit, and TooLarge for one that cannot be encoded. To
        encode a text of many megabytes in one piece takes seconds and a hundred times its memory."""
        tokens = 0
        for message in request.fresh.values():
            for text in (message.content, message.reasoning or "", *(call.arguments for call in message.tool_calls)):
                if not self._renderer.tokenizer.takes(text):
                    raise TooLarge(f"a text of {len(text)} characters is too long to be encoded", field="messages")
                for start in range(0, len(text) if len(text) > LONG_TEXT else 0, LONG_TEXT):
                    yield LONG_TEXT
                    # The whole may have a few tokens less than its parts, where they meet.
                    tokens += len(self._renderer.tokenizer.encode(text[start : start + LONG_TEXT])) - SEAM
                    if context is not None and tokens > context:
                        raise ContextOverflow(f"the prompt has over {tokens} tokens; the model's context is {context}")

    def _known(self, request: Request) -> PromptNode | None:
        """The prompt of an earlier request that was the same."""
        prompts = self._prompts.get(request.paths[-1], ())
        return next((prompt for prompt in prompts if request.repeats(prompt)), None)

    def _place(self, request: Request) -> Steps[Joined]:
        """Make its prompt, and say where it joined and why it could not simply append."""
        laid_out = yield from self._lay_out(request)
        parent, elsewhere = laid_out.parent, laid_out.elsewhere
        prompt = self._prompt(request, laid_out)
        if parent is not None and not request.rewritten:
            prompt.conversation = parent.prompt.conversation
            if parent.children:
                return Joined(JoinKind.FORK, ForkCause.SIBLING, prompt, parent.index)
            return Joined(JoinKind.APPEND, None, prompt, None)
        shared = self._shared(request)
        before = parent.prompt if parent is not None else shared
        prompt.conversation = before.conversation if before is not None else self._conversations
        if elsewhere is not None:
            prompt.fork = elsewhere.cause, elsewhere.turn.index
            return Joined(JoinKind.FORK, elsewhere.cause, prompt, elsewhere.turn.index)
        if before is None:
            return Joined(JoinKind.ROOT, None, prompt, None)
        away = shared.first_turn if shared is not None else None
        if parent is not None:
            return Joined(JoinKind.FORK, ForkCause.HISTORY_REWRITTEN, prompt, parent.index if away is None else away)
        return Joined(JoinKind.FORK, self._cause(request), prompt, away)

    def _lay_out(self, request: Request) -> Steps[_LaidOut]:
        """Keep the recorded ids where the renderer can prove that the rest only appends; otherwise render
        everything."""
        matched, elsewhere = request.matched, self._histories.find(request)
        if elsewhere is not None:
            yield request.size(0)
            if (spliced := self._spliced(request, elsewhere)) is not None:
                return spliced
        if matched is not None:
            yield request.size(0 if request.rewritten else request.covered)
            if (added := self._appended(matched, request)) is not None:
                return _LaidOut(parent=matched, added=added, elsewhere=elsewhere)
        yield request.size(0)
        rendered = self._renderer.render(request.parsed(0), request.tools)
        return _LaidOut(parent=None, added=rendered, elsewhere=elsewhere)

    def _spliced(self, request: Request, elsewhere: Elsewhere) -> _LaidOut | None:
        """The request's own head, then the ids of the history that was recorded behind another. None unless the
        messages with which that history began are laid out alike behind both heads."""
        turn = elsewhere.turn
        begin, head = history_begin(turn)
        messages = [request.messages.parse(at) for at in range(request.lead + begin.messages - begin.lead)]
        halves = self._renderer.halves(messages, request.tools)
        if halves is None or not begin.delta.endswith(pack_ids(halves.history)):
            return None
        if head is None:
            head = len(begin.delta) // 4 - len(halves.history)
        prompt = [*halves.head, *turn.prompt.ids()[head:].tolist()]
        output = unpack_ids(turn.output).tolist()
        tail = prompt[self._renderer.tail_start(prompt) :]
        added = self._continued(tail, output, request, elsewhere.covered)
        if added is None:
            return None
        ids = [*prompt, *output, *added]
        splice = Splice(len(halves.head), begin)
        own = request.matched
        if own is not None and ids[: own.length] == [*own.prompt.ids().tolist(), *unpack_ids(own.output).tolist()]:
            return _LaidOut(parent=own, added=ids[own.length :], elsewhere=elsewhere, splice=splice)
        return _LaidOut(parent=None, added=ids, elsewhere=elsewhere, splice=splice)

    def _prompt(self, request: Request, laid_out: _LaidOut) -> PromptNode:
        known: list[tuple[int, bytes | None]] = []
        elsewhere, splice = laid_out.elsewhere, laid_out.splice
        if elsewhere is not None and splice is not None:
            shift = request.lead - elsewhere.turn.prompt.lead
            known = [(at + shift, reasoning) for at, reasoning in recorded_reasoning(elsewhere.turn)]
        return request.prompt(laid_out.parent, laid_out.added, splice=splice, known=known)

    def _appended(self, parent: TurnNode, request: Request) -> list[int] | None:
        """The ids that show, behind those of `parent`, what the request has beyond its conversation."""
        output = unpack_ids(parent.output).tolist()
        tail = parent.prompt.tail(self._renderer)
        return self._continued(tail, output, request, request.covered)

    def _continued(
        self, prompt: Sequence[int], output: Sequence[int], request: Request, covered: int
    ) -> list[int] | None:
        """The ids that show the messages behind the first `covered`, after a prompt and an output that show these."""
        if any(key.role is Role.ASSISTANT for key in request.keys[covered:]):
            return self._renderer.rejoin(prompt, output, request.parsed(0), covered, request.tools, self._history)
        return self._renderer.bridge(prompt, output, request.parsed(covered), request.tools, self._history)

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


def _again(known: PromptNode) -> Joined:
    """Where a request joins that was there before."""
    if known.first_turn is None and known.fork is not None:  # the first call of it failed
        return Joined(JoinKind.FORK, known.fork[0], known, known.fork[1])
    return Joined(JoinKind.RETRY, None, known, known.first_turn)
