"""A generation in parts appears as one generation: the request for each part, and the consumer's chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.engines.base import Chunk, GenerateRequest, SamplingParams
from outrider.engines.pool.continuation import ContinuedGeneration
from outrider.sessions.calls.call import count_differences
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import FinishReason, VersionSpan
from support.tokenizer import write_tokenizer

PROMPT = [10, 11, 12]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def request(**sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="0" * 32,
        session_key="s",
        input_ids=np.array(PROMPT, dtype=np.int32),
        sampling=SamplingParams(**{"max_tokens": 50} | sampling),
    )


def chunk(*ids: int, **fields: Any) -> Chunk:
    return Chunk(ids=list(ids), logprobs=[-1.0] * len(ids), **fields)


def end(*ids: int, **fields: Any) -> Chunk:
    return chunk(*ids, **{"finish": FinishReason.STOP} | fields)


def spans(*edges: int) -> tuple[VersionSpan, ...]:
    """Spans from triples of version, start and end."""
    return tuple(VersionSpan(*edges[at : at + 3]) for at in range(0, len(edges), 3))


def test_each_part_is_asked_for_what_is_left() -> None:
    whole = ContinuedGeneration(request(seed=7, min_tokens=4, temperature=0.5, stop_token_ids=(2,)), None)
    whole.cut([20, 21], chunk(versions=spans(1, 0, 2)), 0)
    one = whole.request()
    whole.cut([22, 23, 24], None, 2)
    two = whole.request()
    assert one.input_ids.tolist() == [*PROMPT, 20, 21]
    assert two.input_ids.tolist() == [*PROMPT, 20, 21, 22, 23, 24]
    assert two.input_ids.dtype == np.int32
    assert [(each.sampling.max_tokens, each.sampling.min_tokens) for each in (one, two)] == [(48, 2), (45, 0)]
    assert (two.sampling.temperature, two.sampling.stop_token_ids) == (0.5, (2,))
    assert len({7, one.sampling.seed, two.sampling.seed}) == 3
    assert len({"0" * 32, one.request_id, two.request_id}) == 3
    assert whole.versions == spans(1, 0, 2, 2, 2, 5)


def test_what_was_cut_before_its_first_token_is_asked_for_again_as_it_was() -> None:
    whole = ContinuedGeneration(request(seed=7), None)
    whole.cut([], None, 1)
    again = whole.request()
    assert again.sampling == request(seed=7).sampling
    assert again.input_ids.tolist() == PROMPT
    assert whole.take(end(5, versions=spans(2, 0, 1)), 1).versions == spans(2, 0, 1)


def test_the_last_chunk_speaks_of_the_whole_reply() -> None:
    whole = ContinuedGeneration(request(), None)
    whole.cut([20, 21], end(versions=spans(0, 0, 1, 1, 1, 2), cached_tokens=2), 0)
    assert whole.take(chunk(22), 4) == chunk(22)
    last = whole.take(end(23, versions=spans(1, 0, 1, 2, 1, 2), cached_tokens=4, prompt_tokens=5), 4)
    assert last.versions == spans(0, 0, 1, 1, 1, 3, 2, 3, 4)
    assert (last.cached_tokens, last.prompt_tokens) == (2, 3)


def test_an_engine_without_spans_gets_the_version_that_it_was_known_to_serve() -> None:
    whole = ContinuedGeneration(request(), None)
    whole.cut([20, 21], None, 3)
    whole.cut([22], None, 3)
    assert whole.take(end(23), 5).versions == spans(3, 0, 3, 5, 3, 4)


@pytest.mark.parametrize(
    ("echo", "drift"),
    [
        ([*PROMPT, 20, 21], 0),
        ([*PROMPT, 20, 99], 1),
        ([*PROMPT, 20], 1),
        ([*PROMPT, 20, 21, 22], 1),
        ([10, 99, 12, 20, 99], 2),
    ],
)
def test_drift_is_seen_in_the_prompt_and_in_what_was_sampled(echo: list[int], drift: int) -> None:
    whole = ContinuedGeneration(request(), None)
    whole.cut([20, 21], None, 0)
    reported = whole.take(chunk(22, prompt_ids=echo), 0).prompt_ids
    assert reported is not None
    assert count_differences(np.array(PROMPT, dtype=np.int32), reported) == drift


@pytest.mark.parametrize(
    ("sampled", "sampling", "finish"),
    [
        ([20, 2], {"stop_token_ids": (2,)}, (FinishReason.STOP, 2)),
        ([20, 2], {"stop_token_ids": (2,), "min_tokens": 2}, None),
        ([20, 21], {"max_tokens": 2}, (FinishReason.LENGTH, None)),
        ([20, 21], {"max_tokens": 3}, None),
        ([], {}, None),
    ],
)
def test_a_reply_that_was_complete_when_it_was_cut_is_not_asked_for_again(
    sampled: list[int], sampling: Any, finish: Any
) -> None:
    whole = ContinuedGeneration(request(**sampling), None)
    whole.cut(sampled, None, 1)
    last = whole.ended()
    assert (None if last is None else (last.finish, last.stop_match)) == finish
    if last is not None:
        assert last.versions == spans(1, 0, len(sampled))


@given(data=st.data())
def test_a_stop_string_ends_a_reply_where_it_would_have_ended_uncut(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """The cut is anywhere, and the engine searches only its own part for the stop strings."""
    text = data.draw(st.text(alphabet="ab é", min_size=2, max_size=12))
    stops = tuple(data.draw(st.lists(st.text(alphabet="abé ", min_size=1, max_size=4), min_size=1, max_size=2)))
    ids = [token for letter in text for token in tokenizer.encode(letter)]
    expected = next(
        (n for n in range(1, len(ids) + 1) if any(stop in tokenizer.decode(ids[:n]) for stop in stops)), None
    )
    cut = data.draw(st.integers(0, expected or len(ids)))
    whole = ContinuedGeneration(request(stop=stops), tokenizer.stream)
    whole.cut(ids[:cut], None, 0)
    given = ids[:cut]
    assert (whole.ended() is not None) is (cut == expected)
    if cut == expected:
        return
    for number, token in enumerate(ids[cut:], start=1):
        own = tokenizer.decode(ids[cut : cut + number])
        found = next((stop for stop in stops if stop in own), None)
        part = whole.take(end(token, stop_match=found) if found else chunk(token), 1)
        given += part.ids
        if part.finish is not None:
            assert part.stop_match in stops
            break
    assert len(given) == (expected or len(ids))


@pytest.mark.parametrize(
    ("text", "sampling", "match"),
    [
        ("xab", {"stop": ("ab",)}, "ab"),
        ("ab", {"stop": ("q", "b")}, "b"),
        ("xab", {"stop": ("abc",)}, None),
        ("abx", {"stop": ("ab",)}, None),  # the engine has searched all tokens but the last
        ("xab", {"stop": ("ab",), "min_tokens": 3}, None),
        ("", {"stop": ("ab",)}, None),
    ],
)
def test_a_stop_string_that_the_last_token_before_a_cut_completes_ends_the_reply(
    tokenizer: Tokenizer, text: str, sampling: Any, match: str | None
) -> None:
    """SGLang ends an aborted request before it searches the request's last token."""
    ids = [token for letter in text for token in tokenizer.encode(letter)]
    whole = ContinuedGeneration(request(**sampling), tokenizer.stream)
    whole.cut(ids, end(finish=FinishReason.ABORT), 4)
    last = whole.ended()
    assert (None if last is None else (last.finish, last.stop_match, last.ids)) == (
        None if match is None else (FinishReason.STOP, match, [])
    )
    if last is not None:
        assert last.versions == spans(4, 0, len(ids))


