"""The harness that runs a command or a preset: words, variables, files, logs, exit codes, and instructions."""

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import HarnessError, HarnessUnavailable, InvalidField
from outrider.harnesses.command import MAX_INSTRUCTION, CommandHarness
from outrider.harnesses.factory import make_harness
from outrider.harnesses.presets import ConfigFile, Option, Preset
from outrider.sandbox.runtimes.base import Runtime
from outrider.spec import HarnessSpec

from .conftest import context


async def outcome_of(sandbox: Runtime, spec: Any, **task: Any) -> Any:
    harness, given = make_harness(spec), context(sandbox, spec, **task)
    await harness.install(given)
    return await harness.run(given)


async def test_the_words_are_filled_into_command_and_environment(sandbox: Runtime) -> None:
    spec = HarnessSpec(
        command=[
            "bash",
            "-c",
            'printf "%s|" "$@" "$MINE"',
            "x",
            "{base_url}/v1",
            "{model}",
            "{instruction}",
            "{option.a}",
        ],
        env={"MINE": "<{api_key}>"},
        options={"a": 3},
    )
    outcome = await outcome_of(sandbox, spec, instruction="say {model}")
    assert outcome.log_tail == "http://127.0.0.1:9/s/key-1/v1|policy|say {model}|3|<key-1>|"
    assert outcome.answer is None


async def test_every_vendors_variables_point_at_the_session(sandbox: Runtime) -> None:
    outcome = await outcome_of(sandbox, HarnessSpec(command=["env"]), instruction="two\nlines")
    base = "http://127.0.0.1:9/s/key-1"
    for line in (
        f"OPENAI_BASE_URL={base}/v1",
        f"OPENAI_API_BASE={base}/v1",
        "OPENAI_API_KEY=key-1",
        f"ANTHROPIC_BASE_URL={base}",
        "ANTHROPIC_API_KEY=key-1",
        f"GOOGLE_GEMINI_BASE_URL={base}",
        "GEMINI_API_KEY=key-1",
        f"OUTRIDER_BASE_URL={base}",
        "OUTRIDER_API_KEY=key-1",
        "OUTRIDER_MODEL=policy",
        "OUTRIDER_INSTRUCTION=two\nlines",
        f"OUTRIDER_ARTIFACTS={sandbox.scratch}/outrider-session/artifacts",
        f"OUTRIDER_LOGS={sandbox.scratch}/outrider-session/logs",
    ):
        assert f"{line}\n" in outcome.log_tail + "\n"


async def test_the_shell_preset(sandbox: Runtime) -> None:
    script = 'echo "$OUTRIDER_INSTRUCTION to {model}" > out.txt; cat; echo \'{"a": {"b": 1}}\''
    spec = HarnessSpec(preset="shell", options={"script": script})
    outcome = await outcome_of(sandbox, spec, instruction="say {api_key}")
    assert await sandbox.read("out.txt") == b"say {api_key} to policy\n"
    assert outcome.log_tail == '{"a": {"b": 1}}'


async def test_a_program_that_fails_is_an_error_with_the_end_of_its_output(sandbox: Runtime) -> None:
    script = "head -c 100000 /dev/zero | tr '\\0' x; echo; echo the end; echo the reason >&2; exit 3"
    with pytest.raises(HarnessError, match=r"shell exited with code 3") as caught:
        await outcome_of(sandbox, HarnessSpec(preset="shell", options={"script": script}))
    tail = caught.value.log_tail or ""
    assert tail.endswith("xxx\nthe end\nthe reason")
    assert len(tail) <= 4097


async def test_a_program_that_is_killed_is_an_error(sandbox: Runtime) -> None:
    with pytest.raises(HarnessError, match="was killed by signal 9"):
        await outcome_of(sandbox, HarnessSpec(command=["bash", "-c", "kill -9 $$"]))


async def test_config_files_are_written_into_home_with_the_words_escaped(sandbox: Runtime) -> None:
    preset = Preset(
        name="p",
        summary="s",
        command=("bash", "-c", 'cat "$HOME/.p/config.json"'),
        files=(ConfigFile(path=".p/config.json", text='{"key": "{option.a}", "url": "{base_url}"}'),),
        options={"a": Option(type="string")},
        answer="stdout",
    )
    harness = CommandHarness(preset, {"a": 'quote " and {model}'}, {})
    given = context(sandbox, HarnessSpec(command=["unused"]))
    await harness.install(given)
    outcome = await harness.run(given)
    assert json.loads(outcome.answer or "") == {"key": 'quote " and {model}', "url": "http://127.0.0.1:9/s/key-1"}


