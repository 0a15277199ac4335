"""Request bodies: the specs of groups, tasks and engines, and of all other requests.

Invariant: every spec refuses unknown fields, wrong types, NaN and absurd sizes, and the error names the field. Reading
a list of objects stops at the first invalid object (`fail_fast`), so an invalid request does not take much more time
than a valid one. `service/admission.py` checks what depends on the machine.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    HttpUrl,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from outrider.concurrency.base64_pieces import decode_base64
from outrider.destinations import Destination, DestinationText, Phase
from outrider.errors import renamed_field
from outrider.faults import complaints as complaints
from outrider.faults import fault_text as fault_text
from outrider.schemas import EVALUATION_LABEL as EVALUATION_LABEL
from outrider.schemas import MAX_INLINE_FILE as MAX_INLINE_FILE
from outrider.schemas import PolicyPause as PolicyPause
from outrider.schemas import Role as Role

MAX_PRIORITY = 1000
MAX_TEXT = 1 << 20
MEBIBYTE = 1 << 20
"""The unit, in bytes, of fields whose names end in `_mb`."""
RUNTIME = "task.runtime"
"""The field of a request that describes the agent's sandbox."""
MAX_GROUP = 4096
MAX_VERSION = (1 << 31) - 1
"""The largest policy version. It is limited because samples store versions as int32."""


def without_nul(value: str) -> str:
    """Return the text unchanged. Raises ValueError if it contains NUL, which arguments and paths cannot contain."""
    if "\0" in value:
        raise ValueError("must not contain NUL")
    return value


def checked_target(value: str) -> str:
    """Return a path in the sandbox, which may be relative to the working directory. Raises ValueError for `..` and
    NUL."""
    if "\0" in value or ".." in PurePosixPath(value).parts:
        raise ValueError("must not contain '..' or NUL")
    return value


Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Text = Annotated[str, StringConstraints(max_length=MAX_TEXT)]
EnvValue = Annotated[Text, AfterValidator(without_nul)]
EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,255}$")]
Environment = Annotated[dict[EnvName, EnvValue], Field(max_length=1024)]
Command = Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEXT), AfterValidator(without_nul)]
TargetPath = Annotated[Name, AfterValidator(checked_target)]
MAX_SECONDS = 7 * 86_400
"""Maximum seconds of a time limit or a pause in a request."""
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)]
Pause = Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)]


class Spec(BaseModel):
    """Base of all specs. Wrong types and unknown fields are refused. Instances are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class SamplingSpec(Spec):
    """Sampling parameters that a task fixes. For a field that is not set, the value in the harness's request is used,
    or else the default.

    `max_tokens` limits one turn, and is lowered to fit into the model's context. `thinking` turns the model's reasoning
    on or off, if the model's chat template has such a switch.
    """

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 20)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    thinking: bool | None = None


class Limits(Spec):
    """Limits of one attempt of a session. Time spent waiting for a slot does not count.

    session_seconds: preparing the sandbox and running the agent.
    prepare_seconds: preparing the sandbox.
    agent_seconds: running the agent. The outcome is graded even if this limit is reached.
    turns: model calls.
    response_tokens: sampled tokens over all turns.
    """

    session_seconds: Seconds = 3600
    prepare_seconds: Seconds = 3600
    agent_seconds: Seconds = 1800
    turns: Annotated[int, Field(ge=1, le=100_000)] = 200
    response_tokens: Annotated[int, Field(ge=1, le=1 << 30)] = 1 << 20


class PrepareCommand(Spec):
    """Prepare step: a shell command in the sandbox. `env` is added to its environment.

    A run of the command fails if its exit code is not 0 or it takes longer than `seconds`. The command is repeated
    until it succeeds. Once it has failed `attempts` times, the session's attempt fails. Failed runs that begin within
    `grace_seconds` of the step's start do not count.

    `pause_seconds` is the wait after a failure that counts (default: random and growing). `grace_pause_seconds` is the
    wait after a failure that does not count (default: `pause_seconds`).
    """

    run: Command
    seconds: Seconds = 300
    env: Environment = {}
    attempts: Annotated[int, Field(ge=1, le=100)] = 1
    pause_seconds: Pause | None = None
    grace_seconds: Pause = 0
    grace_pause_seconds: Pause | None = None


def checked_upload(value: str) -> str:
    """Return a path relative to the service's `files` folder. Raises ValueError for a path that is absolute or contains
    `..` or NUL."""
    path = PurePosixPath(without_nul(value))
    if path.is_absolute() or ".." in path.parts:
        raise ValueError("must be a relative path that stays inside the service's files folder")
    return value


UploadName = Annotated[Name, AfterValidator(checked_upload)]


class Upload(Spec):
    """Prepare step: copies a file or folder from the service's `files` folder to the path `to` in the sandbox."""

    upload: UploadName
    to: TargetPath


class Write(Spec):
    """Prepare step: writes a file whose content is in the request."""

    write: Annotated[str, StringConstraints(max_length=MAX_INLINE_FILE)]
    to: TargetPath
    encoding: Literal["utf-8", "base64"] = "utf-8"
    executable: bool = False

    @model_validator(mode="after")
    def _decodable(self) -> Self:
        self.data()
        return self

    def data(self) -> bytes:
        if self.encoding == "utf-8":
            return self.write.encode()
        try:
            return decode_base64(self.write)
        except ValueError as error:
            raise ValueError(f"write is not base64: {error}") from error


