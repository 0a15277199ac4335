"""Nodes whose messages cannot be true: such a node is disconnected with a reason, and its sessions return to the queue.
Other false claims are refused or bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from outrider.counts import Distribution, NodeCounts, SandboxCounts
from outrider.engines.base import ChatChunk, ChatRequest, EngineHealth, EngineOptions, SamplingParams
from outrider.engines.gates import GateReport
from outrider.engines.pool.placement import EngineUse
from outrider.errors import Boundary, ErrorRecord, FailingChore
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from outrider.lifecycle import GroupState, SessionState, StopReason
from outrider.messages import Image, Message, Role, image_from_bytes, image_from_url
from outrider.nodes import calls, claims
from outrider.nodes.messages import (
    MAX_FROM_NODE,
    MAX_HELLO,
    AddTurn,
    CallReply,
    CallRequest,
    CancelCall,
    CheckEngine,
    Gate,
    GenerateChat,
    GenerateTokens,
    KeepArtifact,
    KeepIndex,
    Leaving,
    ModelUses,
    Ready,
    Report,
    RunAttempt,
    SetState,
    Take,
)
from outrider.nodes.remote_node import NodeWaits
from outrider.schemas import Artifact, ArtifactList, GroupView, NodeStats
from outrider.sessions.attempt import MAX_ANSWER, session_result
from outrider.sessions.resources import ResourceAmount
from outrider.spec import TaskSpec, TokenSpec
from outrider.trajectory import (
    BranchKind,
    BranchPolicy,
    FinishReason,
    HarnessExit,
    ImageSpan,
    JoinKind,
    LogprobKind,
    SessionResult,
    TokenCounts,
    TokenMode,
    Turn,
    TurnTimings,
    Verdict,
    VersionSpan,
    WorkerReport,
    pack_ids,
    pack_logprobs,
)
from outrider.wire import decoding, link, resumable
from outrider.wire.link_protocol import Beat, Close, Nonsense, encode
from outrider.wire.resumable import HEADER, PIECE
from support.hostile_node import HostileNode, hello, report
from support.odd_values import ODD, mutated

from .conftest import Running, Starts

CUT_OFF = int(Close.NONSENSE)
replace = msgspec.structs.replace


class Plain:
    """`ChatEngine` that always replies "x". Its health reports version 0."""

    name = "plain"
    mode = TokenMode.TEXT
    logprob_kind = LogprobKind.NONE

    async def start(self) -> None:
        """Nothing to open."""

    async def close(self) -> None:
        """Nothing to close."""

    async def health(self) -> EngineHealth:
        return EngineHealth(ok=True)

    async def chat(self, request: ChatRequest) -> AsyncGenerator[ChatChunk, None]:
        yield ChatChunk(text="x", finish=FinishReason.STOP)


def counted(**counts: Any) -> Report:
    return replace(report(), counts=NodeCounts(**counts))


def reply(call: int, value: object) -> CallReply:
    return CallReply(call, msgspec.Raw(encode(value)))


def tokens(input_ids: bytes = pack_ids([1]), model: str | None = None, **sampling: Any) -> GenerateTokens:
    return GenerateTokens(model, "e", "", "", input_ids, SamplingParams(**{"max_tokens": 1} | sampling))


@dataclass(frozen=True)
class Told:
    """An attempt that a node was given."""

    call: int
    run: RunAttempt
    task: TaskSpec

    @classmethod
    def by(cls, call: CallRequest[RunAttempt]) -> Told:
        return cls(call.call, call.request, TaskSpec.model_validate_json(call.request.task))

    @property
    def ids(self) -> tuple[str, int]:
        return self.run.session.id, self.run.session.attempt

    @property
    def honest(self) -> CallReply:
        return reply(self.call, self.result())

    def result(self, turns: tuple[Turn, ...] = (), *, reward: float = 1.0) -> SessionResult:
        """Return an honest result of the attempt."""
        session, verdict = self.run.session, Verdict(reward=reward)
        return session_result(session, StopReason.COMPLETED, turns, task=self.task, verdict=verdict)

    def ran(self, **changes: Any) -> CallReply:
        return reply(self.call, replace(self.result(), **changes))

    def turn(self, index: int = 0, **changes: Any) -> CallRequest[AddTurn]:
        known: dict[str, Any] = {
            "index": index,
            "parent": None,
            "join": JoinKind.ROOT,
            "prompt_length": 2,
            "prompt_delta": pack_ids([1, 2]),
            "output_ids": pack_ids([3]),
            "logprobs": pack_logprobs([-1.0]),
            "logprob_kind": LogprobKind.SAMPLING,
            "versions": (VersionSpan(0, 0, 1),),
            "finish": FinishReason.STOP,
            "dialect": "chat",
            "engine": "e",
            "sampling": {},
            "timings": TurnTimings(received=1.0, first_token=1.0, finished=2.0),
        }
        model, call = changes.pop("model", None), changes.pop("call", index)
        return CallRequest(call, AddTurn(*self.ids, Turn(**known | changes), model))


async def given_one(running: Running, node: HostileNode) -> tuple[GroupView, Told]:
    """Submit a group of one session. Returns the group and the attempt that the node was given."""
    view = await running.submit("ask")
    return view, Told.by(await node.given())


async def check_cut_off(running: Running, view: GroupView, node: HostileNode, reason: str) -> None:
    """Check that the node was disconnected, that the status shows `reason`, and that the session is queued again
    without a result."""
    end = await node.ended()
    assert end.code == CUT_OFF, end
    async with asyncio.timeout(30):
        while running.service.nodes().nodes:  # noqa: ASYNC110  # no event signals the node's end
            await asyncio.sleep(0.01)
        [session] = await running.service.store.sessions(view.id)
        while session.state is not SessionState.QUEUED:
            await asyncio.sleep(0.01)
            [session] = await running.service.store.sessions(view.id)
    assert (session.result, session.ending) == (None, None)
    [refused] = running.service.nodes().refused
    assert (refused.name, refused.token) == ("bad", "local")
    assert reason in refused.reason


CHAT = ChatRequest(
    request_id="",
    session_key="",
    messages=(),
    tools=(),
    sampling=SamplingParams(max_tokens=1),
)

DEEP = b"\x82\xa4type\xa4beat\xa1x" + b"\x91" * 30_000 + b"\xc0"
"""A heartbeat with an unknown field that contains 30,000 nested lists."""

IMAGE = image_from_bytes("image/png", b"image")


def shown(image: Image) -> tuple[Message, ...]:
    return (Message(role=Role.USER, parts=(image,)),)


FORGED: dict[str, tuple[Callable[[Told], list[Any]], str]] = {
    "another group": (lambda told: [told.ran(group_id="g-other")], "session, group"),
    "another session": (lambda told: [told.ran(session_id="s-other")], "session, group"),
    "another attempt": (lambda told: [told.ran(attempt=7)], "session, group"),
    "another sample": (lambda told: [told.ran(sample_index=7)], "session, group"),
    "labels": (lambda told: [told.ran(labels={"tenant": "other"})], "session, group"),
    "a run graded again": (lambda told: [told.ran(regrades="s-other")], "session, group"),
    "an end of the service's own": (lambda told: [told.ran(stop_reason=StopReason.EARLY_STOP)], "stop_reason"),
    "an error without one": (lambda told: [told.ran(stop_reason=StopReason.ERROR)], "stop_reason"),
    "a timeout with a reward": (lambda told: [told.ran(stop_reason=StopReason.SESSION_TIMEOUT)], "verdict"),
    "a reward without end": (lambda told: [told.ran(verdict=Verdict(reward=1e308))], "rewards"),
    "a reward that is none": (lambda told: [told.ran(verdict=Verdict(reward=nan))], "rewards"),
    "a reward of a turn that is not": (lambda told: [told.ran(verdict=Verdict(reward=1, turns={3: 1.0}))], "rewards"),
    "a reward of a row that is not": (lambda told: [told.ran(verdict=Verdict(reward=1, rows={0: 1.0}))], "rewards"),
    "a metric that is none": (lambda told: [told.ran(verdict=Verdict(reward=1, metrics={"x": nan}))], "metrics"),
    "fewer turns than none": (lambda told: [told.ran(turns=-5)], "`turns`"),
    "turns that are not stored": (lambda told: [told.ran(turns=5)], "`turns`"),
    "fewer turns than stored": (lambda told: [told.turn(), told.ran()], "`turns`"),
    "turns with a gap": (
        lambda told: [
            told.turn(1),
            told.ran(turns=1, tokens=TokenCounts(sampled=1, trained=1)),
        ],
        "`turns`",
    ),
    "tokens that are not": (lambda told: [told.ran(tokens=TokenCounts(sampled=9, trained=9))], "`tokens`"),
    "tokens that do not add up": (lambda told: [told.ran(tokens=TokenCounts(trained=9))], "`tokens`"),
    "rows that are not": (lambda told: [told.ran(samples=9)], "other numbers"),
    "negative seconds": (
        lambda told: [told.ran(seconds=replace(told.result().seconds, run=-1.0))],
        "other numbers",
    ),
    "an exit code without end": (
        lambda told: [told.ran(harness_exit=HarnessExit(code=(1 << 64) - 1, log_tail=""))],
        "exit code",
    ),
    "a policy that trains more": (
        lambda told: [told.ran(policy=dict.fromkeys(BranchKind, BranchPolicy.TRAIN))],
        "`policy`",
    ),
    "artifacts that are not": (lambda told: [told.ran(artifact_bytes=1 << 40)], "artifact_bytes"),
    "a long answer": (lambda told: [told.ran(answer="x" * (MAX_ANSWER + 1))], "texts and tables"),
    "an attempt that it does not have": (lambda told: [CallReply(99)], "never made"),
    "a turn before its parent": (lambda told: [told.turn(parent=0)], "`parent`"),
    "a turn with its own parent's number": (lambda told: [told.turn(3, parent=3)], "`parent`"),
    "a turn below none": (lambda told: [told.turn(-1, call=0)], "`index`"),
    "a turn with half an id": (lambda told: [told.turn(prompt_delta=b"123")], "matching lengths"),
    "a turn without its log-probabilities": (lambda told: [told.turn(logprobs=b"12345678" * 9)], "matching lengths"),
    "a turn with a prompt without end": (lambda told: [told.turn(prompt_length=1 << 60)], "matching lengths"),
    "a turn with a negative id": (lambda told: [told.turn(output_ids=pack_ids([-7]))], "log-probabilities"),
    "a turn with an id of no token": (lambda told: [told.turn(output_ids=pack_ids([1 << 30]))], "log-probabilities"),
    "a turn with a negative prompt": (lambda told: [told.turn(prompt_delta=pack_ids([-1, 2]))], "log-probabilities"),
    "a turn with a log-probability that is none": (
        lambda told: [told.turn(logprobs=pack_logprobs([nan]))],
        "log-probabilities",
    ),
    "a turn more probable than certain": (
        lambda told: [told.turn(logprobs=pack_logprobs([5.0]))],
        "log-probabilities",
    ),
    "a turn that is not probable at all": (
        lambda told: [told.turn(logprobs=pack_logprobs([-inf]))],
        "log-probabilities",
    ),
    "a turn that says no log-probability": (lambda told: [told.turn(logprobs=b"")], "log-probabilities"),
    "a turn of other versions": (lambda told: [told.turn(versions=(VersionSpan(0, 0, 9),))], "matching lengths"),
    "a turn of a version without end": (lambda told: [told.turn(versions=(VersionSpan(1 << 40, 0, 1),))], "matching"),
    "a turn of another step": (lambda told: [told.turn(step=9)], "`step`"),
    "a turn of no model": (lambda told: [told.turn(model="other")], "model"),
    "a turn with ids of its own and of a report": (
        lambda told: [told.turn(report=WorkerReport(output_ids=pack_ids([1]), logprobs=pack_logprobs([-1.0])))],
        "`report`",
    ),
    "a report with half an id": (
        lambda told: [told.turn(report=WorkerReport(output_ids=b"123", logprobs=b"123456"))],
        "`report`",
    ),
    "a report with a time that is none": (
        lambda told: [told.turn(report=WorkerReport(timing={"dispatched_at": nan}))],
        "`report`",
    ),
    "a turn with a time that is none": (
        lambda told: [told.turn(timings=TurnTimings(received=nan, first_token=None, finished=nan))],
        "other numbers",
    ),
    "more tokens than the task allows": (
        lambda told: [
            told.turn(
                output_ids=pack_ids([3] * 2000),
                logprobs=pack_logprobs([-1.0] * 2000),
                versions=(VersionSpan(0, 0, 2000),),
            )
        ],
        "response_tokens",
    ),
    "a turn with a value that JSON does not have": (
        lambda told: [told.turn(sampling={"x": msgspec.msgpack.Ext(5, b"")})],
        "`sampling`, `rank_info`, tools",
    ),
    "an image of other bytes": (lambda told: [told.turn(messages=shown(replace(IMAGE, data=b"other")))], "images"),
    "an image of no bytes' size": (lambda told: [told.turn(messages=shown(replace(IMAGE, size=-1)))], "images"),
    "an image of another address": (
        lambda told: [told.turn(messages=shown(replace(image_from_url("http://x"), digest="ab")))],
        "images",
    ),
    "an image behind its prompt": (
        lambda told: [told.turn(messages=shown(IMAGE), images=(ImageSpan(IMAGE.digest, 1 << 63, 1 << 63, (1, 1, 1)),))],
        "images",
    ),
    "a file that was not kept": (
        lambda told: [
            CallRequest(
                0,
                KeepIndex(
                    *told.ids,
                    ArtifactList(
                        session_id="x",
                        attempt=1,
                        artifacts=(Artifact(path="/x", size=1, sha256="../../../etc/passwd"),),
                        left_out=(),
                    ),
                ),
            )
        ],
        "kept for this attempt",
    ),
    "a negative take": (
        lambda told: [encode(CallRequest(0, Take(ResourceAmount(cpus=-1.0), 0)))],
        "no message",
    ),
    "a take without end": (lambda told: [CallRequest(0, Take(ResourceAmount(cpus=nan), 0))], "no message"),
    "a take before all others": (
        lambda told: [CallRequest(0, Take(ResourceAmount(cpus=1.0), 1 << 40))],
        "no message",
    ),
    "a call twice": (
        lambda told: [CallRequest(0, SetState(*told.ids, SessionState.READY))] * 2,
        "call 0 came after 0",
    ),
    "a gate of the future": (
        lambda told: [Gate(model=None, report=GateReport(mode_changes=9, in_flight=0, whole=0))],
        "a gate after 9 changes of mode",
    ),
    "a gate of no model": (
        lambda told: [Gate(model="other", report=GateReport(mode_changes=0, in_flight=0, whole=0))],
        "a model that the service does not have",
    ),
    "a check of an engine of no model": (lambda told: [CheckEngine(model="other", engine="e")], "a model that"),
    "a report that cannot be": (lambda told: [report(-5)], "impossible numbers"),
    "counts of failed calls below zero": (
        lambda told: [counted(failed_calls={"chat": {"x": -1}})],
        "impossible counts",
    ),
    "counts of more seconds than there are": (
        lambda told: [counted(sandboxes={"memory": SandboxCounts(started=Distribution(total=inf))})],
        "impossible counts",
    ),
    "counts of other buckets": (
        lambda told: [counted(sandboxes={"memory": SandboxCounts(started=Distribution((1,)))})],
        "impossible counts",
    ),
    "counts of more runtimes than there are": (
        lambda told: [counted(sandboxes={str(number): SandboxCounts() for number in range(300)})],
        "impossible counts",
    ),
    "counts of a dialect with a long name": (
        lambda told: [counted(failed_calls={"x" * 300: {"y": 1}})],
        "impossible counts",
    ),
    "counts that go down": (
        lambda told: [counted(failed_calls={"chat": {"x": 2}}), counted(failed_calls={"chat": {"x": 1}})],
        "impossible counts",
    ),
    "a report with room without end": (lambda told: [report(1 << 40)], "impossible numbers"),
    "a prompt with a negative id": (
        lambda told: [CallRequest(0, tokens(pack_ids([-1])))],
        "impossible ids",
    ),
    "half an id": (lambda told: [CallRequest(0, tokens(b"123"))], "impossible ids"),
    "a generation of nothing": (lambda told: [CallRequest(0, tokens(max_tokens=0))], "a generation of 0 tokens"),
    "a generation of no model": (lambda told: [CallRequest(0, tokens(model="other"))], "a model that"),
    "a call of no kind": (
        lambda told: [encode({"type": "call", "call": 0, "request": {"type": "stop_the_service"}})],
        "no message",
    ),
    "a result that is none": (lambda told: [reply(told.call, {"reward": 1})], "no message"),
    "a name without end": (lambda told: [CheckEngine(model=None, engine="x" * 1000)], "no message"),
    "no message": (lambda told: [b"\xff\x00what"], "no message"),
    "many values": (
        lambda told: [told.turn(sampling={"x": [[]] * decoding.MAX_COST})],
        "too many values",
    ),
    "deep values": (
        lambda told: [b"\x91" * (decoding.SMALL + 1)],
        "within each other",
    ),
    "deep values in few bytes": (lambda told: [DEEP], "no message"),
    "text that is no UTF-8": (
        lambda told: [encode(CheckEngine(model=None, engine="xy")).replace(b"xy", b"\xff\xfe")],
        "no me",
    ),
}


@pytest.mark.parametrize("case", FORGED)
async def test_a_node_that_says_what_cannot_be_is_cut_off(start: Starts, case: str) -> None:
    make, reason = FORGED[case]
    async with start(processes=0) as running, HostileNode.joined(running.url) as node:
        view = await running.submit("ask", limits={"response_tokens": 1000})
        *before, last = make(Told.by(await node.given()))
        for message in before:
            await node.say(message)
            while isinstance(message, CallRequest) and not isinstance(await node.hear(), CallReply):
                pass
        await node.say(last)
        await check_cut_off(running, view, node, reason)


@pytest.mark.parametrize("indexes", [(0, 2), (0, 5), (5,)])
async def test_gaps_in_the_turns_of_a_failed_attempt_keep_nobody_from_reading(
    start: Starts, indexes: tuple[int, ...]
) -> None:
    """A turn is missing, for example because it could not be stored. The results of other sessions are on the same
    page."""
    async with (
        start(processes=0) as running,
        HostileNode.joined(running.url) as node,
        aiohttp.ClientSession() as http,
    ):
        view = await running.submit("ask", max_attempts=1)
        told = Told.by(await node.given())
        for index in indexes:
            await node.say(told.turn(index, parent=1 if index == 2 else None))
            while not isinstance(await node.hear(), CallReply):
                pass
        error = ErrorRecord(boundary=Boundary.ENGINE, code="engine_rejected", message="x")
        failed = told.ran(stop_reason=StopReason.ERROR, verdict=None, error=error, turns=len(indexes))
        await node.say(failed)
        [session] = (await running.done(view)).sessions
        for path in (
            "results?samples=true",
            f"groups/{view.id}?samples=true",
            *(f"sessions/{session.id}/{part}" for part in ("turns", "timeline", "samples", "chat")),
            "query?sql=SELECT * FROM turns",
            "groups",
        ):
            async with http.get(f"{running.url}/v1/{path}") as answer:
                assert answer.status == 200, (path, await answer.text())
        turns = await running.service.store.turns(session.id)
        assert [turn.index for turn in turns] == list(range(len(turns)))


async def test_turns_that_are_stored_at_once_count_together(start: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node cannot exceed the task's `response_tokens` with turns that it sends before the first is stored."""
    async with start(processes=0) as running, HostileNode.joined(running.url) as node:
        store, go, turns = running.service.store, asyncio.Event(), list[int]()
        add_turn = store.add_turn

        async def slow(session_id: str, attempt: int, turn: Turn, *, model: str | None = None) -> None:
            turns.append(turn.index)
            await go.wait()
            await add_turn(session_id, attempt, turn, model=model)

        monkeypatch.setattr(store, "add_turn", slow)
        view = await running.submit("ask", limits={"response_tokens": 1000})
        told = Told.by(await node.given())
        for index in range(3):
            fields = {"output_ids": pack_ids([3] * 400), "logprobs": pack_logprobs([-1.0] * 400)}
            await node.say(told.turn(index, versions=(VersionSpan(0, 0, 400),), **fields))
        await check_cut_off(running, view, node, "response_tokens")
        assert turns == [0, 1]


