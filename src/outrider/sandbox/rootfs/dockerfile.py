"""Reads a Dockerfile and plans the build of its image without a container engine. sandbox/image_build.py carries out
the plan.

Supported instructions:

- FROM an image on this machine or an earlier stage
- COPY and ADD of local files, or of files in another image
- RUN, SHELL, WORKDIR, ENV, ARG, HEALTHCHECK and here-documents
- USER root
- LABEL, EXPOSE, VOLUME, CMD and others that change no files; they are ignored

Invariants: every other instruction, and every file outside of the build context, causes an error with the file name,
the line and a hint; two plans with the same key produce the same image.
"""

from __future__ import annotations

import hashlib
import os
import platform
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from outrider.errors import InvalidField, NotFound
from outrider.sandbox.rootfs.archives import MACHINES, digest_of
from outrider.sandbox.rootfs.dockerfile_text import (
    MAX_VALUES,
    BadText,
    HereDocument,
    Instruction,
    filled_words,
    instructions,
    json_list,
    split,
)
from outrider.sandbox.rootfs.dockerignore import IGNORE_FILES, MAX_FILE, Ignore, read_ignore
from outrider.sandbox.rootfs.store import PINNED, ImageStore, RootImage
from outrider.sandbox.rootfs.unpack import is_tar
from outrider.text_files import read_text_file

DOCKERFILE = "Dockerfile"
ENVIRONMENT, TASK_TOML = "environment", "task.toml"
"""A Harbor task is a folder with a file `task.toml`. Its folder `environment` is the build context of its
Dockerfile."""
SECRETS = frozenset({"tests", "solution", "steps", TASK_TOML})
"""Files of a Harbor task that the agent must not see."""
FORMAT = 2
"""A version number in the key of every plan. Increase it when a code change means that some Dockerfile now produces a
different image."""
IGNORED = frozenset({"LABEL", "EXPOSE", "MAINTAINER", "CMD", "STOPSIGNAL", "VOLUME"})
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ROOT = re.compile(r"(root|0)(:(root|0))?")
OWNER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(:[A-Za-z0-9_][A-Za-z0-9_.-]*)?")
MODE = re.compile(r"0?[0-7]{3}")
WILD = re.compile(r"[*?\[]")
SECONDS = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?(?:(\d+(?:\.\d+)?)ms)?")
SHELLS = re.compile(r"(/(usr/)?bin/)?(env|sh|bash|dash|tini|dumb-init)|--|-\w+|sleep|infinity")
"""The words that an ENTRYPOINT may contain, such as `tini --`: shells, init programs and options. Any other ENTRYPOINT
is refused, because it names a program of its own, which no sandbox would start."""
SHELL = ("/bin/sh", "-c")
ARCHITECTURE = MACHINES.get(platform.machine(), platform.machine())
PLATFORMS = {
    f"{where}{name}": value
    for where in ("TARGET", "BUILD")
    for name, value in (("PLATFORM", f"linux/{ARCHITECTURE}"), ("OS", "linux"), ("ARCH", ARCHITECTURE), ("VARIANT", ""))
}
"""The platform variables that Docker defines in every build, such as TARGETARCH."""
MAX_STEPS = 512
"""Maximum number of steps in a plan. Real Dockerfiles have fewer, because container engines allow at most 127
layers."""
MAX_STAGES = 64
MAX_PATH = 4096
MAX_MESSAGE = 500
"""Maximum length of an error message in characters. The message quotes the instruction, which may have a million
characters."""
ADDED = ("without", "owner")
"""Fields that were added to build steps without a new FORMAT. They are left out of the key if they are empty, so that
older images keep their keys."""


