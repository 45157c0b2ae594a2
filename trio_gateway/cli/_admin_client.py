"""Asking a running gateway's operators' door. The module of the commands that imports httpx."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx  # noqa: ASYNC127 - the constraints pin it; httpx2 has the same API

from ..admin import ACTS, PREFIX, READS, SHAPES, complaints

PATIENCE: Final = 15.0  # seconds for an answer; the gateway gives a body 10
ACT_PATIENCE: Final = 60.0  # of an act; one of several processes that hangs holds it up for 30
UNIX: Final = "unix:"
LONGEST: Final = 64 * 1024 * 1024  # bytes of an answer, or of one event; more is from no gateway
DEEPEST: Final = 150  # levels of an answer
# Shapes of answers by what their paths look like.
_SHAPES: Final = tuple(
    (re.compile(re.escape(path).replace(r"\{id\}", "[^/]+")), shape)
    for path, shape in [*((read.path, read.shape) for read in READS), *((act.path, "Act") for act in ACTS)]
)


class AdminFailed(Exception):
    """There is no answer, or it is a refusal; the text says why, for people."""


class AdminClient:
    """A connection to the door, closed at the end of its ``with`` block.

    Args:
        url: ``http://host:port``, ``https://host`` or ``unix:path``.
        token: None: none is shown.
    """

    def __init__(self, url: str, token: str | None) -> None:
        self._shown = url
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        unix = url.startswith(UNIX)
        if not unix and not url.startswith(("http://", "https://")):
            raise AdminFailed(f"{url!r} is no address: write http://host:port, https://host or unix:path")
        if unix and not Path(url.removeprefix(UNIX)).is_socket():
            raise AdminFailed(f"there is no socket {url.removeprefix(UNIX)!r}")
        try:
            self._http = httpx.Client(
                base_url="http://localhost" if unix else url,
                headers=headers,
                timeout=PATIENCE,
                trust_env=False,  # a proxy of the environment is no place for this token
                transport=httpx.HTTPTransport(uds=url.removeprefix(UNIX)) if unix else None,
            )
        except (httpx.InvalidURL, UnicodeEncodeError) as wrong:
            raise AdminFailed(f"{url!r} or the token can not be used: {wrong}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._http.close()

    def read(self, path: str, **query: Any) -> Any:
        """Answer what stands under a path; what of the query is None is left out.

        Raises:
            AdminFailed: there is no answer, or it is a refusal.
        """
        asked = {name: value for name, value in query.items() if value is not None}
        return self._answer(self._ask("GET", path, params=asked), _shape_of(path, "GET"))

    def act(self, path: str, arguments: Mapping[str, Any]) -> Any:
        """Do something, and answer what it did. Raises as `read`."""
        return self._answer(
            self._ask("POST", path, json=dict(arguments), timeout=ACT_PATIENCE), _shape_of(path, "POST")
        )

    def events(self, path: str) -> Iterator[tuple[str, Any]]:
        """Answer names and values of the events of a feed, as they come, until it ends. Raises as `read`."""
        begun = False
        try:
            with self._http.stream("GET", PREFIX + path) as answer:
                begun = True
                if answer.status_code != 200:
                    self._answer(_read_whole(answer), "Error")
                name = ""
                for line in _lines(answer):
                    if line.startswith(b"event: "):
                        name = line.removeprefix(b"event: ").decode("ascii", "replace")
                    elif line.startswith(b"data: ") and name in _EVENTS:
                        yield name, _value(line.removeprefix(b"data: "), _EVENTS[name])
        except httpx.HTTPError as error:
            what = f"the feed of {self._shown} ended" if begun else f"no answer from {self._shown}"
            raise AdminFailed(f"{what}: {_said(error)}") from None
        except ValueError:
            raise AdminFailed(f"the feed of {self._shown} is none of a gateway") from None

    def _ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        try:
            with self._http.stream(method, PREFIX + path, **more) as answer:
                return _read_whole(answer)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise AdminFailed(f"no answer from {self._shown}: {_said(error)}") from None
        except ValueError as error:
            raise AdminFailed(f"{self._shown}: {error}") from None

    def _answer(self, answer: httpx.Response, shape: str) -> Any:
        try:
            if answer.status_code == 200:
                return _value(answer.content, shape)
            error = _value(answer.content, "Error")["error"]
        except ValueError:
            what = f"{self._shown} answered {answer.status_code}, and not as a gateway does"
            raise AdminFailed(what) from None
        message = error["message"]
        gap = "\n" if "\n" in message else " "  # problems of a file have a line each
        how = _HOW if answer.status_code == 401 else ""
        raise AdminFailed(f"{message}{gap}({answer.status_code} {error['code']}){how}")


_HOW: Final = "; --token-file or TRIO_GATEWAY_ADMIN_TOKEN shows one"
_EVENTS: Final = {"snapshot": "Snapshot", "ending": "Ending"}


def _shape_of(path: str, method: str) -> str:
    """Name the shape of an answer."""
    acts = {"Act"} if method == "POST" else set(SHAPES) - {"Act"}
    return next(shape for known, shape in _SHAPES if shape in acts and known.fullmatch(path))


def _value(text: bytes, shape: str) -> Any:
    """Read JSON of a shape; a newer gateway may tell more.

    Raises:
        ValueError: it is none.
    """
    try:
        value = json.loads(text)
        if _is_deeper(value, DEEPEST):
            raise ValueError("nested too deeply")
        wrong = [where for where, why in complaints(value, SHAPES[shape], SHAPES) if why != "is not known"]
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if wrong:
        raise ValueError(wrong[0])
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(_is_deeper(each, levels - 1) for each in inner)


def _read_whole(answer: httpx.Response) -> httpx.Response:
    """Read the body of an answer, and no more than any gateway answers.

    Raises:
        ValueError: it is longer.
    """
    body = bytearray()
    for piece in answer.iter_bytes():
        body += piece
        if len(body) > LONGEST:
            raise ValueError("the answer does not end")
    return httpx.Response(answer.status_code, content=bytes(body))


def _lines(answer: httpx.Response) -> Iterator[bytes]:
    """Answer the lines of a feed, as they come.

    Raises:
        ValueError: one does not end.
    """
    rest = b""
    for piece in answer.iter_bytes():
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole
        if len(rest) > LONGEST:
            raise ValueError("an event does not end")


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