async def test_an_honest_node_is_believed(start: Starts) -> None:
    """Messages of the kinds in FORGED are accepted if they are true, so the rules do not refuse every message."""
    async with start(processes=0) as running, HostileNode.joined(running.url) as node:
        view, told = await given_one(running, node)
        asked: list[CallRequest[Any]] = [
            told.turn(0),
            told.turn(
                1,
                parent=0,
                prompt_length=4,
                prompt_delta=pack_ids([4]),
                messages=(*shown(IMAGE), *shown(image_from_url("http://x/y.png"))),
                images=(ImageSpan(IMAGE.digest, 3, 1, (1, 2, 2)),),
                sampling={"temperature": 0.5, "logit_bias": {"1": -1.0}},
                report=WorkerReport(timing={"queue_ms": -3.0, "received_at_ns": 1.8e18, "sent_at": None}),
            ),
        ]
        for state in (SessionState.READY, SessionState.RUNNING, SessionState.EVALUATING):
            asked.append(CallRequest(len(asked), SetState(*told.ids, state)))
        for call in asked:
            await node.say(call)
            while not isinstance(answer := await node.hear(), CallReply):
                pass
            assert (answer.call, answer.error) == (call.call, None)
        result = told.result((asked[0].request.turn, asked[1].request.turn), reward=0.5)
        await node.say(reply(told.call, result))
        view = await running.done(view)
        assert (view.sessions[0].result, view.sessions[0].node) == (result, "bad")
        assert running.service.nodes().refused == ()


