"""Draws the requests of one session: ordinary, odd and broken requests, and continuations of earlier replies.

Sends nothing. The format of the dialect is in `speaker.Speaker`. Invariant: the same dice and the same replies give the
same requests.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from support.fuzz.grammar import Writer
from support.fuzz.speaker import Body, Echo, Manner, Request, Said, Speaker
from support.fuzz.spelling import damaged, in_pieces, mutated, spell
from support.recording_engine import Given

HISTORY_ITEMS = 40
"""A conversation with this many items in its history is not continued."""


class Dialogue(msgspec.Struct, frozen=True):
    """The last exchange of a conversation: the request, its reply, and the engine's record of the generation. `honest`:
    the client has sent back the earlier replies with no other changes than those of `Echo`."""

    body: Body
    said: Said
    given: Given
    honest: bool


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request, and what to expect of its reply.

    - `follows`: the exchange that this request continues, whose ids the new prompt must contain.
    - `honest`: as in `Dialogue`.
    - `shaped`: an error must have the form that the dialect prescribes.
    """

    kind: str
    request: Request
    manner: Manner = Manner()
    body: Body | None = None
    follows: Dialogue | None = None
    honest: bool = False
    shaped: bool = True


class Drawer:
    """Draws a session's requests. `key` is the session's credential."""

    def __init__(self, speaker: Speaker, key: str, dice: random.Random) -> None:
        self._speaker = speaker
        self._key = key
        self._dice = dice
        self._sound = Writer(dice, speaker.grammar)
        self._dialogues: list[Dialogue] = []

    def answered(self, ask: Ask, said: Said, given: Given) -> None:
        """Add a reply that later requests may continue."""
        if ask.body is not None and len(ask.body[self._speaker.history]) < HISTORY_ITEMS:
            self._dialogues.append(Dialogue(ask.body, said, given, ask.honest))

    def draw(self) -> Ask:
        share = self._dice.random()
        if self._dialogues and share < 0.45:
            return self._follow_up()
        if share < 0.62:
            return self._opening()
        if share < 0.95:
            return self._wrong()
        return self._astray()

    def _opening(self) -> Ask:
        body = self._sound.write("body")
        return self._ask("opening", body, honest=True)

    def _follow_up(self) -> Ask:
        dialogue = self._dice.choice(self._dialogues[-6:])
        share = self._dice.random()
        if share < 0.7:
            echo = self._dice.choice(tuple(Echo))
            body = self._speaker.go_on(self._sound, dialogue.body, dialogue.said, echo)
            follows = dialogue if dialogue.honest and not dialogue.said.cut else None
            return self._ask(f"echo {echo}", self._varied(body), follows=follows, honest=dialogue.honest)
        if share < 0.8:
            return self._ask("retry", dialogue.body, honest=dialogue.honest)
        return self._ask("rewrite", self._rewritten(dialogue))

    def _varied(self, body: Body) -> Body:
        """Return the body, in some cases with streaming switched on or off."""
        if self._speaker.name != "gemini" and self._dice.random() < 0.3:
            return {**body, "stream": not body.get("stream")}
        return body

    def _rewritten(self, dialogue: Dialogue) -> Body:
        """Return a request in which the history of the conversation is changed: items are missing, repeated, in another
        order, new or damaged."""
        body = self._speaker.go_on(self._sound, dialogue.body, dialogue.said, Echo.EXACT)
        key = self._speaker.history
        items = body[key] if isinstance(body[key], list) else [body[key]]
        at = self._dice.randrange(len(items))
        fresh = self._sound.write("body")
        match self._dice.randrange(6):
            case 0:
                changed = items[:at] + items[at + 1 :]
            case 1:
                changed = [*items[: at + 1], *items[at:]]
            case 2:
                changed = self._dice.sample(items, len(items))
            case 3:
                changed = items[: at + 1]
            case 4:
                added = fresh[key] if isinstance(fresh[key], list) else [fresh[key]]
                changed = items[: at + 1] + added if self._speaker.name != "responses" else items[at:]
            case _:
                changed = mutated(items, self._dice)
        if self._dice.random() < 0.2:
            body = {**fresh, "stream": body.get("stream")} if self._speaker.name != "gemini" else fresh
        return {**body, key: changed}

    def _ask(self, kind: str, body: Body, *, follows: Dialogue | None = None, honest: bool = False) -> Ask:
        manner = self._speaker.manner(self._sound)
        payload = spell(self._speaker.dressed(self._sound, body), self._dice)
        request = self._speaker.request(manner, payload)
        return Ask(
            kind=kind,
            request=self._sent(request),
            manner=manner,
            body=body,
            follows=None if manner.form == "count" else follows,
            honest=honest,
        )

    def _wrong(self) -> Ask:
        """Return a request with invalid values from the grammar, with damaged values, or with damaged bytes."""
        manner = self._speaker.manner(self._sound)
        share = self._dice.random()
        if share < 0.4:
            body: Any = Writer(self._dice, self._speaker.grammar, wrong=self._dice.choice((0.01, 0.05, 0.2))).write(
                "body"
            )
        elif self._dialogues and self._dice.random() < 0.5:
            body = self._dice.choice(self._dialogues).body
        else:
            body = self._sound.write("body")
        if 0.4 <= share < 0.7:
            body = mutated(body, self._dice)
        body = self._speaker.dressed(self._sound, body) if isinstance(body, dict) else body
        payload = spell(body, self._dice)
        if share >= 0.7:
            payload = damaged(payload, self._dice)
        return Ask(kind="wrong", request=self._sent(self._speaker.request(manner, payload)), manner=manner)

    def _astray(self) -> Ask:
        """Return a request other than the dialect's usual calls: another route, method or key."""
        request = self._speaker.asides(self._sound)
        if self._dice.random() < 0.5:
            return Ask(kind="aside", request=self._sent(request), shaped=False)
        request = self._speaker.request(self._speaker.manner(self._sound), spell(self._sound.write("body"), self._dice))
        path = request.path
        odd = (
            path + "/",
            path.upper(),
            "//" + path,
            path + "\x00",
            path[:-1],
            "/v1/../v1",
            "",
            "/",
            path + "/é",
            "/s/",
        )
        match self._dice.randrange(3):
            case 0:
                request = msgspec.structs.replace(request, path=self._dice.choice(odd))
            case 1:
                request = msgspec.structs.replace(
                    request, method=self._dice.choice(("GET", "PUT", "DELETE", "HEAD", "X"))
                )
            case _:
                return Ask(kind="unknown key", request=self._keyed(request, "nobody's"), shaped=True)
        return Ask(kind="astray", request=self._sent(request), shaped=False)

    def _sent(self, request: Request) -> Request:
        """Return the request with the session's key, in some cases with unusual headers, an unusual query, or a body in
        several chunks."""
        pieces = tuple(in_pieces(b"".join(request.pieces), self._dice))
        headers = request.headers
        if self._dice.random() < 0.4:
            kinds = (b"application/json", b"text/plain", b"application/xml; charset=latin-1", b"", b"\xff")
            headers = (*headers, (b"content-type", self._dice.choice(kinds)))
        if self._dice.random() < 0.05:
            names = (b"x-session-id", b"x-parent-session-id", b"x-openai-subagent", b"x-codex-turn-metadata")
            odd = (b"a", b"\xff\xfe", b"{", b'{"request_kind":"compaction"}', b"[[[", b"")
            headers = (*headers, (self._dice.choice(names), self._dice.choice(odd)))
        query = request.query
        if self._dice.random() < 0.1:
            query = b"&".join(filter(None, (query, self._dice.choice((b"beta=true", b"a=%ff&&=", b"%00", b"x")))))
        request = msgspec.structs.replace(request, pieces=pieces, headers=headers, query=query)
        return self._keyed(request, self._key)

    def _keyed(self, request: Request, key: str) -> Request:
        """Return the request with the key in the path, in a header, or in the query."""
        told = key.encode()
        match self._dice.randrange(6):
            case 0:
                return _with_header(request, b"authorization", b"Bearer " + told)
            case 1:
                return _with_header(request, b"x-api-key", told)
            case 2 if self._speaker.name == "gemini":
                return _with_header(request, b"x-goog-api-key", told)
            case 3 if self._speaker.name == "gemini":
                query = b"&".join(filter(None, (request.query, b"key=" + told)))
                return msgspec.structs.replace(request, query=query)
            case _:
                return msgspec.structs.replace(request, path=f"/s/{key}{request.path}")


def _with_header(request: Request, name: bytes, value: bytes) -> Request:
    return msgspec.structs.replace(request, headers=((name, value), *request.headers))
