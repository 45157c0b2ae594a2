"""What a client does: ask with the OpenAI SDK, and look up what the gateway wrote down."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import openai
import trio

from ..testing import MODEL_NAME
from ._ending import DemoError
from ._fetch import fetch
from ._processes import SIMULATED_MODEL

QUESTION: Final = "Why is the sky blue? Answer in two sentences."
MAX_TOKENS: Final = 120
SIMULATED_TOKENS: Final = 40
RECORD_WITHIN: Final = 5.0  # seconds; a record is settled right after the last byte
RECORD_POLL_SECONDS: Final = 0.05


async def ask(url: str, show: Callable[[str], None]) -> str:
    """Ask one question, show the answer token by token, and answer the request's id.

    The SDK's synchronous client runs in a thread, where `show` is called too: its
    asynchronous one leaves generators unfinished, which Trio complains about. When
    this is cancelled nothing more is shown, and the thread hangs up at the next token.

    Raises:
        DemoError: the gateway refused, or the answer was cut.
    """
    asked = Asked(MODEL_NAME, QUESTION, MAX_TOKENS)
    ids: list[str] = []
    await _ask(url, asked, ids.append, show)
    return ids[0]


async def ask_simulated(url: str, number: int) -> tuple[str, str]:
    """Ask a simulated worker; answer the request's id, and what the SDK said if the answer was cut.

    Args:
        number: makes each question another one.

    Raises:
        DemoError: it was refused, so that there is no answer at all.
    """
    asked = Asked(SIMULATED_MODEL, f"Question {number}.", SIMULATED_TOKENS, {"ignore_eos": True})
    ids: list[str] = []
    try:
        await _ask(url, asked, ids.append, lambda _: None)
    except DemoError as exc:
        if not ids:
            raise
        return ids[0], str(exc.__cause__)
    return ids[0], ""


@dataclass(frozen=True, slots=True)
class Asked:
    """One question, to which model, how long its answer may be, and further fields of its body."""

    model: str
    text: str
    max_tokens: int
    more: dict[str, object] = field(default_factory=dict)


async def _ask(url: str, asked: Asked, begun: Callable[[str], None], show: Callable[[str], None]) -> None:
    """Stream an answer in a thread, which is told when nobody waits for it any more."""
    over = threading.Event()

    def show_until_over(text: str) -> None:
        if over.is_set():
            raise DemoError("nobody waits for the answer")
        show(text)

    try:
        await trio.to_thread.run_sync(_converse, url, asked, begun, show_until_over, abandon_on_cancel=True)
    except (
        Exception
    ) as exc:  # a cut stream raises what the HTTP library under the SDK raises, whichever it is
        raise DemoError(f"no whole answer: {exc}") from exc
    finally:
        over.set()


def _converse(url: str, asked: Asked, begun: Callable[[str], None], show: Callable[[str], None]) -> None:
    http = openai.DefaultHttpxClient(trust_env=False)  # no proxy stands before this machine's own ports
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="not-needed", max_retries=0, http_client=http) as client,
        client.chat.completions.create(
            model=asked.model,
            messages=[{"role": "user", "content": asked.text}],
            max_tokens=asked.max_tokens,
            temperature=0,
            stream=True,
            extra_body=asked.more,
        ) as stream,
    ):
        begun(str(stream.response.headers.get("x-request-id", "")))
        for chunk in stream:
            if chunk.choices:
                show(chunk.choices[0].delta.content or "")


async def find_record(admin_url: str, exchange_id: str) -> dict[str, Any]:
    """Find the settled record of an exchange.

    Raises:
        DemoError: it does not turn up in time.
    """
    with trio.move_on_after(RECORD_WITHIN), suppress(OSError):
        while True:
            statistics = json.loads(await fetch(f"{admin_url}/admin/v1/statistics"))
            for record in reversed(statistics["recent"]):
                if record["exchange_id"] == exchange_id:
                    return dict(record)
            await trio.sleep(RECORD_POLL_SECONDS)
    raise DemoError(f"the gateway tells no record of {exchange_id}")
