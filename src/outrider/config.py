"""The configuration: one frozen tree, merged once. Flags override the environment, the environment overrides the file,
and the file overrides the defaults.

The environment variable of a setting is `OUTRIDER_` and the setting's path in capitals, with `__` between levels:
OUTRIDER_PORT, OUTRIDER_LANES__RUN.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SecretStr, ValidationError, field_validator

from outrider.callbacks import check_secret
from outrider.environment import variables
from outrider.errors import InvalidField
from outrider.spec import EngineSpec, Seconds, fault_text
from outrider.text_files import read_toml_file

PREFIX = "OUTRIDER_"
OWN_VARIABLES = (
    "OUTRIDER_HOME",
    "OUTRIDER_URL",
    "OUTRIDER_CA",
    "OUTRIDER_OPENRLHF",
    "OUTRIDER_SKYRL",
    "OUTRIDER_SLIME",
    "OUTRIDER_VERL",
)
"""Variables that Outrider reads, apart from the settings of a service."""
SANDBOX_VARIABLES = frozenset(
    f"{PREFIX}{name}" for name in ("API_KEY", "BASE_URL", "CALL", "FAKE_FAIL", "INSTRUCTION", "MODEL", "VERDICT")
)
"""Variables that Outrider sets for programs in a sandbox. An Outrider that is started in a sandbox must not warn about
these variables."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LanesConfig(Section):
    """Maximum number of sessions in each stage at once on this node.

    `init`: sessions being prepared. `ready`: sessions being prepared, or prepared and waiting for a run slot (None:
    twice `init`). `evaluation_share`: the fraction of the run slots that waiting evaluations get before all other
    sessions.
    """

    init: Annotated[int, Field(ge=1)] = 16
    ready: Annotated[int, Field(ge=1)] | None = None
    run: Annotated[int, Field(ge=1)] = 64
    eval: Annotated[int, Field(ge=1)] = 16
    evaluation_share: Annotated[float, Field(ge=0, le=1)] = 0.0


class QueueConfig(Section):
    """`sessions`: maximum number of waiting sessions; while this many wait, new groups are refused. `expires_seconds`:
    how long a session may wait to be started, if its group does not set a limit (None: for ever)."""

    sessions: Annotated[int, Field(ge=1)] = 100_000
    expires_seconds: Seconds | None = None


GpuName = Annotated[str, Field(pattern=r"^([a-z0-9.-]+/[A-Za-z0-9._-]+=)?[A-Za-z0-9][A-Za-z0-9._:-]*$", max_length=256)]


