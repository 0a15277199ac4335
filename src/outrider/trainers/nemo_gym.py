"""The bridge to NeMo Gym and NeMo RL: a NeMo Gym agent server that runs each rollout as a session of an Outrider
service.

NeMo Gym starts the server from a folder `responses_api_agents/outrider`, whose `app.py` has these lines:

    from outrider.trainers.nemo_gym import agent_class
    OutriderAgent = agent_class()
    if __name__ == "__main__":
        OutriderAgent.run_webserver()

NeMo RL sends each row of its data to `POST /run`, and trains on the reply (`nemo_rl.environments.nemo_gym`). Importing
this module does not import NeMo Gym. Invariants:

- A reply has exactly one training row, with the sampled tokens and a reward.
- A rollout that cannot be trained on becomes an HTTP error. The status shows whether another attempt may help.
- If the connection breaks before the reply and the request is repeated within RETRY_SECONDS, the repeated request gets
  the same rollout.
"""

from __future__ import annotations

import asyncio
import importlib
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, Any, TypeVar

import msgspec
import orjson
from fastapi import Request, Response
from pydantic import BeforeValidator, Field, PrivateAttr
from starlette.requests import ClientDisconnect

from outrider.errors import InvalidField, OutriderError, ServiceStopping, TooLarge
from outrider.sessions.calls.limits import MAX_BODY
from outrider.spec import Name
from outrider.trainers.attached_engines import LIMITS, AttachedEngines, AttachLimits
from outrider.trainers.exports import nemo_gym_reply
from outrider.trainers.shared_client import SharedClient, shared_client
from outrider.trainers.shared_settings import (
    PLAIN_SAMPLING,
    BridgeSettings,
    group_of,
    json_object,
    read_settings,
    refuse_images,
    task_for,
)
from outrider.trainers.trajectories import Trajectory, chosen_metrics, left_out_of, trajectories_of

T = TypeVar("T")

VARIABLE = "OUTRIDER_NEMO_GYM"
RETRY_SECONDS = 30.0
"""How many seconds a rollout continues after its client has disconnected. In this time, a repeated request can take the
rollout over. NeMo Gym's client repeats a request half a second after the connection broke."""
PARAMS = "responses_create_params"
OTHER_NAMES = {"max_output_tokens": "max_tokens"}
WITHOUT_EFFECT = {"input", "metadata", "model", "user", "store", "include", "parallel_tool_calls", "service_tier"}
"""Fields of `responses_create_params` that do not become sampling parameters. Some of these fields, such as `input`,
are read by other code. The other fields do not change the tokens that an agent samples."""
NEUTRAL = {"tool_choice": ("auto", "none"), "truncation": ("disabled",), "stream": (False,), "background": (False,)}
"""Fields of `responses_create_params` for which only the listed values are accepted. These values have no effect."""
TEMPLATE = "chat_template_kwargs"
"""The key of the chat template's variables. A NeMo Gym row may have this key in its `metadata`, in the `extra_body` of
its `metadata`, or in both."""
ENGINE = {"nemo_rl": True, "logprobs_mode": "processed_logprobs"}
"""Options of the engines that are attached for NeMo RL's vLLM workers (engine kind `openai`). NeMo RL 0.7 always sets
this `logprobs_mode`. Later versions read `logprobs_mode` from the workers' configuration."""
LABELS = {"_ng_task_index": "task", "_ng_rollout_index": "rollout", "_rowidx": "row"}
"""The columns of a NeMo Gym row that become labels of the task. Each label's name gets the prefix `nemo_gym.`."""


def _listed(urls: Any) -> Any:
    """Return `urls` as a list. On NeMo Gym's command line, `policy_base_url` may be a single URL."""
    return [urls] if isinstance(urls, str) else urls


class NemoGymSettings(BridgeSettings):
    """The settings that all bridges share, and these:

    rows: with "all", a session with several training rows is an error, because a reply has room for one row. With
        "main", the reply has the main conversation's row, and the other rows are counted.
    engines: the URLs of NeMo RL's inference servers. The bridge attaches them to the service as engines.
    model: the name of the model that these servers serve."""

    engines: Annotated[list[Name], BeforeValidator(_listed)] = Field(default_factory=list)
    model: Name | None = None


