"""The script that installs uv from an index of Python packages, run with a small index."""

from __future__ import annotations

import hashlib
import io
import os
import platform
import re
import subprocess
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from outrider.tasks.harbor.network_uses import uv_installer

pytestmark = pytest.mark.timeout(60)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None: ...


def wheel(version: str) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for name in ("uv", "uvx"):
            archive.writestr(f"uv-{version}.data/scripts/{name}", f"#!/bin/sh\necho {name} {version}\n")
    return written.getvalue()


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """An index with uv 0.9.9, with uv 0.9.10, whose digest on the page is wrong, with a wheel for Windows, and with a
    wheel of another package."""
    files, page = tmp_path / "index" / "files", tmp_path / "index" / "simple" / "uv"
    files.mkdir(parents=True)
    page.mkdir(parents=True)
    links = ["../../files/uv-9.0-py3-none-win_amd64.whl", "../../files/uv_build-9.0-py3-none-any.whl"]
    for version in ("0.9.9", "0.9.10"):
        name = f"uv-{version}-py3-none-manylinux_2_17_{platform.machine()}.musllinux_1_1_{platform.machine()}.whl"
        (files / name).write_bytes(wheel(version))
        digest = hashlib.sha256(wheel("0.9.9")).hexdigest()
        links.append(f"../../files/{name}#sha256={digest}")
    (page / "index.html").write_text("".join(f'<a href="{link}">x</a>\n' for link in links))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path / "index")) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/simple/"
        server.shutdown()
        thread.join()


def install(index: str, home: Path, *version: str, **env: str) -> subprocess.CompletedProcess[str]:
    known = {"PATH": os.environ["PATH"], "HOME": str(home), "PIP_INDEX_URL": index, **env}
    command = ["/bin/sh", "-s", "--", *version]
    return subprocess.run(command, input=uv_installer(), env=known, capture_output=True, text=True, check=False)


def test_a_version_is_installed_where_the_installer_of_uv_puts_it(index: str, tmp_path: Path) -> None:
    done = install(index, tmp_path, "0.9.9")
    assert (done.returncode, done.stderr) == (0, "")
    script = '. "$HOME/.local/bin/env" && uv && uvx'
    ran = subprocess.run(["/bin/sh", "-c", script], env={"HOME": str(tmp_path)}, capture_output=True, text=True)
    assert ran.stdout == "uv 0.9.9\nuvx 0.9.9\n"


def test_a_folder_may_be_chosen(index: str, tmp_path: Path) -> None:
    assert install(index, tmp_path, "0.9.9", UV_INSTALL_DIR=str(tmp_path / "own")).returncode == 0
    assert (tmp_path / "own" / "uvx").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(
    ("version", "says"),
    [(["0.9.8"], "has no uv 0.9.8 for"), ([], "uv-0.9.10-.* is not the file whose sha256 the index gives")],
)
def test_what_cannot_be_installed_is_told(index: str, tmp_path: Path, version: list[str], says: str) -> None:
    done = install(index, tmp_path, *version)
    assert done.returncode == 1
    assert re.search(says, done.stderr)
    assert not (tmp_path / ".local").exists()
