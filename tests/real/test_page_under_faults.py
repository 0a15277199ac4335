"""The page in a real browser, with replies that are late, broken, hostile or missing."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
from aiohttp import web

from support.browsing import Tab, browser_tab
from support.page_stand_in import NOW, StandIn, failure, group, rates, session, stand_in, status, turn
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


# --- figures


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
    """The newest sessions contain only a part of the oldest group. This part may have equal rewards by chance."""
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


async def test_nothing_is_said_of_data_that_are_not_there() -> None:
    """The index of runs may be under way for minutes after an upgrade: until then lists get a 429."""
    async with stand_in() as service, browser_tab(service.url) as tab:
        broken = session(
            result={"stop_reason": "error", "error": {"boundary": "runtime", "code": "lost", "message": ""}}
        )
        ready = asyncio.Event()

        async def sessions(_: web.Request) -> web.Response:
            if ready.is_set():
                return web.json_response({"sessions": [broken], "groups": [], "after": None})
            return failure(429, "the index of runs is being made")

        service.replies["/v1/sessions"] = service.replies["/v1/groups"] = sessions
        await tab.page.clock.install()
        await tab.open()
        await shown(tab, "the index of runs is being made")
        for false in ("No errors.", "Nothing runs.", "There are no groups yet.", "No group has a reward yet."):
            assert await tab.page.get_by_text(false).count() == 0, false
        ready.set()
        await tab.page.clock.run_for(21_000)  # the page repeats a failed request, here after 20 seconds
        await tab.page.get_by_role("link", name="lost").wait_for()
        assert tab.faults == []


async def test_a_filter_that_cannot_be_used_is_not_ignored() -> None:
    async with stand_in() as service, browser_tab(service.url) as tab:

        async def sessions(request: web.Request) -> web.Response:
            if "label" in request.query or "min_reward" in request.query:
                return failure(422, "a label is NAME=VALUE")
            return web.json_response({"sessions": [session()], "after": None})

        service.replies["/v1/sessions"] = sessions
        for query in ("label=suite", "min_reward=0%2C5"):
            await tab.open(f"sessions?{query}")
            await shown(tab, "a label is NAME=VALUE")
            assert await tab.page.locator(".listbody .row").count() == 0
            await tab.page.goto("about:blank")


# --- broken replies


@pytest.mark.parametrize("how", ["html", "cut off"])
async def test_a_reply_that_is_no_json_is_an_error_with_a_hint(how: str) -> None:
    async with stand_in() as service, browser_tab(service.url) as tab:

        async def answer(request: web.Request) -> web.StreamResponse:
            if how == "html":
                return web.Response(text="<h1>Sign in</h1>", content_type="text/html")
            reply = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "1000"})
            await reply.prepare(request)
            await reply.write(b'{"version": ')
            assert request.transport is not None
            request.transport.abort()
            return reply

        service.replies["/v1/status"] = service.replies["/v1/sessions"] = answer
        for place in ("", "sessions"):
            await tab.open(place)
            await tab.page.locator("#main .failed span").first.wait_for()
        service.replies["/v1/status"] = status()
        service.replies["/v1/sessions"] = {"sessions": [session()], "after": None}
        await tab.page.get_by_role("link", name="s-1-0").wait_for()
        assert tab.faults == []


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


async def test_the_page_tries_again_as_it_says() -> None:
    async with stand_in() as service, browser_tab(service.url) as tab:
        service.replies["/v1/groups/g-1"] = in_turn(
            partial(failure, 503, "the service is stopping"), group(sessions=[session()])
        )
        await tab.open("groups/g-1")
        await shown(tab, "the service is stopping")
        await tab.page.get_by_role("link", name="s-1-0").wait_for()
        service.replies["/v1/sessions"] = in_turn(
            partial(failure, 503, "it stops"), {"sessions": [session()], "after": None}
        )
        await tab.open("sessions")
        await shown(tab, "it stops")
        await tab.page.get_by_role("link", name="s-1-0").wait_for()


# --- late replies and live changes


async def test_events_do_not_keep_a_slow_reply_away() -> None:
    """Each event makes the page ask again. A reply that takes longer than the pause between events arrives all the
    same."""
    async with stand_in() as service, browser_tab(service.url) as tab:

        async def slow(_: web.Request) -> web.Response:
            await asyncio.sleep(1.5)
            return web.json_response(group(sessions=[session()]))

        service.replies["/v1/groups/g-1"] = slow
        await tab.open("groups/g-1")
        await until(lambda: service.streams)
        for _ in range(30):
            await service.event("session.state", session="s-1-0")
            await asyncio.sleep(0.2)
        assert await tab.page.get_by_role("link", name="s-1-0").count() == 1


async def test_an_event_during_a_reply_is_not_lost() -> None:
    """A list that is being read when an event comes is read once more."""
    async with stand_in() as service, browser_tab(service.url) as tab:
        go = asyncio.Event()
        done = {"sessions": [session(reward=1.0)], "after": None}
        before = {"sessions": [session()], "after": None}
        service.replies["/v1/sessions"] = in_turn(before, go, before, done)
        await tab.open("sessions")
        await shown(tab, "running", ".listbody")
        await until(lambda: service.streams)
        await service.event("session.state", session="s-1-0")
        await until(lambda: service.count("/v1/sessions") == 2)
        await service.event("session.done", session="s-1-0")
        await asyncio.sleep(2.5)
        go.set()
        await shown(tab, "completed", ".listbody")


async def test_a_late_reply_to_an_older_filter_changes_nothing() -> None:
    async with stand_in() as service, browser_tab(service.url) as tab:
        old, new = asyncio.Event(), asyncio.Event()

        async def sessions(request: web.Request) -> web.Response:
            error = request.query.get("error")
            await (old if error == "old" else new).wait()
            return web.json_response({"sessions": [], "after": None})

        service.replies["/v1/sessions"] = sessions
        await tab.open("sessions?error=old")
        await until(lambda: service.count("/v1/sessions") == 1)
        await tab.open("sessions?error=new")
        await until(lambda: service.count("/v1/sessions") == 2)
        old.set()
        await asyncio.sleep(0.5)
        assert await tab.page.get_by_text("No session matches these filters.").count() == 0
        new.set()
        await shown(tab, "No session matches these filters.")


class Listed:
    """A list of sessions by pages of 200, newest first."""

    def __init__(self, service: StandIn) -> None:
        self.sessions: list[dict[str, Any]] = []
        self.failures = 0
        service.replies["/v1/sessions"] = self.answer

    def add(self, number: int) -> None:
        for _ in range(number):
            self.sessions.insert(0, session(f"s-{len(self.sessions):04}-0"))

    async def answer(self, request: web.Request) -> web.Response:
        after, limit = request.query.get("after"), int(request.query["limit"])
        if after is not None and self.failures:
            self.failures -= 1
            return failure(503, "it stops")
        fits = [each for each in self.sessions if request.query.get("state") in (None, each["state"])]
        first = 0 if after is None else 1 + [each["id"] for each in fits].index(after)
        page = fits[first : first + limit]
        return web.json_response({"sessions": page, "after": page[-1]["id"] if len(page) == limit else None})


async def to_the_end(tab: Tab) -> None:
    """Scroll to the end of the list until all rows have come. Until then, the number of rows has a plus."""
    await tab.page.evaluate(
        """async () => {
            const list = document.querySelector('.listbody')
            for (let n = 0; n < 300 && document.querySelector('.filters').textContent.includes('+'); n++) {
                list.scrollTop = list.scrollHeight
                await new Promise((done) => setTimeout(done, 100))
            }
        }"""
    )


async def test_a_burst_of_sessions_leaves_no_gap_in_a_list() -> None:
    async with stand_in() as service, browser_tab(service.url) as tab:
        listed = Listed(service)
        listed.add(450)
        await tab.open("sessions")
        await shown(tab, "200+ sessions", ".filters")
        listed.add(500)
        await service.event("group.created")
        await tab.page.get_by_role("link", name="s-0949-0").wait_for()
        await to_the_end(tab)
        await shown(tab, "950 sessions", ".filters")
        listed.add(1)
        await service.event("group.created")
        await shown(tab, "951 sessions", ".filters")  # the rows that were loaded stay


async def test_a_session_that_no_longer_matches_leaves_a_long_list() -> None:
    async with stand_in() as service, browser_tab(service.url) as tab:
        listed = Listed(service)
        listed.add(450)
        await tab.open("sessions?state=running")
        await tab.page.get_by_role("link", name="s-0448-0").wait_for()
        await to_the_end(tab)
        await shown(tab, "450 sessions", ".filters")
        listed.sessions[1]["state"] = "done"
        await service.event("session.done")
        await shown(tab, "449 sessions", ".filters")


async def test_a_page_that_fails_does_not_end_a_list() -> None:
    async with stand_in() as service, browser_tab(service.url) as tab:
        listed = Listed(service)
        listed.add(450)
        listed.failures = 1
        await tab.open("sessions")
        await shown(tab, "200+ sessions", ".filters")
        await to_the_end(tab)  # the page asks again after 3 seconds
        await shown(tab, "450 sessions", ".filters")
        assert not listed.failures


async def test_a_page_without_a_match_does_not_end_a_list() -> None:
    """The label's name alone is compared in the page itself."""

    async def groups(request: web.Request) -> web.Response:
        after = request.query.get("after")
        one = group("g-2", labels={} if after is None else {"suite": "a"}, done=0, errors=0, mean_reward=None)
        return web.json_response({"groups": [one], "after": "g-2" if after is None else None})

    async with stand_in() as service, browser_tab(service.url) as tab:
        service.replies["/v1/groups"] = groups
        await tab.open("groups?label=suite")
        await shown(tab, "1 group", ".filters")