PrepareStep = PrepareCommand | Upload | Write


class Collect(Spec):
    """A shell command that runs in the agent's sandbox after the agent has ended, before any files are kept or graded.
    If the command fails, or is killed after `seconds`, the session continues."""

    run: Command
    seconds: Seconds = 60


AbsolutePath = Annotated[str, StringConstraints(pattern=r"^/", max_length=4096), AfterValidator(checked_target)]
SandboxPath = Annotated[str, StringConstraints(min_length=1, max_length=4096), AfterValidator(checked_target)]


PROGRAMS_MB = 4096
"""MiB of memory for programs if a task does not set memory_mb. The memory for files, disk_mb, is added to it. Agents in
Node.js take 0.5 to 2 GiB, and a compiler or test suite takes another 0.5 to 2 GiB."""


class Resources(Spec):
    """Maximum resources of a sandbox. The node reserves cpus, memory_mb and gpus for it.

    cpus: processor time, in processors.
    memory_mb: MiB of memory, including written files if they are kept in memory. If it is not set, the limit is disk_mb
        + PROGRAMS_MB, and no memory is reserved.
    disk_mb: MiB of written files.
    pids: processes and threads at the same time.
    gpus: whole GPUs, not shared with other sandboxes.
    """

    cpus: Annotated[float, Field(gt=0, le=4096)] | None = None
    memory_mb: Annotated[int, Field(ge=16, le=1 << 24)] | None = None
    disk_mb: Annotated[int, Field(ge=1, le=1 << 24)] = 4096
    pids: Annotated[int, Field(ge=8, le=1 << 20)] = 4096
    gpus: Annotated[int, Field(ge=0, le=64)] = 0

    @property
    def most_memory_mb(self) -> int:
        """The memory limit in MiB. There is a limit even if memory_mb is not set, because one agent must not use up the
        node's memory."""
        return self.disk_mb + PROGRAMS_MB if self.memory_mb is None else self.memory_mb


class Mount(Spec):
    """A host folder or file, mounted read-only at `target` (default: the same path)."""

    source: AbsolutePath
    target: AbsolutePath | None = None

    @model_validator(mode="after")
    def _below_the_root(self) -> Self:
        target = self.target or self.source
        if target == "/" or target != posixpath.normpath(target) or target.startswith("//"):
            raise ValueError(
                "the target must be a plain path below the root: no '/' alone, '//', '/.' or '/' at its end"
            )
        return self


Destinations = Annotated[list[DestinationText], Field(max_length=256, fail_fast=True)]


class NetworkSpec(Spec):
    """The network of a sandbox: an HTTP proxy that reaches only the listed destinations (`HOST`, `HOST:PORT`, `*.HOST`,
    `*`, `mirror:pip`). The operator must allow each of them.

    `prepare`, `agent` and `verifier` are the destinations during the prepare steps, the agent's run and the grading.
    `allow` applies to a phase that has no list of its own. An empty list means no network.

    With `record`, the replies to plain HTTP requests are stored with the session. `replay` is the path of such a record
    below the service's `files` folder. With `replay`, requests are answered from the record, and no server is reached.
    """

    allow: Destinations = []
    prepare: Destinations | None = None
    agent: Destinations | None = None
    verifier: Destinations | None = None
    record: bool = False
    replay: UploadName | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.record and self.replay is not None:
            raise ValueError("give record or replay, not both: a replay is recorded already")
        https = [text for _, given in self.lists() for text in given if Destination.read(text).ports == {443}]
        if self.replay is not None and https:
            raise ValueError(
                f"a replay cannot answer {https[0]!r}: HTTPS is not recorded, because the proxy cannot read it; give a"
                " port of plain HTTP, or a mirror such as mirror:pip"
            )
        return self

    def of(self, phase: Phase) -> list[str]:
        """Return the destinations that may be reached in a phase."""
        own: list[str] | None = getattr(self, phase.value)
        return self.allow if own is None else own

    def lists(self) -> list[tuple[str, list[str]]]:
        """Return the lists of destinations that are set, each with the name of its field."""
        named = [(phase.value, getattr(self, phase.value)) for phase in Phase]
        return [("allow", self.allow), *((name, given) for name, given in named if given is not None)]

    @property
    def mirrors(self) -> set[str]:
        """The names of the mirrors among the destinations of all phases."""
        found = (Destination.read(text) for phase in Phase for text in self.of(phase))
        return {one.mirror for one in found if one.mirror}


DEFAULT_KIND = "namespace"
"""The kind of sandbox if neither the task nor the node's settings name a kind."""


