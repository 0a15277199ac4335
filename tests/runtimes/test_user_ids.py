"""Sandboxes with more than one user id."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from outrider.errors import RuntimeFailure, RuntimeUnavailable
from outrider.sandbox.runtimes.namespace import user_ids

from .world import World

ME = pwd.getpwuid(os.geteuid()).pw_name


@pytest.fixture
def set_aside(tmp_path: Path) -> Path:
    """A file in place of /etc/subuid and /etc/subgid."""
    file = tmp_path / "subuid"
    file.write_text(f"other:1000:5\n{ME}:300000:10\n{ME}:400000:65536\n")
    return file


def files_at(file: Path) -> dict[str, Path]:
    return {"uid": file, "gid": file}


def test_a_range_of_this_user_that_is_large_enough(set_aside: Path) -> None:
    own = user_ids.UserIds(((0, os.geteuid(), 1),), ((0, os.getegid(), 1),), {})
    assert user_ids.user_ids(1, files_at(set_aside)) == own
    few, many = user_ids._range("uid", 10, set_aside), user_ids._range("gid", 11, set_aside)
    assert (few, many) == (300000, 400000)


def test_lines_that_are_none_are_left_out(set_aside: Path) -> None:
    odd = b"# \xe9 comment\n\n" + f"{ME}\n{ME}:1:2:3\n{ME}:x:70000\n{ME}:100:\n{ME}:-5:70000\n".encode()
    set_aside.write_bytes(odd + set_aside.read_bytes())
    assert user_ids._range("uid", 11, set_aside) == 400000
    set_aside.write_bytes(odd)
    with pytest.raises(RuntimeUnavailable, match="sets no 9 ids aside"):
        user_ids.user_ids(10, files_at(set_aside))


def test_what_is_missing_is_told(set_aside: Path) -> None:
    set_aside.write_text("other:1000:70000\n")
    with pytest.raises(RuntimeUnavailable, match="sets no 9 ids aside") as raised:
        user_ids.user_ids(10, files_at(set_aside))
    assert ME in (raised.value.hint or "")
    set_aside.unlink()
    with pytest.raises(RuntimeUnavailable):
        user_ids.user_ids(10, files_at(set_aside))


@pytest.fixture
def several(world: World, set_aside: Path) -> int:
    """A number of user ids. Root takes them from the test's file. Other users need newuidmap and ranges of this
    machine; without these, the test is skipped."""
    if os.geteuid() == 0:
        world.host.id_files = files_at(set_aside)
    try:
        user_ids.user_ids(60_000, world.host.id_files)
    except RuntimeUnavailable as error:
        pytest.skip(error.message)
    return 60_000


async def test_owners_can_be_changed_and_others_be_become(world: World, several: int) -> None:
    sandbox = await world.start("namespace", users=several)
    program = (
        "import os\n"
        "open('mine', 'w').write('x'); os.chown('mine', 33, 33); print(os.stat('mine').st_uid)\n"
        "os.setgroups([44]); os.setresgid(33, 33, 33); os.setresuid(33, 33, 33); print(os.getuid(), os.getgroups())\n"
        "open('/proc/self/uid_map').read(); open('mine', 'a')\n"
        "try: os.setuid(0)\nexcept PermissionError: print('no way back')\n"
    )
    result = await sandbox.exec(["python3", "-c", program], seconds=20)
    assert (result.stdout, result.stderr) == (b"33\n33 [44]\nno way back\n", b"")
    status = (await sandbox.exec("grep CapEff /proc/self/status; mount -t tmpfs none /mnt", seconds=10)).stdout
    assert int(status.split()[1], 16) == sum(1 << n for n in (0, 1, 3, 4, 5, 6, 7, 8, 10, 18))


@pytest.fixture
def beyond(tmp_path: Path) -> Path:
    """A file with a range that ends above the largest id."""
    file = tmp_path / "beyond"
    file.write_text(f"{ME}:4294967290:65536\n")
    return file


@pytest.mark.skipif(os.geteuid() != 0, reason="others need newuidmap and a line in /etc/subuid")
async def test_users_that_cannot_be_given_are_told(world: World, beyond: Path) -> None:
    world.host.id_files = files_at(beyond)
    with pytest.raises(RuntimeFailure):
        await world.start("namespace", users=65536)
