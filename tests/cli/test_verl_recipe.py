"""The variables of verl's recipe for its proxy, and the group `proxy_server` of its YAML, read as settings of a
service.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.cli.setting_options import read_settings
from outrider.config import RECIPE_VARIABLES, Config, all_settings
from outrider.errors import InvalidField

RECIPE = """\
remote_agent:
  name: swe-agent
proxy_server:
  host: 10.0.0.1
  port: 8080
  tool_format: qwen3_coder
  llm_proxy_ip: null
  debug: true
  session_dump_dir: null
data:
  prompt_key: instance_id
"""


def settings(file: Path | None = None, **flags: Any) -> Config:
    options = dict.fromkeys((path.replace(".", "__") for path, _, _ in all_settings()), None)
    return read_settings({**options, "config": file, **flags})


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RECIPE_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def shown(config: Config) -> tuple[str, int, float, str]:
    return config.host, config.port, config.verl_proxy.call_seconds, config.log_level


def test_variables_are_read_with_verl_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in (("HOST", "10.0.0.2"), ("PORT", "8081")):
        monkeypatch.setenv(f"PROXY_{name}", value)
    monkeypatch.setenv("RELAY_TIMEOUT", "60")
    monkeypatch.setenv("LOG_LEVEL", "WARNING")
    assert shown(settings(compat=["polar"])) == ("127.0.0.1", 8700, 300.0, "info")
    assert shown(settings(compat=["polar", "verl"])) == ("10.0.0.2", 8081, 60.0, "warning")
    toml = tmp_path / "outrider.toml"
    toml.write_text('compat = ["verl"]\nport = 9000\n')
    assert shown(settings(toml)) == ("10.0.0.2", 8081, 60.0, "warning"), "the environment goes over the file"
    assert settings(toml, compat=["prorl"]).port == 9000, "the flag chooses another system"
    monkeypatch.setenv("OUTRIDER_COMPAT", '["verl"]')
    assert settings().port == 8081
    monkeypatch.setenv("PROXY_PORT", "")
    assert settings().port == 8700


def test_flags_go_over_variables_and_variables_over_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = written(tmp_path, RECIPE)
    assert shown(settings(path, compat=["verl"])) == ("10.0.0.1", 8080, 300.0, "debug")
    monkeypatch.setenv("PROXY_PORT", "8081")
    monkeypatch.setenv("LOG_LEVEL", "error")
    assert shown(settings(path, compat=["verl"])) == ("10.0.0.1", 8081, 300.0, "error")
    monkeypatch.setenv("OUTRIDER_PORT", "8082")
    assert settings(path, compat=["verl"]).port == 8082, "Outrider's own variable goes first"
    config = settings(path, compat=["verl"], port="8083", verl_proxy__call_seconds="5")
    assert shown(config) == ("10.0.0.1", 8083, 5.0, "error")
    assert config.read_from == path, "no task may read the file"


def test_a_section_in_outriders_variable_goes_over_the_recipes_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAY_TIMEOUT", "20")
    for text, seconds in (('{"call_seconds": 10}', 10.0), ("{}", 20.0)):
        monkeypatch.setenv("OUTRIDER_VERL_PROXY", text)
        assert settings(compat=["verl"]).verl_proxy.call_seconds == seconds
    for text in ('{"call_seconds": 0}', "many"):
        monkeypatch.setenv("OUTRIDER_VERL_PROXY", text)
        with pytest.raises(InvalidField, match="from OUTRIDER_VERL_PROXY: "):
            settings(compat=["verl"])


@pytest.mark.parametrize(
    ("variable", "value"),
    [("PROXY_PORT", "high"), ("PROXY_PORT", "[1]"), ("RELAY_TIMEOUT", "0"), ("LOG_LEVEL", "trace")],
)
def test_an_error_names_the_variable(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(InvalidField, match=f"from {variable}: ") as caught:
        settings(compat=["verl"])
    assert caught.value.field == RECIPE_VARIABLES[variable]


@pytest.mark.parametrize(
    ("old", "new", "line", "field"),
    [
        ("port: 8080", "port: high", 5, "port"),
        ("port: 8080", "port: 70000", 5, "port"),
        ("port: 8080", "port: ${oc.env:PORT}", 5, "port"),
        ("debug: true", "debug: loud", 8, "debug"),
        ("debug: true", "dbg: true", 8, "dbg"),
        ("session_dump_dir: null", "session_dump_dir: /tmp/dumps", 9, "session_dump_dir"),
        ("host: 10.0.0.1", "host: ''", 4, "host"),
    ],
)
def test_an_error_names_the_line(tmp_path: Path, old: str, new: str, line: int, field: str) -> None:
    assert old in RECIPE
    with pytest.raises(InvalidField, match=f"recipe.yaml, line {line}: ") as caught:
        settings(written(tmp_path, RECIPE.replace(old, new)), compat=["verl"])
    assert caught.value.field == f"proxy_server.{field}"


@pytest.mark.parametrize("text", ["", "[1]", "a: [", "remote_agent: {}", "proxy_server: 3", "&a [*a]", "? {}\n: 1"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidField):
        settings(written(tmp_path, text), compat=["verl"])


def test_an_empty_group_changes_nothing(tmp_path: Path) -> None:
    empty = settings(written(tmp_path, "proxy_server:\n"), compat=["verl"])
    assert empty.model_dump() == settings(compat=["verl"]).model_dump()


def test_the_file_is_read_with_verl_alone(tmp_path: Path) -> None:
    for flags in ({}, {"compat": ["polar"]}):
        with pytest.raises(InvalidField, match="configuration of verl's recipe") as caught:
            settings(written(tmp_path, RECIPE), **flags)
        assert caught.value.field == "compat"
    assert settings(written(tmp_path, RECIPE), compat=["polar", "verl"]).port == 8080