class RuntimeSpec(Spec):
    """A sandbox.

    Its root file system is an `image` of the node, by name, or `rootfs`, a folder on the node. Without either, the
    sandbox sees the host's system folders, read-only. The operator must allow `rootfs`, `mounts` and the destinations
    of `network`.

    - `kind`: the kind of sandbox, by default the node's (`with_default_runtime`).
    - `network`: without it, the sandbox can reach only its model endpoint.
    - `users`: the number of user and group ids inside the sandbox. The ids start at 0. The default covers the owners of
      the image's files.
    - `lifetime_seconds`: the sandbox ends by itself after this time, even if its node is gone.
    """

    kind: Name | None = None
    rootfs: AbsolutePath | None = None
    image: Annotated[Name, AfterValidator(without_nul)] | None = None
    workdir: AbsolutePath = "/work"
    users: Annotated[int, Field(ge=1, le=65536)] | None = None
    lifetime_seconds: Seconds = 86_400
    resources: Resources = Resources()
    mounts: Annotated[list[Mount], Field(max_length=64, fail_fast=True)] = []
    env: Environment = {}
    network: NetworkSpec | None = None
    prepare: Annotated[list[PrepareStep], Field(max_length=1024, fail_fast=True)] = []

    @property
    def sandbox_kind(self) -> str:
        """The kind of the sandbox, or DEFAULT_KIND if `kind` is not set. A node that receives a task first sets its own
        default (`with_default_runtime`)."""
        return self.kind or DEFAULT_KIND

    @property
    def several_users(self) -> bool:
        """True if the spec sets more than one user."""
        return self.users is not None and self.users > 1

    @model_validator(mode="after")
    def _one_root(self) -> Self:
        if self.image is not None and self.rootfs is not None:
            raise ValueError("give image or rootfs, not both")
        return self


class ExternalSpec(Spec):
    """An agent that somebody else runs elsewhere. Outrider starts no program, and the session ends when a request
    completes it. If there is no model call for `idle_seconds`, the session ends with an error."""

    idle_seconds: Seconds = 1800


class RemoteSpec(Spec):
    """An agent that is run by a service of the operator. `service` is the service's name in the setting `agents`. The
    service gets the `options`. `ExternalSpec` explains `idle_seconds`."""

    service: Name
    options: Annotated[dict[Name, Any], Field(max_length=256)] = {}
    idle_seconds: Seconds = 1800


NonzeroExit = Literal["error", "grade"]
"""What happens if an agent program ends with an exit code other than 0 after its model has replied. "error": the
attempt fails and is repeated. "grade": the agent's work is graded as it is. With "error", model behaviour that crashes
the program disappears from the data."""


ServerName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
HeaderName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,256}$")]
HeaderValue = Annotated[str, StringConstraints(pattern=r"^[^\x00\r\n]*$", max_length=65_536)]
McpTransport = Literal["stdio", "sse", "streamable-http"]
MAX_MCP_SERVER = 1 << 18
"""Maximum characters of an MCP server's settings as JSON."""


class McpServer(Spec):
    """An MCP server whose tools the agent gets. A `stdio` server is a program in the sandbox: `command` with `args` and
    the environment variables `env`. A server of another transport has a `url`, and every request to the server has the
    `headers`."""

    name: ServerName
    transport: McpTransport
    command: Command | None = None
    args: Annotated[list[EnvValue], Field(max_length=256)] = []
    env: Environment = {}
    url: Annotated[HttpUrl, Field(strict=False)] | None = None
    headers: Annotated[dict[HeaderName, HeaderValue], Field(max_length=64)] = {}

    @model_validator(mode="after")
    def _of_its_transport(self) -> Self:
        needed, *others = ("command", "args", "env") if self.transport == "stdio" else ("url", "headers")
        if getattr(self, needed) is None:
            raise ValueError(f"transport {self.transport!r} needs '{needed}'")
        if extra := [name for name in MCP_FIELDS if name not in (needed, *others) and getattr(self, name)]:
            raise ValueError(f"transport {self.transport!r} takes no '{extra[0]}'")
        if (size := len(self.model_dump_json())) > MAX_MCP_SERVER:
            raise ValueError(f"has {size} characters; the maximum is {MAX_MCP_SERVER}")
        return self

    def secrets(self) -> list[tuple[str, str]]:
        """Return the variables and headers as pairs of name and value for `redaction.secrets_in`, which recognises
        secrets by name. Every header gets the name "secret header", so that its value counts as a secret. The last word
        of a header, such as the token after `Bearer`, is an additional pair."""
        headers = [value for text in self.headers.values() for value in (text, text.rpartition(" ")[2])]
        return [*self.env.items(), *(("secret header", value) for value in headers)]


MCP_FIELDS = ("command", "args", "env", "url", "headers")

HARNESS_KINDS = ("preset", "command", "agent", "external", "remote")


