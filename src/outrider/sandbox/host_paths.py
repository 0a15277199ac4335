"""Decides which files of this machine tasks can read. There are three ways to reach a file:

- An `upload` names a file in the folder of the setting `files`.
- A mount, a root folder, an image's path or a virtual environment is below an entry of `sandboxes.allow`.
- Every sandbox of some kinds sees certain folders of the host (`runtimes/shown_folders.py`).

The settings must not make the files and folders in `KEPT` readable as a whole. Folders are compared by device and inode
as well as by name, because a link or a bind mount may lead to the same folder. The places of the folders in their file
systems are compared, too, because a bind mount may show a folder that is inside a folder of `KEPT`. Invariants: a root
folder and a mount are mounted as they were checked, with all links resolved (a virtual environment is mounted by its
name); uploads are opened without following links (see sandbox/runtimes/tool_server/uploads.py).
"""

from __future__ import annotations

import os
import pwd
import shlex
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from outrider.config import Config
from outrider.errors import InvalidField, RuntimeFailure
from outrider.sandbox.runtimes.kernel.mounts import MOUNTINFO, MountPoint, mounts_below, parse, place_of
from outrider.sandbox.runtimes.shown_folders import SHOWN
from outrider.sandbox.runtimes.tool_server.uploads import entries
from outrider.spec import RuntimeSpec

Id = tuple[int, int] | str
"""Identifies a file: its device and inode, or its path if the file does not exist or is not accessible."""


class HostPathRule(NamedTuple):
    """A rule for a file or folder that must not become readable to tasks.

    `what`: a description for error messages.
    `below`: True if the rule also holds for everything inside the folder. If False, single entries of the folder may
        become readable.
    `shown`: True if the file or folder must also be outside of `SHOWN`, the folders that every sandbox of a kind sees.
    """

    what: str
    below: bool
    shown: bool


KEPT = {
    "settings": HostPathRule("the settings file", below=True, shown=True),
    "data": HostPathRule("the data folder", below=True, shown=True),
    "key": HostPathRule("the key of the TLS certificate", below=True, shown=True),
    "home": HostPathRule("the home folder of the service's user", below=False, shown=False),
    "temporary": HostPathRule("the folder in which nodes keep their sandboxes", below=False, shown=False),
    "proc": HostPathRule("the kernel's /proc", below=True, shown=False),
    "sys": HostPathRule("the kernel's /sys", below=True, shown=False),
    "dev": HostPathRule("the machine's devices", below=False, shown=False),
    "etc": HostPathRule("the machine's own settings", below=False, shown=False),
    "run": HostPathRule("the sockets of the machine's services", below=False, shown=False),
}
"""Files and folders that must not become readable to tasks. The settings `files` and `sandboxes.allow` must not name
one of them, or a folder that contains one. docs/security.md has the same table."""


class Located(NamedTuple):
    """The target of a path. `real` is the path with all links resolved. `ids` identify the file and then each folder
    above it. `place` is the device and the path in its file system, if they are known."""

    real: str
    ids: tuple[Id, ...]
    place: tuple[str, str] | None = None


class Named(NamedTuple):
    """A file or folder that a setting makes readable to tasks. `at` contains the resolved path, and the mount points
    below it. If `shown` is true, the path is in `SHOWN`, and `setting` is the kind of sandbox that sees it."""

    path: Path
    setting: str
    at: tuple[Located, ...]
    shown: bool = False


class Kept(NamedTuple):
    """A file or folder to which a rule of `KEPT` applies. `at` is the resolved path, or a mount point below it."""

    path: Path
    rule: HostPathRule
    at: Located


def refused(named: Iterable[Named], kept: Sequence[Kept]) -> InvalidField | None:
    """Return the error for the first path of `named` that violates a rule of `kept`, or None."""
    for one in named:
        for place in kept:
            if one.shown and not place.rule.shown:
                continue
            for at in one.at:
                if _holds(at, place.at):
                    return _refusal(one, place, "is" if at.real == place.at.real else "holds")
                if place.rule.below and not one.shown and _holds(place.at, at):
                    return _refusal(one, place, "lies in")
    return None


def _holds(outer: Located, inner: Located) -> bool:
    """Return whether `inner` is the same as `outer` or lies below it."""
    if outer.ids[0] in inner.ids or Path(inner.real).is_relative_to(outer.real):
        return True
    if outer.place is None or inner.place is None:
        return False
    return outer.place[0] == inner.place[0] and Path(inner.place[1]).is_relative_to(outer.place[1])


def _refusal(one: Named, place: Kept, relation: str) -> InvalidField:
    if one.shown:
        return InvalidField(
            f"{place.rule.what}, {place.path}, lies in {one.path}, which is visible in {one.setting} sandboxes:"
            " agents could read it",
            field="sandboxes.runtimes",
            hint=f"move {place.path} elsewhere, or leave {one.setting!r} out of sandboxes.runtimes",
        )
    what = place.rule.what if str(one.path) == str(place.path) else f"{place.rule.what}, {place.path}"
    return InvalidField(
        f"{one.setting} names {one.path}, which {relation} {what}: tasks could read it",
        field=one.setting,
        hint="name a folder with nothing but files that tasks may read",
    )


