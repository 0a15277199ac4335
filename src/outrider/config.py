"""The settings of a service, as one frozen tree of models. A flag overrides an environment variable, which overrides
the settings file, which overrides the default.

The environment variable of a setting is `OUTRIDER_` and the setting's path in capitals, with `__` between the parts:
OUTRIDER_PORT for `port`, OUTRIDER_LANES__RUN for `lanes.run`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from outrider.callbacks import check_secret
from outrider.destinations import DestinationText, HostText, PlaceText
from outrider.environment import variables
from outrider.errors import InvalidField
from outrider.faults import fault_text
from outrider.spec import DEFAULT_KIND, EngineSpec, Seconds
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
"""OUTRIDER_* variables that Outrider reads, but that are not settings of a service."""
SANDBOX_VARIABLES = frozenset(
    f"{PREFIX}{name}"
    for name in (
        "API_KEY",
        "ARTIFACTS",
        "ATTEMPT",
        "BASE_URL",
        "CALL",
        "FAKE_FAIL",
        "GROUP",
        "INSTRUCTION",
        "LOGS",
        "MODEL",
        "SAMPLE",
        "SESSION",
        "VERDICT",
    )
)
"""Variables that Outrider sets for programs in a sandbox. If an agent starts Outrider in the sandbox, Outrider must not
warn about these variables as unknown."""


class Section(BaseModel):
    """A section of the settings. The docstring below a field is shown in docs/config.md and in the help of the command
    line. The help shows links as plain text."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class Setting(NamedTuple):
    """A setting as the command line shows it. `option` is the flag with its value, such as "--port PORT". `default` is
    a text that is shown in place of the default, for example in place of None."""

    option: str | None = None
    default: str | None = None


class LanesConfig(Section):
    """The lanes of this node. A lane limits how many sessions are in one stage at once."""

    init: Annotated[int, Field(ge=1), Setting("--init-lane N")] = 16
    """Sandboxes prepared at once."""
    ready: Annotated[int | None, Field(ge=1), Setting("--ready-lane N", default="twice `lanes.init`")] = None
    """Sandboxes being prepared, or prepared and waiting to run."""
    run: Annotated[int, Field(ge=1), Setting("--run-lane N")] = 64
    """Agents running at once."""
    eval: Annotated[int, Field(ge=1), Setting("--eval-lane N")] = 16
    """Outcomes graded at once."""
    evaluation_share: Annotated[float, Field(ge=0, le=1), Setting("--evaluation-share SHARE")] = 0.0
    """Fraction of the run slots, 0 to 1, that [evaluations](evaluation.md#beside-training) get before all other
    sessions."""


class QueueConfig(Section):
    sessions: Annotated[int, Field(ge=1)] = 100_000
    """While this many sessions wait in the [queue](scheduling.md#a-full-queue), new groups are refused."""
    expires_seconds: Annotated[Seconds | None, Setting(default="for ever")] = None
    """Seconds that sessions may wait to be started, if their group [sets no
    limit](scheduling.md#nothing-waits-for-ever)."""


GpuName = Annotated[str, Field(pattern=r"^([a-z0-9.-]+/[A-Za-z0-9._-]+=)?[A-Za-z0-9][A-Za-z0-9._:-]*$", max_length=256)]