class HarnessSpec(Spec):
    """The agent. Exactly one of these fields is set:

    - `preset`: a known agent program, by name. `version` is the program's version, by default the one that the preset
      pins. This version must be installed.
    - `command`: a command to run in the sandbox. `files` maps paths (absolute, or relative to the sandbox's HOME) to
      texts, which are written before the command starts. `venv` is a virtual environment on the host, in which the
      command runs.
    - `agent`: an agent whose Python code runs outside of the sandbox, in the process of the session's node.
    - `remote`: an agent that a service of the operator starts elsewhere.
    - `external`: an agent that somebody else starts elsewhere.

    The placeholders {base_url}, {api_key}, {model} and {instruction} are replaced in `command`, in the values of `env`
    and in the texts of `files`. `nonzero_exit` defaults to the preset's own value, and to "grade" for a command. The
    agent gets the tools of `mcp_servers` and the `skills`. Each skill is a folder in the sandbox that contains a
    SKILL.md, or a folder of such folders.
    """

    preset: Name | None = None
    version: Annotated[str, StringConstraints(pattern=r"^[0-9][0-9A-Za-z.+-]{0,63}$")] | None = None
    command: Annotated[list[Text], Field(min_length=1, max_length=1024)] | None = None
    agent: Name | None = None
    external: ExternalSpec | None = None
    remote: RemoteSpec | None = None
    env: Annotated[dict[EnvName, Text], Field(max_length=1024)] = {}
    files: Annotated[dict[SandboxPath, Text], Field(max_length=64)] = {}
    venv: AbsolutePath | None = None
    options: Annotated[dict[Name, Any], Field(max_length=256)] = {}
    nonzero_exit: NonzeroExit | None = None
    mcp_servers: Annotated[list[McpServer], Field(max_length=64, fail_fast=True)] = []
    skills: Annotated[list[SandboxPath], Field(max_length=64)] = []

    @field_validator("mcp_servers")
    @classmethod
    def _distinct_servers(cls, value: list[McpServer]) -> list[McpServer]:
        names = [server.name.casefold() for server in value]
        if repeated := next((server.name for server in value if names.count(server.name.casefold()) > 1), None):
            raise ValueError(f"two servers are named {repeated!r}")
        return value

    @field_validator("skills")
    @classmethod
    def _distinct_skills(cls, value: list[str]) -> list[str]:
        paths = [posixpath.normpath(path) for path in value]
        if not {"/", "."}.isdisjoint(paths):
            raise ValueError("a skill must be a folder of its own, not the root or the working directory")
        if repeated := next((path for path in paths if paths.count(path) > 1), None):
            raise ValueError(f"names {repeated!r} twice")
        return value

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        given = [name for name in HARNESS_KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(HARNESS_KINDS)} (got {', '.join(given) or 'none'})")
        if self.command is None and (self.files or self.venv is not None):
            raise ValueError(f"files and venv are a command's: a {given[0]} has its own")
        if self.preset is None and self.version is not None:
            raise ValueError(f"version is a preset's: a {given[0]} has none")
        if self.elsewhere is not None and (self.env or self.options or self.nonzero_exit is not None):
            raise ValueError(f"{given[0]} agents take no env, options or nonzero_exit: Outrider does not start them")
        if self.elsewhere is not None and (self.mcp_servers or self.skills):
            raise ValueError(f"{given[0]} agents take no mcp_servers or skills: Outrider does not start them")
        return self

    @property
    def elsewhere(self) -> ExternalSpec | RemoteSpec | None:
        """The settings of an agent that runs elsewhere; None for an agent that Outrider starts."""
        return self.external or self.remote

    @property
    def name(self) -> str:
        """The harness's name in lists: the name of the preset or of the agent, or else the kind of harness, such as
        "command"."""
        return self.preset or self.agent or next(kind for kind in HARNESS_KINDS if getattr(self, kind) is not None)


Pathspec = Annotated[str, StringConstraints(pattern=r"^[^:]", max_length=4096), AfterValidator(without_nul)]


class DiffSpec(Spec):
    """Selects the agent's changes to a git repository as the outcome to grade. `diff` is the repository's folder. A
    relative path starts at the working directory. Files that git ignores, and paths that match the pathspecs in
    `exclude`, are left out."""

    diff: SandboxPath
    exclude: Annotated[list[Pathspec], Field(max_length=256)] = []


class EvaluatorSpec(Spec):
    """The evaluator. Kind `command` runs `run` in the sandbox, and kind `callable` calls the function at `path`.

    A command writes the reward to $OUTRIDER_VERDICT, as a number or a JSON object with "reward". If it writes nothing,
    the reward is 1.0 for exit code 0 and 0.0 for exit code 1. Any other exit code is an error, even if a reward is
    written.

    Without `carry`, the outcome is graded in the agent's sandbox. With `carry`, it is graded in a new sandbox. `carry`
    selects what is copied from the agent's sandbox: a list of paths, everything written there ("all"), or the changes
    to a repository. The new sandbox uses the evaluator's own `runtime`, or else the agent's. With `keep`, the copied
    files are kept as an artifact, so that they can be graded again. Changes to a repository are always kept.
    """

    kind: Name = "command"
    run: Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEXT)] | None = None
    path: Name | None = None
    options: Annotated[dict[Name, Any], Field(max_length=256)] = {}
    seconds: Seconds = 300
    carry: Annotated[list[SandboxPath], Field(max_length=256)] | Literal["all"] | DiffSpec | None = None
    runtime: RuntimeSpec | None = None
    keep: bool = False

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.kind == "command" and self.run is None:
            raise ValueError("evaluator kind 'command' needs 'run'")
        if self.kind == "callable" and self.path is None:
            raise ValueError("evaluator kind 'callable' needs 'path'")
        if self.keep and self.carry is None:
            raise ValueError("'keep' keeps what is carried into a new sandbox: it needs 'carry'")
        if self.runtime is not None and not isinstance(self.carry, list):
            raise ValueError("a 'runtime' of the evaluator's own needs 'carry' with the paths that are graded in it")
        return self


