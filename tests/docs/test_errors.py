"""The page of error codes says what the table of codes says, and some answer has each of them."""

from __future__ import annotations

from tests.docs.pages import column, constants, modules, table
from trio_gateway.errors import CODES

PAGE = "reference/errors.md"

# Where codes are named without being given to a caller: the table itself, and outcomes of the same name.
NAMED_ONLY = {"errors.py", "contract/_outcome.py"}


def described(heading: str) -> dict[str, tuple[int, str, bool]]:
    again = {"yes": False, "no": True}
    return {
        row["Code"].strip("`"): (int(row["HTTP"]), row["Type"].strip("`"), again[row["Again"]])
        for row in table(PAGE, heading)
    }


def test_every_code_is_described_with_its_status_its_type_and_whether_it_can_go_away() -> None:
    codes = {code: (info.status, info.type, info.final) for code, info in CODES.items()}
    assert described("Codes") == codes


def test_no_code_is_described_twice() -> None:
    listed = column(PAGE, "Codes", "Code")
    assert len(listed) == len(set(listed))


def test_every_code_is_one_that_some_module_gives_to_a_caller() -> None:
    given = {
        text
        for name, tree in modules().items()
        if name not in NAMED_ONLY
        for text in constants(tree, str)
        if text in CODES
    }
    assert CODES.keys() == given


def test_the_codes_stand_in_the_order_of_their_status() -> None:
    statuses = [status for status, _, _ in described("Codes").values()]
    assert statuses == sorted(statuses)


def test_every_code_says_when_it_comes_and_what_to_do() -> None:
    for row in table(PAGE, "Codes"):
        assert row["When"], row["Code"]
        assert row["What to do"], row["Code"]
