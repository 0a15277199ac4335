"""Writes the web page of one session to an HTML file, which needs neither a service nor a network.

The file contains the page's script and style. It also contains the service's replies about the session, as JSON in an
element that browsers do not run. Invariant: the file's content security policy allows only this script and style, by
their hashes, and no network requests. So text that an agent wrote can neither run nor be sent anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import msgspec

from outrider.client.client import Client
from outrider.errors import Forbidden, NotFound
from outrider.redaction import without_keys
from outrider.store.artifacts import GRADING_LOG

UNRESERVED = "!~*'()"
"""Characters that `quote` must leave unchanged, as the browser's `encodeURIComponent` does: the page looks up replies
by paths that it encodes with that function."""
MOST_IMAGES = 64 << 20
"""Maximum total size of the images in a file, in bytes. Further images are left out."""


class Recorded(msgspec.Struct, frozen=True, omit_defaults=True):
    """A recorded reply of the service: JSON, or the base64 of a file and its media type."""

    json: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    base64: str | msgspec.UnsetType = msgspec.UNSET
    type: str | msgspec.UnsetType = msgspec.UNSET


class Recording(msgspec.Struct, frozen=True):
    """The replies of a service by path. `made` is the time at which they were read."""

    made: str
    replies: dict[str, Recorded]


def session_page(service: Client, session_id: str) -> bytes:
    """Return the HTML file of a session. Raises NotFound for an unknown session, and the client's errors."""
    replies = _replies(service, session_id)
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    return html_file(Recording(made, replies), title=session_id)


def html_file(recording: Recording, *, title: str) -> bytes:
    """Return an HTML file that contains the page and the recorded replies."""
    from outrider.api.page import page_file

    script, style = page_file("page.js").decode(), page_file("page.css").decode()
    for text in (script, style):
        if "</script" in text.lower() or "</style" in text.lower() or "<!--" in text:
            raise AssertionError("the bundle must not end the element that holds it")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src blob: data:;"
        " base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    # Each `<` is escaped, so that no text can end the <script> element. This keeps the JSON valid, because `<` occurs
    # only within its strings.
    data = without_keys(msgspec.json.encode(recording).decode()).replace("<", "\\u003c")
    heading = "".join(char for char in title if char.isalnum() or char in "-_ ")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{heading} · Outrider</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f'<div id="page"></div>\n<script type="application/json" id="outrider-data">{data}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    ).encode("utf-8", "surrogatepass")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _replies(service: Client, session_id: str) -> dict[str, Recorded]:
    base = f"/v1/sessions/{quote(session_id, safe=UNRESERVED)}"
    session = service.reply_body(base)
    try:
        turns = service.reply_body(f"{base}/turns", {"tokens": True, "pieces": True})
    except Forbidden:  # the token may only read, or the service cannot decode the tokens
        turns = service.reply_body(f"{base}/turns")
    replies = {base: _json(session), f"{base}/turns": _json(turns)}
    for part in ("timeline", "samples", "artifacts"):
        try:
            replies[f"{base}/{part}"] = _json(service.reply_body(f"{base}/{part}"))
        except NotFound:  # an older service has no such part, or the session is not done
            continue
    try:
        log = service.artifact(session_id, GRADING_LOG)
        replies[f"{base}/artifacts/{quote(GRADING_LOG, safe=UNRESERVED)}"] = _file(log, "text/plain")
    except NotFound:
        pass
    size = 0
    for digest in dict.fromkeys(_digests(msgspec.json.decode(turns))):
        try:
            image = service.image(digest)
        except NotFound:  # the service has already removed this image
            continue
        size += len(image.data)
        if size > MOST_IMAGES:
            break
        replies[f"/v1/images/{digest}"] = _file(image.data, image.media_type)
    return replies


def _json(body: bytes) -> Recorded:
    return Recorded(json=msgspec.Raw(body))


def _file(data: bytes, media_type: str) -> Recorded:
    return Recorded(base64=base64.b64encode(data).decode(), type=media_type)


def _digests(turns: dict[str, Any]) -> Iterator[str]:
    """Yield the digests of the images in the turns' messages. Images that were sent as a URL are left out."""
    for turn in turns["turns"]:
        for message in (turn.get("tokens") or {}).get("messages", ()):
            for part in message.get("parts", ()):
                if part.get("type") == "image" and not part.get("url"):
                    yield part["digest"]
