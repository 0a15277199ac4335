"""Defines the nodes of the token tree, and computes the digests by which a new request is compared with recorded
requests.

A node is a prompt for an engine, or a turn that was sampled from a prompt. A node has a link to its parent, and stores
only the ids that follow the parent's ids, packed. So the ids of a node are stored once, even if many prompts continue
the node. Invariant: a node's ids never change, and a prompt with a parent begins with all of the parent's ids.

To index a request means to compute the digest of each message and of each prefix of the conversation. Each message is
parsed only once, because the digests of a parsed message are stored under the bytes of the message. For a few long
requests, all digests of their first messages are also stored together. If a new request begins with the same bytes,
only its other messages are indexed.

Invariant: the digests of a request do not depend on earlier requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from outrider.concurrency.cancellation import PIECE_BYTES, Steps
from outrider.errors import RequestError, TooLarge
from outrider.messages import Message, Role, ToolSpec, WireMessages
from outrider.tokens.rendering.renderer import ThinkingSwitch
from outrider.tokens.tree.canonical import MessageKey, PrintedFields, digest, extend, message_key, tools_key
from outrider.trajectory import ForkCause, Ids, ImageSpan, unpack_ids

MIN_REMEMBERED = 16
"""Minimum number of messages in a stored prefix (the digests of a request's first messages). Finding a shorter prefix
would take as long as indexing its messages again."""
UNSTABLE_TAIL = 4
"""How many of a request's newest messages a stored prefix leaves out. Clients often change the bytes of the newest
messages, because they move their cache markers."""
REMEMBER_EVERY = 8
"""A longer prefix replaces the stored prefix when a request has this many new messages. If the prefix were copied for
every request, the copies would take longer than indexing the few new messages again."""
MAX_REMEMBERED = 4
"""Maximum number of stored prefixes. Each concurrent agent needs one stored prefix."""
MAX_MESSAGE_KEYS = 1 << 14
"""Maximum number of messages whose digests are stored. At this number, all digests are dropped. A message is then
parsed again when its digests are needed."""
MAX_TOOL_KEYS = 1 << 12
"""Maximum number of lists of tools whose digests are stored. At this number, all these digests are dropped."""
MAX_TOOL_VALUES = 1 << 17
"""Maximum number of lists, objects and commas in a request's tools. A chat template writes the tools as JSON in one
call, which blocks all threads. For this number, the call takes 25 ms."""
MAX_NEW_TEXT = 9 << 20
"""Maximum number of characters in a request's new messages, and of bytes in its tools. This limits the work for a model
whose context length is not known."""


class PromptNode:
    """The prompt of a turn: the ids of `parent`, then `delta` (packed int32). `length` is in tokens.

    The prompt's request has `message_count` messages: first `system_count` system messages (`system_digest`), then the
    history (`history_digest`). `tools_digest` is empty if there are no tools. `prefix_digest` covers the tools and all
    messages.

    matched: the turn whose conversation the request extends, even if the prompt does not use this turn's ids.
    rendered_replies: a pair for each assistant message whose ids were rendered and not sampled: the message's position,
        and the digest of its reasoning (None if it has no reasoning).
    splice: set if the prompt's history was recorded after other tools or system messages, and the prompt uses the
        recorded ids.
    thinking: True or False if the end of the prompt turns the model's reasoning on or off; None for the family's
        default.
    conversation: the number of the conversation. 0 is the session's first conversation. Each other conversation began
        independently, or with other tools or another system prompt.
    fork: the cause and the source turn of a fork, if the tools or the system prompt changed; otherwise None.
    first_turn: the index of the first turn sampled from the prompt, or None.
    images: the positions of the images in this node's own ids.

    The class has `__slots__` and is not a struct, to save memory: a session has one node per turn, and
    tests/tokens/test_cost.py limits the bytes per turn.
    """

    __slots__ = (
        "conversation",
        "delta",
        "first_turn",
        "fork",
        "history_digest",
        "images",
        "length",
        "matched",
        "message_count",
        "parent",
        "prefix_digest",
        "rendered_replies",
        "splice",
        "system_count",
        "system_digest",
        "thinking",
        "tools_digest",
    )

    def __init__(
        self,
        parent: TurnNode | None,
        delta: bytes,
        *,
        matched: TurnNode | None,
        prefix_digest: bytes,
        rendered_replies: tuple[tuple[int, bytes | None], ...],
        message_count: int,
        tools_digest: bytes,
        system_count: int,
        system_digest: bytes,
        history_digest: bytes,
        splice: Splice | None = None,
        thinking: bool | None = None,
    ) -> None:
        self.parent = parent
        self.delta = delta
        self.length: int = (parent.length if parent else 0) + len(delta) // 4
        self.matched = matched
        self.prefix_digest = prefix_digest
        self.rendered_replies = rendered_replies
        self.message_count = message_count
        self.tools_digest = tools_digest
        self.system_count = system_count
        self.system_digest = system_digest
        self.history_digest = history_digest
        self.splice = splice
        self.thinking = thinking
        self.conversation = 0
        self.fork: tuple[ForkCause, int] | None = None
        self.first_turn: int | None = None
        self.images: tuple[ImageSpan, ...] = ()

    def ids(self) -> Ids:
        """Return the ids of the whole prompt as int32 of shape (length,)."""
        # This module uses loops instead of recursion, because sessions have thousands of turns and Python limits
        # recursion to a thousand calls.
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

    def all_images(self) -> list[ImageSpan]:
        """Return the positions of all images in the prompt, in order."""
        nodes: list[tuple[ImageSpan, ...]] = []
        prompt: PromptNode | None = self
        while prompt is not None:
            if prompt.images:
                nodes.append(prompt.images)
            prompt = prompt.parent.prompt if prompt.parent is not None else None
        return [span for spans in reversed(nodes) for span in spans]

    def tail(self, tail_start: Callable[[Sequence[int]], int]) -> list[int]:
        """Return the part at the end of the prompt that `Renderer.bridge` and `Renderer.parse` need. `tail_start` is
        the method `Renderer.tail_start`."""
        own: list[int] = unpack_ids(self.delta).tolist()
        start = tail_start(own)
        # If `start` is 0, the tail may begin before this node's own ids, so search the whole prompt.
        if start > 0 or self.parent is None:
            return own[start:]
        whole: list[int] = self.ids().tolist()
        return whole[tail_start(whole) :]


class TurnNode:
    """A sampled reply. `output` contains its ids (packed int32). `children` is the number of prompts whose parent is
    this turn.

    Three digests describe the reply as the client received it: `reply_digest`, `reasoning` (of its reasoning) and
    `call_ids` (of the ids of its tool calls). All are None if the client did not receive the reply."""

    __slots__ = ("call_ids", "children", "index", "output", "prompt", "reasoning", "reply_digest")

    def __init__(self, index: int, prompt: PromptNode, output: bytes, reply: MessageKey | None) -> None:
        self.index = index
        self.prompt = prompt
        self.output = output
        self.reply_digest = reply.body if reply else None
        self.reasoning = reply.reasoning if reply else None
        self.call_ids = reply.call_ids if reply else None
        self.children = 0

    @property
    def length(self) -> int:
        """The number of tokens in the prompt and the output together."""
        return self.prompt.length + len(self.output) // 4


class Splice(msgspec.Struct, frozen=True):
    """Describes a prompt whose history was recorded after other tools or system messages. The prompt's first `head` ids
    were rendered, and the recorded ids of the history follow. `origin` is the prompt with which the recording of the
    history began. That prompt was rendered as a whole."""

    head: int
    origin: PromptNode


def recorded_reasoning(turn: TurnNode) -> list[tuple[int, bytes | None]]:
    """Return a pair for each reply in the turn's conversation, up to the turn's own reply. The pair is the reply's
    position among the messages, and the digest of its reasoning (None if it has no reasoning). The newest turn comes
    first."""
    found: list[tuple[int, bytes | None]] = []
    node: TurnNode | None = turn
    while node is not None:
        found += [(node.prompt.message_count, node.reasoning), *node.prompt.rendered_replies]
        node = node.prompt.parent
    return found


def reasoning_agrees(turn: TurnNode, keys: Sequence[MessageKey], checked_to: PromptNode | None) -> bool:
    """Return True if the request repeats or drops the recorded reasoning (`may_echo_reasoning`) of every reply on the
    path to `turn`. The replies in the prompt `checked_to` are skipped, because an earlier comparison has already found
    that their reasoning agrees."""
    node: TurnNode | None = turn
    while node is not None:
        prompt = node.prompt
        if not keys[prompt.message_count].may_echo_reasoning(node.reasoning):
            return False
        if prompt is checked_to:
            return True
        if prompt.rendered_replies and not rendered_replies_agree(prompt, keys):
            return False
        node = prompt.parent
    return True


def rendered_replies_agree(prompt: PromptNode, keys: Sequence[MessageKey]) -> bool:
    """Like `reasoning_agrees`, but for the assistant messages of this prompt whose ids were rendered and not
    sampled."""
    return all(keys[index].may_echo_reasoning(recorded) for index, recorded in prompt.rendered_replies)


def call_ids_agree(turn: TurnNode, keys: Sequence[MessageKey]) -> bool:
    """Return True if the request has the recorded ids of all tool calls on the path to `turn`."""
    node: TurnNode | None = turn
    while node is not None:
        if keys[node.prompt.message_count].call_ids != node.call_ids:
            return False
        node = node.prompt.parent
    return True


def parse_messages(messages: WireMessages) -> Steps[tuple[Message, ...]]:
    """Parse all messages. Raises RequestError for a message that cannot be read."""
    parsed: list[Message] = []
    piece = 0
    for index in range(len(messages)):
        piece += messages.size(index)
        if piece > PIECE_BYTES:
            yield piece
            piece = 0
        parsed.append(messages.parse(index))
    return tuple(parsed)


class IndexedRequest(msgspec.Struct, kw_only=True):
    """A request, its digests, and the part of its conversation that the tree has recorded.

    prefixes: `prefixes[i]` is the digest of the tools and the first `i` messages.
    keys: the digests of each message.
    recalled: how many messages, from the first, have digests that come from a stored prefix.
    parsed: the messages parsed so far, by position.
    sizes: the number of bytes of all recalled messages together, then of each other message.
    reasoning_checked_to: the last prompt up to which the request's reasoning is known to agree with the recorded
        reasoning; None if it was not compared.
    matched: the turn whose conversation is the longest recorded prefix of the request.
    covered: the number of messages in this prefix.
    switch: the ids that turn thinking on or off at the end of the prompt; None for the family's default.
    """

    messages: WireMessages
    tools: Sequence[ToolSpec]
    prefixes: list[bytes]
    keys: list[MessageKey]
    recalled: int
    parsed: dict[int, Message]
    sizes: list[int]
    reasoning_checked_to: PromptNode | None
    matched: TurnNode | None = None
    covered: int = 0
    switch: ThinkingSwitch | None = None

    @property
    def thinking(self) -> bool | None:
        return None if self.switch is None else self.switch.thinking

    @property
    def is_rewritten(self) -> bool:
        """True if there are assistant messages after the recorded part of the conversation."""
        return any(key.role is Role.ASSISTANT for key in self.keys[self.covered :])

    @property
    def system_count(self) -> int:
        """The number of system messages at the beginning of the request."""
        return next((at for at, key in enumerate(self.keys) if key.role is not Role.SYSTEM), len(self.keys))

    @property
    def system_digest(self) -> bytes:
        return _extend_all(b"", self.keys[: self.system_count])

    @property
    def tools_digest(self) -> bytes:
        """The digest of the tools, or b"" if there are no tools."""
        return self.prefixes[0] if self.tools else b""

    def repeats(self, prompt: PromptNode) -> bool:
        """Return True if this request repeats the request of `prompt`. The caller must have checked that their prefix
        digests are equal."""
        return prompt.thinking == self.thinking and self.has_messages_of(prompt)

    def has_messages_of(self, prompt: PromptNode) -> bool:
        """Like `repeats`, but ignores whether thinking is turned on or off."""
        return prompt.matched is self.matched and rendered_replies_agree(prompt, self.keys)

    def parse_from(self, start: int) -> list[Message]:
        """Return the messages from position `start` on. Raises RequestError for a message that cannot be read."""
        for index in range(start, len(self.messages)):
            if index not in self.parsed:
                self.parsed[index] = self.messages.parse(index)
        return [self.parsed[index] for index in range(start, len(self.messages))]

    def size_from(self, start: int) -> int:
        """Return the number of bytes of the messages from position `start` on. If they include recalled messages, all
        messages are counted, because only the total size of the recalled messages is known."""
        return sum(self.sizes[max(0, start - self.recalled + 1) :] if start >= self.recalled else self.sizes)

    def with_switch(self, added: list[int]) -> list[int]:
        """Return `added`, the last ids of a prompt, with thinking turned on or off as this request asks. Raises
        RequestError if `added` does not end like the family's prompts."""
        if self.switch is None:
            return added
        kept = len(added) - len(self.switch.usual_end)
        if kept < 0 or added[kept:] != self.switch.usual_end:
            raise RequestError("thinking cannot be switched here: the prompt does not end as the family's prompts do")
        return added[:kept] + self.switch.switched_end

    def make_prompt(
        self,
        parent: TurnNode | None,
        delta: bytes,
        *,
        splice: Splice | None = None,
        sampled: Sequence[tuple[int, bytes | None]] = (),
    ) -> PromptNode:
        """Make the prompt of this request: the ids of `parent`, then `delta` (packed). `sampled` has a pair for each
        assistant message whose ids in `delta` were sampled: the message's position, and the digest of its recorded
        reasoning."""
        first = self.covered if parent is not None else 0
        replies = {at: key.reasoning for at, key in enumerate(self.keys[first:], first) if key.role is Role.ASSISTANT}
        replies |= {at: reasoning for at, reasoning in sampled if at >= first}
        if parent is None:
            system_count, system_digest = self.system_count, self.system_digest
            history, history_start = b"", system_count
        else:
            before = parent.prompt
            system_count, system_digest = before.system_count, before.system_digest
            history, history_start = before.history_digest, before.message_count
        return PromptNode(
            parent,
            delta,
            matched=self.matched,
            prefix_digest=self.prefixes[-1],
            rendered_replies=tuple(replies.items()),
            message_count=len(self.messages),
            tools_digest=self.tools_digest,
            system_count=system_count,
            system_digest=system_digest,
            history_digest=_extend_all(history, self.keys[history_start:]),
            splice=splice,
            thinking=self.thinking,
        )


def _extend_all(prefix: bytes, keys: Sequence[MessageKey]) -> bytes:
    for key in keys:
        prefix = extend(prefix, key.body)
    return prefix


class _RememberedPrefix(msgspec.Struct, frozen=True):
    """Stored digests of the first messages of an earlier request. `head` is the digest of all bytes of these messages,
    and `size` is the number of these bytes. `last` is the digest of the bytes of the last of these messages."""

    last: bytes
    head: bytes
    prefixes: list[bytes]
    keys: list[MessageKey]
    reasoning_checked_to: PromptNode | None
    size: int

    def begins(self, messages: WireMessages) -> bool:
        count = len(self.keys)
        return (
            count <= len(messages)
            # The last message is compared first, because this comparison is fast and rules out most requests of other
            # agents.
            and self.last == digest(messages.raw(count - 1))
            and self.head == digest(messages.head(count))
        )


class RequestIndexer:
    """Indexes the requests of a session. Call `index` with a request. Then make its prompt, and call `remember`."""

    def __init__(self, printed: PrintedFields) -> None:
        self._printed = printed
        self._keys: dict[bytes, MessageKey] = {}
        self._tools: dict[bytes, bytes] = {}
        self._remembered: list[_RememberedPrefix] = []
        self._newest: list[bytes] = []

    def index(self, messages: WireMessages, tools: Sequence[ToolSpec], tools_raw: bytes) -> Steps[IndexedRequest]:
        """Index a request. Raises RequestError for a message that cannot be read, and TooLarge if the tools are too
        large."""
        # The first prefix of a conversation is the digest of its tools.
        tools_digest = digest(tools_raw)
        start = self._tools.get(tools_digest)
        if start is None:
            if len(tools_raw) > PIECE_BYTES:
                yield len(tools_raw)
            if len(tools_raw) > MAX_NEW_TEXT:
                raise TooLarge(f"the tools have more than {MAX_NEW_TEXT} bytes", field="tools")
            if len(tools_raw) > MAX_TOOL_VALUES and sum(map(tools_raw.count, (b"[", b"{", b","))) > MAX_TOOL_VALUES:
                raise TooLarge(f"the tools have more than {MAX_TOOL_VALUES} JSON values", field="tools")
            if len(self._tools) >= MAX_TOOL_KEYS:
                self._tools.clear()
            start = self._tools[tools_digest] = tools_key(list(tools))
        before: _RememberedPrefix | None = None
        for place, remembered in enumerate(self._remembered):
            if remembered.prefixes[0] == start and remembered.begins(messages):
                before = remembered
                # move the prefix to the front, as the one used last
                self._remembered.insert(0, self._remembered.pop(place))
                break
        prefixes = before.prefixes.copy() if before else [start]
        keys = before.keys.copy() if before else []
        sizes = [before.size if before else 0]
        recalled, piece = len(keys), 0
        parsed: dict[int, Message] = {}
        for index in range(recalled, len(messages)):
            sizes.append(messages.size(index))
            piece += sizes[-1]
            if piece > PIECE_BYTES:
                yield piece
                piece = 0
            raw_digest = digest(messages.raw(index))
            key = self._keys.get(raw_digest)
            if key is None:
                parsed[index] = messages.parse(index)
                if len(self._keys) >= MAX_MESSAGE_KEYS:
                    self._keys.clear()
                key = self._keys[raw_digest] = message_key(parsed[index], self._printed)
            keys.append(key)
            prefix = extend(prefixes[-1], key.body)
            # The tree keeps every digest object. If the previous request has an equal digest at this position, reuse
            # the previous request's object. This saves 120 bytes per call.
            if len(prefixes) < len(self._newest) and self._newest[len(prefixes)] == prefix:
                prefix = self._newest[len(prefixes)]
            prefixes.append(prefix)
        self._newest = prefixes
        return IndexedRequest(
            messages=messages,
            tools=tools,
            prefixes=prefixes,
            keys=keys,
            recalled=recalled,
            parsed=parsed,
            sizes=sizes,
            reasoning_checked_to=before.reasoning_checked_to if before else None,
        )

    def remember(self, request: IndexedRequest, prompt: PromptNode) -> None:
        """Store the digests of a request's first messages, if there are enough of them (MIN_REMEMBERED,
        REMEMBER_EVERY). `prompt` is the request's prompt."""
        count = len(request.keys) - UNSTABLE_TAIL
        if count < max(MIN_REMEMBERED, request.recalled + REMEMBER_EVERY):
            return
        checked_to: PromptNode | None = prompt
        while checked_to is not None and checked_to.message_count > count:
            checked_to = checked_to.parent.prompt if checked_to.parent else None
        messages = request.messages
        prefix = _RememberedPrefix(
            last=digest(messages.raw(count - 1)),
            head=digest(messages.head(count)),
            prefixes=request.prefixes[: count + 1],
            keys=request.keys[:count],
            reasoning_checked_to=checked_to,
            size=sum(request.sizes[: count - request.recalled + 1]),
        )
        others = [one for one in self._remembered if one.prefixes[-1] not in request.prefixes]
        self._remembered = [prefix, *others[: MAX_REMEMBERED - 1]]