Policy = Literal["train", "mask", "drop"]


class Branches(Spec):
    """The rules by which the branches of each kind (`trajectory.BranchKind`) become training rows.

    train: a row whose own sampled tokens are trained on with the session's reward.
    mask: a row without reward, in which no tokens are trained on.
    drop: no row.
    """

    main: Policy = "train"
    subagent: Policy = "train"
    compaction: Policy = "train"
    unsure: Policy = "train"
    auxiliary: Policy = "drop"
    retry: Policy = "drop"
    aborted: Policy = "drop"


FilterKind = Literal["not_completed", "truncated", "over_long", "repeated_calls", "malformed_calls", "no_patch"]


class Filter(Spec):
    """Changes what is delivered for some graded sessions. `when` selects these sessions:

    not_completed: the agent did not end by itself.
    truncated: a limit of turns, tokens, context or time ended the run, or the last reply was cut off.
    over_long: the agent sampled more than `limit` tokens.
    repeated_calls: the agent called the same tool with the same arguments `limit` times in a row (default: 4).
    malformed_calls: a tool call could not be parsed.
    no_patch: the agent changed nothing in the repository that the evaluator's `carry` names.

    `then` is what happens to the rows of such a session. zero: they are trained on with a reward of at most 0. mask:
    they are delivered, but nothing in them is trained on. drop: they are not delivered.
    """

    when: FilterKind
    limit: Annotated[int, Field(ge=2, le=1 << 30)] | None = None
    then: Literal["zero", "mask", "drop"]

    @model_validator(mode="after")
    def _limited(self) -> Self:
        if self.when == "over_long" and self.limit is None:
            raise ValueError("'over_long' needs a 'limit': more sampled tokens are too many")
        if self.limit is not None and self.when not in ("over_long", "repeated_calls"):
            raise ValueError(f"{self.when!r} takes no 'limit'")
        return self


class StepSpec(Spec):
    """A later step of a task. `prepare` is carried out in the sandbox as the earlier steps left it. Then the agent runs
    again, with this `instruction` and for at most `agent_seconds` (default: the task's). `needs` maps metrics to
    minimum values, where "reward" stands for the reward. The step begins only if the previous step reached all of these
    values."""

    instruction: Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEXT)]
    evaluator: EvaluatorSpec
    prepare: Annotated[list[PrepareStep], Field(max_length=1024, fail_fast=True)] = []
    collect: Annotated[list[Collect], Field(max_length=64, fail_fast=True)] = []
    agent_seconds: Seconds | None = None
    needs: Annotated[dict[Name, Annotated[float, Field(allow_inf_nan=False)]], Field(max_length=64)] = {}


class TaskSpec(Spec):
    """A task: everything that one session needs.

    - `history`: how earlier turns appear in a later prompt. "recorded": with the ids that were sampled, even if the
      chat template would drop the reasoning in these turns. "template": as the chat template prints them. If the
      template drops reasoning, the later prompt is a fork and adds a training row.
    - `collect`: commands that run in the sandbox when the agent has ended.
    - `artifacts`: patterns for paths in the sandbox. Matching files are kept after `collect`, even if the agent failed.
    - `then`: further steps in the same sandbox, each graded separately.
    - `steps_reward`: "mean": the session's reward is the mean over the graded steps. "final": it is the reward of the
      last graded step.
    """

    instruction: Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEXT)]
    harness: HarnessSpec
    runtime: RuntimeSpec = RuntimeSpec()
    evaluator: EvaluatorSpec
    limits: Limits = Limits()
    sampling: SamplingSpec = SamplingSpec()
    history: Literal["recorded", "template"] = "recorded"
    branches: Branches = Branches()
    filters: Annotated[list[Filter], Field(max_length=16, fail_fast=True)] = []
    collect: Annotated[list[Collect], Field(max_length=64, fail_fast=True)] = []
    artifacts: Annotated[list[SandboxPath], Field(max_length=64)] = []
    then: Annotated[list[StepSpec], Field(max_length=64, fail_fast=True)] = []
    steps_reward: Literal["mean", "final"] = "mean"
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 3
    labels: Annotated[dict[Name, Text], Field(max_length=64)] = {}

    @model_validator(mode="after")
    def _runs_elsewhere(self) -> Self:
        elsewhere = self.harness.elsewhere is not None
        if self.evaluator.kind == REPORTED and not elsewhere:
            raise ValueError(
                "evaluator kind 'reported' is for a harness external or remote, whose agents run elsewhere"
            )
        if elsewhere:
            for name in ("then", "collect", "artifacts"):
                if getattr(self, name):
                    raise ValueError(f"{name} is carried out in the agent's sandbox: an agent elsewhere has none")
            if self.evaluator.kind == REPORTED and any(
                isinstance(step, PrepareCommand) for step in self.runtime.prepare
            ):
                raise ValueError("runtime.prepare runs commands in the agent's sandbox: an agent elsewhere has none")
            for name in ("agent_seconds", "prepare_seconds"):
                if getattr(self.limits, name) != getattr(Limits(), name):
                    raise ValueError(f"limits.{name} does not apply to an agent elsewhere: give session_seconds")
            if self.evaluator.carry is not None:
                raise ValueError("evaluator.carry takes files of the agent's sandbox: an agent elsewhere has none")
        return self

    @model_validator(mode="after")
    def _can_be_carried(self) -> Self:
        *earlier, last = [self.evaluator, *(step.evaluator for step in self.then)]
        for evaluator in earlier:
            if not isinstance(evaluator.carry, list | None):
                raise ValueError("evaluator.carry must be a list of paths if another step follows in the sandbox")
            if evaluator.keep:
                raise ValueError("evaluator.keep is for the last step: the carried files of only one step can be kept")
        for evaluator in (*earlier, last):
            paths = evaluator.carry if isinstance(evaluator.carry, list) else []
            if PurePosixPath("/") in (self.runtime.workdir / PurePosixPath(path) for path in paths):
                raise ValueError("evaluator.carry must name files and folders, not the sandbox's root")
        if any(each.when == "no_patch" for each in self.filters) and not isinstance(last.carry, DiffSpec):
            raise ValueError("the filter 'no_patch' needs evaluator.carry with 'diff'")
        return self


