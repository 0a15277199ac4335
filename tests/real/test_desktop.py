"""The desktop with a real screen and browser, in namespace sandboxes without a network: pages of MiniWoB are solved by
mouse and keyboard, and their screenshots reach the samples."""

from __future__ import annotations

import importlib.util
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from engines.upstream import Answer, upstream
from outrider.client.client import AsyncClient
from outrider.harnesses.desktop import PNG, PROGRAMS
from outrider.lab.certify.task_check import check_tasks
from outrider.plugins import resolve
from outrider.spec import EngineSpec
from outrider.tasks.miniwob.tasks import BROWSER, HEIGHT, WIDTH, miniwob_examples
from outrider.trajectory import TokenMode
from support.ordinary import ordinary_user, python_of, run_tests
from support.service import RENDERER, running_service
from support.tokenizer import write_tokenizer

from .eval_programs import evaluated, serving

pytestmark = pytest.mark.real

PAGES = ("click-test", "click-button", "click-checkboxes", "drag-box", "enter-text", "login-user")
MODELS = {"/v1/models": {"data": [{"id": "m", "max_model_len": 65_536}]}}
BUTTON = '{"x": 60, "y": 283}'
"""Position of click-test's button for seed 0. It does not depend on the fonts."""
VENDORS_CALLS = {
    "anthropic": [
        ("computer", '{"action": "screenshot"}'),
        ("computer", '{"action": "left_click", "coordinate": [60, 283]}'),
    ],
    "openai": [
        ("computer", '{"type": "screenshot"}'),
        ("computer", '{"type": "click", "button": "left", "x": 60, "y": 283}'),
    ],
    "google": [("open_web_browser", "{}"), ("click_at", '{"x": 91, "y": 662}')],
}


@pytest.fixture(autouse=True)
def _needs() -> None:
    if missing := [program for program in (*PROGRAMS, BROWSER) if shutil.which(program) is None]:
        pytest.skip(f"not installed: {', '.join(missing)} (.ci/desktop installs them)")
    if not (can := resolve("runtime", "namespace").available()).ok:
        pytest.skip(can.detail)


@pytest.fixture
def _needs_pages() -> None:
    if importlib.util.find_spec("miniwob") is None:
        pytest.skip("the package miniwob is not installed")


def says(prompt: list[int], output: list[int], **delta: Any) -> Answer:
    """Return a streamed reply with its ids, in vLLM's format."""
    content = [{"token": "t", "logprob": -0.5}] * len(output)
    choice = {
        "index": 0,
        "delta": delta,
        "finish_reason": "tool_calls" if "tool_calls" in delta else "stop",
        "token_ids": output,
        "logprobs": {"content": content},
    }
    return Answer(events=[{"choices": [choice], "prompt_token_ids": prompt}])


def calls(prompt: list[int], output: list[int], name: str, arguments: str) -> Answer:
    call = {"index": 0, "id": f"call_{output[0]}", "function": {"name": name, "arguments": arguments}}
    return says(prompt, output, tool_calls=[call])


