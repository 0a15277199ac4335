"""Frozen models beside the policy: their calls are served, limited and recorded, and are never trained on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from engines.upstream import Answer, upstream
from outrider.config import FrozenConfig
from outrider.engines.base import EngineOptions
from outrider.errors import Conflict, InvalidField, ModelMismatch
from outrider.lab.fakes.scripted_engine import ScriptedEngine, scripted_logprob
from outrider.lifecycle import StopReason
from outrider.relay import Worker
from outrider.service.assembly import open_service
from outrider.service.service import Service
from outrider.spec import EngineSpec, PolicyUpdateSpec
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import FrozenUse, Sample, VersionSpan, unpack_ids, unpack_logprobs
from support.relay import AT_ONCE
from support.tokenizer import write_other_tokenizer

from .conftest import MakeWorld
from .duet import DUET
from .world import SAY, World, config, result_of

POLICY = ["I begin.<|im_end|>", "I go on.<|im_end|>", "I am done.<|im_end|>"]
JUDGE = ["The score is low.<|im_end|>", "The score is high.<|im_end|>"]
BOTH = ["policy", "judge", "policy", "judge", "policy"]
VERSION = 7
BREAKS = {"reply": "The engine dies in this sentence.<|im_end|>", "fail": "unavailable", "after": 2}


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_other_tokenizer(tmp_path_factory.mktemp("other"))


def judge(other: Path, *replies: Any, context: int = 4096, **fields: Any) -> FrozenConfig:
    options = {"replies": list(replies or JUDGE), "version": VERSION, "context_tokens": context}
    engine = EngineSpec(kind="scripted", name="judge-0", options=options)
    return FrozenConfig(name="judge", tokenizer=str(other), renderer="qwen3", engines=(engine,), **fields)


def engine_of(service: Service, name: str = "judge-0") -> ScriptedEngine:
    return cast(ScriptedEngine, service.pool_of(name).engine(name))


async def duet(w: World, calls: list[str], **options: Any) -> tuple[Any, list[Sample]]:
    """Run a session of the agent `Duet` and return it with its rows. The task fixes sampling parameters that apply only
    to the policy."""
    harness = {"agent": DUET, "options": {"calls": calls, **options}}
    submitted = await w.submit(harness=harness, sampling={"temperature": 0.25, "seed": 3}, max_attempts=1)
    done = await w.done(submitted.id, samples=True)
    assert done.samples is not None
    return done.sessions[0], list(done.samples)


def without_ids(samples: list[Sample]) -> bytes:
    return msgspec.msgpack.encode([msgspec.structs.replace(one, group_id="", session_id="") for one in samples])


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses", "gemini"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_agent_talks_to_both_and_its_rows_are_as_without(
    world: MakeWorld, other: Path, dialect: str, stream: bool
) -> None:
    async with world(POLICY, http=True, frozen=(judge(other),)) as w:
        both, rows = await duet(w, BOTH, dialect=dialect, stream=stream)
        alone, rows_alone = await duet(w, ["policy"] * 3, dialect=dialect, stream=stream)
        assert without_ids(rows) == without_ids(rows_alone)
        assert [sum(row.loss_mask) > 0 for row in rows] == [True]

        result = result_of(both)
        assert result.error is None
        assert (result.tokens, result.turns) == (result_of(alone).tokens, 3)
        assert result.tokens.drift == 0
        turns = (await w.service.store.frozen_turns(both.id))["judge"]
        sampled = sum(len(turn.output_ids) // 4 for turn in turns)
        assert result.frozen == {"judge": FrozenUse(turns=2, tokens=sampled)}
        assert result_of(alone).frozen == {}

        views = await w.service.reader.turns(both.id)
        assert [view.model for view in views] == [None, "judge", None, "judge", None]
        assert [view.sampled for view in views] == [POLICY[0], JUDGE[0], POLICY[1], JUDGE[1], POLICY[2]]
        assert "do it: judge, line 1" in views[3].context
        assert [view.dialect for view in views] == [dialect] * 5

        # The recorded ids are those that the judge's engine received and sampled: ids of the judge's tokenizer.
        tokenizer = Tokenizer.load(str(other))
        engine = engine_of(w.service)
        prompt: list[int] = []
        for turn, request, said in zip(turns, engine.requests, JUDGE, strict=True):
            prompt += unpack_ids(turn.prompt_delta).tolist()
            assert request.input_ids.tolist() == prompt
            ids = unpack_ids(turn.output_ids).tolist()
            assert ids == tokenizer.encode(said)
            assert unpack_logprobs(turn.logprobs).tolist() == [
                scripted_logprob(at, token) for at, token in enumerate(ids, len(prompt))
            ]
            assert turn.versions == (VersionSpan(VERSION, 0, len(ids)),)
            assert (turn.engine, turn.drift_tokens) == ("judge-0", 0)
            assert (request.sampling.temperature, request.sampling.seed) == (1.0, None)
            prompt += ids
        assert [turn.parent for turn in turns] == [None, 0]
        assert {request.sampling.temperature for request in w.engine.requests} == {0.25}
        w.assert_quiet()
        assert [engine.sessions for engine in w.service.engines()] == [0, 0]


async def test_its_limit_refuses_its_calls_and_ends_nothing(world: MakeWorld, other: Path) -> None:
    async with world(POLICY, http=True, frozen=(judge(other, turns=1),)) as w:
        both, rows = await duet(w, BOTH)
        assert both.result is not None
        assert (both.result.stop_reason, both.result.error) == (StopReason.COMPLETED, None)
        assert both.result.verdict is not None
        assert both.result.frozen["judge"].turns == 1
        _, rows_alone = await duet(w, ["policy"] * 3)
        assert without_ids(rows) == without_ids(rows_alone)
        assert len(engine_of(w.service).requests) == 1


async def test_its_tokens_are_limited_too(world: MakeWorld, other: Path) -> None:
    async with world([SAY], frozen=(judge(other, response_tokens=3),)) as w:
        session = await w.run("ask", "consult judge quietly", "consult judge quietly", "ask")
        result = result_of(session)
        assert (result.stop_reason, result.turns) == (StopReason.COMPLETED, 2)
        assert result.frozen == {"judge": FrozenUse(turns=1, tokens=3)}


@pytest.mark.parametrize("limits", [{"turns": 2}, {"response_tokens": 4}], ids=str)
async def test_the_policys_limits_do_not_count_it(world: MakeWorld, other: Path, limits: dict[str, int]) -> None:
    async with world(["ok<|im_end|>"], frozen=(judge(other),)) as w:
        session = await w.run("ask", *["consult judge"] * 5, "ask", limits=limits)
        result = result_of(session)
        assert result.verdict is not None
        assert (result.turns, result.frozen["judge"].turns) == (2, 5)
        assert result.tokens.sampled == result.tokens.trained + result.tokens.masked + result.tokens.dropped


@pytest.mark.parametrize(("context", "turns"), [(4096, 1), (16, 200)], ids=["limit", "overflow"])
async def test_an_agent_that_gives_up_for_its_own_excess_is_graded(
    world: MakeWorld, other: Path, context: int, turns: int
) -> None:
    """Otherwise an agent could avoid its grade by calling the judge too often, or with too long a prompt."""
    async with world(frozen=(judge(other, context=context, turns=turns),)) as w:
        session = await w.run("ask", "consult judge", "consult judge", "ask", verdicts=[0.5])
        result = result_of(session)
        assert (result.stop_reason, result.error) == (StopReason.NONZERO_EXIT, None)
        assert result.verdict is not None
        assert result.verdict.reward == 0.5
        assert result.harness_exit is not None
        assert ("limit" if turns == 1 else "context") in result.harness_exit.log_tail
        before = result_of(await w.run("consult judge", "consult judge", "ask", max_attempts=1))
        assert before.error is not None
        assert before.verdict is None


@pytest.mark.parametrize("steps", [["consult judge"], ["consult judge quietly"], ["consult judge quietly", "ask"]])
async def test_a_session_whose_judge_fails_is_no_grade(world: MakeWorld, other: Path, steps: list[str]) -> None:
    """A run without its judge says nothing about the policy. The session ends with an error, whatever the agent does
    then."""
    async with world(frozen=(judge(other, BREAKS),)) as w:
        session = await w.run("ask", *steps, max_attempts=2)
        result = result_of(session)
        assert result.stop_reason is StopReason.ERROR
        assert result.error is not None
        assert (result.error.boundary, result.error.retryable) == ("engine", True)
        assert result.verdict is None
        assert session.attempt == 2
        assert w.stage.count["graded"] == 0
        w.assert_quiet()


async def test_a_judge_that_works_again_costs_nothing(world: MakeWorld, other: Path) -> None:
    async with world(frozen=(judge(other, BREAKS, *JUDGE),)) as w:
        result = result_of(await w.run("ask", "consult judge quietly", "consult judge", max_attempts=1))
        assert result.error is None
        assert result.verdict is not None


async def test_a_reply_in_flight_is_cut_off_and_recorded_with_its_session(world: MakeWorld, other: Path) -> None:
    long = {"reply": "The score is what is never said.<|im_end|>", "stall": 3}
    async with world(frozen=(judge(other, long),)) as w:
        submitted = await w.submit("ask", "consult judge")
        await engine_of(w.service).stalled.wait()
        await w.service.cancel(submitted.id)
        (session,) = (await w.done(submitted.id)).sessions
        [turn] = (await w.service.store.frozen_turns(session.id))["judge"]
        assert (turn.finish, len(turn.output_ids) // 4) == ("abort", 3)
        assert result_of(session).frozen == {"judge": FrozenUse(turns=1, tokens=3)}
        assert w.service.engines()[1].in_flight == 0


async def test_a_policy_update_leaves_it_alone(world: MakeWorld, other: Path, tmp_path: Path) -> None:
    """The update neither waits for the judge's reply nor cuts it off, and leaves the judge's engine as it is."""
    slow = {"reply": JUDGE[0], "stall": 3}
    weights = tmp_path / "weights"
    weights.touch()
    async with world(frozen=(judge(other, slow),)) as w:
        submitted = await w.submit("ask", "consult judge", "wait judged", "ask")
        engine = engine_of(w.service)
        await engine.stalled.wait()
        async with asyncio.timeout(10):
            status = await w.service.update_policy(PolicyUpdateSpec(version=5, mode="abort", weights=str(weights)))
        assert [member.name for member in status.engines] == ["scripted"]
        assert (engine.version, engine.weights, list(engine.aborted)) == (VERSION, None, [])
        await w.service.pool.policy.pause("abort")
        engine.release()
        await w.stage.arrived["judged"].wait()  # while the policy is paused
        await w.service.pool.policy.resume()
        w.stage.open["judged"].set()
        (session,) = (await w.done(submitted.id)).sessions
        [turn] = (await w.service.store.frozen_turns(session.id))["judge"]
        assert turn.versions == (VersionSpan(VERSION, 0, len(turn.output_ids) // 4),)
        policy = await w.service.store.turns(session.id)
        assert [span.version for turn in policy for span in turn.versions] == [0, 5]


async def test_all_is_read_back_after_a_restart(world: MakeWorld, other: Path) -> None:
    async with world(POLICY, http=True, frozen=(judge(other),)) as w:
        session, rows = await duet(w, BOTH)
        views = await w.service.reader.turns(session.id)
    async with world(POLICY, frozen=(judge(other),)) as w:
        assert await w.service.reader.turns(session.id) == views
        assert (await w.service.reader.session(session.id)).result == session.result
        assert list(await w.service.reader.samples(session.id)) == rows
    async with world(POLICY) as w:  # without the model its ids cannot be decoded, so the recorded text is shown
        again = await w.service.reader.turns(session.id)
        assert [view.model for view in again] == [view.model for view in views]
        assert [view.sampled for view in again if view.model] == [said.removesuffix("<|im_end|>") for said in JUDGE]
        assert "user: do it: judge, line 1" in again[3].context


async def test_an_unknown_model_is_not_the_policy_to_an_agent_in_process(world: MakeWorld, other: Path) -> None:
    async with world(frozen=(judge(other),)) as w:
        result = result_of(await w.run("ask", "consult juge", max_attempts=1))
        assert result.error is not None
        assert (result.error.code, result.error.field) == ("not_found", "model")
        assert "'policy', 'judge'" in (result.error.hint or "")


@pytest.mark.parametrize(
    ("frozen", "field"),
    [
        ([{"name": "policy"}], "frozen.0.name"),
        ([{"name": "judge"}, {"name": "user"}, {"name": "judge"}], "frozen.2.name"),
        ([{"name": "judge", "tokenizer": "nowhere"}], "frozen.0.tokenizer"),
        ([{"name": "judge", "renderer": "no-such-family"}], "frozen.0.renderer"),
    ],
)
async def test_a_wrong_setting_is_refused_by_its_field(
    tmp_path: Path, tokenizer: Path, frozen: list[dict[str, Any]], field: str
) -> None:
    models = tuple(FrozenConfig(**fields) for fields in frozen)
    with pytest.raises(InvalidField) as caught:
        async with open_service(config(tmp_path, tokenizer, frozen=models)):
            pass
    assert caught.value.field == field


async def test_engines_join_the_model_that_they_serve(world: MakeWorld, other: Path) -> None:
    def spec(name: str | None, serves: str | None) -> EngineSpec:
        return EngineSpec(kind="scripted", name=name, serves=serves, options={"replies": JUDGE})

    async with world(frozen=(judge(other), FrozenConfig(name="user"))) as w:
        service = w.service
        assert (await service.add_engine(spec("more", "judge"))).serves == "judge"
        assert (await service.add_engine(spec("mine", "user"))).serves == "user"
        unnamed = [(await service.add_engine(spec(None, serves))).name for serves in (None, "judge")]
        assert len(set(unnamed)) == 2
        for taken in ("more", "scripted"):
            with pytest.raises(Conflict, match=taken):
                await service.add_engine(spec(taken, "user"))
        with pytest.raises(InvalidField) as caught:
            await service.add_engine(spec("lost", "juge"))
        assert caught.value.field == "serves"
        assert "'judge', 'user'" in (caught.value.hint or "")
        await service.pool_of("more").remove("more")
        assert (await service.add_engine(spec("more", "user"))).serves == "user"
        status = await service.status()
        assert status.frozen == ("judge", "user")
        assert {engine.name: engine.serves for engine in status.engines} == {
            "scripted": None,
            unnamed[0]: None,
            "judge-0": "judge",
            unnamed[1]: "judge",
            "mine": "user",
            "more": "user",
        }
        assert {engine.name for engine in status.policy.engines} == {"scripted", unnamed[0]}


async def test_an_engine_of_another_tokenizer_is_refused_with_advice(world: MakeWorld, other: Path) -> None:
    class Other(ScriptedEngine):
        async def token_check(self, text: str) -> list[int]:
            return Tokenizer.load(str(other)).encode(text)

    async with world(frozen=(FrozenConfig(name="judge"),)) as w:
        pool = w.service._frozen["judge"]
        engine = Other(EngineOptions(name="judge-0"))
        with pytest.raises(ModelMismatch) as caught:
            await pool.add_engine(engine)
        assert caught.value.field == "frozen.tokenizer"
        assert "'judge'" in (caught.value.hint or "")


async def test_an_engine_in_a_models_own_list_serves_no_other(tmp_path: Path, tokenizer: Path) -> None:
    wrong = FrozenConfig(name="judge", engines=(EngineSpec(kind="scripted", serves="user"),))
    with pytest.raises(InvalidField) as caught:
        async with open_service(config(tmp_path, tokenizer, frozen=(wrong,))):
            pass
    assert caught.value.field == "frozen.0.engines"


async def test_a_hosted_judge_has_its_own_key_and_gives_text(world: MakeWorld) -> None:
    """A hosted judge needs no tokenizer: its text is recorded, without ids."""
    said = {"choices": [{"index": 0, "delta": {"content": "The score is high."}, "finish_reason": "stop"}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 5}}
    async with upstream(Answer(events=[said, usage]), pages={"/v1/models": {"data": [{"id": "big"}]}}) as (url, hosted):
        options = {"api_key": "the judge's own", "ids": False}
        spec = EngineSpec(kind="openai", name="hosted", url=f"{url}/v1", model="big", options=options)
        async with world(frozen=(FrozenConfig(name="judge", engines=(spec,), response_tokens=9),)) as w:
            session = await w.run("ask", "consult judge", "consult judge", "consult judge quietly", "ask")
            result = result_of(session)
            assert result.error is None
            assert (result.turns, result.frozen) == (2, {"judge": FrozenUse(turns=2, tokens=0)})
            assert [headers[b"authorization"] for headers in hosted.headers] == [b"Bearer the judge's own"] * 2
            assert [body["model"] for _, body in hosted.posts] == ["big"] * 2
            assert [body["max_tokens"] for _, body in hosted.posts] == [9, 4]
            views = [view for view in await w.service.reader.turns(session.id) if view.model == "judge"]
            assert [(view.mode, view.context, view.sampled) for view in views] == [
                ("text", "user: what is it worth?", "The score is high.")
            ] * 2


async def test_workers_of_a_relay_serve_one(world: MakeWorld, other: Path) -> None:
    fake = ScriptedEngine(EngineOptions(name="judge", tokenizer=str(other), options={"replies": JUDGE}))
    relay = EngineSpec(kind="relay", name="far")
    frozen = FrozenConfig(name="judge", tokenizer=str(other), renderer="qwen3", engines=(relay,))
    async with (
        world(http=True, frozen=(frozen,)) as w,
        Worker(w.url, fake, engine="far", reconnecting=AT_ONCE) as worker,
    ):
        await worker.attached()
        session = await w.run("ask", "consult judge", "ask")
        assert result_of(session).error is None
        [turn] = (await w.service.store.frozen_turns(session.id))["judge"]
        assert turn.engine == "far"
        assert [engine.serves for engine in w.service.engines()] == [None, "judge"]
