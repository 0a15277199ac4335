"""Parses the requests of Polar's clients, and translates them to groups.

Every model refuses unknown fields. If a field cannot be translated, the request is refused with an error that names the
field. Some known fields are accepted but ignored (the table is in docs/compat/polar.md). The module reads no files,
imports no plugins, and stores nothing. Invariant: equal requests give equal groups, so that a repeated submission is
recognised.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, ValidationError, field_validator, model_validator

from outrider.api.compat.polar_evaluators import PolarEvaluator, evaluator_of
from outrider.errors import InvalidField, renamed_fields
from outrider.faults import first_fault
from outrider.spec import (
    MAX_GROUP,
    MAX_SECONDS,
    MAX_TEXT,
    RUNTIME,
    AbsolutePath,
    CallbackUrl,
    Command,
    Environment,
    Name,
    Pause,
    Seconds,
    Spec,
    StoredGroupSpec,
    TargetPath,
    Text,
    without_nul,
)

SYSTEM = "polar"
"""Name of the system Polar in settings, in the store, and in paths."""
OWN_METADATA = "outrider"
"""Key in the metadata of results. Its value has the data for which Polar's format has no field. The metadata of a
request must not have this key."""
TASK_LABEL, HARNESS_LABEL, MODEL_LABEL, BUILDER_LABEL, ALONE_LABEL, UNGRADED_LABEL = (
    f"{SYSTEM}.{name}" for name in ("task_id", "harness", "model", "builder", "session_id", "ungraded")
)
"""Labels of a group. Lists of tasks and of sessions are made from the labels, without reading the stored requests.
ALONE_LABEL: the id of a session that was created without a task. Groups of tasks do not have this label.
UNGRADED_LABEL: the group has no evaluator, so lists show no rewards."""
SESSION_DIR = "/tmp/polar-session"
"""Folder of a session in its sandbox. Polar uses /polar/session, but the root folder of a sandbox may be read-only."""
FOLDERS = {"ARTIFACTS_DIR": "artifacts", "LOGS_DIR": "logs", "AGENT_LOG_DIR": "logs/agent"}
"""Folders below SESSION_DIR. Each key is the environment variable that holds the path."""
MOST_PREPARE_SECONDS = 3600.0
"""Maximum time for preparing a sandbox, in seconds. A task's `timeout_seconds` may lower it."""

MANUAL_SECONDS = 86_400.0
"""Maximum duration of a session whose agent the client runs, in seconds."""

TaskId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._:@+=,~-]{1,200}$")]
SESSION_PATTERN = "[A-Za-z0-9._-]{1,128}"
SessionId = Annotated[str, StringConstraints(pattern=f"^{SESSION_PATTERN}$")]


class PolarExec(Spec):
    """A command that prepares the sandbox. It fails if its exit code is not zero. It is tried up to `max_attempts`
    times, with pauses of `retry_backoff_seconds`."""

    type: Literal["exec"]
    command: Command
    cwd: TargetPath | None = None
    env: Environment | None = None
    max_attempts: Annotated[int, Field(ge=1, le=10)] = 1
    retry_backoff_seconds: Annotated[Pause, Field(le=60)] = 0

    def step(self, seconds: float, files: Path | None, field: str) -> dict[str, Any]:
        enter = "" if self.cwd is None else f"cd {shlex.quote(self.cwd)} || exit 1\n"
        step = {"run": f"{enter}{self.command}", "seconds": seconds, "env": self.env or {}}
        return {**step, "attempts": self.max_attempts, "pause_seconds": self.retry_backoff_seconds}


class PolarUpload(Spec):
    """A file or folder to copy to `target` in the sandbox. `source` is a path below the folder in the operator's
    setting `files`."""

    type: Literal["upload_file", "upload_dir"]
    source: Annotated[Name, AfterValidator(without_nul)]
    target: TargetPath

    def step(self, seconds: float, files: Path | None, field: str) -> dict[str, Any]:
        source = PurePosixPath(posixpath.normpath(self.source))
        if source.is_absolute() and files is not None and source.is_relative_to(files):
            source = source.relative_to(files)
        if source.is_absolute() or ".." in source.parts:
            raise InvalidField(
                f"{self.source!r} is not below the folder of the service whose files tasks may upload",
                field=f"{field}.source",
                hint="put it below the folder of the setting `files` (outrider serve --files DIR); name its path there",
            )
        return {"upload": str(source), "to": self.target}


