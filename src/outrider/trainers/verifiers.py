"""The part of the bridge to verifiers and prime-rl that does not need their packages. It runs dataset rows as sessions
of a service, and converts each session to the nodes and model calls of a verifiers trace.

`verifiers_plugin` contains the classes that verifiers itself uses. Invariants:

- A trace has exactly the ids, masks and log-probabilities of the session's rows.
- Each row is a path of the trace with its own root, so each trained token is in one node.
- A failed session is an error, never a reward.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from pydantic import Field

from outrider.client.client import AsyncClient, patiently
from outrider.errors import Conflict, InvalidField, OutriderError
from outrider.lifecycle import StopReason
from outrider.schemas import TurnView
from outrider.spec import Name
from outrider.trainers.attached_engines import LIMITS, AttachedEngines, AttachLimits
from outrider.trainers.shared_client import shared_client
from outrider.trainers.shared_settings import PLAIN_SAMPLING, BridgeSettings, group_of, task_for
from outrider.trainers.trajectories import TrainingRow, Trajectory, chosen_metrics, left_out_of, trajectories_of
from outrider.trajectory import ChatRow, FinishReason

VARIABLE = "OUTRIDER_VERIFIERS"
CACHE_SALT = "cache_salt"
"""The sampling parameter in which prime-rl sends the version of its policy, as decimal digits."""
WITHOUT_EFFECT = {CACHE_SALT, "return_token_ids", "stream", "stream_options"}
CLIENT_ENGINE = {"vllm": {"control": False, "logprobs_mode": "processed_logprobs"}}
"""Options with which the inference server of verifiers' client is attached as an engine, by engine kind. prime-rl
starts vLLM with this `logprobs_mode`. It also pauses vLLM and loads the weights itself, so `control` is False."""
STOPS = {
    StopReason.MAX_TURNS: "max_turns",
    StopReason.MAX_TOKENS: "max_output_tokens",
    StopReason.CONTEXT_OVERFLOW: "max_total_tokens",
}
"""verifiers' stop conditions for sessions that a limit ended. The traces of these sessions count as truncated."""


