"""The adapters' exact requests, and their reaction to responses that no good engine sends."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from engines.contract import Generation, collect
from engines.upstream import Answer, upstream
from engines.worlds import HASTY
from outrider.constraint import Constraint, ConstraintKind
from outrider.engines.adapters.sglang import SGLangEngine
from outrider.engines.adapters.vllm import VLLMEngine
from outrider.engines.base import EngineOptions, GenerateRequest, SamplingParams
from outrider.errors import (
    ContextOverflow,
    EngineError,
    EngineMisbehaved,
    EngineRejected,
    EngineUnavailable,
    InvalidField,
)
from outrider.trajectory import FinishReason, LogprobKind, VersionSpan

Adapter = type[VLLMEngine] | type[SGLangEngine]
REQUEST = GenerateRequest(
    request_id="r" * 8,
    session_key="session",
    input_ids=np.array([5, 6, 7], dtype=np.int32),
    sampling=SamplingParams(max_tokens=9, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, seed=4, stop=("x",)),
)


async def generate(
    kind: Adapter, url: str, *, model: str | None = None, sampling: SamplingParams = REQUEST.sampling
) -> Generation:
    engine = kind(EngineOptions(name="e", url=url, model=model), retry=HASTY)
    await engine.start()
    try:
        return await collect(engine.generate(msgspec.structs.replace(REQUEST, sampling=sampling)))
    finally:
        await engine.close()


def vllm_event(ids: list[int], values: list[Any], finish: str | None = "stop", **choice: Any) -> dict[str, Any]:
    content = [{"token_id": token, "logprob": value} for token, value in zip(ids, values, strict=False)]
    base = {"index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": finish}
    return {"choices": [base | choice]}


def sglang_event(ids: list[int], logprobs: list[Any], total: int, finish: Any = None, **meta: Any) -> dict[str, Any]:
    entries = [[value, token, None] for token, value in zip(ids, logprobs, strict=False)]
    info = {"completion_tokens": total, "output_token_logprobs": entries, "finish_reason": finish}
    return {"text": "", "output_ids": ids, "meta_info": info | meta}


STOP = {"type": "stop", "matched": 9}


@pytest.mark.parametrize(
    ("kind", "events", "message"),
    [
        (VLLMEngine, [vllm_event([1, 2], [-0.5, -9999.0])], "missing"),
        (VLLMEngine, [vllm_event([1, 2], [-0.5, None])], "missing"),
        (VLLMEngine, [vllm_event([1, 2], [-0.5])], "1 log-probabilities for 2"),
        (VLLMEngine, [vllm_event([1], [], logprobs={"token_logprobs": [None, -0.5]})], "missing"),
        (VLLMEngine, [vllm_event([1], [], logprobs={"token_logprobs": [-0.5, -0.25]})], "2 log-probabilities for 1"),
        (VLLMEngine, [vllm_event([1], [-0.5], logprobs=None)], "0 log-probabilities for 1"),
        (
            VLLMEngine,
            [vllm_event([1], [], logprobs={"content": [{"token": "token_id:2", "logprob": -1.0}]})],
            "of 2 for token 1",
        ),
        (VLLMEngine, [vllm_event([1], [-0.5], finish="error")], "'error'"),
        (VLLMEngine, [vllm_event([1], [-0.5], weight_versions=[])], None),
        (
            VLLMEngine,
            [vllm_event([1], [-0.5], weight_versions=[{"version": "1", "start": 0, "end": 2}])],
            "do not cover",
        ),
        (
            VLLMEngine,
            [vllm_event([1], [-0.5], weight_versions=[{"version": "best", "start": 0, "end": 1}])],
            "'best'",
        ),
        (VLLMEngine, [b"data: {]\n\n"], "cannot read"),
        (SGLangEngine, [sglang_event([1], [None], 1, STOP)], "missing"),
        (SGLangEngine, [sglang_event([1, 2], [-1.0, -1.0], 2), sglang_event([3], [-1.0], 5, STOP)], "makes 5"),
        (SGLangEngine, [{"output_ids": [1]}], "without meta_info"),
        (
            SGLangEngine,
            [{"output_ids": [1], "meta_info": {"completion_tokens": 1, "output_token_logprobs": [[-1.0, 2, None]]}}],
            "other tokens",
        ),
    ],
)
async def test_what_cannot_be_trusted_is_an_error(kind: Adapter, events: list[Any], message: str | None) -> None:
    async with upstream(Answer(events=events)) as (url, _):
        if message is None:
            assert (await generate(kind, url)).ids == [1]
            return
        with pytest.raises(EngineMisbehaved, match=message):
            await generate(kind, url)


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize(
    ("kind", "event"),
    [(VLLMEngine, vllm_event([1], [-0.5], None)), (SGLangEngine, sglang_event([1], [-0.5], 1))],
)
async def test_a_stream_without_its_end_is_unavailable(kind: Adapter, event: Any, cut: bool) -> None:
    async with upstream(Answer(events=[event], done=False, cut=cut)) as (url, server):
        with pytest.raises(EngineUnavailable):
            await generate(kind, url)
    assert len(server.posts) == 1


@pytest.mark.parametrize(
    ("kind", "event"),
    [(VLLMEngine, vllm_event([1], [-0.5])), (SGLangEngine, sglang_event([1], [-0.5], 1, STOP))],
)
async def test_a_stream_cut_behind_its_end_is_whole(kind: Adapter, event: Any) -> None:
    async with upstream(Answer(events=[event], cut=True)) as (url, _):
        assert (await generate(kind, url)).ids == [1]


@pytest.mark.parametrize("kind", [VLLMEngine, SGLangEngine])
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ({"message": "sampling parameters are odd, see page 64", "code": 400}, EngineRejected),
        ({"message": "prompt 3 + 9 = 12 tokens, over 10", "code": 400}, ContextOverflow),
        ({"message": "paused", "code": 503, "retryable": True}, EngineUnavailable),
    ],
)
async def test_error_events_are_typed(kind: Adapter, error: Any, expected: type[EngineError]) -> None:
    async with upstream(Answer(events=[{"error": error}])) as (url, _):
        with pytest.raises(expected):
            await generate(kind, url)


async def test_vllm_is_told_everything_about_sampling() -> None:
    async with upstream(Answer(503), Answer(events=[vllm_event([1], [-0.5])])) as (url, server):
        await generate(VLLMEngine, url, model="m")
    (path, first), (_, second) = server.posts
    assert path == "/inference/v1/generate"
    assert first["token_ids"] == [5, 6, 7]
    assert first["model"] == "m"
    assert first["request_id"] != second["request_id"]
    assert first["sampling_params"] == {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "seed": 4,
        "stop": ["x"],
        "stop_token_ids": [],
        "repetition_penalty": 1.0,
        "logprobs": 0,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    assert server.headers[0][b"x-session-id"] == b"session"


async def test_sglang_is_only_told_what_it_knows() -> None:
    async with upstream(Answer(503), Answer(events=[sglang_event([1], [-0.5], 1, STOP)])) as (url, server):
        await generate(SGLangEngine, url)
    (path, first), (_, second) = server.posts
    assert path == "/generate"
    assert first["input_ids"] == [5, 6, 7]
    assert len(first["rid"]) == len(second["rid"]) == 32
    assert first["rid"] != second["rid"]
    assert first["sampling_params"] == {
        "max_new_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "sampling_seed": 4,
        "stop": ["x"],
        "stop_token_ids": [],
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }


ALTERED = msgspec.structs.replace(
    REQUEST.sampling,
    min_tokens=2,
    repetition_penalty=1.1,
    presence_penalty=-0.5,
    frequency_penalty=0.25,
    logit_bias={7: -100.0, 5: 1.5},
)
SCHEMA = '{"type":"object","properties":{"b":{"type":"string"},"a":{"type":"integer"}}}'
FORMS = [
    (Constraint(ConstraintKind.JSON_OBJECT), {"json_object": True}, {"json_schema": '{"type": "object"}'}),
    (Constraint(ConstraintKind.JSON_SCHEMA, SCHEMA), {"json": json.loads(SCHEMA)}, {"json_schema": SCHEMA}),
    (Constraint(ConstraintKind.REGEX, "a|b"), {"regex": "a|b"}, {"regex": "a|b"}),
    (Constraint(ConstraintKind.TOOL_CALLS, "{}"), {"structural_tag": "{}"}, {"structural_tag": "{}"}),
    (Constraint(ConstraintKind.GRAMMAR, 'root ::= "a"'), {"grammar": 'root ::= "a"'}, {"ebnf": 'root ::= "a"'}),
]


async def test_penalties_and_bias_reach_vllm_in_its_own_words() -> None:
    async with upstream(Answer(events=[vllm_event([1], [-0.5])])) as (url, server):
        await generate(VLLMEngine, url, sampling=ALTERED)
    sent = server.posts[0][1]["sampling_params"]
    assert (sent["repetition_penalty"], sent["presence_penalty"], sent["frequency_penalty"]) == (1.1, -0.5, 0.25)
    assert (sent["min_tokens"], sent["logit_bias"]) == (2, {"7": -100.0, "5": 1.5})
    assert "structured_outputs" not in sent


async def test_penalties_and_bias_reach_sglang_in_its_own_words() -> None:
    async with upstream(Answer(events=[sglang_event([1], [-0.5], 1, STOP)])) as (url, server):
        await generate(SGLangEngine, url, sampling=ALTERED)
    sent = server.posts[0][1]["sampling_params"]
    assert (sent["repetition_penalty"], sent["presence_penalty"], sent["frequency_penalty"]) == (1.1, -0.5, 0.25)
    assert (sent["min_new_tokens"], sent["logit_bias"]) == (2, {"7": -100.0, "5": 1.5})


async def test_a_minimum_is_no_more_than_the_maximum() -> None:
    """The session's own limits may have lowered the maximum."""
    sampling = msgspec.structs.replace(REQUEST.sampling, min_tokens=50)
    async with upstream(Answer(events=[vllm_event([1], [-0.5])])) as (url, server):
        await generate(VLLMEngine, url, sampling=sampling)
    assert server.posts[0][1]["sampling_params"]["min_tokens"] == 9
    async with upstream(Answer(events=[sglang_event([1], [-0.5], 1, STOP)])) as (url, server):
        await generate(SGLangEngine, url, sampling=sampling)
    assert server.posts[0][1]["sampling_params"]["min_new_tokens"] == 9


