"""Chooses how to read a YAML file of settings, which is a topology of Polar or a configuration of verl's recipe."""

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
"""Patterns that recognise the two kinds of files by a line that only this kind has."""


def yaml_reader(systems: Sequence[Any]) -> Callable[[Path], dict[str, Any]]:
    """Return a function that reads a YAML file. `systems` are the values of `--compat` in the flags and the
    environment. A configuration of verl's recipe is refused unless `systems` has `verl`. A topology of Polar needs no
    flag, because its own settings choose `polar`."""

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
