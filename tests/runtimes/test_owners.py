"""The owners of an image's files in sandboxes."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from outrider.errors import InvalidField, RuntimeUnavailable
from outrider.sandbox.image_build import build_image
from outrider.sandbox.rootfs.store import ImageStore
from outrider.sandbox.runtimes.apptainer.runtime import ApptainerRuntime
from outrider.sandbox.runtimes.base import SavesLayers
from outrider.sandbox.runtimes.namespace import user_ids
from outrider.sandbox.runtimes.namespace.runtime import NamespaceRuntime
from outrider.sandbox.runtimes.node_host import ID_FILES
from outrider.spec import RuntimeSpec
from support.small_root import copy, libraries, small_root

from .world import World

LIST = "stat -c '%u:%g %a %n' /srv/* /srv/db/* /home/node; cat /srv/db/file"
THEIRS = (
    "101:104 700 /srv/db\n101:0 777 /srv/link\n0:42 640 /srv/shadow\n5:5 755 /srv/tool\n101:104 600 /srv/db/file\n"
    "1000:1000 755 /home/node\nsecret"
)
ROOTS = THEIRS.replace("101:104", "0:0").replace("101:0", "0:0").replace("0:42", "0:0").replace("5:5", "0:0")
ROOTS = ROOTS.replace("1000:1000", "0:0")
ENTRIES = (
    ("srv/db", None, 0o700, 101, 104),
    ("srv/db/file", b"secret", 0o600, 101, 104),
    ("srv/link", "db/file", 0o777, 101, 0),
    ("srv/shadow", b"x", 0o640, 0, 42),
    ("srv/tool", b"x", 0o6755, 5, 5),
    ("home/node", None, 0o755, 1000, 1000),
)
Import = Callable[..., str]
IdFiles = Mapping[str, Path]


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Import:
    """A function that imports a small root with the given entries as the image `theirs`, and returns this name."""
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))

    def make(*entries: tuple[str, Any, int, int, int]) -> str:
        root = small_root(tmp_path / "small")
        chown = shutil.which("chown") or ""
        for path in (chown, *libraries(chown)):
            copy(path, root / ("usr/bin/chown" if path == chown else path.lstrip("/")))
        with tarfile.open(tmp_path / "small.tar", "w", format=tarfile.PAX_FORMAT) as archive:
            archive.add(root, arcname=".")
            for name, content, mode, uid, gid in entries:
                member = tarfile.TarInfo(name)
                member.mode, member.uid, member.gid = mode, uid, gid
                data = content if isinstance(content, bytes) else b""
                member.size = len(data)
                if content is None:
                    member.type = tarfile.DIRTYPE
                elif isinstance(content, str):
                    member.type, member.linkname = tarfile.SYMTYPE, content
                archive.addfile(member, io.BytesIO(data))
        ImageStore().import_(tmp_path / "small.tar", "theirs")
        return "theirs"

    return make


@pytest.fixture
def ranges(tmp_path: Path, world: World) -> IdFiles:
    """The files with the id ranges of this user. Root gets a range from the test. Other users have the machine's
    ranges; without these, the test is skipped."""
    if os.geteuid() == 0:
        file = tmp_path / "ranges"
        file.write_text("0:700000:65536\n")
        world.host.id_files = {"uid": file, "gid": file}
    try:
        user_ids.user_ids(65536, world.host.id_files)
    except RuntimeUnavailable as error:
        pytest.skip(error.message)
    return world.host.id_files


@pytest.fixture
def no_ranges(tmp_path: Path, world: World) -> IdFiles:
    world.host.id_files = dict.fromkeys(("uid", "gid"), tmp_path / "none")
    return world.host.id_files


async def said(sandbox: Any, command: str) -> str:
    done = await sandbox.exec(command, merged=True, seconds=20)
    return str(done.stdout.decode())


async def test_files_have_their_owners(world: World, imported: Import, ranges: IdFiles) -> None:
    image = imported(*ENTRIES)
    sandbox = await world.start("namespace", image=image, workdir="/")
    assert await said(sandbox, LIST) == THEIRS
    # Root may change all of these files, as in a container.
    assert (
        await said(sandbox, "echo more >> /srv/db/file && chown 7:8 /srv/db/file && cat /srv/db/file") == "secretmore\n"
    )
    # In the store, the files belong to the user of the store, who can then remove them.
    root = ImageStore().root(ImageStore().image(image))
    status = (root / "srv/tool").stat()
    assert (status.st_uid, status.st_mode & 0o7777) == (os.geteuid(), 0o755)
    assert (root / "srv/db/file").read_bytes() == b"secret"
    other = await world.start("namespace", image=image, workdir="/")
    assert await said(other, LIST) == THEIRS


async def test_one_user_by_the_tasks_own_word(world: World, imported: Import, no_ranges: IdFiles) -> None:
    image = imported(*ENTRIES)
    sandbox = await world.start("namespace", image=image, workdir="/", users=1)
    assert await said(sandbox, LIST) == ROOTS


async def test_an_image_of_another_machine_where_ids_are_missing(
    world: World, imported: Import, no_ranges: IdFiles
) -> None:
    """The start of the session's sandbox fails, and the check of the task refuses the task."""
    spec: dict[str, Any] = {"image": imported(*ENTRIES), "workdir": "/"}
    because = (
        r"'theirs' has /srv/db of a user \(id 101\), so its sandboxes need several users, and .* sets no 65535 ids"
    )
    with pytest.raises(RuntimeUnavailable, match=because) as raised:
        await world.start("namespace", **spec)
    assert "task.runtime.users to 1" in (raised.value.hint or "")
    with pytest.raises(InvalidField, match=because) as refused:
        NamespaceRuntime.check_spec(RuntimeSpec(kind="namespace", **spec), id_files=no_ranges)
    assert (refused.value.field, refused.value.hint) == ("task.runtime.users", raised.value.hint)


