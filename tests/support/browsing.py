"""Chromium from Debian's packages, driven by Playwright, for tests of the page. A test is skipped if either is
missing."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Tab:
    """A browser tab with the page of a service. `faults` are the errors of the page's scripts, and the violations of
    its content security policy."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.url = url
        self.faults: list[str] = []
        self.asked: list[str] = []
        """The URLs of all requests."""
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("console", self._note)
        page.on("request", lambda request: self.asked.append(request.url))

    def _note(self, message: Any) -> None:
        # The browser itself logs "Failed to load resource" for an unknown route and for a request without a token.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.faults.append(message.text)

    async def open(self, place: str = "") -> None:
        await self.page.goto(f"{self.url}/#/{place}")

    async def text(self, selector: str) -> str:
        return str(await self.page.inner_text(selector))

    async def violations(self) -> list[str]:
        """Return the rules of axe-core that the view violates, each with at most five of the HTML elements at fault."""
        axe = Path(pytest.importorskip("axe_playwright_python").__file__).parent / "axe.min.js"
        await self.page.evaluate(axe.read_text())
        found = await self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [f"{each['id']}: {[node['html'][:160] for node in each['nodes']][:5]}" for each in found["violations"]]


@asynccontextmanager
async def browser_tab(
    url: str, *, width: int = 1280, height: int = 860, dark: bool = False, script: str | None = None
) -> AsyncIterator[Tab]:
    """Open a browser with one tab. `script` runs before the page's own scripts."""
    playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    async with playwright.async_playwright() as driver:
        # Chromium's sandbox needs namespaces, which unprivileged containers do not have.
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = await browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",
        )
        if script is not None:
            await context.add_init_script(script)
        page = await context.new_page()
        page.set_default_timeout(15_000)
        try:
            yield Tab(page, url)
        finally:
            await context.close()
            await browser.close()
