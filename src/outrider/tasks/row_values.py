"""Looks up the values in one row of a data set, by the paths of columns and fields. The module reads no files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from outrider.text_files import check_depth


def value_at(row: Mapping[str, Any], path: str) -> Any:
    """Return the value of a column, or of a field within a column, such as `reward_model.ground_truth` or
    `prompt.0.content`. In a list, a number is the position of an item, from 0; negative numbers count from the end. A
    string within the path is parsed as JSON. Returns None if there is no such field. If a column's own name is the
    whole path, with its dots, this column takes precedence."""
    if row.get(path) is not None:
        return row[path]
    value: Any = row
    for part in path.split("."):
        if isinstance(value, str):
            try:
                value = json.loads(value)
                check_depth(value)
            except (ValueError, RecursionError):
                return None
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list) and re.fullmatch(r"-?\d{1,9}", part):
            value = value[int(part)] if -len(value) <= int(part) < len(value) else None
        else:
            return None
    return value


def known_columns(row: Mapping[str, Any], path: str = "") -> str:
    """Return the hint for an error about a missing column or field: the names that exist."""
    column, inner, _ = path.partition(".")
    within = row.get(column)
    if inner and isinstance(within, Mapping):
        return f"{column} has: {', '.join(sorted(map(str, within))) or 'none'}"
    return f"it has: {', '.join(sorted(name for name, value in row.items() if value is not None)) or 'none'}"
