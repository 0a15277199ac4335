"""Several agents that share one conversation. The requests of each contain all messages of the others, or only their
last answers."""

from __future__ import annotations

from ..harnesses import user
from .script import Session, conversation

CHARGED = "I was charged twice for order 4711. Please get my money back."


@conversation(one_history=True)
def openai_agents_hand_off(session: Session) -> None:
    """OpenAI Agents SDK: the next agent's requests have all messages, behind the agent's own head."""
    triage = session.agent(
        "main", "You route customers to the right agent.", "transfer_to_billing transfer_to_shipping"
    )
    triage.hears(CHARGED).does("transfer_to_billing", '{"assistant": "Billing agent"}')
    billing = triage.hands_over("You are the billing agent. Be exact.", "find_order refund")
    billing.does("find_order", '{"order": 4711, "payments": [20.0, 20.0]}', order=4711)
    billing.does("refund", '{"refunded": 20.0}', order=4711, amount=20.0)
    billing.says("I have refunded the second payment of 20.00.\nThe money arrives within three days.")


@conversation(one_history=True)
def openai_agents_hand_off_and_back(session: Session) -> None:
    """Agents transfer to each other several times in one run."""
    heads = {
        "triage": ("You route customers.", "transfer_to_billing transfer_to_shipping"),
        "billing": ("You are the billing agent.", "find_order transfer_to_triage"),
        "shipping": ("You are the shipping agent.", "track transfer_to_triage"),
    }
    agent = session.agent("main", *heads["triage"]).hears("Where is my parcel, and why did I pay twice?")
    for to in ("billing", "triage", "shipping", "triage"):
        agent.does(f"transfer_to_{to}", f'{{"assistant": "{to}"}}')
        agent = agent.hands_over(*heads[to])
        if to != "triage":
            agent.does(agent.tools.split()[0], f"[{to} record 17]", order=4711)
    agent.says("Your parcel is in Ghent, and the second payment was a mistake of ours.")


@conversation()
def openai_agents_hand_off_without_tool_calls(session: Session) -> None:
    """`handoff_filters.remove_all_tools`: the next agent's history does not contain the tool calls."""
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
    """`nest_handoff_history`: the SDK gives the next agent the history as the text of one assistant message."""
    triage = session.agent("main", "You route customers.", "find_order transfer_to_billing").hears(CHARGED)
    triage.does("find_order", '{"payments": 2}', order=4711)
    triage.does("transfer_to_billing", '{"assistant": "Billing agent"}')
    lines = [f"{number}. {line}" for number, line in enumerate(triage.written_out().splitlines(), 1)]
    billing = session.agent("main", "You are the billing agent.", "refund")
    billing.said("\n".join(["For context, here is the conversation so far:", "<HISTORY>", *lines, "</HISTORY>"]))
    billing.does("refund", '{"refunded": 20.0}', order=4711)
    billing.says("The second payment is on its way back to you.")


@conversation()
def langgraph_supervisor(session: Session) -> None:
    """The workers' requests have the shared messages. The supervisor gets only the last answer of each worker."""
    supervisor = session.agent("main", "You manage two workers.", "transfer_to_coder transfer_to_qa")
    supervisor.hears("Add a --version flag, and have it tested.")
    lasts = {"coder": "The flag is in cli.py now.\nOver to QA for the tests.", "qa": "All 14 tests pass."}
    for worker, last in lasts.items():
        supervisor.does(f"transfer_to_{worker}", f"Successfully transferred to {worker}")
        at_work = supervisor.hands_over(f"You are {worker}.", "bash")
        at_work.does("bash", "ok", command=f"{worker} --go")
        at_work.says(last)
        supervisor.said(last).said_call("transfer_back_to_supervisor", "Successfully transferred back to supervisor")
    supervisor.says("Done: the flag is in, and its tests pass.")


@conversation()
def supervisor_with_answers_of_one_line(session: Session) -> None:
    """Each worker's last answer is a line of twelve characters, which the supervisor's next request contains."""
    supervisor = session.agent("main", "You decide who works next. Say only whom.")
    supervisor.hears("Ship version 2.")
    for name, line in (("dev", "Over to Tess"), ("tess", "Back to Dev."), ("dev", "Over to boss")):
        supervisor.says(f"Next: {name}.")
        worker = session.agent("main", f"You are {name}.", f"{name}_shell")
        worker.hears("\n".join(message.content for message in supervisor.history))
        worker.does(f"{name}_shell", "exit code 0", command="make")
        supervisor.hears(f"{name}: {worker.says(line)}")
    supervisor.says("Version 2 is out.")


