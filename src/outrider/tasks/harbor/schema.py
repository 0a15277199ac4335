"""The schema of `task.toml` in Harbor 0.25, up to version 1.4.

Invariant: the schema refuses every file that Harbor refuses. Like Harbor, it ignores unknown keys and converts types as
pydantic does. `unsupported` lists the fields of a valid file that Outrider does not support.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

PACKAGE_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]*/[a-zA-Z0-9][a-zA-Z0-9._-]*\n?")
SERVICE_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*")
STEP_NAME_HAS_NOT = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f]')
DEVICES = re.compile(r"(CON|PRN|AUX|NUL|CONIN\$|CONOUT\$|(COM|LPT)[1-9¹²³])", re.IGNORECASE)
"""Names of devices on Windows. A step must not have such a name, because the step's folder must be usable on every
system."""
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\n?")
SECRET_HEADER = re.compile("key|token|secret|passw|credential|auth|cookie", re.IGNORECASE)
CREDENTIAL = re.compile(r"\s*(?:[A-Za-z0-9_-]+\s+)?(?:[\s:-]*\$\{\w+(?::-)?\})+\s*")
"""Matches a valid credential in a header: an optional scheme, such as Bearer, and then variables without default
values, such as `${TOKEN}`."""
TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-([^}]*))?\}")
MAIN = "main"
"""The container service that is the agent's own sandbox."""
UNITS = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
"""Units of sizes in older versions of the schema, in MiB."""
USERS = (None, "root", 0, "0")
"""Ways to name root, which is the only user of a sandbox."""
MANIFEST = "manifest.json"


def service_name(value: str) -> str:
    if not SERVICE_NAME.fullmatch(value.strip()):
        raise ValueError(f"{value!r} is no name of a service")
    return value.strip()


def newer_transport(value: Any) -> Any:
    return "streamable-http" if value == "http" else value


def lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


Service = Annotated[str, AfterValidator(service_name)]


class Table(BaseModel):
    model_config = ConfigDict(extra="ignore")


class Network(Table):
    """The network of an environment, an agent or a verifier. If an agent or a verifier has no `network_mode`, the
    network of its environment applies."""

    network_mode: Literal["public", "no-network", "allowlist"] | None = None
    allowed_hosts: list[str] | None = None

    @model_validator(mode="after")
    def _hosts_of_an_allowlist(self) -> Self:
        named = self.allowed_hosts is not None and (self.allowed_hosts or self.network_mode is None)
        if named and self.network_mode != "allowlist":
            raise ValueError("allowed_hosts are those of network_mode 'allowlist'")
        return self


class Author(Table):
    name: str
    email: str | None = None


class Package(Table):
    name: str
    version: Annotated[str, Field(min_length=1)] | None = None
    description: str = ""
    authors: list[Author] = []
    keywords: list[str] = []

    @field_validator("name")
    @classmethod
    def _named(cls, value: str) -> str:
        if not PACKAGE_NAME.fullmatch(value) or ".." in value:
            raise ValueError(f"{value!r} is not of the form org/name")
        return value


class HarborAgent(Network):
    timeout_sec: float | None = None
    user: str | int | None = None


class Healthcheck(Table):
    """A health check like Docker's. The command is repeated until it succeeds, or until it has failed `retries` times
    in a row after the start period."""

    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: int = 3


class HarborMcpServer(Table):
    """An MCP server for the agent. Credentials in `headers` must be variables, such as `Bearer ${TOKEN}`."""

    name: str
    transport: Annotated[Literal["stdio", "sse", "streamable-http"], BeforeValidator(newer_transport)] = "sse"
    url: str | None = None
    command: str | None = None
    args: list[str] = []
    headers: dict[str, str] = {}

    @model_validator(mode="after")
    def _of_its_transport(self) -> Self:
        needed = "command" if self.transport == "stdio" else "url"
        if not getattr(self, needed):
            raise ValueError(f"transport {self.transport!r} needs a {needed}")
        if self.transport == "stdio" and self.headers:
            raise ValueError("headers are for the other transports than stdio")
        for name, value in self.headers.items():
            if not HEADER_NAME.fullmatch(name) or "\r" in value or "\n" in value or "${" in TEMPLATE.sub("", value):
                raise ValueError(f"{name!r} is no header of HTTP")
            if SECRET_HEADER.search(name) and value.strip() and not CREDENTIAL.fullmatch(value):
                raise ValueError(f"the header {name} must take its credential from a variable: ${{NAME}}")
        return self