async def test_changes_during_a_break_of_the_stream_are_shown() -> None:
    """If the page has seen no event before the break, it has no cursor from which it could read on."""
    async with stand_in() as service, browser_tab(service.url) as tab:
        service.replies["/v1/groups/g-1"] = group(sessions=[session()])
        await tab.open("groups/g-1")
        await shown(tab, "running", "table")
        await until(lambda: service.streams)
        service.replies["/v1/groups/g-1"] = group(state="done", finished=NOW, sessions=[session(reward=1.0)])
        service.hang_up()
        await shown(tab, "completed", "table")


async def test_a_service_that_has_lost_its_events_is_read_again() -> None:
    async with stand_in() as service, browser_tab(service.url) as tab:
        service.replies["/v1/groups/g-1"] = group(sessions=[session()])
        await tab.open("groups/g-1")
        await until(lambda: service.streams)
        await service.event("session.state")
        await until(lambda: service.count("/v1/groups/g-1") == 2)
        await shown(tab, "running", "table")
        service.replies["/v1/events"] = in_turn(partial(failure, 409, "no event has the id 1"))
        service.hang_up()
        await until(lambda: service.count("/v1/events") == 2)
        service.replies["/v1/groups/g-1"] = group(state="done", finished=NOW, sessions=[session(reward=1.0)])
        del service.replies["/v1/events"]
        await shown(tab, "completed", "table")


