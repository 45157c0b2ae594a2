"""The settings in force: read again, changed live, and shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import trio

from ..admin import ActResult, Row, refusal
from ..config import ConfigurationError, Settings, Source
from ._apply import Prepared, commit, prepare
from ._changes import RESTART, Change, as_json, changes, in_force, limit_names, with_secrets_of
from ._house import House

MOST_WORDS: Final = 4000  # characters of what is wrong with a file


class Configuration:
    """See the module's docstring. One change at a time; each waits for the one before.

    Args:
        settings: in force at the start.
        source: where they come from; None: nobody knows, and nothing can be changed.
        changed: told when other settings are in force.

    Attributes:
        settings: in force now.
    """

    def __init__(
        self,
        house: House,
        settings: Settings,
        source: Source | None,
        changed: Callable[[Prepared], None],
    ) -> None:
        self._house = house
        self.settings = settings
        self._source = source  # as it was read last, without live values
        self._written = source  # with them
        self._live: dict[str, Any] = {}
        self._changed = changed
        self._turn = trio.Lock()

    # -- reading

    @property
    def changeable(self) -> bool:
        """Whether it is known where the settings come from, so that they can be changed."""
        return self._source is not None

    def limits(self) -> Row:
        """Answer every limit with its value, where that comes from, and when a change of it counts."""
        return {
            "limits": {
                name: {"value": value, "source": _source_of(self._written, name), "applies": when}
                for name, (value, when) in limit_names(self.settings).items()
            }
        }

    def shown(self) -> Row:
        """Answer all settings, nested as in the file, with secrets hidden."""
        return as_json(self.settings)

    # -- changing

    async def set(self, values: Mapping[str, Any]) -> ActResult:
        """Change limits until the next start, or until the file has another value for them.

        Args:
            values: by dotted name; None takes a live value back.

        Raises:
            Refused: ``invalid_value`` or ``not_possible``; nothing was changed.
        """
        async with self._turn:
            source = self._known()
            known = limit_names(self.settings)
            for name in values:
                if name not in known:
                    raise refusal(
                        "invalid_value", f"{name[:64]} is no limit that can be set", param=name[:64]
                    )
                if known[name][1] == RESTART:
                    raise refusal(
                        "not_possible",
                        f"{name} counts from the next start: change it in the file",
                        param=name,
                    )
            live = {**self._live, **values}
            live = {name: value for name, value in live.items() if value is not None}
            try:
                written = source.with_live(live)
            except ConfigurationError as error:
                first = error.problems[0]
                raise refusal("invalid_value", str(error)[:MOST_WORDS], param=first.key or None) from None
            wanted = with_secrets_of(self.settings, in_force(self.settings, written.settings))
            found = {change.name: change for change in changes(self.settings, wanted)}
            await self._put_in_force(wanted)
            self._written, self._live = written, live
            return ActResult(
                bool(found),
                {name: change.before for name, change in found.items()},
                {name: change.after for name, change in found.items()},
            )

    async def reload(self) -> ActResult:
        """Read the file again, and put in force what can be.

        Raises:
            Refused: ``invalid_configuration``, with every problem and its line; nothing was changed.
        """
        async with self._turn:
            source = self._known()
            try:
                again = await trio.to_thread.run_sync(source.again)
                live, dropped = _surviving(self._live, source, again)
                written = again.with_live(live)
            except ConfigurationError as error:
                raise refusal("invalid_configuration", str(error)[:MOST_WORDS]) from None
            found = changes(self.settings, written.settings)
            await self._put_in_force(in_force(self.settings, written.settings))
            self._reload_certificate()
            self._source, self._written, self._live = again, written, live
            after = _by_time(found)
            after["live_values_dropped"] = dropped
            before = {change.name: change.before for change in found}
            after["values"] = {change.name: change.after for change in found}
            return ActResult(bool(found), before, after)

    def _known(self) -> Source:
        if self._source is None:
            raise refusal("not_possible", "this gateway was not started from a file")
        return self._source

    async def _put_in_force(self, settings: Settings) -> None:
        prepared = await prepare(self._house, self.settings, settings)
        commit(self._house, prepared)
        self.settings = settings
        self._changed(prepared)

    def _reload_certificate(self) -> None:
        """Show what stands in the certificate's files by now; it was judged when the file was read."""
        tls = self.settings.server.tls
        if self._house.tls is None or tls is None:
            return
        try:
            self._house.tls.load_cert_chain(tls.certificate, tls.key)
        except (OSError, ValueError) as error:
            self._house.log.write("error", "certificate_kept", reason=str(error)[:200])


def _source_of(written: Source | None, name: str) -> str:
    if written is None:
        return "default"
    try:
        return written.written(written.path_of(name))
    except KeyError:
        return "default"


def _by_time(found: list[Change]) -> dict[str, Any]:
    names: dict[str, Any] = {"applied": [], "new_requests": [], "restart": []}
    for change in found:
        names["applied" if change.applies == "now" else change.applies].append(change.name)
    return names


def _surviving(live: Mapping[str, Any], before: Source, after: Source) -> tuple[dict[str, Any], list[str]]:
    """Part live values from those for which the file has another value than it had, or no place any more."""
    old, new = limit_names(before.settings), limit_names(after.settings)
    kept = {name: value for name, value in live.items() if name in new and old.get(name) == new[name]}
    return kept, [name for name in live if name not in kept]