class SandboxesConfig(Section):
    """Resources of this node that tasks may use.

    `allow`: files and folders of the host for tasks, with everything below them (sandbox/host_paths.py has the paths
    that must not be among these). `cpus` and `memory_mb`: maximum that all sandboxes together may reserve (None: all of
    the machine's). `gpus`: names of the GPUs for sandboxes: an index or a UUID for NVIDIA's, `vendor/class=device` for
    others (None: the machine's NVIDIA GPUs, or the GPUs in CUDA_VISIBLE_DEVICES if set). `warm`: number of sandboxes of
    each recently used kind that are started ahead of time, within `warm_memory_mb` MiB in all. `runtimes`: the kinds
    allowed for tokens of the role submit. `images`: prefixes of the names of images that tasks may use (None: all
    images of this machine).
    """

    allow: tuple[Path, ...] = ()
    runtimes: tuple[str, ...] = (
        "namespace",
        "docker",
        "podman",
        "gvisor",
        "apptainer",
        "process-landlock",
        "memory",
    )
    images: tuple[str, ...] | None = None
    cpus: Annotated[float, Field(gt=0)] | None = None
    memory_mb: Annotated[int, Field(ge=16)] | None = None
    gpus: tuple[GpuName, ...] | None = None
    warm: Annotated[int, Field(ge=0, le=1024)] = 0
    warm_memory_mb: Annotated[int, Field(ge=16)] = 4096

    @field_validator("gpus")
    @classmethod
    def _single(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """Check that each name is the name of one GPU, and that no GPU is named twice."""
        devices = [name.rpartition("=")[2] for name in value or ()]
        if wide := {"all", "none", "void"}.intersection(devices):
            raise ValueError(f"{wide.pop()!r} is not the name of one GPU: name each")
        plain = [name.removeprefix("nvidia.com/gpu=") for name in value or ()]
        if twice := [name for name in plain if plain.count(name) > 1]:
            raise ValueError(f"GPU {twice[0]} is named twice")
        return value


class ModelConfig(Section):
    """The policy model.

    `tokenizer`: folder with tokenizer.json and optionally chat_template.jinja. `renderer`: family of the renderer
    (None: chosen by the model's name). `name`: the name under which the model is served to agents. `context_tokens`:
    context length for engines that do not report theirs.
    """

    tokenizer: str | None = None
    renderer: str | None = None
    name: str = "policy"
    context_tokens: Annotated[int, Field(ge=16)] | None = None


class FrozenConfig(Section):
    """A model beside the policy, which agents call under its `name`. It is never trained.

    `tokenizer`, `renderer` and `context_tokens` are as for the policy; without `tokenizer`, the policy's tokenizer is
    used. `turns` and `response_tokens` are limits of each session attempt.
    """

    name: Annotated[str, Field(min_length=1, max_length=256)]
    tokenizer: str | None = None
    renderer: str | None = None
    context_tokens: Annotated[int, Field(ge=16)] | None = None
    engines: tuple[EngineSpec, ...] = ()
    turns: Annotated[int, Field(ge=1, le=100_000)] = 200
    response_tokens: Annotated[int, Field(ge=1, le=1 << 30)] = 1 << 20


class GraderConfig(Section):
    """A judge model or a grading service at an address set by the operator. Tasks refer to it by name and give no
    address.

    `url`: address of an OpenAI-compatible API with its `/v1`, or of a grader. `model`: the model named in a judge's
    requests. `key_variable`: the variable, in the environment of the service and of its nodes, with the API key.
    `secret_variable`: the variable with the key for signing requests to a grader; without it nothing is signed.
    """

    name: Annotated[str, Field(min_length=1, max_length=256)]
    url: str
    model: str | None = None
    key_variable: str | None = None
    secret_variable: str | None = None

    @field_validator("url")
    @classmethod
    def _plain_address(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError("must be an http:// or https:// address without a query")
        if parts.username is not None:
            raise ValueError("must not hold a password: name the variable that has the key in key_variable")
        return value

    @field_validator("key_variable", "secret_variable")
    @classmethod
    def _inherited(cls, value: str | None) -> str | None:
        if value is not None and value.startswith(PREFIX):  # node processes do not inherit variables with this prefix
            raise ValueError(f"must not begin with {PREFIX}, as the service's own settings do")
        return value


class PluginsConfig(Section):
    """Python objects that may be named as `package.module:attribute` and run inside the service.

    `allow`: packages or modules, each with all its contents, or single full paths. "*" allows all importable Python.
    """

    allow: tuple[str, ...] = ("outrider.lab.demo.task",)


class CallbacksConfig(Section):
    """Callbacks. `secret`: the key for signing them (see callbacks.py); without a key, callbacks are not signed.

    `allow`: permitted destinations: host names, `*.domain`, addresses, and networks such as 10.0.0.0/8. If empty, all
    destinations are permitted except link-local, multicast and cloud metadata addresses, and this machine's own
    addresses if other machines can reach the service.
    """

    secret: SecretStr | None = None
    allow: tuple[str, ...] = ()

    @field_validator("secret")
    @classmethod
    def _usable(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None:
            try:
                check_secret(secret.get_secret_value())
            except InvalidField as error:
                raise ValueError(f"{error.message}: {error.hint}" if error.hint else error.message) from None
        return secret

    @field_validator("allow")
    @classmethod
    def _networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for place in value:
            if "/" in place:
                ip_network(place)
        return value


class RetentionConfig(Section):
    """Bounds beyond which the service removes finished groups, the oldest first: `days` since the group's end, and
    `size_mb`, the size of all finished groups in MiB."""

    days: Annotated[float, Field(gt=0)] | None = None
    size_mb: Annotated[int, Field(ge=1)] | None = None


class TlsConfig(Section):
    """TLS of the service's address.

    `certificate`: PEM file with the certificate and its intermediate certificates. `key`: PEM file of its private key
    (None: the key is in the certificate's file). `insecure`: listen beyond this machine without TLS, because a proxy in
    front terminates TLS, or because nobody else is on the network.
    """

    certificate: Path | None = None
    key: Path | None = None
    insecure: bool = False


class Config(Section):
    """All settings of a service. `processes`: number of processes that run sessions. With 1, sessions run in the
    service's own process; with more, in separate processes; with 0, only on nodes that join. `files`: the folder from
    which tasks may upload files (None: no uploads). `stop_seconds`: how long running sessions may continue after a
    signal to stop."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8700
    token: Annotated[str, Field(min_length=1)] | None = None
    tls: TlsConfig = TlsConfig()
    stop_seconds: Annotated[float, Field(ge=0, le=7 * 86_400)] = 20.0
    processes: Annotated[int, Field(ge=0, le=256)] = 1
    data: Path = Path(".outrider")
    store: Annotated[str | None, Field(pattern="^postgres(ql)?://", repr=False)] = None
    task_key: Annotated[str | None, Field(repr=False)] = None
    files: Path | None = None
    model: ModelConfig = ModelConfig()
    lanes: LanesConfig = LanesConfig()
    queue: QueueConfig = QueueConfig()
    sandboxes: SandboxesConfig = SandboxesConfig()
    plugins: PluginsConfig = PluginsConfig()
    engines: tuple[EngineSpec, ...] = ()
    frozen: tuple[FrozenConfig, ...] = ()
    graders: tuple[GraderConfig, ...] = ()
    callbacks: CallbacksConfig = CallbacksConfig()
    retention: RetentionConfig = RetentionConfig()
    _read_from: Path | None = PrivateAttr(default=None)

    @property
    def read_from(self) -> Path | None:
        """The settings file, None without one. Tasks may not read the file. Its path is not a setting, and is not in
        the JSON of the settings."""
        return self._read_from

    def as_read_from(self, file: Path | None) -> Self:
        """Return a copy of the settings with `file` as their source."""
        copy = self.model_copy()
        copy._read_from = file
        return copy

    def for_nodes(self) -> Self:
        """Return a copy without the secrets that nodes do not need, and without the engines: the service sends the
        states of its pools to the nodes."""
        frozen = tuple(model.model_copy(update={"engines": ()}) for model in self.frozen)
        secrets = {"token": None, "store": None, "task_key": None, "callbacks": CallbacksConfig()}
        return self.model_copy(update={"engines": (), "frozen": frozen, **secrets})

    @field_validator("graders")
    @classmethod
    def _named_apart(cls, value: tuple[GraderConfig, ...]) -> tuple[GraderConfig, ...]:
        if len({grader.name for grader in value}) < len(value):
            raise ValueError("two graders have the same name")
        return value

    @property
    def public(self) -> bool:
        """True if other machines can reach the service."""
        return not is_local(self.host)


def is_local(host: str) -> bool:
    """True if a host name or address can only refer to this machine."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def load_config(flags: Mapping[str, Any], *, file: Path | None = None) -> Config:
    """Merge flags (None = not given; nested mappings allowed), environment, file and defaults.

    Raises InvalidField with the setting's name and the source of its value. (The merge does not use pydantic-settings
    because its errors do not name the source.)
    """
    merged: dict[str, Any] = {}
    sources: list[tuple[str, dict[str, Any]]] = []
    if file is not None:
        sources.append((str(file), read_toml_file(file, field="config", what="config file")))
    from_environment: dict[str, Any] = {}
    for name, text in sorted(variables().items()):  # this order lets OUTRIDER_LANES__RUN override OUTRIDER_LANES
        levels = name.removeprefix(PREFIX).lower().split("__")
        # An empty variable counts as not set: in shells and compose files a variable is usually unset in this way.
        if not name.startswith(PREFIX) or levels[0] not in Config.model_fields or not text:
            continue
        setting: Any = text  # pydantic converts the text, except for lists and objects, which are JSON
        if text[0] in "[{":
            with suppress(ValueError, RecursionError):  # a text that is not JSON stays a text, which pydantic refuses
                setting = json.loads(text)
        for level in reversed(levels):
            setting = {level: setting}
        _merge(from_environment, setting)
    sources.append(("the environment", from_environment))
    sources.append(("flags", _without_none(flags)))
    for _, values in sources:
        _merge(merged, values)
    try:
        return Config.model_validate(merged).as_read_from(file)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        source = next((name for name, values in reversed(sources) if _has_value(values, first["loc"])), "nowhere")
        raise InvalidField(f"setting {path!r} from {source}: {fault_text(first)}", field=path) from error


def _without_none(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags that have a value."""
    given: dict[str, Any] = {}
    for name, value in flags.items():
        if isinstance(value, Mapping):
            if nested := _without_none(value):
                given[name] = nested
        elif value is not None:
            given[name] = value
    return given


def _merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, Mapping) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = dict(value) if isinstance(value, Mapping) else value


def _has_value(values: Any, location: Sequence[int | str]) -> bool:
    """True if a source of settings has a value at `location`, or a plain value in place of one of its parents."""
    for part in location:
        if not isinstance(values, Mapping):
            return True
        if part not in values:
            return False
        values = values[part]
    return True


class UnknownVariable(NamedTuple):
    """An OUTRIDER_* variable that nothing reads, and the variable that was probably meant."""

    name: str
    meant: str | None

    def __str__(self) -> str:
        hint = f"; did you mean {self.meant}?" if self.meant else ""
        return f"{self.name} is set in the environment, but nothing reads it{hint}"


def unknown_variables() -> list[UnknownVariable]:
    """Return the OUTRIDER_* variables in the environment that nothing reads. (A wrong name within a section of settings
    is not returned, because `load_config` refuses it.)"""
    known = [*_variables(Config), *OWN_VARIABLES]
    sections = {name.split("__")[0] for name in known}
    found = []
    for name in sorted(variables()):
        if name.startswith(PREFIX) and name.split("__")[0] not in sections and name not in SANDBOX_VARIABLES:
            close = get_close_matches(name.removeprefix(PREFIX), [one.removeprefix(PREFIX) for one in known], n=1)
            found.append(UnknownVariable(name, PREFIX + close[0] if close else None))
    return found


def _variables(section: type[BaseModel], above: str = PREFIX) -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield f"{above}{name.upper()}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _variables(field.annotation, f"{above}{name.upper()}__")
