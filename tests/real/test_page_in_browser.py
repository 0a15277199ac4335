"""The page in a real browser, with a real service whose agent program runs in sandboxes."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.test_timeline import task as timeline_task
from api.test_timeline import timeline_with
from cli.world import PROGRAM
from external.world import Agent, Owner
from outrider.api.finished_runs import serving_run
from outrider.client.client import AsyncClient
from outrider.service.finished_runs import open_run
from outrider.spec import OPERATOR_TENANT
from outrider.tokens.rendering.tokenizer import Tokenizer
from support.browsing import Tab, browser_tab
from support.many_sessions import multiply
from support.page_world import HOSTILE, LOOKS_LIKE_UI, PageWorld, page_world, task
from support.painting import painting_task
from support.pictures import picture_service
from support.service import call, running_service, say

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

PICTURES = os.environ.get("OUTRIDER_PICTURES")
"""A folder for the tests' screenshots, such as docs/pictures."""


async def shown(tab: Tab, text: str | re.Pattern[str], selector: str = "#main") -> None:
    """Wait until the text is visible."""
    await tab.page.locator(selector).get_by_text(text).first.wait_for()


SHOWN = {"overview", "group-dark", "session", "session-phone", "tokens", "tokens-phone", "compare", "error"}
"""The pictures of docs/page.md."""


async def picture(tab: Tab, name: str) -> None:
    if PICTURES is not None and name in SHOWN:
        await tab.page.wait_for_timeout(400)
        await tab.page.mouse.move(0, 0)
        await tab.page.screenshot(path=f"{PICTURES}/page-{name}.png")


def session_of(group: str, sample: int) -> str:
    return f"s-{group.removeprefix('g-')}-{sample}"


async def test_a_session_is_followed_live_to_its_end(tmp_path: Path) -> None:
    async with page_world(tmp_path) as world, browser_tab(world.url) as tab:
        group = await world.client.submit({"task": task("Work slowly"), "n": 1})
        session = group.sessions[0].id
        await tab.open(f"sessions/{session}")
        await asyncio.wait_for(world.engine.stalled.wait(), 30)
        await shown(tab, "running", "h1")
        assert "I work slowly" not in await tab.text("#main")
        world.engine.release()
        await shown(tab, "I work slowly, word by word, and then I am done.")
        await shown(tab, "completed", "h1")
        assert await tab.page.locator(".lanes .span.link").count() == 1  # the model call is in the timeline
        assert (await tab.text(".turn")).startswith("turn 0")
        await tab.open("")
        await shown(tab, "Errors by cause")
        assert tab.faults == []


async def test_an_error_is_found_from_the_overview(tmp_path: Path) -> None:
    async with page_world(tmp_path) as world, browser_tab(world.url) as tab:
        await tab.open()
        await shown(tab, "harness_error")
        await tab.page.get_by_role("link", name="example").click()
        await shown(tab, "command exited with code 1")
        await shown(tab, "the log tail is the end of the program's output")
        await shown(tab, "agent: cannot read its configuration")
        assert tab.page.url.endswith(f"#/sessions/{session_of(world.parsers, 4)}")
        await picture(tab, "error")
        # the same error in the list of sessions: the filters are in the URL and stay after a reload
        await tab.open("sessions?stop_reason=error&error=harness_error")
        await shown(tab, "1 session", ".filters")
        await tab.page.reload()
        rows = tab.page.locator(".listbody .row")
        await rows.first.wait_for()
        assert await rows.count() == 1
        await tab.page.keyboard.press("j")
        await tab.page.keyboard.press("Enter")
        await shown(tab, "command exited with code 1")
        assert tab.faults == []


async def test_a_failed_model_call_is_in_the_timeline(tmp_path: Path) -> None:
    running = running_service(tmp_path=tmp_path, replies=[call("echo hi"), say("done")])
    async with running as (_, url), AsyncClient(url) as client:
        spec = timeline_task(limits={"turns": 1}, evaluator={"kind": "command", "run": "true"})
        [done] = await client.wait([(await client.submit({"task": spec})).id])
        session = done.sessions[0].id
        await timeline_with(client, session, "failed_call", "")
        async with browser_tab(url) as tab:
            await tab.open(f"sessions/{session}")
            await shown(tab, "Failed calls")
            await tab.page.locator(".lanes .span.bad").first.wait_for()
            await tab.page.get_by_role("button", name="table").click()
            await shown(tab, "limit_reached", ".timeline")
            await shown(tab, re.compile("action generate.*dialect inprocess.*status 429"), ".timeline")
            assert await tab.violations() == []
            assert tab.faults == []