def steps_of(task: TaskSpec) -> list[TaskSpec]:
    """Return the steps of a task, each as a separate task. The task of a later step also has the prepare steps of all
    earlier steps."""
    steps = [task.model_copy(update={"then": []})]
    for step in task.then:
        runtime, limits = steps[-1].runtime, task.limits
        if step.agent_seconds is not None:
            limits = limits.model_copy(update={"agent_seconds": step.agent_seconds})
        changes = {
            "instruction": step.instruction,
            "evaluator": step.evaluator,
            "collect": step.collect,
            "limits": limits,
            "runtime": runtime.model_copy(update={"prepare": [*runtime.prepare, *step.prepare]}),
        }
        steps.append(steps[-1].model_copy(update=changes))
    return steps


@contextmanager
def fields_of_step(step: int) -> Iterator[None]:
    """Within the block, errors about the evaluator or the instruction of a step name the field's path in the whole
    task, such as `task.then.0.evaluator`. The first step has the number 0."""
    place = step_field(step)
    with (
        renamed_field("task.evaluator", f"{place}.evaluator"),
        renamed_field("task.instruction", f"{place}.instruction"),
    ):
        yield


def step_field(step: int) -> str:
    """Return the path of a step in a request: `task` for step 0, `task.then.0` for step 1. The path of each field of
    the step begins with this path."""
    return f"task.then.{step - 1}" if step else "task"


def runtimes_of(task: TaskSpec) -> list[tuple[RuntimeSpec, str]]:
    """Return the specs of a session's sandboxes with their field paths: first the agent's sandbox, then the evaluators'
    own sandboxes."""
    found = [(task.runtime, RUNTIME)]
    for number, evaluator in enumerate((task.evaluator, *(step.evaluator for step in task.then))):
        if evaluator.runtime is not None:
            found.append((evaluator.runtime, f"{step_field(number)}.evaluator.runtime"))
    return found


def with_default_runtime(task: TaskSpec, kind: str) -> TaskSpec:
    """Return the task with this `kind` for every sandbox whose own `kind` is not set."""

    def named(runtime: RuntimeSpec) -> RuntimeSpec:
        return runtime if runtime.kind is not None else runtime.model_copy(update={"kind": kind})

    def graded(evaluator: EvaluatorSpec) -> EvaluatorSpec:
        if evaluator.runtime is None:
            return evaluator
        return evaluator.model_copy(update={"runtime": named(evaluator.runtime)})

    then = [step.model_copy(update={"evaluator": graded(step.evaluator)}) for step in task.then]
    changes = {"runtime": named(task.runtime), "evaluator": graded(task.evaluator), "then": then}
    return task.model_copy(update=changes)


def with_host(value: HttpUrl) -> HttpUrl:
    """Return the URL unchanged. Raises ValueError if its host name cannot be encoded for DNS."""
    try:
        (value.host or "").encode("idna")
    except UnicodeError as error:
        raise ValueError("has no host name that can be looked up") from error
    return value


CallbackUrl = Annotated[HttpUrl, Field(strict=False), AfterValidator(with_host)]


class GroupSpec(Spec):
    """`n` sessions of one task, which are submitted, prioritised, cancelled and delivered together.

    - `idempotency_key`: a request with the same key and the same body returns the same group. A request with the same
      key and another body is a conflict.
    - `min_usable`: as soon as this many sessions have a reward, the others are stopped; null stops no session.
    - `expires_seconds`: a session that has not started this long after the group was created ends as expired. Null uses
      the service's setting.
    """

    task: TaskSpec
    n: Annotated[int, Field(ge=1, le=MAX_GROUP)] = 1
    min_usable: Annotated[int, Field(ge=1)] | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    expires_seconds: Seconds | None = None
    idempotency_key: Name | None = None
    callback_url: CallbackUrl | None = None

    @model_validator(mode="after")
    def _can_be_usable(self) -> Self:
        if self.min_usable is not None and self.min_usable > self.n:
            raise ValueError(f"min_usable {self.min_usable} is more than the group's n {self.n}")
        return self


