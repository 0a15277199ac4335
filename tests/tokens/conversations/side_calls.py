"""Calls beside the work, whose answers nothing uses."""

from __future__ import annotations

from ..harnesses import user
from ..strategies import hermes_call
from .script import Session, conversation


@conversation(one_history=True)
def quota_topic_and_title(session: Session) -> None:
    """Older Claude Code: three side calls before the first call of the agent."""
    session.ask("side", "quota", "#")
    session.ask(
        "side", "Fix the tests", '{"isNewTopic": true, "title": "Fix tests"}', says="Analyze if this is a new topic."
    )
    session.ask("side", "Fix the tests", "Fixing tests", says="Write a title of three words.")
    agent = session.agent("main", "You are a coding agent.", "bash").hears("Fix the tests")
    agent.does("bash", "2 failed", command="make test").says("They pass now.")


@conversation(one_history=True)
def next_speaker_and_loop_checks(session: Session) -> None:
    """Gemini CLI: a router call first, and later checks of the history."""
    session.ask("side", "Fix the tests", '{"model_choice": "flash"}', says="You are a Task Routing AI.")
    agent = session.agent("main", "You are a coding agent.", "bash").hears("Fix the tests")
    agent.does("bash", "2 failed", command="make test")
    agent.aside(
        "side",
        "Is the agent stuck?",
        '{"confidence": 0.1}',
        says="You identify when an AI is stuck in a loop.",
        tools="",
    )
    agent.does("bash", "0 failed", command="make test").says("They pass now.")
    agent.aside("side", "Determine who should logically speak next.", '{"next_speaker": "user"}', tools="")


@conversation(one_history=True)
def command_prefixes(session: Session) -> None:
    """Claude Code: a call for the prefix of each command."""
    agent = session.agent("main", "You are a coding agent.", "bash").hears("Show the last commit.")
    for command, prefix in (("git log -1", "git log"), ("git show HEAD | head", "git show")):
        agent.calls("bash", command=command)
        session.ask("side", f"Command: {command}", prefix, says="Extract the command prefix.")
        agent.gets(f"output of {command}")
    agent.says("The last commit fixes the parser.")


@conversation(hints=(False, True))
def claude_code_with_all_of_it(session: Session) -> None:
    """Quota, topic, a sub-agent, a web page, a summary and the turn that continues from it."""
    session.ask("side", "quota", "Hi", tools="")
    session.ask(
        "side", "Port us to Lib 3", '{"isNewTopic": true, "title": "Lib 3"}', says="Analyze if this is a new topic."
    )
    agent = session.agent("main", "You are Claude Code.", "bash task web_fetch").hears("Port us to Lib 3")
    agent.calls("task", prompt="Find all uses of Lib 2.", subagent_type="Explore")
    sub = session.agent("helper", "You are a search agent.", "grep", name="a1b2").hears("Find all uses of Lib 2.")
    agent.gets(sub.does("grep", "a.py:1", pattern="lib2").says("Only a.py uses it."))
    agent.calls("web_fetch", url="http://lib.test", prompt="What changed in Lib 3?")
    page = "Web page content:\n---\nLib 3: open() is now load().\n---\nWhat changed in Lib 3?"
    agent.gets(session.ask("helper", page, "In Lib 3, open() was renamed to load()."))
    asked = "Your task is to create a detailed summary of the conversation so far."
    text = "<summary>\nOnly a.py uses Lib 2.\nopen() is load() in Lib 3.\nNext: edit a.py.\n</summary>"
    said = agent.aside("summary", asked, text)
    agent.begins_anew(user(f"This session is being continued from a previous one.\n{said[10:-11]}"))
    agent.does("bash", "ok", command="sed -i s/open/load/ a.py").says("We use Lib 3 now.")


@conversation(hints=(False, True), one_history=True)
def opencode_with_a_title_and_a_child(session: Session) -> None:
    """A title before the first call, and a child session whose prompt is in a tool call."""
    head = "You are a title generator. Output only the title."
    session.agent("side", head).hears("Generate a title:").hears("Why is CI red?").says("CI failure cause")
    agent = session.agent("main", "You are opencode.", "bash task").hears("Why is CI red?")
    agent.calls(
        "task", description="read CI", prompt="Read the CI log and name the failing job.", subagent_type="general"
    )
    child = session.agent("helper", "You are opencode.", "bash", name="ses_2", of="ses_1").hears(
        "Read the CI log and name the failing job."
    )
    child.does("bash", "lint: E501", command="cat ci.log")
    agent.gets(f"{child.says('The job lint fails.')}\n<task_id>ses_2</task_id>")
    agent.says("CI is red because the job lint fails.")


