"""Settings: flags over environment over file over defaults, and errors that name the setting."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from outrider.config import SandboxesConfig, load_config, unknown_variables
from outrider.errors import InvalidField


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PORT", "TOKEN", "LANES", "LANES__RUN", "ENGINES", "SANDBOXES", "SANDBOXES__ALLOW"):
        monkeypatch.delenv(f"OUTRIDER_{name}", raising=False)


def test_the_defaults_are_for_one_machine() -> None:
    config = load_config({})
    assert (config.host, config.port, config.token) == ("127.0.0.1", 8700, None)


def test_flags_win_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "outrider.toml"
    file.write_text("port = 1\nhost = '127.0.0.2'\n[lanes]\nrun = 2\ninit = 3\n")
    monkeypatch.setenv("OUTRIDER_PORT", "4")
    monkeypatch.setenv("OUTRIDER_LANES__RUN", "5")
    config = load_config({"port": 6, "host": None, "lanes.run": None}, file=file)
    assert (config.port, config.host, config.lanes.run, config.lanes.init) == (6, "127.0.0.2", 5, 3)


def test_lists_come_from_the_environment_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_ENGINES", '[{"kind": "vllm", "url": "http://127.0.0.1:8000"}]')
    assert [engine.kind for engine in load_config({}).engines] == ["vllm"]
    monkeypatch.setenv("OUTRIDER_SANDBOXES__ALLOW", '["/one", "/two"]')
    assert load_config({}).sandboxes.allow == (Path("/one"), Path("/two"))


def test_a_flag_adds_to_a_list_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, flags = tmp_path / "outrider.toml", {"plugins.allow": ["other"]}
    monkeypatch.setenv("OUTRIDER_PLUGINS__ALLOW", '["mine"]')
    assert load_config(flags).plugins.allow == ("mine", "other")
    file.write_text("plugins.allow = ['mine']")
    for text, given in (("mine", flags), ("*", flags), ("*", {})):
        monkeypatch.setenv("OUTRIDER_PLUGINS__ALLOW", text)
        with pytest.raises(InvalidField, match="from OUTRIDER_PLUGINS__ALLOW") as refused:
            load_config(given, file=file)
        assert "JSON" in (refused.value.hint or "")
    monkeypatch.delenv("OUTRIDER_PLUGINS__ALLOW")
    for text in ("5", '"mine"', "[5]"):
        file.write_text(f"plugins.allow = {text}")
        with pytest.raises(InvalidField, match=r"from \S+outrider\.toml"):
            load_config(flags, file=file)


def test_a_section_and_a_setting_in_it_may_both_be_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_LANES__RUN", "5")
    monkeypatch.setenv("OUTRIDER_LANES", '{"run": 2, "init": 3}')
    assert (load_config({}).lanes.run, load_config({}).lanes.init) == (5, 3)
    monkeypatch.setenv("OUTRIDER_LANES", "many")
    assert load_config({}).lanes.run == 5


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_TOKEN", "")
    monkeypatch.setenv("OUTRIDER_PORT", "")
    assert (load_config({}).token, load_config({}).port) == (None, 8700)


def test_an_error_says_where_the_setting_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "outrider.toml"
    file.write_text("[lanes]\ninit = 0")
    with pytest.raises(InvalidField, match=r"outrider\.toml"):
        load_config({"lanes": {"run": 1}}, file=file)
    monkeypatch.setenv("OUTRIDER_PORT", "high")
    with pytest.raises(InvalidField, match="from OUTRIDER_PORT"):
        load_config({}, file=None)
    with pytest.raises(InvalidField, match="from flags"):
        load_config({"port": -1})


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("no_such = 1", "no_such"),
        ("port = 70000", "port"),
        ("[lanes]\nrun = 0", "lanes.run"),
        ("[[engines]]\nurl = 'x'", "engines.0.kind"),
        ("[[frozen]]\nturns = 3", "frozen.0.name"),
        ("[[frozen]]\nname = 'judge'\n[[frozen.engines]]\nurl = 'x'", "frozen.0.engines.0.kind"),
        ("not toml", "config"),
    ],
)
def test_a_bad_setting_is_named(tmp_path: Path, text: str, field: str) -> None:
    file = tmp_path / "outrider.toml"
    file.write_text(text)
    with pytest.raises(InvalidField) as refused:
        load_config({}, file=file)
    assert refused.value.field == field


def test_a_missing_file_is_an_error() -> None:
    with pytest.raises(InvalidField, match="cannot read"):
        load_config({}, file=Path("no-such.toml"))


def test_a_misspelt_variable_is_told_with_the_one_that_was_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OUTRIDER_LANE__RUN", "OUTRIDER_TOKENS", "OUTRIDER_XYZZY", "OUTRIDER_LANES__RUN", "OUTRIDER_CALL"):
        monkeypatch.setenv(name, "5")
    monkeypatch.setenv("OUTRIDER_URL", "http://127.0.0.1:1")
    told = {unknown.name: unknown.meant for unknown in unknown_variables()}
    assert told == {
        "OUTRIDER_LANE__RUN": "OUTRIDER_LANES__RUN",
        "OUTRIDER_TOKENS": "OUTRIDER_TOKEN",
        "OUTRIDER_XYZZY": None,
    }


@pytest.mark.parametrize("gpus", [(), ("0", "3"), ("GPU-8f2a-11", "amd.com/gpu=0"), ("nvidia.com/gpu=1:0",)])
def test_gpus_are_named_as_their_makers_do(gpus: tuple[str, ...]) -> None:
    assert SandboxesConfig(gpus=gpus).gpus == gpus


@pytest.mark.parametrize(
    "gpus",
    [("0", "0"), ("0", "nvidia.com/gpu=0"), ("all",), ("nvidia.com/gpu=all",), ("none",), ("",), ("a b",), ("/x=1",)],
)
def test_what_is_not_the_name_of_one_gpu_is_refused(gpus: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError):
        SandboxesConfig(gpus=gpus)


def test_gpus_of_the_environment_are_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_SANDBOXES__GPUS", '["0", "2"]')
    assert load_config({}).sandboxes.gpus == ("0", "2")
    monkeypatch.setenv("OUTRIDER_SANDBOXES__GPUS", "[]")
    assert load_config({}).sandboxes.gpus == ()
