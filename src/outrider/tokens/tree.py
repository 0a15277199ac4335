"""The token tree of one session: every id the engine was given or gave, once, and where each request joins it.

Pure: it awaits nothing and reads no clock. A request whose history is a recorded one plus new messages gets the
recorded ids verbatim, sampled ones included, and only the new messages are rendered: a turn costs its own tokens.
Invariant: a node's ids never change, and a prompt that has a parent begins with all of its parent's ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from outrider.messages import Message, Role, ToolSpec, WireMessages
from outrider.tokens.canonical import MessageKey, digest, extend, message_key, tools_key
from outrider.tokens.renderer import History, Renderer
from outrider.trajectory import ForkCause, Ids, JoinKind, pack_ids, unpack_ids


class PromptNode:
    """What the engine was given for a turn: the parent's ids, then `delta` (packed int32).

    `matched` is the turn whose conversation the request extends, even where its ids could not be kept;
    `quoted` are the positions and reasoning digests (None: it had none) of assistant messages that were
    rendered, not sampled; `tools` is the digest of the request's tools, empty where it had none;
    `conversation` is 0 for the session's first one and counts those that began independently of it.
    """

    __slots__ = (
        "conversation",
        "delta",
        "first_turn",
        "length",
        "matched",
        "messages",
        "parent",
        "path",
        "quoted",
        "tools",
    )

    def __init__(
        self,
        parent: TurnNode | None,
        delta: bytes,
        *,
        matched: TurnNode | None,
        path: bytes,
        quoted: tuple[tuple[int, bytes | None], ...],
        messages: int,
        tools: bytes,
    ) -> None:
        self.parent = parent
        self.delta = delta
        self.length: int = (parent.length if parent else 0) + len(delta) // 4
        self.matched = matched
        self.path = path
        self.quoted = quoted
        self.messages = messages
        self.tools = tools
        self.first_turn: int | None = None
        self.conversation = 0

    def ids(self) -> Ids:
        """The whole prompt, int32 of shape (length,)."""
        parts: list[bytes] = []
        prompt: PromptNode | None = self
        while prompt is not None:
            parts.append(prompt.delta)
            turn = prompt.parent
            if turn is None:
                break
            parts.append(turn.output)
            prompt = turn.prompt
        parts.reverse()
        return unpack_ids(b"".join(parts))

    def tail(self, start_of: Renderer) -> list[int]:
        """The end of the prompt that bridging and parsing need to see."""
        own: list[int] = unpack_ids(self.delta).tolist()
        if self.parent is None:
            return own[start_of.tail_start(own) :]
        start = start_of.tail_start(own)
        whole: list[int] = own if start > 0 else self.ids().tolist()
        return whole[start_of.tail_start(whole) :]


class TurnNode:
    """One sampled reply: `output` is packed int32, `reasoning` and `call_ids` are digests of its message's."""

    __slots__ = ("call_ids", "children", "index", "length", "output", "prompt", "reasoning")

    def __init__(self, index: int, prompt: PromptNode, output: bytes, key: MessageKey | None) -> None:
        self.index = index
        self.prompt = prompt
        self.output = output
        self.length = prompt.length + len(output) // 4
        self.reasoning = key.reasoning if key else None
        self.call_ids = key.call_ids if key else None
        self.children = 0


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
        self._keys: dict[bytes, MessageKey] = {}
        self._tools: dict[bytes, bytes] = {}
        self._turns: dict[bytes, list[TurnNode]] = {}
        self._prompts: dict[bytes, list[PromptNode]] = {}
        self._seen: dict[bytes, PromptNode] = {}
        self._next = 0
        self._conversations = 0
        self.forks: dict[ForkCause, int] = {}

    def join(self, messages: WireMessages, tools: Sequence[ToolSpec], tools_raw: bytes) -> Joined:
        """Find or make the request's prompt. Raises RequestError for a message that cannot be read or
        rendered; the tree is then unchanged."""
        request = self._read(messages, tools, tools_raw)
        if (known := self._known(request)) is not None:
            return Joined(JoinKind.RETRY, None, known, known.first_turn)
        joined = self._place(request)
        self._prompts.setdefault(request.paths[-1], []).append(joined.prompt)
        for path in reversed(request.paths):  # a path was seen with all that lead to it
            if self._seen.setdefault(path, joined.prompt) is not joined.prompt:
                break
        if joined.prompt.parent is not None:
            joined.prompt.parent.children += 1
        if joined.cause is not None:
            self.forks[joined.cause] = self.forks.get(joined.cause, 0) + 1
        return joined

    def measure(self, messages: WireMessages, tools: Sequence[ToolSpec], tools_raw: bytes) -> int:
        """The length of the prompt that `join` would give; nothing is recorded. Raises as `join` does."""
        request = self._read(messages, tools, tools_raw)
        if (known := self._known(request)) is not None:
            return known.length
        if request.matched is not None and (added := self._appended(request.matched, request)) is not None:
            return request.matched.length + len(added)
        return len(self._renderer.render(request.parsed(0), tools))

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

    def _read(self, messages: WireMessages, tools: Sequence[ToolSpec], tools_raw: bytes) -> _Request:
        keys = self._keys_of(messages)
        paths = [self._tools_path(tools, tools_raw)]
        for key in keys:
            paths.append(extend(paths[-1], key.body))
        matched, covered = self._deepest(paths, keys)
        return _Request(messages, tools, paths, keys, covered, matched)

    def _known(self, request: _Request) -> PromptNode | None:
        """The prompt of an earlier request that was the same."""
        for known in self._prompts.get(request.paths[-1], ()):
            if known.matched is request.matched and _quotes_agree(known, request.keys):
                return known
        return None

    def _keys_of(self, messages: WireMessages) -> list[MessageKey]:
        keys: list[MessageKey] = []
        for index in range(len(messages)):
            raw = digest(messages.raw(index))
            key = self._keys.get(raw)
            if key is None:
                key = self._keys[raw] = message_key(messages.parse(index), self._renderer.shown)
            keys.append(key)
        return keys

    def _tools_path(self, tools: Sequence[ToolSpec], raw: bytes) -> bytes:
        short = digest(raw)
        path = self._tools.get(short)
        if path is None:
            path = self._tools[short] = tools_key(list(tools))
        return path

    def _deepest(self, paths: list[bytes], keys: list[MessageKey]) -> tuple[TurnNode | None, int]:
        """The turn whose whole conversation is the longest prefix of the request, and its length. Of several that
        read alike, the newest whose call ids the request has, else the newest."""
        for covered in range(len(paths) - 1, 0, -1):
            turns = [turn for turn in reversed(self._turns.get(paths[covered], ())) if _reasoning_agrees(turn, keys)]
            if turns:
                same = turns if len(turns) == 1 else [turn for turn in turns if _call_ids_agree(turn, keys)]
                return (same or turns)[0], covered
        return None, 0

    def _place(self, request: _Request) -> Joined:
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

    def _appended(self, parent: TurnNode, request: _Request) -> list[int] | None:
        """The ids that show, behind those of `parent`, what the request has beyond its conversation."""
        output = unpack_ids(parent.output).tolist()
        tail = parent.prompt.tail(self._renderer)
        if request.rewritten:
            messages = request.parsed(0)
            return self._renderer.rejoin(tail, output, messages, request.covered, request.tools, self._history)
        return self._renderer.bridge(tail, output, request.parsed(request.covered), request.tools, self._history)

    def _cause(self, request: _Request) -> ForkCause:
        roles = {key.role for key in request.keys[request.covered :]}
        if request.matched is None or request.rewritten or not roles:
            return ForkCause.HISTORY_REWRITTEN
        if self._history == "template" and roles & {Role.USER, Role.SYSTEM}:
            return ForkCause.TEMPLATE_HISTORY
        return ForkCause.BRIDGE_REFUSED

    def _shared(self, request: _Request) -> PromptNode | None:
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