class Copy(msgspec.Struct, frozen=True, kw_only=True, tag="Copy"):
    """Copies files and folders from the build context. The content of a source folder goes into `target`.

    `sources`: the files and folders, with symbolic links resolved.
    `target`: an absolute path in the image.
    `into`: True if the sources go into the folder `target`. If False, a single file becomes `target`. But if `target`
        is an existing folder, the file goes into that folder.
    `without`: the paths in the sources that .dockerignore excludes.
    `owner`: the user and group of the copies, as an argument for `chown`. "" means root.
    """

    line: int
    sources: tuple[Path, ...]
    target: str
    into: bool
    mode: str | None = None
    without: tuple[Path, ...] = ()
    owner: str = ""


class CopyFrom(msgspec.Struct, frozen=True, kw_only=True, tag="CopyFrom"):
    """Copies files from the image `origin`. `sources` are absolute paths or patterns in that image. The other fields
    are the same as in `Copy`."""

    line: int
    origin: BaseImage
    sources: tuple[str, ...]
    target: str
    into: bool
    mode: str | None = None
    owner: str = ""


class WriteFile(msgspec.Struct, frozen=True, kw_only=True, tag="WriteFile"):
    """Writes the text of a here-document to the file `target`. If `into` is true, `target` is a folder, and the file in
    it is called `name`."""

    line: int
    name: str
    text: str
    target: str
    into: bool
    mode: str | None = None
    owner: str = ""


class RunInstruction(msgspec.Struct, frozen=True, kw_only=True, tag="Run"):
    """Runs the command `argv` in `workdir`. `env` is added to the environment variables of the base image."""

    line: int
    argv: tuple[str, ...]
    env: dict[str, str]
    workdir: str


class MakeFolder(msgspec.Struct, frozen=True, kw_only=True, tag="MakeFolder"):
    line: int
    path: str


class BaseImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image that a build uses: an image in the store, or an earlier stage of the Dockerfile. Only a stage has a
    `plan`."""

    name: str
    digest: str
    env: dict[str, str]
    workdir: str | None
    plan: BuildPlan | None = None


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """A HEALTHCHECK: its command and its options. Times are in seconds."""

    command: str
    interval: float = 30.0
    timeout: float = 30.0
    start_period: float = 0.0
    start_interval: float = 5.0
    retries: int = 3


BuildStep = Copy | CopyFrom | WriteFile | RunInstruction | MakeFolder


class BuildPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan for building an image: the `steps` to run on `base`.

    `env`, `workdir`: settings of the finished image.
    `digest`: the plan's key, in the form `sha256:HEX`.
    `health`: the health check. It is not stored in the image: a prepare step of the task runs it.
    """

    file: Path
    base: BaseImage
    steps: tuple[BuildStep, ...]
    env: dict[str, str]
    workdir: str
    digest: str
    shell: tuple[str, ...] = SHELL
    health: Health | None = None

    @property
    def name(self) -> str:
        """The image's name in the store. It depends on the base image, the instructions and the copied files, but not
        on the path of the Dockerfile."""
        return f"dockerfile/{self.digest.removeprefix('sha256:')[:32]}"

    @property
    def needed(self) -> tuple[BaseImage, ...]:
        """All images that the build uses. The base is the first."""
        return (self.base, *(step.origin for step in self.steps if isinstance(step, CopyFrom)))


class BuildStage:
    """One stage of a Dockerfile: a FROM and the instructions up to the next FROM."""

    def __init__(self, base: BaseImage, shell: tuple[str, ...], health: Health | None, name: str | None) -> None:
        self.base = base
        self.name = name
        self.shell = shell
        self.health = health
        self.args: dict[str, str] = {}
        self.env: dict[str, str] = {}
        self.workdir = base.workdir or "/"
        self.steps: list[BuildStep] = []


class ContextFolder(msgspec.Struct, frozen=True):
    """A folder from which COPY may take files. `ignore` has the patterns of its .dockerignore. `whole_task` is True for
    the folder of a Harbor task, which also contains files that the agent must not see."""

    folder: Path
    ignore: Ignore
    whole_task: bool = False


