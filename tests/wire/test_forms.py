"""Form bodies: one model, read as anybody would read it, and every other byte left alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.contract import TRANSCRIPTIONS, Dialect
from trio_gateway.errors import Problem, Refused
from trio_gateway.testing import make_request
from trio_gateway.wire._multipart import MAX_HEADER_BYTES, MAX_NAME_BYTES, MAX_PARTS, read_form, with_model
from trio_gateway.wire._requests import internal_body, read_form_body

TYPE = b"multipart/form-data; boundary=b0undary"


def part(name: str, value: bytes, more: str = "") -> bytes:
    return (
        f'--b0undary\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode()
        + value
        + b"\r\n"
    )


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--b0undary--\r\n"


MODEL = part("model", b"org/m")
AUDIO = part("file", b"\x00RIFF\r\n\xff", '; filename="a.wav"\r\nContent-Type: audio/wav')


def refusal(body: bytes, content_type: bytes = TYPE) -> Problem:
    with pytest.raises(Refused) as refused:
        read_form_body(body, content_type)
    problem = refused.value.problem
    assert problem.status == 400
    return problem


def test_a_form_is_read_as_far_as_the_gateway_acts_on_it() -> None:
    body = form(AUDIO, MODEL, part("language", b"de"))
    found, model, fields = read_form(body, TYPE)
    assert model == "org/m"
    assert body[slice(*found.model)] == b"org/m"
    assert (found.body, found.content_type) == (body, TYPE)
    assert fields == {"file": b"\x00RIFF\r\n\xff", "model": b"org/m", "language": b"de"}

    read = read_form_body(body, TYPE)
    assert (read.model, read.stream, read.n, read.choices, read.tokens) == ("org/m", False, 1, 0, None)
    assert (read.form, read.members) == (found, fields)


@given(
    st.lists(st.tuples(st.sampled_from(["a", "files", "prompt"]), st.binary(max_size=20)), max_size=4),
    st.integers(0, 4),
    st.sampled_from(["m", "org/m", "\u00e9"]),
    st.sampled_from(["public", "", "\u00fc"]),
)
def test_another_name_changes_no_other_byte(
    others: list[tuple[str, bytes]], at: int, model: str, public: str
) -> None:
    parts = [part(name, value) for name, value in others if b"--b0undary" not in value]
    at = min(at, len(parts))
    body = form(*parts[:at], part("model", model.encode()), *parts[at:], AUDIO)
    found, name, _ = read_form(body, TYPE)
    assert name == model
    assert b"".join(with_model(found, public)) == form(
        *parts[:at], part("model", public.encode()), *parts[at:], AUDIO
    )
    assert b"".join(with_model(found, model)) == body


async def test_the_engine_gets_the_form_with_its_own_name_of_the_model() -> None:
    body = form(AUDIO, MODEL)
    request = make_request(operation=TRANSCRIPTIONS, form=read_form(body, TYPE)[0], upstream_model="whisper")
    dialect = Dialect("vllm", True, None, "rid", True, False, 0.5, frozenset())
    sent = b"".join(internal_body(request, dialect, "attempt", "salt"))
    assert sent == form(AUDIO, part("model", b"whisper"))


@pytest.mark.parametrize(
    "content_type",
    [
        b"multipart/form-data; charset=utf-8; boundary=b0undary",
        b'multipart/form-data; boundary="b0undary"',
        b"Multipart/Form-Data; Boundary=b0undary",
    ],
)
def test_a_boundary_is_found_in_every_spelling(content_type: bytes) -> None:
    assert read_form(form(AUDIO, MODEL), content_type)[1] == "org/m"


@pytest.mark.parametrize(
    "content_type",
    [
        b"",
        b"multipart/form-data",
        b"multipart/form-data; boundary=",
        b"multipart/form-data; boundary=" + b"x" * 71,
        b"multipart/mixed; boundary=b0undary",
        b"application/json",
    ],
)
def test_without_a_boundary_there_is_no_form(content_type: bytes) -> None:
    problem = refusal(form(AUDIO, MODEL), content_type)
    assert (problem.code, problem.message) == ("invalid_value", "the form has no boundary")


@pytest.mark.parametrize("boundary", [b"b", b"x" * 70])
def test_a_boundary_has_up_to_70_characters(boundary: bytes) -> None:
    body = form(AUDIO, MODEL).replace(b"b0undary", boundary)
    assert read_form(body, b"multipart/form-data; boundary=" + boundary)[1] == "org/m"


@pytest.mark.parametrize(
    ("parts", "code", "param"),
    [
        ([AUDIO], "missing_field", "model"),
        ([MODEL, MODEL], "missing_field", "model"),
        ([MODEL, part("model", b"")], "missing_field", "model"),
        ([part("Model", b"m")], "missing_field", "model"),
        ([part("model", b"")], "invalid_value", "model"),
        ([part("model", b"m" * (MAX_NAME_BYTES + 1))], "invalid_value", "model"),
        ([part("model", b"\xff")], "invalid_value", "model"),
        ([MODEL], "missing_field", "file"),
        ([MODEL, part("File", b"x")], "missing_field", "file"),
        ([MODEL, AUDIO, AUDIO], "invalid_value", "file"),
        ([MODEL, AUDIO, part("file", b"")], "invalid_value", "file"),
        ([MODEL, AUDIO, part("stream", b"true")], "invalid_value", "stream"),
        ([MODEL, AUDIO, part("stream", b" TRUE ")], "invalid_value", "stream"),
        ([MODEL, AUDIO, part("stream", b"1")], "invalid_value", "stream"),
        ([MODEL, AUDIO, part("stream", b"on")], "invalid_value", "stream"),
        ([MODEL, AUDIO, part("stream", b"false"), part("stream", b"true")], "invalid_value", "stream"),
        ([MODEL, AUDIO, part("stream", b"false"), part("stream", b"false")], "invalid_value", "stream"),
    ],
)
def test_a_form_has_one_model_one_file_and_no_stream(parts: list[bytes], code: str, param: str) -> None:
    problem = refusal(form(*parts))
    assert (problem.code, problem.param) == (code, param)


@pytest.mark.parametrize("value", [b"false", b"0", b"", b"no"])
def test_a_form_may_say_that_it_wants_no_stream(value: bytes) -> None:
    assert not read_form_body(form(AUDIO, MODEL, part("stream", value)), TYPE).stream


def test_of_a_field_that_stands_twice_no_value_counts() -> None:
    """A ``null`` in front of it must not hide what the engine may take."""
    twice = part("a[]", b"null") + part("a[]", b"word")
    assert read_form(form(AUDIO, MODEL, twice), TYPE)[2]["a[]"] == b""
    assert read_form(form(AUDIO, MODEL, twice + part("a[]", b"null")), TYPE)[2]["a[]"] == b""


def test_long_values_are_left_out() -> None:
    fields = read_form(
        form(AUDIO, MODEL, part("a", b"x" * MAX_NAME_BYTES), part("b", b"x" * (MAX_NAME_BYTES + 1))), TYPE
    )[2]
    assert (len(fields["a"]), fields["b"]) == (MAX_NAME_BYTES, b"")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--b0undary",
        b"--b0undary--\r\n",
        form(AUDIO, MODEL)[:-4],
        form(AUDIO, MODEL)[:40],
        b"x" + form(AUDIO, MODEL),
        form(AUDIO, MODEL).replace(b"\r\n", b"\n"),
        form(AUDIO, MODEL).replace(b"Content-Disposition:", b"Content Disposition:"),
        form(AUDIO, MODEL).replace(b"--b0undary--", b"--b0undary-x"),
        b'{"model": "org/m"}',
    ],
)
def test_a_broken_form_is_refused(body: bytes) -> None:
    problem = refusal(body)
    assert problem.code in ("invalid_value", "missing_field")
    assert "org" not in problem.message


def test_the_number_of_parts_is_bounded() -> None:
    parts = [part(f"f{number}", b"x") for number in range(MAX_PARTS)]
    assert read_form(form(AUDIO, MODEL, *parts[2:]), TYPE)[1] == "org/m"
    assert refusal(form(AUDIO, MODEL, *parts[1:])).message == f"more than {MAX_PARTS} parts"


def test_the_head_of_a_part_is_bounded() -> None:
    lines = '\r\nContent-Disposition: form-data; name="a"\r\nX-A: '
    for size, told in (
        (MAX_HEADER_BYTES, None),
        (MAX_HEADER_BYTES + 1, "a part's header has no end, or is too long"),
    ):
        body = form(AUDIO, MODEL, part("a", b"", "\r\nX-A: " + "x" * (size - len(lines))))
        if told is None:
            assert read_form(body, TYPE)[1] == "org/m"
        else:
            assert refusal(body).message == told


DISPOSITION = b'Content-Disposition: form-data; name="a"'
UNCLEAR = {
    "none": b"Content-Type: text/plain",
    "two": DISPOSITION + b"\r\n" + DISPOSITION,
    "of another kind": b'Content-Disposition: attachment; name="a"',
    "without a name": b'Content-Disposition: form-data; filename="a"',
    "without parameters": b"Content-Disposition: form-data",
    "a name twice": DISPOSITION + b'; name="b"',
    "a name in two spellings": DISPOSITION + b"; name*=utf-8''b",
    "a name in pieces": b'Content-Disposition: form-data; name*0="a"',
    "an escaped quote": b'Content-Disposition: form-data; name="a\\""',
    "an open quote": b'Content-Disposition: form-data; name="a',
    "a folded line": DISPOSITION + b'\r\n ; x="y"',
    "a blank before the colon": b'Content-Disposition : form-data; name="a"',
    "a control character": DISPOSITION + b"; x=\x01",
    "a bare line feed": DISPOSITION + b"\nX: y",
    "a coded value": DISPOSITION + b"\r\nContent-Transfer-Encoding: base64",
}


@pytest.mark.parametrize("head", UNCLEAR.values(), ids=UNCLEAR)
def test_a_part_that_two_readers_may_take_differently_is_refused(head: bytes) -> None:
    body = form(AUDIO, MODEL, b"--b0undary\r\n" + head + b"\r\n\r\nx\r\n")
    assert refusal(body).code == "invalid_value"


@pytest.mark.parametrize(
    "head",
    [
        b'content-disposition:form-data;name="a"',
        b"Content-Disposition: Form-Data; Name=a",
        b'Content-Disposition:\tform-data ; filename="\xc3\xa4 \\ b.wav" ;  name="a"',
        DISPOSITION + b"\r\nContent-Transfer-Encoding: Binary\r\nContent-Type: x",
    ],
)
def test_a_part_may_be_spelt_in_many_ways(head: bytes) -> None:
    assert read_form(form(AUDIO, MODEL, b"--b0undary\r\n" + head + b"\r\n\r\nx\r\n"), TYPE)[2]["a"] == b"x"


@pytest.mark.parametrize(
    "body",
    [
        form(AUDIO, MODEL, part("a", b"--b0undary")),
        form(AUDIO, MODEL, part("a", b"x--b0undary--x")),
        b"\r\n" + form(AUDIO, MODEL),
        form(AUDIO, MODEL) + b"--b0undary--\r\n",
        form(AUDIO, MODEL) + b"behind",
    ],
)
def test_the_boundary_stands_only_where_it_divides(body: bytes) -> None:
    assert refusal(body).code == "invalid_value"


def test_a_form_may_end_without_a_last_line_end() -> None:
    assert read_form(form(AUDIO, MODEL)[:-2], TYPE)[1] == "org/m"


def test_a_file_is_no_name_of_a_model() -> None:
    assert refusal(form(part("model", b"m", '; filename="x"'))).param == "model"


@given(st.binary(max_size=80), st.binary(max_size=40))
def test_any_bytes_are_read_or_refused(noise: bytes, more: bytes) -> None:
    for body in (noise, form(AUDIO, MODEL)[: len(noise)] + more, form(AUDIO, MODEL, part("a", noise)) + more):
        for content_type in (TYPE, b"multipart/form-data; " + more):
            try:
                read_form_body(body, content_type)
            except Refused as refused:
                assert refused.problem.status == 400  # noqa: PT017


@pytest.mark.parametrize("length", [256 * 1024 - 30, 256 * 1024, 512 * 1024 + 3])
def test_a_long_form_is_searched_in_steps_that_miss_nothing(length: int) -> None:
    for less in range(60):
        file = b"\r\n-" * (length // 3) + b"x" * less
        found, model, _ = read_form(form(part("file", file), part("model", b"m")), TYPE)
        assert model == "m"
        assert found.body[found.model[0] : found.model[1]] == b"m"
