"""An agent of Pydantic AI with one tool, in Chat Completions.

The client finds its endpoint in OPENAI_BASE_URL and OPENAI_API_KEY.
"""

import os
import subprocess
import sys

from pydantic_ai import Agent

agent = Agent(f"openai-chat:{os.environ['OUTRIDER_MODEL']}", instructions="Work with your tool.")


@agent.tool_plain
def bash(command: str) -> str:
    """Run a shell command, and return its output."""
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    return f"{done.stdout}{done.stderr}[exit code {done.returncode}]"


print(agent.run_sync(sys.argv[1]).output)
