"""Reads Dockerfiles as build steps for images that can be built without a container engine.

sandbox/image_build.py runs the steps. The supported part of the language is FROM an image of this machine, COPY and
ADD of local files, RUN, WORKDIR, ENV, ARG and USER root. Labels, ports and start commands do not affect files, and are
left out. Invariants: anything else, and any file from outside the context, is refused with the Dockerfile's name and
line; two Dockerfiles have the same key only if they make the same image.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from outrider.errors import InvalidField, NotFound
from outrider.sandbox.rootfs.archives import digest_of
from outrider.sandbox.rootfs.store import ImageStore, RootImage
from outrider.sandbox.rootfs.unpack import is_tar
from outrider.text_files import read_text_file

DOCKERFILE = "Dockerfile"
FORMAT = 1
"""Part of every key. Increase this number when a change of the code changes the image of some Dockerfile."""
IGNORED = frozenset({"LABEL", "EXPOSE", "MAINTAINER", "CMD", "STOPSIGNAL"})
DIRECTIVE = re.compile(r"#\s*(\w+)\s*=\s*(\S+)\s*")
HERE_DOCUMENT = re.compile(r"\d*<<-?[\"']?[A-Za-z0-9_.]+[\"']?")
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:(:?[-+])([^{}]*))?\})")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ROOT = re.compile(r"(root|0)(:(root|0))?")
MODE = re.compile(r"0?[0-7]{3}")
WILD = re.compile(r"[*?\[]")
MAX_FILE = 1 << 20
"""Maximum bytes of a Dockerfile, and of a .dockerignore."""
MAX_STEPS = 512
"""Maximum steps of a plan. Container engines refuse more than 127 layers, so real Dockerfiles have fewer steps."""
MAX_VALUES = 128 << 10
"""Maximum characters of all variables of one kind together (ARG before FROM, ARG, ENV), and of the values filled into
one instruction. Linux gives no program a longer variable. Without a bound, values that refer to other values could
double their length with each line."""
MAX_PATH = 4096
MAX_MESSAGE = 500
"""Maximum characters of an error: an instruction may have a million."""


class Copy(msgspec.Struct, frozen=True, kw_only=True, tag="Copy"):
    """Copies `sources`, files and folders of the context with links resolved, to the absolute path `target`. The
    content of a folder goes into `target`. If `into` is true, files are put into the folder `target`. Otherwise a
    single file becomes `target`, unless `target` is an existing folder."""

    line: int
    sources: tuple[Path, ...]
    target: str
    into: bool
    mode: str | None = None


class RunInstruction(msgspec.Struct, frozen=True, kw_only=True, tag="Run"):
    """Runs `argv` in `workdir`, with `env` added to the variables of the base."""

    line: int
    argv: tuple[str, ...]
    env: dict[str, str]
    workdir: str


class MakeFolder(msgspec.Struct, frozen=True, kw_only=True, tag="MakeFolder"):
    line: int
    path: str


BuildStep = Copy | RunInstruction | MakeFolder


class BuildPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of an image's build from `base`, whose name is `base_name`. `env` and `workdir` are the image's
    settings. `digest` is the plan's key in the form of a digest."""

    file: Path
    base_name: str
    base: RootImage
    steps: tuple[BuildStep, ...]
    env: dict[str, str]
    workdir: str
    digest: str

    @property
    def name(self) -> str:
        """The image's name in the store. It depends on the base image, the instructions and the copied files, but not
        on their folder."""
        return f"dockerfile/{self.digest.removeprefix('sha256:')[:32]}"


class Instruction(msgspec.Struct, frozen=True):
    line: int
    name: str
    text: str


def built_name(context: Path, store: ImageStore) -> str:
    """Return the name of the image built from a folder's Dockerfile. Raises InvalidField if this image is not built, or
    if the Dockerfile cannot be read as a plan."""
    plan = read_dockerfile(context, store)
    try:
        store.image(plan.name)
    except NotFound as error:
        raise InvalidField(
            f"the image of {plan.file} is not built on this machine",
            field="environment.docker_image",
            hint=f"outrider image build {context}",
        ) from error
    return plan.name


