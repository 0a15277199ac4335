"""Flows that a program steers: chains, votes, judges, planners and loops. Most of their calls have no tools."""

from __future__ import annotations

from outrider.trajectory import BranchKind, BranchPolicy

from .script import Session, conversation

STORY = "Write a story of one paragraph about a lighthouse."


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


@conversation()
def votes_that_the_program_counts(session: Session) -> None:
    """The program sends all three requests before the first vote arrives, so it may have used every vote."""
    main = session.agent("main", "You do sums.", "poll").hears("Is 91 a prime?")
    main.calls("poll", question="Is 91 a prime? Answer yes or no.", voters=3)
    voters = [session.agent("helper").hears("Is 91 a prime? Answer yes or no.") for _ in range(3)]
    session.at_once(*zip(voters, ["No", "Yes", "No"], strict=True))
    main.gets('{"yes": 1, "no": 2}').says("No, 91 is 7 times 13.")


@conversation(policy={BranchKind.RETRY: BranchPolicy.TRAIN})
def votes_one_after_the_other_that_the_program_counts(session: Session) -> None:
    """The first two votes look like unused replies. As the page about branches recommends, they train with `retry:
    "train"`."""
    main = session.agent("main", "You do sums.", "poll").hears("Is 87 a prime?")
    main.calls("poll", question="Is 87 a prime? Answer yes or no.", voters=3)
    for vote in ("No", "Yes", "No"):
        session.ask("helper", "Is 87 a prime? Answer yes or no.", vote)
    main.gets('{"yes": 1, "no": 2}').says("No, 87 is 3 times 29.")


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
    """Each step's answer is the next step's input; no call has tools."""
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


@conversation()
def votes_asked_one_after_another(session: Session) -> None:
    """The same request is sent three times, one after the other; the tally quotes every answer."""
    ask = "Does this patch leak memory?\n+ p = malloc(4);\n+ return;"
    answers = ["Yes. Nothing frees p.", "Yes: p is lost at the return.", "No, the system frees it at the end."]
    for answer in answers:
        session.ask("helper", ask, answer, says="You review C code.")
    session.ask(
        "main",
        f"Reviews:\n- {answers[0]}\n- {answers[1]}\n- {answers[2]}\nSum up.",
        "It leaks: two of three.",
        says="You decide.",
    )


@conversation(has_transcript=False)
def votes_of_one_letter(session: Session) -> None:
    """The answers are too short to be recognised in a later request."""
    voters = [session.agent("helper", "Answer with a letter.").hears("Which is odd: (A) 2, (B) 3?") for _ in range(3)]
    session.at_once(*zip(voters, ["B", "A", "B"], strict=True))
    session.ask("main", "The votes are B, A, B. Answer the user who asked which of 2 and 3 is odd.", "Three is odd.")


@conversation()
def map_and_reduce(session: Session) -> None:
    """One call for each part, all at once, and one call that joins the answers."""
    parts = ["Chapter 1: Ada meets Bo.", "Chapter 2: Bo leaves for sea.", "Chapter 3: Ada follows him."]
    mappers = [session.agent("helper", "Summarize the chapter in a line.").hears(part) for part in parts]
    session.at_once(*zip(mappers, ["Ada and Bo meet.", "Bo goes to sea.", "Ada goes after him."], strict=True))
    lines = "\n".join(mapper.history[-1].content for mapper in mappers)
    session.ask(
        "main", f"Join these lines:\n{lines}", "Ada meets Bo and follows him to sea.", says="Summarize the book."
    )


@conversation()
def research_flow(session: Session) -> None:
    """OpenAI Agents SDK's research_bot: a plan in JSON, a search agent for each of its items, a writer."""
    items = '{"query": "heat pump cost", "reason": "price"}, {"query": "heat pump noise", "reason": "comfort"}'
    plan = f'{{"searches": [{items}]}}'
    session.ask("helper", "Query: Should I buy a heat pump?", plan, says="You plan web searches.")
    found = []
    for query, reason, answer in (
        ("heat pump cost", "price", "A heat pump costs 8,000 to 15,000.\nGrants pay a third."),
        ("heat pump noise", "comfort", "It is as loud as a fridge."),
    ):
        searcher = session.agent("helper", "You search the web, and write short notes.", "web_search")
        searcher.hears(f"Search term: {query}\nReason for searching: {reason}")
        searcher.does("web_search", f"12 results for {query}", query=query)
        found.append(searcher.says(answer))
    ask = f"Original query: Should I buy a heat pump?\nSummarized search results: {found}"
    session.ask(
        "main",
        ask,
        '{"report": "# Heat pumps\\nBuy one: grants pay a third.", "questions": []}',
        says="You write reports.",
    )


@conversation(has_transcript=False)
def plan_and_execute(session: Session) -> None:
    """LangGraph: a planner answers with a tool call, an agent carries out each step, a replanner reads the results."""
    steps = {
        "Find the winner.": "Jannik Sinner won.",
        "Find where the winner was born.": "Sinner was born in Innichen.",
    }
    planner = session.agent("helper", "Make a step by step plan.", "Plan").hears(
        "Where was the winner of the open born?"
    )
    planner.calls("Plan", steps=list(steps))
    done: list[tuple[str, str]] = []
    for step, answer in steps.items():
        worker = session.agent("helper", "You are a helpful assistant.", "search")
        worker.hears(f"For the following plan:\n1. {' 2. '.join(steps)}\nYou are tasked with executing: {step}")
        worker.does("search", f"hits for {step}", query=step)
        done.append((step, worker.says(answer)))
        rest = list(steps)[len(done) :]
        replanner = session.agent("helper" if rest else "main", "", "Act")
        replanner.hears(f"Objective: where was the winner of the open born?\nDone so far: {done}")
        replanner.calls("Act", steps=rest, response="" if rest else "In Innichen.")