async def test_an_answer_of_any_length_costs_no_honest_node_its_connection(start: Starts) -> None:
    """The agent decides how long its answer is. The node keeps the end of the answer, of the length that the service
    accepts."""
    async with start(processes=0) as running, HostileNode.joined(running.url) as node:
        view, told = await given_one(running, node)
        result = session_result(
            told.run.session,
            StopReason.COMPLETED,
            (),
            task=told.task,
            verdict=Verdict(reward=1.0),
            answer="a remark" + "x" * MAX_ANSWER,
        )
        await node.say(reply(told.call, result))
        [session] = (await running.done(view)).sessions
        assert session.result is not None
        assert session.result.answer == "x" * MAX_ANSWER


async def test_what_a_node_asks_for_others_is_refused(start: Starts) -> None:
    """A node's calls about a session of another node fail, and nothing is stored. If the node sends a result of this
    session, the node is disconnected; the session is not affected."""
    async with (
        start(processes=0) as running,
        HostileNode.joined(running.url, "good", capacity=1) as good,
        HostileNode.joined(running.url, "bad", capacity=0) as bad,
    ):
        view, told = await given_one(running, good)
        await bad.say(told.turn(0), CallRequest(1, KeepArtifact(*told.ids, b"x")), Ready())
        errors: list[str] = []
        while len(errors) < 2:
            if isinstance(message := await bad.hear(), CallReply):
                assert message.error is not None
                errors.append(message.error.code)
        assert errors == ["conflict"] * 2
        assert await running.service.store.turns(view.sessions[0].id) == []
        await bad.say(told.honest)
        assert (await bad.ended()).code == CUT_OFF
        await good.say(told.honest)
        view = await running.done(view)
        assert (view.sessions[0].node, view.sessions[0].attempt) == ("good", 1), "the other's end is nothing to it"


