"""Settings of Polar's Slime bridge are refused by name, with the setting of Outrider that replaces them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from outrider.errors import InvalidField
from outrider.trainers.polar_settings import INSTEAD, refuse_polar_settings
from outrider.trainers.slime import SlimeSettings


@pytest.mark.parametrize("name", sorted(INSTEAD))
def test_each_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidField) as caught:
        refuse_polar_settings(SimpleNamespace(**{name: 1}))
    assert (caught.value.field, caught.value.hint) == (name, INSTEAD[name])


def test_settings_that_are_off_are_not_refused() -> None:
    refuse_polar_settings(SimpleNamespace(polar_fully_async=False, polar_min_complete_accept_fraction=0, other="x"))


def test_what_is_to_be_set_instead_exists() -> None:
    named = {
        word.rstrip(",;").split(".")[1]
        for hint in INSTEAD.values()
        for word in hint.split()
        if word.startswith("outrider.")
    }
    assert named - {"trainers"} <= set(SlimeSettings.model_fields)