@pytest.mark.parametrize(("constraint", "vllm", "sglang"), FORMS)
async def test_a_form_reaches_both_in_their_own_words(constraint: Constraint, vllm: Any, sglang: Any) -> None:
    sampling = msgspec.structs.replace(REQUEST.sampling, constraint=constraint)
    async with upstream(Answer(events=[vllm_event([1], [-0.5])])) as (url, server):
        await generate(VLLMEngine, url, sampling=sampling)
    assert server.posts[0][1]["sampling_params"]["structured_outputs"] == vllm
    async with upstream(Answer(events=[sglang_event([1], [-0.5], 1, STOP)])) as (url, server):
        await generate(SGLangEngine, url, sampling=sampling)
    assert server.posts[0][1]["sampling_params"].items() >= sglang.items()


@pytest.mark.parametrize("status", [403, 404])
async def test_vllm_falls_back_for_good_once_completions_work(status: int) -> None:
    whole = {"token_ids": [1], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": "length"}
    event = {"choices": [whole | {"prompt_token_ids": [5, 6, 7]}]}
    async with upstream(Answer(status), Answer(events=[event])) as (url, server):
        engine = VLLMEngine(EngineOptions(name="e", url=url), retry=HASTY)
        await engine.start()
        chunks = [chunk async for chunk in engine.generate(REQUEST)]
        assert chunks[-1].prompt_ids == [5, 6, 7]
        assert chunks[-1].finish is FinishReason.LENGTH
        await collect(engine.generate(REQUEST))
        await engine.close()
    assert [path for path, _ in server.posts] == ["/inference/v1/generate", "/v1/completions", "/v1/completions"]
    assert server.posts[1][1]["prompt"] == [5, 6, 7]
    assert server.posts[1][1]["return_token_ids"] is True


@pytest.mark.parametrize(
    ("kind", "events"),
    [
        (VLLMEngine, [vllm_event([1], [-0.5]), {"choices": [], "usage": {"prompt_tokens": 4}}]),
        (VLLMEngine, [vllm_event([1], [-0.5]) | {"usage": {"prompt_tokens": 4}}]),
        (SGLangEngine, [sglang_event([1], [-0.5], 1, STOP, prompt_tokens=4)]),
    ],
)
async def test_how_many_tokens_the_engine_says_the_prompt_had(kind: Adapter, events: list[Any]) -> None:
    async with upstream(Answer(events=events)) as (url, _):
        engine = kind(EngineOptions(name="e", url=url), retry=HASTY)
        await engine.start()
        chunks = [chunk async for chunk in engine.generate(REQUEST)]
        await engine.close()
    assert [chunk.prompt_tokens for chunk in chunks] == [4]


async def test_vllm_falls_back_from_a_token_route_that_does_not_stream() -> None:
    """Until 0.19 the route accepts `stream` and still replies in one piece."""
    in_one_piece = b'{"request_id": "r", "choices": [{"index": 0, "token_ids": [1], "finish_reason": "stop"}]}'
    whole = {"token_ids": [1], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": "length"}
    async with upstream(Answer(events=[in_one_piece], done=False), Answer(events=[{"choices": [whole]}])) as (
        url,
        server,
    ):
        engine = VLLMEngine(EngineOptions(name="e", url=url), retry=HASTY)
        await engine.start()
        for _ in range(2):
            assert (await collect(engine.generate(REQUEST))).ids == [1]
        await engine.close()
    assert [path for path, _ in server.posts] == ["/inference/v1/generate", "/v1/completions", "/v1/completions"]


async def test_vllm_that_never_streams_is_unavailable() -> None:
    async with upstream(Answer(done=False)) as (url, server):
        with pytest.raises(EngineUnavailable, match="without a stream"):
            await generate(VLLMEngine, url)
    assert [path for path, _ in server.posts] == ["/inference/v1/generate", "/v1/completions"]


async def test_vllm_does_not_fall_back_for_a_model_that_is_missing() -> None:
    async with upstream(Answer(404)) as (url, server):
        for _ in range(2):
            with pytest.raises(EngineRejected):
                await generate(VLLMEngine, url)
    assert [path for path, _ in server.posts] == ["/inference/v1/generate", "/v1/completions"] * 2


@pytest.mark.parametrize("kind", [VLLMEngine, SGLangEngine])
async def test_version_spans_are_kept(kind: Adapter) -> None:
    labels = [{"version": "default", "start": 0, "end": 1}, {"version": "12", "start": 1, "end": 3}]
    ids, logprobs = [4, 5, 6], [-0.5, -0.25, -0.125]
    if kind is VLLMEngine:
        event = vllm_event(ids, logprobs, weight_versions=labels)
    else:
        event = sglang_event(ids, logprobs, 3, STOP, weight_versions=labels)
    async with upstream(Answer(events=[event])) as (url, _):
        whole = await generate(kind, url)
    assert whole.versions == (VersionSpan(0, 0, 1), VersionSpan(12, 1, 3))
    assert whole.logprobs == logprobs


async def test_sglang_without_spans_tells_one_version() -> None:
    events = [sglang_event([1], [-0.5], 1), sglang_event([1, 2], [-0.5, -1.5], 2, STOP, weight_version="3")]
    async with upstream(Answer(events=events)) as (url, _):
        whole = await generate(SGLangEngine, url)
    assert whole.versions == (VersionSpan(3, 0, 2),)
    assert whole.stop_match == 9


async def test_sglang_without_spans_tells_the_version_of_each_event() -> None:
    events = [
        sglang_event([1], [-0.5], 1, weight_version="default"),
        sglang_event([1, 2, 3], [-0.5, -1.5, -0.25], 3, weight_version="2"),
        sglang_event([1, 2, 3, 4], [-0.5, -1.5, -0.25, -1.0], 4, weight_version="2"),
        sglang_event([1, 2, 3, 4], [-0.5, -1.5, -0.25, -1.0], 4, STOP, weight_version="3"),
    ]
    async with upstream(Answer(events=events)) as (url, _):
        whole = await generate(SGLangEngine, url)
    assert whole.versions == (VersionSpan(0, 0, 1), VersionSpan(2, 1, 4))


async def test_sglang_that_does_not_tell_its_version_is_well() -> None:
    pages = {"/health": {}, "/v1/models": {"data": [{"id": "m", "max_model_len": 64}]}}
    async with upstream(Answer(done=False), pages=pages) as (url, _):
        engine = SGLangEngine(EngineOptions(name="e", url=url), retry=HASTY)
        await engine.start()
        await engine.set_version(5)
        health = await engine.health()
        await engine.close()
    assert (health.ok, health.version) == (True, 5)


@pytest.mark.parametrize(("status", "version"), [(404, 5), (200, 0)])
async def test_vllm_that_takes_no_label_serves_the_version_it_is_told(status: int, version: int) -> None:
    """A server that accepted labels and then reports none was restarted, so it has the weights of its start."""
    event = vllm_event([1], [-0.5], weight_versions=[{"version": "default", "start": 0, "end": 1}])
    async with upstream(Answer(status, done=False), Answer(events=[event])) as (url, _):
        engine = VLLMEngine(EngineOptions(name="e", url=url), retry=HASTY)
        await engine.start()
        await engine.set_version(5)
        whole = await collect(engine.generate(REQUEST))
        await engine.close()
    assert whole.versions == (VersionSpan(version, 0, 1),)


@pytest.mark.parametrize(
    ("finish", "expected"),
    [
        ({"type": "abort", "message": "input is too long: 12 > 10", "status_code": 400}, ContextOverflow),
        ({"type": "abort", "message": "queue full", "status_code": 503}, EngineUnavailable),
        ({"type": "odd"}, EngineError),
    ],
)
async def test_sglang_failed_finishes_are_typed(finish: Any, expected: type[EngineError]) -> None:
    async with upstream(Answer(events=[sglang_event([], [], 0, finish)])) as (url, _):
        with pytest.raises(expected):
            await generate(SGLangEngine, url)


async def test_an_abort_is_a_finish() -> None:
    aborted = {"type": "abort", "message": "Aborted"}
    async with upstream(Answer(events=[sglang_event([1], [-0.5], 1, aborted)])) as (url, _):
        assert (await generate(SGLangEngine, url)).finish is FinishReason.ABORT


@pytest.mark.parametrize("kind", [VLLMEngine, SGLangEngine])
async def test_health_names_what_is_wrong(kind: Adapter) -> None:
    models = {"data": [{"id": "other", "max_model_len": 64}]}
    pages = {"/health": {}, "/v1/models": models, "/model_info": {}, "/weight_info": {"weight_version": "best"}}
    async with upstream(Answer(), pages=pages) as (url, _):
        engine = kind(EngineOptions(name="e", url=url, model="mine"), retry=HASTY)
        await engine.start()
        health = await engine.health()
        assert not health.ok
        assert "mine" in health.detail
        assert "other" in health.detail
        await engine.close()
        assert not (await engine.health()).ok


async def test_vllm_outside_development_mode() -> None:
    pages = {"/health": {}, "/v1/models": {"data": [{"id": "m", "max_model_len": 64}]}}
    async with upstream(Answer(404), pages=pages) as (url, _):
        engine = VLLMEngine(EngineOptions(name="e", url=url), retry=HASTY)
        await engine.start()
        assert (await engine.health()).context_tokens == 64
        await engine.set_version(5)
        assert (await engine.health()).version == 5
        assert await engine.token_check("x") is None
        with pytest.raises(EngineRejected) as refused:
            await engine.pause("keep")
        assert "VLLM_SERVER_DEV_MODE" in str(refused.value.hint)
        await engine.close()


async def test_a_server_that_its_owner_pauses_gets_no_orders() -> None:
    async with upstream(Answer()) as (url, server):
        engine = VLLMEngine(EngineOptions(name="e", url=url, options={"control": False}))
        await engine.start()
        with pytest.raises(EngineRejected, match="by its owner alone"):
            await engine.pause("keep")
        with pytest.raises(EngineRejected, match="by its owner alone"):
            await engine.update_weights("/checkpoints/3", 3)
        await engine.set_version(3)
        await engine.resume()
        assert engine.versions.served == 3
        await engine.close()
    assert server.posts == []


def test_options_are_checked() -> None:
    options = {"logprobs_mode": "processed_logprobs"}
    engine = VLLMEngine(EngineOptions(name="e", url="http://h", options=options))
    assert engine.logprob_kind is LogprobKind.SAMPLING
    assert VLLMEngine(EngineOptions(name="e", url="http://h")).logprob_kind is LogprobKind.RAW
    for wrong in ({"logprob_mode": "x"}, {"logprobs_mode": "logits"}, {"api_key": 5}):
        with pytest.raises(InvalidField, match=r"logprob|api_key"):
            VLLMEngine(EngineOptions(name="e", url="http://h", options=wrong))
