"""Plugins for verifiers (0.4): a taskset, a harness and an environment. The module `outrider_rollouts` exports them
under the id `outrider-rollouts`.

The taskset reads dataset rows. The harness runs each row as a session of a service (`verifiers.VerifiersRollouts`), and
writes the session's tokens into the trace. The reward of a task is the verdict of its session. Invariant: a trace has a
reward only if its session was graded. Any failure is an error of the trace.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

try:
    import verifiers.v1 as vf
    from verifiers.v1.configs.client import resolve_api_key
    from verifiers.v1.dialects import parse_message, parse_tools
except ImportError as error:
    from outrider.environment import install_command

    raise ImportError(
        f"outrider.trainers.verifiers_plugin needs verifiers 0.4 ({install_command('verifiers')}): {error}"
    ) from error

from pydantic import Field
from pydantic_core import to_json

from outrider.errors import Boundary, InvalidField, OutriderError, error_text
from outrider.tasks.datasets import read_rows
from outrider.trainers.shared_settings import plain, read_settings
from outrider.trainers.verifiers import VARIABLE, ModelServer, TraceParts, VerifiersRollouts, VerifiersSettings

ID = "outrider-rollouts"
INFO = "outrider"
"""The key of a session's data in `Trace.info`."""
NO_KEY = "EMPTY"
ERRORS: dict[Boundary, type[vf.RolloutError]] = {
    Boundary.ENGINE: vf.ProviderError,
    Boundary.REQUEST: vf.TaskError,
    Boundary.RUNTIME: vf.SandboxError,
    Boundary.HARNESS: vf.HarnessError,
    Boundary.EVALUATOR: vf.TaskError,
    Boundary.SERVICE: vf.InterceptionError,
}
"""verifiers' error types, by the part of Outrider in which an error occurred. In verifiers, an `InterceptionError`
means that the communication with verifiers' proxy for model calls has failed."""


class OutriderRow(vf.TaskData):  # type: ignore[misc]
    """A row of the dataset. verifiers stores it in each trace."""

    row: dict[str, Any] = Field(default_factory=dict)


class OutriderTask(vf.Task[OutriderRow]):  # type: ignore[misc]
    """The task of a row. Its reward is the verdict of the session that ran the row."""

    @vf.reward  # type: ignore[untyped-decorator]
    async def outrider(self, trace: Any) -> float:
        found = trace.info.get(INFO)
        if found is None:
            raise ValueError(f"the trace has no session of Outrider: the task needs the harness {ID}")
        return float(found["reward"])


class OutriderTasksetConfig(vf.TasksetConfig):  # type: ignore[misc]
    """The configuration of the taskset.

    rows: a file of dataset rows (JSON Lines, JSON, Parquet, or a saved Hugging Face dataset).
    prompt_column: the column with the prompt, as text or messages. The prompt is used for tasks without an instruction.
    id_column: the column with the names of the rows."""

    rows: Path | None = None
    prompt_column: str = "prompt"
    id_column: str | None = None


class OutriderTaskset(vf.Taskset[OutriderTask, OutriderTasksetConfig]):  # type: ignore[misc]
    """The tasks made from the rows of a file."""

    def load(self) -> Iterator[OutriderTask]:
        config = self.config
        if config.rows is None:
            raise InvalidField("the taskset has no rows", field="rows", hint="set --env.taskset.rows FILE")
        number = -1
        for number, row in enumerate(read_rows(config.rows)):
            data = plain(row)
            _check_recordable(number, data)
            if config.id_column is not None and config.id_column not in data:
                raise InvalidField(f"row {number} has no column {config.id_column!r}", field="id_column")
            yield OutriderTask(
                OutriderRow(
                    row=data,
                    prompt=_prompt(number, data.get(config.prompt_column)),
                    id=None if config.id_column is None else str(data[config.id_column]),
                ),
                config.task,
            )
        if number < 0:
            raise InvalidField(f"{config.rows} has no rows", field="rows")


class OutriderHarnessConfig(vf.HarnessConfig):  # type: ignore[misc]
    """The configuration of the harness. `outrider` has the settings of `VerifiersSettings`, overridden by
    $OUTRIDER_VERIFIERS. verifiers stores these settings in each trace, so the service's token should be in
    $OUTRIDER_TOKEN instead."""

    outrider: dict[str, Any] = Field(default_factory=dict)


