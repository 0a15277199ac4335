"""An agent of Deep Agents: a shell and files of the sandbox, a list of tasks, and sub-agents.

The client finds its endpoint in OPENAI_BASE_URL and OPENAI_API_KEY.
"""

import os
import sys

from deepagents import create_deep_agent
from deepagents.backends import LocalShellBackend
from langchain_openai import ChatOpenAI

agent = create_deep_agent(
    model=ChatOpenAI(model=os.environ["OUTRIDER_MODEL"]),
    backend=LocalShellBackend(root_dir=".", virtual_mode=False, inherit_env=True),
)
done = agent.invoke({"messages": [("user", sys.argv[1])]}, {"recursion_limit": 100})
print(done["messages"][-1].text)
