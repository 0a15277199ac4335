"""The built-in agent with one more tool: a search of the web, by a SearXNG server of the operator's.

The agent runs inside the service, so the sandbox needs no network. The address is the operator's to choose, so it is
read from the service's environment: a task that could name it could make the service call anything.

    SEARCH_URL=http://10.0.0.9:8080/search PYTHONPATH=examples/agents \
        outrider serve --config outrider.toml --allow-plugin researcher
    outrider run examples/agents/research.toml -n 8
"""

import os

import httpx

from outrider.harnesses.tool_agent import ToolAgent
from outrider.harnesses.toolbox import Tool, tool_spec

SEARCH = tool_spec("search", "Search the web. Returns titles, addresses and the beginning of what is there.", "query")
RESULTS = 5


class Researcher(ToolAgent):
    def __init__(self, options):
        super().__init__(options, own=[Tool(SEARCH, self.search)])
        self._url = os.environ["SEARCH_URL"]

    async def search(self, context, arguments):
        """What the model is shown. A search server that fails is no fault of the model's: the error ends the session,
        which is tried again."""
        async with httpx.AsyncClient(timeout=20, trust_env=False) as client:
            answer = await client.get(self._url, params={"q": arguments["query"], "format": "json"})
            answer.raise_for_status()
        found = answer.json()["results"][:RESULTS]
        return "\n\n".join(f"{one['title']}\n{one['url']}\n{one['content']}" for one in found) or "nothing was found"
