"""Parses a request to Harbor's run API, and translates it to a group of one session.

Every model refuses unknown fields. If a field cannot be translated, the request is refused with an error that names the
field (the table is in docs/compat/harbor.md). Invariants: equal requests with equal archives give equal groups; no
environment variable of the service gets into a task.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints, ValidationError, model_validator

from outrider.api.compat.harbor_archive import ARCHIVE
from outrider.errors import InvalidField, OutriderError, renamed_fields
from outrider.faults import first_fault
from outrider.sessions.harbor_remote import HarborRunAgent, HarborRunVerifier
from outrider.spec import (
    MAX_SECONDS,
    EnvName,
    EnvValue,
    Name,
    Spec,
    StoredGroupSpec,
    without_nul,
)
from outrider.tasks.harbor.schema import NO_NETWORK
from outrider.tasks.harbor.tasks import AGENT_SECONDS, PREPARING_SECONDS, SESSION_SECONDS, HarborFolder

SYSTEM = "harbor"
"""Name of the system Harbor in the store and in labels."""
JOB_LABEL, TASK_LABEL, AGENT_LABEL, MODEL_LABEL, BOUND_LABEL, UNGRADED_LABEL = (
    f"{SYSTEM}.{name}" for name in ("job_id", "task_id", "agent", "model", "session", "ungraded")
)
"""Labels of the group that runs a task for Harbor. BOUND_LABEL: the id of the session of verl's session proxy
(`verl.py`) to which the run's turns belong. UNGRADED_LABEL: set if the request disables the verifier."""
PROXY_KWARGS = ("model_base_url", "api_base")
"""Names of agent settings that may contain the URL of the model proxy."""

RunText = Annotated[str, StringConstraints(min_length=1, max_length=256), AfterValidator(without_nul)]
ProxyUrl = Annotated[str, StringConstraints(min_length=1, max_length=2048), AfterValidator(without_nul)]


class HarborServedAgent(HarborRunAgent):
    """The agent that runs a task: the `name` of an agent program, or the `import_path` (`module:Class`) of an agent
    class for Outrider."""

    name: RunText | None = None
    import_path: RunText | None = None
    model_name: RunText | None = None
    llm_proxy_url: ProxyUrl | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> HarborServedAgent:
        if (self.name is None) == (self.import_path is None):
            raise ValueError("give exactly one of name and import_path")
        return self

    @property
    def called(self) -> str:
        return self.name or self.import_path or ""


class HarborRunRequest(Spec):
    """The JSON in the part `metadata` of the body. `task_path` is ignored, because the task is in the archive."""

    job_id: RunText
    task_id: RunText
    task_path: Annotated[str, StringConstraints(max_length=4096)]
    agent: HarborServedAgent
    timeout_multiplier: Annotated[float, Field(ge=0.1, le=1000)] = 1
    max_retries: Annotated[int, Field(ge=0, le=10)] = 0
    verifier: HarborRunVerifier = HarborRunVerifier()
    environment_overrides: Annotated[dict[Name, Any], Field(max_length=64)] | None = None
    environment_kwargs: Annotated[dict[Name, Any], Field(max_length=64)] | None = None
    llm_proxy_url: ProxyUrl | None = None

    @property
    def proxy(self) -> str | None:
        """URL of the model proxy for the agent, or None. Raises InvalidField if two fields have different URLs."""
        named = {
            "llm_proxy_url": self.llm_proxy_url,
            "agent.llm_proxy_url": self.agent.llm_proxy_url,
            **{f"agent.kwargs.{name}": self.agent.kwargs.get(name) for name in PROXY_KWARGS},
        }
        found: str | None = None
        for field, url in named.items():
            if url is None:
                continue
            if not isinstance(url, str):
                raise InvalidField("must be a URL", field=field)
            if found is not None and url.rstrip("/") != found.rstrip("/"):
                raise InvalidField("names another proxy than the fields before", field=field)
            found = url
        return found


WITHOUT_EFFECT = ("api_key", "session_id")
"""Names of agent settings that are ignored, because Outrider gives each agent the credential of its session."""
AGENTS: Mapping[str, str] = {
    "claude-code": "claude-code",
    "codex": "codex",
    "gemini-cli": "gemini-cli",
    "qwen-coder": "qwen-code",
    "qwen-code": "qwen-code",
    "opencode": "opencode",
    "openhands": "openhands",
    "openhands-sdk": "openhands",
    "pi": "pi",
    "mini-swe-agent": "mini-swe-agent",
}
"""Outrider's preset for each agent of Harbor. Other agents are refused."""
WITHOUT_MODEL = ("oracle", "nop")
"""Harbor's agents that make no model calls."""
SAMPLING = ("temperature", "top_p")
TURNS = ("max_turns", "max_iterations", "step_limit")
"""Names of the agent setting that limits the number of model calls."""
ENV_KWARGS = ("extra_env", "sandbox_env_vars")
RESOURCES = {"cpus": "cpus", "memory_mb": "memory_mb", "storage_mb": "disk_mb", "gpus": "gpus"}
OVERRIDES = (*RESOURCES, *(f"override_{name}" for name in RESOURCES), "docker_image", "workdir", "env", "network_mode")
"""Keys that `environment_overrides` may have: the fields of [environment] in task.toml, and Harbor's alternative names,
such as `override_cpus`."""

