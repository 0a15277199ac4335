"""The evaluator `http`: the requests to an external grader, and which replies are grades."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from api.test_tls import OPENSSL, made
from outrider.callbacks import check_signature
from outrider.concurrency.retries import RetryPolicy
from outrider.config import GraderConfig, TlsConfig
from outrider.errors import EvaluatorError, InvalidField, Unauthorized
from outrider.evaluators.endpoints import Endpoints
from outrider.evaluators.factory import make_evaluator
from outrider.messages import Message, Role, ToolCall, image_from_bytes
from outrider.messages import Text as TextPart
from outrider.spec import EvaluatorSpec
from outrider.trajectory import Verdict
from support.service import running_service

from .grader_server import CUT, a_grader, an_outcome, in_turn

SECRET = "a secret of the grader"
TALK = (
    Message(role=Role.SYSTEM, content="Be brief."),
    Message(role=Role.USER, content="What is 6 times 7?"),
    Message(role=Role.ASSISTANT, content="", tool_calls=(ToolCall("c1", "python", '{"code": "6*7"}'),)),
    Message(role=Role.TOOL, content="42", tool_call_id="c1"),
    Message(role=Role.ASSISTANT, content="It is 42."),
)


async def test_our_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADER_SECRET", SECRET)
    answer = {"reward": 0.5, "metrics": {"right": 1}, "reason": "half", "version": "1.2"}
    async with a_grader(lambda body: answer, secret_variable="GRADER_SECRET") as grader:
        spec = EvaluatorSpec(kind="http", options={"grader": "one", "data": {"wanted": 42}})
        picture = image_from_bytes("image/png", b"pixels")
        seen = Message(role=Role.USER, content="look", parts=(TextPart("look"), picture))
        outcome = an_outcome(spec, "", transcript=(*TALK, seen), turns=2)
        verdict = await make_evaluator(spec, grader.endpoints).evaluate(outcome)
    assert verdict == Verdict(reward=0.5, metrics={"right": 1.0}, reason="[version 1.2] half")
    [body], [headers], [raw] = grader.bodies, grader.headers, grader.raw
    assert (body["contract"], body["options"], body["stop_reason"], body["answer"]) == (
        1,
        {"wanted": 42},
        "completed",
        "It is 42.",
    )
    assert body["metrics"] == {"turns": 2, "exit_code": 0}
    assert [message["role"] for message in body["transcript"]] == [*(one.role.value for one in TALK), "user"]
    assert body["transcript"][-1]["parts"][1]["digest"] == picture.digest
    assert b"pixels" not in raw
    check_signature(headers, raw, SECRET)
    for wrong in (raw + b" ", raw.replace(b"42", b"43")):
        with pytest.raises(Unauthorized):
            check_signature(headers, wrong, SECRET)


async def test_a_retry_is_signed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grader that takes minutes to fail would refuse the signature of the first attempt as too old."""
    monkeypatch.setenv("GRADER_SECRET", SECRET)
    times = iter((1000.0, 1400.0))
    monkeypatch.setattr("outrider.evaluators.http.time", SimpleNamespace(time=lambda: next(times)))
    answers = in_turn(503, {"reward": 1.0})
    async with a_grader(answers, secret_variable="GRADER_SECRET") as grader:
        assert (await grader.grade("http", "42")).reward == 1.0
    assert grader.raw[0] == grader.raw[1]
    for headers, now in zip(grader.headers, (1000.0, 1400.0), strict=True):
        check_signature(headers, grader.raw[0], SECRET, now=now)