class GymRollouts:
    """Runs rows of the dataset as sessions: `async with GymRollouts(settings) as rollouts`. Leaving the block cancels
    all rollouts. A rollout whose client has disconnected continues for `retry_seconds`. `limits` apply to engines that
    are attached."""

    def __init__(
        self, settings: NemoGymSettings, *, retry_seconds: float = RETRY_SECONDS, limits: AttachLimits = LIMITS
    ) -> None:
        if settings.engines and settings.model is None:
            raise InvalidField(
                "the setting engines needs the setting model", field="model", hint="write model: ${policy_model_name}"
            )
        self._settings = settings
        self._retry_seconds = retry_seconds
        self._held = AsyncExitStack()
        self._tasks: asyncio.TaskGroup
        self._running: set[asyncio.Task[Any]] = set()
        self._shared: SharedClient
        self._left: defaultdict[bytes, list[_LeftRollout]] = defaultdict(list)
        """The rollouts whose clients have disconnected, by the digest of their requests."""
        self._engines = AttachedEngines("nemo-rl", limits=limits)

    async def __aenter__(self) -> GymRollouts:
        async with AsyncExitStack() as held:
            # Keep the client open between rollouts. A rollout with a new client would wait only FIRST_PATIENCE seconds
            # for a restarting service.
            self._shared = await held.enter_async_context(shared_client(self._settings.url, self._settings.token))
            self._tasks = await held.enter_async_context(asyncio.TaskGroup())
            held.callback(self._cancel)
            self._held = held.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._held.aclose()

    async def run(self, body: bytes, left: Callable[[], Awaitable[object]]) -> dict[str, Any] | None:
        """Run the row in `body`, the JSON of a request to `/run`, and return NeMo Gym's reply.

        `left()` returns when the client has disconnected. `run` then returns None, and the rollout continues for
        `retry_seconds`. If an equal request arrives in this time, the new request takes over the rollout. But while the
        first client is still connected, an equal request starts its own rollout, because a dataset may have a row
        twice.

        Raises InvalidField for a row that cannot be converted to a task. Raises the error of a failed session.
        """
        key = sha256(body).digest()
        if self._left.get(key):
            rollout = self._taken(key, self._left[key][0])
        else:
            row = _row_of(body)
            rollout = self._begin(self._outcome(row, self._group(row)))
        waiting = self._begin(_until(left))
        try:
            await asyncio.wait({rollout, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.cancelled() or rollout.cancelled():
                raise ServiceStopping("the agent server is being stopped")
            if waiting.done():
                self._keep(key, rollout)
                return None
        except asyncio.CancelledError:  # some versions of Starlette cancel a request when its client disconnects
            self._keep(key, rollout)
            raise
        finally:
            waiting.cancel()
        outcome = rollout.result()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self._tasks.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def _cancel(self) -> None:
        for task in self._running:
            task.cancel()

    def _keep(self, key: bytes, rollout: asyncio.Task[_Outcome]) -> None:
        kept: _LeftRollout
        # If no request takes the rollout over within `retry_seconds`, cancel it and its group.
        end = asyncio.get_running_loop().call_later(self._retry_seconds, lambda: self._taken(key, kept).cancel())
        kept = _LeftRollout(rollout, end)
        self._left[key].append(kept)

    def _taken(self, key: bytes, kept: _LeftRollout) -> asyncio.Task[_Outcome]:
        kept.end.cancel()
        self._left[key].remove(kept)
        if not self._left[key]:
            del self._left[key]
        return kept.task

    def _group(self, row: Mapping[str, Any]) -> dict[str, Any]:
        params = row[PARAMS]
        refuse_images(list(_images(params.get("input"))), f"{PARAMS}.input", field=PARAMS)
        agent = row.get("agent_ref")
        labels = {"nemo_gym.agent": agent.get("name") if isinstance(agent, Mapping) else None}
        labels |= {f"nemo_gym.{label}": row.get(column) for column, label in LABELS.items()}
        task = task_for(self._settings, row, prompt=params.get("input"), sampling=_sampling(params), labels=labels)
        task["sampling"] = PLAIN_SAMPLING | task["sampling"]
        # The group's idempotency key is random, because each epoch has the same rows and needs new sessions.
        return group_of(self._settings, task)

    async def _outcome(self, row: Mapping[str, Any], group: Mapping[str, Any]) -> _Outcome:
        try:
            await self._attach()
            done = await self._shared.run(group)
            [trajectory] = trajectories_of(done, self._settings, logprobs=True)
            return reply_of(trajectory, row, self._settings, rows_left_out=len(left_out_of(done, trajectory)))
        # Return the error, so that `run` raises it. An error raised here would make the task group cancel all rollouts.
        except Exception as error:
            return error

    async def _attach(self) -> None:
        """Attach NeMo RL's servers to the service, unless they are already attached."""
        engine = {"kind": "openai", "model": self._settings.model, "options": ENGINE}
        await self._engines.attach(self._shared.client, [engine | {"url": url} for url in self._settings.engines])


_Outcome = dict[str, Any] | Exception


@dataclass(frozen=True, eq=False)
class _LeftRollout:
    """A rollout whose client has disconnected, and the timer that will cancel the rollout."""

    task: asyncio.Task[_Outcome]
    end: asyncio.TimerHandle


def reply_of(
    trajectory: Trajectory, row: Mapping[str, Any], settings: NemoGymSettings, *, rows_left_out: int
) -> dict[str, Any]:
    """Return NeMo Gym's reply to the request `row`, from the request's finished session. `rows_left_out` is the number
    of the session's other rows with trained tokens. Raises the session's error. Raises InvalidField if the session has
    several rows with trained tokens and the setting `rows` is "all"."""
    if trajectory.error is not None:
        raise trajectory.error
    if len(trajectory.rows) > 1:
        raise InvalidField(
            f"session {trajectory.session.id} has {len(trajectory.rows)} rows that train, and NeMo RL takes one",
            field="rows",
            hint='use an agent that appends to one conversation, or train the main conversation alone: rows = "main"',
        )
    [trained] = trajectory.rows
    # NeMo Gym and NeMo RL log the numbers next to `reward` in the reply as metrics.
    metrics = {
        **chosen_metrics(trajectory, settings),
        "outrider_turns": float(trajectory.result.turns),
        "outrider_agent_seconds": trajectory.seconds,
        "outrider_truncated": float(trajectory.truncated),
        "outrider_rows_left_out": float(rows_left_out),
        "outrider_cut_tokens": float(trained.cut),
        "outrider_version_min": float(trained.sample.min_version),
        "outrider_version_max": float(trained.sample.max_version),
    }
    sample = msgspec.structs.replace(trained.sample, metrics=metrics)
    return nemo_gym_reply(sample, row, longest=settings.max_row_tokens)


def agent_class(settings: Mapping[str, Any] | None = None) -> type:
    """Return the class of the agent server, a subclass of NeMo Gym's SimpleResponsesAPIAgent.

    The entry `outrider` in the server's NeMo Gym configuration overrides `settings`, and $OUTRIDER_NEMO_GYM overrides
    both. Creating the server raises InvalidField for wrong settings. Raises ImportError if NeMo Gym is not installed.
    """
    base = importlib.import_module("nemo_gym.base_responses_api_agent")

    class OutriderAgentConfig(base.BaseResponsesAPIAgentConfig):  # type: ignore[misc, name-defined]
        outrider: dict[str, Any] = Field(default_factory=dict)

    class OutriderAgent(base.SimpleResponsesAPIAgent):  # type: ignore[misc, name-defined]
        config: OutriderAgentConfig
        _rollouts: GymRollouts = PrivateAttr()

        def model_post_init(self, context: Any) -> None:
            super().model_post_init(context)
            given = {**(settings or {}), **self.config.outrider}
            source = f"{self.config.name}.outrider"
            self._rollouts = GymRollouts(read_settings(NemoGymSettings, given, source=source, variable=VARIABLE))

        def setup_webserver(self) -> Any:
            app = super().setup_webserver()
            inner = app.router.lifespan_context

            @asynccontextmanager
            async def lifespan(app: Any) -> AsyncIterator[Any]:
                async with self._rollouts, inner(app) as state:
                    yield state

            app.router.lifespan_context = lifespan
            return app

        async def run(self, request: Request) -> Response:
            return await _answer(self._rollouts, request)

        async def responses(self, request: Request) -> Response:
            """Run a session for a request that has only `responses_create_params`. The reply has no reward."""
            return await _answer(self._rollouts, request, bare=True)

    OutriderAgent.model_rebuild(
        _types_namespace={"OutriderAgentConfig": OutriderAgentConfig, "GymRollouts": GymRollouts}
    )
    return OutriderAgent


async def _answer(rollouts: GymRollouts, request: Request, *, bare: bool = False) -> Response:
    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    try:
        body = await _body_of(request)
        if bare:
            body = orjson.dumps({PARAMS: _json_of(body)})
        reply = await rollouts.run(body, left)
    except ClientDisconnect:
        reply = None
    except OutriderError as error:
        content = orjson.dumps({"error": msgspec.to_builtins(error.record())})
        return Response(content, error.http_status, media_type="application/json")
    if reply is None:
        return Response(status_code=503)  # the client has disconnected and reads no reply
    return Response(orjson.dumps(reply["response"] if bare else reply), media_type="application/json")


async def _body_of(request: Request) -> bytes:
    """Read a request's body. Raises TooLarge if the body is too large, but only after the whole body has arrived. A
    reply before the end of the body would break the connection, and NeMo Gym's client would send the request again and
    again."""
    size, pieces = 0, []
    async for piece in request.stream():
        size += len(piece)
        if size <= MAX_BODY:
            pieces.append(piece)
        else:
            pieces.clear()
    if size > MAX_BODY:
        raise TooLarge(f"the row has {size} bytes; a task may have {MAX_BODY}", hint="take files out of the row")
    return b"".join(pieces)


async def _until(left: Callable[[], Awaitable[object]]) -> None:
    with suppress(Exception):  # an error here means that the client has disconnected
        await left()


def _json_of(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidField(f"the row is not JSON: {error}", field="row", hint="send a JSON object") from error


def _row_of(body: bytes) -> dict[str, Any]:
    row = _json_of(body)
    if not isinstance(row, dict):
        raise InvalidField(f"the row is a JSON {type(row).__name__}; it must be an object", field="row")
    if not isinstance(row.get(PARAMS), dict):
        raise InvalidField(f"the row has no object {PARAMS}", field=PARAMS, hint="see docs/trainers/nemo-rl.md")
    return row


def _sampling(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters in `responses_create_params` and in its `metadata.extra_body`. Raises InvalidField
    for a field that cannot be passed to the agents' model calls, such as `tools`."""
    found = {
        OTHER_NAMES.get(name, name): value
        for name, value in params.items()
        if name not in WITHOUT_EFFECT and value not in NEUTRAL.get(name, ())
    }
    metadata = params.get("metadata") or {}
    if not isinstance(metadata, Mapping):
        raise InvalidField(f"{PARAMS}.metadata is a {type(metadata).__name__}", field=f"{PARAMS}.metadata")
    found |= _object(metadata.get("extra_body"), f"{PARAMS}.metadata.extra_body")
    template = _object(found.pop(TEMPLATE, None), f"{PARAMS}.metadata.extra_body.{TEMPLATE}")
    template |= _object(metadata.get(TEMPLATE), f"{PARAMS}.metadata.{TEMPLATE}")
    # Rename `enable_thinking`. Other variables of the chat template keep their names. `task_for` later refuses these
    # variables, because `task.sampling` has no such fields.
    found |= {"thinking" if name == "enable_thinking" else name: value for name, value in template.items()}
    if not isinstance(found.get("thinking"), bool | None):
        raise InvalidField(f"enable_thinking is {found['thinking']!r}; it must be true or false", field=PARAMS)
    if found.get("tools"):
        raise InvalidField(
            f"{PARAMS}.tools names tools that Outrider's agent does not have",
            field=f"{PARAMS}.tools",
            hint="leave tools out of the row: task.harness decides which tools the agent has",
        )
    return found


def _object(value: Any, source: str) -> dict[str, Any]:
    """Return an object as a dict. `value` may be a mapping or, as in NeMo Gym's metadata, JSON text. None and empty
    text give an empty dict. Raises InvalidField for any other value."""
    if isinstance(value, str):
        return json_object(value, source) if value else {}
    if not isinstance(value, Mapping | None):
        raise InvalidField(f"{source} is a {type(value).__name__}; it must be an object or JSON", field=source)
    return dict(value or {})


def _images(messages: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the image parts of the messages."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and "image" in str(part.get("type")):
                yield part
