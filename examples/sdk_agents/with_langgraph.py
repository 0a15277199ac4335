"""A graph of LangGraph: the model, its tool, and the edge from one to the other until the model calls no tool.

The client finds its endpoint in OPENAI_BASE_URL and OPENAI_API_KEY.
"""

import os
import subprocess
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def bash(command: str) -> str:
    """Run a shell command, and return its output."""
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    return f"{done.stdout}{done.stderr}[exit code {done.returncode}]"


model = ChatOpenAI(model=os.environ["OUTRIDER_MODEL"]).bind_tools([bash])
graph = StateGraph(MessagesState)
graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
graph.add_node("tools", ToolNode([bash]))
graph.add_edge(START, "model")
graph.add_conditional_edges("model", tools_condition)
graph.add_edge("tools", "model")
done = graph.compile().invoke({"messages": [("user", sys.argv[1])]}, {"recursion_limit": 100})
print(done["messages"][-1].text)