async def test_the_timeline_has_a_lane_for_each_kind_of_span(tmp_path: Path) -> None:
    """Servers that a sandbox reached have a lane, and so have kinds that only a newer service reports."""
    running = running_service(tmp_path=tmp_path, replies=[say("done")])
    async with running as (_, url), AsyncClient(url) as client, browser_tab(url) as tab:
        spec = timeline_task(evaluator={"kind": "command", "run": "true"})
        [done] = await client.wait([(await client.submit({"task": spec})).id])
        session = done.sessions[0].id
        view = json.loads(await client.reply_body(f"/v1/sessions/{session}/timeline"))
        now = view["now"]
        view["spans"] += [
            {"kind": kind, "name": name, "start": now, "end": now + 1, "data": {"refused": 1}}
            for kind, name in (
                ("network", "mirror.example:443"),
                ("failed_call", "a long one"),
                (HOSTILE, "of tomorrow"),
            )
        ]

        async def answer(route: Any) -> None:
            await route.fulfill(body=json.dumps(view), content_type="application/json")

        await tab.page.route(f"**/v1/sessions/{session}/timeline*", answer)
        await tab.open(f"sessions/{session}")
        await shown(tab, "Network", ".timeline")
        await tab.page.locator(".lanes .span.failed-span").get_by_text("mirror.example:443").wait_for()
        await tab.page.locator(".lanes .span.bad").get_by_text("a long one").wait_for()
        await tab.page.locator(".lanes .span").get_by_text("of tomorrow").wait_for()
        await stays_text(tab, 1280)
        assert tab.faults == []


BAD_CALLS = r"""
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen
import os

BASE, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
for path in [*8 * ["completions"], *map(str, range(9)), *2 * ["<img src=x onerror=hacked=1>\u202e\u05d0&lt;b&gt;"]]:
    try:
        urlopen(BASE + "/" + quote(path), b"{}")
    except HTTPError:
        pass
body = b'{"model": "policy", "messages": [{"role": "user", "content": "Hello?"}]}'
urlopen(Request(BASE + "/chat/completions", body, {"Authorization": "Bearer " + KEY}))
"""


@pytest.mark.parametrize("width", [1280, 400])
async def test_failed_model_calls_are_counted_by_kind(tmp_path: Path, width: int) -> None:
    hostile = "not_found: POST /v1/<img src=x onerror=hacked=1>?\u05d0&lt;b&gt;"
    spec = timeline_task(
        harness={"command": ["python3", "calls.py"]},
        evaluator={"kind": "command", "run": "true"},
        runtime={"kind": "process", "prepare": [{"write": BAD_CALLS, "to": "calls.py"}]},
    )
    running = running_service(tmp_path=tmp_path, replies=[say("hello")])
    async with running as (_, url), AsyncClient(url) as client, browser_tab(url, width=width) as tab:
        [done] = await client.wait([(await client.submit({"task": spec})).id])
        [session] = done.sessions
        assert session.result is not None
        assert (session.result.failed_calls[hostile], sum(session.result.failed_calls.values())) == (2, 19)
        await tab.open(f"sessions/{session.id}")
        await shown(tab, "Failed model calls")
        assert (await tab.text(".failedcalls p")).split() == ["Failed", "model", "calls", "19"]
        texts = await tab.page.locator(".failedcalls > ul li").all_inner_texts()
        assert texts[:2] == ["8 \u00d7 not_found: POST /v1/completions", f"2 \u00d7 {hostile}"]
        assert len(texts) == 8
        assert not await tab.page.locator(".failedcalls details li").first.is_visible()
        await tab.page.get_by_text("3 more kinds").click()
        await tab.page.locator(".failedcalls details li").last.wait_for()
        await stays_text(tab, width)
        await tab.open(f"groups/{done.id}")
        await shown(tab, "19 failed calls", "td.what")
        if width > 400:  # the list has no room for the column on a phone
            await tab.open("sessions")
            await shown(tab, "19 failed calls", ".listbody")
        await tab.open(f"compare/{session.id}/{session.id}")
        await shown(tab, "Failed model calls")
        assert await tab.page.locator("td").get_by_text("19", exact=True).count() == 2
        # a node's report may contain names that no gateway writes
        view = json.loads(await client.reply_body(f"/v1/sessions/{session.id}"))
        view["result"]["failed_calls"] = {HOSTILE: 1, "x" * 5000: 2, "__proto__": 3, "a\u202eb\nc": 4}

        async def answer(route: Any) -> None:
            await route.fulfill(body=json.dumps(view), content_type="application/json")

        await tab.page.route(f"**/v1/sessions/{session.id}", answer)
        await tab.open(f"sessions/{session.id}")
        await tab.page.locator(".failedcalls li").first.wait_for()
        texts = await tab.page.locator(".failedcalls li").all_inner_texts()
        assert texts[:3] == ["4 \u00d7 a\u27e8U+202E\u27e9b c", "3 \u00d7 __proto__", f"2 \u00d7 {'x' * 120}…"]
        assert texts[3].startswith("1 \u00d7 <script>window.hacked = 1</script>")
        await stays_text(tab, width)
        assert tab.faults == []


