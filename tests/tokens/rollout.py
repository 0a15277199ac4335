"""A session as the gateway runs it, with sampled ids from the test instead of an engine. Every join is checked
independently.

The check shares no code with the tree: it keeps the messages that each prompt's ids show, and compares messages field
by field.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import Any

import msgspec

from outrider.lifecycle import StopReason
from outrider.messages import Message, ParsedMessages, Role, ToolSpec
from outrider.sample_columns import decode, encode
from outrider.store.rows import StoredTurns, pack
from outrider.tokens.branches.classify import is_one_conversation, lineages, lineages_by_rules
from outrider.tokens.rendering.renderer import History, Renderer
from outrider.tokens.rendering.reply_stream import ReplyStream
from outrider.tokens.samples import (
    POLICY,
    Policy,
    build_samples,
    build_samples_of_conversation,
    count_session,
    model_calls,
)
from outrider.tokens.tree.request_index import PromptNode
from outrider.tokens.tree.tree import Joined, TokenTree
from outrider.trajectory import (
    HEAD_CHANGES,
    BranchKind,
    BranchPolicy,
    FinishReason,
    ForkCause,
    JoinKind,
    JsonSample,
    LogprobKind,
    Sample,
    SessionResult,
    Turn,
    TurnTimings,
    Verdict,
    VersionSpan,
    pack_ids,
    pack_logprobs,
    sample_json,
)
from support.steps import run_inline

TRIMMING = ("qwen3.5", "qwen3.6")
TURN_OPEN = "<|im_start|>"
IM_START = 1
RESULT = SessionResult(
    session_id="s",
    group_id="g",
    sample_index=0,
    attempt=1,
    stop_reason=StopReason.COMPLETED,
    verdict=Verdict(reward=1.0),
)


class Rollout:
    """`given[i]` are the ids that the engine was given for turn `i`, `gave[i]` those that it sampled, and `logprobs[i]`
    their log-probabilities."""

    def __init__(self, renderer: Renderer, history: History = "recorded") -> None:
        self.renderer = renderer
        self.tree = TokenTree(renderer, history)
        self.history: History = history
        self.turns: list[Turn] = []
        self.given: list[list[int]] = []
        self.gave: list[list[int]] = []
        self.logprobs: list[list[float]] = []
        self.causes: Counter[ForkCause] = Counter()
        self._said: dict[int, list[Message]] = {}
        # The messages that a prompt shows: `_asked` by the index of the prompt's first turn, `_meant` by `id(prompt)`,
        # which is used while the prompt has no turn.
        self._asked: dict[int, list[Message]] = {}
        self._meant: dict[int, list[Message]] = {}
        self._prompts: list[PromptNode] = []
        self._ticks = 0
        self._came: list[tuple[Joined, tuple[ToolSpec, ...], int]] = []

    def join(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Joined:
        joined = run_inline(self.tree.join(ParsedMessages(messages), tools, raw_of(tools)))
        self._check(joined, list(messages), tools)
        self._came.append((joined, tuple(tools), self._tick()))
        return joined

    def _tick(self) -> int:
        """Return the time, which advances by one with each call."""
        self._ticks += 1
        return self._ticks

    def answer(
        self,
        joined: Joined,
        output: Sequence[int],
        *,
        tools: Sequence[ToolSpec] = (),
        finish: FinishReason = FinishReason.STOP,
    ) -> Message:
        """Sample `output` for a joined request, record the turn, return the reply."""
        prompt = joined.prompt
        aborted = finish is FinishReason.ABORT
        reading = ReplyStream(
            self.renderer,
            prompt_tail=prompt.tail(self.renderer.tail_start),
            tools=tools,
            stop=(),
            call_id=str(len(self.turns)),
        )
        reading.push(output)
        reply = reading.finish().message
        given = prompt.ids().tolist()
        node = self.tree.commit(prompt, output, None if aborted else reply)
        assert node.index == len(self.turns)
        logprobs = [-(len(self.turns) + index / 1000) for index in range(len(output))]
        half = len(output) // 2
        offered, received = next((tools, came) for one, tools, came in self._came if one is joined)
        self.turns.append(
            Turn(
                index=node.index,
                parent=prompt.parent.index if prompt.parent else None,
                conversation=prompt.conversation,
                tools=prompt.tools_digest,
                join=joined.kind,
                cause=joined.cause,
                forked_from=joined.forked_from,
                prompt_length=prompt.length,
                prompt_delta=prompt.delta,
                output_ids=pack_ids(output),
                logprobs=pack_logprobs(logprobs),
                logprob_kind=LogprobKind.RAW,
                versions=(VersionSpan(3, 0, half), VersionSpan(4, half, len(output))),
                finish=finish,
                dialect="test",
                engine="test",
                sampling={},
                messages=joined.added,
                reply=None if aborted else reply,
                tool_specs=() if prompt.parent else offered,
                timings=TurnTimings(received=received, first_token=None, finished=self._tick()),
            )
        )
        assert prompt.first_turn is not None
        if prompt.first_turn == node.index:
            self._asked[node.index] = self._meant[id(prompt)]
        self.given.append(given)
        self.gave.append(list(output))
        self.logprobs.append(logprobs)
        if not aborted:
            self._said[node.index] = [*self._asked[prompt.first_turn], reply]
        return reply

    def _check(self, joined: Joined, messages: list[Message], tools: Sequence[ToolSpec]) -> None:
        prompt = joined.prompt
        again = prompt.first_turn is not None or any(prompt is known for known in self._prompts)
        if again or joined.kind is JoinKind.RETRY:
            assert again
            assert joined.kind is JoinKind.RETRY or (prompt.first_turn is None and joined.cause in HEAD_CHANGES)
        else:
            behind_another = joined.cause in HEAD_CHANGES
            check = self._checked_splice if behind_another else self._checked_ids
            self._meant[id(prompt)] = check(joined, messages, tools)
            self._prompts.append(prompt)
        meant = self._meant[id(prompt)] if prompt.first_turn is None else self._asked[prompt.first_turn]
        trims = self.renderer.family in TRIMMING
        for sent, known in zip(messages, meant, strict=True):
            assert says(sent, known, trims=trims), "the prompt says something that the client did not"
        assert (joined.kind is JoinKind.FORK) == (joined.cause is not None)
        if joined.kind is not JoinKind.RETRY and joined.cause not in {ForkCause.HISTORY_REWRITTEN, *HEAD_CHANGES}:
            keeps_ids = joined.kind is JoinKind.APPEND or joined.cause is ForkCause.SIBLING
            assert keeps_ids == (prompt.parent is not None)
        if joined.cause is not None and not again:
            self.causes[joined.cause] += 1
        assert self.tree.forks == dict(self.causes)

    def _checked_splice(self, joined: Joined, messages: list[Message], tools: Sequence[ToolSpec]) -> list[Message]:
        """Check that the prompt has the request's own head, then the ids recorded behind another head, then the new
        messages. Returns the messages that the prompt shows. The recorded ids may be missing only if the new
        messages cannot be appended to them, or if their history began with replies sent by the client."""
        ids, index = joined.prompt.ids().tolist(), joined.forked_from
        assert index is not None
        before, said = self.turns[index], self._said[index]
        assert (leading(said), before.tools) != (leading(messages), joined.prompt.tools_digest), "nothing changed"
        known = said[len(leading(said)) :]
        new = messages[len(leading(messages)) + len(known) :]
        bridged = None
        if all(message.role is not Role.ASSISTANT for message in new):
            bridged = self.renderer.bridge(self.given[index], self.gave[index], new, tools, self.history)
        if joined.prompt.splice is None:
            assert bridged is None or self._begins_with_a_quote(index), "recorded ids were left out"
            return self._checked_ids(joined, messages, tools)
        behind = self._without_head(ids, messages, bool(tools))
        assert (
            ids[: len(ids) - len(behind)]
            + self._without_head(rendered := self.renderer.render(messages, tools), messages, bool(tools))
            == rendered
        ), "the head is another"
        recorded = self._without_head(self.given[index], said, bool(before.tools)) + self.gave[index]
        assert behind[: len(recorded)] == recorded, "the recorded ids are not there"
        if bridged is None:
            covered = len(messages) - len(new)
            self._check_rejoined(behind[len(recorded) :], messages, covered, tools)
        else:
            assert behind[len(recorded) :] == bridged
        if (parent := joined.prompt.parent) is not None:
            kept = self.given[parent.index] + self.gave[parent.index]
            assert ids[: len(kept)] == kept
        return [*leading(messages), *known, *new]

    def _begins_with_a_quote(self, index: int) -> bool:
        """Whether the turn's history began with assistant messages sent by the client. Clients may send such messages
        back in another form."""
        while (parent := self.turns[index].parent) is not None:
            index = parent
        begin = self.turns[index].messages
        return any(message.role is Role.ASSISTANT for message in begin)

    def _without_head(self, ids: list[int], messages: Sequence[Message], has_tools: bool) -> list[int]:
        """The ids after the leading system turns. Tools without a system message count as one turn."""
        systems = len(leading(messages))
        turns = systems if self.renderer.family == "qwen3" else min(systems, 1)
        starts = [at for at, token in enumerate(ids) if token == IM_START]
        return ids[starts[turns or has_tools] :]

    def _checked_ids(self, joined: Joined, messages: list[Message], tools: Sequence[ToolSpec]) -> list[Message]:
        """Check the prompt's ids. Returns the messages that they show."""
        prompt = joined.prompt
        ids = prompt.ids().tolist()
        assert len(ids) == prompt.length
        if prompt.parent is None:
            assert ids == self.renderer.render(messages, tools)
            return messages
        index = prompt.parent.index
        before, output = self.given[index], self.gave[index]
        assert ids[: len(before) + len(output)] == before + output
        said = self._said[index]
        new = messages[len(said) :]
        added = ids[len(before) + len(output) :]
        if any(message.role is Role.ASSISTANT for message in new):
            self._check_rejoined(added, messages, len(said), tools)
        else:
            assert added == self.renderer.bridge(before, output, new, tools, self.history)
        return [*said, *new]

    def _check_rejoined(
        self, added: Sequence[int], messages: list[Message], covered: int, tools: Sequence[ToolSpec]
    ) -> None:
        """Check that the text after the recorded ids equals the end of the whole conversation's rendering."""
        decode = self.renderer.tokenizer.decode
        own = decode(list(added)).split(TURN_OPEN)[1:]
        whole = decode(self.renderer.render(messages, tools)).split(TURN_OPEN)
        assert own == whole[-len(own) :]
        spoken = sum(message.role is not Role.TOOL for message in messages[covered:])
        results = sum(
            message.role is Role.TOOL and before.role is not Role.TOOL
            for before, message in pairwise(messages[covered - 1 :])
        )
        assert len(own) == spoken + results + 1, "a message is missing or there is one too many"

    def check_samples(self, policy: Policy = POLICY) -> list[Sample]:
        due = {turn.index: turn.index + 0.5 for turn in self.turns}
        result = msgspec.structs.replace(RESULT, policy=dict(policy), verdict=Verdict(reward=1.0, turns=due))
        samples = build_samples(self.turns, result)
        assert len(samples) == count_session(self.turns, policy).samples
        self._check_lineages()
        outlines = StoredTurns([pack(turn) for turn in self.turns]).outlines()
        assert is_one_conversation(outlines) == is_one_conversation(self.turns)
        if is_one_conversation(outlines):
            assert build_samples_of_conversation(outlines, result) == samples
        kinds = [lineage.kind for lineage in lineages(self.turns)]
        calls = model_calls(self.turns, policy)
        trained: Counter[int] = Counter()
        for sample in samples:
            in_row = self._checked_sample(sample)
            trained.update(in_row)
            assert sample.turn_rewards == tuple(due[index] if index in in_row else None for index in sample.turns)
            ends = {index: end for index, (_, end) in zip(sample.turns, sample.turn_spans, strict=True)}
            rewards = sample.token_rewards()
            assert {at for at, reward in enumerate(rewards) if reward} == {ends[index] - 1 for index in in_row}
            assert sum(rewards) == sum(due[index] for index in in_row) + (sample.reward or 0.0)
            assert all(calls[index].row == sample.row for index in in_row)
            assert policy[sample.kind] is not BranchPolicy.DROP
            assert (sample.reward is None) == (policy[sample.kind] is BranchPolicy.MASK) == (not any(sample.loss_mask))
        for turn in self.turns:
            trains = bool(turn.output_ids) and policy[kinds[turn.index]] is BranchPolicy.TRAIN
            assert trained[turn.index] == (1 if trains else 0), "a turn is not trained on, or twice"
            assert not turn.output_ids or (calls[turn.index].row is not None) == trains
        counts = count_session(self.turns, policy).tokens
        assert counts.sampled == sum(map(len, self.gave)) == counts.trained + counts.masked + counts.dropped
        assert counts.trained == sum(sum(sample.loss_mask) for sample in samples)
        held = {index for sample in samples for index in sample.turns}
        assert counts.dropped == sum(len(gave) for index, gave in enumerate(self.gave) if index not in held)
        assert [sample.row for sample in samples] == list(range(len(samples)))
        assert all(sample.rows == len(samples) for sample in samples)
        assert decode(encode(samples, b"{}")).samples == samples
        in_json = [msgspec.json.decode(sample_json(sample), type=JsonSample) for sample in samples]
        assert [sample.sample() for sample in in_json] == samples
        return samples

    def _check_lineages(self) -> None:
        lines = lineages(self.turns)
        assert len(lines) == len(self.turns)
        if is_one_conversation(self.turns):
            assert lines == lineages_by_rules(self.turns)
        for turn, line in zip(self.turns, lines, strict=True):
            assert (line.kind is BranchKind.ABORTED) == (turn.finish is FinishReason.ABORT)
            assert line.depth > 0 or line.kind not in (BranchKind.SUBAGENT, BranchKind.AUXILIARY)
            assert line.depth == 0 or line.kind is not BranchKind.MAIN
            if line.parent is not None and line.kind is not BranchKind.RETRY:
                assert line.parent < turn.index
        # The first turn of the main conversation may have been cut off and continued by a fork. Then no turn has the
        # rule `main`.
        begun = any(line.rule == "main" or (line.kind is BranchKind.ABORTED and not line.depth) for line in lines)
        begun = begun or any(turn.declared is BranchKind.MAIN for turn in self.turns)
        assert begun or not any(line.kind is BranchKind.MAIN for line in lines)

    def _checked_sample(self, sample: Sample) -> list[int]:
        """Check that the columns equal the ids that the engine was given and the ids that it sampled. Returns the turns
        that train."""
        last = sample.turns[-1]
        assert sample.ids.tolist() == self.given[last] + self.gave[last]
        assert len(sample.ids) == len(sample.loss_mask) == len(sample.logprobs) == len(sample.versions)
        assert sample.prompt_length == len(self.given[sample.turns[0]])
        trained, at = [], 0
        for index in sample.turns:
            start, end = len(self.given[index]), len(self.given[index]) + len(self.gave[index])
            assert (start, end) in sample.turn_spans
            assert not any(sample.loss_mask[at:start])
            assert sample.ids[start:end].tolist() == self.gave[index]
            masks = sample.loss_mask[start:end].tolist()
            assert masks in ([0] * len(masks), [1] * len(masks))
            if any(masks):
                trained.append(index)
                half = len(masks) // 2
                assert sample.logprobs[start:end].tolist() == self.logprobs[index]
                assert sample.versions[start:end].tolist() == [3] * half + [4] * (len(masks) - half)
            at = end
        assert at == len(sample.ids)
        context = [at for at, mask in enumerate(sample.loss_mask) if not mask]
        assert all(sample.logprobs[at] == 0.0 and sample.versions[at] == -1 for at in context)
        return trained