class _Request(msgspec.Struct, frozen=True):
    """A request as the tree sees it: `paths[i]` is the digest of its tools and first `i` messages, `covered`
    the number of messages that `matched` accounts for."""

    messages: WireMessages
    tools: Sequence[ToolSpec]
    paths: list[bytes]
    keys: list[MessageKey]
    covered: int
    matched: TurnNode | None

    @property
    def rewritten(self) -> bool:
        """Whether assistant messages follow the history that was recorded."""
        return any(key.role is Role.ASSISTANT for key in self.keys[self.covered :])

    def parsed(self, start: int) -> list[Message]:
        return [self.messages.parse(index) for index in range(start, len(self.messages))]

    def prompt(self, parent: TurnNode | None, added: list[int]) -> PromptNode:
        first = self.covered if parent is not None else 0
        quoted = tuple(
            (index, key.reasoning) for index, key in enumerate(self.keys[first:], first) if key.role is Role.ASSISTANT
        )
        return PromptNode(
            parent,
            pack_ids(added),
            matched=self.matched,
            path=self.paths[-1],
            quoted=quoted,
            messages=len(self.messages),
            tools=self.paths[0] if self.tools else b"",
        )


def _reasoning_agrees(turn: TurnNode, keys: list[MessageKey]) -> bool:
    """Whether every recorded reply on the way to `turn` has the reasoning that the client sends back, or the
    client sends none."""
    node: TurnNode | None = turn
    while node is not None:
        prompt = node.prompt
        if not keys[prompt.messages].thinks(node.reasoning):
            return False
        if prompt.quoted and not _quotes_agree(prompt, keys):
            return False
        node = prompt.parent
    return True


def _quotes_agree(prompt: PromptNode, keys: list[MessageKey]) -> bool:
    """The same for the assistant messages that the prompt itself rendered."""
    return all(keys[index].thinks(recorded) for index, recorded in prompt.quoted)


def _call_ids_agree(turn: TurnNode, keys: list[MessageKey]) -> bool:
    """Whether the request has the ids of every recorded call on the way to `turn`."""
    node: TurnNode | None = turn
    while node is not None:
        if keys[node.prompt.messages].call_ids != node.call_ids:
            return False
        node = node.prompt.parent
    return True