@conversation(one_history=True)
def title_tags_and_questions_after_a_chat(session: Session) -> None:
    """Open WebUI: three calls after an answer, each with the chat as text."""
    agent = session.agent("main").hears("How do I boil an egg?")
    agent.says("Put it into boiling water for seven minutes.")
    for task, answer in (
        ("Generate a concise title with an emoji.", '{"title": "Boiling eggs"}'),
        ("Generate 1-3 broad tags.", '{"tags": ["Cooking"]}'),
        ("Suggest 3 follow-up questions.", '{"follow_ups": ["And soft?", "How do I peel it?"]}'),
    ):
        session.ask("side", f"### Task:\n{task}\n### Chat History:\n{agent.written_out()}", answer)
    agent.hears("And soft?").says("Four minutes, then cold water.")


@conversation(one_history=True)
def commit_message_at_the_end(session: Session) -> None:
    """aider: after the work, a call writes a commit message for the diff. No later request contains the message."""
    agent = session.agent("main", "Write edits as blocks.").hears("Set x to 1.")
    agent.says("a.py\n<<<<\nx = 0\n====\nx = 1\n>>>>")
    agent.hears("Applied. Anything else?").says("No, x is 1 now.")
    session.ask("side", "diff: -x = 0 +x = 1", "fix: set x to 1", says="Write a one-line commit message for the diff.")


@conversation(one_history=True)
def guardrail_beside_the_agent(session: Session) -> None:
    """OpenAI Agents SDK: a guardrail answers in JSON while the agent works; no request quotes its answer."""
    guard = session.agent("side", "Check whether the user asks for help with homework.").hears(
        "Solve 2x = 4 for our accounts."
    )
    agent = session.agent("main", "You are a support agent.", "calculate").hears("Solve 2x = 4 for our accounts.")
    session.at_once(
        (guard, '{"reasoning": "It is for accounts.", "is_homework": false}'),
        (agent, hermes_call("calculate", {"text": "4 / 2"})),
    )
    agent.gets("2").says("x is 2.")


@conversation(one_history=True)
def task_with_the_words_of_a_side_call(session: Session) -> None:
    """The task requests a summary and a title, in one question without tools. A title call for the chat quotes the
    task."""
    task = "Summarize this web page and give it a title: Bees dance to tell the way."
    answer = session.ask("main", task, "Dancing Bees\n\nBees dance to tell the way to food.")
    session.ask("side", f"### Task:\nGenerate a title.\n### Chat:\n{task}\n{answer}", '{"title": "Bees"}')


@conversation(one_history=True)
def title_of_a_text_protocol_agent(session: Session) -> None:
    """The agent has no tools either. Only the calls that follow distinguish it from the title call."""
    session.ask("side", "Name this chat: How many files are there?", "Counting files", says="You write titles.")
    agent = session.agent("main", "Run one command in a ```bash block.").hears("How many files are there?")
    agent.says("I count them.\n```bash\nls | wc -l\n```")
    agent.hears("<output>3</output>").says("```bash\necho DONE 3\n```")


@conversation(one_history=True)
def facts_extracted_for_a_memory(session: Session) -> None:
    """mem0: after the work, facts are extracted in JSON for later sessions."""
    agent = session.agent("main", "You are a travel agent.", "find").hears("I am a vegan. Find me a hotel in Rome.")
    agent.does("find", "Hotel Verde", city="Rome").says("Hotel Verde suits you.")
    session.ask(
        "side",
        f"Input:\n{agent.written_out()}",
        '{"facts": ["Is a vegan", "Travels to Rome"]}',
        says="You organize personal facts.",
    )


@conversation(one_history=True)
def warm_up_and_retries_of_a_side_call(session: Session) -> None:
    """A call that only warms the cache, and a title that is requested twice."""
    agent = session.agent("main", "You are a coding agent.", "bash").hears("Run the tests.")
    title = session.agent("side", "Write a title of three words.").hears("Run the tests.")
    title.cut("Run")
    title.says("Running the tests")
    session.ask("side", "ping", "pong")
    agent.does("bash", "0 failed", command="pytest").says("All tests pass.")