class HostPaths(msgspec.Struct, frozen=True, kw_only=True):
    """The files of this machine that tasks may name. All paths are resolved. The methods block.

    `files`: the folder for uploads, or None.
    `allow`: files and folders that tasks may name.
    `never`: ids of files that no upload may contain, not even as a hard link with another name. These are the files
        that a rule of `KEPT` with `shown` protects. If the rule protects a folder, they are the files directly in the
        folder at the time of the check.
    """

    files: Path | None = None
    allow: tuple[Path, ...] = ()
    never: frozenset[Id] = frozenset()

    @classmethod
    def of(cls, files: Path | None, allow: Iterable[Path] = ()) -> HostPaths:
        """Create a HostPaths, with all links resolved."""
        return cls(
            files=None if files is None else Path(os.path.realpath(files)),
            allow=tuple(Path(os.path.realpath(path)) for path in allow),
        )

    @classmethod
    def checked(cls, config: Config) -> HostPaths:
        """Create a HostPaths from the settings. The data folder must exist. Raises InvalidField if the settings violate
        a rule of `KEPT`."""
        mounts = parse(MOUNTINFO.read_bytes())
        kept = list(_kept(config, mounts))
        if (error := refused(_named(config, mounts), kept)) is not None:
            raise error
        never = {id for place in kept if place.rule.shown for id in _files_in(place.at.real)}
        made = cls.of(config.files, config.sandboxes.allow)
        return msgspec.structs.replace(made, never=frozenset(never))

    def allowed(self, path: str, *, field: str) -> Path:
        """Resolve a path. Raises InvalidField if it is outside of `allow`. Call this before any other check, because a
        client must not find out whether a forbidden path exists."""
        real = _resolved(path)
        if real is None or not any(real.is_relative_to(root) for root in self.allow):
            raise InvalidField(
                f"{path!r} is not among the host's paths that tasks may name",
                field=field,
                hint=f"the operator allows it with `outrider serve --allow-path {shlex.quote(path)}`, or the setting"
                " sandboxes.allow",
            )
        return real

    def upload(self, name: str, *, field: str) -> Path:
        """Resolve the path of an upload step. Raises InvalidField if the setting `files` is not set, if the path is
        outside of that folder, or if no file or folder exists at the path."""
        if self.files is None:
            raise InvalidField(
                f"{name!r} cannot be uploaded: this service has no folder of files for tasks",
                field=field,
                hint="put it beside the task's file, from where `outrider run` sends it; for files of the service, the"
                " operator names a folder with `outrider serve --files DIR`, or the setting files",
            )
        real = _resolved(self.files / name)
        if real is None or not real.is_relative_to(self.files):
            raise InvalidField(f"{name!r} is outside the files folder", field=field)
        try:
            mode = os.lstat(real).st_mode
        except (OSError, ValueError) as error:
            raise InvalidField(f"{name!r} is not in the service's files folder", field=field) from error
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise InvalidField(f"{name!r} is neither a file nor a folder", field=field)
        return real

    def upload_now(self, name: str, *, field: str) -> Path:
        """Resolve the path of an upload step while the sandbox is prepared. The errors of `upload` become
        RuntimeFailure: the service has already accepted the task, so the cause of an error is on this machine. Also
        raises RuntimeFailure for a hard link to a file in `never`."""
        try:
            real = self.upload(name, field=field)
        except InvalidField as error:
            raise RuntimeFailure(f"cannot upload: {error.message}", field=field, hint=error.hint) from error
        if self.never and any(entry.id in self.never for entry in entries(real)):
            raise RuntimeFailure(f"cannot upload {name!r}: it holds a hard link to a file that tasks may not read")
        return real

    def as_named(self, message: str) -> str:
        """Return a message with paths relative to the folder of uploads, as tasks name them."""
        return message if self.files is None else message.replace(f"{self.files}/", "")

    def resolved(self, spec: RuntimeSpec) -> RuntimeSpec:
        """Return the spec with all paths on the host resolved. Raises InvalidField for a path that is not allowed."""
        if not names_paths(spec):
            return spec
        changes: dict[str, object] = {}
        if spec.rootfs is not None:
            changes["rootfs"] = str(self.allowed(spec.rootfs, field="task.runtime.rootfs"))
        if spec.image is not None and os.path.isabs(spec.image):
            changes["image"] = str(self.allowed(spec.image, field="task.runtime.image"))
        mounts = []
        for number, mount in enumerate(spec.mounts):
            source = self.allowed(mount.source, field=f"task.runtime.mounts.{number}.source")
            mounts.append(mount.model_copy(update={"source": str(source), "target": mount.target or mount.source}))
        return spec.model_copy(update={**changes, "mounts": mounts})

    def check(self, spec: RuntimeSpec) -> None:
        """Raise InvalidField unless every path in the spec is allowed and exists on this machine. Image names are not
        checked."""
        resolved = self.resolved(spec)
        if resolved.rootfs is not None and not os.path.isdir(resolved.rootfs):
            raise InvalidField(f"{spec.rootfs!r} is not a folder on this node", field="task.runtime.rootfs")
        for number, (mount, found) in enumerate(zip(spec.mounts, resolved.mounts, strict=True)):
            if not os.path.exists(found.source):
                field = f"task.runtime.mounts.{number}.source"
                raise InvalidField(f"{mount.source!r} is not on this node", field=field)
        if resolved.image is not None and os.path.isabs(resolved.image) and not os.path.exists(resolved.image):
            raise InvalidField(f"{spec.image!r} is not on this node", field="task.runtime.image")

    def check_venv(self, path: str, shown: Iterable[Path], *, field: str) -> None:
        """Raise InvalidField if a virtual environment needs paths on the host that are not allowed. `shown` are the
        paths that the environment's programs need.

        An allowed environment may still need forbidden paths, because its links can lead anywhere. The service's own
        interpreter is always allowed, because every sandbox of a harness preset sees it anyway.
        """
        own = Path(sys.base_prefix).resolve()
        roots = (*self.allow, own)
        places = [place for place in shown if not any(place.resolve().is_relative_to(root) for root in roots)]
        if places:
            flags = " ".join(f"--allow-path {place}" for place in places)
            raise InvalidField(
                f"{path!r} does not work without {' and '.join(map(str, places))}, which tasks may not name",
                field=field,
                hint=f"the operator allows it with `outrider serve {flags}`",
            )


