"""When a worker that said "no room" is asked again. Pure: time comes as an argument.

A rejection puts a worker (for one model) out for the time it named, else for a
pause that doubles up to eight times its first length. Then one exchange tries
first; the others follow on its first output. Only an outage without a named
time ends sooner, by output for another exchange that was already running.
"""

from __future__ import annotations

from typing import Final

LONGEST: Final = 8  # times the first pause


class Outage:
    """The state of one worker for one model.

    Args:
        first_pause: seconds.
    """

    def __init__(self, first_pause: float) -> None:
        self._first_pause = first_pause
        self.status = 503  # the class of the last rejection
        self._until: float | None = None
        self._named_until = 0.0  # the worker said itself how long
        self.began = 0.0  # with the last rejection that counted
        self._pause = first_pause
        self._trial = False

    @property
    def over(self) -> bool:
        """Whether there is nothing to remember."""
        return self._until is None

    def open(self, now: float) -> bool:
        """Whether an exchange may be placed now."""
        return self._until is None or (now >= self._until and not self._trial)

    def opens_at(self) -> float | None:
        """When a first exchange may try; None if it may already, or a trial is on."""
        return None if self._until is None or self._trial else self._until

    def remaining(self, now: float) -> float:
        """Seconds until the next trial; 0 if none are left."""
        return 0.0 if self._until is None else max(self._until - now, 0.0)

    def rejected(self, now: float, status: int, retry_after: float | None, placed_at: float) -> None:
        """Take a rejection of an attempt that was placed at ``placed_at``.

        Attempts placed before the outage began tell nothing new, so a burst of
        rejections counts as one.
        """
        self.status = status
        if self._until is not None and placed_at <= self.began and retry_after is None:
            return
        self._trial = False
        if retry_after is not None:
            until = self._named_until = max(now + retry_after, self._named_until)
        else:
            until = now + self._pause
            self._pause = min(self._pause * 2, self._first_pause * LONGEST)
        self._until = max(until, self._until or until)
        self.began = now

    def placed(self) -> None:
        """An exchange was placed; in an outage it is the trial."""
        if self._until is not None:
            self._trial = True

    def output(self, now: float) -> None:
        """The worker gave output."""
        if now < self._named_until:
            self._until = self._named_until
            return
        self._until = None
        self._trial = False
        self._pause = self._first_pause

    def trial_over(self) -> None:
        """The trial ended without telling anything; another may try."""
        self._trial = False