class TranslatedSpec(Spec):
    """The request of a client of another system, from which a group was made. `system` is the name of that system. The
    group's callback is sent in the system's format. `request` has the parts of the request that are repeated in
    replies. With `usable_trains`, a session counts for `min_usable` only if some of its tokens are trained on."""

    system: Name
    request: dict[str, Any]
    usable_trains: bool = False


class StoredGroupSpec(GroupSpec):
    """A group as stored. `regrades` is empty if the group runs agents. If the group grades earlier runs again,
    `regrades` has one session id for each sample: the id of the session whose run is graded. `translated` is set if a
    client of another system has sent the group."""

    regrades: list[str] = []
    translated: TranslatedSpec | None = None


class SessionSpec(Spec):
    """Opens a session for an agent that runs elsewhere.

    `group_id` and `sample_index` select a session of an existing group whose harness is `external`. Without `group_id`,
    a new group with one session is made from the other fields, which have the same meaning as in a task. The default
    evaluator takes the reward from the request that completes the session.
    """

    group_id: Name | None = None
    sample_index: Annotated[int, Field(ge=0, lt=MAX_GROUP)] = 0
    instruction: Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEXT)] = "An agent runs elsewhere."
    evaluator: EvaluatorSpec = EvaluatorSpec(kind="reported")
    runtime: RuntimeSpec = RuntimeSpec()
    idle_seconds: Seconds = 1800
    limits: Limits = Limits()
    sampling: SamplingSpec = SamplingSpec()
    history: Literal["recorded", "template"] = "recorded"
    branches: Branches = Branches()
    filters: Annotated[list[Filter], Field(max_length=16, fail_fast=True)] = []
    labels: Annotated[dict[Name, Text], Field(max_length=64)] = {}
    idempotency_key: Name | None = None
    callback_url: CallbackUrl | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        others = sorted(self.model_fields_set - {"group_id", "sample_index"})
        if self.group_id is not None and others:
            raise ValueError(f"a session of an existing group takes its group's task: leave {', '.join(others)} out")
        if self.group_id is None and self.sample_index:
            raise ValueError("sample_index is for a session of an existing group: give group_id, too")
        try:
            self.group()
        except ValidationError as error:
            raise ValueError(fault_text(complaints(error)[0])) from error
        return self

    def group(self) -> GroupSpec:
        """Return the spec of a new group with one session."""
        harness = HarnessSpec(external=ExternalSpec(idle_seconds=self.idle_seconds))
        common = {name: getattr(self, name) for name in TaskSpec.model_fields if name in type(self).model_fields}
        task = TaskSpec(harness=harness, **common)
        return GroupSpec(task=task, idempotency_key=self.idempotency_key, callback_url=self.callback_url)


REPORTED = "reported"
"""The kind of evaluator that takes the reward from the request that completes an external session."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
Index = Annotated[int, Field(ge=0, lt=1 << 31, strict=False)]


ReportedStop = Literal["completed", "max_turns", "max_tokens", "context_overflow", "agent_timeout", "nonzero_exit"]


class ReportSpec(Spec):
    """Completes an external session. `stop_reason` is how the agent's run ended. With `error`, the session ends as an
    error and has no reward.

    If the task's evaluator is `reported`, the verdict consists of `reward`, `metrics`, `reason`, and the rewards by
    turn (`turns`) and by training row (`rows`). Any other evaluator grades the transcript and the `answer`."""

    reward: Finite | None = None
    metrics: Annotated[dict[Name, Finite], Field(max_length=256)] = {}
    reason: Text | None = None
    turns: Annotated[dict[Index, Finite], Field(max_length=100_000)] = {}
    rows: Annotated[dict[Index, Finite], Field(max_length=100_000)] = {}
    answer: Text | None = None
    stop_reason: ReportedStop = "completed"
    error: Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEXT)] | None = None

    @model_validator(mode="after")
    def _one_outcome(self) -> Self:
        graded = self.reward is not None or self.metrics or self.turns or self.rows
        if self.error is not None and graded:
            raise ValueError("a failed session has no reward: give error, or reward and metrics, not both")
        if self.reward is None and graded:
            raise ValueError("metrics and rewards of turns or rows need a reward")
        return self


class RegradeSpec(Spec):
    """A request to grade sessions again. If `evaluator` is null, the task's is used. A new evaluator may omit `carry`,
    because it grades the outcome that the first grading has kept. `labels` are added to the task's labels. The rest of
    the task stays unchanged. `GroupSpec` explains the other fields."""

    evaluator: EvaluatorSpec | None = None
    labels: Annotated[dict[Name, Text], Field(max_length=64)] = {}
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    idempotency_key: Name | None = None
    callback_url: CallbackUrl | None = None


class EngineSpec(Spec):
    """An inference engine to attach. `url` is needed if the engine is a server. The possible `options` depend on the
    kind. `serves` is the name of a frozen model, or null for the policy."""

    kind: Name
    name: Name | None = None
    serves: Name | None = None
    url: Name | None = None
    model: Name | None = None
    options: Annotated[dict[Name, Any], Field(max_length=64)] = {}


OPERATOR_TENANT = "operator"
"""The tenant of groups that are submitted without a token, or with the token in the service's settings."""