async def stays_text(tab: Tab, width: int) -> None:
    """Assert that hostile text in the session's view has no effect, and that the view is not wider than the screen."""
    assert await tab.page.evaluate("window.hacked === undefined")
    assert await tab.page.locator("main script, main img").count() == 0
    assert await tab.page.evaluate("document.documentElement.scrollWidth") <= width
    assert await tab.violations() == []


async def test_a_finished_run_and_a_file_have_the_failed_model_calls(tmp_path: Path) -> None:
    file = tmp_path / "session.html"
    spec = timeline_task(limits={"turns": 1}, evaluator={"kind": "command", "run": "true"})
    running = running_service(tmp_path=tmp_path, replies=[call("echo hi"), say("done")])
    async with running as (_, url), AsyncClient(url) as client:
        [done] = await client.wait([(await client.submit({"task": spec})).id])
        session = done.sessions[0].id
        assert await asyncio.to_thread(run_outrider, "show", session, "--html", str(file), "--url", url) == 0
    async with open_run(tmp_path / "data", None) as run, serving_run(run, 0) as url, browser_tab(url) as tab:
        await tab.open(f"sessions/{session}")
        await shown(tab, "limit_reached", ".failedcalls")
        await tab.page.goto(f"file://{file}")
        await shown(tab, "limit_reached", ".failedcalls")
        assert tab.faults == []


async def test_the_tokens_of_a_session_are_read(tmp_path: Path) -> None:
    async with page_world(tmp_path) as world, browser_tab(world.url, height=1000) as tab:
        session = session_of(world.parsers, 1)
        await tab.open(f"sessions/{session}")
        await shown(tab, "compaction continued")
        await picture(tab, "session")
        await tab.page.keyboard.press("t")
        turn = tab.page.locator("#turn-1")
        await turn.locator(".t.trained").first.wait_for()
        [*_, last] = [each for each in await world.client.turns(session, tokens=True) if each.index == 1]
        tokens = last.tokens
        assert tokens is not None
        assert await turn.locator(".t.trained").count() == len(tokens.output_ids)
        await turn.get_by_role("button", name=re.compile("prompt tokens before")).click()
        assert await turn.locator(".t").count() == len(tokens.output_ids) + len(tokens.prompt_delta)
        await turn.locator(".t.trained").nth(3).hover()
        shown_tip = await tab.text(".tip")
        assert f"{tokens.output_ids[3]}" in shown_tip
        assert f"{round(tokens.logprobs[3], 3):g}" in shown_tip
        # the title's tokens are dropped, as in the service's samples
        assert await tab.page.locator("#turn-0 .t.dropped").count() > 0
        result = (await world.client.session(session)).result
        assert result is not None
        for index in range(9):  # the page draws only turns near the visible part
            await tab.page.locator(f"#turn-{index}").scroll_into_view_if_needed()
            await tab.page.locator(f"#turn-{index} .t").first.wait_for()
        assert await tab.page.locator(".turn .t.trained").count() == result.tokens.trained
        assert await tab.page.locator(".turn .t.dropped").count() == result.tokens.dropped
        await tab.page.get_by_role("button", name="Log-probability").click()
        await turn.locator(".t[class*=lp]").first.wait_for()
        assert "colour=logprob" in tab.page.url
        await tab.page.reload()
        await turn.locator(".t[class*=lp]").first.wait_for()
        await tab.page.evaluate("document.getElementById('conversation').scrollIntoView()")
        await picture(tab, "tokens")
        await tab.page.get_by_role("button", name="Version").click()
        await turn.locator(".t.v0").first.wait_for()
        assert tab.faults == []


