"""The names of fields in errors about a step of a task. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.errors import OutriderError


@contextmanager
def naming_step(number: int) -> Iterator[None]:
    """Make a refused field of a step's own task that of the whole task: `steps_of` gives each step's."""
    try:
        yield
    except OutriderError as error:
        if number and error.field is not None:
            error.field = re.sub(r"^task\.(?=evaluator\b|instruction\b)", f"task.then.{number - 1}.", error.field)
        raise
