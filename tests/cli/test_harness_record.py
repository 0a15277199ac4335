"""`outrider harness record`: the draft of a task, the transcript without secrets, and the command's refusals."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cli.world import Cli
from outrider.lab.demo.dialogue import POLICY
from outrider.lab.record.draft import FED, Place, TaskDraft, place_of, task_toml, with_instruction
from outrider.lab.record.wire_transcript import without_secrets
from outrider.sandbox.runtimes.namespace.runtime import NamespaceRuntime
from outrider.spec import TaskSpec
from support.service import say

AGENT = Path(__file__).parent.parent / "certify" / "agent.py"
needs_namespaces = pytest.mark.skipif(not NamespaceRuntime.available().ok, reason="no user namespaces on this machine")
TOLD = "Look around, and say 'hello' -- twice."

# Sends a secret of its environment and a secret with the form of an API key to the Messages API.
LEAKS = """\
import json, os, sys, urllib.request
text = sys.argv[1] if len(sys.argv) > 1 else sys.stdin.read()
settings = os.path.expanduser("~/.config/agent.json")
if os.path.exists(settings):
    told = json.load(open(settings))
    url, key = told["url"], told["key"]
else:
    url, key = os.environ["ANTHROPIC_BASE_URL"], os.environ["ANTHROPIC_API_KEY"]
