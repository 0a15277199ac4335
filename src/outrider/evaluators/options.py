"""Reads the options of an evaluator when it is constructed.

It knows no evaluator. Invariant: what is misspelt, or given to a kind that does not take it, is an InvalidField that
names it.
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from outrider.errors import InvalidField
from outrider.spec import EvaluatorSpec

T = TypeVar("T", bound=msgspec.Struct)

WHERE = re.compile(r" - at `\$\.?(.*)`$")
"""How msgspec ends a message: with the place of what is wrong."""


def read_options(kind: type[T], spec: EvaluatorSpec) -> T:
    """The options as a `kind`, of a spec that has nothing else. Raises InvalidField."""
    for name in ("run", "path"):
        if getattr(spec, name) is not None:
            raise InvalidField(f"evaluator kind {spec.kind!r} does not take it", field=f"task.evaluator.{name}")
    try:
        return msgspec.convert(spec.options, kind, strict=True)
    except msgspec.ValidationError as error:
        message = str(error)
        place = WHERE.search(message)
        field = f".{place[1]}" if place and place[1] else ""
        raise InvalidField(
            message[:1].lower() + WHERE.sub("", message[1:]),
            field=f"task.evaluator.options{field}",
            hint=f"known options: {', '.join(kind.__struct_fields__)}",
        ) from error