class VerifiersSettings(BridgeSettings):
    """The settings that all bridges share, and these:

    rows: "all" makes a path for each training row, "main" only for the main conversation's row.
    engines: "service" uses the engines that the service has. "client" attaches the inference server that verifiers'
        client uses.
    engine_kind, engine_options: the kind and the options of the engine that "client" attaches."""

    engines: Literal["service", "client"] = "service"
    engine_kind: Literal["vllm", "sglang", "openai"] = "vllm"
    engine_options: dict[Name, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class ModelServer:
    """The inference server that verifiers' client uses. `trains` is True if the rollouts are for training. Such
    rollouts need tokens."""

    url: str
    model: str
    api_key: str | None = field(repr=False)
    trains: bool


@dataclass(frozen=True)
class TraceParts:
    """The parts of a trace that come from a session.

    nodes, calls: have the fields of verifiers' MessageNode and ModelCall. Messages and tools are as in Chat
        Completions.
    reply: the last reply of the main conversation.
    stop: verifiers' stop condition."""

    nodes: list[dict[str, Any]]
    calls: list[dict[str, Any]]
    metrics: dict[str, float]
    info: dict[str, Any]
    reply: str | None
    stop: str | None
    timed_out: bool


class VerifiersRollouts:
    """Runs dataset rows as sessions of a service. `limits` are the limits of the waits for the service while an
    inference server is attached."""

    def __init__(self, settings: VerifiersSettings, *, limits: AttachLimits = LIMITS) -> None:
        self._settings = settings
        self._limits = limits
        self._engines = AttachedEngines("verifiers", limits=limits)
        self._attached: ModelServer | None = None
        self._earlier: set[str] = set()
        """Names that the model at the attached server had before."""
        self._version = -1
        self._unnamed = False
        """True while an attached engine does not have the policy's version yet."""
        self._naming = asyncio.Lock()

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Keep the client open during the block, so that new rollouts wait while the service restarts. After the
        restart, attach the inference server of verifiers' client again."""
        async with shared_client(self._settings.url, self._settings.token) as shared, asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(self._keep_attached(shared.client))
            try:
                yield
            finally:
                keeping.cancel()

    async def _keep_attached(self, client: AsyncClient) -> None:
        while True:
            await asyncio.sleep(self._limits.look_seconds)
            if self._attached is not None:
                with suppress(OutriderError):  # the loop tries again, and a new rollout raises the error
                    await self._attach(client, self._attached, salted=True)
                    await self._name_version(client, None)

    async def run(
        self,
        row: Mapping[str, Any],
        server: ModelServer,
        *,
        prompt: Any,
        sampling: Mapping[str, Any],
        system_prompt: str | None = None,
        max_turns: int | None = None,
        labels: Mapping[str, Any],
    ) -> TraceParts:
        """Run a dataset row as one session, and return the parts of its trace. `system_prompt` is put before the
        instruction.

        Raises InvalidField for a row that cannot be converted to a task. Raises the session's error. Cancelling the
        call cancels the session.
        """
        given = {name: value for name, value in sampling.items() if name not in WITHOUT_EFFECT}
        task = task_for(self._settings, row, prompt=prompt, sampling=given, labels=labels)
        if server.trains:
            task["sampling"] = PLAIN_SAMPLING | task["sampling"]
        if system_prompt is not None:
            task["instruction"] = f"{system_prompt}\n\n{task['instruction']}"
        if max_turns is not None:
            task["limits"] = {**(task.get("limits") or {}), "turns": max_turns}
        # The group's idempotency key is random. The same row occurs again in a group of verifiers and in the next
        # epoch, and each occurrence needs a new session.
        group = group_of(self._settings, task, evaluating=not server.trains)
        async with shared_client(self._settings.url, self._settings.token) as shared:
            if self._settings.engines == "client":
                salt = sampling.get(CACHE_SALT)
                await self._attach(shared.client, server, salted=salt is not None)
                await self._name_version(shared.client, salt)
            view = await shared.run(group)
            [trajectory] = trajectories_of(view, self._settings, logprobs=server.trains)
            _check(trajectory, trains=server.trains)
            session = trajectory.session.id
            turns = await patiently(partial(shared.client.turns, session))
            chats = await patiently(partial(shared.client.chat_rows, session)) if trajectory.rows else ()
        left_out = left_out_of(view, trajectory)
        return parts_of(trajectory, turns, chats, self._settings, model=server.model, left_out=len(left_out))

    async def _attach(self, client: AsyncClient, server: ModelServer, *, salted: bool) -> None:
        """Attach the inference server that verifiers' client uses to the service as an engine.

        prime-rl renames its policy's model when it trains a LoRA adapter. `salted` is True if the request has
        prime-rl's cache salt; only such a request may rename the model. A request with an earlier name of the model
        never renames the model back.

        Raises InvalidField for a second server, and for another model name in a request without a salt: all sessions of
        a service use all its engines, so the service can have only one model.
        """
        known = self._attached = self._attached or server
        renamed = server.model != known.model
        if server.url != known.url or (renamed and not salted):
            raise InvalidField(
                f"the client names {server.model!r} at {server.url}, and the service serves {known.model!r} at"
                f" {known.url}",
                field="client",
                hint="use a service for each model",
            )
        if server.model in self._earlier:  # the episode began before the model was renamed
            server, renamed = known, False
        kind = self._settings.engine_kind
        options = {**CLIENT_ENGINE.get(kind, {}), **self._settings.engine_options}
        if server.api_key is not None:
            options = {"api_key": server.api_key, **options}
        engine = {"kind": kind, "url": server.url, "model": server.model, "options": options}
        if await self._engines.attach(client, [engine], renamed=renamed):
            self._unnamed = True
        if renamed:
            self._earlier.add(known.model)
            self._attached = server

    async def _name_version(self, client: AsyncClient, salt: Any) -> None:
        """Raise the service's policy version to the version in prime-rl's cache salt, if the salt's version is higher.
        The service then does not reuse cached keys and values of older weights.

        After an engine was attached, the service's version is set again even if it stays the same. Otherwise the
        service would treat the engine as outdated. Does nothing while the policy is paused."""
        named = int(salt) if isinstance(salt, str) and salt.isascii() and salt.isdecimal() else -1
        async with self._naming:
            if named <= self._version and not self._unnamed:
                return
            policy = await patiently(client.policy)
            if policy.paused is not None:
                return
            if named > policy.version or (self._unnamed and policy.version > 0):
                with suppress(Conflict):  # another process has meanwhile set a higher version
                    await client.resume_policy(max(named, policy.version))
            self._version, self._unnamed = max(named, self._version), False


def _check(trajectory: Trajectory, *, trains: bool) -> None:
    """Raise the session's error, if it has one. In an evaluation, a graded session without tokens to train on is
    accepted. Raises InvalidField if the rows have different rewards, because a trace has one reward."""
    result = trajectory.session.result
    graded = result is not None and result.error is None and result.verdict is not None
    if trajectory.error is not None and (trains or not graded):
        raise trajectory.error
    odd = {row.sample.row: row.reward for row in trajectory.rows if row.reward != trajectory.reward}
    if odd and len(trajectory.rows) > 1:
        raise InvalidField(
            f"session {trajectory.session.id} has other rewards for its rows {sorted(odd)}, and a trace has one reward",
            field="rows",
            hint='leave rewards of rows out of the verdict, or train the main conversation alone: rows = "main"',
        )


def parts_of(
    trajectory: Trajectory,
    turns: Sequence[TurnView],
    chats: Sequence[ChatRow],
    settings: VerifiersSettings,
    *,
    model: str,
    left_out: int,
) -> TraceParts:
    """Convert a finished session to the parts of a trace. `chats` has the conversation of each row, and is empty for a
    session without rows. `left_out` is the number of the session's rows that have trained tokens but are not in the
    trace."""
    result = trajectory.result
    verdict = result.verdict
    assert verdict is not None
    own = [turn for turn in turns if turn.model is None]
    nodes: list[dict[str, Any]] = []
    places: dict[int, int] = {}
    if trajectory.rows:
        by_row = {chat.row: chat for chat in chats}
        for row in trajectory.rows:
            _add_row(nodes, places, row, by_row[row.sample.row])
    else:
        _add_texts(nodes, places, own)
    for turn in own:
        if turn.index in places:
            nodes[places[turn.index]]["timestamp"] = turn.timings.finished
    replies = [node["message"] for node in nodes if node["message"]["role"] == "assistant"]
    last = _last_reply(trajectory, by_row) if trajectory.rows else (replies[-1] if replies else None)
    reward = trajectory.rows[0].reward if trajectory.rows else trajectory.reward
    metrics = {
        **chosen_metrics(trajectory, settings),
        "outrider_agent_seconds": trajectory.seconds,
        "outrider_queued_seconds": result.seconds.queued + result.seconds.ready,
        "outrider_truncated": float(trajectory.truncated),
        "outrider_rows": float(len(trajectory.rows)),
        "outrider_rows_left_out": float(left_out),
        "outrider_cut_tokens": float(sum(row.cut for row in trajectory.rows)),
    }
    if trajectory.rows:
        metrics["outrider_version_min"] = float(min(row.sample.min_version for row in trajectory.rows))
        metrics["outrider_version_max"] = float(max(row.sample.max_version for row in trajectory.rows))
    info = {
        "session": result.session_id,
        "group": result.group_id,
        "attempt": result.attempt,
        "stop_reason": str(result.stop_reason),
        "reward": reward,
        "reason": verdict.reason,
        "metrics": dict(verdict.metrics),
        "turn_rewards": {str(turn): value for turn, value in verdict.turns.items()},
        "rows": [row.sample.row for row in trajectory.rows],
    }
    return TraceParts(
        nodes=nodes,
        calls=[_call(turn, places.get(turn.index), model) for turn in own],
        metrics=metrics,
        info=info,
        reply=None if last is None else last["content"],
        stop=STOPS.get(result.stop_reason),
        timed_out=result.stop_reason is StopReason.AGENT_TIMEOUT,
    )


def _add_row(nodes: list[dict[str, Any]], places: dict[int, int], row: TrainingRow, chat: ChatRow) -> None:
    """Add the path of a row to `nodes`, with a node for each message. Of the messages before a reply, the first gets
    all ids, because a row does not record which id belongs to which message. `places` maps the number of a turn to the
    index of its reply's node."""
    parent: int | None = None
    first = len(nodes)
    at = 0
    for turn, (start, end), (before, reply) in zip(
        row.sample.turns, row.sample.turn_spans, _exchanges(chat.messages), strict=False
    ):
        if start >= len(row.ids):
            break
        end = min(end, len(row.ids))
        for message in before:
            parent = _add(nodes, parent, message, row.ids[at:start])
            at = start
        trained = any(row.mask[start:end])
        node = _add(nodes, parent, reply, row.ids[at:end])
        if trained:
            mask = row.mask[start:end]
            pairs = zip(row.logprobs[start:end], mask, strict=True)
            nodes[node] |= {
                "sampled": True,
                "mask": [False] * (start - at) + [bool(one) for one in mask],
                "logprobs": [logprob for logprob, one in pairs if one],
            }
        if trained or turn not in places:
            places[turn] = node
        parent, at = node, end
    nodes[first]["tools"] = list(chat.tools or ())


def _add_texts(nodes: list[dict[str, Any]], places: dict[int, int], turns: Sequence[TurnView]) -> None:
    """Add the turns of a session without rows, as text without ids."""
    for turn in turns:
        parent = places.get(turn.parent) if turn.parent is not None else None
        if turn.context:
            parent = _add(nodes, parent, {"role": "user", "content": turn.context}, [])
        places[turn.index] = _add(nodes, parent, {"role": "assistant", "content": turn.sampled}, [])
        nodes[places[turn.index]]["sampled"] = True


def _add(nodes: list[dict[str, Any]], parent: int | None, message: Mapping[str, Any], ids: list[int]) -> int:
    nodes.append(
        {
            "parent": parent,
            "message": _message(message),
            "sampled": False,
            "token_ids": ids,
            "mask": [False] * len(ids),
            "logprobs": [],
        }
    )
    return len(nodes) - 1


def _exchanges(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[list[Mapping[str, Any]], Mapping[str, Any]]]:
    """Yield each reply of the model in a row's conversation, with the messages before it. Then yield empty replies
    without end, for the row's replies that the agent never received. Such replies may be trained, but are not in the
    conversation."""
    before: list[Mapping[str, Any]] = []
    for message in messages:
        if "weight" in message:
            yield before, message
            before = []
        else:
            before.append(message)
    while True:
        yield before, {"role": "assistant", "content": ""}
        before = []


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as in Chat Completions, where the arguments of a tool call are a text."""
    kept = {name: value for name, value in message.items() if name != "weight"}
    if calls := kept.get("tool_calls"):
        kept["tool_calls"] = [{**call, "function": _text_arguments(call["function"])} for call in calls]
    return kept


def _text_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    return {**function, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}


def _last_reply(trajectory: Trajectory, chats: Mapping[int, ChatRow]) -> dict[str, Any] | None:
    replies = [message for message in chats[trajectory.rows[0].sample.row].messages if "weight" in message]
    return _message(replies[-1]) if replies else None


def _call(turn: TurnView, node: int | None, model: str) -> dict[str, Any]:
    finish = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}.get(FinishReason(turn.finish))
    return {
        "node": node,
        "model": model,
        "sampling": {name: value for name, value in turn.sampling.items() if value is not None},
        "finish_reason": "tool_calls" if turn.tool_calls and finish == "stop" else finish,
        "usage": {
            "prompt_tokens": turn.prompt_tokens - (turn.cached_tokens or 0),
            "completion_tokens": turn.output_tokens,
            "cached_input_tokens": turn.cached_tokens,
        },
        "time": {"start": turn.timings.received, "end": turn.timings.finished},
    }