@conversation(one_history=True)
def langgraph_swarm(session: Session) -> None:
    """The active agent's requests have all messages. After the user's second question, the agent that was active last
    continues."""
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
    """Every agent has its own history. The other agents' replies are user messages in it, the agent's own are assistant
    messages."""
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
    """A selector names the next speaker in one word. Its request is a system message with the history as text."""
    said = ["user: Who had the most points for the Heat in 2006?"]
    planner = session.agent("main", "You are the planner.").hears(said[0][6:])
    analyst = session.agent("main", "You are the analyst.", "search").hears(said[0][6:])
    for speaker, other, name, answer in (
        (planner, analyst, "planner", "1. analyst: find the player.\n2. analyst: compute the rise."),
        (analyst, planner, "analyst", "It was Dwyane Wade, with 27.2."),
        (planner, analyst, "planner", "Dwyane Wade had 27.2 points a game. TERMINATE"),
    ):
        chat = "\n".join(said)
        session.agent("helper", f"Roles: planner, analyst.\n{chat}\nSelect the next role. Only return it.").says(name)
        if speaker.tools:
            speaker.does("search", "Wade 27.2", query="Heat 2006 points")
        other.hears(speaker.says(answer))
        said.append(f"{name}: {answer}")


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


@conversation(one_history=True)
def agent_resumed_with_other_tools(session: Session) -> None:
    """The program takes a tool away for the second half of the work."""
    agent = session.agent("main", "You are a coding agent.", "bash edit plan").hears("Fix issue 31.")
    agent.does("plan", "accepted", steps=["read", "fix"]).tools = "bash edit"
    agent.does("bash", "parser.py:3: error", command="make test").does("edit", "ok", path="parser.py")
    agent.says("Issue 31 is fixed.")


@conversation(one_history=True)
def final_report_without_tools(session: Session) -> None:
    """The agent has no steps left, so the request for the last answer has no tools."""
    agent = session.agent("main", "You are a research agent.", "search open").hears("When was the bridge built?")
    agent.does("search", "3 hits", query="bridge built").does("open", "Built in 1932.", url="http://a.test")
    agent.aside(
        "main", "You have no steps left. Report now.", "The bridge was built in 1932.\nSource: a.test", tools=""
    )


@conversation(one_history=True)
def structured_extraction_at_the_end(session: Session) -> None:
    """LangGraph's `response_format`: a last call without tools, whose answer is the session's result."""
    agent = session.agent("main", "You help.", "get_weather").hears("What should I wear in Oslo?")
    agent.does("get_weather", "-3 degrees, snow", city="Oslo").says("Wear a warm coat and boots.")
    agent.head, agent.tools = "Give the answer as JSON with the keys clothes and degrees.", ""
    agent.says('{"clothes": ["coat", "boots"], "degrees": -3}')


@conversation(one_history=True)
def langgraph_supervisor_with_full_histories(session: Session) -> None:
    """`output_mode="full_history"`: the supervisor's history gets all messages of each worker."""
    agent = session.agent("main", "You manage two workers.", "transfer_to_coder transfer_to_qa")
    agent.hears("Add a --version flag, and have it tested.")
    for worker, last in (("coder", "Over to QA."), ("qa", "All 14 tests pass.")):
        agent.does(f"transfer_to_{worker}", f"Successfully transferred to {worker}")
        worked = agent.hands_over(f"You are {worker}.", "bash").does("bash", "ok", command=f"{worker} --go")
        worked.says(last)
        worked.said_call("transfer_back_to_supervisor", "Successfully transferred back to supervisor")
        agent = worked.hands_over(agent.head, agent.tools)
    agent.says("Done: the flag is in, and its tests pass.")


@conversation(has_transcript=False)
def one_line_hands_over_a_shared_history(session: Session) -> None:
    """The program reads the next agent's name from the last answer. Each agent gets the whole log as one user
    message."""
    log = ["Customer: my invoice has the wrong address."]
    for name, line in (
        ("Reception", "Over to Rex!"),
        ("Rex", "Over to Ann!"),
        ("Ann", "Over to Rex!"),
        ("Rex", "All is well."),
    ):
        agent = session.agent("main", f"You are {name}. Hand over in one line.", "lookup")
        agent.hears("\n".join(log))
        agent.does("lookup", f"record {len(log)}", key=f"invoice/{len(log)}")
        log.append(f"{name}: {agent.says(line)}")