PrepareAction = Annotated[PolarExec | PolarUpload, Field(discriminator="type")]


class PolarRuntime(Spec):
    """The sandbox. `import_path` names a sandbox class as `module:Class`. `kwargs` may have two keys: `volumes`, and
    `kind`, which names one of Outrider's kinds of sandbox."""

    backend: Literal["docker", "apptainer"] = "docker"
    image: Name | None = None
    prepare: Annotated[list[PrepareAction], Field(max_length=1024, fail_fast=True)] = Field(default_factory=list)
    eval_prepare: Annotated[list[PrepareAction], Field(max_length=1024, fail_fast=True)] | None = None
    env: Environment = Field(default_factory=dict)
    network: Name = "host"
    workdir: AbsolutePath | None = None
    direct_exec_init_command: Text | None = None
    cpus: Annotated[float, Field(gt=0, le=4096)] | None = None
    memory_mb: Annotated[int, Field(ge=16, le=1 << 24)] | None = None
    storage_mb: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    gpus: Annotated[int, Field(ge=0, le=64)] = 0
    allow_internet: bool = True
    internet_volumes: list[Text] = Field(default_factory=list)
    import_path: Name | None = None
    kwargs: dict[str, Any] = Field(default_factory=dict)


class PolarMcpServer(Spec):
    """An MCP server that the agent can use."""

    name: Name
    transport: Literal["stdio", "sse", "streamable-http"]
    command: Text | None = None
    args: list[Text] = Field(default_factory=list)
    url: Text | None = None


class PolarShell(Spec):
    """The command that the harness `shell` runs with `bash -lc`."""

    command: Command
    cwd: TargetPath | None = None
    env: Environment = Field(default_factory=dict)


class PolarAgent(Spec):
    """The agent: the name of a `harness`, or the `import_path` of an agent class (`module:Class`)."""

    harness: Name | None = None
    import_path: Name | None = None
    model_name: Name | None = None
    settings: Annotated[dict[Name, Any], Field(max_length=256)] = Field(default_factory=dict)
    env: Environment = Field(default_factory=dict)
    mcp_servers: Annotated[list[PolarMcpServer], Field(max_length=64, fail_fast=True)] = Field(default_factory=list)
    skills_path: Text | None = None
    custom_shell: PolarShell | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.harness is None) == (self.import_path is None):
            raise ValueError("give exactly one of harness and import_path")
        if (self.harness == "shell") != (self.custom_shell is not None):
            raise ValueError("the harness 'shell' needs custom_shell, and no other harness takes it")
        return self

    @property
    def called(self) -> str:
        """The agent's name, as shown in lists."""
        return self.harness or self.import_path or ""


class PolarBuilder(Spec):
    """The builder, which turns model calls into traces (training data). The `config` of prefix_merging is ignored. In
    Polar, this `config` describes how to find end tokens and how to tokenize text again. Outrider does not need the
    description, because its traces use the token ids that the engine sampled."""

    strategy: Literal["per_request", "prefix_merging"] = "per_request"
    config: dict[str, Any] = Field(default_factory=dict)

    @field_validator("config")
    @classmethod
    def _known(cls, value: dict[str, Any]) -> dict[str, Any]:
        if strange := sorted(value.keys() - {"end_of_turn_token_id", "tokenizer_name_or_path"}):
            raise ValueError(f"has no field {strange[0]!r}")
        return value


