"""The page in a real browser, with replies that are late, broken, hostile or missing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from support.browsing import Tab, browser_tab
from support.page_stand_in import NOW, rates, stand_in, status

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