async def test_two_sessions_of_a_group_are_compared(tmp_path: Path) -> None:
    async with page_world(tmp_path) as world, browser_tab(world.url) as tab:
        await tab.open(f"groups/{world.parsers}")
        await tab.page.get_by_label("Compare sample 0").check()
        await tab.page.get_by_label("Compare sample 3").check()
        await tab.page.get_by_role("button", name="Compare 2/2").click()
        await shown(tab, "After 2 common messages, in turn 1, in what the model sampled.")
        left, right = tab.page.locator(".side").nth(0), tab.page.locator(".side").nth(1)
        assert "First I read the parser" in await left.locator("mark").inner_text()
        assert "I rename it" in await right.locator("mark").inner_text()
        await picture(tab, "compare")
        # a session, compared with itself
        await tab.open(f"compare/{session_of(world.hostile, 0)}/{session_of(world.hostile, 0)}")
        await shown(tab, "The conversations are the same")
        assert tab.faults == []


async def test_a_group_is_cancelled(tmp_path: Path) -> None:
    async with page_world(tmp_path) as world, browser_tab(world.url) as tab:
        group = await world.client.submit({"task": task("Wait for me"), "n": 2})
        await tab.open("groups?state=active")
        await tab.page.get_by_role("link", name=group.id).click()
        await asyncio.wait_for(world.engine.stalled.wait(), 30)
        await tab.page.get_by_role("button", name="cancel").click()
        assert not (await world.client.group(group.id)).cancelled  # the page first shows a confirmation
        await tab.page.get_by_role("button", name="Yes, cancel").click()
        [done] = await world.client.wait([group.id])
        assert done.cancelled
        await shown(tab, "cancelled", "h1")
        assert tab.faults == []


async def test_hostile_content_stays_text(tmp_path: Path) -> None:
    async with page_world(tmp_path) as world, browser_tab(world.url) as tab:
        note = "event => (window.refused ||= []).push(event.violatedDirective)"
        refused = f"document.addEventListener('securitypolicyviolation', {note})"
        await tab.page.add_init_script(refused)
        places = ["", "groups", "sessions", f"groups/{world.hostile}"]
        session = session_of(world.hostile, 0)
        places += [
            f"sessions/{session}",
            f"sessions/{session}?as=tokens",
            f"compare/{session}/{session_of(world.hostile, 1)}",
        ]
        places += [
            "groups?label=%3Cimg%20src%3Dx%20onerror%3Dhacked%3D1%3E",
            "sessions/%3Cscript%3Ehacked=1%3C%2Fscript%3E",
        ]
        places += ["javascript:alert(1)", "sessions/..%2F..%2Fv1%2Ftokens"]
        for place in places:
            await tab.open(place)
            await tab.page.locator("#main").wait_for()
            await tab.page.wait_for_timeout(300)
            assert await tab.page.evaluate("window.hacked === undefined"), place
            assert await tab.page.evaluate("window.refused === undefined"), place
            foreign = "[...document.querySelectorAll('script,iframe,object,embed,svg[onload],img[onerror]')].length"
            assert await tab.page.evaluate(foreign) == 1, place  # the page's own script
            hrefs = await tab.page.evaluate("[...document.querySelectorAll('a')].map(a => a.getAttribute('href'))")
            assert all(href.startswith("#") for href in hrefs), place
        await tab.open(f"sessions/{session}")
        await shown(tab, "Cancel this group")
        text = await tab.text("#conversation")
        assert "<script>window.hacked = 1</script>" in text
        assert "\u27e8U+202E\u27e9gnp.exe\u27e8U+202C\u27e9" in text
        assert not set(text) & set("\u202e\u202c\u200b\x00\x07\x1b")
        assert await tab.page.get_by_role("button", name="Cancel this group").count() == 0
        assert LOOKS_LIKE_UI in text
        assert await tab.page.locator("dialog[open]").count() == 0
        assert all(url.startswith((world.url, "blob:", "data:")) for url in tab.asked)
        assert tab.faults == []


