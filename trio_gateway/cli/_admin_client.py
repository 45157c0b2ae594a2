"""Asking a running gateway's operators' door. The module of the commands that imports httpx."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx  # noqa: ASYNC127 - the constraints pin it; httpx2 has the same API

from ..admin import PREFIX

PATIENCE: Final = 15.0  # seconds for an answer; the gateway gives a body 10
UNIX: Final = "unix:"


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
        return self._answer(self._ask("GET", path, params=asked))

    def act(self, path: str, arguments: Mapping[str, Any]) -> Any:
        """Do something, and answer what it did. Raises as `read`."""
        return self._answer(self._ask("POST", path, json=dict(arguments)))

    def events(self, path: str) -> Iterator[tuple[str, Any]]:
        """Answer names and values of the events of a feed, as they come, until it ends. Raises as `read`."""
        try:
            with self._http.stream("GET", PREFIX + path) as answer:
                if answer.status_code != 200:
                    answer.read()
                    self._answer(answer)
                name = ""
                for line in answer.iter_lines():
                    if line.startswith("event: "):
                        name = line.removeprefix("event: ")
                    elif line.startswith("data: "):
                        yield name, json.loads(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            raise AdminFailed(f"the feed of {self._shown} ended: {_said(error)}") from None

    def _ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        try:
            return self._http.request(method, PREFIX + path, **more)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise AdminFailed(f"no answer from {self._shown}: {_said(error)}") from None

    def _answer(self, answer: httpx.Response) -> Any:
        try:
            value = answer.json()
            if answer.status_code == 200:
                return value
            error = value["error"]
            raise AdminFailed(f"{error['message']} ({answer.status_code} {error['code']})")
        except (ValueError, KeyError, TypeError):
            what = f"{self._shown} answered {answer.status_code}, and not as a gateway does"
            raise AdminFailed(what) from None


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