def read_dockerfile(context: Path, store: ImageStore) -> BuildPlan:
    """Return the plan of a folder's Dockerfile. Reads the copied files for their digests. Raises InvalidField."""
    file, ignore = context / DOCKERFILE, context / ".dockerignore"
    text = read_text_file(file, field="dockerfile", limit=MAX_FILE)
    lines = read_text_file(ignore, field="dockerfile", limit=MAX_FILE).split("\n") if ignore.exists() else ()
    if any(line.strip() and not line.startswith("#") for line in lines):
        raise InvalidField(f"{ignore} excludes files, which is not supported here", field="dockerfile")
    return Reader(file, store).plan(text)


class Reader:
    """Reads one Dockerfile. The methods raise InvalidField with the file and the line."""

    def __init__(self, file: Path, store: ImageStore) -> None:
        self._file = file
        self._context = file.parent.resolve()
        self._store = store
        self._base: tuple[str, RootImage] | None = None
        self._early: dict[str, str] = {}
        """The ARGs before FROM."""
        self._args: dict[str, str] = {}
        self._env: dict[str, str] = {}
        self._workdir = "/"
        self._steps: list[BuildStep] = []

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
        }
        for one in self.instructions(text):
            if one.name in IGNORED:
                continue
            if one.name not in readers:
                known = ", ".join((*readers, *sorted(IGNORED)))
                raise self._refusal(one.line, f"{one.name} is not supported here", hint=f"supported: {known}")
            if self._base is None and one.name not in ("FROM", "ARG"):
                raise self._refusal(one.line, f"{one.name} comes before FROM")
            readers[one.name](one)
            self._check_sizes(one)
        if self._base is None:
            raise InvalidField(f"{self._file} has no FROM", field="dockerfile")
        name, base = self._base
        said: list[object] = [FORMAT, base.digest, self._env, self._workdir]
        for step in self._steps:
            fields = {name: value for name, value in msgspec.structs.asdict(step).items() if name != "line"}
            if isinstance(step, Copy):
                fields["sources"] = [(source.name, digest_of(source)) for source in step.sources]
            # Tags, because a class with another name must not change the keys of images that are already built.
            said.append([type(step).__struct_config__.tag, fields])
        return BuildPlan(
            file=self._file,
            base_name=name,
            base=base,
            steps=tuple(self._steps),
            env={**base.env, **self._env},
            workdir=self._workdir,
            digest=f"sha256:{hashlib.sha256(msgspec.json.encode(said, order='sorted')).hexdigest()}",
        )

    def _check_sizes(self, one: Instruction) -> None:
        if len(self._steps) > MAX_STEPS:
            raise self._refusal(one.line, f"more than {MAX_STEPS} steps", hint="join several RUN into one")
        for variables in (self._early, self._args, self._env):
            if sum(len(name) + len(value) for name, value in variables.items()) > MAX_VALUES:
                raise self._refusal(one.line, f"the variables have more than {MAX_VALUES} characters")
        if len(self._workdir) > MAX_PATH:
            raise self._refusal(one.line, f"the path of WORKDIR has more than {MAX_PATH} characters")

    def instructions(self, text: str) -> Iterator[Instruction]:
        """Yield the instructions, with continued lines joined and comments left out."""
        parts: list[str] = []
        begin = 0
        directives = True
        for number, line in enumerate(text.split("\n"), 1):
            bare = line.strip()
            if directives and (directive := DIRECTIVE.fullmatch(bare)):
                if directive[1].lower() == "escape" and directive[2] != "\\":
                    raise self._refusal(number, "another escape character is not supported here")
                continue
            directives = False
            if not bare or bare.startswith("#"):
                continue
            begin = begin or number
            if bare.endswith("\\"):
                parts.append(line.rstrip()[:-1])
                continue
            name, *rest = "".join((*parts, line)).split(maxsplit=1)
            yield Instruction(begin, name.upper(), rest[0].strip() if rest else "")
            parts, begin = [], 0
        if parts:
            raise self._refusal(begin, "the last line ends with a backslash, but no line follows")

    def read_from(self, one: Instruction) -> None:
        if self._base is not None:
            raise self._refusal(one.line, "a second FROM: only one build stage is supported here")
        words = self._words(one, self._early)
        if not words or words[0].startswith("--") or (words[1:] and [words[1].upper(), *words[3:]] != ["AS"]):
            raise self._refusal(
                one.line, f"FROM {one.text} is not supported here", hint="FROM IMAGE, or FROM IMAGE AS NAME"
            )
        short = words[0].removeprefix("docker.io/").removeprefix("library/")
        for name in (words[0], short, short.removesuffix(":latest")):
            try:
                self._base = name, self._store.image(name)
            except (NotFound, InvalidField):
                continue
            self._workdir = self._base[1].workdir or "/"
            return
        raise self._refusal(
            one.line,
            f"there is no image {words[0]!r} on this machine",
            hint=f"outrider image pull {words[0]} {short}, or outrider image import FILE {short}",
        )

    def read_arg(self, one: Instruction) -> None:
        for word in self._words(one):
            name, given, value = word.partition("=")
            if not NAME.fullmatch(name):
                raise self._refusal(one.line, f"{name!r} is not the name of a variable")
            if self._base is None:
                self._early |= {name: value} if given else {}
            elif given or name in self._early:
                self._args[name] = value if given else self._early[name]

    def read_env(self, one: Instruction) -> None:
        words = self._words(one)
        if not words or "=" not in words[0]:  # the older form: ENV NAME and a text
            words = [f"{words[0]}={' '.join(words[1:])}"] if len(words) > 1 else [""]
        for word in words:
            name, given, value = word.partition("=")
            if not given or not NAME.fullmatch(name):
                raise self._refusal(one.line, f"ENV {one.text} is not of the form NAME=VALUE")
            self._env[name] = value

    def read_workdir(self, one: Instruction) -> None:
        path = " ".join(self._words(one))
        if not path:
            raise self._refusal(one.line, "WORKDIR needs a path")
        self._workdir = posixpath.normpath(posixpath.join(self._workdir, path))
        self._steps.append(MakeFolder(line=one.line, path=self._workdir))

    def read_user(self, one: Instruction) -> None:
        if not ROOT.fullmatch(" ".join(self._words(one))):
            raise self._refusal(one.line, f"USER {one.text}: root is the only user of a sandbox")

    def read_run(self, one: Instruction) -> None:
        if one.text.startswith("--"):
            raise self._refusal(one.line, f"RUN takes no {one.text.split()[0].partition('=')[0]} here")
        self._no_here_document(one)
        argv = json_list(one.text) or ("/bin/sh", "-c", one.text)
        if not one.text:
            raise self._refusal(one.line, "RUN needs a command")
        env = {**self._args, **self._env}
        self._steps.append(RunInstruction(line=one.line, argv=argv, env=env, workdir=self._workdir))

    def read_copy(self, one: Instruction) -> None:
        self._no_here_document(one)
        mode = None
        text = one.text
        while text.startswith("--"):
            flag, _, text = text.partition(" ")
            option, _, value = flag.partition("=")
            text = text.strip()
            if option == "--chmod" and MODE.fullmatch(value):
                mode = value
            elif option != "--link" and not (option == "--chown" and ROOT.fullmatch(value)):
                raise self._refusal(one.line, f"{one.name} takes no {flag} here")
        words = list(json_list(text) or self._words(Instruction(one.line, one.name, text)))
        if len(words) < 2:
            raise self._refusal(one.line, f"{one.name} needs a source and a target")
        sources = tuple(path for word in words[:-1] for path in self.sources(one, word))
        if mode is not None and any(path.is_dir() for path in sources):
            raise self._refusal(one.line, f"{one.name} takes --chmod only for files here")
        target = posixpath.join(self._workdir, words[-1])
        into = len(sources) > 1 or target.endswith(("/", "/."))
        copied = Copy(line=one.line, sources=sources, target=posixpath.normpath(target), into=into, mode=mode)
        self._steps.append(copied)

    def sources(self, one: Instruction, word: str) -> list[Path]:
        """Return the files and folders of the build context that match `word`, a path or pattern. Links are
        resolved."""
        if "://" in word or word.startswith("git@"):
            raise self._refusal(one.line, f"{one.name} {word}: nothing is downloaded here")
        inside = posixpath.normpath(word.lstrip("/") or ".")
        if inside.split("/")[0] == "..":
            raise self._refusal(one.line, f"{word!r} leads out of {self._context}")
        found = sorted(self._context.glob(inside)) if WILD.search(inside) else [self._context / inside]
        real = []
        for path in found:
            goal = path.resolve()
            if not goal.is_relative_to(self._context):
                raise self._refusal(one.line, f"{word!r} is a link that leads out of {self._context}")
            if not goal.is_dir() and not goal.is_file():
                raise self._refusal(one.line, f"there is no file or folder {word!r} in {self._context}")
            for below in goal.rglob("*") if goal.is_dir() else ():
                if below.is_symlink() and not below.resolve().is_relative_to(goal):
                    raise self._refusal(one.line, f"{below} is a link that leads out of {goal}")
            if one.name == "ADD" and goal.is_file() and is_tar(goal):
                raise self._refusal(
                    one.line, f"ADD would unpack {word!r}, which is not supported here", hint="COPY and RUN tar"
                )
            real.append(goal)
        if not real:
            raise self._refusal(one.line, f"nothing in {self._context} matches {word!r}")
        return real

    def _no_here_document(self, one: Instruction) -> None:
        if any(HERE_DOCUMENT.fullmatch(word) for word in one.text.split()):
            raise self._refusal(one.line, f"{one.name} takes no here-document here")

    def _words(self, one: Instruction, variables: Mapping[str, str] | None = None) -> list[str]:
        """Return the words of an instruction, with quotes removed and variables filled in."""
        known = {**self._args, **self._base[1].env, **self._env} if self._base is not None else self._early
        try:
            return filled_words(split(one.text), known if variables is None else variables)
        except ValueError as error:
            raise self._refusal(one.line, f"{one.name} {one.text}: {error}") from error

    def _refusal(self, line: int, message: str, *, hint: str | None = None) -> InvalidField:
        return InvalidField(f"{self._file}, line {line}: {message[:MAX_MESSAGE]}", field="dockerfile", hint=hint)


