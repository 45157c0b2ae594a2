"""Where the settings of a running gateway come from, so that they can be read again, or changed in part."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any, Final, Self

from trio_gateway.config._document import PREFIX, TABLE_LISTS, Document, Origin, Override, parse_document
from trio_gateway.config._lines import read_key
from trio_gateway.config._load import NO_ENVIRONMENT, assemble, read_text
from trio_gateway.config._problems import ConfigurationError, Path, Problem
from trio_gateway.config._settings import Settings

LIVE: Final = "live"


@dataclass(frozen=True, slots=True)
class Source:
    """A file with what lies over it, as it was read.

    Attributes:
        settings: what it amounts to.
        document: says where each value was written.
    """

    settings: Settings
    document: Document
    _name: str
    _text: str
    _folder: FilePath
    _from_file: bool
    _environ: Mapping[str, str]
    _arguments: tuple[str, ...]
    _copy: str | None = None

    @classmethod
    def read(
        cls,
        path: str | os.PathLike[str],
        environ: Mapping[str, str] = NO_ENVIRONMENT,
        overrides: Sequence[str] = (),
        copy: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Read a file; see `load_settings`.

        Args:
            copy: of the file, whose text counts instead of its own, now and when it is read again.

        Raises:
            ConfigurationError: with every problem that was found.
        """
        name = os.fspath(path)
        text, folder = read_text(name if copy is None else os.fspath(copy)), FilePath(name).parent
        read = cls._of(name, text, folder, True, environ, tuple(overrides))
        return read if copy is None else replace(read, _copy=os.fspath(copy))

    @property
    def text(self) -> str:
        """The text of the file, as it was read."""
        return self._text

    @property
    def digest(self) -> str:
        """Names the text of the file: another one for another text."""
        return hashlib.sha256(self._text.encode("utf-8", "surrogatepass")).hexdigest()

    @classmethod
    def of_text(cls, text: str, *, name: str = "gateway.toml", folder: str | os.PathLike[str] = ".") -> Self:
        """Read a text; see `parse_settings`. `again` answers the same.

        Raises:
            ConfigurationError: with every problem that was found.
        """
        return cls._of(name, text, FilePath(folder), False, NO_ENVIRONMENT, ())

    @classmethod
    def _of(
        cls,
        name: str,
        text: str,
        folder: FilePath,
        from_file: bool,
        environ: Mapping[str, str],
        arguments: tuple[str, ...],
    ) -> Self:
        loaded = assemble(parse_document(text, name), environ, arguments, folder)
        return cls(loaded.settings, loaded.document, name, text, folder, from_file, environ, arguments)

    def again(self) -> Source:
        """Read the same file once more, with the same variables and arguments laid over it.

        Raises:
            ConfigurationError: with every problem that was found.
        """
        text = read_text(self._copy or self._name) if self._from_file else self._text
        read = self._of(self._name, text, self._folder, self._from_file, self._environ, self._arguments)
        return replace(read, _copy=self._copy)

    def with_live(self, values: Mapping[str, Any]) -> Source:
        """Lay values over all else, by the dotted names of their settings.

        Raises:
            ConfigurationError: a name is none, or a value can not be taken beside the others.
        """
        if not values:
            return self
        over = [Override(Origin(LIVE), _key_of(name), value, folded=False) for name, value in values.items()]
        document = parse_document(self._text, self._name)
        loaded = assemble(document, self._environ, self._arguments, self._folder, over)
        return replace(self, settings=loaded.settings, document=loaded.document)

    def origins_of(self, names: Iterable[str]) -> dict[str, str]:
        """Say by dotted names where values come from.

        That is ``file``, ``environment``, ``argument``, ``live`` or ``default``; the last also for an entry
        of a table that the document does not have.
        """
        tree = self.document.tree
        places = {
            table: {entry.get("id"): place for place, entry in enumerate(tree.get(table, ()))}
            for table in TABLE_LISTS
        }
        return {name: self._origin_of(_key_of(name), places) for name in names}

    def _origin_of(self, key: tuple[str, ...], places: Mapping[str, Mapping[str, int]]) -> str:
        table, *rest = key
        path: Path = key
        if table in places:
            place = places[table].get(rest[0])
            if place is None:
                return "default"
            path = (table, place, *rest[1:])
        origin = self.document.written(path)
        if origin is None:
            return "default"
        if origin.file == self.document.name:
            return "file"
        if origin.file == LIVE:
            return LIVE
        return "environment" if origin.file.startswith(PREFIX) else "argument"


def _key_of(name: str) -> tuple[str, ...]:
    try:
        key, rest = read_key(name)
    except ValueError:
        key, rest = (), ""
    if rest or len(key) < 2:
        raise ConfigurationError([Problem(LIVE, None, name[:64], "names no key in a section")])
    return key
