"""The evaluator `http`: sends the conversation to a grading service of the operator. The request has Outrider's own
format, the format of NeMo Gym's `POST /verify`, or a format of ProRL Agent's reward servers.

The sandbox is not used. Invariants: only a finite reward in a reply with a 2xx status is a grade; a retry sends the
same body with the same id.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

import msgspec
from msgspec.structs import replace
from pydantic import Field, model_validator

from outrider.callbacks import signed_headers
from outrider.errors import EvaluatorError
from outrider.evaluators.answers import last_reply
from outrider.evaluators.base import Outcome
from outrider.evaluators.endpoints import Endpoints, variable
from outrider.evaluators.grader_calls import post
from outrider.evaluators.options import read_options
from outrider.evaluators.verdict import read_verdict
from outrider.messages import Message, Role, with_images
from outrider.spec import EvaluatorSpec, Name, Seconds, Spec
from outrider.trajectory import Verdict

CONTRACT = 1
"""Version of Outrider's own request and reply format."""


class HttpOptions(Spec):
    """Options of kind `http`.

    grader: the name of a grader in the setting `graders`.
    contract: the format of the request and the reply.
    data: the task's own data. Outrider's format sends it as `options`. For NeMo Gym, `data` is the row, and the row's
        fields become fields of the body. For ProRL's reward servers, `data` has the fields in REWARD_ROUTES.
    call_seconds: time limit of one call.
    """

    grader: Name
    contract: Literal["outrider", "nemo_gym", "prorl", "prorl_reasoning_gym"] = "outrider"
    data: Annotated[dict[str, Any], Field(default_factory=dict)]
    call_seconds: Seconds = 60

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (route := REWARD_ROUTES.get(self.contract)) is not None and self.data.keys() != set(route.data):
            needed = " and ".join(route.data)
            raise ValueError(f"contract {self.contract!r} needs data with {needed}, and nothing else")
        return self


class RewardRoute(NamedTuple):
    """A route of ProRL's reward servers.

    answer: the field of the body for the agent's last reply.
    data: the fields that the option `data` must have."""

    path: str
    answer: str
    data: tuple[str, ...]


REWARD_ROUTES = {
    "prorl": RewardRoute("/compute_score", "solution_str", ("ground_truth", "data_source")),
    "prorl_reasoning_gym": RewardRoute("/score", "answer", ("entry", "task")),
}
"""The routes of ProRL's reward servers, by the option `contract`. Both reply with `score`: a number, or a list that
begins with the number."""


class HttpEvaluator:
    """Grades through an HTTP service (see `HttpOptions`). The verdict's reward, metrics and reason come from the
    reply."""

    takes_endpoints = True

    def __init__(self, spec: EvaluatorSpec, endpoints: Endpoints) -> None:
        self._options = read_options(HttpOptions, spec)
        self._endpoints = endpoints
        self._grader = endpoints.grader(self._options.grader, field="task.evaluator.options.grader")
        endpoints.check_signing_key(self._grader, field="task.evaluator.options.grader")

    async def evaluate(self, outcome: Outcome) -> Verdict:
        options, grader, nemo_gym = self._options, self._grader, self._options.contract == "nemo_gym"
        reward_route = REWARD_ROUTES.get(options.contract)
        number = f"eval-{secrets.token_hex(16)}"
        transcript = [with_images(message, lambda image: replace(image, data=b"")) for message in outcome.transcript]
        if nemo_gym:
            body = verify_request(options.data, transcript, number)
        elif reward_route is not None:
            body = {**options.data, reward_route.answer: last_reply(outcome)}
        else:
            body = {
                "contract": CONTRACT,
                "id": number,
                "instruction": outcome.task.instruction,
                "options": options.data,
                "labels": outcome.task.labels,
                "stop_reason": outcome.stop_reason.value,
                "answer": last_reply(outcome),
                "transcript": transcript,
                "metrics": {"turns": outcome.turns, "exit_code": outcome.harness.exit_code},
            }
        # The body is encoded by `json`, because msgspec refuses lone surrogates, which tools and models can produce.
        encoded = json.dumps(msgspec.to_builtins(body), ensure_ascii=False).encode("utf-8", "replace")
        secret = variable(grader.secret_variable, grader.name)

        def sign() -> dict[str, str]:
            return {} if secret is None else signed_headers(secret, number, encoded, now=time.time())

        answer = await post(
            grader,
            reward_route.path if reward_route is not None else "/verify" if nemo_gym else "",
            encoded,
            seconds=options.call_seconds,
            sign=sign,
            pauses=self._endpoints.pauses,
            load=self._endpoints.load,
        )
        try:
            if reward_route is not None:
                return scored(answer)
            return verified(answer) if nemo_gym else graded(answer)
        except ValueError as error:
            raise EvaluatorError(f"grader {grader.name!r} answered no verdict: {error}") from error


