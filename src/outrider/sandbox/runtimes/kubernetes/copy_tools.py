"""Fills the volume of a pod with an interpreter for the tool server, and with the programs of harnesses.

The pod's init container, which uses Outrider's image, runs this module: `python3 -m … VOLUME FOLDER...`. Invariant:
copy number N is in the volume's folder N. Copy 0 is the interpreter.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from outrider.errors import OutriderError
from outrider.sandbox.pythons.portable import portable_command, portable_python

PROGRAM = "program"
"""Name of a link in the volume. It points to the interpreter, which runs in any image. pull_ahead.py runs the
interpreter with `--version` in each image."""


def main(volume: Path, folders: list[Path]) -> None:
    for number, folder in enumerate((portable_python(), *folders)):
        if not folder.is_dir():
            sys.exit(f"the tools image has no folder {folder}")
        shutil.rmtree(volume / str(number), ignore_errors=True)  # an earlier run of this container may have been ended
        shutil.copytree(folder, volume / str(number), symlinks=True, dirs_exist_ok=True)
    program, *_ = portable_command(".")
    (volume / PROGRAM).unlink(missing_ok=True)
    (volume / PROGRAM).symlink_to(f"0/{program}")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
    except (OSError, OutriderError) as error:
        sys.exit(str(error))
