"""The agent program of `page_world.py`. By its sample, it runs commands, asks a sub-agent, goes on from a summary."""

import json
import os
import subprocess
import sys
import urllib.request
from typing import Any

KEY = os.environ["OUTRIDER_API_KEY"]
BASE = os.environ["OPENAI_BASE_URL"]
SAMPLE = int(os.environ["OUTRIDER_SAMPLE"])
TASK = os.environ["OUTRIDER_INSTRUCTION"]
PARSER = "parser" in TASK


def tool(name: str, description: str, argument: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


SUMMARISE = "Write a summary of the work so far, to continue from it. (compaction)"
BASH = tool("bash", f"Run a command in sandbox {SAMPLE}", "command")
SEARCH = tool("search", "Search files", "pattern")


def ask(messages: list[Any], tools: list[Any] | None = None) -> Any:
    body = {"model": "policy", "messages": messages}
    if tools:
        body["tools"] = tools
    request = urllib.request.Request(
        BASE + "/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": "Bearer " + KEY, "Content-Type": "application/json"},
    )
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages.append({key: message[key] for key in ("role", "content", "tool_calls") if message.get(key) is not None})
    return message


def work(messages: list[Any], tools: list[Any], most: int = 6) -> str:
    for _ in range(most):
        message = ask(messages, tools)
        calls = message.get("tool_calls") or []
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            if call["function"]["name"] == "bash":
                ran = subprocess.run(["bash", "-c", arguments["command"]], capture_output=True, text=True)
                out = ran.stdout + ran.stderr + (f"[exit code {ran.returncode}]" if ran.returncode else "")
            else:
                out = "parser.py:2: def parse(text):"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": out})
        if not calls:
            return message["content"] or ""
    return ""


if SAMPLE == 4 and PARSER:
    sys.exit("agent: cannot read its configuration: /etc/agent.toml: No such file or directory")
system = {"role": "system", "content": "You are a careful engineer. You may run commands in the repository.\n" * 12}
messages = [system, {"role": "user", "content": TASK}]
if PARSER and SAMPLE in (0, 1):
    helper = [
        {"role": "system", "content": "You look for files and report their places."},
        {"role": "user", "content": f"Find the function parse. (helper of sample {SAMPLE})"},
    ]
if PARSER:
    ask([{"role": "system", "content": "Generate a title of at most five words."}, {"role": "user", "content": TASK}])
answer = work(messages, [BASH], 2 if SAMPLE == 1 and PARSER else 6)
if PARSER and SAMPLE in (0, 1):
    report = work(helper, [SEARCH])
    messages.append({"role": "user", "content": f"The helper reports: {report} Now finish. (end of sample {SAMPLE})"})
    answer = work(messages, [BASH])
if PARSER and SAMPLE == 1:
    said = ask([*messages, {"role": "user", "content": SUMMARISE}])["content"]
    summary = f"Summary of the work so far: {said} Continue. (after the summary)"
    messages = [system, {"role": "user", "content": summary}]
    answer = work(messages, [BASH])
with open("report.txt", "w") as file:
    file.write(answer + "\n")