class PodsConfig(Section):
    """Settings for sandboxes of the kind `kubernetes` (docs/runtimes/kubernetes.md)."""

    namespace: Annotated[str | None, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")] = None
    """Namespace of the pods; by default that of the node's own pod, or of the kubeconfig."""
    tools_image: Annotated[str | None, Field(min_length=1)] = None
    """Image of Outrider, from which pods get an interpreter and [programs](runtimes/kubernetes.md#programs)."""
    user: Annotated[int | None, Field(ge=1, lt=1 << 31)] = None
    """User and group id of all programs; by default [root in a user namespace](runtimes/kubernetes.md#rights)."""
    queue_seconds: Annotated[float, Field(gt=0, le=86_400)] = 900.0
    """Seconds for which a pod may wait for the cluster: for quota, a machine and its image."""
    node_selector: dict[str, str] = {}
    """Labels of the machines on which pods may run."""
    tolerations: tuple[dict[str, str | int], ...] = ()
    """Taints of machines that pods tolerate, as in Kubernetes."""
    runtime_class: Annotated[str | None, Field(min_length=1)] = None
    """RuntimeClass of the pods, such as `gvisor`."""
    priority_class: Annotated[str | None, Field(min_length=1)] = None
    """PriorityClass of the pods."""
    pull_secrets: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Secrets of the namespace with the credentials of registries."""


class SandboxesConfig(Section):
    """Resources of this node that tasks may use. sandbox/host_paths.py lists paths that `allow` must not contain."""

    allow: Annotated[tuple[Path, ...], Setting("--allow-path PATH")] = ()
    """Files and folders of this machine that tasks [may name](#paths-of-the-host)."""
    runtimes: tuple[str, ...] = (
        "namespace",
        "docker",
        "podman",
        "gvisor",
        "apptainer",
        "process-landlock",
        "memory",
    )
    """Kinds of sandbox that tokens of the role `submit` may use; an admin may use any."""
    default_kind: Annotated[str, Field(min_length=1, max_length=256), Setting("--sandbox-kind KIND")] = DEFAULT_KIND
    """[Kind of sandbox](runtimes.md#the-default) of tasks that name none, on this machine."""
    images: Annotated[tuple[str, ...] | None, Setting(default="all images of this machine")] = None
    """[Prefixes](security.md#what-tasks-may-name) of the names of images that tasks may use."""
    pull: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Setting("--pull-image REFERENCE")] = ()
    """Beginnings of image references. An image whose reference begins with one of them is [pulled when a task first
    needs it](images.md#pulled-when-wanted)."""
    cpus: Annotated[float | None, Field(gt=0), Setting("--sandbox-cpus N", default="the machine's")] = None
    """Processors that all sandboxes together may [set aside](#what-is-set-aside)."""
    memory_mb: Annotated[int | None, Field(ge=16), Setting("--sandbox-memory-mb MIB", default="the machine's")] = None
    """MiB of memory that all sandboxes together may set aside."""
    gpus: Annotated[
        tuple[GpuName, ...] | None,
        Setting("--sandbox-gpu NAME", default="the machine's, or those of `CUDA_VISIBLE_DEVICES`"),
    ] = None
    """Names of the [GPUs](gpus.md) that sandboxes may set aside: an index or a UUID for NVIDIA's,
    `vendor/class=device` for others."""
    starts_per_second: Annotated[float, Field(gt=0, le=1000)] = 5.0
    """Maximum number of sandboxes that a process starts per second at each [service that runs sandboxes on other
    machines](runtimes.md#elsewhere)."""
    kubernetes: PodsConfig = PodsConfig()
    warm: Annotated[int, Field(ge=0, le=1024), Setting("--warm N")] = 0
    """Sandboxes of each recently used kind to [make ahead](runtimes.md#made-ahead)."""
    warm_memory_mb: Annotated[int, Field(ge=16), Setting("--warm-memory-mb MIB")] = 4096
    """MiB of memory that all sandboxes made ahead may take."""

    @field_validator("gpus")
    @classmethod
    def _single(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """Check that each entry names a single GPU, and that no GPU is named twice."""
        devices = [name.rpartition("=")[2] for name in value or ()]
        if wide := {"all", "none", "void"}.intersection(devices):
            raise ValueError(f"{wide.pop()!r} is not the name of one GPU: name each")
        plain = [name.removeprefix("nvidia.com/gpu=") for name in value or ()]
        if twice := [name for name in plain if plain.count(name) > 1]:
            raise ValueError(f"GPU {twice[0]} is named twice")
        return value


class TenantNetwork(Section):
    """Destinations that tasks of one tenant may request in addition to those in `network.allow`."""

    tenant: Annotated[str, Field(min_length=1, max_length=256)]
    allow: tuple[DestinationText, ...]


def plain_http(value: str | None) -> str | None:
    """Return the URL unchanged. Raises ValueError if it is not http or https, or has a user name, a query or a
    fragment."""
    if value is None:
        return None
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{value!r} is no URL: write http://HOST:PORT/PATH or https://HOST/PATH")
    if parts.username is not None:
        raise ValueError("a mirror's URL must have no user name: sandboxes would use the password")
    return value


class NetworkConfig(Section):
    """The [network](network.md) of sandboxes. Only tasks that request a network get one."""

    allow: Annotated[tuple[DestinationText, ...], Setting("--allow-network DESTINATION")] = ()
    """Destinations that any task [may ask for](network.md#what-the-operator-allows)."""
    tenants: tuple[TenantNetwork, ...] = ()
    """Further destinations for [tasks of one tenant](network.md#what-the-operator-allows)."""
    internal: tuple[PlaceText, ...] = ()
    """Servers, each as `HOST:PORT`, that may have a [private address](network.md#addresses)."""
    pip_index: str | None = None
    """URL of the index of Python packages behind [`mirror:pip`](network.md#mirrors)."""
    pip_files: str | None = None
    """URL of the server of the packages, if the pages of `pip_index` lead to another server."""
    npm_registry: str | None = None
    """URL of the registry behind `mirror:npm`."""
    apt_hosts: tuple[HostText, ...] = ()
    """Hosts of the package servers behind `mirror:apt`, at port 80: those in the `sources.list` of images."""
    apt_cache: str | None = None
    """URL of a caching HTTP proxy through which `apt_hosts` are reached, such as `http://cache.lan:3142`."""
    download_mb: Annotated[int, Field(ge=1)] = 2048
    """MiB that one sandbox may receive."""
    upload_mb: Annotated[int, Field(ge=1)] = 64
    """MiB that one sandbox may send."""
    requests: Annotated[int, Field(ge=1)] = 10_000
    """Requests that one sandbox may make; a tunnel (HTTPS) counts as one request."""

    @field_validator("pip_index", "pip_files", "npm_registry", "apt_cache")
    @classmethod
    def _plain_addresses(cls, value: str | None) -> str | None:
        return plain_http(value)

    @field_validator("apt_cache")
    @classmethod
    def _plain_proxy(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("http://"):
            raise ValueError(f"{value!r} is no http:// address of a proxy")
        return value


class ModelConfig(Section):
    """The policy: the model that is trained."""

    tokenizer: Annotated[str | None, Setting("--tokenizer DIR", default="that of the first embedded engine")] = None
    """The model's folder, with `tokenizer.json`."""
    renderer: Annotated[str | None, Setting("--renderer NAME", default="by the model's public name")] = None
    """Model family of the [renderer](#the-renderer)."""
    name: Annotated[str, Field(min_length=1), Setting("--model-name NAME")] = "policy"
    """The model name that harnesses use."""
    context_tokens: Annotated[
        int | None, Field(ge=16), Setting("--context TOKENS", default="as the engines report it")
    ] = None
    """The model's context length."""
    image_tokens: Annotated[int, Field(ge=0, le=16_384), Setting("--image-tokens TOKENS")] = 1280
    """Maximum tokens of an [image](images-in-conversations.md) on engines that take token ids; larger images are scaled
    down. With 0, the model is served without images."""


class FrozenConfig(Section):
    """A model in addition to the policy. Agents call it by its `name`, and it is never trained.

    `tokenizer`, `renderer` and `context_tokens` have the same meaning as in `ModelConfig`. The default `tokenizer` is
    the policy's. `turns` and `response_tokens` limit its use by each attempt of a session.
    """

    name: Annotated[str, Field(min_length=1, max_length=256)]
    tokenizer: str | None = None
    renderer: str | None = None
    context_tokens: Annotated[int, Field(ge=16)] | None = None
    engines: tuple[EngineSpec, ...] = ()
    turns: Annotated[int, Field(ge=1, le=100_000)] = 200
    response_tokens: Annotated[int, Field(ge=1, le=1 << 30)] = 1 << 20


class NamedServer(Section):
    """A server whose address the operator sets. Tasks name the server and cannot give an address.

    `key_variable`: the environment variable with the server's API key, read by the service and its nodes.
    `secret_variable`: the environment variable with the key that signs requests. Without it, requests are not signed.
    """

    name: Annotated[str, Field(min_length=1, max_length=256)]
    url: str
    key_variable: str | None = None
    secret_variable: str | None = None

    @field_validator("url", "more_urls", check_fields=False)
    @classmethod
    def _plain_addresses(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        for url in (value,) if isinstance(value, str) else value:
            cls._check_address(url)
        return value

    @staticmethod
    def _check_address(value: str) -> None:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError("must be an http:// or https:// address without a query")
        if parts.username is not None:
            raise ValueError("must not hold a password: name the variable that has the key in key_variable")

    @field_validator("key_variable", "secret_variable")
    @classmethod
    def _inherited(cls, value: str | None) -> str | None:
        if value is not None and value.startswith(PREFIX):  # node processes do not inherit variables with this prefix
            raise ValueError(f"must not begin with {PREFIX}, as the service's own settings do")
        return value


class GraderConfig(NamedServer):
    """A judge model or a grading service.

    `url`: the server's address; for a judge model, the address of an OpenAI-compatible API, including `/v1`.
    `more_urls`: addresses of more servers with the same model or grader. Each call goes to the server with the fewest
        running calls. A retry goes to another server.
    `model`: the model name in a judge's requests.
    """

    more_urls: tuple[str, ...] = ()
    model: str | None = None

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url, *self.more_urls)


class AgentServiceConfig(NamedServer):
    """A service that runs agents. Outrider starts runs there, and polls their state.

    `kind`: "outrider" for a service with Outrider's own protocol (docs/external.md), "harbor" for a Harbor run server.
    `network`: the network of its agents, a name from `advertise`. The agents reach Outrider at the address that
        `advertise` has for this network. Without `network`, they reach Outrider at the first address in `advertise`.
    `poll_seconds`: the seconds between two polls of a run.
    `patience_seconds`: how long the service may be unreachable before a run counts as lost.
    """

    kind: Literal["outrider", "harbor"] = "outrider"
    network: str | None = None
    poll_seconds: Annotated[float, Field(gt=0, le=3600)] = 2.0
    patience_seconds: Annotated[float, Field(ge=0, le=86_400)] = 300.0


class PluginsConfig(Section):
    """The Python code that tasks may name. It runs inside the service. `allow` lists packages, modules and single
    objects by their full paths. A package or module includes all that it contains. "*" allows all importable Python."""

    allow: Annotated[tuple[str, ...], Setting("--allow-plugin MODULE")] = ("outrider.lab.demo.task",)
    """[Python](security.md#what-tasks-may-name) that tasks may name as `package.module:attribute`, and that runs inside
    the service; the flag adds to the value from the environment or the file, or else to the default."""


class ProrlHandlerConfig(Section):
    """How the instances (problems) of a ProRL client become tasks.

    `task`: a TOML file with a task, relative to the settings file. In it, `{row.NAME}` stands for the column NAME of
        the instance.
    `rows`: a kind of data set. If set, this kind's adapter makes a task from the instance, `image` and `test_command`.
        Fields in the TOML file override the task's.
    `data_sources`: more data sources that this handler takes. `*` at the end of a name stands for any text.
    `ignored`: sampling parameters that are accepted but have no effect, because the task's own agent sets them.
    """

    task: Path
    rows: Annotated[str, Field(min_length=1)] | None = None
    image: str | None = None
    test_command: str | None = None
    data_sources: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    ignored: tuple[str, ...] = ()


class ProrlConfig(Section):
    """The HTTP interface for clients of ProRL Agent (`compat = ["prorl"]`)."""

    handlers: dict[Annotated[str, Field(min_length=1, max_length=256)], ProrlHandlerConfig] = {}
    """Tasks by the data source of ProRL's instances: [fields](compat/prorl.md#handlers)."""
    wait_seconds: Annotated[Seconds | None, Setting(default="until the job ends")] = None
    """Seconds after which a ProRL client that waits for a job gets a 504; the job continues."""


class VerlProxyConfig(Section):
    """The HTTP interface of verl's recipe (`compat = ["verl"]`). The section is not named `verl`, because the section's
    variable would then be OUTRIDER_VERL. The trainer's bridge already reads this variable."""

    call_seconds: Annotated[Seconds, Setting("--relay-timeout SECONDS")] = 300.0
    """Maximum seconds of a model call at a [worker of verl's recipe](compat/verl.md#workers-that-dial-in), for the
    engine that the first worker adds. An engine in the settings has its own option `call_seconds`."""


class CallbacksConfig(Section):
    """Callbacks: requests to a client's URL when a group is done. `allow` lists host names, `*.domain`, addresses, and
    networks such as 10.0.0.0/8. If `allow` is empty, all destinations are allowed except link-local, multicast and
    cloud metadata addresses. In this case, this machine's own addresses are allowed only if no other machine can reach
    the service."""

    secret: Annotated[SecretStr | None, Setting(default="callbacks are not signed")] = None
    """Key of the [signatures](api.md#signatures) of callbacks, at least 16 characters."""
    allow: Annotated[tuple[str, ...], Setting(default="most")] = ()
    """Hosts and networks to which [callbacks](security.md#what-tasks-may-name) may be sent."""

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
    """Limits above which the service removes finished groups, oldest first."""

    days: Annotated[float, Field(gt=0)] | None = None
    """Days after which finished groups are [removed](api.md#removal)."""
    size_mb: Annotated[int, Field(ge=1)] | None = None
    """MiB of all finished groups above which the oldest are removed."""


class TlsConfig(Section):
    """TLS at the address where the service listens."""

    certificate: Annotated[Path | None, Setting("--tls-certificate FILE")] = None
    """PEM file to [serve with TLS](security.md#beyond-this-machine)."""
    key: Annotated[Path | None, Setting("--tls-key FILE", default="in the certificate's file")] = None
    """PEM file of the certificate's private key."""
    insecure: Annotated[bool, Setting("--insecure")] = False
    """Listen beyond this machine without TLS. Use this setting only behind a proxy with TLS, or if nobody else is on
    the network."""


class Config(Section):
    """All settings of a service. With `processes = 1`, sessions run in the service's own process; with more, in
    separate processes."""

    host: Annotated[str, Setting("--host ADDRESS")] = "127.0.0.1"
    """Address to listen on; an address that other machines can reach needs a token and TLS."""
    port: Annotated[int, Field(ge=0, le=65535), Setting("--port PORT")] = 8700
    """Port to listen on; 0 chooses a free port."""
    token: Annotated[str | None, Field(min_length=1), Setting("--token TOKEN")] = None
    """The operator's own [token](security.md#tokens), with the role of an admin; other users of the machine can see a
    flag, so prefer the variable `OUTRIDER_TOKEN`."""
    log_level: Annotated[Literal["debug", "info", "warning", "error", "critical"], Setting("--log-level LEVEL")] = (
        "info"
    )
    """The lowest level of the messages in the log: `debug`, `info`, `warning`, `error` or `critical`."""
    log_format: Annotated[Literal["text", "json"], Setting("--log-format FORMAT")] = "text"
    """The form of the log's lines: `text`, or `json` with [fields](timeline.md#the-log) for programs."""
    advertise: Annotated[tuple[str, ...], Setting("--advertise [NETWORK=]URL")] = ()
    """Addresses under which [agents that run elsewhere](external.md) reach this service, such as
    `https://rollouts.example.com` or `cluster=http://10.0.0.5:8700`; the first is the default. Without any, an agent
    gets the address with which its session was opened."""
    tls: TlsConfig = TlsConfig()
    stop_seconds: Annotated[float, Field(ge=0, le=7 * 86_400), Setting("--stop-seconds SECONDS")] = 20.0
    """Seconds for which sessions under way may continue after [SIGTERM](failure.md#stopping) or Ctrl-C."""
    processes: Annotated[
        int, Field(ge=0, le=256), Setting("--processes N", default="one for every four processors")
    ] = 1
    """[Processes](processes.md) that run sessions, 0 to 256; with 0 only [nodes that join](nodes.md) run sessions."""
    data: Annotated[Path, Setting("--data DIR")] = Path(".outrider")
    """Folder of the database; used by one service at a time."""
    store: Annotated[
        str | None,
        Field(pattern="^postgres(ql)?://", repr=False),
        Setting("--store URL", default="SQLite in the data folder"),
    ] = None
    """[PostgreSQL database](store.md#postgresql), `postgresql://USER@HOST/NAME`; a password is safer in the variable
    `OUTRIDER_STORE`."""
    task_key: Annotated[str | None, Field(repr=False), Setting(default="`task.key` in the data folder")] = None
    """The [key](store.md#the-key-of-the-tasks) that encrypts tasks: 32 bytes in base64."""
    files: Annotated[Path | None, Setting("--files DIR", default="tasks cannot upload files of this machine")] = None
    """Folder from which `upload` steps take their files, and which contains [nothing
    else](security.md#what-no-task-may-read)."""
    model: ModelConfig = ModelConfig()
    lanes: LanesConfig = LanesConfig()
    queue: QueueConfig = QueueConfig()
    sandboxes: SandboxesConfig = SandboxesConfig()
    network: NetworkConfig = NetworkConfig()
    plugins: PluginsConfig = PluginsConfig()
    engines: Annotated[tuple[EngineSpec, ...], Setting("--engine KIND=WHERE")] = ()
    """Engines to [attach](engines.md#attaching-one) at the start."""
    near: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Setting("--near-engine NAME")] = ()
    """Names of engines near this machine. Sessions on this machine [use these engines first](nodes.md#near-engines). In
    a name, `*` stands for any text."""
    frozen: tuple[FrozenConfig, ...] = ()
    """Models that are served beside the policy and never trained: [fields](frozen-models.md)."""
    graders: tuple[GraderConfig, ...] = ()
    """External judges and graders that tasks may name: [fields](evaluators/http.md#where-graders-are)."""
    agents: tuple[AgentServiceConfig, ...] = ()
    """Services that run agents for tasks with a [remote](external.md#a-service-that-runs-agents) harness."""
    compat: Annotated[tuple[Literal["prorl", "polar", "verl"], ...], Setting("--compat SYSTEM")] = ()
    """Other systems whose HTTP interfaces are served, too: `prorl`, `polar` and `verl`. Each system has its routes at
    `/NAME`, and the first system in the list also has them at the root of the URL."""
    traces_to: Annotated[str | None, Field(pattern="^https?://"), Setting("--traces-to URL")] = None
    """Address of OTLP over HTTP to which a [trace](timeline.md#opentelemetry) of each session is sent, such as
    `http://collector:4318/v1/traces`."""
    prorl: ProrlConfig = ProrlConfig()
    verl_proxy: VerlProxyConfig = VerlProxyConfig()
    callbacks: CallbacksConfig = CallbacksConfig()
    retention: RetentionConfig = RetentionConfig()
    _read_from: Path | None = PrivateAttr(default=None)

    @property
    def read_from(self) -> Path | None:
        """The path of the settings file; None without a file. It is stored because tasks must not read this file. It is
        not a setting, and is not part of the settings' JSON."""
        return self._read_from

    def as_read_from(self, file: Path | None) -> Self:
        """Return a copy of the settings with `read_from` set to `file`."""
        copy = self.model_copy()
        copy._read_from = file
        return copy

    def for_nodes(self) -> Self:
        """Return a copy of the settings for the nodes, without secrets that nodes do not need. The engines are left
        out, too, because nodes get the state of the engine pools instead."""
        frozen = tuple(model.model_copy(update={"engines": ()}) for model in self.frozen)
        secrets = {"token": None, "store": None, "task_key": None, "callbacks": CallbacksConfig()}
        return self.model_copy(update={"engines": (), "frozen": frozen, **secrets})

    @field_validator("log_level", mode="before")
    @classmethod
    def _lower(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @field_validator("advertise")
    @classmethod
    def _reachable(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        networks = [advertised(each)[0] for each in value]
        if len(set(networks)) < len(networks):
            raise ValueError("two addresses have the same network: write NETWORK=URL")
        return value

    @property
    def advertised_urls(self) -> dict[str, str]:
        """The URLs of the setting `advertise`, by the name of the network."""
        return dict(map(advertised, self.advertise))

    @field_validator("graders", "agents")
    @classmethod
    def _named_apart(cls, value: tuple[NamedServer, ...]) -> tuple[NamedServer, ...]:
        if len({server.name for server in value}) < len(value):
            raise ValueError("two of them have the same name")
        return value

    @model_validator(mode="after")
    def _networks_are_advertised(self) -> Self:
        for service in self.agents:
            if service.network is not None and service.network not in self.advertised_urls:
                known = ", ".join(self.advertised_urls) or "none"
                raise ValueError(f"agents: {service.name!r} is in network {service.network!r}; advertised are: {known}")
        return self

    @property
    def public(self) -> bool:
        """True if other machines can reach the service."""
        return not is_local(self.host)


RECIPE_VARIABLES = {
    "PROXY_HOST": "host",
    "PROXY_PORT": "port",
    "RELAY_TIMEOUT": "verl_proxy.call_seconds",
    "LOG_LEVEL": "log_level",
}
"""Maps environment variables of verl's recipe, such as PROXY_PORT, to paths of settings. The variables are read if
`compat` contains `verl`. OUTRIDER_* variables override them."""
ADDED = {"plugins.allow": PluginsConfig().allow}
"""The paths of lists that a flag extends instead of replacing, with their defaults. The flag extends the list from the
environment or the file, or else the default."""
OWN = frozenset({"lanes", "sandboxes", "files", "data", "processes", "stop_seconds", "near", "log_format"})
"""The settings and sections that a machine sets for itself when it joins a service. It gets all other settings from the
service."""


WILDCARDS = frozenset({"0.0.0.0", "::"})
"""Addresses at which a server can listen, but to which no client can connect."""


def advertised(text: str) -> tuple[str, str]:
    """Return the network and the URL in `[NETWORK=]URL`. Raises ValueError for a URL that no agent can reach."""
    network, equals, url = text.partition("=")
    if not equals or "/" in network:
        network, url = "default", text
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{url!r} is no URL: {error}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError(f"{url!r} is no URL of a service: write http://HOST:PORT or https://HOST:PORT")
    if parts.query or parts.fragment or parts.username or parts.password:
        raise ValueError(f"{url!r} must have no user, query or fragment")
    if host in WILDCARDS:
        raise ValueError(f"{url!r} is an address to listen on, and no agent can reach it: name the machine")
    return network, url.rstrip("/")


def is_local(host: str) -> bool:
    """Return True if a host name or address can only refer to this machine."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def all_settings(section: type[Section] = Config, above: str = "") -> Iterator[tuple[str, FieldInfo, Setting]]:
    """Yield each setting: its path, such as "lanes.run", its pydantic field, and its `Setting`."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from all_settings(field.annotation, f"{above}{name}.")
        else:
            found = next((each for each in field.metadata if isinstance(each, Setting)), Setting())
            yield f"{above}{name}", field, found


def variable_of(path: str) -> str:
    """Return the name of a setting's environment variable, such as OUTRIDER_LANES__RUN for "lanes.run"."""
    return PREFIX + path.upper().replace(".", "__")


def read_settings_file(file: Path) -> dict[str, Any]:
    return read_toml_file(file, field="config", what="config file")


def load_config(
    flags: Mapping[str, Any], *, file: Path | None = None, read: Callable[[Path], dict[str, Any]] = read_settings_file
) -> Config:
    """Merge flags, environment, settings file and defaults. `flags` maps paths, such as "lanes.run", to values; None
    means not given. `read` reads the file.

    Raises InvalidField, which names the setting and the source of its value. pydantic-settings is not used, because its
    errors do not name the source.
    """
    environment = _own_variables()
    given = _tree({path: value for path, value in flags.items() if value is not None})
    in_file = {} if file is None else read(file)
    named = {path: variable_of(path) for path in environment}
    own = _tree(environment)
    if "verl" in _systems(in_file, own, given):
        for name, path in RECIPE_VARIABLES.items():
            if not _has_value(own, path.split(".")) and (text := variables().get(name)):
                environment[path], named[path] = text, name
    sources = [("the environment", _tree(environment)), ("flags", given)]
    if file is not None:
        sources.insert(0, (str(file), in_file))
    merged: dict[str, Any] = {}
    for _, values in sources:
        _merge(merged, values, added=values is sources[-1][1])
    try:
        return Config.model_validate(merged).as_read_from(file)
    except ValidationError as error:
        raise _refusal(error.errors()[0], sources, named) from error


def _own_variables() -> dict[str, Any]:
    """Return the settings in OUTRIDER_* variables, as values by path."""
    # Sorted, so that OUTRIDER_LANES__RUN comes after OUTRIDER_LANES and overrides it. An empty variable counts as not
    # set, because in shells and compose files people unset a variable by making it empty.
    return {
        name.removeprefix(PREFIX).lower().replace("__", "."): _value(name, text)
        for name, text in sorted(variables().items())
        if name.startswith(PREFIX) and name.removeprefix(PREFIX).lower().split("__")[0] in Config.model_fields and text
    }


def _systems(*sources: Mapping[str, Any]) -> Sequence[Any]:
    """Return the value of the setting `compat` in the last of `sources` that sets it. Returns () if no source sets it,
    or if the value is not a list."""
    values = [source["compat"] for source in sources if "compat" in source]
    return values[-1] if values and isinstance(values[-1], list | tuple) else ()


def chosen_systems(flags: Mapping[str, Any]) -> Sequence[Any]:
    """Return the value of the setting `compat` from the flags, or else from the environment."""
    return _systems(_own_variables(), {"compat": flags["compat"]} if flags.get("compat") else {})


def _refusal(fault: ErrorDetails, sources: Sequence[tuple[str, Any]], named: Mapping[str, str]) -> InvalidField:
    """Convert pydantic's error about a setting to an InvalidField, which names the source of the wrong value: "flags",
    the file, or a variable. `named` maps paths of settings to the variables that set them."""
    location = fault["loc"]
    path = ".".join(map(str, location))
    having = [name for name, values in reversed(sources) if _has_value(values, location)]
    if len(having) > 1 and having[0] == sources[-1][0] and ".".join(map(str, location[:2])) in ADDED:
        # A list in ADDED is merged from several sources. The wrong value cannot come from the flag, because the flag's
        # values are strings, and all strings are valid. So the error names the next source.
        having = having[1:]
    source = having[0] if having else "nowhere"
    hint = None
    if source == "the environment":
        prefixes = (".".join(map(str, location[:end])) for end in range(len(location), 0, -1))
        source = variable = named[next(prefix for prefix in prefixes if prefix in named)]
        if fault["type"] == "tuple_type":
            hint = f"""write a list as JSON: {variable}='["..."]'"""
    text = fault_text(fault, Config).replace("unknown field", "unknown setting")
    return InvalidField(f"setting {path!r} from {source}: {text}", field=path, hint=hint)


def _value(variable: str, text: str) -> Any:
    """Return a variable's value. Text that begins with a bracket is read as JSON; pydantic converts all other text. If
    the text is invalid JSON, a setting with a single value, such as a path, gets the text itself. For a list or a whole
    section, invalid JSON raises InvalidField."""
    if text[0] not in "[{":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        path = variable.removeprefix(PREFIX).lower().replace("__", ".")
        plain = {name for name, field, _ in all_settings() if not takes_many(field)}
        if path in plain:
            return text
        where = ""
        if isinstance(error, json.JSONDecodeError):
            where = f" in line {error.lineno}, character {error.colno}: {error.msg[:1].lower()}{error.msg[1:]}"
        raise InvalidField(
            f"the variable {variable} is not JSON{where}",
            field=path,
            hint='a list is written as ["a", "b"], an object as {"name": "value"}',
        ) from error


def takes_many(field: FieldInfo) -> bool:
    """Return True for a setting that is a list."""
    return any(get_origin(each) is tuple for each in (field.annotation, *get_args(field.annotation)))


def _tree(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values by dotted path to nested mappings, such as {"lanes.run": 8} to {"lanes": {"run": 8}}."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        for level in reversed(path.split(".")):
            value = {level: value}
        _merge(tree, value)
    return tree


def _merge(into: dict[str, Any], values: Mapping[str, Any], *, added: bool = False, above: str = "") -> None:
    """Merge the nested mapping `values` into `into`. A new value replaces the earlier one. With `added`, a list in
    ADDED is appended to the earlier list or to its default. An earlier value that is not a list is kept, so that the
    validation refuses it."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            if not isinstance(into.get(name), dict):
                into[name] = {}
            _merge(into[name], value, added=added, above=f"{above}{name}.")
        elif added and f"{above}{name}" in ADDED:
            before = into.get(name, ADDED[f"{above}{name}"])
            into[name] = [*before, *value] if isinstance(before, list | tuple) else before
        else:
            into[name] = value


def _has_value(values: Any, location: Sequence[int | str]) -> bool:
    """Return True if a source has a value at `location`, or a plain value where `location` needs a mapping."""
    for part in location:
        if not isinstance(values, Mapping):
            return True
        if part not in values:
            return False
        values = values[part]
    return True


class UnknownVariable(NamedTuple):
    """An OUTRIDER_* variable that nothing reads. `meant` is the variable that was probably meant, or None."""

    name: str
    meant: str | None

    def __str__(self) -> str:
        hint = f"; did you mean {self.meant}?" if self.meant else ""
        return f"{self.name} is set in the environment, but nothing reads it{hint}"


def unknown_variables() -> list[UnknownVariable]:
    """Return the OUTRIDER_* variables in the environment that nothing reads. A wrong name within a section of the
    settings is left out, because `load_config` refuses it."""
    known = [*(variable_of(path) for path, _, _ in all_settings()), *OWN_VARIABLES]
    sections = {name.split("__")[0] for name in known}
    found = []
    for name in sorted(variables()):
        if name.startswith(PREFIX) and name.split("__")[0] not in sections and name not in SANDBOX_VARIABLES:
            close = get_close_matches(name.removeprefix(PREFIX), [one.removeprefix(PREFIX) for one in known], n=1)
            found.append(UnknownVariable(name, PREFIX + close[0] if close else None))
    return found