class OutriderHarness(vf.Harness[OutriderHarnessConfig]):  # type: ignore[misc]
    """Runs a row as a session. The service runs the agent and its sandbox, and grades the session. verifiers starts
    nothing."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    _running: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, VerifiersRollouts]]] = WeakKeyDictionary()
    """The rollouts of each event loop, by their settings. verifiers makes a harness for each episode, and harnesses
    with the same settings share the attached engines."""

    def __init__(self, config: OutriderHarnessConfig) -> None:
        super().__init__(config)
        self._settings = read_settings(VerifiersSettings, config.outrider, source="harness.outrider", variable=VARIABLE)

    @property
    def rollouts(self) -> VerifiersRollouts:
        """The rollouts of the running event loop with this harness's settings."""
        of_loop = self._running.setdefault(asyncio.get_running_loop(), {})
        return of_loop.setdefault(self._settings.model_dump_json(), VerifiersRollouts(self._settings))

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        async with _translated():
            row = trace.task.data
            if not isinstance(row, OutriderRow):
                raise InvalidField(
                    f"the harness plays rows of the taskset {ID}, not {type(row).__name__}", field="taskset"
                )
            parts = await self.rollouts.run(
                row.row,
                _server(ctx),
                prompt=row.model_dump(include={"prompt"})["prompt"],
                sampling=ctx.sampling.model_dump(exclude_none=True),
                system_prompt=row.system_prompt,
                max_turns=_max_turns(trace.agent.config),
                labels={"verifiers.task": row.idx, "verifiers.id": row.id, "verifiers.trace": trace.id},
            )
        fill(trace, parts)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


# verifiers' default runtime is a remote sandbox. Nothing runs in the runtime here, so the local runtime is chosen. The
# harness is set with `model_copy`, which does not validate. Validation would import the harness's module by its id, and
# the harness's module imports this module.
_AGENT = vf.AgentConfig(runtime=vf.SubprocessConfig()).model_copy(update={"harness": OutriderHarnessConfig(id=ID)})


class OutriderEnvConfig(vf.EnvConfig):  # type: ignore[misc]
    """The configuration of the environment, which has a single agent."""

    agent: vf.AgentConfig = _AGENT


class OutriderEnv(vf.Env[OutriderEnvConfig]):  # type: ignore[misc]
    """An environment in which one agent works on one row in each episode."""

    async def run(self, task: Any, agents: Any) -> None:
        await agents.agent.run(task)

    async def start(self) -> None:
        async with AsyncExitStack() as held:
            for harness in self._harnesses.values():
                if isinstance(harness, OutriderHarness):
                    await held.enter_async_context(harness.rollouts.held())
            self._held = held.pop_all()

    async def stop(self) -> None:
        if (held := getattr(self, "_held", None)) is not None:
            await held.aclose()


def fill(trace: Any, parts: TraceParts) -> None:
    """Add the parts of a session to its trace."""
    first = len(trace.nodes)
    for node in parts.nodes:
        parent = node["parent"]
        made = {
            "message": parse_message(node["message"]),
            "parent": None if parent is None else first + parent,
            "tools": parse_tools(node.get("tools")) or [],
        }
        # `model_construct` does not validate. Validation would copy the ids.
        trace.nodes.append(vf.MessageNode.model_construct(**node | made))
        trace.tools += [tool for tool in made["tools"] if tool not in trace.tools]
    for call in parts.calls:
        node = call["node"]
        trace.calls.append(vf.ModelCall.model_validate(call | {"node": None if node is None else first + node}))
    trace.record_metrics(parts.metrics)
    trace.info[INFO] = parts.info
    trace.root_reply = parts.reply
    if parts.timed_out:
        trace.record_timeout("agent")
    elif parts.stop is not None:
        trace.stop(parts.stop)
    trace.notify()


@asynccontextmanager
async def _translated() -> AsyncIterator[None]:
    """Convert errors of Outrider to verifiers' errors (ERRORS). The HTTP status is kept, because verifiers' retry rules
    use it."""
    try:
        yield
    except OutriderError as error:
        made = ERRORS[error.boundary](f"{error.code}: {error_text(error)}")
        made.status_code = error.http_status
        raise made from error


def _server(ctx: Any) -> ModelServer:
    key = resolve_api_key(ctx.client)
    return ModelServer(
        url=ctx.client.base_url,
        model=ctx.model,
        api_key=None if key == NO_KEY else key,
        trains=isinstance(ctx.client, vf.TrainClientConfig),
    )


def _max_turns(agent: Any) -> int | None:
    """Return the agent's limit of turns. Raises InvalidField if the agent has a limit of tokens, because such a limit
    cannot be passed to a session."""
    for name in ("max_input_tokens", "max_total_tokens", "max_output_tokens"):
        if getattr(agent, name) is not None:
            raise InvalidField(
                f"the agent's limit {name} cannot be passed to a session",
                field=name,
                hint="use response_tokens and the other limits of the task",
            )
    turns: int | None = agent.max_turns
    return turns


def _check_recordable(number: int, row: Any) -> None:
    """Raise InvalidField for a row that cannot be written as JSON. Otherwise verifiers would raise an error when it
    writes the trace, and this error would end a whole evaluation."""
    try:
        to_json(row)
    except ValueError as error:
        raise InvalidField(f"row {number} cannot be written as JSON: {error}", field="rows") from error


def _prompt(number: int, prompt: Any) -> Any:
    """Return a prompt in verifiers' form. A row without a prompt gets an empty text, because verifiers refuses a task
    without a prompt. Raises InvalidField for a list that is not a list of messages."""
    if isinstance(prompt, list):
        try:
            return [parse_message(message) for message in prompt]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidField(f"the prompt of row {number} is no list of messages: {error}", field="prompt") from error
    return prompt if isinstance(prompt, str) else ""
