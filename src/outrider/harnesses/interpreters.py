"""Finds a Python of a given minor version on this machine, for programs that need another Python than Outrider.

The module downloads nothing. Invariant: an interpreter of a given version is returned only after it has run, has
reported this version, and has imported `venv`. All functions here block.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from outrider.environment import environment, installer_variables
from outrider.errors import HarnessUnavailable

ASK_SECONDS = 30
_ASK = "import sys, venv; print(sys.version_info[0], sys.version_info[1], sep='.'); print(sys.executable)"


def find_python(minor: str | None, *, uv: Sequence[str] | None) -> Path:
    """Return an interpreter of the version `minor`, such as "3.12", or this process's interpreter if `minor` is None.
    `uv` is the command of uv, or None.

    These are tried in order: this interpreter, `python3.12` in each folder of PATH, the interpreter that uv finds, and
    pyenv's versions. Raises HarnessUnavailable with instructions to install the version.
    """
    if minor is None:
        return Path(sys.executable)
    for candidate in _candidates(minor, uv):
        if not candidate.is_file():
            continue
        lines = (_output([str(candidate), "-c", _ASK]) or "").splitlines()
        if len(lines) == 2 and lines[0] == minor:
            # The candidate may be a wrapper script, as in pyenv. The interpreter reports its own path.
            return Path(lines[1]).resolve()
    raise HarnessUnavailable(
        f"needs Python {minor}, which was not found on this machine",
        hint=f"put a python{minor} on PATH, or run: uv python install {minor} (or: pyenv install {minor})",
    )


def _candidates(minor: str, uv: Sequence[str] | None) -> Iterator[Path]:
    yield Path(sys.executable)
    for folder in (environment("PATH") or "").split(":"):
        yield Path(folder or ".") / f"python{minor}"
    if uv and (line := _output([*uv, "python", "find", "--no-python-downloads", "--no-project", minor])):
        yield Path(line.strip())
    pyenv = Path(environment("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from sorted(pyenv.glob(f"versions/{minor}.*/bin/python{minor}"), reverse=True)


def _output(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(
            command,
            check=False,
            env=installer_variables(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ASK_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