async def test_a_token_is_asked_for_once_and_kept_out_of_urls(tmp_path: Path) -> None:
    async with page_world(tmp_path, token="a-long-secret-of-the-operator") as world, browser_tab(world.url) as tab:
        await tab.open("groups")
        ask = tab.page.get_by_label("Token", exact=True)
        await ask.fill("wrong")
        await ask.press("Enter")
        await shown(tab, "does not accept this token", "dialog[open]")
        await ask.fill("a-long-secret-of-the-operator")
        await ask.press("Enter")
        await tab.page.get_by_role("link", name=world.parsers).wait_for()
        await shown(tab, "live", ".connection")
        await tab.page.reload()
        await tab.page.get_by_role("link", name=world.parsers).wait_for()
        assert await tab.page.locator("dialog[open]").count() == 0
        assert not any("secret" in url for url in tab.asked)
        assert await tab.page.evaluate("localStorage.length === 0 && document.cookie === ''")
        await tab.page.get_by_role("button", name="forget token").click()
        await tab.page.get_by_label("Token", exact=True).wait_for()
        # a read-only token: the conversation is shown as text, and the tokens are not
        async with AsyncClient(world.url, token="a-long-secret-of-the-operator") as admin:
            made = await admin.create_token("reader", role="read", tenant=OPERATOR_TENANT)
        await tab.page.get_by_label("Token", exact=True).fill(made.text)
        await tab.page.get_by_label("Token", exact=True).press("Enter")
        await tab.open(f"sessions/{session_of(world.parsers, 0)}?as=tokens")
        await shown(tab, "Tokens need a token of the service with the role submit.")
        await shown(tab, "First I read the parser")
        assert tab.faults == []


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (400, False), (400, True)])
async def test_no_view_violates_a_rule_of_axe(tmp_path: Path, width: int, dark: bool) -> None:
    async with page_world(tmp_path) as world, browser_tab(world.url, width=width, dark=dark) as tab:
        found: dict[str, list[str]] = {}
        for name, place in views(world).items():
            await tab.open(place)
            await tab.page.locator("#main h1, #main h2").first.wait_for(state="attached")
            await tab.page.wait_for_timeout(500)
            found[name] = await tab.violations()
            if (wide := await tab.page.evaluate("document.documentElement.scrollWidth")) > width:
                found[name].append(f"it is {wide} wide")
            if name == "tokens" and width == 400:
                await tab.page.evaluate("document.getElementById('conversation')?.scrollIntoView()")
            if dark:
                await picture(tab, f"{name}{'-phone' if width == 400 else '-dark'}")
        await tab.page.keyboard.press("?")
        found["help"] = await tab.violations()
        assert {name: each for name, each in found.items() if each} == {}
        assert tab.faults == []


def views(world: PageWorld) -> dict[str, str]:
    one, two = session_of(world.parsers, 1), session_of(world.parsers, 3)
    return {
        "overview": "", "groups": "groups", "sessions": "sessions", "group": f"groups/{world.parsers}",
        "session": f"sessions/{one}", "tokens": f"sessions/{one}?as=tokens&colour=logprob",
        "error": f"sessions/{session_of(world.parsers, 4)}", "compare": f"compare/{one}/{two}", "nothing": "elsewhere",
    }  # fmt: skip


