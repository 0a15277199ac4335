"""The token tree of a session. It stores each prompt as the ids that follow its parent's ids, and decides where each
new request joins the recorded conversation.

A request whose history is recorded gets the recorded ids unchanged, including sampled ids. Only its new messages are
rendered, so the cost of a turn is proportional to the turn's own tokens. A request's head is its tools and the system
messages at its beginning. The first of these rules that applies decides:

1. A repeated request (same tools, messages and thinking) gets the same prompt again (`retry`). So all replies to the
   request are sampled from the same ids.
2. The history may be recorded after another head. This rule applies if that recording covers more of the history than
   any recording after the request's own head, and includes a reply. The join is a `fork` (`tools_changed`,
   `system_changed` or both), because the request continues the recorded history. If the renderer can prove that the
   history has the same ids after both heads, the new head is rendered, and the recorded ids of the history follow it.
   So the model continues from its own sampled ids, and not from other ids for the same text. Without the proof, the ids
   come from rule 3 or 4.
3. This rule applies if part of the conversation is recorded, and the renderer can append the other messages without
   changing the ids of the turn that ends the longest recorded part. This turn is the parent. The join is an `append`,
   unless the turn already has another continuation (`fork`: `sibling`), or the other messages contain unrecorded
   replies (`fork`: `history_rewritten`).
4. Every other request is rendered as a whole. The join is a `root` if the request shares nothing with earlier requests
   except tools and system messages, which many agents have in common. Otherwise the join is a `fork`, and the fork's
   cause says why the recorded ids cannot be used.

The tree calls no engine and no store, and awaits nothing. Long work is divided into steps (`OffloadThread`), so a
session with a long history does not block other sessions. Invariant: a node's ids never change, and a prompt with a
parent begins with all of the parent's ids.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from outrider.concurrency.cancellation import Steps
from outrider.errors import ContextOverflow, Overflow, TooLarge
from outrider.messages import Message, ParsedMessages, Role, ToolSpec, WireMessages
from outrider.tokens.rendering.renderer import History, Renderer
from outrider.tokens.tree.canonical import MessageKey, extend, message_key
from outrider.tokens.tree.request_index import (
    MAX_NEW_TEXT,
    IndexedRequest,
    PromptNode,
    RequestIndexer,
    Splice,
    TurnNode,
    call_ids_agree,
    reasoning_agrees,
    recorded_reasoning,
)
from outrider.trajectory import HEAD_CHANGES, ForkCause, Ids, JoinKind, Turn, pack_ids, unpack_ids

LONG_TEXT = 256 << 10
"""Texts longer than this number of characters are first encoded in parts of this size, to count their tokens. So a text
of many megabytes that is too long for the context is refused early. Encoding such a text at once would take seconds and
a hundred times the text's memory."""
SEAM_TOKENS = 16
"""If two adjacent parts of a text are encoded separately, they have at most this many tokens more than if they are
encoded together."""
BYTES_OF_A_KEY = 100
"""When a turn is restored, each message of the turn's conversation counts as this many bytes of work. The number is
small, because the digests of most messages are already known."""
MAX_SEEN_PREFIXES = 1 << 16
"""Maximum number of stored prefixes of requests (10 MB). Above this number, all prefixes are dropped. After that, a
request recorded so far is no longer found as the origin of a fork, but the recorded ids of its turns are still used."""


MAX_UNANSWERED = 64 << 20
"""Maximum size, in bytes, of the prompts from which no turn was sampled. Their calls have failed or are still running.
Above this size, all of them are dropped, because no limit of turns or tokens ends failing calls. After that, a repeated
request is no longer recognised as a repetition, but it is rendered to the same ids. A turn that is then sampled from a
dropped prompt is recorded like any other."""
BYTES_OF_A_PROMPT = 1024
BYTES_OF_A_REPLY = 160
"""Approximate memory of a prompt without its ids, and of each rendered reply in the prompt."""


class Joined(msgspec.Struct, frozen=True):
    """The result of `TokenTree.join`. `added` contains the request's messages that follow the parent's conversation, or
    all messages if the prompt has no parent.

    `forked_from` is the index of a turn, or None. The value depends on the kind of join:

    - retry: the first turn of the prompt
    - fork because the tools or the system prompt changed: the turn whose history the request continues
    - other forks: the turn whose request shares the longest history with this request
    - root or append: None

    `forked_from` is also None if the model call of that earlier prompt or request failed, because a failed call has no
    turn."""

    kind: JoinKind
    cause: ForkCause | None
    prompt: PromptNode
    forked_from: int | None
    added: tuple[Message, ...] = ()