@conversation()
def reflexion(session: Session) -> None:
    """The reflection on a failed attempt is in the next attempt's system prompt, so it serves as a summary."""
    head, memory = "You play a text adventure.", ""
    for room, thought in (("cellar", "I should have lit the lamp before I went down."), ("attic", "")):
        agent = session.agent("main", head + memory, "act").hears("Find the treasure.")
        agent.does("act", f"You are in the {room}.", command="go").says(
            f"I give up in the {room}." if thought else "Found it!"
        )
        if thought:
            asked = f"You failed. What went wrong?\n{agent.written_out()}"
            memory = f"\nYour memory of past attempts:\n{session.ask('summary', asked, thought, says='You reflect.')}"


@conversation()
def mixture_of_agents(session: Session) -> None:
    """Proposals of three agents stand in the aggregator's system prompt."""
    ask = "Name a fair way to cut a cake."
    proposers = [session.agent("helper", f"You are proposer {number}.").hears(ask) for number in range(3)]
    session.at_once(
        *zip(proposers, ["One cuts, the other chooses.", "Weigh the pieces.", "Draw lots for the pieces."], strict=True)
    )
    listed = "\n".join(f"{number}. {one.history[-1].content}" for number, one in enumerate(proposers, 1))
    session.ask("main", ask, "One cuts and the other chooses.", says=f"Synthesize these responses:\n{listed}")


@conversation()
def corrective_retrieval(session: Session) -> None:
    """A question is rewritten for the search, documents are graded in one word, and the last request quotes the
    document that was found."""
    better = session.ask(
        "helper",
        "Look at the input: why sky blue? Formulate a better question.",
        "Why does the sky appear blue by day?",
    )
    for document, grade in (("Rayleigh scattering favours short waves.", "yes"), ("Blue cheese is blue.", "no")):
        session.ask(
            "helper", f"Document: {document}\nQuestion: {better}\nIs it relevant?", grade, says="You grade relevance."
        )
    asked = f"Question: {better}\nContext: Rayleigh scattering favours short waves.\nAnswer:"
    session.ask("main", asked, "Air scatters short waves most, and blue light is short.")


@conversation(has_transcript=False)
def question_to_sql_to_answer(session: Session) -> None:
    """The program runs the query that the model wrote. The last request quotes the query."""
    query = session.ask(
        "helper", "Tables: t(a, b).\nQuestion: how many rows?\nSQLQuery:", "```sql\nSELECT count(*)\nFROM t\n```"
    )
    bare = query.strip("`").removeprefix("sql\n").strip()
    session.ask(
        "main", f"Question: how many rows?\nSQLQuery: {bare}\nSQLResult: [(42,)]\nAnswer:", "There are 42 rows."
    )


@conversation(has_transcript=False)
def tree_of_thoughts(session: Session) -> None:
    """Steps are proposed, and each is rated in one word. The next request contains the numbers that the best step
    leaves."""
    left = "4 9 10 13"
    for steps in (
        ["13 - 9 = 4 (left: 4 4 10)", "10 - 4 = 6 (left: 6 9 13)"],
        ["10 - 4 = 6 (left: 4 6)", "4 + 4 = 8 (left: 8 10)"],
    ):
        session.ask("helper", f"Input: {left}\nPossible next steps:", "\n".join(steps))
        for step, value in zip(steps, ("sure", "impossible"), strict=True):
            session.ask(
                "helper", f"Can these numbers reach 24? {step.split('left: ')[1][:-1]}", f"They can or not.\n{value}"
            )
        left = steps[0].split("left: ")[1][:-1]
    session.ask("main", f"Input: 4 9 10 13\nSteps end with: {left}\nAnswer:", "(10 - 4) * (13 - 9) = 24")


@conversation(has_transcript=False)
def only_the_tagged_part_is_used(session: Session) -> None:
    """The program uses the text between tags and drops the thoughts around it."""
    said = session.ask(
        "helper",
        "Translate to French: good night",
        "It is a greeting.\nI keep it short and plain, without a name.\n<translation>bonne nuit</translation>",
    )
    inner = said.split("<translation>")[1].split("<")[0]
    session.ask("main", f"Improve this translation of 'good night': {inner}", "Bonne nuit !", says="You polish French.")


@conversation(has_transcript=False)
def hypothetical_document_for_a_search(session: Session) -> None:
    """HyDE: the program only embeds the first answer; no request shows it."""
    session.ask(
        "helper", "Write a passage that answers: why do cats purr?", "Cats purr to calm themselves,\nand to heal."
    )
    asked = "Context: Purring is made by the larynx.\nQuestion: why do cats purr?\nAnswer:"
    session.ask("main", asked, "Their larynx makes the sound, often to calm them.")
