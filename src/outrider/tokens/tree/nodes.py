"""The nodes of the token tree: prompts for an engine, and turns sampled from them.

A node links to its parent, and stores only the ids after the parent's ids, packed. So the ids of a node are stored
once, however many prompts continue the node. Invariant: a node's ids never change, and a prompt with a parent begins
with all of the parent's ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from outrider.tokens.tree.canonical import MessageKey
from outrider.trajectory import ForkCause, Ids, unpack_ids


class PromptNode:
    """The prompt of a turn: the parent's ids, then `delta` (packed int32). `length` is in tokens.

    The request had `message_count` messages: `system_count` system messages at the beginning (`system_digest`), then a
    history (`history_digest`). `tools_digest` is empty without tools; `prefix_digest` covers tools and all messages.

    matched: the turn whose conversation the request extends, also if the turn's ids could not be kept.
    rendered_replies: positions and reasoning digests (None without reasoning) of the assistant messages whose ids were
        rendered and not sampled.
    splice: the composition of the prompt, if its history's ids were recorded behind another head.
    thinking: True or False if the end of the prompt switches the model's reasoning on or off; None for the family's
        usual end.
    conversation: 0 for the session's first conversation; 1, 2, ... for conversations that began independently of
        earlier ones, or with other tools or another system prompt.
    fork: cause and source turn of the fork, if the tools or the system prompt changed.
    first_turn: the first turn sampled from the prompt.

    The class has `__slots__` and is no struct, because a session keeps one node per turn and bytes per turn are
    measured (tests/tokens/test_cost.py).
    """

    __slots__ = (
        "conversation",
        "delta",
        "first_turn",
        "fork",
        "history_digest",
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

    def ids(self) -> Ids:
        """The whole prompt, int32 of shape (length,)."""
        # This walk and the walks below are loops, because sessions have thousands of turns and Python's recursion ends
        # at a thousand calls.
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

    def tail(self, tail_start: Callable[[Sequence[int]], int]) -> list[int]:
        """The end of the prompt that bridging and parsing need. `tail_start` is the renderer's method."""
        own: list[int] = unpack_ids(self.delta).tolist()
        start = tail_start(own)
        # Start 0 may mean that the tail begins before this node's own ids, so all ids are searched.
        if start > 0 or self.parent is None:
            return own[start:]
        whole: list[int] = self.ids().tolist()
        return whole[tail_start(whole) :]


class TurnNode:
    """A sampled reply. `output` is packed int32. `reply_digest`, `reasoning` and `call_ids` are digests of the reply as
    the client received it, of the reply's reasoning and of the ids of its calls. All three are None if the client
    received no reply. `children` is the number of prompts with this turn as parent."""

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
        """Tokens of prompt and output."""
        return self.prompt.length + len(self.output) // 4


class Splice(msgspec.Struct, frozen=True):
    """The composition of a prompt whose history was recorded behind another head: its first `head` ids were rendered,
    the others were taken from the record. `origin` is the first prompt of the recorded history, rendered whole."""

    head: int
    origin: PromptNode


def recorded_reasoning(turn: TurnNode) -> list[tuple[int, bytes | None]]:
    """The positions of all replies up to the turn's own reply, and the digests of their reasoning."""
    found: list[tuple[int, bytes | None]] = []
    node: TurnNode | None = turn
    while node is not None:
        found += [(node.prompt.message_count, node.reasoning), *node.prompt.rendered_replies]
        node = node.prompt.parent
    return found


def reasoning_agrees(turn: TurnNode, keys: Sequence[MessageKey], checked: PromptNode | None) -> bool:
    """Return True if the client sends back every reply on the path to `turn` with reasoning that may be an echo of the
    recorded reasoning (`may_echo_reasoning`). The path up to the prompt `checked` has already been compared."""
    node: TurnNode | None = turn
    while node is not None:
        prompt = node.prompt
        if not keys[prompt.message_count].may_echo_reasoning(node.reasoning):
            return False
        if prompt is checked:
            return True
        if prompt.rendered_replies and not rendered_replies_agree(prompt, keys):
            return False
        node = prompt.parent
    return True


def rendered_replies_agree(prompt: PromptNode, keys: Sequence[MessageKey]) -> bool:
    """Return True if the reasoning agrees (`reasoning_agrees`) for the assistant messages rendered in the prompt
    itself."""
    return all(keys[index].may_echo_reasoning(recorded) for index, recorded in prompt.rendered_replies)


def call_ids_agree(turn: TurnNode, keys: Sequence[MessageKey]) -> bool:
    """Return True if the request has the ids of every recorded call on the path to `turn`."""
    node: TurnNode | None = turn
    while node is not None:
        if keys[node.prompt.message_count].call_ids != node.call_ids:
            return False
        node = node.prompt.parent
    return True