async def test_a_node_that_takes_and_takes_is_cut_off_before_it_costs_anything(start: Starts) -> None:
    async with start(processes=0) as running, HostileNode.joined(running.url) as node:
        takes = [CallRequest(number, Take(ResourceAmount(cpus=4.0), 0)) for number in range(200)]
        for take in takes:
            await node.say(take)
        assert (await node.ended()).code == CUT_OFF
        async with asyncio.timeout(30):
            while not running.service.nodes().refused:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert "asks for resources" in running.service.nodes().refused[0].reason
        assert running.service.nodes().refused[0].name == "bad"


async def test_an_attempt_that_a_node_cannot_run_keeps_the_labels_of_its_task(start: Starts) -> None:
    async with start(processes=0) as running, HostileNode.joined(running.url) as node:
        view = await running.submit("ask", labels={"run": "a"}, branches={"unsure": "drop"})
        told = Told.by(await node.given())
        error = ErrorRecord(boundary=Boundary.HARNESS, code="harness_error", message="no such program")
        await node.say(CallReply(told.call, error=error))
        result = (await running.done(view)).sessions[0].result
        assert result is not None
        assert result.error is not None
        assert result.error.message == "no such program"
        assert result.labels == {"run": "a"}
        assert result.policy == told.result().policy


