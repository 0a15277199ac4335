"""Several agents whose work is one conversation: each is shown what the others said, or only their last words."""

from __future__ import annotations

from .script import Session, conversation

CHARGED = "I was charged twice for order 4711. Please get my money back."


@conversation()
def openai_agents_hand_off(session: Session) -> None:
    """OpenAI Agents SDK: the next agent is shown all messages behind its own head."""
    triage = session.agent(
        "main", "You route customers to the right agent.", "transfer_to_billing transfer_to_shipping"
    )
    triage.hears(CHARGED).does("transfer_to_billing", '{"assistant": "Billing agent"}')
    billing = triage.hands_over("You are the billing agent. Be exact.", "find_order refund")
    billing.does("find_order", '{"order": 4711, "payments": [20.0, 20.0]}', order=4711)
    billing.does("refund", '{"refunded": 20.0}', order=4711, amount=20.0)
    billing.says("I have refunded the second payment of 20.00.\nThe money arrives within three days.")


@conversation()
def openai_agents_hand_off_and_back(session: Session) -> None:
    """Agents transfer to each other several times in one run."""
    heads = {
        "triage": ("You route customers.", "transfer_to_billing transfer_to_shipping"),
        "billing": ("You are the billing agent.", "find_order transfer_to_triage"),
        "shipping": ("You are the shipping agent.", "track transfer_to_triage"),
    }
    agent = session.agent("main", *heads["triage"]).hears("Where is my parcel, and why did I pay twice?")
    for to in ("billing", "triage", "shipping", "triage"):
        if to != "triage":
            agent.does(f"transfer_to_{to}", f'{{"assistant": "{to}"}}')
            agent = agent.hands_over(*heads[to])
            agent.does(agent.tools.split()[0], f"[{to} record 17]", order=4711)
        else:
            agent.does("transfer_to_triage", '{"assistant": "triage"}')
            agent = agent.hands_over(*heads[to])
    agent.says("Your parcel is in Ghent, and the second payment was a mistake of ours.")


@conversation()
def openai_agents_hand_off_without_tool_calls(session: Session) -> None:
    """`handoff_filters.remove_all_tools`: the next agent is not shown the calls."""
    faq = session.agent("main", "You answer questions.", "search transfer_to_writer")
    faq.hears("How do I pickle a lambda? Write it up for our wiki.")
    faq.does("search", "12 hits, the best: use cloudpickle.", query="pickle a lambda")
    faq.does("transfer_to_writer", '{"assistant": "Writer"}')
    writer = session.agent("main", "You write wiki pages.", "save_page")
    writer.hears("How do I pickle a lambda? Write it up for our wiki.")
    writer.does("save_page", "saved", text="# Pickling a lambda\n\nUse cloudpickle.")
    writer.says("The page is saved as /wiki/pickling.")


@conversation()
def openai_agents_nested_history(session: Session) -> None:
    """Newer versions of the SDK write the history out as one message for the next agent."""
    triage = session.agent("main", "You route customers.", "find_order transfer_to_billing")
    triage.hears(CHARGED).does("find_order", '{"payments": 2}', thought="I look the order up first.", order=4711)
    triage.does("transfer_to_billing", '{"assistant": "Billing agent"}', thought="Billing has to do this.")
    billing = session.agent("main", "You are the billing agent.", "refund")
    billing.said(
        "For context, here is the conversation so far between the user and the previous agent:\n"
        f"<CONVERSATION HISTORY>\n{triage.written_out()}\n</CONVERSATION HISTORY>"
    )
    billing.does("refund", '{"refunded": 20.0}', order=4711)
    billing.says("The second payment is on its way back to you.")


@conversation()
def langgraph_supervisor(session: Session) -> None:
    """The workers see the shared messages; the supervisor gets their last answers, with their names."""
    supervisor = session.agent("main", "You manage two workers.", "transfer_to_coder transfer_to_qa")
    supervisor.hears("Add a --version flag, and have it tested.")
    lasts = {"coder": "The flag is in cli.py now.\nOver to QA for the tests.", "qa": "All 14 tests pass."}
    for worker, last in lasts.items():
        supervisor.does(f"transfer_to_{worker}", f"Successfully transferred to {worker}")
        at_work = supervisor.hands_over(f"You are {worker}.", "bash")
        at_work.does("bash", "ok", command=f"{worker} --go")
        at_work.says(last)
        supervisor.said(last).said("Transferring back to supervisor")
        supervisor.hears("Successfully transferred back to supervisor")
    supervisor.says("Done: the flag is in, and its tests pass.")


@conversation()
def supervisor_with_answers_of_one_line(session: Session) -> None:
    """Each worker's last answer is a line of twelve characters, which the next request holds."""
    supervisor = session.agent("main", "You decide who works next. Say only whom.")
    supervisor.hears("Ship version 2.")
    for name, line in (("dev", "Over to Tess"), ("tess", "Back to Dev."), ("dev", "Over to boss")):
        supervisor.says(f"Next: {name}.")
        worker = session.agent("main", f"You are {name}.", f"{name}_shell")
        worker.hears("\n".join(message.content for message in supervisor.history))
        worker.does(f"{name}_shell", "exit code 0", command="make")
        supervisor.hears(f"{name}: {worker.says(line)}")
    supervisor.says("Version 2 is out.")


