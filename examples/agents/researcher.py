"""The built-in agent with one more tool: a web search through the operator's SearXNG server.

The agent runs inside the service, so the sandbox needs no network. The server's address is in the service's environment
and not in the task, because a task with the address could make the service call any server.

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
        """Return the results as a text for the model. If the search server fails, the model is not at fault: the error
        ends the session, which is tried again."""
        async with httpx.AsyncClient(timeout=20, trust_env=False) as client:
            answer = await client.get(self._url, params={"q": arguments["query"], "format": "json"})
            answer.raise_for_status()
        found = answer.json()["results"][:RESULTS]
        return "\n\n".join(f"{one['title']}\n{one['url']}\n{one['content']}" for one in found) or "nothing was found"