def graded(answer: dict[str, Any]) -> Verdict:
    """Read a verdict from a reply in Outrider's own format. The field `version`, the grader's own version, becomes part
    of the verdict's reason. Raises ValueError."""
    fields = dict(answer)
    version = fields.pop("version", None)
    verdict = read_verdict(fields)
    if version is None:
        return verdict
    return replace(verdict, reason=f"[version {version}] {verdict.reason or ''}".rstrip())


def verified(answer: dict[str, Any]) -> Verdict:
    """Read a verdict from NeMo Gym's reply. Its field `reward` is the reward, and its other numbers are metrics. Raises
    ValueError."""
    if "reward" not in answer:
        raise ValueError("the answer has no reward")
    numbers = {
        name: value
        for name, value in answer.items()
        if name != "reward" and isinstance(value, int | float) and not isinstance(value, bool)
    }
    return read_verdict({"reward": answer["reward"], "metrics": numbers})


def scored(answer: dict[str, Any]) -> Verdict:
    """Read a verdict from a reply of ProRL's reward servers. Raises ValueError if the reply has no number, because such
    a reply must not count as a score of 0."""
    score = answer.get("score")
    if isinstance(score, list) and score:
        score = score[0]
    if isinstance(score, bool):  # some servers only tell whether the answer is right
        score = float(score)
    if not isinstance(score, int | float):
        raise ValueError("the answer has no score that is a number, or a list that begins with a number")
    return read_verdict({"reward": score})


def verify_request(row: dict[str, Any], transcript: Sequence[Message], number: str) -> dict[str, Any]:
    """Return the body of NeMo Gym's `POST /verify`: the row's fields and two more.

    responses_create_params: the messages before the model's first reply, unless the row has this field.
    response: the rest of the conversation, as an object of OpenAI's Responses API. `number` is the id of the
        evaluation."""
    first = next((at for at, message in enumerate(transcript) if message.role is Role.ASSISTANT), len(transcript))
    asked = [{"role": message.role.value, "content": message.content} for message in transcript[:first]]
    output: list[dict[str, Any]] = []
    for message in transcript[first:]:
        where = f"{number}-{len(output)}"
        if message.role is Role.TOOL:
            output.append(
                {
                    "type": "function_call_output",
                    "id": where,
                    "call_id": message.tool_call_id or "",
                    "output": message.content,
                    "status": "completed",
                }
            )
            continue
        if message.role is not Role.ASSISTANT:
            output.append({"type": "message", "id": where, "role": message.role.value, "content": message.content})
            continue
        if message.content or not message.tool_calls:
            text = {"type": "output_text", "text": message.content, "annotations": []}
            output.append(
                {"type": "message", "id": where, "role": "assistant", "status": "completed", "content": [text]}
            )
        for call in message.tool_calls:
            about = {"call_id": call.id, "name": call.name, "arguments": call.arguments, "status": "completed"}
            output.append({"type": "function_call", "id": f"{where}-{call.id}", **about})
    response = {
        "id": number,
        "object": "response",
        "created_at": int(time.time()),
        "status": "completed",
        "model": "policy",
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }
    return {"responses_create_params": {"input": asked}, **row, "response": response}
