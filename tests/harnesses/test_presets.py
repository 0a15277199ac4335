import msgspec
import pytest

from outrider.errors import InvalidField
from outrider.harnesses.presets import Preset, checked_options, load_preset, preset_names


def test_the_shipped_presets_all_load():
    assert {"mini-swe-agent", "pi", "shell"} <= set(preset_names())
    for name in preset_names():
        preset = load_preset(name)
        assert preset.name == name
        assert preset.summary
        assert preset.dialects


@pytest.mark.parametrize("name", ["nosuch", "", "../presets/pi", "pi.toml", "Pi"])
def test_an_unknown_preset_names_the_known_ones(name):
    with pytest.raises(InvalidField) as caught:
        load_preset(name)
    assert caught.value.field == "task.harness.preset"
    assert "mini-swe-agent, pi, shell" in (caught.value.hint or "")


def test_installed_packages_are_pinned():
    for name in preset_names():
        if install := load_preset(name).install:
            assert install.packages[0].endswith(install.version)
            assert any("{prefix}" in part for part in install.check)


def test_options_get_their_defaults():
    assert checked_options(load_preset("pi"), {"max_tokens": 9}) == {
        "reasoning": True,
        "context_tokens": 131072,
        "max_tokens": 9,
    }


@pytest.mark.parametrize(
    ("preset", "options", "field"),
    [
        ("pi", {"max_tokens": "9"}, "task.harness.options.max_tokens"),
        ("pi", {"max_tokens": True}, "task.harness.options.max_tokens"),
        ("pi", {"max_tokens": 1.5}, "task.harness.options.max_tokens"),
        ("pi", {"reasoning": 1}, "task.harness.options.reasoning"),
        ("pi", {"speed": 1}, "task.harness.options.speed"),
        ("shell", {}, "task.harness.options.script"),
        ("shell", {"script": None}, "task.harness.options.script"),
        ("shell", {"script": ["ls"]}, "task.harness.options.script"),
    ],
)
def test_wrong_options_are_named(preset, options, field):
    with pytest.raises(InvalidField) as caught:
        checked_options(load_preset(preset), options)
    assert caught.value.field == field


def test_a_preset_that_uses_an_undeclared_option_does_not_load():
    with pytest.raises(msgspec.ValidationError, match="undeclared options: x"):
        msgspec.convert({"name": "p", "summary": "s", "command": ["{option.x}"]}, Preset)
