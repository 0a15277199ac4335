"""An agent of the OpenAI Agents SDK with one tool, in Chat Completions.

The SDK finds its endpoint in OPENAI_BASE_URL and OPENAI_API_KEY.
"""

import os
import subprocess
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled


@function_tool
def bash(command: str) -> str:
    """Run a shell command, and return its output."""
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    return f"{done.stdout}{done.stderr}[exit code {done.returncode}]"


set_tracing_disabled(True)  # traces would go to the vendor
set_default_openai_api("chat_completions")  # the default is Responses
agent = Agent(name="worker", instructions="Work with your tool.", tools=[bash], model=os.environ["OUTRIDER_MODEL"])
result = Runner.run_sync(agent, sys.argv[1], max_turns=50)
print(result.final_output)
