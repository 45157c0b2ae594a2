"""Form bodies (RFC 7578), read as far as the gateway acts on them. Sans-IO, by python-multipart.

The body passes to the engine as it came, but for the model's name; so what this
reads must be what any other reader would: a repeated ``model`` is refused.
"""

from __future__ import annotations

from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from ..contract import Form
from ..errors import Problem, Refused

MAX_PARTS: Final = 64
MAX_HEADER_BYTES: Final = 4096
MAX_NAME_BYTES: Final = 512


class _Parts:
    """Where each part's value stands, as python-multipart calls back."""

    def __init__(self) -> None:
        self.spans: dict[str, list[tuple[int, int]]] = {}
        self.count = 0
        self.whole = False
        self._field = b""
        self._value = b""
        self._name = ""
        self._start: int | None = None
        self._end = 0

    def begin(self) -> None:
        self.count += 1
        if self.count > MAX_PARTS:
            raise _malformed(f"more than {MAX_PARTS} parts")
        self._name, self._start = "", None

    def header_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]
        self._check_header()

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._check_header()

    def header_end(self) -> None:
        if self._field.lower() == b"content-disposition":
            _, options = parse_options_header(self._value)
            self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._field = self._value = b""

    def data(self, data: bytes, start: int, end: int) -> None:
        if self._start is None:
            self._start = start
        self._end = end

    def end(self) -> None:
        start = self._end if self._start is None else self._start
        self.spans.setdefault(self._name, []).append((start, self._end if self._start is not None else start))

    def finish(self) -> None:
        self.whole = True

    def _check_header(self) -> None:
        if len(self._field) + len(self._value) > MAX_HEADER_BYTES:
            raise _malformed("a part's header is too long")


def read_form(body: bytes, content_type: bytes) -> tuple[Form, str, dict[str, bytes]]:
    """Read a form.

    Answers it, the model's name, and its other fields by name; values over 512
    bytes, files among them, are left out and stand as ``b""``.

    Raises:
        Refused: malformed, or without exactly one ``model``.
    """
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 0 < len(boundary) <= 70:
        raise _malformed("the form has no boundary")
    parts = _Parts()
    parser = MultipartParser(
        boundary,
        {
            "on_part_begin": parts.begin,
            "on_part_data": parts.data,
            "on_part_end": parts.end,
            "on_header_field": parts.header_field,
            "on_header_value": parts.header_value,
            "on_header_end": parts.header_end,
            "on_end": parts.finish,
        },
    )
    try:
        parser.write(body)
        parser.finalize()
    except FormParserError:
        raise _malformed("the form is malformed") from None
    if not parts.whole:
        raise _malformed("the form is cut")
    spans = parts.spans.get("model", [])
    if len(spans) != 1:
        raise Refused(Problem.of("missing_field", "'model' has to be there once", param="model"))
    start, end = spans[0]
    if not 0 < end - start <= MAX_NAME_BYTES:
        raise Refused(Problem.of("invalid_value", "'model' is not a name", param="model"))
    try:
        model = body[start:end].decode()
    except UnicodeDecodeError:
        raise Refused(Problem.of("invalid_value", "'model' is not UTF-8", param="model")) from None
    fields = {
        name: body[first:last] if last - first <= MAX_NAME_BYTES else b""
        for name, ((first, last), *_) in parts.spans.items()
    }
    return Form(body, content_type, (start, end)), model, fields


def with_model(form: Form, model: str) -> bytes:
    """Write the form with another model name in its place; every other byte stays."""
    start, end = form.model
    return form.body[:start] + model.encode() + form.body[end:]


def _malformed(message: str) -> Refused:
    return Refused(Problem.of("invalid_value", message))