async def test_the_whole_page_works_by_keyboard(tmp_path: Path) -> None:
    async with page_world(tmp_path) as world, browser_tab(world.url) as tab:
        await tab.open()
        await shown(tab, "Newest groups")
        await tab.page.keyboard.press("?")
        await tab.page.locator("dialog[open]").wait_for()
        await tab.page.keyboard.press("Escape")
        await tab.page.locator("dialog[open]").wait_for(state="detached")
        await tab.page.keyboard.press("/")
        await tab.page.keyboard.type(world.parsers)
        await tab.page.keyboard.press("Enter")
        await shown(tab, world.parsers, "h1")
        for key in ("j", "x", "j", "x", "c"):
            await tab.page.keyboard.press(key)
        await shown(tab, "Where they part")
        await tab.page.keyboard.press("3")
        await tab.page.locator(".listbody .row").first.wait_for()
        await tab.page.keyboard.press("j")
        await tab.page.keyboard.press("j")
        await tab.page.keyboard.press("Enter")
        await tab.page.locator("main.session h1").wait_for()
        before = await tab.page.evaluate("document.documentElement.dataset.theme")
        await tab.page.keyboard.press("d")
        assert await tab.page.evaluate("document.documentElement.dataset.theme") != before
        await tab.page.keyboard.press("u")
        await tab.page.locator("table.sessions").wait_for()


async def test_a_session_can_be_copied(tmp_path: Path) -> None:
    async with page_world(tmp_path) as world, browser_tab(world.url) as tab:
        await tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        session = session_of(world.parsers, 3)
        await tab.open(f"sessions/{session}")
        await shown(tab, "I rename it")

        async def copied(name: str) -> str:
            if not await tab.page.locator(".menu[open]").count():
                await tab.page.get_by_text("Copy …").click()
            await tab.page.get_by_role("button", name=name).click()
            await tab.page.get_by_role("button", name="Copied").wait_for()
            text = str(await tab.page.evaluate("navigator.clipboard.readText()"))
            await tab.page.get_by_role("button", name="Copied").wait_for(state="detached")
            return text

        whole = json.loads(await copied("JSON"))
        assert (whole["session"]["id"], len(whole["turns"])) == (session, 3)
        assert await copied("curl") == f"curl '{world.url}/v1/sessions/{session}/turns?tokens=true'"
        script = json.loads(await copied("Replay script"))
        assert script["replies"] == [turn.sampled for turn in await world.client.turns(session)]
        assert (await copied("Link")).endswith(f"#/sessions/{session}")


async def test_a_session_in_a_file_needs_no_service(tmp_path: Path) -> None:
    file = tmp_path / "session.html"
    async with page_world(tmp_path) as world:
        for group, sample in ((world.parsers, 1), (world.hostile, 0)):
            session = session_of(group, sample)
            ran = await asyncio.to_thread(run_outrider, "show", session, "--html", str(file), "--url", world.url)
            assert ran == 0
            async with browser_tab(f"file://{file}") as tab:
                await tab.page.goto(f"file://{file}")
                await shown(tab, session, "h1")
                await tab.page.locator(".lanes .span.link").first.wait_for()
                await tab.page.keyboard.press("t")
                await tab.page.locator(".t.trained").first.wait_for()
                assert await tab.page.evaluate("window.hacked === undefined")
                assert tab.asked == [f"file://{file}"]
                assert await tab.violations() == []
                assert tab.faults == []


def run_outrider(*arguments: str) -> int:
    return subprocess.run([*PROGRAM, *arguments], capture_output=True, check=False, timeout=60).returncode


async def test_a_finished_run_is_looked_at_without_a_service(tmp_path: Path) -> None:
    async with page_world(tmp_path) as world:
        session, failed = session_of(world.parsers, 1), session_of(world.parsers, 4)
    tokenizer = Tokenizer.load(tmp_path / "page-tokenizer")
    async with (
        open_run(tmp_path / "data", tokenizer) as run,
        serving_run(run, 0) as url,
        browser_tab(url) as tab,
    ):
        await tab.open()
        await shown(tab, "none: this is a finished run")
        await shown(tab, "harness_error")
        await tab.open("sessions?stop_reason=error")
        await tab.page.get_by_role("link", name=failed).wait_for()
        assert await tab.page.get_by_role("link", name=session).count() == 0
        await tab.open(f"sessions/{session}?as=tokens")
        await tab.page.locator(".t.trained").first.wait_for()
        await shown(tab, "Evaluator's log")
        await tab.page.get_by_role("button", name="view").first.click()
        await tab.page.locator(".opened pre").wait_for()
        assert tab.faults == []