class _HistoryMatch(msgspec.Struct, frozen=True):
    """A turn whose history and reply are part of the request, but were recorded after a different head (tools and
    system messages). `covered` counts the request's messages up to this reply. `cause` tells how the heads differ."""

    turn: TurnNode
    covered: int
    cause: ForkCause


class _Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The ids of a request: the ids of `parent`, then `delta` (packed).

    match: set if the history was recorded after other tools or system messages.
    splice: set if the recorded ids of that history are used.
    sampled: set together with `splice`: for each reply of that history, its position and the digest of its
        reasoning."""

    parent: TurnNode | None
    delta: bytes
    match: _HistoryMatch | None = None
    splice: Splice | None = None
    sampled: Sequence[tuple[int, bytes | None]] = ()


class TokenTree:
    """The tree of one attempt of a session. For each request, call `join`, let the model generate, and then pass the
    sampled ids to `commit`."""

    def __init__(self, renderer: Renderer, history: History) -> None:
        self.forks: dict[ForkCause, int] = {}
        self._renderer = renderer
        self._history: History = history
        self._indexer = RequestIndexer(renderer.printed)
        # The values are tuples, because nearly all have one element, and a list takes 70 more bytes for every turn.
        self._prompts: dict[bytes, tuple[PromptNode, ...]] = {}
        self._turns: dict[bytes, tuple[TurnNode, ...]] = {}
        self._histories = _HistoryIndex()
        self._first_with_prefix: dict[bytes, PromptNode] = {}
        self._unanswered: dict[PromptNode, int] = {}
        """The sizes of the prompts from which no turn was sampled."""
        self._unanswered_size = 0
        """At least the sum of the sizes in `_unanswered`."""
        self._next_turn = 0
        self._conversations = 0

    def join(
        self,
        messages: WireMessages,
        tools: Sequence[ToolSpec],
        tools_raw: bytes,
        *,
        thinking: bool | None = None,
        context: int | None = None,
    ) -> Steps[Joined]:
        """Find or make the prompt of the request. `thinking` turns the model's reasoning on or off for this turn only;
        None keeps the family's default. Raises these errors, which leave the tree unchanged:

        - RequestError: a message cannot be read or rendered, or thinking cannot be turned on or off here.
        - TooLarge: a text is too long to encode, or the new messages or the tools are too large.
        - ContextOverflow: with this prompt, a context of `context` tokens has no room for a reply.
        """
        request = yield from self._index(messages, tools, tools_raw, thinking)
        repeated = self._repeated(request)
        if repeated is None:
            yield from self._check_long_texts(request, context)
            layout = yield from self._lay_out(request)
            joined = self._place(request, layout)
        else:
            yield request.size_from(0)  # the tree does not store messages, so `parse_from` below parses them again
            if repeated.first_turn is None and repeated.fork is not None:
                # The earlier model call with this prompt failed, so no turn records the fork yet.
                joined = Joined(JoinKind.FORK, repeated.fork[0], repeated, repeated.fork[1])
            else:
                joined = Joined(JoinKind.RETRY, None, repeated, repeated.first_turn)
        prompt = joined.prompt
        if context is not None and prompt.length >= context:
            raise ContextOverflow(
                f"the prompt has {prompt.length} tokens; the model's context is {context}",
                overflow=Overflow(prompt.length, context),
            )
        start = prompt.parent.prompt.message_count + 1 if prompt.parent is not None else 0
        joined = msgspec.structs.replace(joined, added=tuple(request.parse_from(start)))
        if repeated is None and self._renderer.images is not None:
            own = unpack_ids(prompt.delta)
            prompt.images = self._renderer.image_spans(own, prompt.length - len(own), joined.added)
        # Nothing below this line can fail, so a request that raises an error leaves no trace.
        if repeated is None:
            self._record(request, joined)
        return joined

    def measure(
        self, messages: WireMessages, tools: Sequence[ToolSpec], tools_raw: bytes, *, thinking: bool | None = None
    ) -> Steps[int]:
        """Return the length, in tokens, of the prompt that `join` would make. The tree is not changed. Raises the same
        errors as `join`, except ContextOverflow."""
        request = yield from self._index(messages, tools, tools_raw, thinking)
        if (repeated := self._repeated(request)) is not None:
            return repeated.length
        yield from self._check_long_texts(request, None)
        layout = yield from self._lay_out(request)
        return (layout.parent.length if layout.parent is not None else 0) + len(layout.delta) // 4

    def commit(self, prompt: PromptNode, output: Sequence[int] | Ids, reply: Message | None) -> TurnNode:
        """Record the sampled ids of a turn. `reply` is the message that the client received, or None if the client
        disconnected before the reply. In that case, no request can continue the turn."""
        key = message_key(reply, self._renderer.printed) if reply is not None else None
        turn = TurnNode(self._next_turn, prompt, pack_ids(output), key)
        self._next_turn += 1
        if prompt.first_turn is None:
            prompt.first_turn = turn.index
            self._unanswered.pop(prompt, None)
        if key is not None:
            prefix = extend(prompt.prefix_digest, key.body)
            self._turns[prefix] = (*self._turns.get(prefix, ()), turn)
            self._histories.add(turn)
        return turn

    def restore(self, turns: Sequence[Turn]) -> Steps[None]:
        """Fill this empty tree with the stored turns of an earlier attempt, sorted by index. Later requests then
        continue the same turns as they would have continued in the earlier attempt. The ids in the tree are the stored
        ids. Only requests whose tools or system prompt changed are rendered again, to find out which of the stored ids
        belong to the new head and which to the history.

        The indexes may have gaps where a turn was not stored. No stored turn continues a missing turn, because no
        client received the missing turn's reply."""
        nodes: dict[int, TurnNode] = {}
        conversations: dict[int, list[Message]] = {}
        tools: dict[int, tuple[ToolSpec, ...]] = {}
        for turn in turns:
            parent = None if turn.parent is None else nodes[turn.parent]
            messages = [*conversations[parent.index], *turn.messages] if parent is not None else list(turn.messages)
            yield len(turn.prompt_delta) + len(turn.output_ids) + BYTES_OF_A_KEY * len(messages)
            specs = tools[parent.index] if parent is not None else turn.tool_specs
            raw = msgspec.json.encode(specs) if specs else b""
            request = yield from self._index(ParsedMessages(messages), specs, raw, turn.sampling.get("thinking"))
            prompt = self._recorded_as(request, parent, turn.prompt_delta)
            if prompt is None:
                prompt = yield from self._restored(request, parent, turn)
                self._record(request, Joined(turn.join, turn.cause, prompt, turn.forked_from))
            self._next_turn = turn.index
            nodes[turn.index] = self.commit(prompt, unpack_ids(turn.output_ids), turn.reply)
            tools[turn.index] = specs
            if turn.reply is not None:
                conversations[turn.index] = [*messages, turn.reply]

    def _recorded_as(self, request: IndexedRequest, parent: TurnNode | None, delta: bytes) -> PromptNode | None:
        """Return the prompt of an earlier identical request that has the same ids, or None."""
        for prompt in self._prompts.get(request.prefixes[-1], ()):
            if prompt.parent is parent and prompt.delta == delta and request.repeats(prompt):
                return prompt
        return None

    def _restored(self, request: IndexedRequest, parent: TurnNode | None, turn: Turn) -> Steps[PromptNode]:
        """Make the prompt of a turn that was stored in an earlier attempt."""
        layout = _Layout(parent=parent, delta=turn.prompt_delta)
        if turn.cause in HEAD_CHANGES:
            found = yield from self._lay_out(request)
            if found.parent is parent and found.delta == turn.prompt_delta:
                layout = found
        prompt = request.make_prompt(parent, layout.delta, splice=layout.splice, sampled=layout.sampled)
        prompt.conversation = turn.conversation
        prompt.images = turn.images
        return prompt

    def _index(
        self, messages: WireMessages, tools: Sequence[ToolSpec], tools_raw: bytes, thinking: bool | None
    ) -> Steps[IndexedRequest]:
        """Index the request. Find the turn whose conversation is the longest recorded prefix of the request."""
        request = yield from self._indexer.index(messages, tools, tools_raw)
        request.switch = self._renderer.thinking_switch(thinking)
        checked_to = request.reasoning_checked_to
        for covered in range(len(request.keys), 0, -1):
            turns = self._turns.get(request.prefixes[covered])
            if turns is not None and (turn := _newest_agreeing(turns, request, checked_to)) is not None:
                request.matched, request.covered = turn, covered
                break
        return request

    def _repeated(self, request: IndexedRequest) -> PromptNode | None:
        """Return the prompt of an earlier identical request, or None."""
        prompts = self._prompts.get(request.prefixes[-1], ())
        return next((prompt for prompt in prompts if request.repeats(prompt)), None)

    def _check_long_texts(self, request: IndexedRequest, context: int | None) -> Steps[None]:
        """Raise ContextOverflow if the new messages' long texts alone exceed the context. Raise TooLarge if a single
        text is too long to encode, or if there is too much new text."""
        tokens = characters = 0
        for message in request.parsed.values():
            for text in (message.content, message.reasoning or "", *(call.arguments for call in message.tool_calls)):
                characters += len(text)
                if characters > MAX_NEW_TEXT:
                    raise TooLarge(f"the new messages have more than {MAX_NEW_TEXT} characters", field="messages")
                if not self._renderer.tokenizer.can_encode(text):
                    raise TooLarge(f"a text of {len(text)} characters is too long to be encoded", field="messages")
                for start in range(0, len(text) if len(text) > LONG_TEXT else 0, LONG_TEXT):
                    yield LONG_TEXT
                    tokens += len(self._renderer.tokenizer.encode(text[start : start + LONG_TEXT])) - SEAM_TOKENS
                    if context is not None and tokens > context:
                        raise ContextOverflow(
                            f"the prompt has over {tokens} tokens; the model's context is {context}",
                            overflow=Overflow(tokens, context),
                        )

    def _place(self, request: IndexedRequest, layout: _Layout) -> Joined:
        """Make the prompt of the request. Determine the kind of join and, for a fork, its cause."""
        parent, match = layout.parent, layout.match
        prompt = request.make_prompt(parent, layout.delta, splice=layout.splice, sampled=layout.sampled)
        if parent is not None and not request.is_rewritten:
            prompt.conversation = parent.prompt.conversation
            if parent.children:
                return Joined(JoinKind.FORK, ForkCause.SIBLING, prompt, parent.index)
            return Joined(JoinKind.APPEND, None, prompt, None)
        # Find the longest prefix of the request's messages that an earlier request also has. `count` is the prefix's
        # length, and `shared` is the first prompt with this prefix.
        shared: PromptNode | None = None
        count = 0
        for prefix in request.prefixes[1:]:
            sharing = self._first_with_prefix.get(prefix)
            if sharing is None:
                break
            shared, count = sharing, count + 1
        if count <= request.system_count:
            shared = None  # only system messages are shared, and many agents have the same system messages
        before = parent.prompt if parent is not None else shared
        prompt.conversation = before.conversation if before is not None else self._conversations
        if match is not None:
            prompt.fork = match.cause, match.turn.index
            return Joined(JoinKind.FORK, match.cause, prompt, match.turn.index)
        if before is None:
            return Joined(JoinKind.ROOT, None, prompt, None)
        forked_from = shared.first_turn if shared is not None else None
        if parent is not None:
            forked_from = parent.index if forked_from is None else forked_from
            return Joined(JoinKind.FORK, ForkCause.HISTORY_REWRITTEN, prompt, forked_from)
        # Part of the history is recorded, but the request is rendered as a whole. Find out why.
        new_roles = {key.role for key in request.keys[request.covered :]}
        if any(request.has_messages_of(other) for other in self._prompts.get(request.prefixes[-1], ())):
            cause = ForkCause.SIBLING  # an earlier prompt has the same messages but a different thinking switch
        elif request.matched is None or request.is_rewritten or not new_roles:
            cause = ForkCause.HISTORY_REWRITTEN
        elif self._history == "template" and new_roles & {Role.USER, Role.SYSTEM}:
            cause = ForkCause.TEMPLATE_HISTORY
        else:
            cause = ForkCause.BRIDGE_REFUSED
        return Joined(JoinKind.FORK, cause, prompt, forked_from)

    def _lay_out(self, request: IndexedRequest) -> Steps[_Layout]:
        """Return the ids of the request (rules 2 to 4 of the module's docstring)."""
        match = self._histories.find(request)
        if match is not None:
            yield request.size_from(0)
            if (spliced := self._spliced(request, match)) is not None:
                return spliced
        if request.matched is not None:
            yield request.size_from(0 if request.is_rewritten else request.covered)
            parent = request.matched
            added = self._continued(
                parent.prompt.tail(self._renderer.tail_start), parent.output, request, request.covered
            )
            if added is not None:
                return _Layout(parent=parent, delta=pack_ids(request.with_switch(added)), match=match)
        yield request.size_from(0)
        return _Layout(parent=None, delta=self._rendered(request), match=match)

    def _rendered(self, request: IndexedRequest) -> bytes:
        """Render the whole prompt without using recorded ids, and return its ids, packed."""
        return pack_ids(request.with_switch(self._renderer.render(request.parse_from(0), request.tools)))

    def _spliced(self, request: IndexedRequest, match: _HistoryMatch) -> _Layout | None:
        """Return a prompt that combines three parts: the request's own head (tools and system messages), the recorded
        ids of its history, and the later messages. The history was recorded after a different head. Returns None if the
        history's first messages have different ids after the two heads, or if the later messages cannot be appended."""
        turn = match.turn
        origin = turn.prompt
        while origin.parent is not None:
            origin = origin.parent.prompt
        recorded_head = None
        if origin.splice is not None:  # the prompt with which the history begins was itself made by this method
            recorded_head, origin = origin.splice.head, origin.splice.origin
        first_messages = range(request.system_count + origin.message_count - origin.system_count)
        split = self._renderer.render_split([request.messages.parse(at) for at in first_messages], request.tools)
        if split is None or not origin.delta.endswith(pack_ids(split.history)):
            return None
        if recorded_head is None:
            recorded_head = len(origin.delta) // 4 - len(split.history)
        prompt = [*split.head, *turn.prompt.ids()[recorded_head:].tolist()]
        tail = prompt[self._renderer.tail_start(prompt) :]
        added = self._continued(tail, turn.output, request, match.covered)
        if added is None:
            return None
        ids = pack_ids(request.with_switch([*prompt, *unpack_ids(turn.output).tolist(), *added]))
        shift = request.system_count - turn.prompt.system_count
        layout = _Layout(
            parent=None,
            delta=ids,
            match=match,
            splice=Splice(len(split.head), origin),
            sampled=[(at + shift, reasoning) for at, reasoning in recorded_reasoning(turn)],
        )
        # Two agents may alternate on the same history. If the ids begin with the ids of this agent's own last turn,
        # make this last turn the parent, so that all turns of the agent are in one training row.
        own = request.matched
        if own is not None and ids.startswith(before := own.prompt.ids().tobytes() + own.output):
            return msgspec.structs.replace(layout, parent=own, delta=ids[len(before) :])
        return layout

    def _continued(self, tail: Sequence[int], output: bytes, request: IndexedRequest, covered: int) -> list[int] | None:
        """Return the ids of the messages from position `covered` on. The caller appends them to the ids of the earlier
        messages, which end with `tail` and then `output` (packed ids). Returns None if the renderer cannot prove that
        appending leaves the earlier ids unchanged."""
        sampled: list[int] = unpack_ids(output).tolist()
        if any(key.role is Role.ASSISTANT for key in request.keys[covered:]):
            messages = request.parse_from(0)
            return self._renderer.bridge_rewritten(tail, sampled, messages, covered, request.tools, self._history)
        return self._renderer.bridge(tail, sampled, request.parse_from(covered), request.tools, self._history)

    def _record(self, request: IndexedRequest, joined: Joined) -> None:
        """Add the new prompt of a request to the tree."""
        prompt = joined.prompt
        size = len(prompt.delta) + BYTES_OF_A_PROMPT + BYTES_OF_A_REPLY * len(prompt.rendered_replies)
        if self._unanswered_size + size > MAX_UNANSWERED:
            self._unanswered_size = self._limit_unanswered(MAX_UNANSWERED - size)
        self._unanswered[prompt] = size
        self._unanswered_size += size
        self._conversations = max(self._conversations, prompt.conversation + 1)
        self._indexer.remember(request, prompt)
        whole = request.prefixes[-1]
        self._prompts[whole] = (*self._prompts.get(whole, ()), prompt)
        if len(self._first_with_prefix) > MAX_SEEN_PREFIXES:
            self._first_with_prefix.clear()
        for prefix in reversed(request.prefixes):
            # If a prefix is already stored, all shorter prefixes are stored, too. So the loop can end here, and the
            # cost of the loop depends only on the new messages.
            if self._first_with_prefix.setdefault(prefix, prompt) is not prompt:
                break
        if prompt.parent is not None:
            prompt.parent.children += 1
        if joined.cause is not None:
            self.forks[joined.cause] = self.forks.get(joined.cause, 0) + 1

    def _limit_unanswered(self, most: int) -> int:
        """Drop all prompts from which no turn was sampled, if they have more than `most` bytes. Returns the size of
        the remaining prompts."""
        # `list` copies the dictionary at once. The event loop may remove a prompt while this method runs in the worker
        # thread. For the same reason, `commit` does not change `_unanswered_size`.
        unanswered = list(self._unanswered.items())
        total = sum(size for _, size in unanswered)
        if total <= most:
            return total
        for prompt, _ in unanswered:
            self._unanswered.pop(prompt, None)
            same = self._prompts.pop(prompt.prefix_digest, ())
            if others := tuple(other for other in same if other is not prompt):
                self._prompts[prompt.prefix_digest] = others
        # All prefixes are dropped, because a stored prefix must have all shorter prefixes stored, too.
        self._first_with_prefix.clear()
        return 0


