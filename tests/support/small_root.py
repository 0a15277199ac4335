"""A root file system with a few programs of this host and without Python. Nothing is downloaded."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

PROGRAMS = (
    *("bash", "cat", "chmod", "cp", "dd", "df", "env", "grep", "head", "id", "kill", "ln", "ls", "mkdir", "mkfifo"),
    *("mount", "mv", "nohup", "ps", "rm", "seq", "setsid", "sh", "sleep", "stat", "tail", "touch", "true", "uname"),
)
FOLDERS = ("dev", "etc", "home", "proc", "root", "run", "sys", "tmp", "usr/bin", "var/tmp")


def small_root(folder: Path) -> Path:
    """Make the file system in a folder that does not exist yet."""
    for name in FOLDERS:
        (folder / name).mkdir(parents=True)
    (folder / "bin").symlink_to("usr/bin")
    (folder / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (folder / "etc/group").write_text("root:x:0:\n")
    for path in filter(None, map(shutil.which, PROGRAMS)):
        copy(path, folder / "usr/bin" / Path(path).name)
        for library in libraries(path):
            copy(library, folder / library.lstrip("/"))
    return folder


def copy(source: str, target: Path) -> None:
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(source).resolve(), target)


def libraries(program: str) -> list[str]:
    """Return the paths of a program's libraries. The lines of ldd are `NAME => PATH (ADDRESS)` or `PATH (ADDRESS)`."""
    told = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    paths = [line.split("=>")[-1].split("(")[0].strip() for line in told.splitlines()]
    return [path for path in paths if path.startswith("/")]