class PolarWork(Spec):
    """The fields that a task and a session without a task have in common."""

    task_id: TaskId
    instruction: Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEXT)]
    dispatch_priority: Annotated[int, Field(ge=0, le=100)] = 0
    runtime: PolarRuntime | None = None
    agent: PolarAgent
    builder: PolarBuilder = PolarBuilder()
    evaluator: PolarEvaluator | None = None
    callback_url: CallbackUrl | None = None
    metadata: Annotated[dict[str, Any], Field(max_length=1024)] = Field(default_factory=dict)

    @field_validator("task_id")
    @classmethod
    def _part_of_a_path(cls, value: str) -> str:
        if value in (".", ".."):
            raise ValueError("cannot be '.' or '..', because the id is a part of paths")
        return value

    @field_validator("metadata")
    @classmethod
    def _free(cls, value: dict[str, Any]) -> dict[str, Any]:
        if OWN_METADATA in value:
            raise ValueError(f"cannot have the entry {OWN_METADATA!r}, in which the results have facts of their own")
        return value


class PolarTaskRequest(PolarWork):
    """Body of `POST /rollout/task/submit`."""

    num_samples: Annotated[int, Field(ge=1, le=MAX_GROUP)] = 1
    early_stop_min_usable_sessions: Annotated[int, Field(ge=1)] | None = None
    timeout_seconds: Seconds = 600

    @model_validator(mode="after")
    def _can_be_usable(self) -> Self:
        usable = self.early_stop_min_usable_sessions
        if usable is not None and usable > self.num_samples:
            raise ValueError(f"early_stop_min_usable_sessions {usable} is more than num_samples {self.num_samples}")
        return self


class PolarDispatchRequest(PolarWork):
    """Body of `POST /sessions` with an agent. The request submits a session without a task, and contains the session's
    id, which the client has chosen."""

    session_id: SessionId
    remaining_timeout_seconds: Seconds = 600


class PolarSessionRequest(Spec):
    """Body of `POST /sessions` without an agent. It creates a session whose agent the client runs."""

    task_id: TaskId | None = None
    session_id: SessionId | None = None


def task_idempotency_key(task_id: str) -> str:
    """Return the idempotency key of the group that runs a task."""
    return f"{SYSTEM}:{task_id}"


def session_idempotency_key(session_id: str) -> str:
    """Return the idempotency key of the group for a session that was created without a task."""
    return f"{SYSTEM}-session:{session_id}"


def dispatched_group(asked: PolarDispatchRequest, *, files: Path | None) -> StoredGroupSpec:
    """Return the group for a session that was submitted without a task. Raises the errors of `group_of`."""
    common = {name: getattr(asked, name) for name in PolarWork.model_fields}
    group = group_of(PolarTaskRequest(**common, timeout_seconds=asked.remaining_timeout_seconds), files=files)
    return _alone(group, asked.session_id)


def manual_group(session_id: str, task_id: str) -> StoredGroupSpec:
    """Return the group for a session whose agent the client runs. The session accepts model calls until it is deleted,
    but for at most MANUAL_SECONDS."""
    task = {
        "instruction": "An agent runs elsewhere.",
        "harness": {"external": {"idle_seconds": MANUAL_SECONDS}},
        "evaluator": {"kind": "reported"},
        "limits": {"session_seconds": MANUAL_SECONDS, "turns": 100_000},
        "labels": {TASK_LABEL: task_id, HARNESS_LABEL: "external", BUILDER_LABEL: "per_request"},
    }
    builder = {"strategy": "per_request", "config": {}}
    request = {"task_id": task_id, "builder": builder, "metadata": {}, "graded": True}
    translated = {"system": SYSTEM, "request": request, "usable_trains": True}
    return _alone(StoredGroupSpec.model_validate({"task": task, "translated": translated}), session_id)


def _alone(group: StoredGroupSpec, session_id: str) -> StoredGroupSpec:
    assert group.translated is not None
    labels = {**group.task.labels, ALONE_LABEL: session_id}
    request = {**group.translated.request, "session_id": session_id}
    return group.model_copy(
        update={
            "task": group.task.model_copy(update={"labels": labels}),
            "idempotency_key": session_idempotency_key(session_id),
            "translated": group.translated.model_copy(update={"request": request}),
        }
    )


