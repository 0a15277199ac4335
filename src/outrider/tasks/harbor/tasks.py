"""Converts Harbor's task folders to tasks.

The module runs no program. Invariants: a setting that affects sessions becomes part of the task, or the folder is
refused with an error that names the field; the parts of a task that an agent sees never contain the tests or the
solution.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from msgspec import structs
from pydantic import ValidationError

from outrider.environment import variables
from outrider.errors import InvalidField, NotFound
from outrider.sandbox.engine_build import built_image
from outrider.sandbox.rootfs.dockerfile import DOCKERFILE, Health
from outrider.sandbox.rootfs.store import ImageStore
from outrider.spec import MAX_INLINE_FILE, Limits, RuntimeSpec, fault_text
from outrider.tasks.examples import Example, Gold
from outrider.tasks.harbor.files import (
    check_links,
    files_below,
    hidden_folders,
    inside,
    instruction_in,
    shown,
    written,
)
from outrider.tasks.harbor.network_uses import (
    PIP,
    UV_AT,
    UV_HOST,
    covered,
    network_uses,
    uv_installer,
    with_uv_of_mirror,
)
from outrider.tasks.harbor.schema import TEMPLATE as EMBEDDED
from outrider.tasks.harbor.schema import (
    Artifacts,
    Environment,
    HarborStep,
    Healthcheck,
    Network,
    TaskToml,
    unsupported,
)
from outrider.tasks.harbor.task_network import PUBLIC, NoDestination, check_steps, network_of, of_step
from outrider.tasks.harbor.verifiers import COMPOSE, SeparateVerifier, mode, separate_verifier
from outrider.text_files import MAX_TOML, read_text_file, read_toml_file, toml_line

TASK_TOML = "task.toml"
OLDER = "task.yaml"
"""Name of the settings file in the older task format that Terminal-Bench used before Harbor."""
HINTS = {"task.name": 'Harbor refuses it too: write a name with an organisation, such as "my-org/my-task"'}
"""Hints for fields that are invalid in some public task folders, by field."""
TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
FOLDERS = ("/logs/agent", "/logs/verifier", "/logs/artifacts")
"""Folders that Harbor creates in every sandbox."""
ARTIFACTS = "/logs/artifacts"
"""Folder whose files are artifacts, whatever the task says."""
TEST, SOLVE, SETUP = "test.sh", "solve.sh", "setup.sh"
PRIOR = "trajectory.json"
"""File with an earlier trajectory that the agent is to continue."""
CLEAN = "find {} -mindepth 1 -delete 2> /dev/null || true"
OF_AGENTS, OF_VERIFIERS = ("/logs/agent", "/solution"), ("/tests", "/logs/verifier")
"""Folders that are emptied before every step but the first. OF_VERIFIERS are emptied only if the verifier of the
previous step ran in the agent's sandbox."""
SERVICES = (COMPOSE, "docker-compose.yml", "singularity-compose.yaml")
SERVICES_TEXT = "services beside the agent's sandbox"
OTHER_FILES = {PRIOR: "an earlier trajectory for the agent to continue"}
"""Unsupported files besides SERVICES, by name, with the features that they need."""
WORKDIR: str = RuntimeSpec.model_fields["workdir"].default
AGENT_SECONDS, SESSION_SECONDS = Limits().agent_seconds, Limits().session_seconds
"""Outrider's time limits in seconds, for a task that sets none."""
PREPARING_SECONDS = 1800.0
"""Time to prepare a sandbox, in seconds. It is also the time limit of a step's setup.sh. If the time limits of the
agent in all steps add up to more than AGENT_SECONDS, the session's limit is this sum plus PREPARING_SECONDS."""


