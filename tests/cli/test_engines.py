"""`outrider engines` against a live service, and the texts that describe engines."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cli.world import Cli
from outrider.cli.engine_option import ADDRESSED, KIND_HELP, parse_engine
from outrider.cli.tables import engine_table
from outrider.config import FrozenConfig
from outrider.doctor import SERVERS
from outrider.errors import InvalidField
from outrider.plugins import BUILTINS
from outrider.schemas import EngineStatus
from outrider.trajectory import TokenMode
from support.service import running_service


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("vllm=http://h:1", {"kind": "vllm", "url": "http://h:1"}),
        ("openai=http://h:1/v1?a=b", {"kind": "openai", "url": "http://h:1/v1?a=b"}),
        ("embedded=models/tiny", {"kind": "embedded", "model": "models/tiny"}),
        ("relay=trainer", {"kind": "relay", "name": "trainer"}),
        ("my.pkg:Engine=http://h", {"kind": "my.pkg:Engine", "url": "http://h"}),
    ],
)
def test_an_engine_is_named_by_kind_and_place(text: str, spec: dict[str, Any]) -> None:
    assert parse_engine(text) == spec


def test_a_script_is_read_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "script.json").write_text(json.dumps({"replies": ["a"]}))
    spec = parse_engine(f"scripted={tmp_path / 'script.json'}")
    assert spec == {"kind": "scripted", "options": {"replies": ["a"]}}


@pytest.mark.parametrize("text", ["vllm", "vllm=", "=http://h", "scripted=/nowhere.json", f"scripted={__file__}"])
def test_what_names_no_engine_names_its_field(text: str) -> None:
    with pytest.raises(InvalidField) as caught:
        parse_engine(text, field="engine")
    assert caught.value.field == "engine"


@pytest.mark.parametrize("kind", sorted(ADDRESSED))
def test_an_address_without_a_scheme_is_refused(kind: str) -> None:
    with pytest.raises(InvalidField, match="has no scheme") as refused:
        parse_engine(f"{kind}=10.0.0.1:8000")
    assert refused.value.hint == f"write {kind}=http://10.0.0.1:8000"
    assert f"{kind}=URL" in KIND_HELP


def test_each_built_in_engine_is_reached_in_a_known_way() -> None:
    assert set(BUILTINS["engine"]) - ADDRESSED == {"embedded", "relay", "scripted", "verl-workers"}
    assert SERVERS.keys() == ADDRESSED


async def test_engines_come_and_go(cli: Cli, tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"replies": ["a<|im_end|>"]}))
    async with running_service(tmp_path=tmp_path) as (_, url):
        added = await cli("engines", "add", f"scripted={script}", "--name", "spare", "--url", url, "--json")
        drained = await cli("engines", "drain", "scripted", "--url", url, "--json")
        shown = await cli("engines", "list", "--url", url)
        removed = await cli("engines", "rm", "scripted", "--url", url, "--json")
        again = await cli("engines", "rm", "scripted", "--url", url)
    assert [engine["name"] for engine in added.document["engines"]] == ["spare"]
    assert {engine["name"]: engine["draining"] for engine in drained.document["engines"]} == {
        "scripted": True,
        "spare": False,
    }
    assert "draining" in shown.out
    assert [engine["name"] for engine in removed.document["engines"]] == ["spare"]
    assert (again.code, again.err.splitlines()[0]) == (2, "error: name: no engine 'scripted'")


async def test_an_engine_is_added_to_the_model_that_it_serves(cli: Cli, tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"replies": ["a<|im_end|>"]}))
    async with running_service(tmp_path=tmp_path, frozen=(FrozenConfig(name="judge"),)) as (_, url):
        added = await cli("engines", "add", f"scripted={script}", "--serves", "judge", "--url", url, "--json")
        wrong = await cli("engines", "add", f"scripted={script}", "--serves", "juge", "--url", url)
        shown = await cli("engines", "list", "--url", url)
        status = await cli("status", "--url", url)
        name = added.document["engines"][0]["name"]
        drained = await cli("engines", "drain", name, "--url", url, "--json")
        removed = await cli("engines", "rm", name, "--url", url, "--json")
    assert added.document["engines"][0]["serves"] == "judge"
    assert (wrong.code, wrong.err.splitlines()[0]) == (2, "error: serves: there is no frozen model 'juge'")
    assert {line.split()[1] for line in shown.out.splitlines() if name in line} == {"judge"}
    assert "model policy, judge (frozen)" in status.out
    assert {engine["name"]: engine["draining"] for engine in drained.document["engines"]} == {
        "scripted": False,
        name: True,
    }
    assert [engine["name"] for engine in removed.document["engines"]] == ["scripted"]


def test_a_suspect_engine_is_shown_with_the_reason() -> None:
    status = EngineStatus(
        name="odd",
        kind="vllm",
        url=None,
        mode=TokenMode.TOKENS,
        ok=True,
        detail="",
        draining=False,
        in_flight=0,
        sessions=0,
        assigned_tokens=0,
        generated_tokens=0,
        failures=0,
        suspect="engine 'odd' sampled the id -1",
        misbehaved=1,
        version=0,
        model=None,
        context_tokens=None,
    )
    shown = io.StringIO()
    Console(width=200, file=shown).print(engine_table([status]))
    assert "suspect" in shown.getvalue()
    assert "sampled the id -1" in shown.getvalue()


async def test_an_engine_that_does_not_answer_is_a_failure(cli: Cli, tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url):
        ran = await cli("engines", "add", "vllm=http://127.0.0.1:9", "--url", url)
        unknown = await cli("engines", "add", "llama=http://127.0.0.1:9", "--url", url)
    assert ran.code == 1
    assert ran.err.startswith("error: ")
    assert (unknown.code, unknown.err.splitlines()[0]) == (2, "error: kind: unknown engine 'llama'")
