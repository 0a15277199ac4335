"""Reads recipes, which are TOML files that describe images, and converts them into Apptainer definitions.

build.py runs Apptainer, which itself never reuses an earlier build. So this module computes a key from a recipe's
content, and an earlier build with the same key is reused. Invariant: no text of a recipe can start a new section of the
definition or use Apptainer's placeholders.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from outrider.environment import installed_version
from outrider.errors import InvalidField
from outrider.sandbox.rootfs.archives import digest_of
from outrider.sandbox.rootfs.store import ImageStore
from outrider.text_files import read_toml_file

FORMAT = "2"
"""A version number in the key of every build. Change it when `render` changes, so that earlier builds are not
reused."""
REQUIREMENTS_AT = "/opt/outrider-requirements.txt"
PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]*(:[a-z0-9]+)?([=/][A-Za-z0-9.+:~-]+)?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SECTION = re.compile(r"^\s*%", re.MULTILINE)
INDENT = "    "


class Base(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The base of an image. `mirror` is the URL of a Debian mirror for debootstrap. The meaning of `source` depends on
    `kind`:

    `docker-archive`: a file that `docker save` has written.
    `oci`: a folder with an OCI layout.
    `localimage`: a SIF file or a folder with a root file system.
    `image`: the name of an image in the image store.
    `debootstrap`: a Debian release, such as bookworm.
    """

    kind: Literal["docker-archive", "oci", "localimage", "image", "debootstrap"]
    source: str
    mirror: str | None = None


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    source: str
    target: str


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields of a recipe file.

    `packages`: names of Debian packages.
    `pip`: Python requirements, one per entry.
    `requirements`: the path of a file with Python requirements.
    `files`: files to copy into the image.
    `env`: environment variables for the commands and for every sandbox.
    `commands`: shell commands that run at the end of the build.
    """

    base: Base
    packages: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    requirements: str | None = None
    files: tuple[File, ...] = ()
    env: dict[str, str] = {}
    commands: tuple[str, ...] = ()


class Definition(msgspec.Struct, frozen=True, kw_only=True):
    """The input of one Apptainer build.

    `header`: (name, value) pairs that tell Apptainer where the base is.
    `identity`: identifies the content of the base: a digest, the key of an earlier build, or for debootstrap the mirror
        and the Debian release.
    `pip`: the content of a requirements file.
    """

    header: tuple[tuple[str, str], ...]
    identity: str
    packages: tuple[str, ...] = ()
    pip: str = ""
    files: tuple[File, ...] = ()
    env: Mapping[str, str] = {}
    commands: tuple[str, ...] = ()

    def key(self, *parts: str) -> str:
        """Return the key of the build: a digest of this definition's content and of `parts`. An earlier build with the
        same key may be reused. Blocks while the copied files are read."""
        contents = [(file.target, digest_of(Path(file.source))) for file in self.files]
        hashed = [*parts, self.identity, self.packages, self.pip, contents, sorted(self.env.items()), self.commands]
        return hashlib.sha256(msgspec.json.encode([FORMAT, hashed])).hexdigest()[:32]

    def render(self, requirements: Path) -> str:
        """Return the text of the Apptainer definition. `requirements` is the path of a host file with the content of
        `pip`."""
        pip = [f"{requirements} {REQUIREMENTS_AT}"] if self.pip else []
        exports = [f"export {name}={shlex.quote(value)}" for name, value in self.env.items()]
        steps: list[str] = []
        if self.packages:
            # apt must not switch to its own user `_apt`, which does not exist in a user namespace with one user.
            apt = "apt-get -o APT::Sandbox::User=root"
            steps += ["export DEBIAN_FRONTEND=noninteractive", f"{apt} update"]
            steps += [f"{apt} install -y --no-install-recommends {' '.join(self.packages)}"]
            steps += ["rm -rf /var/lib/apt/lists/*"]
        if self.pip:
            # Debian's pip refuses to install packages into the system's Python without this variable.
            install = "PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir"
            steps += [f"{install} --requirement {REQUIREMENTS_AT}", f"rm {REQUIREMENTS_AT}"]
        steps += [command.strip().replace("\n", f"\n{INDENT}") for command in self.commands]
        sections = {
            "%files": [*pip, *(f"{file.source} {file.target}" for file in self.files)],
            "%environment": exports,
            "%post": ["set -eu", *exports, *steps] if steps else [],
            "%labels": [f"outrider.version {installed_version('outrider')}"],
        }
        head = [f"{name}: {value}" for name, value in self.header]
        body = [["", title, *(INDENT + line for line in lines)] for title, lines in sections.items() if lines]
        return "\n".join([*head, *(line for lines in body for line in lines), ""])


def load_recipe(path: Path) -> Recipe:
    """Read a recipe file. Paths in it are relative to its folder. Raises InvalidField with the name of the invalid
    field."""
    try:
        recipe = msgspec.convert(read_toml_file(path, field="recipe"), Recipe)
    except msgspec.ValidationError as error:
        raise InvalidField(f"{path}: {error}", field="recipe") from error
    folder = path.parent.absolute()
    base = recipe.base
    if base.kind in ("docker-archive", "oci", "localimage"):
        base = msgspec.structs.replace(base, source=str(folder / base.source))
    files = tuple(msgspec.structs.replace(file, source=str(folder / file.source)) for file in recipe.files)
    requirements = str(folder / recipe.requirements) if recipe.requirements is not None else None
    return msgspec.structs.replace(recipe, base=base, files=files, requirements=requirements)


def definition_of(recipe: Recipe, store: ImageStore) -> Definition:
    """Convert a recipe into a definition. Blocks while the base is read for its digest. Raises InvalidField for an
    invalid recipe, and NotFound if its base image is not in the store."""
    _check(recipe)
    base = recipe.base
    if base.kind == "image":
        image = store.image(base.source)
        header, identity = local_base(store.root(image)), image.digest
    elif base.kind == "debootstrap":
        if base.mirror is None:
            raise InvalidField("debootstrap needs a mirror", field="base.mirror", hint="the address of a Debian mirror")
        header = (("Bootstrap", base.kind), ("OSVersion", base.source), ("MirrorURL", base.mirror))
        identity = f"{base.mirror} {base.source}"
    else:
        path = _existing(base.source, "base.source")
        header = (("Bootstrap", base.kind), ("From", str(path)))
        # For an OCI layout, index.json alone identifies the content: directly or indirectly, it contains the digests of
        # all other files.
        identity = digest_of(_existing(f"{path}/index.json", "base.source") if base.kind == "oci" else path)
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


def local_base(path: Path) -> tuple[tuple[str, str], ...]:
    """Return the definition's header for a SIF file or a folder with a root file system."""
    return (("Bootstrap", "localimage"), ("From", str(path)))