@conversation(hints=(False, True), has_transcript=False)
def autogen_swarm(session: Session) -> None:
    """Each agent has its own history. A hand-over adds the result of the other agent's transfer call as a user message,
    without the call."""
    travel = session.agent("main", "You are a travel agent.", "transfer_to_refunder", name="travel")
    refunder = session.agent("main", "You refund flights.", "refund transfer_to_travel", name="refunder")
    for agent in (travel, refunder):
        agent.hears("I want a refund for flight 507811.")
    travel.does("transfer_to_refunder", "Transferred to refunder, adopting the role of refunder immediately.")
    refunder.hears("Transferred to refunder, adopting the role of refunder immediately.")
    refunder.does("refund", "Flight 507811 is refunded.", flight="507811")
    refunder.does("transfer_to_travel", "Transferred to travel, adopting the role of travel immediately.")
    travel.hears("Transferred to travel, adopting the role of travel immediately.")
    travel.says("Your flight 507811 is refunded. TERMINATE")


@conversation(has_transcript=False)
def crewai_sequential_tasks(session: Session) -> None:
    """CrewAI: each task's answer is the context of the next task; every agent has its own role."""
    found = ""
    for role, use, task, last in (
        ("Researcher", "helper", "Find news on batteries.", "- Sodium cells are sold.\n- Cobalt falls out of use."),
        ("Analyst", "helper", "Weigh the news.", "Sodium matters most: it is cheap, and it is here."),
        (
            "Writer",
            "main",
            "Write one paragraph.",
            "Cheap sodium cells have left the laboratory, and cobalt is on its way out.",
        ),
    ):
        agent = session.agent(use, f"You are {role}. Your goal is to be good at it.", "search" * (role == "Researcher"))
        context = f"\n\nThis is the context you're working with:\n{found}" if found else ""
        agent.hears(f"Current Task: {task}\n\nBegin! This is VERY important to you.{context}")
        if agent.tools:
            agent.does("search", "sodium cells sold; cobalt use falls", query="battery news")
        found = agent.says(last)


@conversation()
def crewai_manager_in_text(session: Session) -> None:
    """CrewAI's hierarchical process in ReAct: the manager delegates in text, and reads the answer as an observation."""
    manager = session.agent("main", "You are Crew Manager. Use 'Action:' and 'Action Input:'.").hears(
        "Current Task: Price our tea."
    )
    for task, context, answer in (
        ("Find the prices of rivals.", "We sell tea.", "Rivals sell at 4.20 to 5.10."),
        ("Compute a price 3 % below the mean.", "Rivals: 4.20 to 5.10.", "4.51"),
    ):
        action = f'{{"coworker": "Analyst", "task": "{task}", "context": "{context}"}}'
        manager.says(f"Thought: I delegate.\nAction: Delegate work to coworker\nAction Input: {action}")
        worker = session.agent("helper", "You are Analyst. Use 'Action:' and 'Final Answer:'.")
        worker.hears(f"Current Task: {task}\nThis is the context you're working with:\n{context}")
        worker.says(f"Action: calculator\nAction Input: {len(task)}")
        worker.hears(f"Observation: {len(task)}")
        manager.hears(
            f"Observation: {worker.says(f'Thought: I know.{chr(10)}Final Answer: {answer}').split('Answer: ')[1]}"
        )
    manager.says("Thought: I know.\nFinal Answer: 4.51")


@conversation(has_transcript=False)
def camel_role_play(session: Session) -> None:
    """CAMEL: a user agent instructs an assistant agent; the replies of each are the user messages of the other."""
    worker = session.agent("main", "You are a Python programmer. Never flip roles.")
    boss = session.agent("helper", "You are a stock trader. Instruct the programmer. Say DONE at the end.")
    boss.hears("Now start to give me instructions.")
    for order, solution in (
        ("Instruction: install the libraries.\nInput: None", "Solution: pip install numpy pandas\nNext request."),
        ("Instruction: load the prices.\nInput: prices.csv", "Solution: pd.read_csv('prices.csv')\nNext request."),
    ):
        worker.hears(boss.says(order))
        boss.hears(worker.says(solution))
    boss.says("DONE")


@conversation(has_transcript=False)
def debate(session: Session) -> None:
    """Two debaters answer the same question, then each other; a judge reads both."""
    ask = "Is 0.999... equal to 1? Reason briefly."
    one, two = (session.agent("helper", f"You are debater {name}.").hears(ask) for name in "AB")
    session.at_once((one, "Yes: a third is 0.333..., and three thirds are one."), (two, "No: it never gets there."))
    for _ in range(2):
        words = [agent.history[-1].content for agent in (one, two)]
        one.hears(f"This is the other's answer: {words[1]}\nUse it to update yours.")
        two.hears(f"This is the other's answer: {words[0]}\nUse it to update yours.")
        session.at_once(
            (one, f"Yes. It is a limit, and limits are numbers ({len(session.turns)})."), (two, "I agree: yes.")
        )
    session.ask(
        "main", f"{ask}\nA: {one.history[-1].content}\nB: {two.history[-1].content}", "Yes.", says="You judge debates."
    )