PRESETS: Mapping[str, str] = {
    "claude_code": "claude-code",
    "codex": "codex",
    "gemini_cli": "gemini-cli",
    "qwen_code": "qwen-code",
    "opencode": "opencode",
    "pi": "pi",
    "openhands_sdk": "openhands",
    "mini_swe_agent": "mini-swe-agent",
    "hermes": "hermes",
    "openclaw": "openclaw",
}
"""Outrider's preset for each harness of Polar, except for two: `shell` is a command, and `swe_agent` is refused."""
SETTINGS: Mapping[str, Mapping[str, str]] = {
    "claude_code": {"max_turns": "limits.turns", "disallowed_tools": "options.disallowed_tools"},
    "openhands_sdk": {
        "max_iterations": "limits.turns",
        "temperature": "sampling.temperature",
        "max_output_tokens": "options.max_tokens",
    },
    "mini_swe_agent": {"step_limit": "limits.turns"},
}
"""For each harness, the task's fields that Polar's agent settings set: `max_turns` sets `limits.turns`, for example.
Other settings become options of Outrider's preset, which refuses unknown options."""

FIELDS = (
    ("task.harness.env", "agent.env"),
    ("task.harness.mcp_servers", "agent.mcp_servers"),
    ("task.harness.skills", "agent.skills_path"),
    ("task.harness.options", "agent.settings"),
    ("task.harness.preset", "agent.harness"),
    ("task.harness.agent", "agent.import_path"),
    ("task.harness.command", "agent.custom_shell.command"),
    ("task.harness", "agent"),
    (f"{RUNTIME}.kind", "runtime.backend"),
    (f"{RUNTIME}.rootfs", "runtime.image"),
    (f"{RUNTIME}.mounts", "runtime.kwargs.volumes"),
    (f"{RUNTIME}.resources.disk_mb", "runtime.storage_mb"),
    (f"{RUNTIME}.resources", "runtime"),
    (RUNTIME, "runtime"),
    ("task.evaluator.options", "evaluator.config"),
    ("task.evaluator.kind", "evaluator.strategy"),
    ("task.evaluator.path", "evaluator.strategy"),
    ("task.evaluator.seconds", "evaluator.config.test_timeout"),
    ("task.evaluator", "evaluator"),
    ("task.instruction", "instruction"),
    ("task.limits.turns", "agent.settings"),
    ("task.limits", "timeout_seconds"),
    ("task.sampling.seed", "metadata.eval_sampling_seed_base"),
    ("task.sampling", "agent.settings"),
    ("min_usable", "early_stop_min_usable_sessions"),
    ("n", "num_samples"),
    ("idempotency_key", "task_id"),
)
"""Each pair has a field of Outrider's group, and the field of Polar's request from which the group's field is made. If
an error names a field of the group, this field is replaced by Polar's field of the first pair that matches."""


polar_fields = partial(renamed_fields, FIELDS)
"""Context manager that translates errors about the group's fields, so that the errors name the fields of Polar's
request."""