LITERAL = "\0"
"""Placeholder for a literal $ until variables are filled in."""


def split(text: str) -> list[str]:
    """Split a text into words like a shell. A $ in single quotes or after a backslash becomes LITERAL. Raises
    ValueError."""
    if LITERAL in text:
        raise ValueError("the text has a NUL")
    text = re.sub(r"\\\$", LITERAL, text)
    text = re.sub(r"'[^']*'", lambda quoted: quoted[0].replace("$", LITERAL), text)
    return shlex.split(text)


def filled_words(words: Iterable[str], variables: Mapping[str, str]) -> list[str]:
    """Fill in the variables of words: $NAME, ${NAME}, ${NAME:-WORD} and ${NAME:+WORD}, the last two also without the
    colon. Unset variables are empty. Raises ValueError if the values have more than MAX_VALUES characters together."""
    room = MAX_VALUES

    def value(match: re.Match[str]) -> str:
        nonlocal room
        known, operator, word = variables.get(match[1] or match[2]), match[3] or "", match[4]
        is_set = bool(known) if ":" in operator else known is not None
        if "+" in operator:
            found = word if is_set else ""
        elif "-" in operator and not is_set:
            found = word
        else:
            found = known or ""
        room -= len(found)
        if room < 0:  # checked before the word is built
            raise ValueError(f"its variables have more than {MAX_VALUES} characters")
        return found

    return [VARIABLE.sub(value, word).replace(LITERAL, "$") for word in words]


def json_list(text: str) -> tuple[str, ...] | None:
    """Return the words of a JSON list of texts, or None for any other text and for an empty list."""
    try:
        return msgspec.json.decode(text, type=tuple[str, ...]) or None
    except msgspec.DecodeError:
        return None