async def test_a_service_that_falls_silent_is_shown_as_offline() -> None:
    """A service that is stopped keeps its connections open, and sends no comments any more."""
    async with stand_in() as service, browser_tab(service.url) as tab:
        await tab.page.clock.install()
        await tab.open("groups")
        await shown(tab, "live", ".connection")
        await until(lambda: service.streams)
        await tab.page.clock.run_for(40_000)
        await service.streams[0].write(b": ping\n\n")
        await asyncio.sleep(0.5)
        await tab.page.clock.run_for(40_000)
        await shown(tab, "live", ".connection")
        service.replies["/v1/events"] = in_turn(asyncio.Event(), {})
        await tab.page.clock.run_for(10_000)
        await shown(tab, "offline", ".connection")
        await until(lambda: service.count("/v1/events") > 1)
        del service.replies["/v1/events"]
        await tab.page.clock.run_for(60_000)
        await tab.page.clock.run_for(10_000)
        await shown(tab, "live", ".connection")


async def test_a_stream_that_a_token_has_replaced_says_nothing() -> None:
    """The old stream was in a pause of four seconds when the token came."""
    async with stand_in() as service, browser_tab(service.url) as tab:
        service.replies["/v1/events"] = in_turn(partial(failure, 503, "it stops"))
        await tab.open()
        await until(lambda: service.count("/v1/events") == 4)
        service.replies["/v1/status"] = in_turn(partial(failure, 401, "no token"))
        ask = tab.page.get_by_label("Token", exact=True)
        await ask.wait_for()
        service.replies["/v1/status"] = status()
        del service.replies["/v1/events"]
        await ask.fill("token")
        await ask.press("Enter")
        await shown(tab, "live", ".connection")
        await asyncio.sleep(4.5)
        assert await tab.text(".connection") == "live"


HIDE = """
let hidden = false
Object.defineProperty(document, 'hidden', {get: () => hidden})
window.hide = (value) => { hidden = value; document.dispatchEvent(new Event('visibilitychange')) }
"""


async def test_many_tabs_leave_connections_for_each_other() -> None:
    """A browser has six connections to a service, for all of its tabs. A stream takes one as long as it lasts."""
    async with stand_in() as service, browser_tab(service.url, script=HIDE) as tab:
        service.replies["/v1/groups/g-1"] = group(sessions=[session()])
        tabs = [tab.page]
        for _ in range(8):
            page = await tab.page.context.new_page()
            page.set_default_timeout(5000)
            await page.goto(f"{service.url}/#/groups/g-1")
            await page.get_by_role("link", name="s-1-0").wait_for()
            await page.evaluate("hide(true)")
            tabs.append(page)
        await until(lambda: not service.streams)
        # a tab that is looked at again shows what has changed meanwhile
        service.replies["/v1/groups/g-1"] = group(state="done", finished=NOW, sessions=[session(reward=1.0)])
        await tabs[1].evaluate("hide(false)")
        await tabs[1].locator("table").get_by_text("completed").wait_for()
        assert await tabs[1].inner_text(".connection") == "live"


# --- files


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


# --- hostile content


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


# --- keys


async def test_keys_work_while_a_checkbox_has_the_focus() -> None:
    async with stand_in() as service, browser_tab(service.url) as tab:
        service.replies["/v1/groups/g-1"] = group(n=2, sessions=[session(f"s-1-{n}", reward=1.0) for n in range(2)])
        await tab.open("groups/g-1")
        for number in range(2):
            await tab.page.get_by_label(f"Compare sample {number}").check()
        await tab.page.keyboard.press("c")
        await tab.page.wait_for_url("**/#/compare/s-1-0/s-1-1", timeout=5000)