def read_dockerfile(context: Path, store: ImageStore) -> BuildPlan:
    """Read the Dockerfile of a folder and return its plan. Blocks while the copied files are read. Raises
    InvalidField."""
    file = context / DOCKERFILE
    return Reader(file, store).plan(read_text_file(file, field="dockerfile", limit=MAX_FILE))


def engine_hint(context: Path) -> str:
    return f"have a container engine build it: outrider image build {context} --engine podman (or docker)"


class Reader:
    """Reads one Dockerfile. Raises InvalidField with the file and the line."""

    def __init__(self, file: Path, store: ImageStore) -> None:
        self._file = file
        self._context = file.parent.resolve()
        for each in (file, *(file.with_name(name) for name in IGNORE_FILES)):
            if not each.resolve().is_relative_to(self._context):
                raise InvalidField(
                    f"{each} is a link that leads out of {self._context}",
                    field="dockerfile",
                    hint="put the file in its place",
                )
        self._roots = [ContextFolder(self._context, read_ignore(self._context))]
        above = self._context.parent
        if self._context.name == ENVIRONMENT and (above / TASK_TOML).is_file():
            self._roots.append(ContextFolder(above, read_ignore(above), whole_task=True))
        self._store = store
        self._early: dict[str, str] = {}
        """The ARGs before FROM."""
        self._stages: list[BuildStage] = []

    def plan(self, text: str) -> BuildPlan:
        readers: dict[str, Callable[[Instruction], None]] = {
            "FROM": self.read_from,
            "ARG": self.read_arg,
            "ENV": self.read_env,
            "WORKDIR": self.read_workdir,
            "USER": self.read_user,
            "COPY": self.read_copy,
            "ADD": self.read_copy,
            "RUN": self.read_run,
            "SHELL": self.read_shell,
            "ENTRYPOINT": self.read_entrypoint,
            "HEALTHCHECK": self.read_healthcheck,
        }
        try:
            for one in instructions(text):
                if one.name in IGNORED:
                    continue
                if one.name not in readers:
                    raise self._beyond(one.line, f"{one.name} is not supported here")
                if not self._stages and one.name not in ("FROM", "ARG"):
                    raise self._refusal(one.line, f"{one.name} comes before FROM")
                readers[one.name](one)
                self._check_sizes(one)
        except BadText as error:
            raise self._refusal(error.line, str(error)) from error
        if not self._stages:
            raise InvalidField(
                f"{self._file} has no FROM", field="dockerfile", hint="begin with FROM and the name of an image"
            )
        return self._plan_of(self._stages[-1])

    def health(self, text: str) -> Health | None:
        """Return the HEALTHCHECK of a Dockerfile whose image a container engine builds. Raises InvalidField for a USER
        other than root, and for an ENTRYPOINT that starts a program, because sandboxes support neither."""
        base = BaseImage(name="", digest="", env={}, workdir=None)
        last: dict[str, Instruction] = {}
        try:
            for one in instructions(text):
                if one.name == "FROM":
                    last = {}
                    self._stages.append(BuildStage(base, SHELL, None, None))
                elif self._stages and one.name in ("USER", "ENTRYPOINT", "HEALTHCHECK"):
                    last[one.name] = one
        except BadText as error:
            raise self._refusal(error.line, str(error)) from error
        if not self._stages:
            return None
        readers = {"USER": self.read_user, "ENTRYPOINT": self.read_entrypoint, "HEALTHCHECK": self.read_healthcheck}
        for name, one in last.items():
            readers[name](one)
        return self._stage.health

    @property
    def _stage(self) -> BuildStage:
        return self._stages[-1]

    def _plan_of(self, stage: BuildStage) -> BuildPlan:
        hashed: list[object] = [FORMAT, stage.base.digest, stage.env, stage.workdir]
        for step in stage.steps:
            fields: dict[str, Any] = {
                name: value
                for name, value in msgspec.structs.asdict(step).items()
                if name != "line" and (value or name not in ADDED)
            }
            if isinstance(step, Copy):
                fields["sources"] = [(path.name, kept_digest(path, step.without)) for path in step.sources]
                if step.without:
                    fields["without"] = sorted(
                        str(path.relative_to(source))
                        for source in step.sources
                        for path in step.without
                        if path.is_relative_to(source)
                    )
            elif isinstance(step, CopyFrom):
                fields["origin"] = step.origin.digest
            # The key contains a step's tag and not its class name, so that existing images keep their keys if the class
            # is renamed.
            hashed.append([type(step).__struct_config__.tag, fields])
        return BuildPlan(
            file=self._file,
            base=stage.base,
            steps=tuple(stage.steps),
            env={**stage.base.env, **stage.env},
            workdir=stage.workdir,
            digest=f"sha256:{hashlib.sha256(msgspec.json.encode(hashed, order='sorted')).hexdigest()}",
            shell=stage.shell,
            health=stage.health,
        )

    def _check_sizes(self, one: Instruction) -> None:
        variables = [self._early]
        if self._stages:
            variables += [self._stage.args, self._stage.env]
            if len(self._stage.steps) > MAX_STEPS:
                raise self._refusal(one.line, f"more than {MAX_STEPS} steps", hint="join several RUN into one")
            if len(self._stage.workdir) > MAX_PATH:
                raise self._refusal(one.line, f"the path of WORKDIR has more than {MAX_PATH} characters")
        for each in variables:
            if sum(len(name) + len(value) for name, value in each.items()) > MAX_VALUES:
                raise self._refusal(one.line, f"the variables have more than {MAX_VALUES} characters")

    def read_from(self, one: Instruction) -> None:
        words = self._words(one, {**PLATFORMS, **self._early})
        wanted = words.pop(0).removeprefix("--platform=") if words and words[0].startswith("--platform=") else None
        if (
            not words
            or not words[0]
            or words[0].startswith("--")
            or (words[1:] and [words[1].upper(), *words[3:]] != ["AS"])
        ):
            raise self._refusal(
                one.line, f"FROM {one.text} is not supported here", hint="FROM IMAGE, or FROM IMAGE AS NAME"
            )
        if wanted is not None and wanted.split("/")[:2] != ["linux", ARCHITECTURE]:
            raise self._refusal(
                one.line,
                f"FROM asks for the platform {wanted}, and this machine is linux/{ARCHITECTURE}",
                hint="build the image on a machine of that platform, or remove --platform",
            )
        if len(self._stages) == MAX_STAGES:
            raise self._refusal(one.line, f"more than {MAX_STAGES} stages")
        earlier = self._named_stage(words[0], numbers=False)
        base = self._image(one, words[0]) if earlier is None else self._base_of(earlier)
        shell, health = (SHELL, None) if earlier is None else (earlier.shell, earlier.health)
        self._stages.append(BuildStage(base, shell, health, words[2].lower() if words[1:] else None))

    def _named_stage(self, name: str, *, numbers: bool = True) -> BuildStage | None:
        """Return the stage of this name, which may be the current one. If there is none and `numbers` is true, return
        the earlier stage of this number (`COPY --from=0`). Returns None if there is no such stage."""
        for stage in reversed(self._stages):
            if stage.name == name.lower():
                return stage
        if numbers and name.isdecimal() and int(name) < len(self._stages) - 1:
            return self._stages[int(name)]
        return None

    def _base_of(self, stage: BuildStage) -> BaseImage:
        plan = self._plan_of(stage)
        return BaseImage(name=plan.name, digest=plan.digest, env=plan.env, workdir=plan.workdir, plan=plan)

    def _image(self, one: Instruction, reference: str) -> BaseImage:
        """Return the image in the store for an image reference. Raises InvalidField if there is none."""
        if reference == "scratch":
            raise self._beyond(one.line, "an image without a base (scratch) is not supported here")
        whole, at, pinned = reference.partition("@")
        if at and not PINNED.fullmatch(f"@{pinned}"):
            raise self._refusal(
                one.line,
                f"{pinned[:80]!r} is no digest: sha256: and 64 hexadecimal digits",
                hint=f"write the whole digest, or only {whole}",
            )
        short = whole.removeprefix("docker.io/").removeprefix("library/")
        names = list(dict.fromkeys((whole, short, short.removesuffix(":latest"))))
        found = {name: image for name in names if (image := self._stored(name)) is not None}
        if not at and found:
            return base_of(*next(iter(found.items())))
        if at:
            for name in names:
                if (image := self._stored(f"{name}{at}{pinned}")) is not None:
                    return base_of(f"{name}{at}{pinned}", image)
            for name, image in (found or self._store.images()).items():
                if image.digest == pinned:
                    return base_of(name, image)
        own = f"{short}{at}{pinned}"
        pull = f"outrider image pull {reference} {own}"
        if found:
            raise self._refusal(
                one.line,
                f"the image {next(iter(found))!r} of this machine is not known to be {pinned}",
                hint=f"{pull} (which checks the digest); or, to use this machine's image, write only {whole}",
            )
        other = f"write only {whole} and run: outrider image import FILE {short}" if at else ""
        raise self._refusal(
            one.line,
            f"there is no image {reference!r} on this machine",
            hint=f"{pull}, or {other or f'outrider image import FILE {own}'}",
        )

    def _stored(self, name: str) -> RootImage | None:
        try:
            return self._store.image(name)
        except (NotFound, InvalidField):
            return None

    def read_arg(self, one: Instruction) -> None:
        for word in self._words(one):
            name, given, value = word.partition("=")
            if not NAME.fullmatch(name):
                raise self._refusal(one.line, f"{name!r} is not the name of a variable")
            known = {**PLATFORMS, **self._early}
            if not self._stages:
                self._early |= {name: value} if given else {}
            elif given or name in known:
                self._stage.args[name] = value if given else known[name]

    def read_env(self, one: Instruction) -> None:
        words = self._words(one)
        if not words or "=" not in words[0]:  # the old syntax: ENV NAME VALUE
            words = [f"{words[0]}={' '.join(words[1:])}"] if len(words) > 1 else [""]
        for word in words:
            name, given, value = word.partition("=")
            if not given or not NAME.fullmatch(name):
                raise self._refusal(one.line, f"ENV {one.text} is not of the form NAME=VALUE")
            self._stage.env[name] = value

    def read_workdir(self, one: Instruction) -> None:
        path = " ".join(self._words(one))
        if not path:
            raise self._refusal(one.line, "WORKDIR needs a path")
        self._stage.workdir = posixpath.normpath(posixpath.join(self._stage.workdir, path))
        self._stage.steps.append(MakeFolder(line=one.line, path=self._stage.workdir))

    def read_user(self, one: Instruction) -> None:
        if not ROOT.fullmatch(" ".join(self._words(one))):
            raise self._refusal(
                one.line,
                f"USER {one.text}: root is the only user of a sandbox",
                hint="remove the line, if the task can be solved as root",
            )

    def read_shell(self, one: Instruction) -> None:
        shell = json_list(one.text)
        if shell is None:
            raise self._refusal(one.line, "SHELL needs a JSON list", hint='SHELL ["/bin/bash", "-c"]')
        self._stage.shell = shell

    def read_entrypoint(self, one: Instruction) -> None:
        words = json_list(one.text) or tuple(one.text.split())
        if one.text != "[]" and not all(map(SHELLS.fullmatch, words)):
            raise self._refusal(
                one.line,
                f"ENTRYPOINT {one.text}: a sandbox starts no program of its image",
                hint="remove the line, and do the program's preparations in a RUN or in a health check of the task"
                " (environment.healthcheck in task.toml)",
            )

    def read_healthcheck(self, one: Instruction) -> None:
        text, found = one.text, {}
        names = {f"--{name.replace('_', '-')}": name for name in Health.__struct_fields__[1:]}
        while text.startswith("--"):
            flag, _, text = text.partition(" ")
            option, _, value = flag.partition("=")
            text = text.strip()
            if option not in names or (number := seconds(value) if option != "--retries" else count(value)) is None:
                raise self._refusal(one.line, f"HEALTHCHECK takes no {flag}")
            found[names[option]] = number
        kind, _, command = text.partition(" ")
        words = json_list(command.strip())
        if kind.upper() not in ("NONE", "CMD") or (kind.upper() == "CMD" and not command.strip()):
            raise self._refusal(one.line, f"HEALTHCHECK {one.text} is not of the form NONE or CMD COMMAND")
        self._stage.health = None
        if kind.upper() == "CMD":
            run = command.strip() if words is None else " ".join(map(quoted, words))
            self._stage.health = msgspec.convert({"command": run, **found}, Health, strict=False)

    def read_run(self, one: Instruction) -> None:
        if one.text.startswith("--"):
            raise self._beyond(one.line, f"RUN takes no {one.text.split()[0].partition('=')[0]} here")
        if not one.text:
            raise self._refusal(one.line, "RUN needs a command")
        stage = self._stage
        argv = json_list(one.text) or (*stage.shell, with_documents(one))
        env = {**stage.args, **stage.env}
        stage.steps.append(RunInstruction(line=one.line, argv=argv, env=env, workdir=stage.workdir))

    def read_copy(self, one: Instruction) -> None:
        mode = origin = None
        owner = ""
        text = one.text
        while text.startswith("--"):
            flag, _, text = text.partition(" ")
            option, _, value = flag.partition("=")
            text = text.strip()
            if option == "--chmod" and MODE.fullmatch(value):
                mode = value
            elif option == "--from" and value and one.name == "COPY":
                origin = self._origin(one, value)
            elif option == "--chown" and value:
                owner = self._owner(one, value)
            elif option != "--link":
                raise self._beyond(one.line, f"{one.name} takes no {flag} here")
        words = list(json_list(text) or self._words(Instruction(one.line, one.name, text)))
        if len(words) < 2:
            raise self._refusal(one.line, f"{one.name} needs a source and a target")
        stage = self._stage
        target = posixpath.join(stage.workdir, words[-1])
        into = len(words) > 2 or target.endswith(("/", "/."))
        target = posixpath.normpath(target)
        if origin is not None:
            named = tuple(posixpath.normpath(posixpath.join("/", word)) for word in words[:-1])
            stage.steps.append(
                CopyFrom(line=one.line, origin=origin, sources=named, target=target, into=into, mode=mode, owner=owner)
            )
            return
        documents = {filled_words(split(document.word), {})[0]: document for document in one.documents}
        for document in one.documents:
            body = document.body if document.raw else self._filled(one, document)
            stage.steps.append(
                WriteFile(
                    line=one.line, name=document.name, text=body, target=target, into=into, mode=mode, owner=owner
                )
            )
        found = [each for word in words[:-1] if word not in documents for each in self.sources(one, word)]
        if not found:
            return
        sources = tuple(dict.fromkeys(path for path, _ in found))
        without = tuple(dict.fromkeys(path for _, out in found for path in out))
        if mode is not None and any(path.is_dir() for path in sources):
            raise self._beyond(one.line, f"{one.name} takes --chmod only for files here")
        into = into or len(sources) > 1
        stage.steps.append(
            Copy(line=one.line, sources=sources, target=target, into=into, mode=mode, without=without, owner=owner)
        )

    def _owner(self, one: Instruction, value: str) -> str:
        """Convert the value of --chown into an argument for `chown`, or into "" for root. As in Docker, `ann` means ann
        and her own group, and `1000` means user 1000 and group 1000."""
        [owner] = self._words(Instruction(one.line, one.name, value)) or [""]
        if not OWNER.fullmatch(owner):
            raise self._refusal(one.line, f"--chown={value} is not of the form USER or USER:GROUP")
        if ROOT.fullmatch(owner):
            return ""
        return owner if ":" in owner else f"{owner}:{owner if owner.isdecimal() else ''}"

    def _origin(self, one: Instruction, value: str) -> BaseImage:
        """Return the image that `COPY --from` names: an earlier stage, or an image in the store."""
        [name] = self._words(Instruction(one.line, one.name, value)) or [""]
        stage = self._named_stage(name)
        if stage is self._stage:
            raise self._refusal(one.line, f"COPY takes files from its own stage {name!r}")
        return self._image(one, name) if stage is None else self._base_of(stage)

    def sources(self, one: Instruction, word: str) -> list[tuple[Path, tuple[Path, ...]]]:
        """Return the files and folders of the build context that match a path or pattern, with symbolic links resolved.
        Each comes with the paths below it that .dockerignore excludes.

        The build context is the Dockerfile's folder. If a path does not exist there, the folder of the whole Harbor
        task is searched instead: some Dockerfiles are written for `docker build -f` in that folder.
        """
        if "://" in word or word.startswith("git@"):
            raise self._refusal(
                one.line,
                f"{one.name} {word}: nothing is downloaded here",
                hint=f"download the file into {self._context}, and give its path in this line",
            )
        inside = posixpath.normpath(word.lstrip("/") or ".")
        if inside.split("/")[0] == "..":
            raise self._refusal(
                one.line,
                f"{word!r} leads out of {self._context}",
                hint="move the file into this folder, and give its path without ..",
            )
        for root in self._roots:
            matching = sorted(root.folder.glob(inside)) if WILD.search(inside) else [root.folder / inside]
            present = [path for path in matching if path.is_symlink() or path.exists()]
            if present:
                return self._checked(one, word, root, present)
        if WILD.search(inside):
            raise self._refusal(
                one.line, f"nothing in {self._context} matches {word!r}", hint="add the files, or remove the line"
            )
        raise self._refusal(
            one.line, f"there is no file or folder {word!r} in {self._context}", hint=self._add_it(word)
        )

    def _add_it(self, word: str) -> str:
        return f"add {word} to {self._context}: a data set may lack the file because its authors left it out of git"

    def _checked(
        self, one: Instruction, word: str, root: ContextFolder, present: list[Path]
    ) -> list[tuple[Path, tuple[Path, ...]]]:
        found = []
        for path in present:
            goal = path.resolve()
            if not goal.is_relative_to(root.folder):
                raise self._refusal(
                    one.line, f"{word!r} is a link that leads out of {root.folder}", hint="put the file in its place"
                )
            names = {path.relative_to(root.folder).parts[:1], goal.relative_to(root.folder).parts[:1]}
            if root.whole_task and any(not name or name[0] in SECRETS for name in names):
                raise self._refusal(
                    one.line,
                    f"{word!r} would show the agent files of the task that an agent must not see",
                    hint=f"Harbor builds {self._context} alone, and this line fails there: remove the line, or move the"
                    " files that the image needs into this folder",
                )
            if not goal.is_dir() and not goal.is_file():
                raise self._refusal(
                    one.line, f"there is no file or folder {word!r} in {root.folder}", hint=self._add_it(word)
                )
            if root.ignore.patterns and path != root.folder:
                relative = path.relative_to(root.folder).as_posix()
                if root.ignore.leaves_out(relative) and not goal.is_dir():
                    continue
            without = tuple(self._left_out(one, root, path, goal)) if goal.is_dir() else ()
            if one.name == "ADD" and goal.is_file() and is_tar(goal):
                raise self._refusal(
                    one.line, f"ADD would unpack {word!r}, which is not supported here", hint="COPY and RUN tar"
                )
            found.append((goal, without))
        if not found:
            raise self._refusal(
                one.line,
                f"{root.ignore.file} leaves {word!r} out",
                hint=f"remove it from {root.ignore.file.name}, or remove this line",
            )
        return found

    def _left_out(self, one: Instruction, root: ContextFolder, path: Path, goal: Path) -> Iterator[Path]:
        """Yield the paths in a folder that .dockerignore excludes. An excluded folder is yielded as one path. But if
        any pattern begins with `!`, the folder's files are checked one by one, because the pattern may include some of
        them again. Raises InvalidField for a symbolic link that leads out of the folder."""
        ignore = root.ignore
        for at, folders, files in os.walk(goal):
            entered = []
            for name in (*folders, *files):
                below = Path(at, name)
                is_folder = name in folders and not below.is_symlink()
                shown = (path / below.relative_to(goal)).relative_to(root.folder).as_posix()
                if ignore.patterns and ignore.leaves_out(shown) and not (is_folder and ignore.takes_back):
                    yield below
                    continue
                if below.is_symlink() and not below.resolve().is_relative_to(goal):
                    raise self._refusal(
                        one.line, f"{below} is a link that leads out of {goal}", hint="put the file in its place"
                    )
                entered += [name] * is_folder
            folders[:] = entered

    def _filled(self, one: Instruction, document: HereDocument) -> str:
        # Not `_words`: it would remove the quotes and line ends of the here-document.
        try:
            return filled_words([document.body.replace(r"\$", "\0")], self._known())[0]
        except ValueError as error:
            raise self._refusal(one.line, f"{one.name} {document.word}: {error}") from error

    def _known(self) -> dict[str, str]:
        if not self._stages:
            return self._early
        return {**self._stage.args, **self._stage.base.env, **self._stage.env}

    def _words(self, one: Instruction, variables: Mapping[str, str] | None = None) -> list[str]:
        """Split an instruction into words, remove quotes, and fill in variables."""
        try:
            return filled_words(split(one.text), self._known() if variables is None else variables)
        except ValueError as error:
            raise self._refusal(one.line, f"{one.name} {one.text}: {error}") from error

    def _beyond(self, line: int, message: str) -> InvalidField:
        """Return the error for an instruction that Docker supports but this builder does not."""
        return self._refusal(line, message, hint=engine_hint(self._file.parent))

    def _refusal(self, line: int, message: str, *, hint: str | None = None) -> InvalidField:
        return InvalidField(
            f"{self._file}, line {line}: {message[:MAX_MESSAGE]}",
            field="dockerfile",
            hint=hint or "correct the line: container engines refuse it, too",
        )


