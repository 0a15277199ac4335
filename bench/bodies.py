"""Request bodies that cause as much work as possible for their size, in each dialect.

    python -m bench.bodies http://127.0.0.1:PORT/s/KEY KIND BYTES...

sends bodies of one kind, and prints for each size the status of the reply, or 0 for none. The module imports little, so
that the program starts at once.
"""

from __future__ import annotations

import http.client
import sys
from collections.abc import Mapping
from urllib.parse import urlsplit

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
GEMINI = "/v1beta/models/policy:generateContent"
MODEL = b'"model":"policy","max_tokens":4,'
ONE = b'{"role":"user","content":"a"}'


class Flood:
    """The parts of a body: `head`, then as many copies of `item` as fit into the size, separated by commas, then
    `tail`."""

    def __init__(self, path: str, head: bytes, item: bytes, tail: bytes, *, between: bytes = b",") -> None:
        self.path = path
        self._head, self._item, self._tail, self._between = head, item, tail, between

    def body(self, size: int) -> bytes:
        room = size - len(self._head) - len(self._tail) - len(self._item)
        more = self._between + self._item
        return self._head + self._item + more * (room // len(more)) + self._tail


def _chat(head: bytes, item: bytes, tail: bytes, between: bytes = b",") -> Flood:
    return Flood(CHAT, b"{" + MODEL + head, item, tail + b"}", between=between)


FLOODS: Mapping[str, Flood] = {
    "chat messages": _chat(b'"messages":[', ONE, b"]"),
    "chat answers": _chat(b'"messages":[' + ONE + b",", b'{"role":"assistant","content":"b"},' + ONE, b"]"),
    "chat calls": _chat(
        b'"messages":[' + ONE + b',{"role":"assistant","tool_calls":[',
        b'{"id":"1","type":"function","function":{"name":"f","arguments":"{}"}}',
        b"]}," + ONE + b"]",
    ),
    "chat arguments": _chat(
        b'"messages":[' + ONE + b',{"role":"assistant","tool_calls":[{"id":"1","type":"function","function":'
        b'{"name":"f","arguments":"[',
        b"[]",
        b']"}}]},' + ONE + b"]",
    ),
    "chat parts": _chat(b'"messages":[{"role":"user","content":[', b'{"type":"text","text":"a"}', b"]}]"),
    "chat tools": _chat(b'"messages":[' + ONE + b'],"tools":[', b'{"type":"function","function":{"name":"f"}}', b"]"),
    "chat schema": _chat(
        b'"messages":[' + ONE + b'],"tools":[{"type":"function","function":{"name":"f","parameters":{"enum":[',
        b"1",
        b"]}}}]",
    ),
    "chat ignored": _chat(b'"messages":[' + ONE + b'],"metadata":[', b"[]", b"]"),
    "chat text": _chat(b'"messages":[{"role":"user","content":"', b"word", b'"}]', b" "),
    "chat blanks": _chat(b'"messages":[{"role":"user","content":"', b" ", b'"}]', b""),
    "chat escapes": _chat(b'"messages":[{"role":"user","content":"', b"\\n", b'"}]', b""),
    "chat umlauts": _chat(b'"messages":[{"role":"user","content":"', b"\\u00fc", b'"}]', b""),
    "chat stops": _chat(b'"messages":[' + ONE + b'],"stop":[', b'"s"', b"]"),
    "chat spaces": _chat(b'"messages":[' + ONE, b" ", b"]", b""),
    "chat junk": Flood(CHAT, b"", b"[", b"", between=b""),
    "chat image": _chat(
        b'"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,',
        b"AAAA",
        b'"}}]}]',
        b"",
    ),
    "messages messages": Flood(MESSAGES, b"{" + MODEL + b'"messages":[', ONE, b"]}"),
    "messages blocks": Flood(
        MESSAGES, b"{" + MODEL + b'"messages":[{"role":"user","content":[', b'{"type":"text","text":"a"}', b"]}]}"
    ),
    "messages results": Flood(
        MESSAGES,
        b"{" + MODEL + b'"messages":[{"role":"user","content":[',
        b'{"type":"tool_result","tool_use_id":"1","content":"a"}',
        b"]}]}",
    ),
    "messages system": Flood(
        MESSAGES, b"{" + MODEL + b'"messages":[' + ONE + b'],"system":[', b'{"type":"text","text":"a"}', b"]}"
    ),
    "messages tools": Flood(
        MESSAGES, b"{" + MODEL + b'"messages":[' + ONE + b'],"tools":[', b'{"name":"f","input_schema":{}}', b"]}"
    ),
    "messages image": Flood(
        MESSAGES,
        b"{" + MODEL + b'"messages":[{"role":"user","content":[{"type":"image","source":{"type":"base64",'
        b'"media_type":"image/png","data":"',
        b"AAAA",
        b'"}}]}]}',
        between=b"",
    ),
    "responses items": Flood(RESPONSES, b"{" + b'"model":"policy","input":[', ONE, b"]}"),
    "responses calls": Flood(
        RESPONSES,
        b'{"model":"policy","input":[' + ONE + b",",
        b'{"type":"function_call","call_id":"1","name":"f","arguments":"{}"}',
        b"," + ONE + b"]}",
    ),
    "responses tools": Flood(
        RESPONSES, b'{"model":"policy","input":"a","tools":[', b'{"type":"function","name":"f"}', b"]}"
    ),
    "responses image": Flood(
        RESPONSES,
        b'{"model":"policy","input":[{"role":"user","content":[{"type":"input_image",'
        b'"image_url":"data:image/png;base64,',
        b"AAAA",
        b'"}]}]}',
        between=b"",
    ),
    "gemini contents": Flood(GEMINI, b'{"contents":[', b'{"role":"user","parts":[{"text":"a"}]}', b"]}"),
    "gemini parts": Flood(GEMINI, b'{"contents":[{"role":"user","parts":[', b'{"text":"a"}', b"]}]}"),
    "gemini answers": Flood(
        GEMINI,
        b'{"contents":[',
        b'{"role":"model","parts":[{"functionCall":{"name":"f","args":{}}}]},'
        b'{"role":"user","parts":[{"functionResponse":{"name":"f","response":{}}}]}',
        b"]}",
    ),
    "gemini image": Flood(
        GEMINI,
        b'{"contents":[{"role":"user","parts":[{"inlineData":{"mimeType":"image/png","data":"',
        b"AAAA",
        b'"}}]}]}',
        between=b"",
    ),
    "gemini tools": Flood(
        GEMINI,
        b'{"contents":[{"role":"user","parts":[{"text":"a"}]}],"tools":[{"functionDeclarations":[',
        b'{"name":"f"}',
        b"]}]}",
    ),
}


def send(url: str, flood: Flood, size: int) -> int:
    """Send a body of about `size` bytes. Returns the status of the reply; 0 if the connection broke."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=600)
    try:
        connection.request("POST", parts.path + flood.path, flood.body(size), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except OSError:
        return 0
    finally:
        connection.close()


if __name__ == "__main__":
    print(*(send(sys.argv[1], FLOODS[sys.argv[2]], int(size)) for size in sys.argv[3:]))
