"""A request as the token tree sees it: digests of its messages, and of each beginning of its history.

Pure. A message is read once: its bytes are known when they come again. So is the history of a long conversation: of
the newest requests it is kept what their first messages came to, and a request that begins with the same bytes gets
that, so that reading it costs what is new and one pass over its bytes. Invariant: how a request is read depends on the
request alone, never on what was read before.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from outrider.concurrency.offload import PIECE_BYTES, Steps
from outrider.errors import RequestError, TooLarge
from outrider.messages import Message, Role, ToolSpec, WireMessages
from outrider.tokens.rendering.renderer import Opening
from outrider.tokens.tree.canonical import MessageKey, Shown, digest, extend, message_key, tools_key
from outrider.tokens.tree.nodes import PromptNode, Splice, TurnNode, call_ids_agree, quotes_agree, reasoning_agrees
from outrider.trajectory import pack_ids

LONG = 16
"""Histories of fewer messages are read anew: that is as fast."""
MARGIN = 4
"""The newest messages of a request may come again with other bytes: clients move their cache markers."""
STRIDE = 8
"""So many more messages are read anew before what was kept of a history is brought up to date."""
KEPT = 4
"""Of how many histories the beginning is kept: agents that run side by side."""
MAX_TOOL_VALUES = 1 << 17
"""Lists, objects and commas of a request's tools. A chat template writes them as JSON: 25 ms for so many, during which
the interpreter does nothing else."""
KEPT_KEYS = 1 << 14
"""Of how many messages the digests are kept. A session that sends more of them is read anew."""


def parse_messages(messages: WireMessages) -> Steps[tuple[Message, ...]]:
    """Parse all messages. Raises RequestError for one that cannot be read."""
    found: list[Message] = []
    piece = 0
    for index in range(len(messages)):
        piece += messages.size(index)
        if piece > PIECE_BYTES:
            yield piece
            piece = 0
        found.append(messages.parse(index))
    return tuple(found)


class Request(msgspec.Struct, kw_only=True):
    """`paths[i]` is the digest of the tools and the first `i` messages. `matched` is the turn whose whole conversation
    is the longest recorded prefix, and accounts for `covered` messages; up to the prompt `known` the reasoning sent
    back was found to agree with what is recorded. The first `recalled` messages were not read anew; `fresh` are those
    of the others that had to be parsed, by their positions, and `sizes` are the bytes of the recalled ones together and
    of each other one. `opening` is how its prompt is to end, where that is not as usual: a history may go on with
    thinking switched."""

    messages: WireMessages
    tools: Sequence[ToolSpec]
    paths: list[bytes]
    keys: list[MessageKey]
    recalled: int
    known: PromptNode | None
    fresh: dict[int, Message]
    sizes: list[int]
    matched: TurnNode | None = None
    covered: int = 0
    opening: Opening | None = None

    def match(self, turns: dict[bytes, list[TurnNode]]) -> None:
        """Find `matched` in the turns by their paths. Of several that read alike it is the newest whose call ids the
        request has, else the newest."""
        for covered in range(len(self.keys), 0, -1):
            ending = reversed(turns.get(self.paths[covered], ()))
            found = [turn for turn in ending if reasoning_agrees(turn, self.keys, self.known)]
            if found:
                same = found if len(found) == 1 else [turn for turn in found if call_ids_agree(turn, self.keys)]
                self.matched, self.covered = (same or found)[0], covered
                return

    def repeats(self, prompt: PromptNode) -> bool:
        """Whether it is the request of a prompt that has its path."""
        return prompt.thinking == self.thinking and self.shares_messages(prompt)

    def shares_messages(self, prompt: PromptNode) -> bool:
        """The same, thinking aside."""
        return prompt.matched is self.matched and quotes_agree(prompt, self.keys)

    @property
    def thinking(self) -> bool | None:
        return None if self.opening is None else self.opening.thinking

    def opened(self, added: list[int]) -> list[int]:
        """The ids of a prompt's end with the opening that is asked for. Raises RequestError where they have another
        end than the family's prompts."""
        if self.opening is None:
            return added
        kept = len(added) - len(self.opening.before)
        if kept < 0 or added[kept:] != self.opening.before:
            raise RequestError("thinking cannot be switched here: the prompt does not end as the family's prompts do")
        return added[:kept] + self.opening.after

    @property
    def rewritten(self) -> bool:
        """Whether assistant messages follow the history that was recorded."""
        return any(key.role is Role.ASSISTANT for key in self.keys[self.covered :])

    @property
    def lead(self) -> int:
        """The number of system messages at the beginning."""
        return next((at for at, key in enumerate(self.keys) if key.role is not Role.SYSTEM), len(self.keys))

    @property
    def tools_digest(self) -> bytes:
        """Empty without tools."""
        return self.paths[0] if self.tools else b""

    def parsed(self, start: int) -> list[Message]:
        for index in range(start, len(self.messages)):
            if index not in self.fresh:
                self.fresh[index] = self.messages.parse(index)
        return [self.fresh[index] for index in range(start, len(self.messages))]

    def size(self, start: int) -> int:
        """Bytes of the messages from `start` on, at least."""
        return sum(self.sizes[max(0, start - self.recalled + 1) :] if start >= self.recalled else self.sizes)

    def prompt(
        self,
        parent: TurnNode | None,
        added: list[int],
        *,
        splice: Splice | None = None,
        known: Sequence[tuple[int, bytes | None]] = (),
    ) -> PromptNode:
        """Its prompt: the ids of the parent, then those that are added. `known` is the reasoning of the assistant
        messages among these that were sampled."""
        first = self.covered if parent is not None else 0
        assistants = {
            at: key.reasoning for at, key in enumerate(self.keys[first:], first) if key.role is Role.ASSISTANT
        }
        assistants |= {at: reasoning for at, reasoning in known if at >= first}
        lead = self.lead if parent is None else parent.prompt.lead
        before = parent.prompt.history if parent is not None else b""
        return PromptNode(
            parent,
            pack_ids(self.opened(added)),
            matched=self.matched,
            path=self.paths[-1],
            quoted=tuple(assistants.items()),
            messages=len(self.messages),
            tools=self.tools_digest,
            lead=lead,
            system=self.system() if parent is None else parent.prompt.system,
            history=_path(before, self.keys[lead if parent is None else parent.prompt.messages :]),
            splice=splice,
            thinking=self.thinking,
        )

    def system(self) -> bytes:
        """The digest of the system messages at the beginning."""
        return _path(b"", self.keys[: self.lead])