async def test_a_long_error_is_cut(start: Starts) -> None:
    """A message and a log tail of 4.9 MB each are cut: they would be searched for secrets, stored and shown."""
    text = "Bearer " * 700_000
    error = ErrorRecord(boundary=Boundary.HARNESS, code="harness_error", message=text, log_tail=text)
    async with start(processes=0) as running, HostileNode.joined(running.url) as node:
        view, told = await given_one(running, node)
        await node.say(told.ran(stop_reason=StopReason.ERROR, verdict=None, error=error))
        view = await running.done(view)
        result = view.sessions[0].result
        assert result is not None
        assert result.error is not None
        assert len(result.error.message) <= 8192
        assert len(result.error.log_tail or "") <= 65_536


@pytest.mark.parametrize(
    ("first", "code"),
    [
        (encode(hello(version="x" * MAX_HELLO)), Close.NONSENSE),
        (b"?" * (7 << 20), Close.NONSENSE),
        (encode(hello(version="x" * 100)), Close.NONSENSE),
        (encode(hello(host="x" * 1000)), Close.NONSENSE),
        (b"?", Close.NONSENSE),
        (DEEP.replace(b"\xa4beat", b"\xa5hello"), Close.NONSENSE),
        (encode(hello(version="xy")).replace(b"xy", b"\xff\xfe"), Close.NONSENSE),
        (encode(hello(version="0.0.0")), Close.PROTOCOL),
        (encode(hello(received=5)), Close.REMOVED),
    ],
    ids=["long", "7 MiB", "version", "host", "none", "deep", "no UTF-8", "another version", "given up"],
)
async def test_a_hello_that_cannot_be_is_refused(start: Starts, first: bytes, code: int) -> None:
    async with start(processes=0) as running, HostileNode.dialled(running.url) as node:
        await node.send_bytes(first)
        assert (await node.ended()).code == code
        assert running.service.nodes().nodes == ()


