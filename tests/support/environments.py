"""Virtual environments like those of `python -m venv`, written at once: nothing is run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

OURS = f"python{sys.version_info.major}.{sys.version_info.minor}"
INTERPRETER = Path(os.path.realpath(sys.executable))


def environment(folder: Path, python: Path = INTERPRETER, version: str = OURS) -> Path:
    """Make a virtual environment of `python` in a folder that does not exist yet. Returns its folder of packages."""
    packages = folder / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin/python").symlink_to("python3")
    (folder / "bin/python3").symlink_to(python)
    (folder / "pyvenv.cfg").write_text(f"home = {python.parent}\ninclude-system-site-packages = false\n")
    return packages


def program(path: Path, interpreter: Path | str, text: str) -> None:
    """Write an executable script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{interpreter}\n{text}")
    path.chmod(0o755)
