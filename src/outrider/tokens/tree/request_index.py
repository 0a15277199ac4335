"""Indexes requests for the token tree: a digest of each message and of each prefix of the conversation.

A message is parsed once; when its bytes come again, its digests are looked up. Of the newest long requests the digests
of their first messages are remembered, too, so that a request that begins with the same bytes costs its new messages
and one hash over the old ones.

It knows no token ids. Invariant: how a request is indexed depends on the request alone, never on what was indexed
before.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from outrider.concurrency.offload import PIECE_BYTES, Steps
from outrider.errors import RequestError, TooLarge
from outrider.messages import Message, Role, ToolSpec, WireMessages
from outrider.tokens.rendering.renderer import ThinkingSwitch
from outrider.tokens.tree.canonical import MessageKey, PrintedFields, digest, extend, message_key, tools_key
from outrider.tokens.tree.nodes import PromptNode, Splice, TurnNode, rendered_replies_agree

MIN_REMEMBERED = 16
"""Messages from which on a prefix is remembered. Shorter requests are as fast to index anew."""
UNSTABLE_TAIL = 4
"""Newest messages that are not remembered: clients move their cache markers, which changes the bytes of these."""
REMEMBER_EVERY = 8
"""New messages after which the remembered prefix is replaced by a longer one; copying it for every request would cost
more than indexing these again."""
MAX_REMEMBERED = 4
"""Remembered prefixes, one for each of a few agents that run side by side."""
MAX_MESSAGE_KEYS = 1 << 14
"""Messages whose digests are kept by their bytes. When there are more, all are dropped and parsed again."""
MAX_TOOL_VALUES = 1 << 17
"""Lists, objects and commas in a request's tools. A chat template writes the tools as JSON in one call that blocks all
threads: 25 ms for this many."""


def parse_messages(messages: WireMessages) -> Steps[tuple[Message, ...]]:
    """Parse all messages. Raises RequestError for one that cannot be read."""
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
    """A request with its digests, and where the tree found its conversation recorded.

    prefixes: `prefixes[i]` is the digest of the tools and the first `i` messages.
    keys: the digests of each message.
    recalled: how many of the first messages came from a remembered prefix.
    parsed: by position, the messages that had to be parsed so far.
    sizes: bytes of the recalled messages together, then of each other message.
    checked: a prompt up to which the reasoning that the client sends back is known to agree with the record.
    matched: the turn whose whole conversation is the longest recorded prefix; it covers `covered` messages.
    switch: how the prompt has to end, where that is not as usual: a history may go on with thinking switched.
    """

    messages: WireMessages
    tools: Sequence[ToolSpec]
    prefixes: list[bytes]
    keys: list[MessageKey]
    recalled: int
    parsed: dict[int, Message]
    sizes: list[int]
    checked: PromptNode | None
    matched: TurnNode | None = None
    covered: int = 0
    switch: ThinkingSwitch | None = None

    @property
    def thinking(self) -> bool | None:
        return None if self.switch is None else self.switch.thinking

    @property
    def is_rewritten(self) -> bool:
        """Whether assistant messages that are not recorded follow the matched conversation."""
        return any(key.role is Role.ASSISTANT for key in self.keys[self.covered :])

    @property
    def system_count(self) -> int:
        """The number of system messages at the beginning."""
        return next((at for at, key in enumerate(self.keys) if key.role is not Role.SYSTEM), len(self.keys))

    @property
    def system_digest(self) -> bytes:
        return _extend_all(b"", self.keys[: self.system_count])

    @property
    def tools_digest(self) -> bytes:
        """Empty without tools."""
        return self.prefixes[0] if self.tools else b""

    def repeats(self, prompt: PromptNode) -> bool:
        """Whether this is the request of a prompt that has the same prefix digest."""
        return prompt.thinking == self.thinking and self.has_messages_of(prompt)

    def has_messages_of(self, prompt: PromptNode) -> bool:
        """The same, whatever the thinking of both."""
        return prompt.matched is self.matched and rendered_replies_agree(prompt, self.keys)

    def parse_from(self, start: int) -> list[Message]:
        """The messages from position `start` on. Raises RequestError for one that cannot be read."""
        for index in range(start, len(self.messages)):
            if index not in self.parsed:
                self.parsed[index] = self.messages.parse(index)
        return [self.parsed[index] for index in range(start, len(self.messages))]

    def size_from(self, start: int) -> int:
        """Bytes of the messages from position `start` on; more, if that is among the recalled ones."""
        return sum(self.sizes[max(0, start - self.recalled + 1) :] if start >= self.recalled else self.sizes)

    def with_switch(self, added: list[int]) -> list[int]:
        """The ids of a prompt's end, with thinking switched as asked. Raises RequestError if they do not end as the
        family's prompts do."""
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
        """The request's prompt: the ids of the parent, then `delta` (packed). `sampled` are the positions of assistant
        messages among these whose ids were sampled, with the digests of their recorded reasoning."""
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
    """The first messages of an earlier request. `last` is the digest of the newest one's bytes, `head` of all their
    bytes; `size` is how many bytes these are."""

    last: bytes
    head: bytes
    prefixes: list[bytes]
    keys: list[MessageKey]
    checked: PromptNode | None
    size: int

    def begins(self, messages: WireMessages) -> bool:
        count = len(self.keys)
        return (
            count <= len(messages)
            # One message is quicker to compare than all, and mostly tells other agents' requests apart.
            and self.last == digest(messages.raw(count - 1))
            and self.head == digest(messages.head(count))
        )