def harbor_examples(
    root: Path,
    *,
    tasks: Sequence[str] | None = None,
    limit: int | None = None,
    image: str | None = None,
    environ: Mapping[str, str] | None = None,
    offline: bool = False,
    network: Sequence[str] = PUBLIC,
) -> list[Example]:
    """Return the Harbor tasks below a folder, sorted by path. Each folder with `task.toml` and either `instruction.md`
    or `steps` is a task. Raises InvalidField for a broken task and for unsupported fields, and TooLarge if the files of
    a task are too large.

    tasks: the tasks to return, as paths below `root`.
    image: the image for tasks that name no image. Their Dockerfiles are ignored.
    environ: the values that replace `${NAME}` in tasks, and so become part of them. The default is this process's
        environment.
    offline: true to give tasks no network, even if they request one.
    network: the destinations for a task that requests a public network.
    """
    folders = harbor_folders(root)
    if not folders:
        older = next(root.rglob(OLDER), None)
        hint = (
            f"{older} is of Terminal-Bench's older form: have Harbor convert it (harbor task migrate)"
            if older
            else None
        )
        raise InvalidField(f"no folder below {root} has task.toml and instruction.md", field="source", hint=hint)
    for name in tasks or ():
        if name not in folders:
            raise InvalidField(
                f"there is no task {name!r} below {root}", field="tasks", hint=f"such as {next(iter(folders))!r}"
            )
    chosen = list(tasks if tasks is not None else folders)[:limit]
    known = variables() if environ is None else environ
    public = () if offline else tuple(network)
    return [HarborFolder(folders[name], known, image, offline=offline, network=public).example(name) for name in chosen]


def harbor_folders(root: Path) -> dict[str, Path]:
    """Return the folders of the Harbor tasks below a folder, by their relative paths, sorted. A task folder inside
    another one is left out."""
    folders: dict[str, Path] = {}
    for found in sorted(root.rglob(TASK_TOML)):
        folder = found.parent
        inner = any(folder.is_relative_to(other) and folder != other for other in folders.values())
        if not inner and ((folder / "instruction.md").is_file() or (folder / "steps").is_dir()):
            folders[folder.resolve().name if folder == root else str(folder.relative_to(root))] = folder
    return folders


def build_contexts(root: Path) -> list[Path]:
    """Return the folders with the Dockerfiles of the Harbor tasks below a folder, sorted: those for agents' sandboxes,
    and those for verifiers with their own images. Raises InvalidField for a broken task.toml."""
    found = set[Path]()
    for dockerfile in root.rglob(f"environment/{DOCKERFILE}"):
        task = dockerfile.parent.parent
        found.add(shown(dockerfile.parent, task, hidden_folders(task)))
    for folder in harbor_folders(root).values():
        config = read_config(folder / TASK_TOML)
        steps: Sequence[HarborStep | None] = config.steps or [None]
        for step in steps:
            verifier = separate_verifier(config, folder, step)
            context = None if verifier is None or verifier.image else verifier.context
            if context is not None and (context / DOCKERFILE).is_file():
                found.add(inside(context, folder))
    return sorted(found)