class _HistoryIndex:
    """Finds turns by the digest of their history and reply. Their tools and system messages may differ."""

    def __init__(self) -> None:
        self._turns: dict[bytes, list[TurnNode]] = {}
        self._unindexed: deque[TurnNode] = deque()

    def add(self, turn: TurnNode) -> None:
        if turn.prompt.message_count > turn.prompt.system_count:
            self._unindexed.append(turn)

    def find(self, request: IndexedRequest) -> _HistoryMatch | None:
        """Find the turn whose history and reply cover the most messages of the request's history, counted from the
        history's beginning. The turn may have another head (tools and system messages). Returns None unless the turn
        covers more messages than are recorded after the request's own head (`request.covered`)."""
        if not request.is_rewritten:
            return None
        # Turns are indexed only now, when a request needs the index. In most sessions, no request needs it, because the
        # tools and system messages do not change. Take the turns one at a time, because the event loop may add a turn
        # while this method runs in the worker thread.
        while self._unindexed:
            turn = self._unindexed.popleft()
            assert turn.reply_digest is not None
            self._turns.setdefault(extend(turn.prompt.history_digest, turn.reply_digest), []).append(turn)
        system_count = request.system_count
        digest, ends = b"", []
        for at, key in enumerate(request.keys[system_count:], system_count):
            digest = extend(digest, key.body)
            if at >= request.covered and key.role is Role.ASSISTANT and digest in self._turns:
                ends.append((at + 1, digest))
        for covered, digest in reversed(ends):
            found = _newest_agreeing(self._turns[digest], request, None)
            if found is not None:
                if found.prompt.system_digest == request.system_digest:
                    return _HistoryMatch(found, covered, ForkCause.TOOLS_CHANGED)
                same_tools = found.prompt.tools_digest == request.tools_digest
                cause = ForkCause.SYSTEM_CHANGED if same_tools else ForkCause.TOOLS_AND_SYSTEM_CHANGED
                return _HistoryMatch(found, covered, cause)
        return None


def _newest_agreeing(
    turns: Sequence[TurnNode], request: IndexedRequest, checked_to: PromptNode | None
) -> TurnNode | None:
    """Return one of several turns with equal conversations, or None. The request must repeat or drop the turn's
    recorded reasoning (`reasoning_agrees`). Among such turns, the newest whose call ids are in the request wins. If the
    client replaced the call ids of all these turns, the newest turn wins."""
    agreeing: list[tuple[TurnNode, list[MessageKey]]] = []
    for turn in reversed(turns):
        keys, system_count = request.keys, turn.prompt.system_count
        if system_count != request.system_count:
            # The turn has a different number of system messages, so shift the keys to their positions in the turn. The
            # first `system_count` keys are only fillers, which are not compared.
            keys = [*(keys[:1] * system_count), *keys[request.system_count :]]
        if reasoning_agrees(turn, keys, checked_to):
            agreeing.append((turn, keys))
    if len(agreeing) > 1:
        for turn, keys in agreeing:
            if call_ids_agree(turn, keys):
                return turn
    return agreeing[0][0] if agreeing else None