def group_of(asked: PolarTaskRequest, *, files: Path | None) -> StoredGroupSpec:
    """Return the group that runs a task. Tasks may upload files from the folder `files`. If a field cannot be
    translated, raises InvalidField with Polar's name of the field."""
    seconds = asked.timeout_seconds
    harness, more = _harness(asked)
    runtime = _runtime(asked.runtime or PolarRuntime(), seconds, files)
    if asked.runtime is None:
        del runtime["kind"]  # without a kind, the node uses its default kind of sandbox
    if "agent" not in harness:
        folders = " ".join(f"{SESSION_DIR}/{folder}" for folder in FOLDERS.values())
        runtime["prepare"].insert(0, {"run": f"mkdir -p {folders}", "seconds": 60})
        more["artifacts"] = [f"{SESSION_DIR}/artifacts/**", f"{SESSION_DIR}/logs/**"]
    if (seed := asked.metadata.get("eval_sampling_seed_base")) is not None:
        more.setdefault("sampling", {})["seed"] = _whole(seed, "metadata.eval_sampling_seed_base", least=0)
    evaluator = evaluator_of(asked.evaluator, asked.task_id)
    if asked.runtime is not None and evaluator.get("carry") is not None:
        _check_replayed(asked.runtime)
    task = {
        "instruction": asked.instruction,
        "harness": harness,
        "runtime": runtime,
        "evaluator": evaluator,
        "limits": {
            "session_seconds": seconds,
            "prepare_seconds": min(seconds, MOST_PREPARE_SECONDS),
            "agent_seconds": _agent_seconds(asked.metadata, seconds),
            **more.pop("limits", {}),
        },
        "labels": {
            TASK_LABEL: asked.task_id,
            HARNESS_LABEL: asked.agent.called,
            MODEL_LABEL: asked.agent.model_name or "",
            BUILDER_LABEL: asked.builder.strategy,
            **({UNGRADED_LABEL: "true"} if asked.evaluator is None else {}),
        },
        **more,
    }
    group = {
        "task": task,
        "n": asked.num_samples,
        "min_usable": asked.early_stop_min_usable_sessions,
        "priority": asked.dispatch_priority,
        "idempotency_key": task_idempotency_key(asked.task_id),
        "callback_url": None if asked.callback_url is None else str(asked.callback_url),
        "translated": {
            "system": SYSTEM,
            "request": asked.model_dump(mode="json", include={"task_id", "builder", "metadata"})
            | {"graded": asked.evaluator is not None},
            "usable_trains": True,
        },
    }
    try:
        return StoredGroupSpec.model_validate(group)
    except ValidationError as error:
        with polar_fields():
            raise first_fault(error) from error


def _harness(asked: PolarTaskRequest) -> tuple[dict[str, Any], dict[str, Any]]:
    """Translate the agent. Returns the harness, and other fields of the task that the agent's settings determine."""
    agent = asked.agent
    given: dict[str, Any] = {}
    if agent.mcp_servers:
        given["mcp_servers"] = [server.model_dump(exclude_defaults=True) for server in agent.mcp_servers]
    if agent.skills_path is not None:
        given["skills"] = [agent.skills_path]
    if agent.import_path is not None:
        return {"agent": agent.import_path, "options": agent.settings, "env": agent.env, **given}, {}
    env = {
        **agent.env,
        "GOOGLE_API_URL": "{base_url}",
        "GOOGLE_API_KEY": "{api_key}",
        "SESSION_ID": "{api_key}",
        "TASK_ID": asked.task_id,
        "SESSION_DIR": SESSION_DIR,
        **{name: f"{SESSION_DIR}/{folder}" for name, folder in FOLDERS.items()},
        "POLAR_ALLOW_INTERNET": "false",
    }
    if agent.custom_shell is not None:
        if agent.settings:
            name = next(iter(agent.settings))
            raise InvalidField(f"the harness 'shell' has no setting {name!r}", field=f"agent.settings.{name}")
        shell = agent.custom_shell
        enter = "" if shell.cwd is None else f"cd {shlex.quote(shell.cwd)} || exit 1\n"
        return {"command": ["bash", "-lc", f"{enter}{shell.command}"], "env": {**shell.env, **env}, **given}, {}
    preset = PRESETS.get(str(agent.harness))
    if preset is None:
        raise InvalidField(
            f"there is no preset for {agent.harness!r}",
            field="agent.harness",
            hint=f"known: {', '.join(sorted(PRESETS))}, and 'shell' with custom_shell for any other program",
        )
    parts: dict[str, dict[str, Any]] = {"options": {}}
    for name, value in agent.settings.items():
        part, _, field = SETTINGS.get(str(agent.harness), {}).get(name, f"options.{name}").partition(".")
        if part == "limits":
            value = _whole(value, f"agent.settings.{name}", least=1)
        if name == "disallowed_tools" and isinstance(value, list):
            value = ",".join(map(str, value))
        parts.setdefault(part, {})[field] = value
    return {"preset": preset, "env": env, "options": parts.pop("options"), **given}, parts


