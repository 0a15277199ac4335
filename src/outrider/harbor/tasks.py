"""Harbor task folders as tasks.

It runs nothing. Invariant: what a folder asks for is in its task, or the folder is refused with the field's name; and
the tests and the solution are in no part of the task that an agent is shown.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from outrider.environment import variables
from outrider.errors import InvalidField, NotFound
from outrider.examples import Example, Gold
from outrider.harbor.files import instruction_in, read_text, written
from outrider.harbor.schema import Artifacts, Environment, Healthcheck, TaskToml, unsupported
from outrider.rootfs.dockerfile import DOCKERFILE, built_name
from outrider.rootfs.store import ImageStore

TASK_TOML = "task.toml"
TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
FOLDERS = ("/logs/agent", "/logs/verifier", "/logs/artifacts")
"""Folders that Harbor makes in every sandbox."""
ARTIFACTS = "/logs/artifacts"
"""What is there is an artifact of every task."""
TEST, SOLVE = "test.sh", "solve.sh"
COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "singularity-compose.yaml")
AGENT_SECONDS, SESSION_SECONDS = 1800.0, 3600.0
"""The limits of a task that sets none."""
PREPARING_SECONDS = 1800.0
"""What a session may take besides its agent, where the agent has more than the default."""


def harbor_examples(
    root: Path,
    *,
    tasks: Sequence[str] | None = None,
    limit: int | None = None,
    image: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> list[Example]:
    """The Harbor tasks below a folder: each folder with `task.toml` and `instruction.md` or `steps`, sorted by path.

    `tasks` chooses some by their paths below `root`. `image` is for tasks that name no image of their own, in place of
    their Dockerfile. The values that `${NAME}` stands for come from `environ`, by default this process's environment,
    and are a part of the task. Raises InvalidField for a broken task and for what it asks for and Outrider cannot give,
    and TooLarge for tests that do not fit.
    """
    folders: dict[str, Path] = {}
    for found in sorted(root.rglob(TASK_TOML)):
        folder = found.parent
        inner = any(folder.is_relative_to(other) and folder != other for other in folders.values())
        if not inner and ((folder / "instruction.md").is_file() or (folder / "steps").is_dir()):
            folders[folder.resolve().name if folder == root else str(folder.relative_to(root))] = folder
    if not folders:
        raise InvalidField(f"no folder below {root} has task.toml and instruction.md", field="source")
    for name in tasks or ():
        if name not in folders:
            raise InvalidField(
                f"there is no task {name!r} below {root}", field="tasks", hint=f"such as {next(iter(folders))!r}"
            )
    chosen = list(tasks if tasks is not None else folders)[:limit]
    known = variables() if environ is None else environ
    return [HarborFolder(folders[name], known, image).example(name) for name in chosen]


class HarborFolder:
    """One folder. Its constructor raises InvalidField for what is invalid or unsupported in its task.toml."""

    def __init__(self, folder: Path, environ: Mapping[str, str], image: str | None = None) -> None:
        self._folder = folder
        self._toml = folder / TASK_TOML
        self._environ = environ
        self._image = image
        self._config = read_config(self._toml)
        for field, what in unsupported(self._config):
            raise self._refusal(field, what)
        if self._config.steps:
            raise self._refusal("steps", "tasks of several steps")

    def example(self, name: str) -> Example:
        """Raises InvalidField, and TooLarge for tests that do not fit."""
        config, folder = self._config, self._folder
        for path in (*(folder / "environment" / name for name in COMPOSE), folder / "trajectory.json"):
            if path.exists():
                raise InvalidField(f"{path} asks for what Outrider does not do", field="source")
        evaluator = self.evaluator()
        task: dict[str, Any] = {
            "instruction": instruction_in(folder, folder),
            "runtime": self.runtime(config.environment),
            "evaluator": evaluator,
            "artifacts": patterns(config.artifacts),
            "labels": {"harbor": config.task.name if config.task else folder.resolve().name},
        }
        if config.verifier.collect:
            task["collect"] = [{"run": hook.command, "seconds": hook.timeout_sec} for hook in config.verifier.collect]
        if config.agent.timeout_sec is not None:
            task["limits"] = limits(config.agent.timeout_sec)
        return Example(id=name, task=task, gold=self.gold())

    def runtime(self, environment: Environment) -> dict[str, Any]:
        resources = {
            "cpus": environment.cpus,
            "memory_mb": environment.memory_mb,
            "disk_mb": environment.storage_mb,
        }
        prepare = [{"run": f"mkdir -p {' '.join(FOLDERS)}"}]
        if environment.healthcheck is not None:
            prepare.append(health_step(environment.healthcheck))
        runtime: dict[str, Any] = {
            "env": self._resolved(environment.env, "environment.env"),
            "prepare": prepare,
            "resources": {name: value for name, value in resources.items() if value is not None},
        }
        image = environment.docker_image or self._image
        dockerfile = self._folder / "environment" / DOCKERFILE
        if image is None and dockerfile.exists():
            image = built_name(dockerfile.parent, ImageStore())
        workdir = environment.workdir
        if image is not None:
            runtime["image"] = image
            with suppress(InvalidField, NotFound):  # known to another machine, or to a container engine
                workdir = workdir or ImageStore().image(image).workdir or "/"
        if workdir is not None:
            runtime["workdir"] = workdir
        return runtime

    def evaluator(self) -> dict[str, Any]:
        config, folder = self._config, self._folder
        tests = folder / "tests"
        if not (tests / TEST).exists():
            raise InvalidField(f"{folder} has no tests/{TEST}", field="evaluator")
        options: dict[str, Any] = {"tests": written(tests, folder, "/tests")}
        if env := self._resolved(config.verifier.env, "verifier.env"):
            options["env"] = env
        evaluator = {"kind": "harbor", "options": options, "seconds": config.verifier.timeout_sec}
        if config.verifier.mode == "separate":
            for name in (DOCKERFILE, "docker-compose.yaml"):
                if (tests / name).is_file():
                    raise self._refusal(f"tests/{name}", "an environment of the verifier's own: it has the task's")
            evaluator["carry"] = sources(config.artifacts)
            options["without"] = [
                {"folder": one.source, "patterns": one.exclude} for one in config.artifacts if one.exclude
            ]
        return evaluator

    def gold(self) -> Gold | None:
        """The solution runs in the working directory, with its files in /solution. Its exit code says nothing."""
        folder = self._folder / "solution"
        if not (folder / SOLVE).exists():
            return None
        exports = self._resolved(self._config.solution.env, "solution.env")
        return Gold(
            run=f"chmod +x /solution/{SOLVE} && (/solution/{SOLVE}) || true",
            files=tuple(written(folder, self._folder, "/solution")),
            env={"DEBIAN_FRONTEND": "noninteractive", **exports},
        )

    def _resolved(self, env: Mapping[str, str], field: str) -> dict[str, str]:
        """The variables, with the values that templates stand for. Raises InvalidField for one that has none."""
        found = {}
        for name, value in env.items():
            template = TEMPLATE.fullmatch(value)
            if template is None:
                found[name] = value
                continue
            known = self._environ.get(template[1], template[2])
            if known is None:
                raise InvalidField(
                    f"{self._toml} takes {name} from the environment, which has no {template[1]}",
                    field=f"{field}.{name}",
                    hint=f"set {template[1]}, or write ${{{template[1]}:-DEFAULT}} into task.toml",
                )
            found[name] = known
        return found

    def _refusal(self, field: str, what: str) -> InvalidField:
        return InvalidField(f"{self._toml} has {field}, and Outrider does not do {what}", field=field)


def read_config(file: Path) -> TaskToml:
    """Raises InvalidField that names the file and the field."""
    try:
        table = tomllib.loads(read_text(file))
    except tomllib.TOMLDecodeError as error:
        raise InvalidField(f"cannot read {file}: {error}", field="source") from error
    try:
        return TaskToml.model_validate(table)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "source"
        message = first["msg"].removeprefix("Value error, ")
        raise InvalidField(f"{file} has {field}: {message[:1].lower()}{message[1:]}", field=field) from error


def health_step(check: Healthcheck) -> dict[str, Any]:
    return {
        "run": check.command,
        "seconds": check.timeout_sec,
        "attempts": max(check.retries, 1),
        "pause_seconds": check.interval_sec,
        "grace_seconds": check.start_period_sec,
        "grace_pause_seconds": check.start_interval_sec,
    }


def sources(artifacts: Artifacts) -> list[str]:
    """The paths that are artifacts, each once."""
    return list(dict.fromkeys((ARTIFACTS, *(one.source.rstrip("/") or one.source for one in artifacts))))


def patterns(artifacts: Artifacts) -> list[str]:
    """Patterns of the artifacts' files, for what is kept of the agent's sandbox: a path may be a file or a folder."""
    _, *named = sources(artifacts)
    return [f"{ARTIFACTS}/**", *(pattern for source in named for pattern in (source, f"{source}/**"))]


def limits(agent_seconds: float) -> dict[str, float]:
    """Limits under which an agent has that long."""
    whole = {"session_seconds": agent_seconds + PREPARING_SECONDS} if agent_seconds > AGENT_SECONDS else {}
    return {"agent_seconds": agent_seconds, **whole}
