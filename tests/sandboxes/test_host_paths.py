"""No setting and no path lets tasks read protected files, and uploads read exactly the files that were checked."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from outrider.config import Config, SandboxesConfig, TlsConfig
from outrider.errors import InvalidField, RuntimeFailure
from outrider.sandbox.host_paths import KEPT, HostPaths, Kept, Located, Named, refused
from outrider.sandbox.runtimes.shown_folders import SHOWN
from outrider.sandbox.runtimes.tool_server.uploads import entries, open_plain
from outrider.spec import RuntimeSpec

SETTINGS = ("files", "sandboxes.allow")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A service's folder in a user's home: settings, data, a key, and a folder for tasks."""
    home = tmp_path / "home"
    folder = home / "work"
    for name in ("state/artifacts", "keys", "uploads/deep"):
        (folder / name).mkdir(parents=True)
    for name in ("outrider.toml", "state/outrider.sqlite3", "keys/service.key", "uploads/deep/data"):
        (folder / name).write_text(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return folder


def config(folder: Path, setting: str = "files", path: Path | str | None = None, **settings: Any) -> Config:
    named: dict[str, Any] = {"files": path} if setting == "files" else {}
    allow = (Path(path),) if path is not None and setting == "sandboxes.allow" else ()
    defaults: dict[str, Any] = {
        "data": folder / "state",
        "tls": TlsConfig(certificate=folder / "uploads/service.pem", key=folder / "keys/service.key"),
        "sandboxes": SandboxesConfig(allow=allow),
    }
    return Config(**defaults | named | settings).as_read_from(folder / "outrider.toml")


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    ("path", "what"),
    [
        (".", "settings file|data folder"),
        ("..", "home folder|settings file"),
        ("outrider.toml", "is the settings file"),
        ("state", "is the data folder"),
        ("state/artifacts", "lies in the data folder"),
        ("keys", "holds the key of the TLS certificate"),
        ("keys/service.key", "is the key"),
        ("/", "settings file"),
        ("../../tmp", "the folder in which nodes keep their sandboxes"),
        ("/proc/self", "the kernel's /proc"),
        ("/sys/kernel", "the kernel's /sys"),
        ("/etc", "the machine's own settings"),
        ("/dev", "devices"),
    ],
)
def test_what_tasks_may_not_read_is_refused(folder: Path, setting: str, path: str, what: str) -> None:
    with pytest.raises(InvalidField, match=what) as error:
        HostPaths.checked(config(folder, setting, folder / path))
    assert (error.value.field, bool(error.value.hint)) == (setting, True)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("way", ["link", "chain", "through", "dots"])
def test_another_way_there_is_refused(folder: Path, setting: str, way: str) -> None:
    (folder / "link").symlink_to("state")
    (folder / "chain").symlink_to("uploads/back")
    (folder / "uploads/back").symlink_to(folder / "link")
    (folder / "through").symlink_to(f"/proc/self/root{folder}/keys")
    (folder / "dots").symlink_to("uploads/../uploads/../..")
    with pytest.raises(InvalidField, match="tasks could read it"):
        HostPaths.checked(config(folder, setting, folder / way))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("path", ["uploads", "uploads/deep", "not-yet", "../models", "uploads/deep/data"])
def test_what_lies_beside_them_may_be_named(folder: Path, setting: str, path: str) -> None:
    """A path beside the protected folders may be named. Usually it is in the home folder."""
    (folder.parent / "models").mkdir()
    HostPaths.checked(config(folder, setting, folder / path))


def test_a_relative_path_is_the_service_folders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(InvalidField, match="files names"):
        HostPaths.checked(config(folder, "files", "."))
    assert HostPaths.checked(config(folder, "files", "uploads")).files == folder / "uploads"


def test_a_key_in_the_certificates_file_is_one(folder: Path) -> None:
    tls = TlsConfig(certificate=folder / "keys/service.key")
    with pytest.raises(InvalidField, match="holds the key"):
        HostPaths.checked(config(folder, "files", folder / "keys", tls=tls))


@pytest.mark.deep
@pytest.mark.parametrize(
    ("mounted", "on", "found"),
    [
        *(("state", "uploads/deep", True), (".", "uploads", True), ("outrider.toml", "uploads/x", True)),
        *(("state/artifacts", "uploads/deep", True), ("state/artifacts", "uploads", True)),
        *(("state/artifacts/file", "uploads/x", True), ("/proc/sys", "uploads/deep", True)),
        *(("state-old", "uploads/deep", False), ("keys/other", "uploads/x", False), ("uploads/deep", "empty", False)),
    ],
)
def test_a_bind_mount_is_what_it_shows(folder: Path, mounted: str, on: str, found: bool) -> None:
    """A bind mount is compared by the file or folder that it shows and not by its path, even if it lies below the named
    folder."""
    for name in ("uploads/x", "state/artifacts/file", "keys/other"):
        (folder / name).touch()
    for name in ("empty", "state-old"):
        (folder / name).mkdir()
    program = f"""
import os, subprocess, sys
from pathlib import Path
from outrider.config import Config
from outrider.errors import InvalidField
from outrider.sandbox.host_paths import HostPaths
folder = Path({str(folder)!r})
config = Config(data=folder / "state", files=folder / "uploads").as_read_from(folder / "outrider.toml")
HostPaths.checked(config)
subprocess.run(["mount", "--bind", folder / {mounted!r}, folder / {on!r}], check=True)
try:
    HostPaths.checked(config)
    print("accepted")
except InvalidField as error:
    print(error.message)
"""
    assert ("tasks could read it" if found else "accepted") in with_mounts(program)


