"""The evaluator `judge`: a language model, the judge, compares the agent's answer with a reference, with criteria, or
with another answer. Of the agent's work, the judge sees only the last reply. A reply of more than `answer_chars`
characters gets reward 0.

The operator configures the model: an OpenAI-compatible endpoint in the setting `graders`, or a frozen model of the
service. Invariants: an unreachable judge, or a reply without a grade, is an error, never a grade; the verdict counts
the tokens of every parsed reply, and quotes the end of the reply.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Annotated, Any

import msgspec

from outrider.config import GraderConfig
from outrider.errors import ContextOverflow, EvaluatorError, OutriderError
from outrider.evaluators.answers import last_reply
from outrider.evaluators.base import FrozenReply, Outcome
from outrider.evaluators.endpoints import Endpoints
from outrider.evaluators.grader_calls import TRANSIENT, Refused, post
from outrider.evaluators.judge.questions import JudgeOptions, Question, combined, questions_of
from outrider.evaluators.options import read_options
from outrider.messages import Message, Role
from outrider.spec import EvaluatorSpec
from outrider.trajectory import Verdict

BUSY = TRANSIENT | {429, 500}
"""HTTP statuses after which a call is repeated. They mean that the model's server is overloaded, or that one of the
server's workers has exited."""
OVERFLOWS = ("context_length_exceeded", "maximum context length")
"""Texts in replies with status 400 by which OpenAI's API and vLLM report that a question is too long."""
QUOTED = 2000
"""Maximum characters that a verdict's reason quotes from each reply."""


class TooLong(EvaluatorError):
    """A question does not fit into the judge's context."""


class AnswerTooLong(Exception):
    """A question fits into the judge's context only without the agent's answer, so the agent is the cause."""


class JudgeEvaluator:
    """Grades with a judging model (see `JudgeOptions`). The verdict's metrics are the number of calls and of tokens,
    and the score for each criterion."""

    takes_endpoints = True

    def __init__(self, spec: EvaluatorSpec, endpoints: Endpoints) -> None:
        self._options = options = read_options(JudgeOptions, spec)
        self._endpoints = endpoints
        self._grader = None
        if options.grader is not None:
            self._grader = endpoints.grader(options.grader, field="task.evaluator.options.grader")
        elif options.frozen is not None:
            endpoints.check_frozen(options.frozen, field="task.evaluator.options.frozen")

    async def evaluate(self, outcome: Outcome) -> Verdict:
        options = self._options
        judge = Judge(options, self._grader, self._endpoints, outcome)
        instruction, answer = outcome.task.instruction, last_reply(outcome)
        if not answer.strip():
            return Verdict(reward=0.0, metrics=judge.metrics(), reason="the answer is empty")
        if len(answer) > options.answer_chars:
            reason = f"the answer has {len(answer)} characters, and the judge reads {options.answer_chars}"
            return Verdict(reward=0.0, metrics=judge.metrics(), reason=reason)
        mark = self._endpoints.mark(instruction, answer, options.model_dump_json())
        votes: dict[str, list[float]] = {}
        for vote in range(options.votes):
            empty = questions_of(options, mark, instruction, "")
            for question, without in zip(questions_of(options, mark, instruction, answer), empty, strict=True):
                try:
                    scores = await judge.vote(question, vote, without)
                except AnswerTooLong:
                    reason = "the answer does not fit into the judge's context"
                    return Verdict(reward=0.0, metrics=judge.metrics(), reason=reason)
                for name, score in scores.items():
                    votes.setdefault(name, []).append(score)
        undecided = 0.5 if options.by == "pairwise" else 0.0
        means = {name: combined(given, options.combine, undecided) for name, given in votes.items()}
        weights = {one.name: one.weight for one in options.criteria} or {"grade": 1.0}
        best = sum(weight for weight in weights.values() if weight > 0)
        reward = sum(weights[name] * score for name, score in means.items()) / best
        criteria = {f"criterion.{one.name}": means[one.name] for one in options.criteria}
        return Verdict(
            reward=min(max(reward, 0.0), 1.0), metrics=judge.metrics() | criteria, reason="\n\n".join(judge.quotes)
        )