async def test_images_are_shown_and_what_is_no_picture_is_not(tmp_path: Path) -> None:
    async with picture_service(tmp_path) as (_, url, _), AsyncClient(url) as client, browser_tab(url) as tab:
        group = await client.submit({"task": painting_task()})
        await client.wait([group.id])
        await tab.open(f"sessions/{session_of(group.id, 0)}")
        await shown(tab, "An image that cannot be shown")
        await shown(tab, re.compile("An image at https://.*loads nothing from elsewhere"))
        image = tab.page.get_by_alt_text("An image of the conversation")
        assert await image.evaluate("image => [image.naturalWidth, image.naturalHeight]") == [200, 80]
        assert not [asked for asked in tab.asked if "example.org" in asked]
        assert tab.faults == []


@pytest.mark.parametrize("dark", [False, True])
async def test_the_last_hour_is_drawn_as_curves(tmp_path: Path, dark: bool) -> None:
    """A test's service is only seconds old, so the page gets invented numbers for the last hour."""
    now = time.time()
    points = [
        {
            "at": now - 3600 + 10 * n, "sessions_done": round(9 + 5 * math.sin(n / 30)), "sessions_failed": n % 37 == 0,
            "tokens_sampled": round(42_000 + 9000 * math.sin(n / 23) + 2500 * math.sin(n * 1.7)), "groups_done": 1,
            "calls": round(310 + 60 * math.sin(n / 23)), "calls_failed": 0,
            "queued": max(0, 260 - n), "running": 64 - n % 5,
        }
        for n in range(360)
    ]  # fmt: skip
    body = json.dumps({"now": now, "step_seconds": 10.0, "points": points})

    async def answer(route: Any) -> None:
        await route.fulfill(body=body, content_type="application/json")

    async with page_world(tmp_path) as world, browser_tab(world.url, height=1000, dark=dark) as tab:
        for number in range(4):
            labels = {"suite": ("parsers", "shells")[number % 2], "task": f"task-{number}"}
            group = await world.client.submit({"task": task("Please fix the parser.", labels=labels), "n": 4})
            await world.client.wait([group.id])
        await tab.page.route("**/v1/rates", answer)
        await world.client.submit({"task": task("Work slowly", labels={"suite": "slow"}), "n": 2})
        await tab.open()
        await shown(tab, "Tokens per second")
        assert await tab.page.locator(".charts canvas").count() == 4
        await tab.page.locator(".charts [role=img]").first.wait_for()
        spoken = await tab.page.locator(".charts [role=img]").nth(1).get_attribute("aria-label")
        assert re.fullmatch(r"Tokens per second: sampled [\d.]+k?", str(spoken))
        drawn = (
            "canvas => [...canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data].some(v => v)"
        )
        assert await tab.page.locator(".charts canvas").first.evaluate(drawn)
        assert await tab.violations() == []
        await asyncio.wait_for(world.engine.stalled.wait(), 30)
        await tab.page.wait_for_timeout(1500)
        if not dark:
            await picture(tab, "overview")
        world.engine.release()
        assert tab.faults == []


MANY = 100_000


