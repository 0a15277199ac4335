"""Helpers: agents as tools, voters, judges, planners, and the steps of deterministic flows."""

from __future__ import annotations

from outrider.trajectory import BranchKind, BranchPolicy

from .script import Session, conversation

STORY = "Write a story of one paragraph about a lighthouse."


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


@conversation()
def deterministic_flow(session: Session) -> None:
    """OpenAI Agents SDK's deterministic.py: outline, a check in JSON, the story."""
    outline = session.ask(
        "helper", STORY, "A keeper.\nA storm.\nA light that must not go out.", says="You write an outline."
    )
    session.ask("helper", outline, '{"good_quality": true, "is_scifi": true}', says="You judge the outline.")
    session.ask(
        "main",
        outline,
        "The keeper climbed the stairs once more, and the storm climbed with him.",
        says="You write a story from the outline.",
    )


@conversation()
def evaluator_and_optimizer(session: Session) -> None:
    """OpenAI Agents SDK's llm_as_a_judge.py: the judge's feedback is a user message of the next draft."""
    writer = session.agent("main", "You write a story outline. Use the feedback.").hears(STORY)
    for draft, score, feedback in (
        ("A keeper sleeps.", "needs_improvement", "Nothing happens. Give the keeper a reason to wake."),
        ("A keeper wakes in a storm.", "needs_improvement", "Better. Now let it end."),
        ("A keeper wakes in a storm, and saves a ship.", "pass", "It is good."),
    ):
        outline = writer.says(draft)
        verdict = f'{{"score": "{score}", "feedback": "{feedback}"}}'
        session.ask("helper", f"{STORY}\n{outline}", verdict, says="You judge outlines. Never pass on the first try.")
        if score != "pass":
            writer.hears(f"Feedback: {feedback}")


@conversation()
def votes_and_a_tally(session: Session) -> None:
    """The same request three times at once, and a request that quotes all answers."""
    ask = "A bat and a ball cost 1.10. The bat costs 1.00 more. What does the ball cost?"
    voters = [session.agent("helper", "Think step by step.").hears(ask) for _ in range(3)]
    answers = ["The ball costs 0.05.", "The ball costs 0.10.", "It is 0.05: 1.05 + 0.05 = 1.10."]
    session.at_once(*zip(voters, answers, strict=True))
    quoted = "\n".join(f"Answer {number}: {answer}" for number, answer in enumerate(answers, 1))
    session.ask("main", f"{ask}\n{quoted}\nWhich answer has the majority?", "0.05", says="You count votes.")


@conversation(policy={BranchKind.RETRY: BranchPolicy.TRAIN}, has_transcript=False)
def votes_that_the_program_counts(session: Session) -> None:
    """As the page about branches recommends: with `retry: "train"`, all three votes train."""
    voters = [session.agent("helper", "Answer with one word.").hears("Is 91 a prime?") for _ in range(3)]
    session.at_once(*zip(voters, ["No", "Yes", "No"], strict=True))


@conversation()
def judge_of_candidates(session: Session) -> None:
    """A judge is shown three candidates and names one, which the main agent applies."""
    main = session.agent("main", "You fix bugs.", "bash apply").hears("Fix the crash on empty input.")
    main.does("bash", "parser.py:3: IndexError", command="make test")
    patches = ["- x[0]\n+ x[:1]", "- x[0]\n+ x[0] if x else None", "- x[0]\n+ next(iter(x), None)"]
    shown = "\n\n".join(
        session.ask(
            "helper", f"Propose a patch of kind {number} for parser.py:3: IndexError", patch, says="You write patches."
        )
        for number, patch in enumerate(patches)
    )
    session.ask(
        "helper", f"Candidates:\n{shown}\nWhich is the best? Give the number only.", "2", says="You are a strict judge."
    )
    main.hears(f"Apply this patch:\n{patches[1]}").does("apply", "applied", patch=patches[1]).says(
        "The crash is fixed."
    )


@conversation()
def chain_of_prompts(session: Session) -> None:
    """Each step's answer is the next step's input; nobody has tools."""
    facts = session.ask(
        "helper",
        "List three facts of this text: Bees dance.",
        "- Bees dance.\n- Dances tell ways.\n- Ways lead to food.",
        says="You list facts.",
    )
    ordered = session.ask(
        "helper",
        facts,
        "1. Ways lead to food.\n2. Dances tell ways.\n3. Bees dance.",
        says="You order facts by weight.",
    )
    session.ask(
        "main",
        f"Facts:\n{ordered}",
        "To find food, bees tell each other the way by dancing.",
        says="You write one sentence.",
    )


@conversation()
def planner_in_the_executors_system_prompt(session: Session) -> None:
    """The plan is in the system prompt of the agent that carries it out."""
    plan = session.ask(
        "helper",
        "Task: rename the module.",
        "1. Find all imports.\n2. Rename the file.\n3. Run the tests.",
        says="You are a planner.",
    )
    executor = session.agent("main", f"You carry out this plan:\n{plan}\nDo not leave it.", "bash").hears(
        "Task: rename the module."
    )
    executor.does("bash", "a.py b.py", command="grep -l old *.py").does("bash", "ok", command="git mv old.py new.py")
    executor.says("The module is renamed.")


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