class Judge:
    """Asks the judging model the questions for one verdict.

    quotes: the end of each reply, for the verdict's reason."""

    def __init__(
        self, options: JudgeOptions, grader: GraderConfig | None, endpoints: Endpoints, outcome: Outcome
    ) -> None:
        self._options = options
        self._grader = grader
        self._endpoints = endpoints
        self._outcome = outcome
        self._counts = {"calls": 0, "cached": 0, "prompt_tokens": 0, "completion_tokens": 0}
        self.quotes: list[str] = []

    def metrics(self) -> dict[str, float]:
        return {f"judge_{name}": float(count) for name, count in self._counts.items()}

    async def vote(self, question: Question, number: int, without: Question) -> dict[str, float]:
        """Ask the judge the question in vote `number`, and return the scores by name. `without` is the same question
        with an empty answer. Raises EvaluatorError if the judge is unreachable or gives no grades. Raises AnswerTooLong
        if only `without` fits into the judge's context."""
        options, messages = self._options, question.messages
        # Each vote has its own seed, so that replies to the same question can differ. A single vote has no seed,
        # because some servers do not accept seeds.
        seed = number if options.votes > 1 else None
        asked = (options.frozen, self._grader, options.temperature, options.max_tokens, seed, messages)
        key = hashlib.sha256(msgspec.json.encode(asked, enc_hook=str)).digest()
        if (known := self._endpoints.cached(key)) is not None and (scores := question.read(known.text)):
            self._counts["cached"] += 1
            self.quotes.append(f"[judge, remembered] {known.text[-QUOTED:]}")
            return scores
        for _ in range(options.tries):
            try:
                reply = await self.call_model(messages, seed)
            except TooLong as error:
                await self.call_model((*without.messages, *messages[len(question.messages) :]), seed)
                raise AnswerTooLong from error
            self._counts["calls"] += 1
            self._counts["prompt_tokens"] += reply.prompt_tokens
            self._counts["completion_tokens"] += reply.completion_tokens
            self.quotes.append(f"[judge] {reply.text[-QUOTED:]}")
            if scores := question.read(reply.text):
                self._endpoints.cache(key, reply)
                return scores
            answer = Message(role=Role.ASSISTANT, content=reply.text)
            messages = (*question.messages, answer, Message(role=Role.USER, content=question.again))
        raise EvaluatorError(
            f"the judge gave no grade in {options.tries} replies",
            hint="read the replies in the log tail, and try another model or template, or a higher max_tokens",
            log_tail="\n\n".join(self.quotes)[-4096:],
        )

    async def call_model(self, messages: tuple[Message, ...], seed: int | None) -> FrozenReply:
        """Return a reply of the judging model. Raises TooLong if the messages do not fit into the model's context, and
        EvaluatorError for any other failure."""
        options, grader = self._options, self._grader
        if grader is None:
            assert options.frozen is not None
            # The default of `call_seconds` is meant for other people's servers. For an engine of this service, there is
            # no limit by default, because the call may have to wait for the engine.
            limit = options.call_seconds if "call_seconds" in options.model_fields_set else None
            try:
                async with asyncio.timeout(limit) as clock:
                    return await self._outcome.call_frozen(
                        options.frozen,
                        messages,
                        max_tokens=options.max_tokens,
                        temperature=options.temperature,
                        seed=seed,
                    )
            except TimeoutError as error:
                if not clock.expired():
                    raise
                raise EvaluatorError(f"the judge {options.frozen!r} did not answer within {limit:g} s") from error
            except ContextOverflow as error:
                raise TooLong(f"the judge {options.frozen!r} failed: {error.message}") from error
            # Convert even an EngineError to an EvaluatorError. After an EngineError, the whole session would run again,
            # and the agent's work would be lost.
            except OutriderError as error:
                raise EvaluatorError(f"the judge {options.frozen!r} failed: {error.message}") from error
        body: dict[str, Any] = {
            "model": grader.model or grader.name,
            "messages": [{"role": message.role.value, "content": message.content} for message in messages],
            "temperature": options.temperature,
            "max_tokens": options.max_tokens,
        } | ({} if seed is None else {"seed": seed})
        try:
            answer = await post(
                grader,
                "/chat/completions",
                msgspec.json.encode(body),
                seconds=options.call_seconds,
                pauses=self._endpoints.pauses,
                load=self._endpoints.load,
                transient=BUSY,
            )
        except Refused as error:
            if error.status == 400 and any(word in (error.log_tail or "") for word in OVERFLOWS):
                raise TooLong(error.message, log_tail=error.log_tail) from error
            raise
        try:
            answered = msgspec.convert(answer, ChatAnswer)
        except msgspec.ValidationError as error:
            raise EvaluatorError(f"judge {grader.name!r} answered with no chat completion: {error}") from error
        return FrozenReply(
            text=answered.choices[0].message.content or "",
            prompt_tokens=answered.usage.prompt_tokens,
            completion_tokens=answered.usage.completion_tokens,
        )


class ChatMessage(msgspec.Struct):
    content: str | None = None


class ChatChoice(msgspec.Struct):
    message: ChatMessage


class ChatUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class ChatAnswer(msgspec.Struct):
    """The fields of the reply to `POST /v1/chat/completions` that the judge reads."""

    choices: Annotated[list[ChatChoice], msgspec.Meta(min_length=1)]
    usage: ChatUsage = msgspec.field(default_factory=ChatUsage)
