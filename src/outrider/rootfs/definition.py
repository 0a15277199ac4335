"""What an image is built from: a recipe in a TOML file, and the Apptainer definition that it is rendered to.

It builds nothing. Invariant: whatever a recipe says stays in the place of the definition that it is meant for: nothing
in it can begin another section or use Apptainer's own placeholders.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from outrider.errors import InvalidField, RuntimeUnavailable
from outrider.rootfs.store import ImageStore

REQUIREMENTS_AT = "/opt/outrider-requirements.txt"
PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]*(:[a-z0-9]+)?([=/][A-Za-z0-9.+:~-]+)?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SECTION = re.compile(r"^\s*%", re.MULTILINE)
CHUNK = 1 << 20


class Base(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the image starts from. `source`: a file of `docker save`, a folder with an OCI layout, a SIF file or root
    folder (`localimage`), the name of an image of ours (`image`), or a Debian suite (`debootstrap`), which is taken
    from `mirror`."""

    kind: Literal["docker-archive", "oci", "localimage", "image", "debootstrap"]
    source: str
    mirror: str | None = None


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    source: str
    target: str


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`packages` are Debian's; `pip` are requirements, one an entry, and `requirements` is a file of them; `files` are
    copied in; `commands` run last, each by the image's shell; `env` is set in them and in every sandbox."""

    base: Base
    packages: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    requirements: str | None = None
    files: tuple[File, ...] = ()
    env: dict[str, str] = {}
    commands: tuple[str, ...] = ()


class Header(NamedTuple):
    """The beginning of a definition."""

    kind: str
    lines: tuple[tuple[str, str], ...]


class Definition(msgspec.Struct, frozen=True, kw_only=True):
    """One build: `identity` tells its base by content; `pip` is the text of a requirements file."""

    header: Header
    identity: str
    packages: tuple[str, ...] = ()
    pip: str = ""
    files: tuple[File, ...] = ()
    env: Mapping[str, str] = {}
    commands: tuple[str, ...] = ()

    def key(self, *parts: str) -> str:
        """Of two builds with the same key one can stand for the other. `parts` are what else must be the same."""
        contents = [(file.target, digest_of(Path(file.source))) for file in self.files]
        said = [*parts, self.identity, self.packages, self.pip, contents, sorted(self.env.items()), self.commands]
        return hashlib.sha256(msgspec.json.encode([template(), said])).hexdigest()[:32]

    def render(self, requirements: Path) -> str:
        """The definition file; `requirements` is where the text of `pip` is on the host."""
        try:
            import jinja2
        except ImportError as error:
            raise RuntimeUnavailable("jinja2 is not installed", hint="pip install 'outrider[build]'") from error
        world = jinja2.Environment(
            autoescape=False, undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True
        )
        world.filters["quoted"] = shlex.quote
        pip = (File(source=str(requirements), target=REQUIREMENTS_AT),) if self.pip else ()
        return world.from_string(template()).render(
            base=self.header,
            files=[*pip, *self.files],
            env=dict(self.env),
            packages=self.packages,
            requirements=REQUIREMENTS_AT if self.pip else "",
            commands=self.commands,
            version=version("outrider"),
        )


def template() -> str:
    return (importlib.resources.files("outrider.rootfs") / "templates" / "image.def.j2").read_text(encoding="utf-8")


def load_recipe(path: Path) -> Recipe:
    """Paths in it are relative to its folder. Raises InvalidField naming the field."""
    try:
        recipe = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Recipe)
    except OSError as error:
        raise InvalidField(f"cannot read {path}: {error.strerror}", field="recipe") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise InvalidField(f"{path}: {error}", field="recipe") from error
    return _located(recipe, path.parent.absolute())


