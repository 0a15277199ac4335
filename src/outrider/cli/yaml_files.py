"""Chooses the reader for a YAML file with settings: a topology of Polar, or a configuration of verl's recipe."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from outrider.cli.polar_topology import read_topology
from outrider.cli.verl_recipe import FIELD, MOST, read_recipe
from outrider.errors import InvalidField
from outrider.text_files import read_text_file

RECIPE, TOPOLOGY = (re.compile(f"^{name}:", re.MULTILINE) for name in ("proxy_server", "gateway"))
"""Patterns of a line of verl's recipe, and of a line of a topology of Polar."""


def yaml_reader(systems: Sequence[Any]) -> Callable[[Path], dict[str, Any]]:
    """Return the reader of a YAML file. `systems` are the values of `--compat` from the flags and the environment. The
    reader refuses a configuration of verl's recipe unless `systems` has `verl`. A topology of Polar needs no flag,
    because its settings choose `polar`."""

    def read(path: Path) -> dict[str, Any]:
        text = read_text_file(path, field=FIELD, limit=MOST, what="YAML file")
        if "verl" in systems:
            return read_topology(path) if TOPOLOGY.search(text) and not RECIPE.search(text) else read_recipe(path)
        if RECIPE.search(text):
            raise InvalidField(
                f"{path} is a configuration of verl's recipe, whose interface is not served",
                field="compat",
                hint="add --compat verl",
            )
        return read_topology(path)

    return read
