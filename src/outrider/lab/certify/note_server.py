"""An MCP server with one tool, which writes a text into FILE. Usage: python3 note_server.py FILE

The program runs inside a sandbox and needs only Python. It communicates over stdio, with one JSON-RPC message per line.
"""

import json
import sys
import time
from typing import Any

START_SECONDS = 3
"""How many seconds the server takes to start. The delay is deliberate: it shows whether a program waits for its MCP
servers. On a busy machine, real servers may be as slow, and some programs do not wait."""
TOOL: Any = {
    "name": "leave_note",
    "description": "Leaves a note for the user.",
    "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
}


def answer(method: str, params: Any) -> Any:
    """Return the result of a request, or None for an unknown method."""
    if method == "initialize":
        version = params.get("protocolVersion", "2025-03-26")
        info = {"name": "outrider-check", "version": "1"}
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            file.write(params["arguments"]["text"])
        return {"content": [{"type": "text", "text": "The note is there."}]}
    return {} if method == "ping" else None


if __name__ == "__main__":
    time.sleep(START_SECONDS)
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message or "method" not in message:
            continue
        result = answer(message["method"], message.get("params") or {})
        error = {"error": {"code": -32601, "message": "method not found"}}
        reply = {"jsonrpc": "2.0", "id": message["id"], **(error if result is None else {"result": result})}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()
