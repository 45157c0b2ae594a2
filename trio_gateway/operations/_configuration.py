"""The settings in force: read again, changed live, and shown."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeVar

import trio

from ..admin import ActResult, Row, refusal
from ..config import ConfigurationError, Settings, Source
from ..edge import server_context
from ..flow import READ_AGAIN
from ._apply import Prepared, commit, prepare
from ._changes import RESTART, Change, as_json, changes, in_force, limit_names, with_secrets_of
from ._house import House

MOST_WORDS: Final = 4000  # characters of what is wrong with a file
READ_LIMIT: Final = 10.0  # seconds for files to be read; one on a disk that is away may take for ever

T = TypeVar("T")


class Read(NamedTuple):
    """What was read anew, and differs from what is in force.

    Attributes:
        source, written: the file without live values, and with them.
        wanted: all that is to be in force.
        certificate: shows what stands in the files of ``server.tls`` that are in force; None: there is no
            TLS, or `kept` says why the one that is shown stays.
    """

    source: Source
    written: Source
    live: dict[str, Any]
    dropped: list[str]
    found: list[Change]
    wanted: Settings
    certificate: ssl.SSLContext | None
    kept: str | None


class Configuration:
    """See the module's docstring. One change at a time; each waits for the one before.

    All that grows with the number of tenants is done in a thread: a file may have thousands.

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
        # One that hangs at a file keeps nobody else's thread away, and no reader waits for it.
        self._change = trio.CapacityLimiter(1)
        self._reader = trio.CapacityLimiter(1)

    # -- reading

    @property
    def changeable(self) -> bool:
        """Whether it is known where the settings come from, so that they can be changed."""
        return self._source is not None

    async def limits(self) -> Row:
        """Answer every limit with its value, where that comes from, and when a change of it counts."""
        return await trio.to_thread.run_sync(
            _limits, self.settings, self._written, abandon_on_cancel=True, limiter=self._reader
        )

    async def shown(self) -> Row:
        """Answer all settings, nested as in the file, with secrets hidden."""
        return await trio.to_thread.run_sync(
            as_json, self.settings, abandon_on_cancel=True, limiter=self._reader
        )

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
            live = {**self._live, **values}
            live = {name: value for name, value in live.items() if value is not None}
            written, wanted, found = await self._in_thread(
                _with_values, self.settings, source, tuple(values), live
            )
            await self._put_in_force(wanted)
            self._written, self._live = written, live
            return ActResult(
                bool(found),
                {change.name: change.before for change in found},
                {change.name: change.after for change in found},
            )

    async def reload(self) -> ActResult:
        """Read the file again, and put in force what can be.

        Raises:
            Refused: ``invalid_configuration``, with every problem and its line; nothing was changed.
        """
        async with self._turn:
            source = self._known()
            read = await self._in_thread(
                _read_again, self.settings, source, self._live, self._house.server.tls is not None
            )
            await self._put_in_force(read.wanted)
            self._show(read)
            await self._house.certificates.refresh(self._note_certificates, anyway=True)
            self._source, self._written, self._live = read.source, read.written, read.live
            after = _by_time(read.found)
            after["live_values_dropped"] = read.dropped
            before = {change.name: change.before for change in read.found}
            after["values"] = {change.name: change.after for change in read.found}
            return ActResult(bool(read.found), before, after)

    def _known(self) -> Source:
        if self._source is None:
            raise refusal("not_possible", "this gateway was not started from a file")
        return self._source

    async def _put_in_force(self, settings: Settings) -> None:
        prepared = await prepare(self._house, self.settings, settings)
        commit(self._house, prepared)
        self.settings = settings
        self._changed(prepared)

    def _show(self, read: Read) -> None:
        """Show what stands in the certificate's files by now to who connects from now on."""
        if read.certificate is not None:
            self._house.server.tls = read.certificate
        if read.kept is not None:
            self._house.log.write("error", "certificate_kept", reason=read.kept)

    def _note_certificates(self, files: str, done: str) -> None:
        if done != READ_AGAIN:
            self._house.log.write("error", "certificates_kept", files=files, reason=done)

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do what reads files; nothing was changed if it does not come back in time.

        Raises:
            Refused: ``not_possible``, or what the work raises.
        """
        with trio.move_on_after(READ_LIMIT):
            return await trio.to_thread.run_sync(
                work, *arguments, abandon_on_cancel=True, limiter=self._change
            )
        raise refusal(
            "not_possible",
            f"the configuration's files could not be read within {READ_LIMIT:g} s; nothing was changed",
        )


# In a thread, without any of the gateway's parts ------------------------------------------------------------


def _limits(settings: Settings, written: Source | None) -> Row:
    known = limit_names(settings)
    origins = {} if written is None else written.origins_of(known)
    return {
        "limits": {
            name: {"value": value, "source": origins.get(name, "default"), "applies": when}
            for name, (value, when) in known.items()
        }
    }


def _with_values(
    settings: Settings, source: Source, names: tuple[str, ...], live: Mapping[str, Any]
) -> tuple[Source, Settings, list[Change]]:
    """Answer what `Configuration.set` puts in force, and raise what it raises.

    Args:
        names: of what is to be changed.
        live: all live values, those included.
    """
    known = limit_names(settings)
    for name in names:
        if name not in known:
            raise refusal("invalid_value", f"{name[:64]} is no limit that can be set", param=name[:64])
        if known[name][1] == RESTART:
            raise refusal(
                "not_possible", f"{name} counts from the next start: change it in the file", param=name
            )
    try:
        written = source.with_live(live)
    except ConfigurationError as error:
        first = error.problems[0]
        raise refusal("invalid_value", str(error)[:MOST_WORDS], param=first.key or None) from None
    wanted = with_secrets_of(settings, in_force(settings, written.settings))
    return written, wanted, changes(settings, wanted)


def _read_again(settings: Settings, source: Source, live: Mapping[str, Any], with_tls: bool) -> Read:
    """Answer what `Configuration.reload` puts in force, and raise what it raises."""
    try:
        again = source.again()
        kept, dropped = _surviving(live, source, again)
        written = again.with_live(kept)
    except ConfigurationError as error:
        raise refusal("invalid_configuration", str(error)[:MOST_WORDS]) from None
    found, wanted = changes(settings, written.settings), in_force(settings, written.settings)
    certificate, why = _certificate(settings) if with_tls else (None, None)
    return Read(again, written, kept, dropped, found, wanted, certificate, why)


def _certificate(settings: Settings) -> tuple[ssl.SSLContext | None, str | None]:
    """Make what shows the certificate anew, or say why that can not be.

    Always a whole new one: loading into one that is in use leaves half of it where that fails, and the old
    certificate beside one with a key of another type. What is made is what is judged, whatever happens to
    the files meanwhile.
    """
    tls = settings.server.tls
    if tls is None:
        return None, None
    try:
        return server_context(tls.certificate, tls.key), None
    except (OSError, ValueError) as error:
        return None, str(error)[:200]


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
