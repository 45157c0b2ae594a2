"""Form bodies: what is let in is read as a reader reads it who knows only the boundary."""

from __future__ import annotations

import re
from typing import Final

from trio_gateway.contract import Form
from trio_gateway.errors import Refused
from trio_gateway.wire import read_form_body
from trio_gateway.wire._multipart import read_form, with_model

from ..target import Target, seed, split
from .requests import expect_clear

BOUNDARIES: Final = (b"b", b"----x", b"a-b")
DISPOSITION: Final = re.compile(rb"\r\nContent-Disposition:[^;\r\n]*([^\r\n]*)", re.IGNORECASE)
PARAMETER: Final = re.compile(rb';[ \t]*([^=;"]+)=("[^"]*"|[^;]*)')


def check(data: bytes) -> None:
    """See `Target`. Option: the boundary."""
    body, (option,) = split(data, 1)
    boundary = BOUNDARIES[option % len(BOUNDARIES)]
    content_type = b"multipart/form-data; boundary=" + boundary
    try:
        form, model, _ = read_form(body, content_type)
        read = read_form_body(body, content_type)
    except Refused as refused:
        expect_clear(refused.problem)
        return
    assert read.model == model
    assert body[slice(*form.model)].decode() == model
    assert _models(body, boundary) == [model.encode()]
    assert b"".join(with_model(form, model)) == body
    _expect_renamed(form, content_type)


def _models(body: bytes, boundary: bytes) -> list[bytes]:
    """The values of all fields ``model``, by the delimiter lines alone (RFC 2046, 5.1.1)."""
    _, *parts = re.split(rb"\r\n--" + boundary + rb"(?=--|\r\n)", b"\r\n" + body)
    found = []
    for part in parts:
        if part.startswith(b"--"):
            break
        head, blank, value = part.partition(b"\r\n\r\n")
        line = DISPOSITION.search(head)
        names = [text for key, text in PARAMETER.findall(line[1] if line else b"") if key.lower() == b"name"]
        if blank and [name.strip(b' \t"') for name in names] == [b"model"]:
            found.append(value)
    return found


def _expect_renamed(form: Form, content_type: bytes) -> None:
    renamed = b"".join(with_model(form, "another/m\u00f6del"))
    again, model, _ = read_form(renamed, content_type)
    assert model == "another/m\u00f6del"
    start, end = form.model
    assert renamed[: again.model[0]] == form.body[:start]
    assert renamed[again.model[1] :] == form.body[end:]


def _part(head: bytes, value: bytes, boundary: bytes = b"b") -> bytes:
    return b"--" + boundary + b"\r\nContent-Disposition: form-data; " + head + b"\r\n\r\n" + value + b"\r\n"


_MODEL: Final = _part(b'name="model"', b"m1")
_FILE_NAMED: Final = b'name="file"; filename="a.wav"\r\nContent-Type: audio/wav'
_FILE: Final = _part(_FILE_NAMED, b"RIFF\x00\r\n--\xff")
_BOTH: Final = _FILE + _MODEL
_FORMS: Final = (
    _MODEL + _FILE + b"--b--\r\n",
    _FILE + _part(b'name="language"', b"en") + _MODEL + b"--b--",
    _BOTH + _MODEL + b"--b--\r\n",
    _BOTH + _part(b"name=model", b"m2") + b"--b--\r\n",
    _BOTH + _part(b'name="x"; name="model"', b"m2") + b"--b--\r\n",
    _BOTH + _part(b"name*=utf-8''model", b"m2") + b"--b--\r\n",
    _FILE + _part(b'NAME="model"', b"m1") + b"--b--\r\n",
    _FILE + _part(b'name="model"; filename="x"', b"m1") + b"--b--\r\n",
    _FILE + _part(b'name="stream"', b"true") + _MODEL + b"--b--\r\n",
    _BOTH.replace(b"\r\n", b"\n") + b"--b--\n",
    b"preamble\r\n" + _BOTH + b"--b--\r\nepilogue",
    _BOTH + b"--b--\r\n" + _MODEL,
    _BOTH + b"--b",
    _FILE + _part(b'name="model"', b"m1\r\n--bx") + b"--b--\r\n",
    _part(_FILE_NAMED, b"RIFF", b"a-b") + _part(b'name="model"', b"m1", b"a-b") + b"--a-b--\r\n",
    b"",
)

TARGET: Final = Target(
    check,
    (*(seed(form, 0) for form in _FORMS), seed(_FORMS[-2], 2)),
    (
        b"--b\r\n", b"--b--\r\n", b"\r\n--b\r\n", b"\r\n\r\n", b"Content-Disposition: form-data; ",
        b'name="model"',
        b'; filename="x"', b'"', b";", b"name*=", b"\\", b"\r", b"\n", b"--", b"b", b"m1", b'name="model',
        b"\t", b" ",
    ),
)  # fmt: skip
