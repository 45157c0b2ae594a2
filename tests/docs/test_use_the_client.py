"""The guide to the client and its reference: programs run as they stand, and tables say what the code has."""

from __future__ import annotations

import ast
import inspect
import sys
from typing import Final

import pytest
import trio

from tests.docs.pages import assigned, blocks, column, page, section, table, words
from tests.e2e.serving import Serving, serving, tenant
from trio_gateway import client
from trio_gateway.client import Delta, Tokens, TokensError, TokenStream, open_tokens
from trio_gateway.testing import EngineRequest, Repeat, Script, chat_chunk, chat_stream, open_engine

GUIDE: Final = "how-to/use-the-client.md"
REFERENCE: Final = "reference/token-client.md"
ADDRESS: Final = "ws://127.0.0.1:8080"
CODES: Final = ("UNREACHABLE", "LOST", "CLOSED", "BROKEN")
LIMIT: Final = 60.0  # seconds


def answer(request: EngineRequest) -> Script:
    """What the examples get."""
    if b"Count" in request.body:
        begun = chat_stream("1 ", finish=None, done=False, end=False)
        return (*begun, Repeat((chat_chunk({"content": "and "}),), every=0.01))
    return chat_stream("It ", "scatters.", usage=(5, 2))


async def output_of(heading: str, gateway: Serving) -> str:
    """Run a program of the guide as a process of its own, and read what it prints."""
    (program,) = blocks(section(GUIDE, heading), "python")
    address = gateway.gateway.addresses[0].replace("http", "ws")
    assert ADDRESS in program
    with trio.fail_after(LIMIT):
        ran = await trio.run_process(
            [sys.executable, "-c", program.replace(ADDRESS, address)], capture_stdout=True
        )
    return ran.stdout.decode()


PRINTED: Final = {
    "A program": "It scatters.['stop'] 2\n",
    "Several at a time": "grass green: It scatters.\nthe sky blue: It scatters.\n",
    "Stop early, and limit the time": "1 and ",
    "When something fails": "model_not_found model None\n",
}


@pytest.mark.parametrize("heading", PRINTED)
async def test_a_program_prints_what_is_expected(heading: str) -> None:
    models, tenants = [{"id": "llama-3.1-8b"}], [tenant("mine", "tg_mine")]
    async with (
        open_engine(answer) as engine,
        serving(engine, models=models, tenants=tenants, delivery={"resume_window": 0.5}) as gateway,
    ):
        printed = await output_of(heading, gateway)
        if heading.startswith("Several"):
            printed = "".join(sorted(printed.splitlines(keepends=True)))
        if heading.startswith("Stop"):
            assert printed.endswith("enough\n")
            assert (await gateway.settled()).outcome == "client_cancelled"
            printed = printed[: len(PRINTED[heading])]
        assert printed == PRINTED[heading]


def test_every_program_of_the_guide_is_run() -> None:
    programs = [block for heading in PRINTED for block in blocks(section(GUIDE, heading), "python")]
    assert programs == blocks(page(GUIDE), "python")


@pytest.mark.parametrize(
    ("heading", "function"), [("Opening", open_tokens), ("Asking", Tokens.generate)], ids=["open", "generate"]
)
def test_every_argument_is_described_with_its_default(heading: str, function: object) -> None:
    arguments = dict(inspect.signature(function).parameters)  # type: ignore[arg-type]
    arguments.pop("self", None)
    rows = {row["Argument"].strip("`"): row["Default"].strip("`") for row in table(REFERENCE, heading)}
    assert list(rows) == list(arguments)
    for name, argument in arguments.items():
        if argument.default is inspect.Parameter.empty:
            assert rows[name] == ""
        elif argument.default is not None:
            assert (
                rows[name] == f"{argument.default:g}" if isinstance(argument.default, float) else rows[name]
            )
            assert isinstance(argument.default, float) or rows[name] == str(argument.default)


def public(kind: type) -> set[str]:
    """Names of attributes, properties and methods that a user has of a class."""
    fields = set(getattr(kind, "__struct_fields__", ())) - {"stream_id"}
    members = {
        name for name, member in vars(kind).items() if isinstance(member, property) or callable(member)
    }
    return fields | {name for name in members if not name.startswith("_")}


def test_every_name_of_the_classes_is_described() -> None:
    own = {"begin", "wake", "close", "first_socket", "run"}  # between the parts of the client itself
    named = {name.split("(")[0] for name in column(REFERENCE, "Opening", "Argument")}
    second = {words(row["Name"])[0].split("(")[0] for row in table(REFERENCE, "Opening", number=2)}
    assert named & second == set()
    assert second == public(Tokens) - own
    stream = {words(row["Name"])[0].removesuffix("()") for row in table(REFERENCE, "A stream")}
    assert stream == public(TokenStream)
    delta = {words(row["Name"])[0] for row in table(REFERENCE, "A stream", number=2)}
    assert delta == public(Delta)


def test_every_error_and_code_is_described() -> None:
    errors = {
        name
        for name in client.__all__
        if isinstance(kind := getattr(client, name), type) and issubclass(kind, TokensError)
    }
    assert {words(row["Class"])[0] for row in table(REFERENCE, "Errors")} == errors - {"TokensError"}
    codes = {ast.literal_eval(assigned("client/_errors.py", name)) for name in CODES}
    assert {words(row["Code"])[0] for row in table(REFERENCE, "Errors", number=2)} == codes


def numbers(module: str, name: str) -> set[int]:
    """What a frozen set in the package consists of."""
    value = assigned(module, name)
    assert isinstance(value, ast.Call)
    found = ast.literal_eval(value.args[0])
    assert isinstance(found, set)
    return found


def test_the_codes_after_which_another_socket_is_tried_are_those_of_the_page() -> None:
    text = " ".join(section(REFERENCE, "Errors").split())
    assert "1000, 1001, 1005, 1006 and 1011 to 1015" in text
    assert numbers("client/_reconnect.py", "_PASSING") == {1000, 1001, 1005, 1006, *range(1011, 1016)}
    assert "408, 425, 429, 500, 502, 503 or 504" in text
    assert numbers("client/_reconnect.py", "_PASSING_STATUS") == {408, 425, 429, 500, 502, 503, 504}


def seconds(module: str, name: str) -> float:
    """A number of the package."""
    return float(ast.literal_eval(assigned(module, name)))


def test_the_times_are_those_of_the_page() -> None:
    text = " ".join(page(REFERENCE).split())
    assert f"has waited for {seconds('client/_state.py', 'ACK_DELAY'):g} seconds" in text
    first, longest = (seconds("client/_reconnect.py", name) for name in ("FIRST_PAUSE", "LONGEST_PAUSE"))
    assert f"pauses from {first:g} to {longest:g} seconds" in text
    last, farewell = (seconds("client/_tokens.py", name) for name in ("LAST_WORDS", "FAREWELL_LIMIT"))
    assert f"closed within {last:g} seconds" in text
    assert f"is cancelled, within {farewell:g} second" in text
    silent = sum(seconds("client/_tokens.py", name) for name in ("PING_INTERVAL", "PING_LIMIT"))
    assert f"did not answer for {silent:g} seconds" in text