def _path(path: bytes, keys: Sequence[MessageKey]) -> bytes:
    for key in keys:
        path = extend(path, key.body)
    return path


class _History(msgspec.Struct, frozen=True):
    """What the first messages of a request came to. `last` is the digest of the newest of them, `head` of all; `size`
    is how many bytes they have."""

    last: bytes
    head: bytes
    paths: list[bytes]
    keys: list[MessageKey]
    known: PromptNode | None
    size: int

    def begins(self, messages: WireMessages) -> bool:
        count = len(self.keys)
        return (
            count <= len(messages)
            and self.last == digest(messages.raw(count - 1))
            and self.head == digest(messages.head(count))
        )


class RequestReader:
    """Reads a session's requests: `read` one, and `remember` it once it has its prompt."""

    def __init__(self, shown: Shown) -> None:
        self._shown = shown
        self._keys: dict[bytes, MessageKey] = {}
        self._tools: dict[bytes, bytes] = {}
        self._histories: list[_History] = []

    def read(self, messages: WireMessages, tools: Sequence[ToolSpec], tools_raw: bytes) -> Steps[Request]:
        """Raises RequestError for a message that cannot be read."""
        start = yield from self._start(tools, tools_raw)
        history = self._recall(messages, start)
        paths = history.paths.copy() if history else [start]
        keys = history.keys.copy() if history else []
        recalled, piece = len(keys), 0
        fresh: dict[int, Message] = {}
        sizes = [history.size if history else 0]
        for index in range(recalled, len(messages)):
            sizes.append(messages.size(index))
            piece += sizes[-1]
            if piece > PIECE_BYTES:
                yield piece
                piece = 0
            short = digest(messages.raw(index))
            key = self._keys.get(short)
            if key is None:
                fresh[index] = messages.parse(index)
                key = self._key(short, fresh[index])
            keys.append(key)
            paths.append(extend(paths[-1], key.body))
        return Request(
            messages=messages,
            tools=tools,
            paths=paths,
            keys=keys,
            recalled=recalled,
            known=history.known if history else None,
            fresh=fresh,
            sizes=sizes,
        )

    def remember(self, request: Request, prompt: PromptNode) -> None:
        """That `prompt` is the request's."""
        count = len(request.keys) - MARGIN
        if count < max(LONG, request.recalled + STRIDE):
            return
        known: PromptNode | None = prompt
        while known is not None and known.messages > count:
            known = known.parent.prompt if known.parent else None
        messages, paths = request.messages, request.paths
        head, last = digest(messages.head(count)), digest(messages.raw(count - 1))
        size = sum(request.sizes[: count - request.recalled + 1])
        history = _History(last, head, paths[: count + 1], request.keys[:count], known, size)
        longer = [one for one in self._histories if one.paths[-1] not in paths]
        self._histories = [history, *longer[: KEPT - 1]]

    def _recall(self, messages: WireMessages, start: bytes) -> _History | None:
        """The newest history that the messages begin with."""
        for place, history in enumerate(self._histories):
            if history.paths[0] == start and history.begins(messages):
                self._histories.insert(0, self._histories.pop(place))
                return history
        return None

    def _key(self, short: bytes, message: Message) -> MessageKey:
        """The key of a message whose bytes have the digest `short`."""
        if len(self._keys) >= KEPT_KEYS:
            self._keys.clear()
        key = self._keys[short] = message_key(message, self._shown)
        return key

    def _start(self, tools: Sequence[ToolSpec], raw: bytes) -> Steps[bytes]:
        """The path of no message."""
        short = digest(raw)
        path = self._tools.get(short)
        if path is None:
            if len(raw) > PIECE_BYTES:
                yield len(raw)
            if len(raw) > MAX_TOOL_VALUES and sum(map(raw.count, (b"[", b"{", b","))) > MAX_TOOL_VALUES:
                raise TooLarge(f"the tools have more than {MAX_TOOL_VALUES} JSON values", field="tools")
            path = self._tools[short] = tools_key(list(tools))
        return path
