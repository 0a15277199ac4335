"""Names the fields in errors about a step of a task. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.errors import OutriderError


@contextmanager
def naming_step(number: int) -> Iterator[None]:
    """Rename a refused field of a step's own task (see `steps_of`) to the corresponding field of the whole task."""
    try:
        yield
    except OutriderError as error:
        if number and error.field is not None:
            error.field = re.sub(r"^task\.(?=evaluator\b|instruction\b)", f"task.then.{number - 1}.", error.field)
        raise
