"""Trees taken away, however deep they are: some that foreign archives describe are deeper than a path can name."""

from __future__ import annotations

import itertools
import os
import stat
from pathlib import Path


def remove_tree(top: Path) -> None:
    """Take away a folder of ours with all that is in it. Folders inside are moved right below it first, so that no path
    is longer than two names. What cannot be removed is left."""
    numbers = itertools.count()
    try:
        below = [_opened_up(top)]
        while below:
            here = below.pop()
            with os.scandir(here) as entries:
                for entry in entries:
                    if not entry.is_dir(follow_symlinks=False):
                        os.unlink(entry.path)
                    elif here == str(top):
                        below.append(_opened_up(entry.path))
                    else:
                        place = f"{top}/.outrider-gone-{next(numbers)}"
                        os.rename(_opened_up(entry.path), place)
                        below.append(place)
            if here != str(top):
                os.rmdir(here)
        os.rmdir(top)
    except OSError:
        return


def _opened_up(folder: str | Path) -> str:
    """To whoever owns it."""
    os.chmod(folder, stat.S_IRWXU)
    return str(folder)