def _existing(path: str, field: str) -> Path:
    if not Path(path).exists():
        raise InvalidField(f"there is no {path}", field=field)
    return Path(path)


def _check(recipe: Recipe) -> None:
    """Raise InvalidField for an invalid value. A text is invalid if it could start a new section of the definition or
    be a placeholder, because Apptainer's format has no way to quote a text."""
    for name in recipe.packages:
        if not PACKAGE.fullmatch(name):
            raise InvalidField(
                f"{name!r} is not the name of a Debian package", field="packages", hint="such as git, or git=1:2.39.5-0"
            )
    for name in recipe.env:
        if not VARIABLE.fullmatch(name):
            raise InvalidField(f"{name!r} is not the name of a variable", field="env")
    for file in recipe.files:
        _existing(file.source, "files")
        if not file.target.startswith("/"):
            raise InvalidField(f"{file.target!r} is not an absolute path", field="files")
    words = [
        recipe.base.source,
        recipe.base.mirror or "",
        *(path for file in recipe.files for path in (file.source, file.target)),
    ]
    if any(re.search(r"\s", word) for word in words):
        raise InvalidField("a path with spaces cannot be written in a definition file", field="files")
    lines: list[Any] = [*words, *recipe.env.values()]
    if any("\n" in text for text in lines):
        raise InvalidField("the value of a variable must be one line", field="env")
    for text in (*lines, *recipe.commands):
        if "{{" in text or SECTION.search(text):
            raise InvalidField(f"{text!r} would be read as syntax of Apptainer's definition file", field="commands")