FIELDS = (
    ("task.harness.preset", "agent.name"),
    ("task.harness.agent", "agent.import_path"),
    ("task.harness.options", "agent.kwargs"),
    ("task.harness.env", "agent.kwargs.extra_env"),
    ("task.harness", "agent"),
    ("task.runtime.env", "environment_overrides.env"),
    ("task.runtime.workdir", "environment_overrides.workdir"),
    ("task.runtime.resources.disk_mb", "environment_overrides.storage_mb"),
    ("task.runtime.resources", "environment_overrides"),
    ("task.limits.turns", "agent.kwargs"),
    ("task.limits.prepare_seconds", "agent.override_setup_timeout_sec"),
    ("task.limits", "agent.override_timeout_sec"),
    ("task.evaluator.seconds", "verifier.override_timeout_sec"),
    ("task.sampling", "agent.kwargs"),
    ("task.labels", "task_id"),
    ("task", ARCHIVE),
)
"""Each pair has a field of Outrider's group, and the field of Harbor's request from which the group's field is made. If
an error names a field of the group, this field is replaced by the request's field of the first pair that matches."""


harbor_fields = partial(renamed_fields, FIELDS, whole=(ARCHIVE,))
"""Context manager that translates errors about the group's fields, so that the errors name the request's fields."""


def run_group(
    asked: HarborRunRequest, folder: Path, *, session: str | None = None, idempotency_key: str | None = None
) -> StoredGroupSpec:
    """Return the group that runs the task in an unpacked folder. If the run's turns belong to a session of verl's
    session proxy, `session` is the id of that session. Blocks. Raises TooLarge if the task has too many files or bytes.
    If something cannot be translated, raises InvalidField with the request's field."""
    overrides = _overrides(asked)
    task = _task(folder, image=overrides.pop("image"), offline=overrides.pop("offline"))
    harness, sampling, turns = _harness(asked.agent)
    task |= {"harness": task.get("harness", {}) | harness, "sampling": sampling, "max_attempts": 1 + asked.max_retries}
    runtime = task["runtime"]
    runtime["env"] = {**runtime.get("env", {}), **overrides.pop("env")}
    resources = {**runtime["resources"], **overrides.pop("resources")}
    multiplier = overrides.pop("memory_limit_multiplier")
    if multiplier is not None and resources.get("memory_mb") is not None:
        resources["memory_mb"] = max(1, int(resources["memory_mb"] * multiplier))
    runtime |= {"resources": resources, **overrides}
    _set_limits(task, asked, turns)
    task["labels"] = {
        **task["labels"],
        JOB_LABEL: asked.job_id,
        TASK_LABEL: asked.task_id,
        AGENT_LABEL: asked.agent.called,
        MODEL_LABEL: asked.agent.model_name or "",
        **({} if session is None else {BOUND_LABEL: session}),
        **({UNGRADED_LABEL: "true"} if asked.verifier.disable else {}),
    }
    request = asked.model_dump(mode="json", include={"job_id", "task_id"})
    group = {"task": task, "idempotency_key": idempotency_key, "translated": {"system": SYSTEM, "request": request}}
    try:
        return StoredGroupSpec.model_validate(group)
    except ValidationError as error:
        with harbor_fields():
            raise first_fault(error) from error


def _task(folder: Path, *, image: str | None, offline: bool) -> dict[str, Any]:
    """Return the task in a folder, without a harness. Errors name files by their paths in the archive."""
    try:
        # The service's environment variables may be secret. The empty mapping keeps their values from being inserted
        # for ${NAME} in a task.
        return HarborFolder(folder, {}, image, offline=offline).example(folder.name).task
    except OutriderError as error:
        hint = error.hint or ""
        hint = hint.replace("pass --image NAME", 'send environment_overrides {"docker_image": NAME}')
        above = f"{folder.parent}/"
        raise error.replace(
            message=error.message.replace(above, ""), hint=hint.replace(above, "") or None, field=ARCHIVE
        ) from error


def _harness(agent: HarborServedAgent) -> tuple[dict[str, Any], dict[str, Any], int | None]:
    """Translate the agent's settings. Returns the harness, the sampling parameters and the maximum number of turns."""
    settings = {name: each for name, each in agent.kwargs.items() if name not in (*PROXY_KWARGS, *WITHOUT_EFFECT)}
    sampling = {name: settings.pop(name) for name in SAMPLING if settings.get(name) is not None}
    env = _env(settings.pop("extra_env", None), "agent.kwargs.extra_env")
    if agent.import_path is not None:
        return {"agent": agent.import_path, "options": settings, "env": env}, sampling, None
    preset = AGENTS.get(str(agent.name))
    if preset is None:
        hint = f"known: {', '.join(sorted(AGENTS))}; or import_path with an agent class of Outrider"
        if agent.name in WITHOUT_MODEL:
            hint = "it calls no model, so there is nothing to record: check a task with `outrider task check`"
        raise InvalidField(f"there is no preset for the agent {agent.name!r}", field="agent.name", hint=hint)
    turns = None
    for name in TURNS:
        if name in settings:
            turns = settings.pop(name)
            if isinstance(turns, bool) or not isinstance(turns, int) or not 1 <= turns <= 100_000:
                raise InvalidField("must be a whole number from 1 to 100000", field=f"agent.kwargs.{name}")
    if isinstance(tools := settings.get("disallowed_tools"), list):
        settings["disallowed_tools"] = ",".join(map(str, tools))
    return {"preset": preset, "options": settings, "env": env}, sampling, turns