def test_apptainer_has_one_user(imported: Import) -> None:
    image = imported(*ENTRIES)
    ApptainerRuntime.check_spec(RuntimeSpec(kind="apptainer", image=image, users=1))
    with pytest.raises(
        InvalidField, match=r"/srv/db of a user \(id 101\), and apptainer sandboxes have one"
    ) as refused:
        ApptainerRuntime.check_spec(RuntimeSpec(kind="apptainer", image=image))
    assert refused.value.field == "task.runtime.users"


async def test_a_base_image_needs_no_other_ids(world: World, imported: Import, no_ranges: IdFiles) -> None:
    """Most base images have caches of apt, groups of system files and an account that is not used."""
    image = imported(
        ("etc/passwd", b"root:x:0:0::/:/bin/sh\n_apt:x:42:65534::/:/bin/sh\n", 0o644, 0, 0),
        ("var/cache/apt/partial", None, 0o700, 42, 0),
        *ENTRIES[3:4],
        *ENTRIES[5:],
    )
    sandbox = await world.start("namespace", image=image, workdir="/")
    assert await said(sandbox, "stat -c '%u:%g' /var/cache/apt/partial /srv/shadow /home/node") == "0:0\n0:0\n0:0\n"


@pytest.mark.parametrize(
    ("owner", "users", "because"),
    [
        ((70000, 0), None, "/data belongs to 70000:0, and a sandbox has ids up to 65535"),
        ((70000, 0), 65536, "/data belongs to 70000:0, and a sandbox has ids up to 65535"),
        ((101, 0), 100, "an id of 101, and the task names 100 users"),
    ],
)
async def test_owners_that_a_sandbox_cannot_have(
    world: World, imported: Import, ranges: IdFiles, owner: tuple[int, int], users: int | None, because: str
) -> None:
    spec: dict[str, Any] = {"image": imported(("data", b"x", 0o600, *owner)), "workdir": "/", "users": users}
    with pytest.raises(RuntimeUnavailable, match=because):
        await world.start("namespace", **spec)
    with pytest.raises(InvalidField, match=because) as refused:
        NamespaceRuntime.check_spec(RuntimeSpec(kind="namespace", **spec), id_files=ranges)
    assert refused.value.field == "task.runtime.users"


async def test_their_room_is_not_the_tasks(world: World, imported: Import, ranges: IdFiles) -> None:
    """A task may write up to its limit, however much the files of other owners take."""
    image = imported(("data", bytes(8 << 20), 0o600, 101, 0))
    sandbox = await world.start("namespace", image=image, workdir="/", resources={"disk_mb": 4})
    assert "2097152 bytes" in await said(sandbox, "dd if=/dev/zero of=/mine bs=1M count=2")
    assert "No space left" in await said(sandbox, "dd if=/dev/zero of=/more bs=1M count=4")


