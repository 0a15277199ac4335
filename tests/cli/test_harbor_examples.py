"""The Harbor folders of examples/harbor: in real sandboxes their solutions earn 1, and doing nothing earns 0."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest

from cli.test_examples import needs_namespaces
from cli.world import Cli
from outrider.sandbox.rootfs.store import ImageStore
from support.small_root import small_root

HARBOR = Path(__file__).parents[2] / "examples" / "harbor"
FOLDERS = sorted(path.parent.name for path in HARBOR.glob("*/task.toml"))

pytestmark = needs_namespaces


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folders, on a machine with an image `debian`, which is made of a few of this host's programs."""
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    with tarfile.open(tmp_path / "debian.tar", "w") as archive:
        archive.add(small_root(tmp_path / "debian"), arcname=".")
    ImageStore().import_(tmp_path / "debian.tar", "debian")
    return Path(shutil.copytree(HARBOR, tmp_path / "harbor"))


@pytest.mark.deep
async def test_they_are_good(cli: Cli, tasks: Path) -> None:
    refused = await cli("task", "check", tasks)
    assert refused.code == 2
    assert f"outrider image build {tasks / 'dockerfile' / 'environment'}" in refused.err.replace("\n", "")
    built = await cli("image", "build", tasks, "--json")
    assert built.code == 0, built.err
    assert len(built.document["images"]) == 2
    ran = await cli("task", "check", tasks, "--json")
    assert ran.document == {"tasks": len(FOLDERS), "ok": len(FOLDERS), "bad": []}


BROKEN: dict[str, tuple[str, str, str, str]] = {
    "exclude": ("separate/task.toml", ', exclude = ["*.tmp"]', "", "earns 0, not 1"),
    "separate": ("separate/task.toml", 'environment_mode = "separate"', "", "earns 0, not 1"),
    "collect": ("separate/task.toml", "ls /app >", "ls / >", "earns 0, not 1"),
    "grace": ("healthcheck/task.toml", "start_period_sec = 60.0", "", "not graded: prepare step 1 exited with 1"),
    "setup": ("steps/steps/add/workdir/setup.sh", "20", "21", "earns 0, not 1"),
    "workdir": ("steps/steps/write/workdir/numbers.txt", "5", "6", "earns 0, not 1"),
    "own-image": ("verifier-image/task.toml", 'workdir = "/grading"\n', 'workdir = "/"\n', "earns 0, not 1"),
    "own-variables": ("verifier-image/task.toml", 'env = { EXACT = "yes" }\n', "", "earns 0, not 1"),
    "artifact": ("verifier-image/task.toml", '"/app/out"', '"/app"', "earns 0, not 1"),
    "a-separate-step": (
        "separate-steps/task.toml",
        '[steps.verifier]\nenvironment_mode = "separate"\n\n[steps.verifier.environment]\n'
        'network_mode = "no-network"\nworkdir = "/grading"\n',
        "",
        "earns 0, not 1",
    ),
    "a-step-that-goes-on": ("separate-steps/steps/measure/solution/solve.sh", "sleep 600", "true", "earns 0.5, not 1"),
    "variable": ("single/task.toml", "the quick brown fox", "", "earns 0, not 1"),
}
"""Changes that break a folder: the file, the replaced text, the replacement, and the message of the check."""


@pytest.mark.deep
async def test_each_needs_what_it_shows(cli: Cli, tasks: Path) -> None:
    for name, (file, text, other, _) in BROKEN.items():
        folder, _, inner = file.partition("/")
        copy = Path(shutil.copytree(tasks / folder, tasks.parent / "broken" / name))
        whole = (copy / inner).read_text()
        assert whole.count(text) == 1, name
        (copy / inner).write_text(whole.replace(text, other))
    test = tasks.parent / "broken" / "variable" / "tests" / "test.sh"
    test.write_text(test.read_text().replace("$((answer == $#))", "$((answer == 4))"))
    assert (await cli("image", "build", tasks)).code == 0
    ran = await cli("task", "check", tasks.parent / "broken", "--json")
    said = {one["id"]: "\n".join(one["problems"]) for one in ran.document["bad"]}
    assert said.keys() == BROKEN.keys()
    for name, (*_, says) in BROKEN.items():
        assert f"the gold solution {'is ' if says.startswith('not') else ''}{says}" in said[name]
