"""Namespace sandboxes on a machine that has file systems mounted below /usr, as machines with GPUs have.

below_usr.py makes the mount namespaces in which other tests and programs run.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from outrider.sandbox.runtimes.kernel.mounts import MountPoint, MountTable, parse, place_of
from outrider.sandbox.runtimes.namespace.plan import Root, inner_of

FORMS = ("plain", "stacked", "locked")
BEGIN = Path(__file__).with_name("below_usr.py")


async def run_in(form: str, scratch: Path, command: Sequence[str], seconds: float) -> bytes:
    """Run a command in a mount namespace of this form. Returns its output."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount something below /usr")
    probe = await asyncio.create_subprocess_exec("unshare", "--mount", "true", stderr=asyncio.subprocess.PIPE)
    if refused := (await probe.communicate())[1]:
        pytest.skip(f"no mount namespace can be made here: {refused.decode()}")
    words = ["unshare", "--mount", "--propagation", "slave", sys.executable, str(BEGIN), form, str(scratch)]
    process = await asyncio.create_subprocess_exec(
        *words,
        *command,
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(seconds):
        told, _ = await process.communicate()
    assert process.returncode == 0, told.decode()
    return told


def pytest_again(*words: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *words]


@pytest.mark.deep
@pytest.mark.timeout(180)
@pytest.mark.parametrize("form", FORMS)
async def test_sandboxes_work(tmp_path: Path, form: str) -> None:
    await run_in(form, tmp_path, pytest_again(str(BEGIN.with_name("inside_below_usr.py"))), 170)


@pytest.mark.deep
@pytest.mark.timeout(120)
@pytest.mark.parametrize("form", FORMS)
async def test_doctor_says_what_a_session_would_find(tmp_path: Path, form: str) -> None:
    program = "import sys; from outrider.cli import main; sys.exit(main())"
    told = await run_in(form, tmp_path, [sys.executable, "-c", program, "doctor", "--json"], 110)
    [found] = [one for one in json.loads(told)["runtimes"] if one["name"] == "namespace"]
    assert found["ok"], found
    assert ("read-only" in found["detail"]) == (form != "plain")


@pytest.mark.deep
@pytest.mark.timeout(120)
async def test_doctor_sees_that_no_sandbox_starts(tmp_path: Path) -> None:
    """Namespaces can be made, but not a root, because TMPDIR is on as many overlays as the kernel stacks."""
    program = "import sys; from outrider.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "doctor", "--json"]
    told = await run_in(
        "stacked", tmp_path, ["sh", "-c", 'mkdir /usr/tmp; TMPDIR=/usr/tmp "$@" || true', "sh", *command], 110
    )
    [found] = [one for one in json.loads(told)["runtimes"] if one["name"] == "namespace"]
    assert not found["ok"]
    assert "mount overlay" in found["detail"]
    assert "TMPDIR" in found["hint"]


@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", [*(pytest.param(form, marks=pytest.mark.nightly) for form in FORMS[:2]), FORMS[2]])
@pytest.mark.parametrize("name", ["test_contract.py", "test_escapes.py"])
async def test_contract_and_escapes(tmp_path: Path, name: str, form: str) -> None:
    await run_in(form, tmp_path, pytest_again("-k", "namespace", str(BEGIN.with_name(name))), 590)


@pytest.mark.deep
@pytest.mark.timeout(180)
async def test_demo_completes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    program = "import sys; from outrider.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "demo", "--json", "--out", str(tmp_path / "out")]
    told = await run_in("locked", tmp_path, command, 170)
    line = json.loads(told.splitlines()[-1])
    assert (line["sessions"], line["completed"], line["errors"], line["runtime"]) == (32, 32, 0, "namespace")


LINES = """
1 0 8:1 / / rw shared:1 - ext4 /dev/root rw
2 1 8:2 /os /usr rw master:1 propagate_from:2 - ext4 /dev/usr rw
3 2 0:3 / /usr/local/with\\040blank rw - tmpfs none rw
4 2 0:4 / /usr/net rw - autofs auto rw
5 4 0:5 / /usr/net rw - nfs4 server:/ rw
6 5 0:6 / /usr/net/in rw - autofs auto rw
"""


def test_the_mounts_of_a_machine() -> None:
    assert parse(LINES.strip().encode()) == (
        MountPoint("/", "ext4", "8:1"),
        MountPoint("/usr", "ext4", "8:2", "/os"),
        MountPoint("/usr/local/with blank", "tmpfs", "0:3"),
        MountPoint("/usr/net", "nfs4", "0:5"),
        MountPoint("/usr/net/in", "autofs", "0:6"),
    )


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/", ("8:1", "/")),
        ("/usr2/x", ("8:1", "/usr2/x")),
        ("/usr", ("8:2", "/os")),
        ("/usr/lib/x", ("8:2", "/os/lib/x")),
        ("/usr/net/y", None),  # NFS reports the root / for every mounted folder
        ("/usr/local/with blank", ("0:3", "/")),
    ],
)
def test_where_a_path_is_in_its_file_system(path: str, place: tuple[str, str] | None) -> None:
    assert place_of(path, parse(LINES.strip().encode())) == place
    assert place_of(path, ()) is None


def test_changes_of_the_mounts_are_seen() -> None:
    table = MountTable()
    try:
        assert table.mounts() is table.mounts()
        assert table.mounts() == parse(Path("/proc/self/mountinfo").read_bytes())
    finally:
        table.close()


def test_what_is_mounted_by_itself() -> None:
    mounts = [
        *(
            MountPoint("/", "ext4"),
            MountPoint("/lib", "ext4"),
            MountPoint("/lib/firmware", "squashfs"),
            MountPoint("/lib2/x", "tmpfs"),
        ),
        *(
            MountPoint("/usr", "ext4"),
            MountPoint("/usr/a", "tmpfs"),
            MountPoint("/usr/a/b", "tmpfs"),
            MountPoint("/usr/a/p", "proc"),
        ),
        *(MountPoint("/usr/a/p/q", "binfmt_misc"), MountPoint("/usr/ab", "nfs4"), MountPoint("/usr/n", "autofs")),
    ]
    root = Root((("/skeleton", "/"), ("/usr", "/usr")), (("/lib", "/lib"),))
    assert inner_of(root, mounts) == (
        *(("/usr/a", "/usr/a"), ("", "/usr/a/p"), ("/usr/ab", "/usr/ab"), ("", "/usr/n")),
        ("/lib/firmware", "/lib/firmware"),
    )
    assert inner_of(Root((("/image", "/"),)), mounts) == ()
