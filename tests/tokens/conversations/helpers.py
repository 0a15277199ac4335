"""Agents that work for other agents: as tools, as sub-agents, as simulated users."""

from __future__ import annotations

import json

from ..harnesses import user
from .script import Session, conversation


@conversation(hints=(False, True))
def agents_as_tools(session: Session) -> None:
    """OpenAI Agents SDK: a tool's result is the helper's answer, verbatim."""
    main = session.agent("main", "You translate by tools only.", "to_spanish to_french", name="orchestrator")
    main.hears("Translate 'Good morning, dear neighbours' to Spanish and French.")
    for tool, answer in (("to_spanish", "Buenos días, queridos vecinos"), ("to_french", "Bonjour, chers voisins")):
        main.calls(tool, input="Good morning, dear neighbours")
        helper = session.agent("helper", f"You translate the user's message {tool[:2]} {tool[3:]}.", name=tool)
        main.gets(helper.hears("Good morning, dear neighbours").says(answer))
    main.says("Spanish: Buenos días, queridos vecinos\nFrench: Bonjour, chers voisins")


@conversation(has_transcript=False)
def agents_as_tools_at_once_and_then_checked(session: Session) -> None:
    """The helpers run side by side; another agent then joins their answers. The inputs are single words."""
    main = session.agent("main", "You translate by tools only.", "to_spanish to_french to_italian").hears(
        "Say hi in three languages."
    )
    names = main.tools.split()
    main.calls_all(*((name, {"input": "Hi"}) for name in names))
    helpers = [session.agent("helper", f"You translate {name[3:]}.").hears("Hi") for name in names]
    session.at_once(*zip(helpers, ["Hola", "Salut", "Ciao"], strict=True))
    main.gets(*(helper.history[-1].content for helper in helpers))
    draft = main.says("Hola, Salut, Ciao")
    session.ask(
        "main", draft, "Spanish: Hola. French: Salut. Italian: Ciao.", says="You inspect and join translations."
    )


@conversation()
def agent_as_tool_whose_answer_is_wrapped(session: Session) -> None:
    """The tool's result contains the helper's answer between other text."""
    main = session.agent("main", "You write reports.", "ask_analyst").hears("Is Acme a good buy?")
    for question, answer in (
        ("What are the fundamentals of Acme?", "Revenue grew by 8 %.\nDebt is low.\nMargins shrink."),
        ("What are the risks of Acme?", "One customer makes 60 % of the sales."),
    ):
        main.calls("ask_analyst", question=question)
        said = session.ask("helper", f"Analyse briefly. {question}", answer, says="You are a financial analyst.")
        main.gets(f"The analyst says:\n> {said}\n(confidence: unknown)")
    main.says("Acme is no good buy: margins shrink, and sales depend on one customer.")


@conversation(hints=(False, True))
def parallel_sub_agents(session: Session) -> None:
    """Two sub-agents run side by side; their calls are interleaved."""
    main = session.agent("main", "You are a coding agent.", "bash task").hears("Why is the build slow?")
    main.calls_all(
        ("task", {"prompt": "Profile the compile step.", "subagent_type": "explore"}),
        ("task", {"prompt": "Look for slow tests.", "subagent_type": "explore"}),
    )
    subs = [
        session.agent("helper", "You explore code bases.", "bash grep", name=f"a{number}").hears(f"<env/>\n{prompt}")
        for number, prompt in enumerate(("Profile the compile step.", "Look for slow tests."))
    ]
    for sub in (*subs, *reversed(subs)):
        sub.does("bash", f"output {len(session.turns)}", command="time make")
    main.gets(subs[0].says("Templates take 80 % of the time."), subs[1].says("One test sleeps for a minute."))
    main.says("The templates are slow, and one test sleeps.")


@conversation(hints=(False, True))
def sub_agents_of_sub_agents(session: Session) -> None:
    """Each level starts the next by a tool call; the lowest has no tools."""
    main = session.agent("main", "You lead.", "delegate").hears("Write the release notes of version 2.")
    main.calls("delegate", task="Collect what changed since version 1.")
    sub = session.agent("helper", "You collect.", "git delegate", name="collector").hears(
        "Collect what changed since version 1."
    )
    sub.does("git", "a1 Fix parser\nb2 Add flag", command="log").calls(
        "delegate", task="Explain in plain words: Fix parser"
    )
    low = session.agent("helper", "You explain commits.", name="explainer").hears("Explain in plain words: Fix parser")
    sub.gets(low.says("Empty files no longer crash the program."))
    main.gets(sub.says("- Empty files no longer crash the program.\n- There is a flag --version."))
    main.says("Version 2 does not crash on empty files, and has --version.")


