"""Serves the web page: the files in `outrider/page/`, which a browser shows at `/`.

Everybody may read these files, because they contain no data and no secrets. The page gets its data from the control
API, with the user's token. Invariant: the page's Content-Security-Policy allows only scripts, styles and requests of
the same origin. So text from an agent cannot run as a script, and nothing is loaded from other hosts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterator
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from outrider.wire.http_server import Receive, Scope, Send

FOLDER = Path(__file__).parent.parent / "page"
"""Folder of the page's files. `make page` builds them from the sources in `page/` at the root of the repository."""
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/": ("index.html", "text/html; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
    "/page/LICENCES.txt": ("LICENCES.txt", "text/plain; charset=utf-8"),
}
"""Maps the page's paths to file names in FOLDER and media types. The page is at `/page/`, too, because `/` may belong
to another system's interface (`api/compat`)."""
PATHS = frozenset(FILES)
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob: data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script';"
    " trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    # the browser always checks whether the ETag still matches, so a new version is shown at once
    "Cache-Control": "no-cache",
}


def page_file(name: str) -> bytes:
    """Return the content of a file of the page. Raises OSError if the page was not built."""
    return (FOLDER / name).read_bytes()


def page_routes(paths: Container[str] = PATHS) -> Iterator[Route]:
    """Yield a route for each of the page's files in `paths`. A file is read when it is first requested."""
    for path, (name, media_type) in FILES.items():
        if path in paths:
            yield Route(path, _File(name, media_type), methods=["GET"])


class _File:
    """ASGI application that serves one file of the page."""

    def __init__(self, name: str, media_type: str) -> None:
        self._name = name
        self._media_type = media_type
        self._data = b""
        self._tag = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._data:
            self._data = page_file(self._name)
            self._tag = f'"{hashlib.sha256(self._data).hexdigest()[:32]}"'
        headers = HEADERS | {"ETag": self._tag}
        if Request(scope).headers.get("if-none-match") == self._tag:
            reply = Response(status_code=304, headers=headers)
        else:
            reply = Response(self._data, media_type=self._media_type, headers=headers)
        await reply(scope, receive, send)