class HarborFolder:
    """Converts one task folder. The constructor raises InvalidField if task.toml has invalid or unsupported fields."""

    def __init__(
        self,
        folder: Path,
        environ: Mapping[str, str],
        image: str | None = None,
        *,
        offline: bool = False,
        network: Sequence[str] = PUBLIC,
    ) -> None:
        self._folder = folder
        self._toml = folder / TASK_TOML
        self._environ = environ
        self._image = image
        self._hidden = hidden_folders(folder)
        self._config = read_config(self._toml)
        self._offline = offline
        self._network = tuple(network)
        for field, what, hint in unsupported(self._config):
            raise self._refusal(field, what, hint)
        try:
            check_steps(self._config)
        except InvalidField as error:
            raise self._refusal(error.field or "", error.message) from error

    def example(self, name: str) -> Example:
        """Return the example with the id `name`. Raises InvalidField, and TooLarge if the task's files are too
        large."""
        config, folder = self._config, self._folder
        steps = config.steps or []
        first = steps[0] if steps else None
        folders = (folder, *(self._step_folder(step) for step in steps))
        for path in (*(folder / "environment" / name for name in SERVICES), *(one / PRIOR for one in folders)):
            if path.exists():
                raise InvalidField(
                    f"{path} asks for what Outrider does not do: {OTHER_FILES.get(path.name, SERVICES_TEXT)}",
                    field="source",
                    hint=f"remove {path.name}, if the task can be solved and graded without",
                )
        runtime = self.runtime(first)
        task: dict[str, Any] = {
            "instruction": self._instruction(first),
            "runtime": runtime,
            "evaluator": self.evaluator(first, runtime),
            "artifacts": patterns([*config.artifacts, *(one for step in steps for one in step.artifacts)]),
            "labels": {"harbor": config.task.name if config.task else folder.resolve().name},
        }
        if harness := self._harness():
            task["harness"] = harness
        if hooks := self._collect(first):
            task["collect"] = hooks
        if len(steps) > 1:
            task["then"] = [self._later(step, runtime, after=before) for before, step in pairwise(steps)]
            task["steps_reward"] = config.multi_step_reward_strategy or "mean"
        seconds = [self._agent_seconds(step) for step in (first, *steps[1:])]
        if any(each is not None for each in seconds):
            given = [each or AGENT_SECONDS for each in seconds]
            task["limits"] = {"agent_seconds": given[0]}
            if sum(given) > AGENT_SECONDS:
                task["limits"]["session_seconds"] = sum(given) + PREPARING_SECONDS
        return Example(id=name, task=task, gold=self.gold(), notes=tuple(self._network_notes(runtime)))

    def _harness(self) -> dict[str, Any]:
        """Return the settings of the harness that any agent can use: MCP servers and skills."""
        environment = self._config.environment
        servers = []
        for number, server in enumerate(environment.mcp_servers):
            given = server.model_dump(exclude_defaults=True) | {"transport": server.transport}
            if server.headers:
                field = f"environment.mcp_servers.{number}.headers"
                given["headers"] = {
                    name: EMBEDDED.sub(partial(self._variable, field=f"{field}.{name}"), value)
                    for name, value in server.headers.items()
                }
            servers.append(given)
        skills = [environment.skills_dir] if environment.skills_dir is not None else []
        return {**({"mcp_servers": servers} if servers else {}), **({"skills": skills} if skills else {})}

    def _network_notes(self, runtime: dict[str, Any]) -> list[str]:
        """Return a note for each test script or solution that needs a network which the task does not have. All steps
        are included."""
        notes = []
        verifier, agent = reached(runtime, "verifier"), reached(runtime, "agent")
        for folder in (self._folder, *(self._step_folder(step) for step in self._config.steps or ())):
            for path, what, network in (
                (folder / "tests" / TEST, "graded", verifier),
                (folder / "solution" / SOLVE, "solved as it is", agent),
            ):
                if not path.is_file() or not path.resolve().is_relative_to(self._folder.resolve()):
                    continue
                text = with_uv(path.read_bytes()[:MAX_INLINE_FILE].decode(errors="replace"), network)
                if uses := [use for use in network_uses(text) if not covered(use.needs, network)]:
                    lines = ", ".join(f"{use.line} ({use.command})" for use in uses[:3])
                    more = f" and {len(uses) - 3} more" if len(uses) > 3 else ""
                    lacks = "the task has none"
                    if network:
                        wanted = " ".join(f"--network {name}" for name in dict.fromkeys(use.needs for use in uses))
                        lacks = f"the task's network lacks {wanted}"
                    notes.append(
                        f"{path}, line {lines}{more}: this needs a network, and {lacks}, so the task may not be {what}:"
                        " give the task a network, or put what it installs into the image, and remove the line"
                    )
        return notes

    def _later(self, step: HarborStep, runtime: dict[str, Any], *, after: HarborStep) -> dict[str, Any]:
        """Return the element of `task.then` for a step. As in Harbor, the folders that the previous step has used are
        emptied first."""
        needs = after.min_reward
        left = OF_AGENTS if mode(self._config, after) == "separate" else (*OF_AGENTS, *OF_VERIFIERS)
        return {
            "instruction": self._instruction(step),
            "prepare": [{"run": CLEAN.format(" ".join(left))}, *self._step_files(step)],
            "evaluator": self.evaluator(step, runtime),
            "collect": self._collect(step),
            "agent_seconds": self._agent_seconds(step) or AGENT_SECONDS,
            "needs": needs if isinstance(needs, dict) else {} if needs is None else {"reward": needs},
        }

    def _step_folder(self, step: HarborStep | None) -> Path:
        return self._folder if step is None else self._folder / "steps" / step.name

    def _instruction(self, step: HarborStep | None) -> str:
        return instruction_in(self._step_folder(step), self._folder)

    def _agent_seconds(self, step: HarborStep | None) -> float | None:
        own = None if step is None else step.agent.timeout_sec
        return self._config.agent.timeout_sec if own is None else own

    def _collect(self, step: HarborStep | None) -> list[dict[str, Any]]:
        hooks = [*self._config.verifier.collect, *(step.verifier.collect if step is not None else ())]
        return [{"run": hook.command, "seconds": hook.timeout_sec} for hook in hooks]

    def _step_files(self, step: HarborStep) -> list[dict[str, Any]]:
        """Return prepare steps for a step of the task: for its files in the working directory, its setup.sh, and its
        health check."""
        folder = self._step_folder(step) / "workdir"
        prepare = written(folder, self._folder, ".", hidden=self._hidden) if folder.exists() else []
        if (folder / SETUP).exists():
            prepare.append({"run": f"bash ./{SETUP}", "seconds": PREPARING_SECONDS})
        if step.healthcheck is not None:
            prepare.append(health_step(step.healthcheck))
        return prepare

    def runtime(self, first: HarborStep | None = None) -> dict[str, Any]:
        """Return the spec of the agent's sandbox."""
        environment = self._config.environment
        image, health = self._image_of_agents()
        runtime = self._sandbox(environment, "environment", image, self._loose_files())
        # The image's own health check runs before the task's, as in Harbor, which starts containers with `--wait`
        # (until they are healthy).
        if health is not None:
            runtime["prepare"].append(health_step(harbor_check(health)))
        if environment.healthcheck is not None:
            runtime["prepare"].append(health_step(environment.healthcheck))
        if first is not None:
            runtime["prepare"] += self._step_files(first)
        agent, verifier = of_step(self._config, first)
        self._give_network(runtime, environment, "environment", agent=agent, verifier=verifier)
        return runtime

    def _give_network(self, runtime: dict[str, Any], environment: Network, field: str, **phases: Network) -> None:
        """Set the network of the sandbox `runtime`, if the task requests one."""
        if self._offline:
            return
        try:
            network = network_of(environment, self._network, **phases)
        except NoDestination as error:
            raise self._refusal(f"{field}.{error.field}", f"such hosts: {error}") from error
        if network is not None:
            runtime["network"] = network

    def _of_verifier(self, verifier: SeparateVerifier, step: HarborStep | None) -> dict[str, Any]:
        """Return the spec of a separate verifier's sandbox."""
        runtime = self._sandbox_of_verifier(verifier)
        _, own = of_step(self._config, step)
        self._give_network(runtime, verifier.environment, verifier.field, verifier=own)
        return runtime

    def _sandbox_of_verifier(self, verifier: SeparateVerifier) -> dict[str, Any]:
        """Return the spec of a separate verifier's sandbox, without the network. As in Harbor, this sandbox gets no
        health check and no files of steps."""
        environment, field = verifier.environment, verifier.field
        if verifier.context is None:
            return self._sandbox(environment, field, self._image_of_agents()[0], self._loose_files())
        if (compose := verifier.context / COMPOSE).is_file():
            raise self._refusal(str(compose.relative_to(self._folder)), "services beside a verifier")
        image = verifier.image or built_image(inside(verifier.context, self._folder), ImageStore()).name
        return self._sandbox(environment, field, image, [])

    def _image_of_agents(self) -> tuple[str | None, Health | None]:
        """Return the name of the agent's image and, if it is built from a Dockerfile, the HEALTHCHECK in this file."""
        image = self._config.environment.docker_image or self._image
        folder = self._folder / "environment"
        if image is not None:
            return image, None
        if (folder / DOCKERFILE).exists():
            built = built_image(shown(folder, self._folder, self._hidden), ImageStore())
            return built.name, built.health
        for path, name in files_below(folder, self._folder) if folder.is_dir() else ():
            raise InvalidField(
                f"{path}: no Dockerfile and no docker_image says how {name} comes into the sandbox",
                field="environment.docker_image",
                hint="write docker_image into task.toml, or pass --image NAME: the files are then brought along",
            )
        return None, None

    def _loose_files(self) -> list[dict[str, Any]]:
        """Return prepare steps for the files of a task with a named image and no Dockerfile. As in Harbor, the prepare
        steps write the files to the working directory."""
        folder = self._folder / "environment"
        named = self._config.environment.docker_image or self._image
        if not named or (folder / DOCKERFILE).exists() or not folder.is_dir():
            return []
        return written(folder, self._folder, ".", hidden=self._hidden)

    def _sandbox(
        self, environment: Environment, field: str, image: str | None, files: list[dict[str, Any]]
    ) -> dict[str, Any]:
        resources = {
            "cpus": environment.cpus,
            "memory_mb": environment.memory_mb,
            "disk_mb": environment.storage_mb,
            "gpus": environment.gpus,
        }
        runtime: dict[str, Any] = {
            "env": self._resolved(environment.env, f"{field}.env"),
            "prepare": [{"run": f"mkdir -p {' '.join(FOLDERS)}"}, *files],
            "resources": {name: value for name, value in resources.items() if value is not None},
        }
        workdir = environment.workdir
        if image is not None:
            runtime["image"] = image
            # By default, use the image's working directory. This machine may lack the image, because the image may be
            # on another machine or in a container engine.
            with suppress(InvalidField, NotFound):
                workdir = workdir or ImageStore().image(image).workdir or "/"
        if workdir is not None:
            runtime["workdir"] = workdir
        return runtime

    def evaluator(self, step: HarborStep | None, runtime: dict[str, Any]) -> dict[str, Any]:
        """Return the evaluator of a step, or of a task without steps. `runtime` is the spec of the agent's sandbox."""
        config = self._config
        separate = separate_verifier(config, self._folder, step)
        verifier = config.verifier
        artifacts = config.artifacts
        env = self._resolved(config.verifier.env, "verifier.env")
        options: dict[str, Any] = {}
        layers = [one / "tests" for one in dict.fromkeys((self._folder, self._step_folder(step)))]
        if separate is not None and separate.context is not None:
            check_links(layers, self._folder)
        else:
            options["tests"] = self._written_tests(
                layers, runtime if separate is None else self._of_verifier(separate, step)
            )
        if step is not None:
            verifier = step.verifier
            artifacts = [*artifacts, *step.artifacts]
            env |= self._resolved(verifier.env, f"steps.{step.name}.verifier.env")
        if env:
            options["env"] = env
        evaluator = {"kind": "harbor", "options": options, "seconds": verifier.timeout_sec}
        if separate is None:
            options |= {"alone": True} if step is not None else {}
            return evaluator
        own = self._of_verifier(separate, step)
        if step is not None or own != runtime:
            evaluator["runtime"] = own
        workdir = runtime.get("workdir", WORKDIR)
        evaluator["carry"] = sources(artifacts, workdir)
        options["without"] = [
            {"folder": posixpath.join(workdir, one.source), "patterns": one.exclude} for one in artifacts if one.exclude
        ]
        return evaluator

    def _written_tests(self, layers: Sequence[Path], runtime: dict[str, Any]) -> list[dict[str, Any]]:
        """Return prepare steps that write the test files to the verifier's sandbox, whose spec is `runtime`. Files in a
        later folder of `layers` replace files in an earlier one. If the sandbox reaches the mirror of Python packages,
        the tests install uv from there (`with_uv`)."""
        if not any((layer / TEST).exists() for layer in layers):
            raise InvalidField(f"{layers[-1].parent} has no tests/{TEST}", field="evaluator")
        files = (file for layer in layers if layer.exists() for file in written(layer, self._folder, "/tests"))
        tests = {file["to"]: file for file in files}
        script = tests.get(f"/tests/{TEST}", {})
        text = script.get("write", "")
        if script.get("encoding") is None and (ours := with_uv(text, reached(runtime, "verifier"))) != text:
            tests[script["to"]] = {**script, "write": ours}
            tests[UV_AT] = {"write": uv_installer(), "to": UV_AT}
        return list(tests.values())

    def gold(self) -> Gold | None:
        """Return the solutions of all steps, or None if one step has no solution."""
        whole = self._solution(self._folder / "solution")
        own = [self._solution(self._step_folder(step) / "solution") for step in self._config.steps or ()]
        first, *later = [one or whole for one in own] or [whole]
        then = tuple(one for one in later if one is not None)
        return None if first is None or len(then) < len(later) else structs.replace(first, then=then)

    def _solution(self, folder: Path) -> Gold | None:
        """Return the solution in a folder, or None if it has no solve.sh. The solution runs in the working directory,
        and its exit code does not matter. Its files are in /solution."""
        if not (folder / SOLVE).exists():
            return None
        exports = self._resolved(self._config.solution.env, "solution.env")
        return Gold(
            run=f"chmod +x /solution/{SOLVE} && (/solution/{SOLVE}) || true",
            files=tuple(written(folder, self._folder, "/solution")),
            env={"DEBIAN_FRONTEND": "noninteractive", **exports},
        )

    def _resolved(self, env: Mapping[str, str], field: str) -> dict[str, str]:
        """Return the variables `env`. A value of the form `${NAME}` or `${NAME:-DEFAULT}` is replaced. Raises
        InvalidField if NAME has neither a value nor a default."""
        found = {}
        for name, value in env.items():
            template = TEMPLATE.fullmatch(value)
            if template is None:
                found[name] = value
                continue
            found[name] = self._variable(template, f"{field}.{name}")
        return found

    def _variable(self, template: re.Match[str], field: str) -> str:
        """Return the value of a variable. Raises InvalidField if it has neither a value nor a default."""
        known = self._environ.get(template[1], template[2])
        if known is None:
            raise InvalidField(
                f"{self._toml} takes {field.rpartition('.')[2]} from the environment, which has no {template[1]}",
                field=field,
                hint=f"set {template[1]}, or write ${{{template[1]}:-DEFAULT}} into task.toml",
            )
        return known

    def _refusal(self, field: str, what: str, hint: str | None = None) -> InvalidField:
        return InvalidField(
            f"{placed(self._toml, field)} has {field}, and Outrider does not do {what}",
            field=field,
            hint=hint or "remove it from task.toml, if the task can be solved and graded without",
        )