@conversation()
def text_protocol_main_with_a_helper_that_has_tools(session: Session) -> None:
    """The main agent writes its actions as text and has no tools; the helper has real ones."""
    main = session.agent("main", "Answer with 'Action: ...' until you can say 'Final Answer: ...'.").hears(
        "How many tests fail?"
    )
    main.says("Thought: I ask the runner.\nAction: runner[Run the tests and count the failures]")
    helper = session.agent("helper", "You run commands.", "bash").hears("Run the tests and count the failures")
    helper.does("bash", "2 failed, 40 passed", command="pytest").does("bash", "test_a test_b", command="pytest --lf")
    main.hears(f"Observation: {helper.says('Two tests fail: test_a and test_b.')}")
    main.says("Thought: I know it.\nFinal Answer: two")


@conversation()
def web_page_answers_are_the_tools_results(session: Session) -> None:
    """Claude Code's WebFetch: a call without tools reads the page, and its answer is the tool's result."""
    main = session.agent("main", "You are a coding agent.", "bash web_fetch").hears(
        "Which Python does the library need?"
    )
    main.calls("web_fetch", url="http://lib.test", prompt="Which Python versions are supported?")
    page = "Web page content:\n---\nLib 3. Python 3.11 or newer.\n---\nWhich Python versions are supported?"
    main.gets(session.ask("helper", page, "The page says that Python 3.11 or newer is needed."))
    main.says("It needs Python 3.11.")


@conversation(hints=(False, True))
def resumed_sub_agent(session: Session) -> None:
    """The caller sends a second message to a sub-agent, which still has its history."""
    main = session.agent("main", "You lead.", "task send_message").hears("Make the tests pass.")
    main.calls("task", prompt="Find out which tests fail, and why.")
    sub = session.agent("helper", "You investigate.", "bash", name="investigator").hears(
        "Find out which tests fail, and why."
    )
    sub.does("bash", "test_a fails", command="pytest")
    main.gets(sub.says("test_a fails: the port is taken."))
    main.calls("send_message", to="investigator", message="Who holds the port?")
    sub.hears("Who holds the port?").does("bash", "pid 7 nginx", command="ss -ltnp")
    main.gets(sub.says("nginx holds the port.")).says("Stop nginx, then test_a passes.")


@conversation(has_transcript=False)
def simulated_user(session: Session) -> None:
    """tau-bench with the policy in both roles: the model's replies as the customer are the agent's user messages, and
    vice versa."""
    agent = session.agent("main", "You are an airline agent.", "find_booking cancel")
    customer = session.agent(
        "helper", "You are a customer. You want to cancel booking X7. Say ###STOP### when content."
    )
    customer.hears("Hi! How can I help you today?")
    agent.hears(customer.says("Hello, I want to cancel my booking, please."))
    customer.hears(agent.says("Gladly. What is the number of the booking?"))
    agent.hears(customer.says("It is X7."))
    agent.does("find_booking", "X7: Oslo", number="X7").does("cancel", "ok", number="X7")
    customer.hears(agent.says("Booking X7 is cancelled."))
    customer.says("###STOP###")


@conversation()
def answer_in_the_json_of_a_result(session: Session) -> None:
    """The tool's result contains the helper's answer as a JSON string, in which line breaks are escaped."""
    main = session.agent("main", "You lead.", "consult bash").hears("Make startup faster.")
    main.calls("consult", question="What slows the startup of a Python program?")
    answer = session.ask(
        "helper",
        "What slows the startup of a Python program?",
        "Imports do.\nMeasure with -X importtime.",
        says="You are an expert.",
    )
    main.gets(json.dumps({"status": "ok", "response": answer}))
    main.does("bash", "numpy 120 ms", command="python -X importtime a.py").says("I import numpy late now.")


@conversation()
def answer_cut_to_its_beginning(session: Session) -> None:
    """The program passes on the first hundred characters only."""
    main = session.agent("main", "You lead.", "ask_expert").hears("May I use this library?")
    main.calls("ask_expert", question="Explain the licence AGPL to me.")
    answer = (
        "The AGPL asks you to publish your changes if you run the program as a service.\nIt also has a preamble.\n" * 3
    )
    main.gets(
        session.ask("helper", "Explain the licence AGPL to me.", answer, says="You know licences.")[:100] + " [...]"
    )
    main.says("Only if you publish your changes.")


