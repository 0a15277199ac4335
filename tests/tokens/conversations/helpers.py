"""Agents that others call: as tools, as sub-agents, as simulated users."""

from __future__ import annotations

import json

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


@conversation()
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
    """The tool's result has the answer between other words."""
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
    """Two sub-agents in the background, their calls between each other's and the caller's."""
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


@conversation()
def simulated_user(session: Session) -> None:
    """tau-bench with the policy in both roles: the user's words are the model's, with the roles the other way round."""
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
    """The tool's result has the helper's lines escaped, in JSON."""
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
    """The helper's answer is written to a file; its caller only learns that it was."""
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