def read_config(file: Path) -> TaskToml:
    """Read a task.toml. Raises InvalidField with the file and the field."""
    try:
        return TaskToml.model_validate(read_toml_file(file, field="source"))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "source"
        message = fault_text(first, TaskToml)
        raise InvalidField(
            f"{placed(file, field)} has {field}: {message[:1].lower()}{message[1:]}",
            field=field,
            hint=HINTS.get(field, "correct it: Harbor refuses it too"),
        ) from error


def placed(file: Path, field: str) -> str:
    """Return the place of a field for an error message, such as `task.toml, line 3,`: the line that sets the field, or
    else the line that begins the field's table. If there is no such line, return only the file's path."""
    line = toml_line(read_text_file(file, field="source", limit=MAX_TOML), field)
    return str(file) if line is None else f"{file}, line {line},"


def harbor_check(health: Health) -> Healthcheck:
    """Convert the HEALTHCHECK of a Dockerfile to a health check of task.toml."""
    return Healthcheck(
        command=health.command,
        interval_sec=health.interval,
        timeout_sec=health.timeout,
        start_period_sec=health.start_period,
        start_interval_sec=health.start_interval,
        retries=health.retries,
    )


def health_step(check: Healthcheck) -> dict[str, Any]:
    return {
        "run": check.command,
        "seconds": check.timeout_sec,
        "attempts": max(check.retries, 1),
        "pause_seconds": check.interval_sec,
        "grace_seconds": check.start_period_sec,
        "grace_pause_seconds": check.start_interval_sec,
    }