@pytest.mark.deep
@pytest.mark.parametrize("named", ["disk", "disk/data/artifacts", "disk/more", "uploads"])
def test_the_data_folder_may_be_a_bind_mount_or_have_one(folder: Path, named: str) -> None:
    for name in ("disk/data/artifacts", "disk/more", "disk/data/more"):
        (folder / name).mkdir(parents=True)
    program = f"""
import os, subprocess, sys
from pathlib import Path
from outrider.config import Config
from outrider.errors import InvalidField
from outrider.sandbox.host_paths import HostPaths
folder = Path({str(folder)!r})
subprocess.run(["mount", "--bind", folder / "disk/data", folder / "state"], check=True)
subprocess.run(["mount", "--bind", folder / "disk/more", folder / "state/more"], check=True)
try:
    HostPaths.checked(Config(data=folder / "state", files=folder / {named!r}))
    print("accepted")
except InvalidField as error:
    print(error.message)
"""
    assert ("accepted" if named == "uploads" else "the data folder, ") in with_mounts(program)


def with_mounts(program: str) -> str:
    """Run a program that mounts folders, in new user and mount namespaces. Returns its output."""
    words = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    if "unshare failed" in done.stderr:
        pytest.skip("no user namespaces here")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("kind", "shown"), [("namespace", "/usr"), ("process-landlock", "/opt")])
def test_settings_do_not_lie_where_sandboxes_look(kind: str, shown: str) -> None:
    """Calls the pure function `refused`, because a test must not write into these folders."""
    assert shown in SHOWN[kind]
    top = Located(shown, ((1, 2), (1, 1)))
    place = Kept(Path(shown, "app/data"), KEPT["data"], Located(f"{shown}/app/data", ((1, 4), (1, 3), (1, 2), (1, 1))))
    error = refused([Named(Path(shown), kind, (top,), shown=True)], [place])
    assert error is not None
    assert error.field == "sandboxes.runtimes"
    assert kind in str(error.hint)
    home = place._replace(rule=KEPT["home"])
    assert refused([Named(Path(shown), kind, (top,), shown=True)], [home]) is None


def test_landlock_shows_no_folder_with_private_keys() -> None:
    assert not {"/etc/ssl", "/etc/pki/tls", "/etc"}.intersection(SHOWN["process-landlock"])


def test_another_spelling_is_the_same_folder() -> None:
    """On a file system that ignores case, two spellings lead to the same inode."""
    place = Kept(Path("/srv/Data"), KEPT["data"], Located("/srv/Data", ((1, 3), (1, 2), (1, 1))))
    named = Named(Path("/srv/data"), "files", (Located("/srv/data", ((1, 3), (1, 2), (1, 1))),))
    assert refused([named], [place]) is not None


# Uploads read exactly the files that were checked.


def paths(folder: Path, *allow: Path) -> HostPaths:
    settings = config(folder, "files", folder / "uploads", sandboxes=SandboxesConfig(allow=allow))
    return HostPaths.checked(settings)


@pytest.mark.parametrize("name", ["out", "deep/out", "out/service.key", "chain", "absolute", "proc"])
def test_no_upload_leaves_the_folder(folder: Path, name: str) -> None:
    (folder / "uploads/out").symlink_to("../keys")
    (folder / "uploads/deep/out").symlink_to("../../outrider.toml")
    (folder / "uploads/chain").symlink_to("out")
    (folder / "uploads/absolute").symlink_to(folder / "keys")
    (folder / "uploads/proc").symlink_to("/proc/self/environ")
    with pytest.raises(InvalidField, match="outside the files folder"):
        paths(folder).upload(name, field="x")


def test_a_link_within_the_folder_may_be_named(folder: Path) -> None:
    (folder / "uploads/current").symlink_to("deep")
    assert paths(folder).upload("current/data", field="x") == folder / "uploads/deep/data"