class Environment(Network):
    network_mode: Literal["public", "no-network", "allowlist"] = "public"
    build_timeout_sec: float = 600.0
    docker_image: str | None = None
    os: Annotated[Literal["linux", "windows"], BeforeValidator(lower)] = "linux"
    cpus: int | float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    gpus: int | None = None
    gpu_types: list[str] | None = None
    tpu: dict[str, Any] | None = None
    mcp_servers: list[HarborMcpServer] = []
    env: dict[str, str] = {}
    skills_dir: str | None = None
    healthcheck: Healthcheck | None = None
    workdir: str | None = None
    allow_internet: bool | None = None

    @field_validator("cpus")
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        if value is not None and not math.isfinite(value):
            raise ValueError("must be a finite number")
        return value

    @model_validator(mode="after")
    def _network_of_older_schemas(self) -> Self:
        """Apply `allow_internet`, which older schemas have. `network_mode` and `allowed_hosts` take precedence over
        it."""
        if self.allow_internet is False and "network_mode" not in self.model_fields_set and self.allowed_hosts is None:
            self.network_mode = "no-network"
        return self

    @model_validator(mode="before")
    @classmethod
    def _sizes_of_older_schemas(cls, data: Any) -> Any:
        """Convert `memory` and `storage`, such as "2G", to `memory_mb` and `storage_mb`. Values that are not strings
        are ignored."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        for old in ("memory", "storage"):
            text = data.pop(old, None)
            if not isinstance(text, str):
                continue
            number, unit = text.strip().upper()[:-1], text.strip().upper()[-1:]
            if unit not in UNITS:
                raise ValueError(f"{old} = {text!r} is no size such as '2G' or '512M'")
            try:
                size = int(float(number) * UNITS[unit])
            except OverflowError as error:
                raise ValueError(f"{old} = {text!r} is no size") from error
            if data.setdefault(f"{old}_mb", size) != size:
                raise ValueError(f"{old} = {text!r} is not {old}_mb = {data[f'{old}_mb']!r}")
        return data


class HarborCollect(Table):
    command: str
    service: Service = MAIN
    timeout_sec: float = 60.0
    user: str | int | None = None


class Verifier(Network):
    timeout_sec: float = 600.0
    env: dict[str, str] = {}
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: Environment | None = None
    collect: list[HarborCollect] = []

    @model_validator(mode="after")
    def _shared_or_own(self) -> Self:
        if self.environment_mode == "shared" and self.environment is not None:
            raise ValueError("environment_mode 'shared' and an environment of its own exclude each other")
        return self

    @property
    def mode(self) -> Literal["shared", "separate"] | None:
        """Whether the verifier shares the agent's sandbox. None means that this table does not say. For a step's
        verifier, the task's verifier then decides. By default, the sandbox is shared."""
        return self.environment_mode or ("separate" if self.environment is not None else None)


class HarborArtifact(Table):
    """An artifact: a file or folder of the agent's sandbox.

    source: its path in the sandbox.
    destination: its path on Harbor's host.
    exclude: tar's patterns for files to leave out."""

    source: str
    destination: str | None = None
    exclude: list[str] = []
    service: Service | None = None

    @model_validator(mode="after")
    def _paths_that_stay_inside(self) -> Self:
        if ".." in PurePosixPath(self.source).parts:
            raise ValueError("source must not contain '..'")
        if self.service not in (None, MAIN) and not re.match(r"/|[A-Za-z]:[/\\]", self.source):
            raise ValueError("the source in another service must be an absolute path")
        if self.destination:
            path = PurePosixPath(self.destination)
            if path.is_absolute() or not path.parts or ".." in path.parts or "\\" in self.destination:
                raise ValueError("destination must be a relative path that stays inside")
            if self.destination.rstrip("/") == MANIFEST:
                raise ValueError(f"destination {MANIFEST!r} is Harbor's own")
        return self


def of_a_path(value: Any) -> Any:
    """Convert an artifact that is only a path."""
    return {"source": value} if isinstance(value, str) else value


Artifacts = list[Annotated[HarborArtifact, BeforeValidator(of_a_path)]]