@conversation()
def answer_that_goes_to_a_file(session: Session) -> None:
    """The program writes the helper's answer to a file; the tool's result only confirms it."""
    main = session.agent("main", "You are a coding agent.", "bash write_docs").hears("Document parser.py.")
    main.calls("write_docs", instructions="Write a page about parse() and its errors.", path="docs/parser.md")
    session.ask(
        "helper",
        "Write a page about parse() and its errors.\nCode:\ndef parse(x): ...",
        "# parse\n\nIt parses.\nIt raises ValueError.",
        says="You write docs.",
    )
    main.gets("Wrote 38 characters to docs/parser.md.").does("bash", "ok", command="make docs").says(
        "parser.py is documented."
    )


@conversation()
def helper_with_the_callers_head(session: Session) -> None:
    """A clone of the agent: the same system prompt and tools, another first message."""
    main = session.agent("main", "You are an agent.", "bash spawn").hears("Rename old to new everywhere.")
    for folder in ("src", "docs"):
        main.calls("spawn", instructions=f"Rename old to new in {folder}/, nowhere else.")
        clone = session.agent("helper", main.head, main.tools).hears(f"Rename old to new in {folder}/, nowhere else.")
        clone.does("bash", f"{folder}: 3 files", command=f"sed -i s/old/new/ {folder}/*")
        main.gets(clone.says(f"In {folder}/ there were 3 files."))
    main.says("All 6 files are renamed.")


@conversation(hints=(False, True))
def codex_threads(session: Session) -> None:
    """Codex: each agent has a thread. The main thread and the sub-agent's are both summarised by calls without
    tools."""
    main = session.agent("main", "You are Codex.", "shell spawn_agent wait", name="t1").hears("Speed up the parser.")
    main.does("spawn_agent", '{"id": "t2"}', message="Profile parse() on big files.")
    sub = session.agent("helper", "You are Codex.", "shell", name="t2", of="t1").hears("Profile parse() on big files.")
    ask = "Create a handoff summary for another LLM."
    for agent, text in ((sub, "Profiled a.txt:\n90 % is in split()."), (main, "t2 profiles parse().\nI wait for t2.")):
        agent.does("shell", f"output {len(session.turns)}", command="python -m cProfile a.py")
        said = agent.aside("summary", ask, text, tools="", purpose="compaction")
        agent.begins_anew(agent.history[0], user(f"Another language model started. Its summary:\n{said}"))
        agent.does("shell", f"output {len(session.turns)}", command="ls")
    main.does("wait", sub.says("split() takes 90 % of the time."), ids=["t2"])
    main.says("I replaced split(), which took 90 % of the time.")


@conversation(hints=(False, True))
def sub_agent_in_the_background(session: Session) -> None:
    """The tool's result comes at once; the helper's answer comes later, in a user message."""
    main = session.agent("main", "You are a coding agent.", "bash task").hears("Is the release ready?")
    main.does("task", "Started in the background as b7.", prompt="Check that every link in docs/ works.")
    sub = session.agent("helper", "You check.", "bash", name="b7").hears("Check that every link in docs/ works.")
    sub.does("bash", "a.md b.md", command="ls docs")
    main.does("bash", "0 failed", command="make test").says("The tests pass; I wait for the links.")
    done = sub.does("bash", "404 b.md:3", command="lychee docs").says("One link is broken: docs/b.md, line 3.")
    main.hears(f"<task-notification id=b7>\n{done}\n</task-notification>")
    main.does("bash", "ok", command="sed -i 3d docs/b.md").says("It is ready.")


@conversation(hints=(False, True))
def sub_agent_that_is_cut_off(session: Session) -> None:
    """The caller times out and cuts the helper off. The helper's earlier turns still count as work."""
    main = session.agent("main", "You lead.", "delegate bash").hears("Find the leak.")
    main.calls("delegate", task="Run the tests under valgrind.")
    sub = session.agent("helper", "You test.", "bash", name="tester").hears("Run the tests under valgrind.")
    sub.does("bash", "test_a: 8 bytes lost", command="valgrind test_a").cut("Now I run te")
    main.gets("Error: timed out after 60 s").does("bash", "leak in a.c", command="grep -n malloc a.c")
    main.says("The leak is in a.c.")


@conversation()
def reviewer_that_the_program_starts(session: Session) -> None:
    """No tool call starts the reviewer; its answer is the agent's next user message."""
    main = session.agent("main", "You are a coding agent.", "edit").hears("Sort the imports.")
    main.does("edit", "ok", path="a.py").says("They are sorted.")
    reviewer = session.agent("helper", "You review diffs.", "read").hears("Diff:\n-import b\n+import a")
    found = reviewer.does("read", "import a\nimport c", path="a.py").says("b is lost.\na.py uses b in line 9.")
    main.hears(f"A reviewer says:\n{found}")
    main.does("edit", "ok", path="a.py").says("I put the import of b back.")
