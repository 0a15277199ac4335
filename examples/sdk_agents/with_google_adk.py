"""An agent of Google's Agent Development Kit with one tool, in Google's generateContent.

The client finds its endpoint in GOOGLE_GEMINI_BASE_URL and GEMINI_API_KEY.
"""

import asyncio
import os
import subprocess
import sys

from google.adk.agents import Agent
from google.adk.models import Gemini
from google.adk.runners import InMemoryRunner


def bash(command: str) -> str:
    """Run a shell command, and return its output."""
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    return f"{done.stdout}{done.stderr}[exit code {done.returncode}]"


model = Gemini(model=os.environ["OUTRIDER_MODEL"])
agent = Agent(name="worker", model=model, instruction="Work with your tool.", tools=[bash])
asyncio.run(InMemoryRunner(agent).run_debug(sys.argv[1], quiet=True))
