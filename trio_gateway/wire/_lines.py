"""Lines that LF ends (NDJSON), reading side. Sans-IO.

Feed bytes, get whole lines. Splits at any byte give the same lines; bytes are
searched once, and a big line is gathered in one bytearray.
"""

from __future__ import annotations


class LineReader:
    """Takes a stream of lines apart.

    A CR before the LF is no part of a line; lines of nothing but white space
    are ignored.

    Args:
        max_line_bytes: bound of one line, without its end.

    Attributes:
        too_large: a line over the bound came. Nothing is read after it; the
            lines in front of it were answered.
    """

    def __init__(self, max_line_bytes: int) -> None:
        self._max = max_line_bytes
        self._rest = bytearray()
        self.too_large = False

    def feed(self, data: bytes) -> list[bytes]:
        """Take in bytes and answer the lines that they complete."""
        if self.too_large:
            return []
        end = data.rfind(b"\n")
        if end < 0:
            self._rest += data
            whole: list[bytes] = []
        else:
            self._rest += data[:end]
            whole = bytes(self._rest).split(b"\n")
            self._rest[:] = data[end + 1 :]
        lines = self._take(whole)
        # What is not whole yet may end with the CR of its line end.
        if len(self._rest) - self._rest.endswith(b"\r") > self._max:
            self._stop()
        return lines

    def end(self) -> bytes | None:
        """Take the end of the stream, and answer the line that no LF ended."""
        lines = self._take([bytes(self._rest)])
        self._rest.clear()
        return lines[0] if lines else None

    def _take(self, whole: list[bytes]) -> list[bytes]:
        lines = []
        for line in whole:
            kept = line.removesuffix(b"\r")
            if len(kept) > self._max:
                self._stop()
                break
            if not kept.isspace() and kept:
                lines.append(kept)
        return lines

    def _stop(self) -> None:
        self.too_large = True
        self._rest.clear()