TENANT_NAME = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$"
"""Matches the names of tokens and tenants. Colons and slashes are not allowed, because the store uses them to join a
tenant's name with other names."""


def tenant_of(bucket: str) -> str:
    """Return the tenant of a bucket. A bucket is a part of the queue (see store/queue.py)."""
    return bucket.partition(":")[0]


TokenName = Annotated[str, StringConstraints(pattern=TENANT_NAME)]


class TokenSpec(Spec):
    """A token to create.

    - `tenant`: the tenant whose groups the token can submit and see; null for a tenant with the token's own name.
      Tokens of one tenant share its groups, idempotency keys and consumers. An admin's token sees the groups and
      consumers of all tenants.
    - `max_queued`: the maximum number of the token's queued and running sessions, null for no limit.
    - `expires_days`: the days from now until the token expires, null for never.
    """

    name: TokenName
    role: Role
    tenant: TokenName | None = None
    max_queued: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    expires_days: Annotated[float, Field(gt=0, le=36500)] | None = None


class PullSpec(Spec):
    """Pulls the image `reference` from a container registry. Tasks can then use it by `name`."""

    reference: Name
    name: Name


Version = Annotated[int, Field(ge=0, le=MAX_VERSION)]


class PolicyPauseSpec(Spec):
    """Pauses the policy. With `mode` "finish", running generations continue to their end. With "abort", they are cut
    off, and continued when the policy is resumed."""

    mode: PolicyPause = "finish"


class PolicyResumeSpec(Spec):
    """Resumes the policy. `version` is the new version of the engines' weights, or null if the weights did not change.
    `go_back` allows a lower version, to correct a version set by mistake."""

    version: Version | None = None
    go_back: bool = False


class PolicyUpdateSpec(Spec):
    """Pauses the policy, makes the engines load `weights`, sets the version, and resumes the policy.

    `weights` is a file or folder that every engine can read. Null means that the trainer has already changed the
    weights. Groups whose first session began at a version below `cancel_older_than` are cancelled. `PolicyResumeSpec`
    explains `go_back`.
    """

    version: Version
    mode: PolicyPause = "finish"
    weights: Annotated[Text, AfterValidator(without_nul), Field(min_length=1)] | None = None
    cancel_older_than: Version | None = None
    go_back: bool = False


MAX_CURSOR = (1 << 63) - 1
"""The largest integer that a database column can store."""


CONSUMER_NAME = r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}$"
"""Matches the names of consumers. Slashes and control characters are not allowed, because the names are parts of URL
paths and are shown on terminals."""


class AckSpec(Spec):
    """Acknowledges the groups up to `cursor` for a consumer. If the consumer has already acknowledged later groups, its
    position does not change. With `rewind`, the consumer goes back to `cursor` and gets the later groups again."""

    cursor: Annotated[int, Field(ge=0, le=MAX_CURSOR)]
    rewind: bool = False


class GcSpec(Spec):
    """Removes finished groups: those that ended more than `days` ago, then the oldest until the rest take at most
    `size_mb` MiB. If neither field is given, the service's settings apply.

    `force` also removes groups that a consumer has not acknowledged. Groups whose callback is not delivered are always
    kept. With `dry_run` nothing is removed.
    """

    days: Annotated[float, Field(ge=0)] | None = None
    size_mb: Annotated[int, Field(ge=0, le=MAX_CURSOR >> 20)] | None = None
    force: bool = False
    dry_run: bool = False


class QuerySpec(Spec):
    """An SQL query over the views of docs/queries.md. It must be a single SELECT."""

    sql: Annotated[str, StringConstraints(min_length=1, max_length=100_000)]


class SessionsSpec(Spec):
    """The sessions to cancel or to submit again. A session must match every field that is given. The fields have the
    same meaning as in the list of sessions. If no field is given, `all` must be True. With `dry_run` nothing is
    changed. Without `dry_run`, the request is refused if more than `max_matches` sessions match."""

    ids: Annotated[list[Name], Field(max_length=1000)] = []
    groups: Annotated[list[Name], Field(max_length=1000)] = []
    state: Annotated[list[Name], Field(max_length=8)] = []
    labels: Annotated[dict[Name, Text], Field(max_length=64)] = {}
    harness: Name | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    stop_reason: Name | None = None
    error: Name | None = None
    since: Annotated[float, Field(ge=0)] | None = None
    until: Annotated[float, Field(ge=0)] | None = None
    text: Annotated[str, StringConstraints(min_length=1, max_length=1000)] | None = None
    all: bool = False
    max_matches: Annotated[int, Field(ge=1, le=MAX_CURSOR)] = 1000
    dry_run: bool = False


class PauseSpec(Spec):
    """Pauses the queue. The service then starts no sessions of the groups that match. A group matches if it has all
    `labels` and, if `harness` is given, uses that harness. If the request has neither `labels` nor `harness`, all
    groups match.

    The pause covers only the groups of the caller's tenant. The pause of an admin covers the groups of all tenants or,
    if `tenant` is given, only the groups of that tenant."""

    labels: Annotated[dict[Name, Text], Field(max_length=64)] = {}
    harness: Name | None = None
    tenant: Annotated[str, StringConstraints(pattern=TENANT_NAME)] | None = None