def base_of(name: str, image: RootImage) -> BaseImage:
    return BaseImage(name=name, digest=image.digest, env=image.env, workdir=image.workdir)


def kept_digest(path: Path, without: tuple[Path, ...]) -> str:
    """Return the digest of a file or folder to copy, without the excluded paths."""
    return digest_of(path, frozenset(map(str, without)))


def with_documents(one: Instruction) -> str:
    """Return the shell script of a RUN instruction. If the RUN consists only of a here-document, the document's text is
    the script. If this text begins with a #! line, the program named there runs it."""
    if len(one.documents) != 1 or one.text != one.documents[0].word:
        return "\n".join((one.text, *(document.text for document in one.documents)))
    [document] = one.documents
    if not document.body.startswith("#!"):
        return document.body
    program = document.body[2:].split("\n", 1)[0].strip()
    return f"{program} /dev/fd/3 3<<'{document.name}'\n{document.body}{document.name}\n"


def quoted(word: str) -> str:
    return "'" + word.replace("'", "'\"'\"'") + "'"


def seconds(text: str) -> float | None:
    """Convert a duration such as `1m30s` to seconds. Returns None if `text` is not a duration."""
    match = SECONDS.fullmatch(text) if text else None
    if match is None:
        return None
    return sum(float(part or 0) * unit for part, unit in zip(match.groups(), (3600, 60, 1, 0.001), strict=True))


def count(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < 5 else None