content = f'{text} {os.environ.get("MY_TOKEN", "")} {{"api_key": "sk-abcdefgh\\\\"}}'
body = {"model": "m", "max_tokens": 50, "stream": True, "messages": [{"role": "user", "content": content}]}
headers = {"content-type": "application/json", "x-api-key": key, "anthropic-version": "2023-06-01"}
request = urllib.request.Request(f"{url}/v1/messages", json.dumps(body).encode(), headers)
print(urllib.request.urlopen(request).read().decode().count("event:"))
sys.exit(int(os.environ.get("ENDS_WITH", "0")))
"""


def recorded(cli: Cli, folder: Path, *words: str | Path) -> Any:
    return cli.run("harness", "record", "--name", "mine", "--output", folder, "--json", *words)


def task_of(folder: Path) -> TaskSpec:
    return TaskSpec.model_validate(tomllib.loads((folder / "mine.toml").read_text()))


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "mine.wire.jsonl").read_text().splitlines()]


@pytest.fixture
def leaks(tmp_path: Path) -> Path:
    path = tmp_path / "program" / "leaks.py"
    path.parent.mkdir()
    path.write_text(LEAKS)
    return path


@pytest.mark.deep
@needs_namespaces
def test_a_program_is_recorded_and_its_draft_is_certified(cli: Cli, tmp_path: Path) -> None:
    ran = recorded(cli, tmp_path, "--", sys.executable, AGENT, "{base_url}", TOLD, "streamed")
    assert (ran.code, ran.document["calls"], ran.document["dialects"]) == (0, 2, ["chat"])
    assert ran.document["streamed"]
    assert ran.document["has_instruction"]
    task = task_of(tmp_path)
    assert task.instruction == TOLD
    assert task.harness.command is not None
    assert task.harness.command[1:] == [str(AGENT), "{base_url}", "{instruction}", "streamed"]
    first, second = lines_of(tmp_path)
    assert first["request"]["messages"] == [{"role": "user", "content": TOLD}]
    assert first["path"] == "/s/[redacted]/v1/chat/completions"
    assert first["reply"][-1] == "[DONE]"
    assert second["request"]["messages"][-1]["role"] == "tool"
    assert (tmp_path / "mine.wire.jsonl").stat().st_mode & 0o077 == 0
    check = ("harness", "check", "--task", tmp_path / "mine.toml", "--runtime", "namespace", "--row", "three-turns")
    assert cli.run(*check).code == 0


@pytest.mark.deep
def test_secrets_stay_out_and_the_exit_code_is_passed_on(
    cli: Cli, tmp_path: Path, leaks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2hunter2")
    ran = recorded(cli, tmp_path, "--env", "ENDS_WITH=7", "--", sys.executable, leaks, TOLD)
    assert (ran.code, ran.document["exit_code"], ran.document["dialects"]) == (7, 7, ["messages"])
    text = (tmp_path / "mine.wire.jsonl").read_text()
    assert "hunter2" not in text
    assert "sk-abcdefgh" not in text
    assert "outrider_" not in text
    [line] = lines_of(tmp_path)
    assert line["headers"]["x-api-key"] == "[redacted]"
    assert TOLD in line["request"]["messages"][0]["content"]
    assert line["reply"][0]["type"] == "message_start"
    assert task_of(tmp_path).harness.env == {"ENDS_WITH": "7"}


@pytest.mark.deep
@needs_namespaces
def test_settings_files_and_standard_input_come_back_in_the_draft(cli: Cli, tmp_path: Path, leaks: Path) -> None:
    home = tmp_path / "settings"
    (home / ".config").mkdir(parents=True)
    text = '{"url": "{base_url}", "key": "{api_key}"}'
    (home / ".config" / "agent.json").write_text(text)
    words = ("--stdin", "--instruction", TOLD, "--home", home, "--", sys.executable, leaks)
    ran = recorded(cli, tmp_path, *words)
    assert (ran.code, ran.document["calls"]) == (0, 1), ran.err
    task = task_of(tmp_path)
    assert task.harness.files == {".config/agent.json": text}
    assert task.harness.command is not None
    assert task.harness.command[: len(FED)] == [*FED]
    assert [mount.source for mount in task.runtime.mounts][-1] == str(leaks.parent)
    assert (home / ".config" / "agent.json").read_text() == text
    check = ("harness", "check", "--task", tmp_path / "mine.toml", "--runtime", "namespace", "--row", "three-turns")
    ran = cli.run(*check, "--json")
    # The program has no tools, so the row is not tried. Its one turn shows that the program ran and called its model.
    assert (ran.document["rows"][0]["verdict"], ran.document["rows"][0]["turns"]) == ("not tried", 1)


@pytest.mark.deep
def test_a_real_engine_is_recorded(cli: Cli, tmp_path: Path, leaks: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"replies": [say("Bananas.")]}))
    engine = ("--engine", f"scripted={script}", "--tokenizer", POLICY, "--renderer", "qwen3")
    assert recorded(cli, tmp_path, *engine, "--", sys.executable, leaks, TOLD).code == 0
    [line] = lines_of(tmp_path)
    deltas = [event["delta"] for event in line["reply"] if event["type"] == "content_block_delta"]
    assert "".join(delta["text"] for delta in deltas) == "Bananas."


@pytest.mark.deep
def test_a_program_that_calls_no_model_gets_a_draft_that_says_so(cli: Cli, tmp_path: Path) -> None:
    ran = cli.run("harness", "record", "--name", "mine", "--output", tmp_path, "--", "sh", "-c", "kill -9 $$")
    assert ran.code == 1
    assert "the program ended with exit code -9" in ran.err
    assert "the program called no model" in ran.err
    assert "the place of the instruction was not found" in ran.err
    assert "write {instruction} into the command" in (tmp_path / "mine.toml").read_text()
    assert lines_of(tmp_path) == []


@pytest.mark.deep
def test_refused_calls_are_listed_with_their_reasons(cli: Cli, tmp_path: Path) -> None:
    ask = "curl -s -o /dev/null -d {} $OPENAI_BASE_URL"
    words = ("--", "sh", "-c", f"{ask}/embeddings; {ask}/embeddings; {ask}/chat/completions")
    ran = cli.run("harness", "record", "--name", "mine", "--output", tmp_path, *words)
    assert "refused 2 times: POST /v1/embeddings: 404 POST /v1/embeddings is not served here" in ran.err
    assert "refused: POST /v1/chat/completions: 4" in ran.err
    assert f"no model call succeeded; {tmp_path}/mine.wire.jsonl has the replies" in ran.err


@pytest.mark.deep
def test_a_program_that_cannot_be_run_leaves_no_file(cli: Cli, tmp_path: Path) -> None:
    ran = cli.run("harness", "record", "--name", "mine", "--output", tmp_path, "--", "no-such-program")
    assert (ran.code, list(tmp_path.iterdir())) == (2, [])
    assert "'no-such-program' cannot be run: No such file or directory" in ran.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--name", "../mine", "--", "true"), "is no name of a file"),
        (("--name", "mine", "--env", "X", "--", "true"), "is not NAME=VALUE"),
        (("--name", "mine", "--tokenizer", "x", "--", "true"), "is for a real engine"),
        (("--name", "mine", "--engine", "vllm=nowhere", "--", "true"), "has no scheme"),
        (("--name", "taken", "--", "true"), "exists already"),
        (("--name", "mine", "--home", "empty", "--", "true"), "has no files"),
        (("--name", "mine", "--home", "binary", "--", "true"), "cannot be read as text"),
    ],
)
def test_what_is_refused(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.toml").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "blob").write_bytes(b"\xff\xfe\x00")
    ran = cli.run("harness", "record", *words)
    assert ran.code == 2
    assert said in ran.err
    assert (tmp_path / "taken.toml").read_text() == "mine"
    assert not (tmp_path / "mine.toml").exists()


@pytest.mark.parametrize(
    ("words", "texts", "changed"),
    [
        (("agent", "say hi"), ["say hi"], ("agent", "{instruction}")),
        (("agent", "--prompt=say hi"), ["<task>say hi</task>"], ("agent", "--prompt={instruction}")),
        (("agent", "-m", "big", "fix it"), ["big work", "fix it"], ("agent", "-m", "big", "{instruction}")),
        (("agent", "--cwd", "/home/me/a/long/path", "fix it"), ["in /home/me/a/long/path: fix it"], None),
        (("agent", "other"), ["say hi"], ("agent", "other")),
        (("say hi",), ["say hi"], ("say hi",)),
    ],
)
def test_the_instruction_is_found(words: tuple[str, ...], texts: list[str], changed: tuple[str, ...] | None) -> None:
    made, _ = with_instruction(words, texts)
    assert made == (changed or ("agent", "--cwd", "/home/me/a/long/path", "{instruction}"))


def test_a_draft_is_a_task_whatever_its_texts_have(tmp_path: Path) -> None:
    odd = 'a "quote", \\ a backslash,\na line, \x7f, é and {braces}'
    draft = TaskDraft(
        place=Place(words=("agent", odd), mounts=(tmp_path / "a b",)),
        instruction=odd,
        env={"X": odd},
        files={"a/b.json": odd},
    )
    task = TaskSpec.model_validate(tomllib.loads(task_toml(draft)))
    assert task.instruction == odd
    assert task.harness.command == ["agent", odd]
    assert task.harness.env == {"X": odd}
    assert task.harness.files == {"a/b.json": odd}
    assert [mount.source for mount in task.runtime.mounts] == [str(tmp_path / "a b")]


def test_the_place_of_a_program(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "pyvenv.cfg").write_text("")
    program, script = venv / "bin" / "agent", tmp_path / "scripts" / "agent.py"
    script.parent.mkdir()
    for file in (program, script):
        file.write_text("#!/bin/sh\n")
        file.chmod(0o755)
    made = place_of(["agent", f"--script={script}", "/bin/sh"], str(venv / "bin"))
    assert made == Place(words=("agent", f"--script={script}", "/bin/sh"), venv=venv, mounts=(script.parent,))
    assert place_of([str(script)], None) == Place(words=(str(script),), mounts=(script.parent,))
    assert place_of(["sh", "-c", "true"], "/usr/bin:/bin").mounts == ()
    assert place_of(["no-such-program"], "/usr/bin").missing


def test_the_place_of_a_program_behind_links(tmp_path: Path) -> None:
    """The links are like those that npm, pipx and uv make to installed programs."""
    package = tmp_path / "project" / "node_modules" / "agent" / "dist" / "agent.js"
    linked = tmp_path / "project" / "node_modules" / ".bin" / "agent"
    tool = tmp_path / "tools" / "agent" / "bin" / "tool"
    for file in (package, linked, tool):
        file.parent.mkdir(parents=True)
    for file in (package, tool):
        file.write_text("#!/usr/bin/env my-node\n")
        file.chmod(0o755)
    linked.symlink_to("../agent/dist/agent.js")
    (tool.parents[1] / "pyvenv.cfg").write_text("")
    user = tmp_path / "user" / "bin"
    user.mkdir(parents=True)
    (user / "tool").symlink_to(tool)
    node = user / "my-node"
    node.write_text("#!/bin/sh\n")
    node.chmod(0o755)
    modules = package.parents[2]
    assert place_of(["sh", str(linked)], "/usr/bin:/bin") == Place(words=("sh", str(linked)), mounts=(modules,))
    assert place_of([str(linked)], None).mounts == (modules,)
    started = place_of([str(linked), "x"], str(user))
    assert started == Place(words=(str(node), str(linked), "x"), mounts=(modules, user.parent))
    assert place_of(["tool"], str(user)) == Place(words=("tool",), venv=tool.parents[1])


def test_a_file_that_the_program_works_on_becomes_a_prepare_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("calc.py", "a = 'x'\n"), ("agent.py", ""), ("big.txt", "x" * 100_000)):
        (tmp_path / name).write_text(text)
    edited = place_of(["true", "--fast", "calc.py", "big.txt"], "/usr/bin:/bin")
    assert edited.words == ("true", "--fast", "calc.py", str(tmp_path / "big.txt"))
    assert (edited.written, edited.mounts) == ({"calc.py": "a = 'x'\n"}, (tmp_path,))
    script = place_of(["sh", "agent.py", "--file=calc.py"], "/usr/bin:/bin")
    assert script.words == ("sh", str(tmp_path / "agent.py"), "--file=calc.py")
    task = TaskSpec.model_validate(tomllib.loads(task_toml(TaskDraft(place=script, instruction="Fix it."))))
    [step] = task.runtime.prepare
    assert step.model_dump(include={"write", "to"}) == {"write": "a = 'x'\n", "to": "calc.py"}


def test_secrets_are_found_by_name_place_and_value() -> None:
    value = {
        "api_key": "x",
        "prompt_cache_key": "kept",
        "token": 7,
        "nested": [{"password": "y", "text": "Bearer abcdefghij and outrider_" + "a" * 40}],
        "body": '{"secret": "zzzzzzz\\"}',
    }
    made = without_secrets(value, ["zz-secret"])
    assert made["api_key"] == made["nested"][0]["password"] == "[redacted]"
    assert (made["prompt_cache_key"], made["token"]) == ("kept", 7)
    assert made["nested"][0]["text"] == "Bearer [redacted] and [redacted]"
    assert "zzzzzzz" not in made["body"]