def raw_of(tools: Sequence[ToolSpec]) -> bytes:
    return json.dumps(list(tools)).encode() if tools else b""


def leading(messages: Sequence[Message]) -> list[Message]:
    """The system messages at the beginning."""
    return list(takewhile(lambda message: message.role is Role.SYSTEM, messages))


def says(sent: Message, meant: Message, *, trims: bool = False) -> bool:
    """Whether a client's message equals the recorded one, up to changes that clients are known to make. Call ids and
    names of messages are not compared, because the prompts of the families tested here do not contain them. `trims` is
    True for families that trim the text of messages other than the assistant's."""
    if sent.role is not meant.role:
        return False
    if sent.role is not Role.ASSISTANT:
        return sent.content == meant.content or (trims and sent.content.strip() == meant.content.strip())
    reasoning = (sent.reasoning or "").strip()
    thought = (meant.reasoning or "").strip()
    if reasoning and reasoning != thought and [thought, thought] != halves(reasoning):
        return False
    pairs = list(zip(sent.tool_calls, meant.tool_calls, strict=False))
    return (
        sent.content.strip() == meant.content.strip()
        and len(sent.tool_calls) == len(meant.tool_calls)
        and all(a.name == b.name and same_json(a.arguments, b.arguments) for a, b in pairs)
    )


def halves(text: str) -> list[str]:
    return [text[: len(text) // 2].strip(), text[len(text) - len(text) // 2 :].strip()]


def same_json(one: str, other: str) -> bool:
    try:
        return identical(json.loads(one), json.loads(other))
    except (ValueError, RecursionError):
        return one == other


def identical(one: Any, other: Any) -> bool:
    """Equal as JSON values. Numbers compare by value; True is not 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(identical(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(identical, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