@conversation()
def langgraph_swarm(session: Session) -> None:
    """The active agent sees all messages; the user asks again, and the last active agent goes on."""
    alice = session.agent("main", "You are Alice, an addition expert.", "add transfer_to_bob")
    alice.hears("I want to speak to Bob.").does("transfer_to_bob", "Successfully transferred to bob")
    bob = alice.hands_over("You are Bob. You speak like a pirate.", "transfer_to_alice")
    bob.says("Ahoy! What be ye wanting?")
    bob.hears("What is 5 + 7?").does("transfer_to_alice", "Successfully transferred to alice")
    alice = bob.hands_over("You are Alice, an addition expert.", "add transfer_to_bob")
    alice.does("add", "12", a=5, b=7)
    alice.says("12")


@conversation(hints=(False, True), has_transcript=False)
def autogen_round_robin(session: Session) -> None:
    """Every agent has its own history: the others' words are user messages, its own are assistant messages."""
    writer = session.agent("main", "You are a poet. Revise by feedback.", name="writer")
    critic = session.agent("main", "You are a critic. Say APPROVE when you are content.", name="critic")
    for agent in (writer, critic):
        agent.hears("Write a short poem about autumn.")
    for poem, verdict in (
        ("Leaves fall,\nthe river is slow.", "The second line does not scan.\nTry a verb of motion."),
        ("Leaves fall,\nthe river carries them home.", "APPROVE"),
    ):
        critic.hears(writer.says(poem))
        writer.hears(critic.says(verdict))


@conversation(has_transcript=False)
def autogen_selector(session: Session) -> None:
    """A selector names the next speaker in one word, from the history as text."""
    team = {
        name: session.agent("main", f"You are the {name}.", "search" * (name == "analyst"))
        for name in ("planner", "analyst")
    }
    said = ["user: Who had the most points for the Heat in 2006?"]
    answers = [
        ("planner", "1. analyst: find the player.\n2. analyst: compute the rise."),
        ("analyst", "It was Dwyane Wade, with 27.2."),
    ]
    for agent in team.values():
        agent.hears(said[0][6:])
    for name, answer in answers:
        session.ask(
            "helper",
            f"Roles: planner, analyst.\n{chr(10).join(said)}\nSelect the next role. Only return the role.",
            name,
        )
        speaker = team[name]
        if speaker.tools:
            speaker.does("search", "Wade 27.2", query="Heat 2006 points")
        said.append(f"{name}: {speaker.says(answer)}")
        for other in team.values():
            if other is not speaker:
                other.hears(answer)
    session.ask(
        "helper",
        f"Roles: planner, analyst.\n{chr(10).join(said)}\nSelect the next role. Only return the role.",
        "planner",
    )
    team["planner"].says("Dwyane Wade had 27.2 points a game. TERMINATE")


@conversation(hints=(False, True))
def google_adk_transfer(session: Session) -> None:
    """Another agent's events are written out as user messages."""
    greeter = session.agent("main", "You greet, and transfer what you cannot do.", "transfer_to_agent", name="greeter")
    greeter.hears("What is the weather in Oslo?").does("transfer_to_agent", "null", agent_name="weather")
    weather = session.agent("main", "You tell the weather.", "get_weather transfer_to_agent", name="weather")
    weather.hears("What is the weather in Oslo?")
    weather.hears("For context:\n[greeter] called tool `transfer_to_agent` with parameters: {'agent_name': 'weather'}")
    weather.hears("For context:\n[greeter] `transfer_to_agent` tool returned result: None")
    weather.does("get_weather", "-3 degrees, snow", city="Oslo")
    weather.says("It snows in Oslo, at three degrees below zero.")


@conversation()
def agent_resumed_with_other_tools(session: Session) -> None:
    """The program takes a tool away for the second half of the work."""
    agent = session.agent("main", "You are a coding agent.", "bash edit plan").hears("Fix issue 31.")
    agent.does("plan", "accepted", steps=["read", "fix"]).tools = "bash edit"
    agent.does("bash", "parser.py:3: error", command="make test").does("edit", "ok", path="parser.py")
    agent.says("Issue 31 is fixed.")


@conversation()
def final_report_without_tools(session: Session) -> None:
    """Out of steps: the last answer is asked for without tools."""
    agent = session.agent("main", "You are a research agent.", "search open").hears("When was the bridge built?")
    agent.does("search", "3 hits", query="bridge built").does("open", "Built in 1932.", url="http://a.test")
    agent.aside(
        "main", "You have no steps left. Report now.", "The bridge was built in 1932.\nSource: a.test", tools=""
    )


@conversation()
def structured_extraction_at_the_end(session: Session) -> None:
    """LangGraph's `response_format`: a last call without tools, whose answer is the session's result."""
    agent = session.agent("main", "You help.", "get_weather").hears("What should I wear in Oslo?")
    agent.does("get_weather", "-3 degrees, snow", city="Oslo").says("Wear a warm coat and boots.")
    agent.head, agent.tools = "Give the answer as JSON with the keys clothes and degrees.", ""
    agent.says('{"clothes": ["coat", "boots"], "degrees": -3}')
