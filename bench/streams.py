"""The cost of passing one sampled token to a streamed reply, in microseconds of processor time, by dialect.

A reply of text from the corpus is passed one token at a time to `ReplyStream` (*parse*). The resulting deltas are
passed to the dialect's writer (*write*). Finally, both are done token by token, as in a call. The costs of the reply's
beginning and end are spread over its tokens. No engine and no transport are involved.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from bench.corpus import Corpus
from bench.speakers import DIALECTS, MODEL, Speaker
from outrider import dialects
from outrider.dialects.base import Completion, Dialect, ModelRequest, Opening
from outrider.messages import Delta, Message, ToolSpec
from outrider.tokens.rendering.renderer import Renderer, make_renderer
from outrider.tokens.rendering.reply_stream import ReplyPart, ReplyStream
from outrider.trajectory import FinishReason

PROMPT_TOKENS = 500
CALL_ID = "0123456789ab"
TOOL: ToolSpec = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
"""The tool that the request offers, so that all text is searched for the beginning of a tool call."""


class Sampled(msgspec.Struct, frozen=True):
    """A reply to be streamed, and the end of the prompt before it."""

    renderer: Renderer
    prompt: list[int]
    ids: list[int]

    @classmethod
    def make(cls, corpus: Corpus, tokens: int) -> Sampled:
        """Draw a reply of about `tokens` tokens."""
        renderer = make_renderer(corpus.tokenizer, "qwen3")
        ids = corpus.tokenizer.encode(corpus.tokens(tokens)) + corpus.reply(1)
        return cls(renderer, corpus.tokenizer.encode("<|im_start|>assistant\n"), ids)

    def stream(self) -> ReplyStream:
        return ReplyStream(self.renderer, prompt_tail=self.prompt, tools=(TOOL,), stop=(), call_id=CALL_ID)


class Parsed(msgspec.Struct, frozen=True):
    """A reply as its stream parses it."""

    deltas: list[Delta]
    message: Message

    @classmethod
    def of(cls, sampled: Sampled) -> Parsed:
        stream = sampled.stream()
        deltas = [_delta(stream.push([token]), [token]) for token in sampled.ids]
        reply = stream.finish()
        return cls([*deltas, _delta(reply.rest)], reply.message)


class Writing(msgspec.Struct, frozen=True):
    """A request to which a dialect streams its reply."""

    dialect: Dialect
    request: ModelRequest

    @classmethod
    def make(cls, speaker: Speaker, text: str) -> Writing:
        dialect = next(one for one in dialects.DIALECTS if one.name == speaker.dialect)
        body = speaker.talk(max_tokens=1 << 16, stream=True).ask(text)
        return cls(dialect, dialect.parse(speaker.streamed, body, {}))


def measure(corpus: Corpus, *, tokens: int, rounds: int) -> dict[str, Any]:
    """Return medians over the rounds. Blocks of all dialects alternate."""
    sampled = Sampled.make(corpus, tokens)
    prompt = corpus.tokens(PROMPT_TOKENS)
    writings = [(speaker.name, Writing.make(speaker, prompt)) for speaker in DIALECTS]
    parsed = Parsed.of(sampled)
    sent = {name: sum(map(len, write(parsed, writing))) for name, writing in writings}
    spent: dict[str, list[float]] = {}
    for _ in range(rounds):
        spent.setdefault("parse", []).append(_cpu_us(partial(parse, sampled)))
        for name, writing in writings:
            spent.setdefault(f"write {name}", []).append(_cpu_us(partial(write, parsed, writing)))
            spent.setdefault(f"both {name}", []).append(_cpu_us(partial(both, sampled, writing)))
    each = {name: statistics.median(times) / len(sampled.ids) for name, times in spent.items()}
    return {
        "tokens": len(sampled.ids),
        "parse_us": each["parse"],
        "dialects": {
            name: {
                "write_us": each[f"write {name}"],
                "both_us": each[f"both {name}"],
                "bytes_per_token": sent[name] / len(sampled.ids),
            }
            for name, _ in writings
        },
    }


def parse(sampled: Sampled) -> Message:
    """Parse the reply one token at a time."""
    stream = sampled.stream()
    for token in sampled.ids:
        stream.push([token])
    return stream.finish().message


def write(parsed: Parsed, writing: Writing) -> list[bytes]:
    """Return the bytes sent to a client, delta by delta."""
    writer = writing.dialect.stream(writing.request)
    opened = writer.open(_opening())
    written = [writer.delta(delta) for delta in parsed.deltas]
    return [opened, *written, writer.close(_completion(parsed.message, len(parsed.deltas) - 1))]


def both(sampled: Sampled, writing: Writing) -> list[bytes]:
    """Return the same bytes made from the tokens. Each token is parsed and written before the next."""
    stream, writer = sampled.stream(), writing.dialect.stream(writing.request)
    opened = writer.open(_opening())
    written = [writer.delta(_delta(stream.push([token]), [token])) for token in sampled.ids]
    reply = stream.finish()
    rest = writer.delta(_delta(reply.rest))
    return [opened, *written, rest, writer.close(_completion(reply.message, len(sampled.ids)))]


def _delta(part: ReplyPart, ids: list[int] | None = None) -> Delta:
    return Delta(text=part.text, reasoning=part.reasoning, ids=ids or [])


def _opening() -> Opening:
    return Opening(id=CALL_ID, created=0, model=MODEL, prompt_tokens=PROMPT_TOKENS)


def _completion(reply: Message, tokens: int) -> Completion:
    return Completion(
        id=CALL_ID,
        created=0,
        model=MODEL,
        reply=reply,
        finish=FinishReason.STOP,
        prompt_tokens=PROMPT_TOKENS,
        completion_tokens=tokens,
    )


def _cpu_us(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return 1e6 * (time.process_time() - begun)