@pytest.mark.parametrize("secret", ["too short", "whsec_this is no base64"])
async def test_a_signing_key_that_is_unusable_is_refused_before_a_run(
    monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    monkeypatch.setenv("GRADER_SECRET", f"{secret}\n")
    async with a_grader(lambda body: {"reward": 1.0}, secret_variable="GRADER_SECRET") as grader:
        spec = EvaluatorSpec(kind="http", options={"grader": "one"})
        with pytest.raises(InvalidField, match="the variable GRADER_SECRET of grader 'one'") as refused:
            make_evaluator(spec, grader.endpoints)
        assert refused.value.field == "task.evaluator.options.grader"
        assert secret not in f"{refused.value} {refused.value.hint}"
        # Only the grading reports a missing variable, because the variable may be set on the node alone.
        monkeypatch.delenv("GRADER_SECRET")
        with pytest.raises(EvaluatorError, match="the variable GRADER_SECRET of grader 'one' is not set"):
            await grader.grade("http", "42")
    assert not grader.bodies


@pytest.mark.parametrize("contract", ["outrider", "nemo_gym"])
async def test_what_cannot_be_encoded_is_graded_all_the_same(contract: str) -> None:
    async with a_grader(lambda body: {"reward": 1.0}) as grader:
        spec = EvaluatorSpec(kind="http", options={"grader": "one", "contract": contract})
        odd = Message(role=Role.TOOL, content="a\ud800b", tool_call_id="c1")
        said = Message(role=Role.ASSISTANT, content="It is \udfff42.")
        outcome = an_outcome(spec, "", transcript=(*TALK[:3], odd, said))
        assert (await make_evaluator(spec, grader.endpoints).evaluate(outcome)).reward == 1.0
    assert b"a?b" in grader.raw[0]


async def test_nemo_gyms_contract() -> None:
    answer = {"reward": 1.0, "accuracy": 0.25, "right": True, "response": {"x": 1}, "judge": "said so"}
    async with a_grader(lambda body: answer) as grader:
        row = {"expected": "42", "responses_create_params": {"input": "as in the row"}}
        for data, asked in (
            (row, row["responses_create_params"]),
            ({}, {"input": [{"role": one.role.value, "content": one.content} for one in TALK[:2]]}),
        ):
            spec = EvaluatorSpec(kind="http", options={"grader": "one", "contract": "nemo_gym", "data": data})
            outcome = an_outcome(spec, "", transcript=TALK)
            verdict = await make_evaluator(spec, grader.endpoints).evaluate(outcome)
            assert verdict == Verdict(reward=1.0, metrics={"accuracy": 0.25})
            body = grader.bodies[-1]
            assert body["responses_create_params"] == asked
    assert grader.paths == ["/verify", "/verify"]
    assert grader.bodies[0]["expected"] == "42"
    response = grader.bodies[0]["response"]
    assert response["object"] == "response"
    call, result, message = response["output"]
    assert (call["type"], call["call_id"], call["name"], call["arguments"]) == (
        "function_call",
        "c1",
        "python",
        '{"code": "6*7"}',
    )
    assert (result["type"], result["call_id"], result["output"]) == ("function_call_output", "c1", "42")
    assert (message["type"], message["content"][0]["text"]) == ("message", "It is 42.")


@pytest.mark.parametrize("passing", [CUT, 502, 503, 504])
async def test_a_grader_that_is_away_is_asked_again_with_the_same(passing: Any) -> None:
    async with a_grader(in_turn(passing, passing, {"reward": 1})) as grader:
        assert (await grader.grade("http", "42")).reward == 1.0
    assert len(set(grader.raw)) == 1
    assert len(grader.raw) == 3


@pytest.mark.parametrize(
    ("answer", "calls", "message"),
    [
        (503, 4, "answered 503, 4 times"),
        (CUT, 4, "cannot be reached"),
        (500, 1, "answered 500"),
        (429, 1, "answered 429"),
        (404, 1, "answered 404"),
        ({"reward": True}, 1, "must be a number"),
        (b'{"reward": NaN}', 1, "must be finite"),
        ({"metrics": {}}, 1, "no reward"),
        ({"reward": 1, "score": 1}, 1, "unknown fields"),
        (b"1.0", 1, "no object"),
        (b"", 1, "not JSON"),
        (b'{"a":' * 100_000, 1, "not JSON"),
        (b" " * (5 << 20), 1, "more than"),
    ],
)
async def test_what_is_no_grade_is_an_error(answer: Any, calls: int, message: str) -> None:
    async with a_grader(lambda body: answer) as grader:
        with pytest.raises(EvaluatorError, match=message):
            await grader.grade("http", "42")
    assert len(grader.raw) == calls


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_leads_nowhere(status: int) -> None:
    async with a_grader(lambda body: {"reward": 1}) as metadata:
        places = (metadata.url, "http://169.254.169.254/latest/meta-data/")
        async with a_grader(in_turn(*((status, {"location": place}) for place in places))) as grader:
            for _ in places:
                with pytest.raises(EvaluatorError, match=f"answered {status}") as caught:
                    await grader.grade("http", "42")
                assert "not followed" in str(caught.value.hint)
    assert metadata.raw == []


async def test_a_slow_grader_is_an_error() -> None:
    async with a_grader(lambda body: asyncio.sleep(30)) as grader:
        with pytest.raises(EvaluatorError, match=r"did not answer within 0\.1 s, 4 times"):
            await grader.grade("http", "42", call_seconds=0.1)


@pytest.mark.skipif(OPENSSL is None, reason="openssl makes the certificate")
async def test_an_unknown_certificate_is_refused(tmp_path: Path) -> None:
    pair = made(tmp_path, "grader")
    async with running_service(tmp_path=tmp_path, token="root", tls=TlsConfig(**pair._asdict())) as (_, url):
        spec = EvaluatorSpec(kind="http", options={"grader": "one"})
        pauses = RetryPolicy(first=0.001, longest=0.002, attempts=4)
        endpoints = Endpoints([GraderConfig(name="one", url=url)], pauses=pauses)
        with pytest.raises(EvaluatorError, match="cannot be reached: ClientConnectorCertificateError"):
            await make_evaluator(spec, endpoints).evaluate(an_outcome(spec, "42"))


@pytest.mark.parametrize("options", [{}, {"grader": "nobody"}, {"grader": "one", "contract": "other"}])
async def test_what_is_wrong_is_named_at_submission(options: Any) -> None:
    async with a_grader(lambda body: 500) as grader:
        with pytest.raises(InvalidField, match=r"required|no grader 'nobody'|must be 'outrider', 'nemo_gym', 'prorl'"):
            make_evaluator(EvaluatorSpec(kind="http", options=options), grader.endpoints)


@pytest.mark.parametrize(
    ("contract", "path", "data", "answer"),
    [
        ("prorl", "/compute_score", {"ground_truth": "42", "data_source": "deepscaler"}, "solution_str"),
        ("prorl_reasoning_gym", "/score", {"entry": {"question": "?"}, "task": "countdown"}, "answer"),
    ],
)
async def test_the_contracts_of_prorls_reward_servers(
    contract: str, path: str, data: dict[str, Any], answer: str
) -> None:
    scores: list[tuple[Any, float]] = [(0.25, 0.25), (1, 1.0), ([0.5, "x"], 0.5), (True, 1.0)]
    wrong: list[Any] = [None, [], ["x"], "1.0", {}, [None]]
    async with a_grader(
        in_turn(*({"score": score} for score in [*(each for each, _ in scores), *wrong]), {})
    ) as grader:
        spec = EvaluatorSpec(kind="http", options={"grader": "one", "contract": contract, "data": data})
        evaluator = make_evaluator(spec, grader.endpoints)
        outcome = an_outcome(spec, "", transcript=TALK)
        for _, reward in scores:
            assert await evaluator.evaluate(outcome) == Verdict(reward=reward)
        for _ in [*wrong, "no score"]:
            with pytest.raises(EvaluatorError, match="no score that is a number"):
                await evaluator.evaluate(outcome)
    assert set(grader.paths) == {path}
    assert grader.bodies[0] == {**data, answer: "It is 42."}
    for odd in ({}, {**data, "more": 1}, {next(iter(data)): "x"}):
        spec = EvaluatorSpec(kind="http", options={"grader": "one", "contract": contract, "data": odd})
        with pytest.raises(InvalidField, match=r"needs data with .* and .*, and nothing else"):
            make_evaluator(spec, grader.endpoints)


async def test_calls_go_to_the_address_with_the_fewest_calls() -> None:
    both, go_on = asyncio.Event(), asyncio.Event()
    under_way = 0

    async def slow(body: dict[str, Any]) -> dict[str, Any]:
        nonlocal under_way
        under_way += 1
        if under_way == 4:
            both.set()
        await go_on.wait()
        return {"reward": 1.0}

    async with a_grader(slow) as first, a_grader(slow) as second:
        endpoints = Endpoints([GraderConfig(name="one", url=first.url, more_urls=(second.url,))])
        spec = EvaluatorSpec(kind="http", options={"grader": "one"})
        evaluator = make_evaluator(spec, endpoints)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(4):
                tasks.create_task(evaluator.evaluate(an_outcome(spec, "x")))
            await both.wait()
            go_on.set()
        assert (len(first.bodies), len(second.bodies)) == (2, 2)
        assert set(endpoints.load.values()) == {0}


async def test_a_retry_goes_to_another_address() -> None:
    async with a_grader(lambda body: 503) as broken, a_grader(lambda body: {"reward": 1.0}) as good:
        config = GraderConfig(name="one", url=broken.url, more_urls=("http://127.0.0.1:9", good.url))
        endpoints = Endpoints([config], pauses=RetryPolicy(first=0.001, longest=0.002, attempts=3))
        spec = EvaluatorSpec(kind="http", options={"grader": "one"})
        assert (await make_evaluator(spec, endpoints).evaluate(an_outcome(spec, "x"))).reward == 1.0
        assert (len(broken.bodies), len(good.bodies)) == (1, 1)
    with pytest.raises(ValueError, match="must be an http"):
        GraderConfig(name="one", url="http://a", more_urls=("ftp://b",))