async def test_a_commands_own_files_are_written_as_a_presets_are(sandbox: Runtime) -> None:
    """A path is relative to HOME or absolute. Values are escaped for a file's format, and inserted unchanged into other
    files."""
    absolute = f"{sandbox.scratch}/notes.txt"
    spec = HarnessSpec(
        command=["bash", "-c", 'cat "$HOME/.agent/settings.json" {option.notes}', "x"],
        files={
            ".agent/settings.json": '{"url": "{base_url}/v1", "key": "{api_key}", "told": "{instruction}", "x": {}}',
            absolute: "{model}: {instruction}",
        },
        options={"notes": absolute},
    )
    outcome = await outcome_of(sandbox, spec, instruction='say "{model}"')
    settings, notes = outcome.log_tail.split("}policy", 1)
    base = "http://127.0.0.1:9/s/key-1"
    assert json.loads(settings + "}") == {"url": f"{base}/v1", "key": "key-1", "told": 'say "{model}"', "x": {}}
    assert notes == ': say "{model}"'


async def test_a_dialects_words_are_filled_in_with_the_endpoints(sandbox: Runtime) -> None:
    preset = Preset(
        name="p",
        summary="s",
        command=("bash", "-c", "echo {dialect.url} $KIND"),
        env={"KIND": "{dialect.kind}"},
        dialects=("chat", "gemini"),
        words={
            "chat": {"url": "{base_url}/v1", "kind": "{base_url}"},
            "gemini": {"url": "{base_url}/v1beta", "kind": "{dialect.url}"},
        },
        options={"dialect": Option(type="string", default="chat")},
    )
    given = context(sandbox, HarnessSpec(command=["unused"]))
    base = "http://127.0.0.1:9/s/key-1"
    assert (await CommandHarness(preset, {"dialect": "chat"}, {}).run(given)).log_tail == f"{base}/v1 {base}"
    outcome = await CommandHarness(preset, {"dialect": "gemini"}, {}).run(given)
    assert outcome.log_tail == f"{base}/v1beta {{dialect.url}}", "a word is filled in once"


async def test_the_end_of_a_programs_own_log_is_added_to_its_output(sandbox: Runtime) -> None:
    write = 'mkdir -p "$HOME/logs"; cd "$HOME/logs"; echo old > a.log; echo kept > b.log; touch -d yesterday a.log'
    preset = Preset(
        name="p",
        summary="s",
        command=("bash", "-c", f"{write}; head -c 9000 /dev/zero | tr '\\0' x >> b.log; echo; echo said; exit 4"),
        logs=("logs/*.log", "elsewhere/*"),
    )
    given = context(sandbox, HarnessSpec(command=["unused"]))
    with pytest.raises(HarnessError) as caught:
        await CommandHarness(preset, {}, {}).run(given)
    output, _, log = (caught.value.log_tail or "").partition("\n--- p's own log ---\n")
    assert output.strip() == "said"
    assert log == "x" * 4096
    quiet = Preset(name="p", summary="s", command=("echo", "said"), logs=("elsewhere/*",))
    assert (await CommandHarness(quiet, {}, {}).run(given)).log_tail == "said"


async def test_the_tasks_variables_win_over_the_presets(sandbox: Runtime) -> None:
    preset = Preset(name="p", summary="s", command=("bash", "-c", "echo $A $B"), env={"A": "1", "B": "1"})
    given = context(sandbox, HarnessSpec(command=["unused"]))
    assert (await CommandHarness(preset, {}, {"B": "2"}).run(given)).log_tail == "1 2"


@pytest.mark.parametrize("instruction", ["a\0b", "é" * (MAX_INSTRUCTION // 2 + 1)])
async def test_an_instruction_that_no_program_can_be_given(sandbox: Runtime, instruction: str) -> None:
    with pytest.raises(InvalidField) as caught:
        await outcome_of(sandbox, HarnessSpec(command=["true"]), instruction=instruction)
    assert caught.value.field == "task.instruction"


async def test_the_longest_instruction_reaches_the_program(sandbox: Runtime) -> None:
    spec = HarnessSpec(command=["bash", "-c", 'printf %s "$1$OUTRIDER_INSTRUCTION" | wc -c', "x", "{instruction}"])
    outcome = await outcome_of(sandbox, spec, instruction="x" * MAX_INSTRUCTION)
    assert int(outcome.log_tail) == 2 * MAX_INSTRUCTION


async def test_a_program_that_is_not_installed_is_said_so_before_anything_starts(
    sandbox: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "empty"))
    spec = HarnessSpec(preset="pi")
    harness = make_harness(spec)
    found = harness.available()
    assert not found.ok
    assert found.hint == "run: outrider harness install pi"
    assert harness.mounts() == ()
    with pytest.raises(HarnessUnavailable, match="is not installed on this node"):
        await harness.install(context(sandbox, spec))


def test_a_command_of_the_tasks_own_is_always_available() -> None:
    harness = make_harness(HarnessSpec(command=["true"]))
    assert harness.available().ok
    assert harness.mounts() == ()