def _runtime(asked: PolarRuntime, seconds: float, files: Path | None) -> dict[str, Any]:
    if "allow_internet" in asked.model_fields_set and asked.allow_internet:
        raise InvalidField(
            "no sandbox has the internet: an agent reaches only its model",
            field="runtime.allow_internet",
            hint="leave it out or set it to false, and have what the agent needs in the image or in the folder `files`",
        )
    refused = {
        "internet_volumes": ("no sandbox has the internet", "leave it out"),
        "direct_exec_init_command": (
            "commands are not preceded by another command",
            "set the variables in runtime.env, or prepare the sandbox by a step of type exec",
        ),
    }
    for name, (why, hint) in refused.items():
        if getattr(asked, name):
            raise InvalidField(why, field=f"runtime.{name}", hint=hint)
    if asked.network not in ("host", "none"):
        raise InvalidField(
            f"a sandbox cannot join the network {asked.network!r}: it reaches only the model gateway",
            field="runtime.network",
            hint='leave it out, or give "none" or "host"; either way the agent reaches its model',
        )
    if strange := sorted(asked.kwargs.keys() - {"volumes", "kind"}):
        raise InvalidField("is not a field of a sandbox here", field=f"runtime.kwargs.{strange[0]}")
    kind = asked.kwargs.get("kind", asked.import_path or asked.backend)
    runtime: dict[str, Any] = {
        "kind": kind,
        "image": asked.image,
        "env": asked.env,
        "prepare": [each.step(seconds, files, f"runtime.prepare.{at}") for at, each in enumerate(asked.prepare)],
        "mounts": [_mount(each, at) for at, each in enumerate(_volumes(asked.kwargs.get("volumes")))],
        "resources": {
            name: value
            for name, value in (
                ("cpus", asked.cpus),
                ("memory_mb", asked.memory_mb),
                ("disk_mb", asked.storage_mb),
                ("gpus", asked.gpus),
            )
            if value is not None
        },
    }
    return runtime if asked.workdir is None else {**runtime, "workdir": asked.workdir}


def _volumes(given: Any) -> list[Any]:
    if given is None or isinstance(given, list):
        return given or []
    raise InvalidField("must be a list of texts source:target:ro", field="runtime.kwargs.volumes")


def _mount(volume: Any, at: int) -> dict[str, Any]:
    parts = volume.split(":") if isinstance(volume, str) else []
    if len(parts) != 3 or parts[2] != "ro":
        raise InvalidField(
            "only folders that are mounted read-only can be mounted",
            field=f"runtime.kwargs.volumes.{at}",
            hint="write it as source:target:ro; the operator's setting sandboxes.allow must list the source",
        )
    return {"source": parts[0], "target": parts[1]}


def _check_replayed(asked: PolarRuntime) -> None:
    """Raise InvalidField if the sandbox for grading is to be prepared differently from the agent's sandbox."""
    if asked.eval_prepare is not None and asked.eval_prepare != asked.prepare:
        raise InvalidField(
            "the sandbox in which a repository's changes are graded is prepared by the steps of `prepare`",
            field="runtime.eval_prepare",
            hint="leave it out; steps that are only for grading can be part of the test command",
        )


def _agent_seconds(metadata: Mapping[str, Any], seconds: float) -> float:
    """Return the agent's time limit in seconds, from the request's `metadata`. `seconds` is the session's time limit.

    A session that reaches the agent's limit is graded. A session that reaches its own limit is not graded. If the
    agent's limit is `seconds` or more, the session's limit must take effect, so the agent's limit is replaced by
    MAX_SECONDS."""
    given = metadata.get("agent_timeout", MAX_SECONDS)
    if isinstance(given, bool) or not isinstance(given, int | float) or given <= 0:
        raise InvalidField("must be a number of seconds above 0", field="metadata.agent_timeout")
    return float(given) if given < seconds else MAX_SECONDS


def _whole(value: Any, field: str, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 63:
        raise InvalidField(f"must be a whole number from {least} up", field=field)
    return value
