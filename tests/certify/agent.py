"""A whole agent program in a page, to be certified: python agent.py URL INSTRUCTION [HABIT]...

Its habits are what clients do: `respaced` re-serialises tool arguments, `trimmed` trims texts, `forgetful` drops its
first reply, once, `lazy` runs only the first call of a reply, `streamed` asks for streams, `quits` ends with an error,
`toolless` shows no tool.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from typing import Any

URL, INSTRUCTION, *HABITS = sys.argv[1:]
PARAMETERS = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
TOOL = {"type": "function", "function": {"name": "run_it", "description": "Run a command", "parameters": PARAMETERS}}


def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "m", "messages": messages, "stream": "streamed" in HABITS}
    if "toolless" not in HABITS:
        body["tools"] = [TOOL]
    request = urllib.request.Request(
        f"{URL}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        if "streamed" not in HABITS:
            return json.load(answer)["choices"][0]["message"]
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


def result(call: dict[str, Any]) -> str:
    if call["function"]["name"] != "run_it":
        return "no such tool"
    command = json.loads(call["function"]["arguments"])["cmd"]
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    return f"{done.stdout}{done.stderr}[{done.returncode}]"


messages: list[dict[str, Any]] = [{"role": "user", "content": INSTRUCTION}]
while True:
    reply = ask(messages)
    calls = reply.get("tool_calls") or []
    results = [result(call) for call in (calls[:1] if "lazy" in HABITS else calls)]
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
        break
sys.exit(3 if "quits" in HABITS else 0)