async def test_100_000_sessions_stay_smooth(tmp_path: Path) -> None:
    async with page_world(tmp_path) as world:
        group = world.parsers
    await asyncio.to_thread(multiply, tmp_path / "data", group, MANY // 6)
    async with running_service(tmp_path=tmp_path) as (_, url), browser_tab(url) as tab:
        async with AsyncClient(url) as client:  # the service's cached figures catch up with the copied rows
            await client.reply_body("/v1/sessions")
        took: dict[str, float] = {}
        for name, place, ready in (
            ("overview", "", ".rewards tbody tr"),
            ("groups", "groups", ".listbody .row"),
            ("sessions", "sessions", ".listbody .row"),
        ):
            await tab.page.goto("about:blank")
            began = asyncio.get_running_loop().time()
            await tab.open(place)
            await tab.page.locator(ready).first.wait_for()
            took[name] = asyncio.get_running_loop().time() - began
        # scroll 150 screens down, one screen per frame, so that the list loads all pages in between
        stalls = await tab.page.evaluate(
            """async () => {
                const list = document.querySelector('.listbody'), gaps = []
                let last = performance.now()
                for (let n = 0; n < 150; n++) {
                    list.scrollTop += list.clientHeight
                    const now = await new Promise(requestAnimationFrame)
                    gaps.push(now - last)
                    last = now
                }
                return gaps.sort((a, b) => b - a).slice(0, 5)
            }"""
        )
        rows = await tab.page.locator(".listbody .row").count()
        ids = await tab.page.locator(".listbody .row .id").all_inner_texts()
        assert len(set(ids)) == len(ids)
        whole = await tab.text(".filters")
        print(f"first views {took}, longest frames {stalls} ms, {rows} rows in the document, {whole!r}")
        assert rows < 100
        assert int(re.findall(r"(\d+)\+ sessions", whole.replace("k", "00").replace(".", ""))[0]) >= 1000
        # The target is 1 s for the first view. The limits are wider, for a machine with other load.
        assert max(took.values()) < 4, took
        assert stalls[0] < 500, stalls
        assert tab.faults == []


async def test_five_open_pages_do_not_slow_model_calls(tmp_path: Path) -> None:
    async with page_world(tmp_path) as world:
        group = world.parsers
    await asyncio.to_thread(multiply, tmp_path / "data", group, MANY // 6)
    async with running_service(tmp_path=tmp_path, replies=[say("yes")]) as (_, url), httpx.AsyncClient() as http:

        async def milliseconds() -> list[float]:
            """Make 200 calls of one session. Returns their durations in ms, sorted."""
            agent = Agent(http, await Owner(http, url).open())
            took = []
            for number in range(200):
                began = time.perf_counter()
                reply = await agent.post([{"role": "user", "content": f"question {number}"}])
                took.append((time.perf_counter() - began) * 1000)
                assert reply.status_code == 200
            return sorted(took)

        # The service's cached figures catch up with the copied rows.
        await Owner(http, url).call("GET", "/sessions")
        await milliseconds()  # the first calls are slower
        alone = await milliseconds()
        async with browser_tab(url) as tab:
            places = ["", "groups", "sessions", f"groups/{group}", f"sessions/{session_of(group, 1)}"]
            for place in places:
                page = await tab.page.context.new_page()
                await page.goto(f"{url}/#/{place}")
                await page.locator("#main").wait_for()
            await tab.page.wait_for_timeout(3000)
            watched = await milliseconds()
        medians = f"{alone[100]:.2f} ms alone, {watched[100]:.2f} ms with five pages"
        print(f"median {medians}; 95 %: {alone[190]:.2f}, {watched[190]:.2f}")
        # On a machine with few cores, the browser itself takes processor time from the service.
        assert watched[100] < 2 * alone[100] + 1


async def test_a_group_is_submitted_again(tmp_path: Path) -> None:
    async with page_world(tmp_path) as world, browser_tab(world.url) as tab:
        await tab.open(f"groups/{world.hostile}")
        await tab.page.get_by_role("button", name="submit again").click()
        await tab.page.get_by_role("button", name="Yes, submit again").click()
        await tab.page.locator("h1").get_by_text(world.hostile).wait_for(state="detached")
        [newest, *_] = json.loads(await world.client.reply_body("/v1/groups", {"limit": 1}))["groups"]
        await shown(tab, newest["id"], "h1")
        assert newest["id"] not in (world.hostile, world.parsers)
        await world.client.wait([newest["id"]])
        assert tab.faults == []


async def test_the_doctor_is_asked_from_the_page(tmp_path: Path) -> None:
    async with page_world(tmp_path) as world, browser_tab(world.url) as tab:
        reply = json.loads(await world.client.reply_body("/v1/diagnosis", {"group": world.parsers}))
        await tab.open(f"groups/{world.parsers}")
        await tab.page.get_by_role("button", name="Look for faults").click()
        await shown(tab, re.compile(f"^{len(reply['findings'])} findings? in 6 sessions of 1 group$"))
        for finding in reply["findings"]:
            await shown(tab, finding["text"])
            await shown(tab, finding["next"])
        assert await tab.violations() == []
        await tab.open("")
        await tab.page.get_by_role("button", name="Look for faults").click()
        await shown(tab, re.compile("findings? in 8 sessions of 2 groups"))
        assert await tab.violations() == []
        assert tab.faults == []