class HarborStep(Table):
    """A step of a task. The next step starts only if this step's reward is at least `min_reward`. If `min_reward` is a
    table, it has a minimum for each metric that it names."""

    name: str
    agent: HarborAgent = HarborAgent()
    verifier: Verifier = Verifier()
    min_reward: float | dict[str, float] | None = None
    healthcheck: Healthcheck | None = None
    artifacts: Artifacts = []

    @field_validator("name")
    @classmethod
    def _a_portable_folder(cls, value: str) -> str:
        if (
            not value.strip()
            or value in (".", "..")
            or value.endswith((".", " "))
            or STEP_NAME_HAS_NOT.search(value)
            or DEVICES.fullmatch(value.partition(".")[0].rstrip(" "))
            or len(value.encode()) > 255
        ):
            raise ValueError(f"{value!r} is no name of a folder that every system can have")
        return value


class Solution(Table):
    env: dict[str, str] = {}


class TaskToml(Table):
    schema_version: str = "1.4"
    task: Package | None = None
    metadata: dict[str, Any] = {}
    verifier: Verifier = Verifier()
    agent: HarborAgent = HarborAgent()
    environment: Environment = Environment()
    solution: Solution = Solution()
    source: str | None = None
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    steps: list[HarborStep] | None = None
    artifacts: Artifacts = []

    @model_validator(mode="before")
    @classmethod
    def _version_of_older_schemas(cls, data: Any) -> Any:
        if isinstance(data, dict) and "version" in data:
            data = {"schema_version": data["version"], **data}
        return data

    @field_validator("steps")
    @classmethod
    def _distinct(cls, value: list[HarborStep] | None) -> list[HarborStep] | None:
        names = [unicodedata.normalize("NFC", step.name).casefold() for step in value or ()]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two steps are named {name!r}")
        return value


class Unsupported(NamedTuple):
    """A field that Outrider does not support. `what` names the missing feature."""

    field: str
    what: str
    hint: str | None = None


AGENTS = "environment"
"""Name of the table of task.toml that describes the agent's sandbox."""
NO_NETWORK = "no-network"


def unsupported(config: TaskToml) -> list[Unsupported]:
    """Return the fields of a valid `task.toml` that are not supported."""
    found = [*of_environment(config.environment, AGENTS)]
    parts: list[tuple[TaskToml | HarborStep, str]] = [(config, "")]
    parts += [(step, f"steps.{number}.") for number, step in enumerate(config.steps or ())]
    for part, at in parts:
        found += of_phase(part.agent, f"{at}agent")
        found += of_verifier(part.verifier, f"{at}verifier")
        found += of_artifacts(part.artifacts, f"{at}artifacts")
    return found


def of_environment(environment: Environment, at: str) -> Iterator[Unsupported]:
    if environment.os != "linux":
        yield Unsupported(f"{at}.os", "sandboxes of Windows")
    if environment.gpus and environment.gpu_types:
        yield Unsupported(f"{at}.gpu_types", "GPUs of a certain type")
    if environment.tpu is not None:
        yield Unsupported(f"{at}.tpu", "TPUs in sandboxes")
    if environment.mcp_servers and at != AGENTS:
        yield Unsupported(f"{at}.mcp_servers", "MCP servers of a verifier")
    if environment.skills_dir is not None and at != AGENTS:
        yield Unsupported(f"{at}.skills_dir", "skills of a verifier")


def of_phase(phase: HarborAgent | Verifier, at: str) -> Iterator[Unsupported]:
    if phase.user not in USERS:
        yield Unsupported(f"{at}.user", "users other than root")


def of_verifier(verifier: Verifier, at: str) -> Iterator[Unsupported]:
    yield from of_phase(verifier, at)
    if verifier.environment is not None:
        yield from of_environment(verifier.environment, f"{at}.environment")
    for number, hook in enumerate(verifier.collect):
        if hook.service != MAIN:
            yield Unsupported(f"{at}.collect.{number}.service", "services beside the agent's sandbox")
        if hook.user not in USERS:
            yield Unsupported(f"{at}.collect.{number}.user", "users other than root")


def of_artifacts(artifacts: Artifacts, at: str) -> Iterator[Unsupported]:
    for number, artifact in enumerate(artifacts):
        if artifact.service not in (None, MAIN):
            yield Unsupported(f"{at}.{number}.service", "services beside the agent's sandbox")