def reached(runtime: Mapping[str, Any], phase: str) -> list[str]:
    """Return the destinations that a sandbox reaches in a `phase`: `agent` or `verifier`."""
    network = runtime.get("network", {"allow": []})
    return list(network.get(phase, network["allow"]))


def with_uv(script: str, network: Sequence[str]) -> str:
    """Return the script. If the network has the mirror of Python packages but not the site of uv's installer, the
    script is changed to install uv from the mirror."""
    from_mirror = covered(PIP, network) and not covered(f"{UV_HOST}:443", network)
    return with_uv_of_mirror(script) if from_mirror else script


def sources(artifacts: Artifacts, workdir: str = "") -> list[str]:
    """Return the paths of artifacts without repetitions. ARTIFACTS comes first. Relative paths are joined to
    `workdir`."""
    named = (posixpath.join(workdir, one.source.rstrip("/") or one.source) for one in artifacts)
    return list(dict.fromkeys((ARTIFACTS, *named)))


def patterns(artifacts: Artifacts) -> list[str]:
    """Return the patterns of the files in the agent's sandbox to store as artifacts. There are two patterns for each
    artifact, because it may be a file or a folder."""
    _, *named = sources(artifacts)
    return [f"{ARTIFACTS}/**", *(pattern for source in named for pattern in (source, f"{source}/**"))]