async def test_a_hello_that_is_longer_than_any_message_is_not_even_read(start: Starts) -> None:
    async with start(processes=0) as running, HostileNode.dialled(running.url) as node:
        with suppress(ConnectionError):  # the service may end the connection while the hello is being sent
            await node.send_bytes(b"?" * (15 << 20))
        assert (await node.ended()).code != Close.LEFT
        assert running.service.nodes().nodes == ()


async def test_a_hello_of_thousands_of_gpus_is_refused(start: Starts) -> None:
    capacity = {"cpus": 1.0, "memory_mb": 1, "gpus": ["x"] * 5000}
    fields = msgspec.to_builtins(hello()) | {"type": "hello", "capacity": capacity}
    async with start(processes=0) as running, HostileNode.dialled(running.url) as node:
        await node.send_bytes(msgspec.msgpack.encode(fields))
        assert (await node.ended()).code == CUT_OFF


PIECES: dict[str, list[bytes]] = {
    "a frame without end": [bytes([1]) + bytes(HEADER - 1) + bytes(PIECE)] * (MAX_FROM_NODE // PIECE + 1),
    "tiny pieces": [bytes([1]) + bytes(HEADER - 1) + b"x"] * 3,
    "an acknowledgement of what was never sent": [bytes([0]) + (1 << 60).to_bytes(8, "little") + encode(report())],
    "no header": [b"x"],
}


@pytest.mark.parametrize("case", PIECES)
async def test_a_node_that_breaks_the_connections_protocol_is_cut_off(start: Starts, case: str) -> None:
    async with start(processes=0) as running, HostileNode.joined(running.url) as node:
        view, _ = await given_one(running, node)
        with suppress(ConnectionError):  # the service may end the connection before the last piece is sent
            for each in PIECES[case]:
                await node.send_bytes(each)
        await check_cut_off(running, view, node, "")


async def test_what_a_node_says_of_itself_does_not_fill_the_status(start: Starts) -> None:
    words = "x" * 100_000
    failing = (FailingChore(name=words, node="other", since=1.0, last=2.0, count=3, error=words),) * 100
    said = report(failing=failing)
    async with start(processes=0) as running, HostileNode.joined(running.url) as node:
        await running.service.pool.add_engine(Plain())
        use = EngineUse(suspect=words, misbehaved=1)
        await node.say(replace(said, uses=(ModelUses(model=None, engines={"plain": use}),)))
        async with asyncio.timeout(30):
            while not (suspect := running.service.pool.status()[0].suspect):  # noqa: ASYNC110  # no event signals this
                await asyncio.sleep(0.01)
        [stats] = running.service.nodes().nodes
        assert len(suspect) == 8192
        assert len(stats.failing) == claims.MAX_FAILING
        assert {(each.node, len(each.name), len(each.error)) for each in stats.failing} == {("bad", 256, 1000)}


async def test_a_node_has_an_engine_sent_no_id_that_its_model_does_not_have(start: Starts) -> None:
    """Some inference servers crash if they get such an id."""
    engine = ScriptedEngine(EngineOptions(name="e", options={"replies": [{"ids": [5]}]}))
    async with start(processes=0) as running, HostileNode.joined(running.url) as node:
        await running.service.pool.add_engine(engine)
        for number, (prompt, stop) in enumerate((([1 << 30], ()), ([1], (1 << 30,)))):
            sampling = SamplingParams(max_tokens=1, stop_token_ids=stop)
            await node.say(CallRequest(number, GenerateTokens(None, "e", "", "", pack_ids(prompt), sampling)))
            while not isinstance(part := await node.hear(), CallReply):
                pass
            assert part.error is not None
            assert "the model does not have" in part.error.message


async def test_a_node_that_does_not_end_what_is_cancelled_is_given_up(start: Starts) -> None:
    """A group can be cancelled, and the service can stop, although a node does not end the attempt."""
    async with start(processes=0, waits=NodeWaits(cancel=0.2)) as running, HostileNode.joined(running.url) as node:
        view, _ = await given_one(running, node)
        await running.service.cancel(view.id)
        [session] = (await running.done(view)).sessions
        assert session.result is not None
        assert (session.result.stop_reason, session.result.verdict) == (StopReason.CANCELLED, None)
        assert "has not ended attempt" in (await node.ended()).reason


async def test_a_session_with_a_turn_whose_parent_is_missing_can_be_ended(start: Starts) -> None:
    """Such a turn is stored, but is not read. The end of the session must not wait until it is."""
    async with start(processes=0, waits=NodeWaits(cancel=0.2)) as running, HostileNode.joined(running.url) as node:
        view, told = await given_one(running, node)
        for index, parent in ((0, None), (2, 1)):
            await node.say(told.turn(index, parent=parent))
            while not isinstance(await node.hear(), CallReply):
                pass
        async with asyncio.timeout(20):
            await running.service.cancel(view.id)
            [session] = (await running.done(view)).sessions
        assert session.result is not None
        assert (session.result.stop_reason, session.result.turns) == (StopReason.CANCELLED, 1)


async def test_large_tasks_that_begin_at_once_do_not_cost_a_node_its_connection(
    start: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node reads the tasks of a whole group one by one."""
    monkeypatch.setattr(link, "CROWDED", 1 << 20)
    monkeypatch.setattr(link, "MAX_WAITING", 4 << 20)
    monkeypatch.setattr(resumable, "MAX_UNACKNOWLEDGED", 1 << 20)
    async with start(processes=0) as running, HostileNode.joined(running.url, capacity=16) as node:
        view = await running.submit("ask", n=16, instruction="x" * 600_000)
        async with asyncio.timeout(60):
            while not all(  # noqa: ASYNC110
                session.node for session in await running.service.store.sessions(view.id)
            ):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)  # in this time the service makes the messages
        for _ in range(16):
            await node.given()
            await node.say(Beat())


async def test_a_false_gate_does_not_stall_a_pause(start: Starts) -> None:
    async with start(processes=0) as running, HostileNode.joined(running.url) as node:
        view, _ = await given_one(running, node)
        policy = running.service.pool.policy
        policy.gate.settle_seconds = 0.1
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            pausing = tasks.create_task(policy.pause("finish"))
            while policy.gate.mode is None:  # noqa: ASYNC110
                await asyncio.sleep(0)
            report = GateReport(mode_changes=policy.gate.mode_changes, in_flight=10**9, whole=0)
            await node.say(Gate(model=None, report=report))
            await pausing
        end = await node.ended()
        assert end.code == Close.SILENT
        assert "generations have not ended" in end.reason
        [session] = await running.service.store.sessions(view.id)
        assert session.result is None
        await policy.resume()


async def test_a_claim_of_a_version_does_not_raise_the_policys(start: Starts) -> None:
    async with start(processes=0) as running, HostileNode.joined(running.url) as node:
        await running.service.pool.add_engine(Plain())
        uses = {"plain": EngineUse(version=(1 << 31) - 1)}
        await node.say(replace(report(), uses=(ModelUses(model=None, engines=uses),)))
        member = running.service.pool.members["plain"]
        async with asyncio.timeout(30):
            while "bad" not in member.uses:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            while member.runs("check"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert running.service.pool.policy.version == 0


async def test_a_nodes_name_belongs_to_its_token(start: Starts) -> None:
    async with start(processes=0, token="root") as running:
        first, second = [
            (await running.service.tokens.create(TokenSpec(name=name, role="node"))).text for name in ("one", "two")
        ]

        def dialled(token: str, name: str = "far") -> AbstractAsyncContextManager[HostileNode]:
            return HostileNode.dialled(running.url, name, headers={"Authorization": f"Bearer {token}"})

        async with dialled(first) as node, dialled(second) as other, dialled(second, "near") as beside:
            greeting = hello()
            await node.send_bytes(encode(greeting))
            await node.receive_bytes()
            for thief in (other, beside):  # both send even the secret ids of the first node's process and machine
                await thief.send_bytes(encode(greeting))
                assert (await thief.ended()).code == Close.CONFLICT
            await node.say(report(), Ready())
            assert [each.name for each in await _nodes(running)] == ["far"]


async def _nodes(running: Running) -> tuple[NodeStats, ...]:
    async with asyncio.timeout(30):
        while not (nodes := running.service.nodes().nodes):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return nodes


async def test_a_node_that_reports_another_name_keeps_its_own(start: Starts) -> None:
    async with start(processes=0) as running, HostileNode.joined(running.url):
        [node] = await _nodes(running)
        assert (node.name, node.drained) == ("bad", False)


@pytest.mark.deep
async def test_a_node_that_does_not_wait_for_answers_is_read_no_further(start: Starts) -> None:
    """All calls of the node are answered, and at most MAX_CALLS of them are unanswered at a time."""
    number = 3 * calls.MAX_CALLS
    async with start(processes=0) as running, HostileNode.joined(running.url) as node:
        _, told = await given_one(running, node)
        states = [CallRequest(call, SetState(*told.ids, SessionState.QUEUED)) for call in range(number)]
        most = 0

        async def look() -> None:
            nonlocal most
            while True:
                [place] = running.service.scheduler.places._places.values()
                most = max(most, len(place.node._connection.calls._unanswered))  # type: ignore[attr-defined]
                await asyncio.sleep(0)

        looking = asyncio.ensure_future(look())
        await node.say(*states)
        answered = 0
        while answered < number:
            answered += isinstance(await node.hear(), CallReply)
        assert not looking.done()
        looking.cancel()
        assert 0 < most <= calls.MAX_CALLS


def honest_words(told: Told) -> list[dict[str, Any]]:
    """Return messages that a node may send, as decoded msgpack."""
    share = ResourceAmount(cpus=1.0)
    words = [
        told.turn(),
        told.ran(),
        told.ran(
            stop_reason=StopReason.ERROR, verdict=None, error=ErrorRecord(boundary=Boundary.ENGINE, code="", message="")
        ),
        report(),
        Ready(),
        Gate(model=None, report=GateReport(mode_changes=0, in_flight=0, whole=0)),
        CheckEngine(model=None, engine="e"),
        CallRequest(0, SetState(*told.ids, SessionState.READY)),
        CallRequest(0, KeepArtifact(*told.ids, b"x")),
        CallRequest(0, KeepIndex(*told.ids, ArtifactList(session_id="", attempt=1, artifacts=(), left_out=()))),
        CallRequest(0, Take(share, 0)),
        CancelCall(0),
        CallRequest(0, GenerateChat(None, "e", CHAT)),
        Leaving(),
        CallRequest(0, tokens()),
    ]
    return [msgspec.msgpack.decode(encode(word), strict=False) for word in words]


WORDS = st.tuples(st.integers(0, 14), st.integers(0, 40), st.integers(0, len(ODD) - 1), st.booleans())


@pytest.mark.deep
@settings(
    deadline=None,
    max_examples=12,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(nodes=st.lists(st.lists(WORDS | st.binary(max_size=40), max_size=10), min_size=4, max_size=12))
def test_whatever_nodes_say_the_service_stays_up_and_stores_nothing_foreign(
    start: Starts, tmp_path: Path, caplog: pytest.LogCaptureFixture, nodes: list[list[Any]]
) -> None:
    """Nodes send valid messages, mutated messages and random bytes. A good node is connected all the time, and
    completes a group at the end."""
    caplog.clear()

    async def run() -> None:
        async with (
            start(processes=0, data=tmp_path / uuid4().hex) as running,
            HostileNode.joined(running.url, "good", capacity=0) as good,
        ):
            views = []
            for number, words in enumerate(nodes):
                async with HostileNode.joined(running.url, f"bad-{number}", capacity=1) as bad:
                    views.append(await running.submit("ask"))
                    told = Told.by(await bad.given())
                    known = honest_words(told)
                    with suppress(ConnectionError):
                        for call, word in enumerate(words):
                            if isinstance(word, bytes):
                                await bad.say(word)
                                continue
                            which, place, odd, changed = word
                            said = known[which] | ({"call": call} if known[which]["type"] == "call" else {})
                            await bad.say(msgspec.msgpack.encode(mutated(said, place, ODD[odd]) if changed else said))
                        await bad.say(CancelCall(1 << 40))
            ids = {view.sessions[0].id: view.id for view in views}
            for view in views:
                [session] = await running.service.store.sessions(view.id)
                turns = await running.service.store.turns(session.id) if session.attempt else []
                if (result := session.result) is not None:
                    assert ids[result.session_id] == result.group_id == view.id
                    assert result.verdict is None or abs(result.verdict.reward) <= 1e15
                    assert result.turns == len(turns) or result.verdict is None
            submitted = await running.submit("ask")
            await good.say(report(64))
            async with asyncio.timeout(60):
                while (
                    view := await running.service.group(submitted.id, wait=0, samples=False)
                ).state is not GroupState.DONE:
                    told = Told.by(await good.given())
                    await good.say(told.honest)
                    await running.service.group(told.run.session.group_id, wait=30, samples=False)
            assert view.sessions[0].node == "good"

    asyncio.run(run())
    assert [record.getMessage() for record in caplog.records if record.exc_info] == [], "no bug of ours came to light"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(), inner, max_size=20),
        max_leaves=50,
    )
)
def test_the_cost_of_any_message_can_be_told(thing: Any) -> None:
    frame = msgspec.msgpack.encode(thing)
    decoding.check_cost(frame)
    if len(frame) > 1:
        with pytest.raises(Nonsense):
            decoding.check_cost(b"\x92" + frame)  # a list of two elements, of which the second is missing


@given(st.binary(max_size=200))
def test_the_cost_of_any_bytes_can_be_told(data: bytes) -> None:
    with suppress(Nonsense):
        decoding.check_cost(data)


def test_long_texts_are_cheap_and_many_values_are_not() -> None:
    decoding.check_cost(msgspec.msgpack.encode({"x": "y" * (8 << 20), "z": b"0" * (8 << 20)}))
    decoding.check_cost(msgspec.msgpack.encode([0] * (decoding.MAX_COST - decoding.CONTAINER)))
    with pytest.raises(Nonsense, match="too many values"):
        decoding.check_cost(msgspec.msgpack.encode([0] * decoding.MAX_COST))
    with pytest.raises(Nonsense, match="too many values"):
        decoding.check_cost(msgspec.msgpack.encode([[]] * (decoding.MAX_COST // decoding.CONTAINER)))