async def test_a_saved_layer_keeps_owners_and_links(world: World, imported: Import, ranges: IdFiles) -> None:
    image = imported(*ENTRIES)
    sandbox = await world.start("namespace", image=image, workdir="/")
    # The agent replaces a folder by a link to another folder. The owners from the image must not reach the other
    # folder.
    change = (
        "rm -rf /srv/db && mkdir /etc/db && echo mine > /etc/db/file && ln -s /etc/db /srv/db && chown -h 9:9 /srv/db"
    )
    more = "echo x > /made && chown 33:34 /made && chmod 4750 /made && ln /made /made-too && rm /srv/shadow"
    assert await said(sandbox, f"{change}; {more}") == ""
    show = "stat -c '%u:%g %a %h %n' /srv/* /etc/db/file /made /made-too"
    before = await said(sandbox, show)
    await cast(SavesLayers, sandbox).save_layer(world.folder / "layer")
    again = await world.start("namespace", image=image, workdir="/", layer=world.folder / "layer")
    assert await said(again, show) == before
    assert "33:34 4750 2 /made\n" in before
    assert "0:0 644 1 /etc/db/file\n" in before
    assert "9:9 777 1 /srv/db\n" in before


def postgresql(root: Path) -> str:
    """Copy this host's PostgreSQL, and `setpriv` and `chown`, into a root. Returns the folder of its programs."""
    initdb, setpriv, chown = (shutil.which(name) for name in ("initdb", "setpriv", "chown"))
    if initdb is None or setpriv is None or chown is None:
        pytest.skip("PostgreSQL is not installed")
    home = Path(initdb).resolve().parents[1]
    shared = Path("/usr/share/postgresql", home.name)
    if home.parent.name != "postgresql" or not shared.is_dir():
        pytest.skip("PostgreSQL is not installed as Debian does")
    for folder in (home, shared):
        shutil.copytree(folder, root / str(folder)[1:], ignore=shutil.ignore_patterns("bitcode", "man", "*.a"))
    for program in (setpriv, chown):
        copy(program, root / "usr/bin" / Path(program).name)
    for program in (setpriv, chown, *map(str, (home / "bin").iterdir()), *map(str, (home / "lib").glob("*snow*"))):
        for library in libraries(program):
            copy(library, root / library[1:])
    return str(home / "bin")


@pytest.mark.deep
async def test_postgresql_runs_in_an_image_where_a_step_made_its_database(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranges: IdFiles
) -> None:
    """PostgreSQL refuses to run as root, and refuses a database folder of another user."""
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    root = small_root(tmp_path / "small")
    programs = postgresql(root)
    with (root / "etc/passwd").open("a") as users:
        users.write("postgres:x:101:104::/:/bin/sh\n")
    with tarfile.open(tmp_path / "small.tar", "w") as archive:
        archive.add(root, arcname=".")
    store = ImageStore()
    store.import_(tmp_path / "small.tar", "small")
    assert not store.image("small").owners.foreign
    by = "setpriv --reuid=101 --regid=104 --clear-groups"
    (tmp_path / "Dockerfile").write_text(
        f"FROM small\nRUN mkdir /db && chown -R postgres /db && {by} {programs}/initdb --no-locale -A trust -D /db\n"
    )
    for kind, file in ranges.items():  # the defaults of the host that the build makes
        monkeypatch.setitem(ID_FILES, kind, file)
    await asyncio.to_thread(build_image, tmp_path, store, name="task")
    sandbox = await world.start("namespace", image="task", workdir="/")
    start = f"{by} {programs}/pg_ctl -w -D /db -o '-k /db -h 127.0.0.1' -l /db/log start >/tmp/said 2>&1"
    start += "; cat /tmp/said /db/log"
    assert "server started" in await said(sandbox, start)
    ask = f"{programs}/psql -h /db -U postgres -tAc 'select 6 * 7'"
    assert await said(sandbox, ask) == "42\n"
    # With one user, PostgreSQL does not start, and an agent cannot repair this.
    alone = await world.start("namespace", image="task", workdir="/", users=1)
    assert "server started" not in await said(alone, start)
