"""docs/dialects.md lists every field of the code's tables, with its treatment and the reason."""

from __future__ import annotations

import pytest

from outrider.dialects.field_policy import SAMPLERS, SERVER_EXTENSIONS, TABLES, FieldRule, Treatment
from outrider.tokens.rendering.renderer import WINDOW_FAMILIES

from .pages import code, page

PAGE = page("docs/dialects.md")
Rows = set[tuple[str, str, str]]


def written(first: str) -> Rows:
    """Return the rows of the table whose first column is `first`, one for each field."""
    [found] = PAGE.tables(first)
    return {(code(name), told, why) for names, told, why in found.rows for name in names.split(", ")}


def held(rows: tuple[FieldRule, ...]) -> Rows:
    return {(row.name, row.treatment.value, row.reason) for row in rows}


def test_samplers_and_extensions_are_there() -> None:
    assert written("Sampler") == held(SAMPLERS)
    assert written("Extension") == held(SERVER_EXTENSIONS)


@pytest.mark.parametrize(
    ("dialect", "first"),
    [("chat", "Chat field"), ("responses", "Responses field"), ("messages", "Messages field")],
)
def test_every_field_of_a_dialect_is_there(dialect: str, first: str) -> None:
    assert written(first) | held(SAMPLERS) | held(SERVER_EXTENSIONS) == held(TABLES[dialect])
    assert not written(first) & (held(SAMPLERS) | held(SERVER_EXTENSIONS))


def test_every_field_of_googles_is_there_but_the_samplers() -> None:
    missing = held(TABLES["gemini"]) - written("Gemini field")
    assert written("Gemini field") <= held(TABLES["gemini"])
    assert {told for _, told, _ in missing} == {Treatment.REFUSED.value}
    names = {name.removeprefix("generationConfig.") for name, _, _ in missing}
    shared = {row.name.replace("_", "").lower() for row in SAMPLERS}
    assert {name for name in names if name.lower() not in shared} <= set(PAGE.spans)


def test_every_treatment_and_switchable_family_is_named() -> None:
    assert all(f"**{treatment.value}**" in PAGE.text for treatment in Treatment)
    assert set(PAGE.spans) >= WINDOW_FAMILIES
