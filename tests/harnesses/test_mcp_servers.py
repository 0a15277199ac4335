"""MCP servers and skills of agent programs: the files that are written, and the settings that are refused."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
from pydantic import ValidationError

from outrider.errors import HarnessError, InvalidField
from outrider.harnesses.command import CommandHarness
from outrider.harnesses.factory import check_written, make_harness
from outrider.harnesses.mcp_servers import McpSettings, check_reachable, with_servers
from outrider.harnesses.presets import ConfigFile, Option, Preset, SkillSettings, load_preset, preset_names
from outrider.sandbox.runtimes.base import Runtime
from outrider.sessions.attempt import secrets_of
from outrider.spec import EvaluatorSpec, HarnessSpec, McpServer, RuntimeSpec, TaskSpec, Write

from .conftest import context

ODD = 'a "b" \\ {api_key} $HOME é\x7f\n\x01'
STDIO = McpServer(name="files-1", transport="stdio", command="serve it", args=[ODD, ""], env={"TOKEN": ODD})
WEB = McpServer.model_validate(
    {"name": "web", "transport": "streamable-http", "url": "http://127.0.0.1:8000/mcp", "headers": {"X-Key": 'k"1'}}
)
WITH_SERVERS = [name for name in preset_names() if load_preset(name).mcp]
WITH_SKILLS = [name for name in preset_names() if load_preset(name).skills]
SKILL = "---\nname: counting\ndescription: How to count.\n---\nOne, two.\n"


def written(name: str, text: str, servers: list[McpServer]) -> Any:
    """Add servers to the text of a program's file. Returns the file's data, and the servers' entries by their names in
    the file."""
    settings = load_preset(name).mcp
    assert settings is not None
    file = with_servers(text, settings, servers)
    data = tomllib.loads(file) if settings.file.endswith(".toml") else json.loads(file)
    entries: Any = data
    for key in settings.key.split("."):
        entries = entries[key]
    return data, {entry["name"]: entry for entry in entries} if settings.listed else entries


def values(value: Any) -> list[Any]:
    """Return the leaves of a value: everything in its tables and lists, at any depth."""
    if isinstance(value, dict):
        return [each for inner in value.values() for each in values(inner)]
    return [each for inner in value for each in values(inner)] if isinstance(value, list) else [value]


@pytest.mark.parametrize("name", WITH_SERVERS)
def test_every_presets_file_gets_the_servers_as_they_are(name: str) -> None:
    preset = load_preset(name)
    assert preset.mcp is not None
    [file] = [file for file in preset.files_with([STDIO]) if file.path == preset.mcp.file]
    text = file.text if "{option" not in file.text else ""
    servers = [server for server in (STDIO, WEB) if server.transport in preset.mcp.entries]
    data, table = written(name, text, servers)
    names = [preset.mcp.name.format(server=server.name) for server in servers]
    assert list(table) == names
    assert {"serve it", ODD, ""} <= set(values(table[names[0]]))
    if WEB in servers:
        web = values(table[names[1]])
        assert {"http://127.0.0.1:8000/mcp", 'k"1'} <= set(web)
        assert not any("{" in each for each in web if isinstance(each, str)), "a form has other words"
    if text:
        before = tomllib.loads(text) if preset.mcp.file.endswith(".toml") else json.loads(text)
        assert {key: value for key, value in data.items() if key != preset.mcp.key} == before


def test_servers_are_added_to_the_servers_and_tables_of_a_file() -> None:
    data, table = written("openclaw", '{"mcp": {"a": 1, "servers": {"own": {"command": "x"}}}, "b": 2}', [STDIO])
    assert (list(table), data["mcp"]["a"], data["b"]) == (["own", "files-1"], 1, 2)
    _, table = written("mistral-vibe", '[[mcp_servers]]\nname = "own"\n[other]\na = 1\n', [STDIO, WEB])
    assert list(table) == ["own", "files-1", "web"]
    assert written("hermes", '{"mcp_servers": {}}', [STDIO])[1]["task_files-1"]["args"] == [ODD, ""]


def test_forms_with_and_without_a_name_do_not_mix() -> None:
    forms: Any = {"stdio": {"name": "{name}"}, "sse": {"url": "{url}"}}
    with pytest.raises(ValueError, match="all forms"):
        McpSettings(file="a.json", key="a", tool="{tool}", entries=forms)


def test_the_known_forms() -> None:
    assert written("claude-code", "", [STDIO])[1]["files-1"] == {
        "type": "stdio",
        "command": "serve it",
        "args": [ODD, ""],
        "env": {"TOKEN": ODD},
    }
    assert written("opencode", "", [STDIO])[1]["files-1"]["command"] == ["serve it", ODD, ""]
    data, table = written("codex", 'model = "m"\n[a.b]\nc = 1\n', [WEB])
    assert (data["a"], table["web"]["http_headers"]) == ({"b": {"c": 1}}, {"X-Key": 'k"1'})


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"name": "a b", "transport": "stdio", "command": "x"}, "name"),
        ({"name": "", "transport": "stdio", "command": "x"}, "name"),
        ({"name": "a" * 65, "transport": "stdio", "command": "x"}, "name"),
        ({"name": "a", "transport": "http", "url": "http://localhost"}, "transport"),
        ({"name": "a", "transport": "websocket", "url": "http://localhost"}, "transport"),
        ({"name": "a", "transport": "stdio"}, "command"),
        ({"name": "a", "transport": "sse", "command": "x"}, "url"),
        ({"name": "a", "transport": "stdio", "command": "x", "url": "http://localhost"}, "url"),
        ({"name": "a", "transport": "sse", "url": "http://localhost", "env": {"A": "b"}}, "env"),
        ({"name": "a", "transport": "sse", "url": "file:///x"}, "url"),
        ({"name": "a", "transport": "sse", "url": "http://localhost", "headers": {"A": "b\r\nC: d"}}, "headers"),
        ({"name": "a", "transport": "sse", "url": "http://localhost", "headers": {"A:": "b"}}, "headers"),
        ({"name": "a", "transport": "stdio", "command": "x", "args": ["\0"]}, "args"),
        ({"name": "a", "transport": "stdio", "command": "x", "args": ["y" * (1 << 18)]}, "maximum"),
        ({"name": "a", "transport": "stdio", "command": "x", "cwd": "/"}, "cwd"),
    ],
)
def test_wrong_servers_are_refused_by_name(given: Any, word: str) -> None:
    with pytest.raises(ValidationError, match=word):
        HarnessSpec.model_validate({"preset": "codex", "mcp_servers": [given]})


@pytest.mark.parametrize(
    "given",
    [
        {"mcp_servers": [STDIO, STDIO.model_copy(update={"name": "FILES-1"})]},
        {"skills": ["a", "./a/"]},
        {"skills": ["/"]},
        {"skills": ["."]},
        {"skills": ["../a"]},
    ],
)
def test_repeated_and_odd_names_are_refused(given: Any) -> None:
    with pytest.raises(ValidationError):
        HarnessSpec(preset="codex", **given)
    with pytest.raises(ValidationError, match="take no mcp_servers or skills"):
        HarnessSpec.model_validate({"external": {}, "skills": ["a"]})


@pytest.mark.parametrize(
    ("harness", "field", "hint"),
    [
        (HarnessSpec(preset="pi", mcp_servers=[STDIO]), "task.harness.mcp_servers", "claude-code"),
        (HarnessSpec(preset="mini-swe-agent", mcp_servers=[STDIO]), "task.harness.mcp_servers", "hermes"),
        (HarnessSpec(preset="mini-swe-agent", skills=["a"]), "task.harness.skills", "pi"),
        (HarnessSpec(command=["x"], mcp_servers=[STDIO]), "task.harness.mcp_servers", "harness.files"),
        (HarnessSpec(command=["x"], skills=["a"]), "task.harness.skills", "prepare"),
        (
            HarnessSpec(preset="codex", mcp_servers=[STDIO, WEB.model_copy(update={"transport": "sse"})]),
            "task.harness.mcp_servers.1.transport",
            "stdio, streamable-http",
        ),
    ],
)
def test_what_a_harness_cannot_be_given_is_refused_with_a_hint(harness: HarnessSpec, field: str, hint: str) -> None:
    with pytest.raises(InvalidField) as caught:
        make_harness(harness)
    assert caught.value.field == field
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.9.9.9"])
def test_a_server_on_the_sandboxs_loopback_is_reachable(host: str) -> None:
    check_reachable([STDIO, McpServer.model_validate({"name": "a", "transport": "sse", "url": f"http://{host}:1/"})])


@pytest.mark.parametrize("host", ["mcp-server", "10.0.0.1", "localhost.evil.org", "127.0.0.1.evil.org", "0.0.0.0"])
def test_a_server_elsewhere_is_refused(host: str) -> None:
    with pytest.raises(InvalidField) as caught:
        check_reachable(
            [STDIO, McpServer.model_validate({"name": "a", "transport": "sse", "url": f"http://{host}:1/"})]
        )
    assert caught.value.field == "task.harness.mcp_servers.1.url"


@pytest.mark.parametrize(
    ("url", "destination", "reachable"),
    [
        ("http://mcp.test:3000/mcp", "mcp.test:3000", True),
        ("http://MCP.test/mcp", "*.test", True),
        ("https://mcp.test/mcp", "mcp.test:443", True),
        ("https://mcp.test/mcp", "mcp.test:80", False),
        ("http://mcp.test:3000/mcp", "mcp.test", False),
        ("http://mcp.test:3000/mcp", "mirror:pip", False),
        ("http://0x7f000001:3000/mcp", "*:*", True),  # pydantic writes the address as 127.0.0.1
        ("http://[::1]:3000/mcp", "mcp.test", True),
    ],
)
def test_a_server_elsewhere_must_be_a_destination_of_the_agents_network(
    url: str, destination: str, reachable: bool
) -> None:
    """Otherwise the program would run without the server, and its bad grade would be no fault of its own."""
    server = McpServer.model_validate({"name": "a", "transport": "sse", "url": url})
    if reachable:
        check_reachable([server], [destination])
        return
    with pytest.raises(InvalidField, match="does not include that place") as caught:
        check_reachable([server], [destination])
    assert caught.value.field == "task.harness.mcp_servers.0.url"
    assert str(server.url.port if server.url else 0) in (caught.value.hint or "")


def a_task(harness: HarnessSpec, to: str, **env: str) -> TaskSpec:
    runtime = RuntimeSpec(prepare=[Write(write="", to=to)], env=env)
    return TaskSpec(instruction="x", harness=harness, runtime=runtime, evaluator=EvaluatorSpec(run="true"))


@pytest.mark.parametrize(
    ("harness", "to", "env"),
    [
        (HarnessSpec(preset="codex"), "/root/.codex/config.toml", {}),
        (HarnessSpec(preset="codex"), "/root/.//.codex/config.toml", {}),
        (HarnessSpec(preset="gemini-cli"), "/home/a/.gemini/settings.json", {"HOME": "/home/a"}),
        (HarnessSpec(preset="claude-code", mcp_servers=[STDIO]), "/root/.claude.json", {}),
        (HarnessSpec(preset="openhands", env={"HOME": "/work"}), ".openhands/agent_settings.json", {}),
    ],
)
def test_a_prepare_step_that_writes_a_presets_file_is_refused(harness: HarnessSpec, to: str, env: Any) -> None:
    with pytest.raises(InvalidField) as caught:
        check_written(a_task(harness, to, **env))
    assert caught.value.field == "task.runtime.prepare.0.to"
    assert "mcp_servers" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("harness", "to"),
    [
        (HarnessSpec(preset="claude-code"), "/root/.claude.json"),
        (HarnessSpec(preset="claude-code"), ".mcp.json"),
        (HarnessSpec(preset="codex"), ".codex/config.toml"),
        (HarnessSpec(command=["x"], files={".codex/config.toml": ""}), "/root/.codex/config.toml"),
    ],
)
def test_other_files_may_be_written(harness: HarnessSpec, to: str) -> None:
    check_written(a_task(harness, to))


ALLOWED = '{"allowed": {option.allowed_tools.list}}'
PROGRAM = Preset(
    name="p",
    summary="s",
    command=("sh", "-c", 'cat "$HOME/.p/settings.json"; ls -R "$HOME/.p/skills"; echo "$SEEN$KNOWN"'),
    files=(ConfigFile(path=".p/settings.json", text='{"url": "{base_url}", "servers": {"own": {}}}'),),
    mcp=McpSettings(
        file=".p/settings.json",
        key="servers",
        tool="{server}.{tool}",
        entries={"stdio": {"run": "{argv}"}},
        env={"SEEN": "servers"},
        allowed="{server}:*",
        text='{"with": "servers"}',
    ),
    options={"allowed_tools": Option(type="names", optional=True, files={".p/settings.json": ALLOWED})},
    skills=SkillSettings(folder=".p/skills", env={"KNOWN": "skills"}),
    answer="stdout",
)
ECHO = McpServer(name="echo", transport="stdio", command="echo", args=["{api_key}"])


def program(**given: Any) -> CommandHarness:
    return CommandHarness(PROGRAM, {}, {}, guarded=True, **given)


async def test_servers_are_merged_into_the_presets_file_and_skills_copied(sandbox: Runtime) -> None:
    await sandbox.write("given/counting/SKILL.md", SKILL.encode())
    await sandbox.write("given/counting/scripts/count.sh", b"echo 1", executable=True)
    await sandbox.write("single/SKILL.md", SKILL.encode())
    harness, one = program(servers=[ECHO], skills=["given", "single/"]), context(sandbox, HarnessSpec(command=["x"]))
    await harness.install(one)
    await harness.install(one)  # as in a later step: the harness's own files may exist
    answer = (await harness.run(one)).answer or ""
    settings, end = json.JSONDecoder().raw_decode(answer)
    assert settings["servers"] == {"own": {}, "echo": {"run": ["echo", "{api_key}"]}}
    assert (settings["url"], settings["with"], "allowed" in settings) == (one.endpoint.base_url, "servers", False)
    assert {"counting:", "SKILL.md", "scripts", "count.sh", "single"} <= set(answer[end:].replace("/", "\n").split())
    assert answer.endswith("serversskills")


@pytest.mark.parametrize(("servers", "allowed"), [([], ["a", "b"]), ([ECHO], ["a", "b", "echo:*"])])
async def test_allowed_tools_leave_the_tools_of_the_servers(
    sandbox: Runtime, servers: list[McpServer], allowed: list[str]
) -> None:
    harness = CommandHarness(PROGRAM, {"allowed_tools": ("a", "b")}, {}, servers=servers)
    one = context(sandbox, HarnessSpec(command=["x"]))
    await harness.install(one)
    settings = json.JSONDecoder().raw_decode((await harness.run(one)).answer or "")[0]
    assert settings["allowed"] == allowed
    assert ("with" in settings) is bool(servers)


async def test_without_servers_and_skills_nothing_of_them_is_set(sandbox: Runtime) -> None:
    harness, one = program(), context(sandbox, HarnessSpec(command=["x"]))
    await harness.install(one)
    answer = (await harness.run(one)).answer or ""
    assert json.JSONDecoder().raw_decode(answer)[0]["servers"] == {"own": {}}
    assert "serversskills" not in answer


async def test_a_file_that_is_there_already_is_not_overwritten(sandbox: Runtime) -> None:
    one = context(sandbox, HarnessSpec(command=["x"]))
    await sandbox.exec('mkdir -p "$HOME/.p" && echo mine > "$HOME/.p/settings.json"', seconds=10)
    with pytest.raises(InvalidField, match=r"\.p/settings\.json is in the sandbox") as caught:
        await program().install(one)
    assert caught.value.field == "task.runtime.prepare"
    kept = await sandbox.exec('cat "$HOME/.p/settings.json"', seconds=10)
    assert kept.stdout == b"mine\n"


async def test_a_skill_that_is_there_already_is_not_replaced(sandbox: Runtime) -> None:
    await sandbox.write("a/SKILL.md", SKILL.encode())
    await sandbox.exec('mkdir -p "$HOME/.p/skills/a"', seconds=10)
    with pytest.raises(InvalidField, match="before the skill 'a' is copied"):
        await program(skills=["a"]).install(context(sandbox, HarnessSpec(command=["x"])))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "there is no SKILL.md"),
        ("Only text.", "has no name"),
        ("---\nname: a\n---\n", "has no description"),
        ("---\nname: a\ndescription: b\n", "has no name"),
    ],
)
async def test_a_broken_skill_is_named(sandbox: Runtime, text: str | None, told: str) -> None:
    await sandbox.write("good/SKILL.md", SKILL.encode())
    if text is not None:
        await sandbox.write("bad/SKILL.md", text.encode())
    with pytest.raises(InvalidField, match=told) as caught:
        await program(skills=["good", "bad"]).install(context(sandbox, HarnessSpec(command=["x"])))
    assert caught.value.field == "task.harness.skills.1"


@pytest.mark.parametrize("make", ["mkdir bad/SKILL.md", "ln -s nowhere bad/SKILL.md"])
async def test_a_skill_whose_file_is_none_is_named(sandbox: Runtime, make: str) -> None:
    await sandbox.exec(f"mkdir bad && {make}", seconds=10)
    with pytest.raises(InvalidField, match=r"bad/SKILL.md is a folder, or a link") as caught:
        await program(skills=["bad"]).install(context(sandbox, HarnessSpec(command=["x"])))
    assert caught.value.field == "task.harness.skills.0"


async def test_a_skill_whose_folder_is_not_utf_8_is_named(sandbox: Runtime) -> None:
    await sandbox.write("SKILL.md", SKILL.encode())
    await sandbox.exec("mkdir -p $'all/caf\\xe9' && cp SKILL.md all/*/", seconds=10)
    with pytest.raises(InvalidField, match=r"all/caf\\udce9/SKILL.md is not UTF-8") as caught:
        await program(skills=["all"]).install(context(sandbox, HarnessSpec(command=["x"])))
    assert caught.value.field == "task.harness.skills.0"


async def test_two_skills_of_one_name_are_refused(sandbox: Runtime) -> None:
    await sandbox.write("one/a/SKILL.md", SKILL.encode())
    await sandbox.write("two/a/SKILL.md", SKILL.encode())
    with pytest.raises(InvalidField, match="two skills are in folders named 'a'"):
        await program(skills=["one", "two"]).install(context(sandbox, HarnessSpec(command=["x"])))


async def test_a_folder_that_cannot_be_copied_is_an_error(sandbox: Runtime) -> None:
    await sandbox.write("a/SKILL.md", SKILL.encode())
    await sandbox.exec("ln -s nowhere a/link", seconds=10)
    with pytest.raises(HarnessError, match="cannot be copied"):
        await program(skills=["a"]).install(context(sandbox, HarnessSpec(command=["x"])))


async def test_a_servers_program_that_is_not_there_is_named(sandbox: Runtime) -> None:
    missing = ECHO.model_copy(update={"command": "no-such-server"})
    with pytest.raises(InvalidField, match="no program 'no-such-server'") as caught:
        await program(servers=[ECHO, missing]).install(context(sandbox, HarnessSpec(command=["x"])))
    assert caught.value.field == "task.harness.mcp_servers.1.command"


def test_the_servers_secrets_are_hidden_in_what_a_failed_program_prints() -> None:
    web = WEB.model_copy(update={"headers": {"Authorization": "Bearer abcdefghij", "X": "plainvalue"}})
    stdio = STDIO.model_copy(update={"env": {"API_KEY": "stdio-secret", "MODE": "long-but-open"}})
    task = a_task(HarnessSpec(preset="codex", mcp_servers=[stdio, web]), "/x")
    assert set(secrets_of(task)) == {"Bearer abcdefghij", "abcdefghij", "plainvalue", "stdio-secret"}
