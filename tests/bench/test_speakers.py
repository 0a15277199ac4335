"""The benchmarks' clients: their requests continue the recorded conversation, and they recognise the end of a
stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import orjson
import pytest
from bench.corpus import Corpus
from bench.speakers import DIALECTS, MESSAGES, STORED_RESPONSES, Speaker
from bench.streams import Parsed, Sampled, Writing, both, write

from outrider import dialects
from outrider.dialects.base import Action, Completion, Memory, RouteTable
from outrider.engines.base import EngineOptions
from outrider.engines.pool.pool import EnginePool
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from outrider.sessions.calls.call import ModelBackend
from outrider.sessions.conversation import Conversation
from outrider.spec import Limits, SamplingSpec
from outrider.tokens.rendering.renderer import make_renderer
from outrider.trajectory import JoinKind, Turn, unpack_ids

REPLY_TOKENS = 12

every_speaker = pytest.mark.parametrize(
    "speaker", [*DIALECTS, STORED_RESPONSES], ids=lambda speaker: speaker.name.replace(", ", "-")
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus.make(tmp_path_factory.mktemp("tokenizer"))


@every_speaker
async def test_a_talk_goes_on_where_it_was(speaker: Speaker, corpus: Corpus) -> None:
    talk = speaker.talk(max_tokens=REPLY_TOKENS)
    dialect = next(one for one in dialects.DIALECTS if one.name == speaker.dialect)
    told = []
    turns: list[Turn] = []
    memory: Memory = {}
    async with conversation(corpus, turns) as calls:
        for text in ("First.", "Second.", "Third."):
            request = dialect.parse(speaker.whole, talk.ask(text), memory)
            assert not request.stream
            assert request.sampling.max_tokens == REPLY_TOKENS
            async with aclosing(calls.call(request, dialect=dialect.name)) as steps:
                done = [step async for batch in steps for step in batch if isinstance(step, Completion)]
            told.append(talk.answer(dialect.reply(request, done[0])))

    assert [turn.join for turn in turns] == [JoinKind.ROOT, JoinKind.APPEND, JoinKind.APPEND]
    assert told == [turn.prompt_length + len(unpack_ids(turn.output_ids)) for turn in turns]


@every_speaker
def test_calls_are_routed_to_the_dialect(speaker: Speaker) -> None:
    for call in (speaker.whole, speaker.streamed):
        routed = RouteTable(dialects.DIALECTS).find(call)
        assert routed is not None
        assert (routed.dialect.name, routed.action) == (speaker.dialect, Action.GENERATE)


@every_speaker
def test_a_stream_ends_with_what_it_is_known_by(speaker: Speaker, corpus: Corpus) -> None:
    sampled, writing = Sampled.make(corpus, 40), Writing.make(speaker, "Say something.")

    written = write(Parsed.of(sampled), writing)

    assert writing.request.stream
    assert speaker.last in written[-1].split(b"\n\n")[-2]
    assert not any(speaker.last in part for part in written[:-1])


@every_speaker
def test_reading_and_writing_in_turn_gives_the_same_stream(speaker: Speaker, corpus: Corpus) -> None:
    sampled, writing = Sampled.make(corpus, 40), Writing.make(speaker, "Say something.")

    assert both(sampled, writing) == write(Parsed.of(sampled), writing)


def test_the_marker_moves_to_the_newest_message() -> None:
    talk = MESSAGES.talk(max_tokens=REPLY_TOKENS)
    talk.ask("First.")
    sent = orjson.loads(talk.ask("Second.", "Third."))["messages"]

    marked = [[block["text"] for block in message["content"] if "cache_control" in block] for message in sent]
    assert marked == [[], ["Third."]]


@asynccontextmanager
async def conversation(corpus: Corpus, turns: list[Turn]) -> AsyncIterator[Conversation]:
    """Yield a conversation with a scripted engine. Its turns are added to `turns`."""

    async def record(turn: Turn) -> None:
        turns.append(turn)

    options = {"replies": [{"ids": corpus.reply(REPLY_TOKENS)}], "context_tokens": 4096}
    engine = ScriptedEngine(EngineOptions(name="scripted", tokenizer=str(corpus.folder), options=options))
    async with EnginePool() as pool:
        await pool.add_engine(engine)
        yield Conversation(
            ModelBackend(renderer=make_renderer(corpus.tokenizer, "qwen3"), pool=pool, model="policy"),
            session_key="talk",
            limits=Limits(),
            sampling=SamplingSpec(),
            history="recorded",
            record=record,
        )
