"""A task like SWE-bench's from end to end: a real program applies a patch with its own tool, and hidden tests grade
the patch.

The repository is an old release of tomlkit, and the right patch has the changes of the next release
(`tasks/release_pairs.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from outrider.harnesses.install import install
from outrider.tasks.datasets import Example
from outrider.tasks.release_pairs import release_pair_examples
from outrider.trajectory import BranchKind

from .rollout import END, Rollout, a_world, call

pytestmark = pytest.mark.real
pytest.importorskip("swebench", reason="swebench is not installed: pip install --no-deps swebench unidiff")

HIDDEN = "tests/test_items.py::test_integers_behave_like_ints"
BROKEN = ("tests/test_items.py::test_append_dict_to_array", "tests/test_items.py::test_booleans_comparison")
WRONG = {
    "it mends nothing": ("return Float._new(self, result)", "return result", [HIDDEN], [0, 1, 57, 57]),
    "it breaks others": ('"""The wrapped dict value"""', "raise TypeError", BROKEN, [1, 1, 55, 57]),
}
"""Wrong patches. Each has the text that is replaced in the right patch, the new text, the tests that do not pass, and
the counts of the verdict."""
COUNTS = ("fail_to_pass", "fail_to_pass_total", "pass_to_pass", "pass_to_pass_total")


def by_bash(patch: str) -> list[str]:
    """Return the replies of a model that applies a patch with mini-swe-agent's only tool."""
    return [
        "I mend it. " + call("bash", command=f"git apply <<'EOF_PATCH'\n{patch}EOF_PATCH") + END,
        call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT") + END,
    ]


def by_edit(patch: str, **arguments: bool) -> list[str]:
    """Return the replies of a model that applies a patch with Claude Code's editor, which edits only files that the
    model has read."""
    from unidiff import PatchSet  # type: ignore[attr-defined]  # swebench needs it, too

    files = [(f"/work/{one.path}", one) for one in PatchSet(patch)]
    reads = [call("Read", file_path=path, limit=5) for path, _ in files]
    edits = [
        call(
            "Edit",
            file_path=path,
            old_string="".join(line.value for line in hunk if not line.is_added),
            new_string="".join(line.value for line in hunk if not line.is_removed),
            **arguments,
        )
        for path, hunks in files
        for hunk in hunks
    ]
    return ["I look at the files.\n" + "\n".join(reads) + END, *(edit + END for edit in edits), "All done." + END]


WAYS: dict[str, Callable[[str], list[str]]] = {
    "mini-swe-agent": by_bash,
    "claude-code": partial(by_edit, replace_all=False),
}


@pytest.fixture(scope="module")
def example() -> Example:
    (made,) = release_pair_examples(limit=1)
    return made


async def rolled_out(
    preset: str, replies: list[str], example: Example, folder: Path, policy: Path, *, reward: float
) -> Rollout:
    """Run one session of the task. Checks that each sampled token is trained once, and that no other token is
    trained."""
    await asyncio.to_thread(install, preset)
    runtime = {"kind": "namespace", **example.task["runtime"]}
    mounted = [Path(mount["source"]) for mount in runtime["mounts"]]
    async with a_world(folder, policy, replies, allow=mounted) as world:
        rollout = await world.run(preset, reward=reward, **{**example.task, "runtime": runtime})
        assert len(rollout.turns) == len(replies)
        rollout.assert_trained_once(world.engine.given)
    return rollout


def assert_one_conversation(rollout: Rollout) -> None:
    assert [turn.join for turn in rollout.turns] == ["root", *["append"] * (len(rollout.turns) - 1)]
    assert [row.kind for row in rollout.rows()] == [BranchKind.MAIN]


@pytest.mark.parametrize("preset", WAYS)
async def test_the_right_patch_is_worth_one(preset: str, example: Example, policy_folder: Path, tmp_path: Path) -> None:
    replies = WAYS[preset](example.row["patch"])
    rollout = await rolled_out(preset, replies, example, tmp_path, policy_folder, reward=1.0)
    assert_one_conversation(rollout)
    assert rollout.verdict.reason.startswith("resolved (swebench ")
    assert [rollout.verdict.metrics[name] for name in COUNTS] == [1, 1, 57, 57]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("preset", WAYS)
async def test_a_wrong_patch_is_worth_nothing(
    preset: str, wrong: str, example: Example, policy_folder: Path, tmp_path: Path
) -> None:
    right, instead, failing, counts = WRONG[wrong]
    replies = WAYS[preset](example.row["patch"].replace(right, instead))
    rollout = await rolled_out(preset, replies, example, tmp_path, policy_folder, reward=0.0)
    assert_one_conversation(rollout)
    assert rollout.verdict.reason.startswith(f"these do not pass: {', '.join(failing)} (swebench ")
    assert [rollout.verdict.metrics[name] for name in COUNTS] == counts


async def test_edits_that_claude_code_completes_are_forks_of_which_no_token_is_lost(
    example: Example, policy_folder: Path, tmp_path: Path
) -> None:
    """Claude Code adds the argument `replace_all` that the model left out, and sends the changed call back."""
    replies = by_edit(example.row["patch"])
    rollout = await rolled_out("claude-code", replies, example, tmp_path, policy_folder, reward=1.0)
    assert [turn.cause for turn in rollout.turns] == [None, None, *["history_rewritten"] * (len(replies) - 2)]
    assert len(rollout.rows()) == len(replies) - 1