def test_the_token_that_completes_a_stop_string_is_the_last_of_its_chunk(tokenizer: Tokenizer) -> None:
    a, b, c = (tokenizer.encode(letter)[0] for letter in "abc")
    whole = ContinuedGeneration(request(stop=("abb",)), tokenizer.stream)
    whole.cut([a, a], None, 0)
    part = whole.take(end(b, b, c, c, versions=spans(1, 0, 1, 2, 1, 4), stop_match=None), 1)
    assert (part.ids, part.logprobs) == ([b, b], [-1.0, -1.0])
    assert (part.finish, part.stop_match) == (FinishReason.STOP, "abb")
    assert part.versions == spans(0, 0, 2, 1, 2, 3, 2, 3, 4)


@pytest.mark.parametrize(("min_tokens", "finish"), [(1, FinishReason.STOP), (2, None), (3, None)])
def test_a_stop_string_within_the_minimum_of_tokens_does_not_end_the_reply(
    tokenizer: Tokenizer, min_tokens: int, finish: FinishReason | None
) -> None:
    a, b, c = (tokenizer.encode(letter)[0] for letter in "abc")
    whole = ContinuedGeneration(request(stop=("ab",), min_tokens=min_tokens), tokenizer.stream)
    whole.cut([a], None, 0)
    part = whole.take(chunk(b, c), 1)
    assert (part.finish, part.ids) == (finish, [b] if finish else [b, c])
    if finish is None:
        assert whole.take(chunk(c), 1) == chunk(c)