@conversation(replaces=True)
def magentic_ledgers(session: Session) -> None:
    """Magentic-One: facts, a plan that quotes them, and ledgers in JSON that choose and instruct the next agent."""
    boss = session.agent("main").hears("Request: how high is the tower of Pisa? Write down the facts.")
    facts = boss.says("GIVEN: the tower of Pisa.\nTO LOOK UP: its height.")
    boss.hears("Team: surfer, coder. Devise a plan.")
    plan = boss.says("- The surfer looks the height up.\n- Then we answer.")
    boss.begins_anew(user(f"Request: how high is the tower of Pisa?\nFacts:\n{facts}\nPlan:\n{plan}"))
    order = "Look up the height of the tower of Pisa."
    boss.aside("main", "Answer in JSON: done? who is next?", f'{{"done": false, "next": "surfer", "order": "{order}"}}')
    surfer = session.agent("helper", "You surf the web.", "open_page click").hears(order)
    surfer.does("open_page", "The tower is 56 m high.", url="http://pisa.test")
    boss.said(order).hears(surfer.says("The page says that the tower is 56 m high."))
    boss.aside("main", "Answer in JSON: done? who is next?", '{"done": true, "next": "surfer", "order": ""}')
    boss.hears("We are done. Answer the request.").says("The tower of Pisa is 56 m high.")


@conversation()
def router_of_one_word_and_specialist(session: Session) -> None:
    """A router names a department in one word; the specialist then does all of the work."""
    session.ask("helper", "Which department: 'My router is broken'? One word.", "hardware", says="You route requests.")
    agent = session.agent("main", "You are the hardware department.", "diagnose ship").hears("My router is broken")
    agent.does("diagnose", "no power", device="router").does("ship", "sent", item="power supply")
    agent.says("A new power supply is on its way.")


@conversation()
def smolagents_managed_agent(session: Session) -> None:
    """smolagents: the manager calls the agent in code, and reads its answer in the code's output."""
    manager = session.agent("main", "Solve the task by code in <code> tags.").hears(
        "New task:\nHow old is the oldest tree?"
    )
    manager.says("Thought: I ask the agent.\n<code>\nprint(search_agent('Find the age of the oldest tree'))\n</code>")
    helper = session.agent("helper", "Solve the task by tool calls.", "web_search final_answer")
    helper.hears(
        "You're a helpful agent named 'search_agent'.\n---\nTask:\nFind the age of the oldest tree\n---\nReport it all."
    )
    helper.does("web_search", "Old Tjikko: 9,550 years", query="oldest tree")
    helper.calls("final_answer", answer="### 1. Short version:\nOld Tjikko is 9,550 years old.")
    report = "### 1. Short version:\nOld Tjikko is 9,550 years old."
    manager.hears(f"Observation:\nHere is the final answer from your managed agent 'search_agent':\n{report}")
    manager.says("Thought: I know it.\n<code>\nfinal_answer(9550)\n</code>")


@conversation(one_history=True)
def user_turns_to_another_agent(session: Session) -> None:
    """The user picks another agent for the second question. That agent's history has the first question and its
    answer."""
    asker = session.agent("main", "You answer, and change nothing.", "read").hears("Where is the port set?")
    asker.does("read", "PORT = 80", path="settings.py").says("In settings.py.")
    coder = asker.hands_over("You change code.", "read edit").hears("Set it to 8080.")
    coder.does("edit", "ok", path="settings.py").says("The port is 8080 now.")


@conversation()
def architect_and_editor(session: Session) -> None:
    """aider: the architect's answer is the editor's only message; the editor has another system prompt."""
    architect = session.agent("main", "Act as an architect. Describe the change.").hears("Make greet() polite.")
    plan = architect.says("In hello.py, let greet() say 'Good day' in place of 'Hi'.\nKeep the name.")
    editor = session.agent("main", "Act as an editor. Write edits as blocks.").hears(plan)
    editor.says("hello.py\n<<<<\nreturn 'Hi'\n====\nreturn 'Good day'\n>>>>")


@conversation(has_transcript=False)
def final_answer_from_notes(session: Session) -> None:
    """After the agent's last call, a model without tools writes the answer from the history as text."""
    agent = session.agent("main", "You research.", "search").hears("How deep is the lake?")
    agent.does("search", "254 m", query="lake depth").says("Notes: 254 m, by one source.")
    session.ask("main", f"Notes and calls:\n{agent.written_out()}\nWrite the answer.", "The lake is 254 m deep.")
