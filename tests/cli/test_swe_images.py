"""Data sets of repositories, used as their pages describe: a file of rows, an image under the set's own name, one
command.

The image is a root file system of this host's Python, pytest and git, with the small repository at the place where the
set's images have it.
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cli.test_examples import needs_namespaces
from cli.test_swe_sets import PRO, R2E, R2E_TESTS, SETS, TESTS, run_scripts, written
from evaluators.swe_world import BASE, FIX, PATCH, TEST
from outrider.sandbox.rootfs.store import ImageStore
from support.small_root import copy, libraries, small_root

from .world import Cli

HOST_PYTHON = Path("/usr/bin/python3")
needs_python = pytest.mark.skipif(not HOST_PYTHON.exists(), reason="this host has no Python in /usr")
pytestmark = [needs_namespaces, needs_python, pytest.mark.deep]
PROGRAMS = ("git", "find", "tar", "gzip", "diff", "sed", "mktemp", "sort", "cut", "xargs", "readlink", "dirname")
PACKAGES = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "xdist", "execnet", "py")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "test", "idlelib", "lib2to3", "config-*", "ensurepip", "dist-packages")
PYTEST = '#!/bin/sh\nPYTEST_DISABLE_PLUGIN_AUTOLOAD=1 exec python3 -m pytest -p xdist.plugin "$@"\n'
GIT = "git -c user.name=a -c user.email=a@b.c"
IMAGES = {
    "swebench": "swebench/sweb.eval.x86_64.pallets_1776_flask-5014:latest",
    "swe-gym": "xingyaoww/sweb.eval.x86_64.getmoto_s_moto-7365:latest",
    "swe-rebench": "swerebench/sweb.eval.x86_64.oemof_1776_tespy-653",
    "swe-smith": "jyangballin/swesmith.x86_64.shop_1776_shop.1fd52536",
    "r2e-gym": R2E["docker_image"],
    "swebench-pro": f"jefzda/sweap-images:{PRO['dockerhub_tag']}",
}

OF_EACH_FORM = ("swebench", "r2e-gym")
"""A set whose rows name the tests that must pass, and a set whose rows have the outcome of each test."""


def root_with_python(folder: Path) -> Path:
    root = small_root(folder)
    for path in filter(None, map(shutil.which, (str(HOST_PYTHON), *PROGRAMS))):
        copy(path, root / "usr/bin" / Path(path).name)
        for needed in libraries(path):
            copy(needed, root / needed.lstrip("/"))
    version = HOST_PYTHON.resolve().name
    library = root / "usr/lib" / version
    shutil.copytree(Path("/usr/lib") / version, library, ignore=LEFT_OUT)
    for extension in (library / "lib-dynload").glob("*.so"):
        for needed in libraries(str(extension)):
            copy(needed, root / needed.lstrip("/"))
    packages = root / "usr/local/lib" / version / "dist-packages"
    for name in PACKAGES:
        found = find_spec(name)
        if found is not None and found.submodule_search_locations:
            shutil.copytree(found.submodule_search_locations[0], packages / name, ignore=LEFT_OUT)
        elif found is not None and found.origin is not None:
            shutil.copy(found.origin, packages)
    for metadata in Path(pytest.__file__).parents[1].glob("pluggy-*.dist-info"):  # pytest prints pluggy's version
        shutil.copytree(metadata, packages / metadata.name)
    (root / "usr/bin/pytest").write_text(PYTEST)
    (root / "usr/bin/pytest").chmod(0o755)
    return root


def repository(root: Path, kind: str) -> None:
    place = root / ("app" if kind == "swebench-pro" else "testbed")
    files = {**BASE, "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["src"]\n'}
    if kind == "swe-smith":
        files |= {"src/shop/prices.py": FIX, TEST: TESTS}
    for path, text in files.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(text)
    commands = [f"git init -q . && git add -A && {GIT} commit -qm base && git tag base"]
    if kind == "swebench-pro":
        (place / "tests.patch").write_text(PATCH)
        commands += [
            f"git checkout -q -b solved && git apply tests.patch && {GIT} commit -qm solved -- {TEST}",
            "git checkout -q base && rm tests.patch",
        ]
    for command in commands:
        subprocess.run(command, shell=True, cwd=place, check=True)
    if kind == "r2e-gym":
        (root / "r2e_tests").mkdir()
        (root / "r2e_tests/test_1.py").write_text(R2E_TESTS + "\n")
        (place / "run_tests.sh").write_text("pytest -rA r2e_tests\n")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in OF_EACH_FORM else pytest.mark.nightly) for kind in IMAGES]
)
async def test_one_command_checks_the_rows_of_a_set(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    pytest.importorskip("swebench", reason="swebench is not installed: pip install --no-deps swebench unidiff")
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    root = root_with_python(tmp_path / "root")
    repository(root, kind)
    with tarfile.open(tmp_path / "root.tar", "w") as archive:
        archive.add(root, arcname=".")
    ImageStore().import_(tmp_path / "root.tar", IMAGES[kind])
    row: dict[str, Any] = SETS[kind]
    run_scripts(tmp_path)
    ran = await cli("task", "check", f"{kind}:{written(tmp_path, row)}", "--json")
    assert ran.document == {"tasks": 1, "ok": 1, "bad": []}
