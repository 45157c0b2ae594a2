"""Clients that ask all the time, know every answer beforehand, and judge what they get.

A simulated engine says the same to the same question, whichever worker it stands in,
so each answer is compared word by word with the one that was given when nothing was
wrong. They run in the bench's own process, apart from gateway and workers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import trio

from trio_gateway.testing import Answer, ChatReading, MessageError, RawClient, chat_request

from .fleet import MODEL
from .processes import BenchError

LENGTHS: Final = (4, 12, 30, 60)  # tokens of an answer
QUESTIONS: Final = 5  # of each length
BUFFERED: Final = 0.2  # share of requests that want their answer whole
LONGEST_ANSWER: Final = 60.0  # seconds; more is an answer that never ends

WHOLE: Final = "whole"
CUT: Final = "cut after content, with an error event"
REFUSED: Final = "failed before content"
WRONG: Final = "wrong"


@dataclass(frozen=True)
class Question:
    """One question: its text, and how many tokens its answer has."""

    text: str
    tokens: int

    def request(self, *, stream: bool) -> bytes:
        return chat_request(self.text, model=MODEL, stream=stream, simulate={"tokens": self.tokens})


@dataclass(frozen=True)
class Told:
    """What one client got.

    Attributes:
        kind: `WHOLE`, `CUT`, `REFUSED` or `WRONG`.
        began, ended: by Trio's clock.
        worker: that answered, as far as the gateway said.
        code: of the error, if there was one.
        retryable: what the gateway said of that error: nothing was retried, or it may be asked again.
        detail: why it is wrong.
    """

    kind: str
    began: float
    ended: float
    worker: str
    code: str = ""
    retryable: bool = False
    detail: str = ""


class Askers:
    """Clients that ask one question after another.

    Args:
        port: of the gateway.
        seed: of what is asked when.
        lengths: of answers, in tokens.

    Attributes:
        told: what they got, in the order of the ends.
    """

    def __init__(self, port: int, seed: int, lengths: Sequence[int] = LENGTHS) -> None:
        self._port = port
        self._lengths = lengths
        self._dice = random.Random(seed)
        self._answers: dict[Question, str] = {}
        self._stopping = False
        self.told: list[Told] = []

    async def learn(self) -> None:
        """Ask every question once, while nothing is wrong.

        Raises:
            BenchError: something is.
        """
        async with trio.open_nursery() as nursery:
            for tokens in self._lengths:
                for number in range(QUESTIONS):
                    question = Question(f"question {number} of {tokens} tokens", tokens)
                    self._answers[question] = ""
                    nursery.start_soon(self._learn, question)
        for question, text in self._answers.items():
            if len(text.split(" ")) != question.tokens:
                raise BenchError(f"no whole answer to {question.text} before the run, but {text!r}")

    async def _learn(self, question: Question) -> None:
        answer = await self._get(question, stream=True)
        if answer is not None and answer.status == 200:
            self._answers[question] = answer.chat().text

    async def ask_on(self) -> None:
        """Be one client: ask until `stop` was called, and the last answer has ended."""
        while not self._stopping:
            question = self._dice.choice(list(self._answers))
            stream = self._dice.random() >= BUFFERED
            began = trio.current_time()
            answer = await self._get(question, stream=stream)
            self.told.append(self._judge(answer, question, began))

    def stop(self) -> None:
        """Let every client end after its answer."""
        self._stopping = True

    async def _get(self, question: Question, *, stream: bool) -> Answer | None:
        """Answer what came; None: nothing that HTTP knows, or not in time."""
        with trio.move_on_after(LONGEST_ANSWER):
            try:
                with await RawClient.connect(("127.0.0.1", self._port)) as client:
                    await client.send(question.request(stream=stream))
                    return await client.read_to_end()
            except (OSError, MessageError):
                return None
        return None

    def _judge(self, answer: Answer | None, question: Question, began: float) -> Told:
        expected = self._answers[question]
        worker = "" if answer is None else answer.header("x-gateway-worker") or ""

        def told(kind: str, error: Mapping[str, Any] | None = None, detail: str = "") -> Told:
            code, retryable = "", False
            if error is not None:
                code = str(error.get("code", ""))
                retryable = bool(error.get("gateway", {}).get("retryable"))
            return Told(kind, began, trio.current_time(), worker, code, retryable, detail)

        if answer is None or answer.ended != "complete":
            return told(WRONG, detail=f"no whole HTTP message: {answer!r}")
        if answer.status != 200:
            return told(REFUSED, answer.error(), detail=f"status {answer.status}")
        if answer.events is None:
            return told(WHOLE) if _text_of(answer) == expected else told(WRONG, detail="other words")
        reading = answer.chat()
        if reading.errors and not reading.text:
            return told(REFUSED, reading.errors[0], detail="in a stream")
        if reading.errors:
            wrong = _wrong_with_cut(reading, expected)
            return told(CUT, reading.errors[0]) if not wrong else told(WRONG, reading.errors[0], wrong)
        wrong = _wrong_with_whole(reading, expected) or "; ".join(answer.events.problems)
        return told(WRONG, detail=wrong) if wrong else told(WHOLE)


def _text_of(answer: Answer) -> str:
    choice: Any = json.loads(answer.body)["choices"][0]
    return str(choice["message"]["content"]) if choice["finish_reason"] == "stop" else ""


def _wrong_with_whole(reading: ChatReading, expected: str) -> str:
    if reading.text != expected:
        return "other words, or not all of them"
    if reading.done != 1 or reading.after_done or reading.finishes != {0: "stop"} or reading.not_json:
        return f"done {reading.done}, finishes {reading.finishes}"
    return ""


def _wrong_with_cut(reading: ChatReading, expected: str) -> str:
    if reading.done:
        return "an error and [DONE]"
    if reading.finishes:
        return "an error and a finish reason"
    if len(reading.errors) != 1:
        return "more than one error"
    return "" if expected.startswith(reading.text) else "other words before the error"
