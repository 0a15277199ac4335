"""What the token tree is made of: prompts that the engine was given, and the turns that were sampled from them.

Pure. Each holds the ids it added, packed, and leads to the one before it. Invariant: a node's ids never change, and a
prompt that has a parent begins with all of its parent's ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from outrider.tokens.rendering.renderer import Renderer
from outrider.tokens.tree.canonical import MessageKey
from outrider.trajectory import ForkCause, Ids, unpack_ids


class PromptNode:
    """What the engine was given for a turn: the parent's ids, then `delta` (packed int32).

    Its messages are a head of `lead` system messages, whose digest is `system`, and a history, whose digest is
    `history`. `matched` is the turn whose conversation the request extends, even where its ids could not be kept;
    `quoted` are the positions and reasoning digests (None: it had none) of assistant messages that were
    rendered, not sampled; `tools` is the digest of the request's tools, empty where it had none;
    `conversation` is 0 for the session's first one and counts those that began independently of it, or with other
    tools or another system prompt. `splice` says how a prompt that has another's history was put together, `fork` why
    and from which turn it forked, where the tools or the system prompt changed. `thinking` is None where the prompt
    ends as the family's do, else whether its end has the model think.
    """

    __slots__ = (
        "conversation",
        "delta",
        "first_turn",
        "fork",
        "history",
        "lead",
        "length",
        "matched",
        "messages",
        "parent",
        "path",
        "quoted",
        "splice",
        "system",
        "thinking",
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
        lead: int,
        system: bytes,
        history: bytes,
        splice: Splice | None = None,
        thinking: bool | None = None,
    ) -> None:
        self.parent = parent
        self.delta = delta
        self.length: int = (parent.length if parent else 0) + len(delta) // 4
        self.matched = matched
        self.path = path
        self.quoted = quoted
        self.messages = messages
        self.tools = tools
        self.lead = lead
        self.system = system
        self.history = history
        self.splice = splice
        self.fork: tuple[ForkCause, int] | None = None
        self.thinking = thinking
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
    """One sampled reply: `output` is packed int32; `said`, `reasoning` and `call_ids` are digests of its message, its
    reasoning and its calls' ids."""

    __slots__ = ("call_ids", "children", "index", "length", "output", "prompt", "reasoning", "said")

    def __init__(self, index: int, prompt: PromptNode, output: bytes, key: MessageKey | None) -> None:
        self.index = index
        self.prompt = prompt
        self.output = output
        self.length = prompt.length + len(output) // 4
        self.said = key.body if key else None
        self.reasoning = key.reasoning if key else None
        self.call_ids = key.call_ids if key else None
        self.children = 0


class Splice(msgspec.Struct, frozen=True):
    """A prompt whose first `head` ids were rendered, and whose others are a history's that was recorded behind another
    head. `rendered` is the prompt with which that history began: it was rendered whole."""

    head: int
    rendered: PromptNode


def recorded_reasoning(turn: TurnNode) -> list[tuple[int, bytes | None]]:
    """Of the assistant messages up to the turn's own: their positions, and the digests of their reasoning."""
    found: list[tuple[int, bytes | None]] = []
    node: TurnNode | None = turn
    while node is not None:
        found += [(node.prompt.messages, node.reasoning), *node.prompt.quoted]
        node = node.prompt.parent
    return found


def reasoning_agrees(turn: TurnNode, keys: Sequence[MessageKey], known: PromptNode | None) -> bool:
    """Whether every recorded reply on the way to `turn` has the reasoning that the client sends back, or the
    client sends none. On the way to `known` that is so."""
    node: TurnNode | None = turn
    while node is not None:
        prompt = node.prompt
        if not keys[prompt.messages].thinks(node.reasoning):
            return False
        if prompt is known:
            return True
        if prompt.quoted and not quotes_agree(prompt, keys):
            return False
        node = prompt.parent
    return True


def quotes_agree(prompt: PromptNode, keys: Sequence[MessageKey]) -> bool:
    """The same for the assistant messages that the prompt itself rendered."""
    return all(keys[index].thinks(recorded) for index, recorded in prompt.quoted)


def call_ids_agree(turn: TurnNode, keys: Sequence[MessageKey]) -> bool:
    """Whether the request has the ids of every recorded call on the way to `turn`."""
    node: TurnNode | None = turn
    while node is not None:
        if keys[node.prompt.messages].call_ids != node.call_ids:
            return False
        node = node.prompt.parent
    return True
