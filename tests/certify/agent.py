"""An agent program for the tests of certification: `python agent.py URL INSTRUCTION [HABIT]...`.

The habits are those of real clients:

- `respaced` serialises tool arguments again, with other spaces; `trimmed` strips the texts of replies.
- `forgetful` drops the first reply and its result from the history, once.
- `lazy` runs only the first call of a reply.
- `streamed` requests streams.
- `quits` exits with code 3.
- `toolless` offers no tool of its own; `argv` takes a command as a list of words; `files` has no shell, but tools that
  write and read files.
- `waits` adds a tool that waits a minute, as for a person; `mirrors` adds a tool that returns its argument to the
  model.
- `desks` adds a tool that starts a sub-agent, with the task in the system message; `asks` adds a tool whose sub-agent
  has no tools; `later` adds a tool whose sub-agent works in the background.
- `sums` adds a tool that requests a summary from the model and offers all tools in the request; `compacts` adds a tool
  that replaces the history by a summary.
- `ends` adds a tool that ends the program.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

URL, INSTRUCTION, *HABITS = sys.argv[1:]
TEXT = {"type": "string"}


def tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [tool("run_it", "Run a command", cmd=TEXT)]
if "argv" in HABITS:
    TOOLS = [tool("run_it", "Run a command", cmd={"type": "array", "items": TEXT}, shell={"type": "boolean"})]
if "files" in HABITS:
    TOOLS = [tool("put", "Writes a file", path=TEXT, content=TEXT), tool("look", "Reads a file", path=TEXT)]
if "toolless" in HABITS:
    TOOLS = []
MORE = {
    "waits": tool("agent_of_person", "Waits for a person", prompt=TEXT),
    "mirrors": tool("task_mirror", "Repeats", prompt=TEXT),
    "asks": tool("ask_around", "Asks", quux=TEXT),
    "sums": tool("task_summary", "Sums up", prompt=TEXT),
    "compacts": tool("task_compact", "Compacts", prompt=TEXT),
    "ends": tool("task_end", "Ends", prompt=TEXT),
    "later": tool("zorp_later", "Zorps", quux=TEXT),
    "desks": tool("zorp", "Zorps", margin=TEXT, matters={"type": "array", "items": TEXT}),
}
MAIN = TOOLS + [MORE[habit] for habit in HABITS if habit in MORE]


def ask(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "m", "messages": messages, "stream": "streamed" in HABITS}
    if tools:
        body["tools"] = tools
    request = urllib.request.Request(
        f"{URL}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        if "streamed" not in HABITS:
            message: dict[str, Any] = json.load(answer)["choices"][0]["message"]
            return message
        return gathered([json.loads(line[6:]) for line in answer if line.startswith(b"data: {")])


def gathered(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    calls: dict[int, dict[str, Any]] = {}
    text = ""
    for delta in (choice["delta"] for chunk in chunks for choice in chunk["choices"]):
        text += delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            known = calls.setdefault(call["index"], {"id": "", "type": "function", "function": {}})
            known["id"] += call.get("id") or ""
            for part, piece in call["function"].items():
                known["function"][part] = known["function"].get(part, "") + (piece or "")
    return {"role": "assistant", "content": text} | ({"tool_calls": list(calls.values())} if calls else {})


def result(call: dict[str, Any]) -> Any:
    arguments = json.loads(call["function"]["arguments"])
    match call["function"]["name"]:
        case "put":
            return str(Path(arguments["path"]).write_text(arguments["content"]))
        case "look" if (path := Path(arguments["path"])).exists():
            if path.suffix != ".png":
                return path.read_text()
            data = base64.b64encode(path.read_bytes()).decode()
            return [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}]
        case "run_it":
            return run(arguments["cmd"])
        case "agent_of_person":
            time.sleep(60)
        case "task_mirror":
            return arguments["prompt"]
        case "task_summary":
            return ask([{"role": "user", "content": f"Sum up: {arguments['prompt']}"}], MAIN)["content"]
        case "task_compact":
            summary = f"You have called a tool with this: {arguments['prompt']}"
            raise Compacted([{"role": "user", "content": summary}])
        case "task_end":
            sys.exit(0)
        case "zorp_later":
            threading.Timer(0.05, work, ([{"role": "user", "content": arguments["quux"]}], TOOLS)).start()
            return "started"
        case "ask_around":
            return ask([{"role": "user", "content": arguments["quux"]}], [])["content"]
        case "zorp":
            start = {"role": "system", "content": f"You have a desk. {arguments['matters'][0]}"}
            return work([start, {"role": "user", "content": "Begin."}], TOOLS)
    return "no such tool, or no such file"


def run(command: str | list[str]) -> str:
    words = ["bash", "-c", command] if isinstance(command, str) else command
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return f"{done.stdout}{done.stderr}[{done.returncode}]"


class Compacted(Exception):
    """Raised by a tool that replaces the history by `messages`."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self.messages = messages


def work(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    while True:
        reply = ask(messages, tools)
        calls = reply.get("tool_calls") or []
        try:
            results = [result(call) for call in (calls[:1] if "lazy" in HABITS else calls)]
        except Compacted as compacted:
            messages = compacted.messages
            continue
        if "respaced" in HABITS:
            for call in calls:
                call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
        if "trimmed" in HABITS:
            reply["content"] = (reply.get("content") or "").strip()
        messages.append(reply)
        for index, call in enumerate(calls):
            told = results[index] if index < len(results) else "not run"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": told})
        if "forgetful" in HABITS and len(messages) == 5:
            del messages[1:3]
            HABITS.remove("forgetful")
        if not calls:
            return str(reply["content"])


work([{"role": "user", "content": INSTRUCTION}], MAIN)
os._exit(3 if "quits" in HABITS else 0)  # does not wait for background threads
