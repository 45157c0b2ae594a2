"""Form bodies (RFC 7578), read as far as the gateway acts on them. Sans-IO.

The body passes to the engine as it came, but for the model's name. So whatever
two readers of forms could take differently is refused here, before the engine's
reader has an opinion: a boundary that stands anywhere else, line ends other than
CRLF, names told twice or in a second spelling, text before or behind the form.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from ..contract import Form
from ..errors import Problem, Refused

MAX_PARTS: Final = 64
MAX_HEADER_BYTES: Final = 4096
MAX_NAME_BYTES: Final = 512
_STEP: Final = 256 * 1024

_TOKEN: Final = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]++"
# A backslash before a quote ends the text for some readers, and does not for others.
_TEXT: Final = rb'"(?:[^"\\\x00-\x1f\x7f]|\\(?!"))*+"'
_PARAMETER: Final = rb"[ \t]*+;[ \t]*+(" + _TOKEN + rb")=(" + _TOKEN + rb"|" + _TEXT + rb")"
_PARAMETERS = re.compile(_PARAMETER)
_KIND = re.compile(rb"multipart/form-data((?:" + _PARAMETER + rb")++)[ \t]*+", re.IGNORECASE)
_DISPOSITION = re.compile(rb"form-data((?:" + _PARAMETER + rb")++)[ \t]*+", re.IGNORECASE)
_FIELD: Final = rb"\r\n(" + _TOKEN + rb"):[ \t]*+([^\x00-\x08\x0a-\x1f\x7f]*+)"
_FIELDS = re.compile(_FIELD)
_HEAD = re.compile(rb"(?:" + _FIELD + rb")++")
_ACTED: Final = ("file", "stream")  # beside the model: fields that must mean the same to everybody
_PLAIN_CODINGS: Final = (b"7bit", b"8bit", b"binary")


class _Part(NamedTuple):
    """One part: its field's name, whether it is a file, and where its value stands."""

    name: str
    is_file: bool
    start: int
    end: int


def read_form(body: bytes, content_type: bytes) -> tuple[Form, str, dict[str, bytes]]:
    """Read a form.

    Answers it, the model's name, and its other fields by name. Values over 512 bytes, files
    among them, and those of a field that is told more than once stand as ``b""``.

    Raises:
        Refused: malformed, without exactly one ``model`` and ``file``, or with several ``stream``.
    """
    parts = list(_parts(body, b"--" + _boundary(content_type)))
    models = [part for part in parts if part.name == "model"]
    if len(models) != 1:
        raise Refused(Problem.of("missing_field", "'model' has to be there once", param="model"))
    start, end = models[0].start, models[0].end
    if models[0].is_file or not 0 < end - start <= MAX_NAME_BYTES:
        raise Refused(Problem.of("invalid_value", "'model' is not a name", param="model"))
    try:
        model = body[start:end].decode()
    except UnicodeDecodeError:
        raise Refused(Problem.of("invalid_value", "'model' is not UTF-8", param="model")) from None
    fields: dict[str, bytes] = {}
    for part in parts:
        # Of several values one reader takes the first, another the last.
        again = part.name in fields
        if again and part.name in _ACTED:
            raise Refused(Problem.of("invalid_value", f"'{part.name}' stands twice", param=part.name))
        short = part.end - part.start <= MAX_NAME_BYTES
        fields[part.name] = body[part.start : part.end] if short and not again else b""
    if "file" not in fields:
        raise Refused(Problem.of("missing_field", "'file' is missing", param="file"))
    return Form(body, content_type, (start, end)), model, fields


def with_model(form: Form, model: str) -> tuple[memoryview, bytes, memoryview]:
    """Write the form, in pieces, with another model name in its place; every other byte stays."""
    start, end = form.model
    body = memoryview(form.body)
    return body[:start], model.encode(), body[end:]


def _boundary(content_type: bytes) -> bytes:
    found = _KIND.fullmatch(content_type.strip())
    boundary = _parameters(found[1], b"boundary").get(b"boundary", b"") if found else b""
    if not 0 < len(boundary) <= 70:
        raise _malformed("the form has no boundary")
    return boundary


def _parts(body: bytes, delimiter: bytes) -> Iterator[_Part]:
    """Cut a form at its delimiter lines (RFC 2046, 5.1.1)."""
    if not body.startswith(delimiter):
        raise _malformed("the form does not begin with its boundary")
    count, at = 1, len(delimiter)
    while body.startswith(b"\r\n", at):
        if count > MAX_PARTS:
            raise _malformed(f"more than {MAX_PARTS} parts")
        end = _find(body, b"\r\n" + delimiter, at)
        blank = body.find(b"\r\n\r\n", at, at + MAX_HEADER_BYTES + 4)
        if end < 0:
            raise _malformed("the form is cut")
        if blank < 0 or blank + 4 > end:
            raise _malformed("a part's header has no end, or is too long")
        yield _part(body[at:blank], blank + 4, end)
        count, at = count + 1, end + 2 + len(delimiter)
    if body[at:] not in (b"--", b"--\r\n"):
        raise _malformed("the form is cut, or something stands behind it")
    if _stands_more_often(body, delimiter, count):
        raise _malformed("the boundary stands inside a part")


def _find(body: bytes, wanted: bytes, at: int) -> int:
    """Find as `bytes.find` does, in short steps: one through megabytes would hold the loop."""
    for start in range(at, len(body), _STEP):
        found = body.find(wanted, start, start + _STEP + len(wanted) - 1)
        if found >= 0:
            return found
    return -1


def _stands_more_often(body: bytes, wanted: bytes, count: int) -> bool:
    at = 0
    for _ in range(count + 1):
        found = _find(body, wanted, at)
        if found < 0:
            return False
        at = found + len(wanted)
    return True


def _part(head: bytes, start: int, end: int) -> _Part:
    """Read a part's head; each of its lines has its CRLF in front."""
    if _HEAD.fullmatch(head) is None:
        raise _malformed("a part's header is malformed")
    fields = [(name.lower(), value) for name, value in _FIELDS.findall(head)]
    dispositions = [value for name, value in fields if name == b"content-disposition"]
    found = _DISPOSITION.fullmatch(dispositions[0]) if len(dispositions) == 1 else None
    if found is None:
        raise _malformed("a part has no clear Content-Disposition")
    parameters = _parameters(found[1], b"name")
    if b"name" not in parameters:
        raise _malformed("a part has no name")
    codings = {value.strip().lower() for name, value in fields if name == b"content-transfer-encoding"}
    if not codings <= set(_PLAIN_CODINGS):
        raise _malformed("a part is coded")
    is_file = any(name.startswith(b"filename") for name in parameters)
    return _Part(parameters[b"name"].decode("utf-8", "replace"), is_file, start, end)


def _parameters(text: bytes, wanted: bytes) -> dict[bytes, bytes]:
    """Read parameters; none may be told twice, nor the wanted one in the second spelling of RFC 2231."""
    found = _PARAMETERS.findall(text)
    parameters = {name.lower(): value.removeprefix(b'"').removesuffix(b'"') for name, value in found}
    if len(parameters) < len(found) or any(name.startswith(wanted + b"*") for name in parameters):
        raise _malformed("a form's parameter is told twice")
    return parameters


def _malformed(message: str) -> Refused:
    return Refused(Problem.of("invalid_value", message))
