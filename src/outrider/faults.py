"""Describes wrong fields in requests and settings in plain words, based on the errors that pydantic reports.

Invariant: the texts in WORDS never contain the wrong value, because it may be a secret. The text of a custom validator
is not changed, and may contain the value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from outrider.errors import InvalidField

MAX_COMPLAINTS = 1000
"""Maximum number of wrong fields that are listed one by one. Pydantic takes 10 us to list each field."""

Context = dict[str, Any]
WORDS: dict[str, Callable[[Context], str]] = {
    "missing": lambda _: "is required",
    "extra_forbidden": lambda _: "unknown field",
    "int_type": lambda _: "must be a whole number",
    "int_parsing": lambda _: "must be a whole number",
    "int_from_float": lambda _: "must be a whole number",
    "float_type": lambda _: "must be a number",
    "float_parsing": lambda _: "must be a number",
    "finite_number": lambda _: "must be a number, and neither NaN nor infinite",
    "bool_type": lambda _: "must be true or false",
    "bool_parsing": lambda _: "must be true or false",
    "string_type": lambda _: "must be a text",
    "path_type": lambda _: "must be a path",
    "list_type": lambda _: "must be a list",
    "tuple_type": lambda _: "must be a list",
    "dict_type": lambda _: "must be an object with fields",
    "mapping_type": lambda _: "must be an object with fields",
    "model_type": lambda _: "must be an object with fields",
    "model_attributes_type": lambda _: "must be an object with fields",
    "literal_error": lambda given: f"must be {given['expected']}",
    "enum": lambda given: f"must be {given['expected']}",
    "greater_than_equal": lambda given: f"must be at least {_number(given['ge'])}",
    "greater_than": lambda given: f"must be more than {_number(given['gt'])}",
    "less_than_equal": lambda given: f"must be at most {_number(given['le'])}",
    "less_than": lambda given: f"must be less than {_number(given['lt'])}",
    "string_too_short": lambda given: f"must have at least {_counted(given['min_length'], 'character')}",
    "string_too_long": lambda given: f"must have at most {_counted(given['max_length'], 'character')}",
    "too_short": lambda given: f"must have at least {_counted(given['min_length'], 'item')}",
    "too_long": lambda given: f"must have at most {_counted(given['max_length'], 'item')}",
    "string_pattern_mismatch": lambda given: f"must match the pattern {given['pattern']}",
}
"""Maps pydantic's error types to functions that write the text. Errors of other types keep pydantic's text."""


def complaints(error: ValidationError) -> list[ErrorDetails]:
    """Return pydantic's errors, one for each wrong field. Raises InvalidField if there are more than MAX_COMPLAINTS
    errors, because listing all errors of a bad request may take seconds."""
    if (count := error.error_count()) > MAX_COMPLAINTS:
        raise InvalidField(f"{count} fields are wrong or unknown, too many to name them") from error
    return error.errors(include_url=False)


def fault_text(fault: ErrorDetails, kind: type[BaseModel] | None = None) -> str:
    """Return the text of a pydantic error in plain words. `kind` is the pydantic model that refused the values. If
    `kind` is given, the text about an unknown field suggests the field that was probably meant."""
    if (words := WORDS.get(fault["type"])) is None:
        return fault["msg"].removeprefix("Value error, ")
    text = words(fault.get("ctx", {}))
    if fault["type"] == "extra_forbidden" and kind is not None:
        *above, name = fault["loc"]
        if meant := get_close_matches(str(name), known_names(kind, above), n=1):
            text += f"; did you mean {meant[0]!r}?"
    return text


def first_fault(
    error: ValidationError, kind: type[BaseModel] | None = None, *, below: str = "", hint: str | None = None
) -> InvalidField:
    """Convert the first of pydantic's errors to an InvalidField. `kind` is the pydantic model that refused the values.
    `below` is the path of these values in the request. Raises InvalidField if there are more than MAX_COMPLAINTS
    errors."""
    first = complaints(error)[0]
    field = ".".join(map(str, (below, *first["loc"]) if below else first["loc"]))
    return InvalidField(fault_text(first, kind), field=field, hint=hint)


def known_names(kind: type[BaseModel], place: Sequence[int | str]) -> list[str]:
    """Return the names of the fields that an object inside the model `kind` may have. `place` is the path to this
    object, as in the `loc` of pydantic's errors."""
    models = [kind]
    for part in place:
        fields = [field.annotation for model in models for name, field in model.model_fields.items() if name == part]
        # A part that is not a field name is an index of a list, or pydantic's name for one alternative of a union.
        models = [model for annotation in fields for model in _models_in(annotation)] or models
    return sorted({name for model in models for name in model.model_fields})


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
