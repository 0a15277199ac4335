"""Task files: files beside a task are sent with the task, byte for byte, and every error names its field."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from cli.world import TASK, write_task
from outrider.cli.task_sources import load_group
from outrider.errors import InvalidField, TooLarge
from outrider.spec import MAX_INLINE_FILE, PrepareCommand, Upload, Write


def prepared(folder: Path, step: str) -> list[PrepareCommand | Upload | Write]:
    text = TASK.replace('kind = "memory"', f'kind = "memory"\nprepare = [{step}]')
    return load_group(write_task(folder, text), n=2, priority=3).task.runtime.prepare


def test_the_file_is_the_task_of_the_group(tmp_path: Path) -> None:
    group = load_group(write_task(tmp_path), n=8, priority=-5)
    assert (group.n, group.priority, group.task.labels) == (8, -5, {"name": "hi"})
    assert group.task.instruction == "Write hi into out.txt."


@pytest.mark.parametrize("executable", [True, False])
def test_a_file_beside_the_task_becomes_a_write(tmp_path: Path, executable: bool) -> None:
    data = bytes(range(256))
    (tmp_path / "tool").write_bytes(data)
    (tmp_path / "tool").chmod(0o755 if executable else 0o644)
    [step] = prepared(tmp_path, '{upload = "tool", to = "bin/tool"}')
    assert isinstance(step, Write)
    assert (step.data(), step.to, step.executable) == (data, "bin/tool", executable)


def test_a_folder_becomes_its_files_and_empty_folders(tmp_path: Path) -> None:
    (tmp_path / "src" / "deep" / "none yet").mkdir(parents=True)
    (tmp_path / "src" / "a").write_text("1")
    (tmp_path / "src" / "deep" / "b").write_text("2")
    steps = prepared(tmp_path, '{upload = "src", to = "/work/src"}')
    writes = {step.to: step.data() for step in steps if isinstance(step, Write)}
    assert writes == {"/work/src/a": b"1", "/work/src/deep/b": b"2"}
    assert [shlex.split(step.run) for step in steps if isinstance(step, PrepareCommand)] == [
        ["mkdir", "-p", "/work/src/deep/none yet"]
    ]


def test_steps_keep_their_order_and_foreign_uploads_their_form(tmp_path: Path) -> None:
    (tmp_path / "here").write_text("x")
    steps = prepared(tmp_path, '{run = "true"}, {upload = "there", to = "t"}, {upload = "here", to = "h"}')
    assert [type(step) for step in steps] == [PrepareCommand, Upload, Write]


def test_files_for_graders_are_sent_along_too(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("x")
    own = 'carry = []\nruntime = { prepare = [{ upload = "key", to = "key" }] }\n'
    later = f'[[then]]\ninstruction = "more"\n[then.evaluator]\nrun = "true"\n{own}'
    whole = TASK.replace("[evaluator]\n", f"[evaluator]\n{own}") + later
    task = load_group(write_task(tmp_path, whole), n=1, priority=0).task
    for evaluator in (task.evaluator, task.then[0].evaluator):
        assert evaluator.runtime is not None
        assert evaluator.runtime.prepare == [Write(write="eA==", to="key", encoding="base64")]
    (tmp_path / "leak").symlink_to("/etc/passwd")
    with pytest.raises(InvalidField) as caught:
        load_group(write_task(tmp_path, whole.replace(later, later.replace('"key"', '"leak"', 1))), n=1, priority=0)
    assert caught.value.field == "task.then.0.evaluator.runtime.prepare.0.upload"


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    folder = tmp_path / "task"
    folder.mkdir()
    (folder / "leak").symlink_to(tmp_path / "secret")
    with pytest.raises(InvalidField) as caught:
        prepared(folder, '{upload = "leak", to = "t"}')
    assert caught.value.field == "task.runtime.prepare.0.upload"


@pytest.mark.parametrize("target", ["nowhere", "."])
def test_a_link_in_a_folder_that_is_no_file_is_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "link").symlink_to(target)
    with pytest.raises(InvalidField, match="cannot be sent"):
        prepared(tmp_path, '{upload = "src", to = "t"}')


def test_a_path_that_leaves_the_folder_names_its_field(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")
    folder = tmp_path / "task"
    folder.mkdir()
    with pytest.raises(InvalidField, match="stays inside") as caught:
        prepared(folder, '{upload = "../x", to = "t"}')
    assert caught.value.field == "task.runtime.prepare.0.upload"


def test_a_file_too_large_to_send_says_where_to_put_it(tmp_path: Path) -> None:
    with (tmp_path / "big").open("wb") as file:
        file.truncate(MAX_INLINE_FILE)
    with pytest.raises(TooLarge) as caught:
        prepared(tmp_path, '{upload = "big", to = "t"}')
    assert "--files" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("instruction = [", "task"),
        (TASK + "[sampling]\ntemperature = nan\n", "task.sampling.temperature"),
        (TASK + "[limits]\nturns = '3'\n", "task.limits.turns"),
        (TASK + "[limit]\nturns = 3\n", "task.limit"),
        ("runtime = 3\n" + TASK.replace('[runtime]\nkind = "memory"\n', ""), "task.runtime"),
    ],
)
def test_what_is_wrong_names_its_field(tmp_path: Path, text: str, field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        load_group(write_task(tmp_path, text), n=1, priority=0)
    assert caught.value.field == field


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="cannot read"):
        load_group(tmp_path / "none.toml", n=1, priority=0)