@pytest.mark.parametrize("name", ["pipe", "socket"])
def test_neither_pipe_nor_socket_is_uploaded(folder: Path, name: str) -> None:
    os.mkfifo(folder / "uploads/pipe")
    os.mknod(folder / "uploads/socket", 0o140600)
    with pytest.raises(InvalidField, match="neither a file nor a folder"):
        paths(folder).upload(name, field="x")
    (folder / "uploads/inner").mkdir()
    (folder / "uploads" / name).rename(folder / "uploads/inner" / name)
    with pytest.raises(RuntimeFailure, match="neither a file nor a folder"):
        list(entries(folder / "uploads/inner"))
    with pytest.raises(RuntimeFailure, match="not a regular file"):
        open_plain(folder / "uploads/inner" / name)


def test_without_a_folder_there_is_no_upload() -> None:
    with pytest.raises(InvalidField, match="no folder of files") as error:
        HostPaths().upload("x", field="task.runtime.prepare.0.upload")
    assert (error.value.field, "--files" in str(error.value.hint)) == ("task.runtime.prepare.0.upload", True)


@pytest.mark.parametrize("name", ["twin", "inner", "."])
@pytest.mark.parametrize("file", ["outrider.toml", "keys/service.key", "state/outrider.sqlite3"])
def test_a_hard_link_is_the_file(folder: Path, name: str, file: str) -> None:
    (folder / "uploads/inner").mkdir()
    place = folder / "uploads" / ("twin" if name == "twin" else "inner/twin")
    place.hardlink_to(folder / file)
    with pytest.raises(RuntimeFailure, match="hard link"):
        paths(folder).upload_now(name, field="x")
    place.unlink()
    assert paths(folder).upload_now("deep", field="x") == folder / "uploads/deep"


def swapped(path: Path, goal: Path) -> None:
    path.rename(path.with_name("before"))
    path.symlink_to(goal)


@pytest.mark.parametrize("part", ["uploads", "uploads/deep", "uploads/deep/data"])
def test_a_link_that_is_put_there_after_the_check_is_not_followed(folder: Path, part: str) -> None:
    (folder / "secret/deep").mkdir(parents=True)
    (folder / "secret/data").write_text("secret")
    (folder / "secret/deep/data").write_text("secret")
    goals = {"uploads": "secret", "uploads/deep": "secret", "uploads/deep/data": "secret/data"}
    source = paths(folder).upload("deep", field="x")
    found = entries(source)
    next(found)  # the folder itself
    swapped(folder / part, folder / goals[part])
    if part == "uploads/deep/data":
        with pytest.raises(RuntimeFailure, match="leaves the uploaded folder"):
            next(found)
    else:
        with pytest.raises(RuntimeFailure, match="is a symbolic link"):
            next(found)
    with pytest.raises(RuntimeFailure, match="cannot upload"):
        open_plain(folder / "uploads/deep/data")


@pytest.mark.parametrize("named", ["mounts", "rootfs", "image"])
def test_a_path_is_resolved_once(folder: Path, named: str) -> None:
    """A sandbox gets the folder to which the link led at the time of the check."""
    shared = folder / "shared"
    (shared / "v1").mkdir(parents=True)
    (shared / "now").symlink_to("v1")
    allowed = paths(folder, shared)
    here = str(shared / "now")
    fields: dict[str, Any] = {"mounts": [{"source": here}]} if named == "mounts" else {named: here}
    spec = allowed.resolved(RuntimeSpec(**fields))
    if named == "mounts":
        assert [(mount.source, mount.target) for mount in spec.mounts] == [(str(shared / "v1"), here)]
    else:
        assert getattr(spec, named) == str(shared / "v1")
    (shared / "now").unlink()
    (shared / "now").symlink_to("../state")
    with pytest.raises(InvalidField, match="not among the host's paths"):
        allowed.resolved(RuntimeSpec(**fields))


def test_odd_names_are_names(folder: Path) -> None:
    for name in ("a\nb", "a b,c:d", "ü", "-x", os.fsdecode(b"\xff")):
        place = folder / "uploads/odd" / name
        place.mkdir(parents=True)
        (place / "x").write_text(name.encode(errors="replace").decode())
    found = [entry.name for entry in entries(paths(folder).upload_now("odd", field="x"))]
    assert len(found) == 1 + 2 * 5


def test_a_deep_folder_is_no_recursion(folder: Path) -> None:
    depth = 150
    folder.joinpath("uploads/deep", *["d"] * depth).mkdir(parents=True)
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + depth // 2)
    try:
        assert sum(1 for _ in entries(folder / "uploads/deep")) == 2 + depth
    finally:
        sys.setrecursionlimit(before)


def test_a_link_that_may_not_be_read_is_not_allowed_like_any_other_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(path: object) -> str:  # like /proc/1/root, if process 1 belongs to another user
        raise PermissionError(13, "Permission denied", str(path))

    allowed = HostPaths.of(folder / "uploads", [folder / "uploads"])
    monkeypatch.setattr(os.path, "realpath", unreadable)
    with pytest.raises(InvalidField, match="not among the host's paths"):
        allowed.allowed("/proc/1/root", field="x")
    with pytest.raises(InvalidField, match="outside the files folder"):
        allowed.upload("link", field="x")