def definition_of(recipe: Recipe, store: ImageStore) -> Definition:
    """Blocks, for as long as reading the base takes. Raises InvalidField, and NotFound for an image of ours."""
    _check(recipe)
    header, identity = _base(recipe.base, store)
    pip = "".join(f"{line}\n" for line in recipe.pip)
    if recipe.requirements is not None:
        pip = _existing(recipe.requirements, "requirements").read_text(encoding="utf-8") + pip
    return Definition(
        header=header,
        identity=identity,
        packages=recipe.packages,
        pip=pip,
        files=recipe.files,
        env=recipe.env,
        commands=recipe.commands,
    )


def local_base(sif: Path) -> Header:
    return Header("localimage", (("From", str(sif)),))


def digest_of(path: Path) -> str:
    """Of a file, or of all that is in a folder: names, kinds, contents, and what may be executed."""
    found = hashlib.sha256()
    for name in _below(path):
        status = os.lstat(name)
        mode = status.st_mode & 0o170111
        found.update(f"{os.path.relpath(name, path)}\0{mode:o}\0".encode("utf-8", "surrogateescape"))
        if os.path.islink(name):
            found.update(os.fsencode(os.readlink(name)))
        elif os.path.isfile(name):
            found.update(f"{status.st_size}\0".encode())
            with open(name, "rb") as file:
                while chunk := file.read(CHUNK):
                    found.update(chunk)
    return found.hexdigest()


def _below(path: Path) -> Iterator[str]:
    yield str(path)
    for folder, folders, files in os.walk(path):
        folders.sort()
        for name in sorted((*folders, *files)):
            yield os.path.join(folder, name)


def _located(recipe: Recipe, folder: Path) -> Recipe:
    base = recipe.base
    if base.kind in ("docker-archive", "oci", "localimage"):
        base = msgspec.structs.replace(base, source=str(folder / base.source))
    files = tuple(msgspec.structs.replace(file, source=str(folder / file.source)) for file in recipe.files)
    requirements = str(folder / recipe.requirements) if recipe.requirements is not None else None
    return msgspec.structs.replace(recipe, base=base, files=files, requirements=requirements)


def _base(base: Base, store: ImageStore) -> tuple[Header, str]:
    if base.kind == "image":
        image = store.image(base.source)
        return local_base(store.root(image)), image.digest
    if base.kind == "debootstrap":
        if base.mirror is None:
            raise InvalidField("debootstrap needs a mirror", field="base.mirror", hint="the address of a Debian mirror")
        return Header(
            base.kind, (("OSVersion", base.source), ("MirrorURL", base.mirror))
        ), f"{base.mirror} {base.source}"
    path = _existing(base.source, "base.source")
    if base.kind == "oci":
        return Header(base.kind, (("From", str(path)),)), digest_of(_existing(f"{path}/index.json", "base.source"))
    return Header(base.kind, (("From", str(path)),)), digest_of(path)


def _existing(path: str, field: str) -> Path:
    if not Path(path).exists():
        raise InvalidField(f"there is no {path}", field=field)
    return Path(path)


def _check(recipe: Recipe) -> None:
    for name in recipe.packages:
        if not PACKAGE.fullmatch(name):
            raise InvalidField(
                f"{name!r} is no Debian package", field="packages", hint="such as git, or git=1:2.39.5-0"
            )
    for name in recipe.env:
        if not VARIABLE.fullmatch(name):
            raise InvalidField(f"{name!r} is no variable's name", field="env")
    for file in recipe.files:
        _existing(file.source, "files")
        if not file.target.startswith("/"):
            raise InvalidField(f"{file.target!r} is no absolute path", field="files")
    words = [recipe.base.source, recipe.base.mirror or "", *(path for file in recipe.files for path in _paths(file))]
    if any(re.search(r"\s", word) for word in words):
        raise InvalidField("a definition file takes no paths with spaces", field="files")
    lines: list[Any] = [*words, *recipe.env.values()]
    if any("\n" in text for text in lines):
        raise InvalidField("a value of a variable is one line", field="env")
    for text in (*lines, *recipe.commands):
        if "{{" in text or SECTION.search(text):
            raise InvalidField(f"{text!r} would be read as part of the definition's own language", field="commands")


def _paths(file: File) -> tuple[str, str]:
    return file.source, file.target
