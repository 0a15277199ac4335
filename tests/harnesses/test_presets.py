"""Presets of agent programs: loading, pins, options and dialects."""

from typing import Any

import msgspec
import pytest

from outrider.errors import InvalidField
from outrider.harnesses.presets import Install, Preset, checked_options, load_preset, preset_names


def test_the_shipped_presets_all_load() -> None:
    assert {"mini-swe-agent", "pi", "shell"} <= set(preset_names())
    for name in preset_names():
        preset = load_preset(name)
        assert preset.name == name
        assert preset.summary
        assert preset.dialects


@pytest.mark.parametrize("name", ["nosuch", "", "../presets/pi", "pi.toml", "Pi"])
def test_an_unknown_preset_names_the_known_ones(name: str) -> None:
    with pytest.raises(InvalidField) as caught:
        load_preset(name)
    assert caught.value.field == "task.harness.preset"
    assert caught.value.hint == f"known: {', '.join(preset_names())}"


def test_installed_packages_are_pinned() -> None:
    for name in preset_names():
        if install := load_preset(name).install:
            assert install.packages[0].endswith(install.version)
            assert any("{prefix}" in part for part in install.check)


def test_options_get_their_defaults() -> None:
    assert checked_options(load_preset("pi"), {"max_tokens": 9}) == {
        "thinking": True,
        "context_tokens": 131072,
        "max_tokens": 9,
    }


@pytest.mark.parametrize(
    ("preset", "options", "field"),
    [
        ("pi", {"max_tokens": "9"}, "task.harness.options.max_tokens"),
        ("pi", {"max_tokens": True}, "task.harness.options.max_tokens"),
        ("pi", {"max_tokens": 1.5}, "task.harness.options.max_tokens"),
        ("pi", {"thinking": 1}, "task.harness.options.thinking"),
        ("pi", {"speed": 1}, "task.harness.options.speed"),
        ("pi", {"dialect": "chat"}, "task.harness.options.dialect"),
        ("shell", {}, "task.harness.options.script"),
        ("shell", {"script": None}, "task.harness.options.script"),
        ("shell", {"script": ["ls"]}, "task.harness.options.script"),
    ],
)
def test_wrong_options_are_named(preset: str, options: Any, field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        checked_options(load_preset(preset), options)
    assert caught.value.field == field


def test_a_preset_of_several_dialects_has_an_option_for_them() -> None:
    preset = load_preset("opencode")
    assert checked_options(preset, {})["dialect"] == preset.dialects[0] == "chat"
    assert checked_options(preset, {"dialect": "gemini"})["dialect"] == "gemini"
    with pytest.raises(InvalidField) as caught:
        checked_options(preset, {"dialect": "morse"})
    assert caught.value.field == "task.harness.options.dialect"
    assert caught.value.hint == f"one of: {', '.join(preset.dialects)}"
    assert "dialect" not in load_preset("pi").options


def test_every_dialect_has_all_the_words_that_are_used() -> None:
    texts = {"name": "p", "summary": "s", "command": ["x", "{dialect.url}"], "dialects": ["chat", "gemini"]}
    msgspec.convert(texts | {"words": {"chat": {"url": "1"}, "gemini": {"url": "2"}}}, Preset)
    with pytest.raises(msgspec.ValidationError, match="has no words for: gemini"):
        msgspec.convert(texts | {"words": {"chat": {"url": "1"}, "gemini": {"uri": "2"}}}, Preset)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "npm", "packages": ["x@1"], "node": "22.20.0", "python": "3.12"},
        {"kind": "pip", "packages": ["x==1"], "python": "3.12.1"},
        {"kind": "pip", "packages": ["x==1"], "node": "22.20.0"},
        {"kind": "npm", "packages": ["x@1"]},
    ],
)
def test_an_install_that_cannot_be_does_not_load(wrong: Any) -> None:
    with pytest.raises(msgspec.ValidationError, match="only"):
        msgspec.convert({"version": "1", "check": ["x"], **wrong}, Install)


def test_a_preset_that_uses_an_undeclared_option_does_not_load() -> None:
    with pytest.raises(msgspec.ValidationError, match="undeclared options: x"):
        msgspec.convert({"name": "p", "summary": "s", "command": ["{option.x}"]}, Preset)