def _set_limits(task: dict[str, Any], asked: HarborRunRequest, turns: int | None) -> None:
    """Set the time limits of agent and verifier in all steps, as Harbor does. For each limit:
    1. Take the request's override or, if there is none, the task's own limit.
    2. Reduce it to the request's maximum.
    3. Multiply it by the request's `timeout_multiplier`."""
    agent, verifier, times = asked.agent, asked.verifier, asked.timeout_multiplier

    def seconds(own: float, override: float | None, most: float | None) -> float:
        limit = own if override is None else override
        return min(MAX_SECONDS, (limit if most is None else min(limit, most)) * times)

    limits = task.setdefault("limits", {})
    steps = task.get("then", [])
    limits["agent_seconds"] = seconds(
        limits.get("agent_seconds", AGENT_SECONDS), agent.override_timeout_sec, agent.max_timeout_sec
    )
    for step in steps:
        step["agent_seconds"] = seconds(step["agent_seconds"], agent.override_timeout_sec, agent.max_timeout_sec)
    whole = limits["agent_seconds"] + sum(step["agent_seconds"] for step in steps)
    limits["session_seconds"] = min(MAX_SECONDS, max(SESSION_SECONDS, whole + PREPARING_SECONDS))
    if agent.override_setup_timeout_sec is not None:
        limits["prepare_seconds"] = seconds(agent.override_setup_timeout_sec, None, None)
    if turns is not None:
        limits["turns"] = turns
    for part in (task, *steps):
        evaluator = part["evaluator"]
        evaluator["seconds"] = seconds(evaluator["seconds"], verifier.override_timeout_sec, verifier.max_timeout_sec)
        if verifier.disable:
            part["evaluator"] = {"kind": "completed"}


def _overrides(asked: HarborRunRequest) -> dict[str, Any]:
    """Return the fields of the sandbox's spec that the request overrides. Three more keys are always there: `image`,
    `memory_limit_multiplier` and `offline`. If `offline` is true, the task gets no network, even if the task.toml
    requests a network."""
    given = dict(asked.environment_overrides or {})
    if strange := sorted(given.keys() - set(OVERRIDES)):
        raise InvalidField(
            "cannot be overridden",
            field=f"environment_overrides.{strange[0]}",
            hint=f"known: {', '.join(OVERRIDES)}; the kind of sandbox is the operator's choice",
        )
    mode = given.pop("network_mode", None)
    if mode not in (None, NO_NETWORK):
        raise InvalidField(
            f"{mode!r} is not possible: the network of a task is that of its task.toml",
            field="environment_overrides.network_mode",
            hint=f'only "{NO_NETWORK}": the task runs without a network, whatever its task.toml says',
        )
    image = given.pop("docker_image", None)
    if image is not None and not isinstance(image, str):
        raise InvalidField("must be the name of an image", field="environment_overrides.docker_image")
    env = _env(given.pop("env", None), "environment_overrides.env")
    resources = {}
    for name, ours in RESOURCES.items():
        for override in (name, f"override_{name}"):
            if (value := given.pop(override, None)) is not None:
                resources[ours] = value
    kwargs = dict(asked.environment_kwargs or {})
    for name in ENV_KWARGS:
        env |= _env(kwargs.pop(name, None), f"environment_kwargs.{name}")
    multiplier = kwargs.pop("memory_limit_multiplier", None)
    if multiplier is not None and (
        isinstance(multiplier, bool) or not isinstance(multiplier, int | float) or not 0 < multiplier <= 1000
    ):
        raise InvalidField("must be a number above 0", field="environment_kwargs.memory_limit_multiplier")
    if kwargs := {name: value for name, value in kwargs.items() if value}:
        raise InvalidField(
            "has no meaning for the sandboxes of this service, which are no pods of Kubernetes",
            field=f"environment_kwargs.{min(kwargs)}",
            hint=f"leave it out; known: {', '.join((*ENV_KWARGS, 'memory_limit_multiplier'))}",
        )
    found: dict[str, Any] = {"image": image, "offline": mode is not None, "env": env, "resources": resources}
    found["memory_limit_multiplier"] = multiplier
    return {**found, **{name: value for name, value in given.items() if value is not None}}


def _env(given: Any, field: str) -> dict[EnvName, EnvValue]:
    if given is None:
        return {}
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise InvalidField("must be an object with texts", field=field)
    return dict(given)