class RequestIndexer:
    """Indexes the requests of a session: call `index`, and `remember` once the request has its prompt."""

    def __init__(self, printed: PrintedFields) -> None:
        self._printed = printed
        self._keys: dict[bytes, MessageKey] = {}
        self._tools: dict[bytes, bytes] = {}
        self._remembered: list[_RememberedPrefix] = []
        self._newest: list[bytes] = []

    def index(self, messages: WireMessages, tools: Sequence[ToolSpec], tools_raw: bytes) -> Steps[IndexedRequest]:
        """Raises RequestError for a message that cannot be read, and TooLarge for too many tools."""
        # The conversation's first prefix is the digest of its tools, which is that of no message.
        tools_digest = digest(tools_raw)
        start = self._tools.get(tools_digest)
        if start is None:
            if len(tools_raw) > PIECE_BYTES:
                yield len(tools_raw)
            if len(tools_raw) > MAX_TOOL_VALUES and sum(map(tools_raw.count, (b"[", b"{", b","))) > MAX_TOOL_VALUES:
                raise TooLarge(f"the tools have more than {MAX_TOOL_VALUES} JSON values", field="tools")
            start = self._tools[tools_digest] = tools_key(list(tools))
        before: _RememberedPrefix | None = None
        for place, remembered in enumerate(self._remembered):
            if remembered.prefixes[0] == start and remembered.begins(messages):
                before = remembered
                self._remembered.insert(0, self._remembered.pop(place))  # now it is the newest
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
            # The tree keeps digests for good. Taking the newest request's objects, where they are equal, keeps one of
            # each instead of two: 120 bytes a call.
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
            checked=before.checked if before else None,
        )

    def remember(self, request: IndexedRequest, prompt: PromptNode) -> None:
        """Keep the digests of the request's first messages, if it is long enough; `prompt` is the request's."""
        count = len(request.keys) - UNSTABLE_TAIL
        if count < max(MIN_REMEMBERED, request.recalled + REMEMBER_EVERY):
            return
        checked: PromptNode | None = prompt
        while checked is not None and checked.message_count > count:
            checked = checked.parent.prompt if checked.parent else None
        messages = request.messages
        prefix = _RememberedPrefix(
            last=digest(messages.raw(count - 1)),
            head=digest(messages.head(count)),
            prefixes=request.prefixes[: count + 1],
            keys=request.keys[:count],
            checked=checked,
            size=sum(request.sizes[: count - request.recalled + 1]),
        )
        others = [one for one in self._remembered if one.prefixes[-1] not in request.prefixes]
        self._remembered = [prefix, *others[: MAX_REMEMBERED - 1]]