def acting(action: str, arguments: str) -> tuple[Answer, ...]:
    """Return the replies of a model that takes a screenshot, performs one action, and takes another screenshot."""
    return (
        calls([1, 2], [3], "screenshot", "{}"),
        calls([1, 2, 3, 4], [5], action, arguments),
        calls([1, 2, 3, 4, 5, 6], [7], "wait", '{"seconds": 1}'),
        calls([1, 2, 3, 4, 5, 6, 7, 8], [9], "screenshot", "{}"),
        says([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [11], content="Done."),
    )


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(PNG)
    width, height = struct.unpack(">II", png[16:24])
    return width, height


@pytest.mark.usefixtures("_needs_pages")
async def test_known_solutions_earn_1_and_doing_nothing_0(tmp_path: Path) -> None:
    examples = [example for page in PAGES for example in miniwob_examples(page)]
    reports = await check_tasks(examples, folder=tmp_path, at_once=2)
    assert [(report.id, report.problems) for report in reports] == [(f"{page}-0", ()) for page in PAGES]
    assert {report.gold for report in reports} == {(1.0, 1.0)}
    assert {report.nothing for report in reports} == {(0.0, 0.0)}


@pytest.mark.usefixtures("_needs_pages")
@pytest.mark.parametrize(
    ("action", "arguments", "reward", "why"),
    [
        ("click", BUTTON, 1.0, "the page gives 1"),
        # The page blocks the browser's keys for tabs, windows and tools, except for alt+F4, which closes the page.
        ("key", '{"keys": "ctrl+w"}', 0.0, "the page waits for its end"),
        ("key", '{"keys": "ctrl+shift+Delete"}', 0.0, "the page waits for its end"),
        ("key", '{"keys": "ctrl+n"}', 0.0, "the page waits for its end"),
        ("key", '{"keys": "alt+F4"}', 0.0, "the page is closed"),
    ],
)
async def test_a_scripted_model_sees_the_screen_and_uses_it(
    tmp_path: Path, action: str, arguments: str, reward: float, why: str
) -> None:
    [example] = miniwob_examples("click-test")
    async with upstream(*acting(action, arguments), pages=MODELS) as (server_url, server):
        engine = EngineSpec(kind="openai", name="sees", url=server_url, options={"ids": True})
        async with running_service(tmp_path=tmp_path, engines=(engine,)) as (_, url), AsyncClient(url) as client:
            [done] = await client.wait([(await client.submit({"task": {**example.task, "max_attempts": 1}})).id])
            result = done.sessions[0].result
            assert result is not None
            assert result.error is None
            assert (result.verdict.reward, result.verdict.reason) == (reward, why)

            [sample] = await client.samples(done.sessions[0].id)
            assert (sample.mode, sample.ids.tolist(), sample.reward) == (TokenMode.CAPTURE, list(range(1, 12)), reward)
            assert [image.turn for image in sample.images] == [1, 4]
            shown = [(await client.image(image.digest)).data for image in sample.images]
    assert [size_of(png) for png in shown] == [(WIDTH, HEIGHT)] * 2
    assert (shown[0] != shown[1]) is (why != "the page waits for its end"), "the screen shows what was done"
    sent = [message for message in server.posts[-1][1]["messages"] if message["role"] == "tool"]
    assert [content["content"] if isinstance(content["content"], str) else "image" for content in sent] == [
        "image",
        "done",
        "done",
        "image",
    ]


@pytest.mark.usefixtures("_needs_pages")
@pytest.mark.parametrize("vendor", list(VENDORS_CALLS))
async def test_a_scripted_model_uses_a_vendors_computer_tool(tmp_path: Path, vendor: str) -> None:
    [example] = miniwob_examples("click-test")
    (look, nothing), (click, arguments) = VENDORS_CALLS[vendor]
    answers = (
        calls([1, 2], [3], look, nothing),
        calls([1, 2, 3, 4], [5], click, arguments),
        says([1, 2, 3, 4, 5, 6], [7], content="Done."),
    )
    harness = example.task["harness"]
    desktop = {**harness["options"]["desktop"], "actions": vendor}
    task = {**example.task, "harness": {**harness, "options": {**harness["options"], "desktop": desktop}}}
    async with upstream(*answers, pages=MODELS) as (server_url, server):
        engine = EngineSpec(kind="openai", name="sees", url=server_url, options={"ids": True})
        async with running_service(tmp_path=tmp_path, engines=(engine,)) as (_, url), AsyncClient(url) as client:
            [done] = await client.wait([(await client.submit({"task": {**task, "max_attempts": 1}})).id])
            result = done.sessions[0].result
            assert result is not None
            assert (result.error, result.verdict.reward) == (None, 1.0)
            [sample] = await client.samples(done.sessions[0].id)
            assert [image.turn for image in sample.images] == [1, 2], "each call is answered with the screen"
    offered = [tool["function"]["name"] for tool in server.posts[0][1]["tools"]]
    assert click in offered
    assert "screenshot" not in offered


@pytest.mark.usefixtures("_needs_pages")
async def test_a_page_is_evaluated_by_the_programs(tmp_path: Path) -> None:
    """`outrider eval` reports the page's own reward, and the samples contain the screenshots that the model received. A
    second evaluation of the run has the same figures, without another model call."""
    answers = acting("click", BUTTON)
    async with upstream(*answers, pages=MODELS) as (server_url, server):
        settings = tmp_path / "outrider.toml"
        settings.write_text(
            f'[[engines]]\nkind = "openai"\nname = "sees"\nurl = "{server_url}"\noptions = {{ ids = true }}\n'
        )
        words = ["--config", str(settings), "--port", "0", "--data", str(tmp_path / "data")]
        words += ["--tokenizer", str(write_tokenizer(tmp_path / "tokenizer")), "--renderer", RENDERER]
        async with serving(words) as (_, url), AsyncClient(url) as client:
            evaluate = ("miniwob:click-test", "--limit", "1", "--resume", "screen", "--url", url, "--json")
            found, again = [json.loads(await evaluated(*evaluate)) for _ in range(2)]
            assert (found["reward"]["mean"], found["graded"], found["failures"]) == (1.0, 1, {})
            assert {**found, "seconds": 0} == {**again, "seconds": 0}
            asked = [body for path, body in server.posts if path.endswith("/chat/completions")]
            assert len(asked) == len(answers)

            [group] = found["groups"]
            [sample] = await client.samples(group["sessions"][0]["id"])
            assert (sample.ids.tolist(), sample.reward) == (list(range(1, 12)), 1.0)
            shown = [(await client.image(image.digest)).data for image in sample.images]
            assert [size_of(png) for png in shown] == [(WIDTH, HEIGHT)] * 2


@pytest.mark.nightly
def test_it_as_an_ordinary_user() -> None:
    with ordinary_user() as user, python_of(user) as python:
        told = run_tests(
            python, ["real/test_desktop.py"], "-m", "real", "-k", "known or gives or programs", "-rs", seconds=900
        )
    assert "3 passed" in told
