"""What an agent's rejections mean is what the page about endings draws."""

from __future__ import annotations

from typing import Final

from tests.docs.pages import table, words
from trio_gateway.exchange._retry import of_rejection
from trio_gateway.wire import REJECTIONS, rejection_of

PAGE: Final = "explanation/endings-and-retries.md"


def test_the_page_draws_what_each_typed_rejection_means() -> None:
    """Where the exchange may go, whether it is a fault, and what its caller is told if it goes nowhere."""
    drawn = {}
    for row in table(PAGE, "What an agent's rejection means"):
        status, _, code = row["Told"].partition(" ")
        told = "".join(words(code)) or code
        drawn[words(row["Word"])[0]] = (row["Again"], row["Fault"] == "yes", int(status), told)
    meant = {}
    for word in REJECTIONS:
        found = rejection_of(b'{"rejected": "%s"}' % word.encode())
        assert found is not None
        failure = of_rejection(word, found[1])
        meant[word] = (failure.way.name.lower(), failure.fault, failure.problem.status, failure.problem.code)
        assert failure.signal in ("", word)
    assert drawn == meant
