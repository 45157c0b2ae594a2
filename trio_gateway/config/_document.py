"""The parsed file with everything that was laid over it, and where each value came from.

Precedence, last wins: the file, ``TRIO_GATEWAY__SECTION__KEY`` variables, ``--set section.key=value``.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from trio_gateway.config._lines import find_lines, read_key
from trio_gateway.config._problems import ConfigurationError, Path, Problem, dotted, nearest, quoted_key

PREFIX: Final = "TRIO_GATEWAY__"

# Lists of tables whose entries have an id, by which an override can name one of them.
TABLE_LISTS: Final = ("workers", "models", "tenants")


class Origin(NamedTuple):
    """Where a value was written: a file's line, or an override."""

    file: str
    line: int | None = None

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


class Override(NamedTuple):
    """One value that is to be laid over the file's."""

    origin: Origin
    key: tuple[str, ...]
    value: object
    folded: bool
    """Whether `key` came through an environment variable, where ids lose their case and punctuation."""


@dataclass
class Document:
    """A tree of plain values, as `tomllib` answers it, that remembers where they came from.

    Attributes:
        name: what to call the file in messages.
        tree: changed by `lay_over`.
        origins: of each path that was written anywhere.
    """

    name: str
    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[Path, Origin] = field(default_factory=dict)

    def origin_of(self, path: Path) -> Origin:
        """Answer where a value, or else the nearest table around it, was written."""
        for length in range(len(path), 0, -1):
            if origin := self.origins.get(path[:length]):
                return origin
        return Origin(self.name)

    def written(self, path: Path) -> Origin | None:
        """Answer where a value was written, or None if it is a default."""
        node: Any = self.tree
        for step in path:
            try:
                node = node[step]
            except (KeyError, IndexError, TypeError):
                return None
        return self.origin_of(path)

    def lay_over(self, override: Override) -> None:
        """Put one override into the tree.

        Raises:
            ValueError: no entry of a list has the id that the key names, or the key goes through a value.
        """
        node: Any = self.tree
        path: Path = ()
        for step in override.key[:-1]:
            is_new = isinstance(node, dict) and step not in node
            node, path = _descend(node, path, step, folded=override.folded)
            if is_new:
                self.origins[path] = override.origin
        last = override.key[-1]
        match node:
            case dict():
                node[last] = override.value
            case list():
                raise ValueError("names a whole entry; add the key that is to be set")
            case _:
                raise ValueError(f"{quoted_key(last)} cannot be set inside of what is no table")
        self._forget((*path, last))
        self.origins[(*path, last)] = override.origin

    def _forget(self, path: Path) -> None:
        stale = [known for known in self.origins if known[: len(path)] == path]
        for known in stale:
            del self.origins[known]


def parse_document(text: str, name: str) -> Document:
    """Parse a TOML file.

    Raises:
        ConfigurationError: it is no TOML, with the line of the first error.
    """
    try:
        tree = tomllib.loads(text)
        lines = find_lines(text)
    except tomllib.TOMLDecodeError as error:
        message, line = _split_toml_error(str(error), text)
        raise ConfigurationError([Problem(name, line, "", f"not valid TOML: {message}")]) from None
    except ValueError:  # Python refuses to read integers of more than 4,300 digits
        raise ConfigurationError([Problem(name, None, "", "holds a number with too many digits")]) from None
    except RecursionError:
        raise ConfigurationError([Problem(name, None, "", "nested too deeply")]) from None
    return Document(name, tree, {path: Origin(name, line) for path, line in lines.items()})


def read_overrides(environ: Mapping[str, str], arguments: Sequence[str]) -> Iterator[Override | Problem]:
    """Read all overrides in the order in which they are to be laid over the file."""
    for variable in sorted(environ):
        if variable.startswith(PREFIX):
            yield _from_variable(variable, environ[variable])
    for argument in arguments:
        yield _from_argument(argument)


def _from_variable(variable: str, text: str) -> Override | Problem:
    key = tuple(variable.removeprefix(PREFIX).lower().split("__"))
    if not _can_be_set(key):
        return Problem(variable, None, "", f"must be named {PREFIX}SECTION__KEY")
    return Override(Origin(variable), key, _parse_value(text), folded=True)


def _from_argument(argument: str) -> Override | Problem:
    try:
        key, rest = read_key(argument)
    except ValueError:
        key, rest = (), ""
    if not rest.startswith("="):
        # The argument is not repeated as a whole: nobody knows what stands in it.
        return Problem("--set", None, "", "needs section.key=value")
    if not _can_be_set(key):
        return Problem("--set", None, dotted(key), "names no key in a section: needs section.key=value")
    return Override(Origin("--set"), key, _parse_value(rest.removeprefix("=").strip()), folded=False)


def _can_be_set(key: tuple[str, ...]) -> bool:
    """Whether a key names a value: one in a section, or a whole list of tables."""
    return all(key) and (len(key) > 1 or key[0] in TABLE_LISTS)


def _parse_value(text: str) -> object:
    """Read a TOML value; what is none is a string, so that words and addresses need no quotes."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _descend(node: Any, path: Path, step: str, *, folded: bool) -> tuple[Any, Path]:
    """Go one step down for an override, into a table that may be missing or an entry with that id."""
    if isinstance(node, dict):
        empty: Any = [] if not path and step in TABLE_LISTS else {}
        return node.setdefault(step, empty), (*path, step)
    if isinstance(node, list):
        index = _index_of(node, step, folded=folded)
        return node[index], (*path, index)
    raise ValueError(f"{quoted_key(step)} cannot be set inside of what is no table")


def _index_of(entries: list[Any], name: str, *, folded: bool) -> int:
    ids = [str(entry.get("id", "")) if isinstance(entry, dict) else "" for entry in entries]
    found = [index for index, id_ in enumerate(ids) if (_fold(id_) if folded else id_) == name]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"{name!r} means {len(found)} entries; name one with --set")
    close = nearest(name, ids)
    hint = f'; did you mean "{close}"?' if close else ""
    raise ValueError(f'no entry of the file has the id "{name}"{hint}')


def _fold(text: str) -> str:
    """Write an id as an environment variable can: ``gpu-0`` is ``gpu_0``."""
    return re.sub("[^a-z0-9]+", "_", text.lower())


def _split_toml_error(message: str, text: str) -> tuple[str, int | None]:
    """Part tomllib's message from its place."""
    place = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", message)
    if place is None:
        return message, None
    line = int(place[1]) if place[1] else text.count("\n") + 1
    return message[: place.start()], line