def _resolved(path: str | Path) -> Path | None:
    """Return the path with all links resolved. Returns None if a link is not readable, for example in /proc of another
    user's process."""
    try:
        return Path(os.path.realpath(path))
    except OSError:
        return None


def names_paths(spec: RuntimeSpec) -> bool:
    """Return whether the spec contains a path on the host: a mount, a root folder or an image's path."""
    return bool(spec.mounts) or spec.rootfs is not None or (spec.image is not None and os.path.isabs(spec.image))


def locate(path: Path, mounts: Sequence[MountPoint]) -> tuple[Located, ...]:
    """Resolve a path, and find its ids and its place. Then do the same for each mount point below the path. Blocks."""
    found = []
    for each in (str(path), *mounts_below(path, mounts)):
        real = os.path.realpath(each)
        ids = tuple(_id(str(one)) for one in (Path(real), *Path(real).parents))
        found.append(Located(real, ids, place_of(real, mounts)))
    return tuple(found)


def _id(path: str) -> Id:
    try:
        status = os.stat(path)
    except OSError:
        return path
    return status.st_dev, status.st_ino


def _kept(config: Config, mounts: Sequence[MountPoint]) -> Iterator[Kept]:
    """Yield the entries of `KEPT` that exist on this machine. For the service's own entries (settings, data, key), also
    yield the mount points below them."""
    key = config.tls.key or config.tls.certificate  # without a key file, the key is in the certificate's file
    homes = []
    with suppress(RuntimeError):  # the user has no home folder
        homes.append(Path.home())
    with suppress(KeyError):  # the user is not in the user database
        homes.append(Path(pwd.getpwuid(os.geteuid()).pw_dir))
    places: list[tuple[Path | None, str]] = [
        (config.read_from, "settings"),
        (config.data, "data"),
        (key, "key"),
        *((home, "home") for home in homes),
        (Path(tempfile.gettempdir()), "temporary"),
        *((Path("/", name), name) for name in ("proc", "sys", "dev", "etc", "run")),
    ]
    for path, rule in places:
        if path is not None and os.path.lexists(path):
            top, *below = locate(path, mounts)
            own = KEPT[rule].below and KEPT[rule].shown
            yield from (Kept(path, KEPT[rule], at) for at in (top, *(below if own else ())))


def _named(config: Config, mounts: Sequence[MountPoint]) -> Iterator[Named]:
    """Yield the files and folders that these settings make readable to tasks."""
    places = [(config.files, "files", False)] if config.files is not None else []
    places += [(path, "sandboxes.allow", False) for path in config.sandboxes.allow]
    kinds = [kind for kind in SHOWN if kind in config.sandboxes.runtimes]
    places += [(Path(path), kind, True) for kind in kinds for path in SHOWN[kind] if os.path.lexists(path)]
    for path, setting, shown in places:
        yield Named(path, setting, locate(path, mounts), shown)


def _files_in(path: str) -> Iterator[Id]:
    """Yield the id of a file. For a folder, yield the ids of the files directly in it. Yields no id for a folder that
    this user may not list, because nothing is uploaded from such a folder."""
    if not os.path.isdir(path):
        yield _id(path)
        return
    with suppress(PermissionError), os.scandir(path) as found:
        for entry in found:
            if entry.is_file(follow_symlinks=False):
                yield _id(entry.path)
