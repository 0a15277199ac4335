"""A session as the gateway runs it, over a made-up engine, with a second opinion on every join.

The second opinion shares no code with the tree: it keeps, for every prompt, the messages that its ids say to the
model, and compares messages field by field.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from outrider.lifecycle import StopReason
from outrider.messages import Message, ParsedMessages, Role, ToolSpec
from outrider.tokens.renderer import FamilyRenderer, History
from outrider.tokens.samples import build_samples, count_samples, count_tokens
from outrider.tokens.stream import ReplyStream
from outrider.tokens.tree import Joined, PromptNode, TokenTree
from outrider.trajectory import (
    FinishReason,
    ForkCause,
    JoinKind,
    LogprobKind,
    Sample,
    SessionResult,
    Turn,
    TurnTimings,
    Verdict,
    VersionSpan,
    pack_ids,
    pack_logprobs,
)

RESULT = SessionResult(
    session_id="s",
    group_id="g",
    sample_index=0,
    attempt=1,
    stop_reason=StopReason.COMPLETED,
    verdict=Verdict(reward=1.0),
)


class Rollout:
    """`given[i]`, `gave[i]` and `logprobs[i]` are what the engine was given and gave for turn `i`."""

    def __init__(self, renderer: FamilyRenderer, history: History = "recorded") -> None:
        self.renderer = renderer
        self.tree = TokenTree(renderer, history)
        self.history: History = history
        self.turns: list[Turn] = []
        self.given: list[list[int]] = []
        self.gave: list[list[int]] = []
        self.logprobs: list[list[float]] = []
        self.causes: Counter[ForkCause] = Counter()
        self._said: dict[int, list[Message]] = {}
        self._meant: dict[int, list[Message]] = {}
        self._prompts: list[PromptNode] = []

    def join(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Joined:
        raw = json.dumps(list(tools)).encode() if tools else b""
        joined = self.tree.join(ParsedMessages(messages), tools, raw)
        self._check(joined, list(messages), tools)
        return joined

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
            self.renderer, prompt_tail=prompt.tail(self.renderer), tools=tools, stop=(), call_id=str(len(self.turns))
        )
        reading.push(output)
        reply = reading.finish().message
        given = prompt.ids().tolist()
        node = self.tree.commit(prompt, output, None if aborted else reply)
        assert node.index == len(self.turns)
        logprobs = [-(len(self.turns) + index / 1000) for index in range(len(output))]
        half = len(output) // 2
        self.turns.append(
            Turn(
                index=node.index,
                parent=prompt.parent.index if prompt.parent else None,
                conversation=prompt.conversation,
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
                timings=TurnTimings(received=0.0, first_token=None, finished=0.0),
            )
        )
        self.given.append(given)
        self.gave.append(list(output))
        self.logprobs.append(logprobs)
        if not aborted:
            self._said[node.index] = [*self._meant[id(prompt)], reply]
        return reply

    def _check(self, joined: Joined, messages: list[Message], tools: Sequence[ToolSpec]) -> None:
        prompt = joined.prompt
        if joined.kind is JoinKind.RETRY:
            assert any(prompt is known for known in self._prompts)
        else:
            self._meant[id(prompt)] = self._checked_ids(prompt, messages, tools)
            self._prompts.append(prompt)
        meant = self._meant[id(prompt)]
        assert len(meant) == len(messages)
        assert all(map(says, messages, meant)), "the prompt says something that the client did not"
        assert (joined.kind is JoinKind.FORK) == (joined.cause is not None)
        if joined.kind is not JoinKind.RETRY:
            keeps_ids = joined.kind is JoinKind.APPEND or joined.cause is ForkCause.SIBLING
            assert keeps_ids == (prompt.parent is not None)
        if joined.cause is not None:
            self.causes[joined.cause] += 1
        assert self.tree.forks == dict(self.causes)

    def _checked_ids(self, prompt: PromptNode, messages: list[Message], tools: Sequence[ToolSpec]) -> list[Message]:
        """The prompt's ids are what they should be; the messages that they say."""
        ids = prompt.ids().tolist()
        assert len(ids) == prompt.length
        if prompt.parent is None:
            assert ids == self.renderer.render(messages, tools)
            return messages
        index = prompt.parent.index
        before, output = self.given[index], self.gave[index]
        assert ids[: len(before) + len(output)] == before + output
        said = self._said[index]
        added = self.renderer.bridge(before, output, messages[len(said) :], tools, self.history)
        assert added == ids[len(before) + len(output) :]
        return [*said, *messages[len(said) :]]

    def check_samples(self) -> list[Sample]:
        samples = build_samples(self.turns, RESULT)
        assert len(samples) == count_samples(self.turns)
        trained: Counter[int] = Counter()
        for sample in samples:
            trained.update(self._checked_sample(sample))
        seen = {turn.index for turn in self.turns if turn.output_ids and turn.finish is not FinishReason.ABORT}
        assert set(trained) == seen
        assert all(count == 1 for count in trained.values()), "a turn is trained on twice"
        counts = count_tokens(self.turns)
        assert counts.sampled == sum(map(len, self.gave)) == counts.trained + counts.masked + counts.dropped
        assert counts.trained == sum(sum(sample.loss_mask) for sample in samples)
        assert [sample.row for sample in samples] == list(range(len(samples)))
        assert all(sample.rows == len(samples) for sample in samples)
        return samples

    def _checked_sample(self, sample: Sample) -> list[int]:
        """The turns it trains on; its columns are exactly what the engine was given and gave."""
        last = sample.turns[-1]
        assert sample.ids == self.given[last] + self.gave[last]
        assert len(sample.ids) == len(sample.loss_mask) == len(sample.logprobs) == len(sample.versions)
        assert sample.prompt_length == len(self.given[sample.turns[0]])
        trained, at = [], 0
        for index in sample.turns:
            start, end = len(self.given[index]), len(self.given[index]) + len(self.gave[index])
            assert not any(sample.loss_mask[at:start])
            assert sample.ids[start:end] == self.gave[index]
            masks = sample.loss_mask[start:end]
            assert masks in ([0] * len(masks), [1] * len(masks))
            if any(masks):
                trained.append(index)
                half = len(masks) // 2
                assert sample.logprobs[start:end] == self.logprobs[index]
                assert sample.versions[start:end] == [3] * half + [4] * (len(masks) - half)
            at = end
        assert at == len(sample.ids)
        context = [at for at, mask in enumerate(sample.loss_mask) if not mask]
        assert all(sample.logprobs[at] == 0.0 and sample.versions[at] == -1 for at in context)
        return trained


def says(sent: Message, meant: Message) -> bool:
    """Whether a client's message is the one the model knows, as far as clients are known to preserve it."""
    if sent.role is not meant.role or sent.tool_call_id != meant.tool_call_id:
        return False
    if sent.role is not Role.ASSISTANT:
        return sent.content == meant.content and (sent.role is not Role.USER or sent.name == meant.name)
    reasoning = (sent.reasoning or "").strip()
    if reasoning and reasoning != (meant.reasoning or "").strip():
        return False
    pairs = list(zip(sent.tool_calls, meant.tool_calls, strict=False))
    return (
        sent.content.strip() == meant.content.strip()
        and len(sent.tool_calls) == len(meant.tool_calls)
        and all(a.id == b.id and a.name == b.name and same_json(a.arguments, b.arguments) for a, b in pairs)
    )


def same_json(one: str, other: str) -> bool:
    try:
        return identical(json.loads(one), json.loads(other))
    except (ValueError, RecursionError):
        return one == other


def identical(one: Any, other: Any) -> bool:
    """Equal as JSON: numbers by value, but never True as 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(identical(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(identical, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
