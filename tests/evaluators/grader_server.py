"""An external grader: replies to POST requests as a test prescribes, and records the requests."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson

from outrider.concurrency.retries import RetryPolicy
from outrider.config import GraderConfig
from outrider.evaluators.base import Outcome
from outrider.evaluators.endpoints import Endpoints
from outrider.evaluators.factory import make_evaluator
from outrider.harnesses.base import HarnessOutcome
from outrider.lab.fakes.engine_servers.app import serving
from outrider.lifecycle import StopReason
from outrider.messages import Message, Role
from outrider.spec import EvaluatorSpec, HarnessSpec, TaskSpec
from outrider.trajectory import Verdict
from outrider.wire.http_server import Receive, Scope, Send

CUT = "cut"
"""A reply whose connection breaks off."""


class Grader:
    """`answer` returns the reply to a request's body, or an awaitable of the reply: an object, bytes, a status, a tuple
    of status, headers and optionally content, or CUT."""

    def __init__(self, answer: Callable[[dict[str, Any]], Any]) -> None:
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.raw: list[bytes] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""
        self.endpoints = Endpoints()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.paths.append(scope["path"])
        self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        self.raw.append(body)
        self.bodies.append(orjson.loads(body or b"{}"))
        given = self.answer(self.bodies[-1])
        given = await given if inspect.isawaitable(given) else given
        status, headers = 200, {}
        if isinstance(given, tuple):
            status, headers, given = given if len(given) == 3 else (*given, {})
        elif isinstance(given, int):
            status, given = given, {"error": "canned"}
        content = given if isinstance(given, bytes) else orjson.dumps(given)
        if given == CUT:  # the body is shorter than its content-length, so the server closes the connection
            headers, content = {"content-length": "1000"}, b"{"
        lines = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": lines})
        await send({"type": "http.response.body", "body": content})

    async def grade(
        self, kind: str, said: str = "", *, instruction: str = "What is 6 times 7?", **options: Any
    ) -> Verdict:
        spec = EvaluatorSpec(kind=kind, options={"grader": "one", **options})
        return await make_evaluator(spec, self.endpoints).evaluate(an_outcome(spec, said, instruction))


def an_outcome(spec: EvaluatorSpec, said: str, instruction: str = "x", **fields: Any) -> Outcome:
    """Return the outcome of an agent whose only action was the reply `said`."""
    replied = (Message(role=Role.ASSISTANT, content=said),) if said else ()
    defaults: dict[str, Any] = {
        "task": TaskSpec(instruction=instruction, harness=HarnessSpec(command=["true"]), evaluator=spec),
        "runtime": None,
        "stop_reason": StopReason.COMPLETED,
        "harness": HarnessOutcome(),
        "transcript": (Message(role=Role.USER, content=instruction), *replied),
        "turns": len(replied),
    }
    return Outcome(**defaults | fields)


@asynccontextmanager
async def a_grader(answer: Callable[[dict[str, Any]], Any], **settings: Any) -> AsyncIterator[Grader]:
    grader = Grader(answer)
    async with serving(grader) as url:
        grader.url = url
        config = GraderConfig(name="one", url=url, **settings)
        grader.endpoints = Endpoints([config], pauses=RetryPolicy(first=0.001, longest=0.002, attempts=4))
        yield grader


def in_turn(*answers: Any) -> Callable[[dict[str, Any]], Any]:
    """Return a function that gives the answers in order and repeats the last. If an answer is callable, the function
    calls it with the request's body and gives the result."""
    left = list(answers)

    def answer(body: dict[str, Any]) -> Any:
        given = left.pop(0) if len(left) > 1 else left[0]
        return given(body) if callable(given) else given

    return answer
