"""The page in a real browser, with replies that are late, broken, hostile or missing."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
from aiohttp import web

from support.browsing import Tab, browser_tab
from support.page_stand_in import NOW, failure, group, rates, session, stand_in, status, turn
from support.waiting import until

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


async def shown(tab: Tab, text: str, selector: str = "#main") -> None:
    """Wait until the text is visible."""
    await tab.page.locator(selector).get_by_text(text).first.wait_for()


def in_turn(*replies: Any) -> Any:
    """Return an answer that gives the replies one after another, and then the last one for ever. A reply is JSON, or a
    function that makes a response. Before a reply there may be an event, which is awaited first."""
    left = list(replies)

    async def answer(_: web.Request) -> web.StreamResponse:
        reply = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(reply, asyncio.Event):
            following = left.pop(0) if len(left) > 1 else left[0]
            await reply.wait()
            reply = following
        return reply() if callable(reply) else web.json_response(reply)

    return answer


async def test_the_overview_shows_background_work_that_fails() -> None:
    chore = {"name": "gc", "node": None, "since": NOW, "last": NOW, "count": 3, "error": "the disk is full\u202e"}
    async with stand_in() as service, browser_tab(service.url) as tab:
        service.replies["/v1/status"] = status(failing=[chore])
        await tab.open()
        await shown(tab, "the disk is full\u27e8U+202E\u27e9")
        assert tab.faults == []


async def test_failed_sessions_are_counted_once_in_the_rate() -> None:
    point = {"at": NOW, "sessions_done": 5, "sessions_failed": 5, "tokens_sampled": 0}
    async with stand_in() as service, browser_tab(service.url) as tab:
        service.replies["/v1/rates"] = rates(point)
        await tab.open()
        await shown(tab, "Sessions per minute")
        assert await tab.text("dl.tiles div:has-text('Sessions per minute') dd") == "60"


async def test_the_share_without_spread_is_of_groups_that_are_known_whole() -> None:
    """Of the oldest group, the newest sessions are only a part, which may be alike by chance."""
    groups = [
        group(id, n=n, state="done", finished=NOW, done=n, errors=0, mean_reward=0.5)
        for id, n in (("g-2", 2), ("g-1", 4))
    ]
    rewards = {"g-2": (0.0, 1.0), "g-1": (1.0, 1.0)}
    sessions = [
        session(f"s-{id[2:]}-{n}", group=id, reward=each) for id in rewards for n, each in enumerate(rewards[id])
    ]
    async with stand_in() as service, browser_tab(service.url) as tab:
        service.replies |= {"/v1/groups": {"groups": groups}, "/v1/sessions": {"sessions": sessions}}
        await tab.open()
        await tab.page.locator(".rewards tbody tr").wait_for()
        assert (await tab.text(".rewards tbody tr")).split()[-2:] == ["0", "%"]


async def test_the_mean_of_a_long_finished_run_says_what_it_is_of() -> None:
    async with stand_in() as service, browser_tab(service.url) as tab:
        del service.replies["/v1/status"]
        go = asyncio.Event()
        sessions = [session(f"s-{n}-0", reward=0.5) for n in range(300)]

        async def answer(_: web.Request) -> web.Response:
            await go.wait()
            return web.json_response({"sessions": sessions, "after": "s-299-0"})

        service.replies["/v1/sessions"] = answer
        await tab.open()
        await shown(tab, "Loading the sessions")
        assert await tab.page.get_by_text("No errors.").count() == 0
        go.set()
        await shown(tab, "of the newest 300")


async def test_equal_rewards_are_all_alike() -> None:
    """The mean of three times 0.1 is not exactly 0.1."""
    sessions = [session(f"s-1-{n}", reward=0.1) for n in range(3)]
    async with stand_in() as service, browser_tab(service.url) as tab:
        service.replies["/v1/groups/g-1"] = group(n=3, state="done", finished=NOW, sessions=sessions)
        await tab.open("groups/g-1")
        await shown(tab, "Mean reward")
        assert await tab.page.get_by_text("all alike").count() == 1


async def test_minutes_have_at_most_59_seconds() -> None:
    async with stand_in() as service, browser_tab(service.url) as tab:
        service.replies["/v1/groups/g-1"] = group(state="done", created=NOW, finished=NOW + 119.7, sessions=[])
        await tab.open("groups/g-1")
        assert (await tab.text("dl.tiles div:has-text('Took') dd")).startswith("2 min 00")


async def test_a_token_that_no_header_can_hold_is_refused() -> None:
    async with stand_in() as service, browser_tab(service.url) as tab:
        service.replies["/v1/status"] = service.replies["/v1/events"] = in_turn(partial(failure, 401, "no token"))
        await tab.open()
        ask = tab.page.get_by_label("Token", exact=True)
        await ask.fill("\u201ctoken\u201d")
        await ask.press("Enter")
        await shown(tab, "A token has no such characters", "dialog[open]")
        assert await tab.page.evaluate("sessionStorage.length") == 0
        assert tab.faults == []


async def test_the_file_that_was_asked_for_last_is_shown() -> None:
    async with stand_in() as service, browser_tab(service.url) as tab:
        slow = asyncio.Event()
        files = [{"path": f"/{name}", "size": 5, "sha256": "0" * 64} for name in ("first", "second")]
        base = "/v1/sessions/s-1-0"
        service.replies[base] = session(reward=1.0)
        service.replies[f"{base}/artifacts"] = {"attempt": 1, "artifacts": files, "left_out": []}
        service.replies[f"{base}/artifacts/first"] = in_turn(slow, partial(web.Response, text="text of the first"))
        service.replies[f"{base}/artifacts/second"] = in_turn(partial(web.Response, text="text of the second"))
        await tab.open("sessions/s-1-0")
        for number in (0, 1):
            await tab.page.get_by_role("button", name="view").nth(number).click()
            await until(lambda: service.count(f"{base}/artifacts/first"))
        await shown(tab, "text of the second")
        slow.set()
        await asyncio.sleep(0.5)
        assert await tab.page.get_by_text("text of the first").count() == 0


async def test_a_file_that_is_cut_off_says_so() -> None:
    async with stand_in() as service, browser_tab(service.url) as tab:
        base = "/v1/sessions/s-1-0"
        size = 3 << 19
        service.replies[base] = session(reward=1.0)
        files = [{"path": "/long", "size": size, "sha256": "0" * 64}]
        service.replies[f"{base}/artifacts"] = {"attempt": 1, "artifacts": files, "left_out": []}
        service.replies[f"{base}/artifacts/long"] = in_turn(partial(web.Response, text="x" * size))
        await tab.open("sessions/s-1-0")
        await tab.page.get_by_role("button", name="view").click()
        await shown(tab, "/long: the first 1.0 MiB of 1.5 MiB")


async def test_a_reply_of_angle_brackets_does_not_freeze_the_page() -> None:
    async with stand_in() as service, browser_tab(service.url) as tab:
        base = "/v1/sessions/s-1-0"
        service.replies[base] = session(reward=1.0)
        service.replies[f"{base}/turns"] = {"turns": [turn(sampled="<" * 1_500_000)]}
        await tab.open("sessions/s-1-0")
        await shown(tab, "turn 0")
        assert tab.faults == []


def calling(*arguments: str) -> dict[str, Any]:
    """Return the turns of a session with calls of a tool."""
    calls = [{"id": str(n), "name": "tool", "arguments": each} for n, each in enumerate(arguments)]
    reply = {"role": "assistant", "content": "", "tool_calls": calls}
    tokens = {"prompt_delta": [1], "output_ids": [2], "logprobs": [0.0], "messages": [], "reply": reply}
    return {"turns": [turn(tokens=tokens)]}


async def test_arguments_of_calls_are_shown_as_they_were_sampled() -> None:
    arguments = r'{"id": 9007199254740993, "text": "a\\nb\nc \"d\" C:\\new", "list": [1.0, {}, []], "id": 1}'
    async with stand_in() as service, browser_tab(service.url) as tab:
        base = "/v1/sessions/s-1-0"
        service.replies[base] = session(reward=1.0)
        service.replies[f"{base}/turns"] = calling(arguments)
        await tab.open("sessions/s-1-0")
        await tab.page.locator(".toolcall summary").click()
        assert await tab.page.locator(".toolcall pre").text_content() == (
            '{\n  "id": 9007199254740993,\n  "text": "a\\\\nb\nc "d" C:\\\\new",\n'
            '  "list": [\n    1.0,\n    {},\n    []\n  ],\n  "id": 1\n}'
        )


async def test_arguments_that_are_nested_deeply_do_not_freeze_the_page() -> None:
    deep = "[" * 4000 + "]" * 4000
    async with stand_in() as service, browser_tab(service.url) as tab:
        base = "/v1/sessions/s-1-0"
        service.replies[base] = session(reward=1.0)
        service.replies[f"{base}/turns"] = calling(*[deep] * 200)
        await tab.open("sessions/s-1-0")
        await tab.page.locator(".toolcall").first.wait_for()
        began = await tab.page.evaluate("performance.now()")
        await tab.page.keyboard.press("j")
        await tab.page.locator(".turn.chosen").wait_for()
        assert await tab.page.evaluate("performance.now()") - began < 2000
        assert tab.faults == []


async def test_the_code_of_an_error_is_shown_with_its_control_characters() -> None:
    error = {"boundary": "runtime", "code": "a\u202eb", "message": "m"}
    one = session(state="done", result={"stop_reason": "error", "error": error})
    async with stand_in() as service, browser_tab(service.url) as tab:
        service.replies["/v1/groups/g-1"] = group(sessions=[one])
        service.replies["/v1/sessions/s-1-0"] = one
        service.replies["/v1/sessions/s-1-0/turns"] = {"turns": []}
        for place in ("groups/g-1", "compare/s-1-0/s-1-0"):
            await tab.open(place)
            await shown(tab, "a\u27e8U+202E\u27e9b: m")
