"""The workers and models of this process, the slots in use, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from ..contract import InternalRequest, Worker
from ._outage import Outage

_NONE: Final = Outage(1.0)


@dataclass(frozen=True, slots=True)
class Route:
    """One public model: the name its engines know, and the workers that serve it, in file order.

    Attributes:
        aliases: further public names.
        defaults: body fields for callers that leave them out, as JSON.
        max_output_tokens: most output tokens that may be asked for; None: no bound of ours.
    """

    model: str
    upstream: str
    workers: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    defaults: Mapping[str, bytes] = field(default_factory=dict)
    max_output_tokens: int | None = None


@dataclass(slots=True, eq=False)
class WorkerBook:
    """What this process knows about one worker.

    Attributes:
        held, draining: slots in use by running attempts, and by attempts that are
            over while the engine has not been seen to stop.
        attempts, faults: since start.
        trials: exchange that tries first after an outage, by model.
    """

    worker: Worker
    held: int = 0
    draining: int = 0
    attempts: int = 0
    faults: int = 0
    outages: dict[str, Outage] = field(default_factory=dict)
    trials: dict[str, str] = field(default_factory=dict)

    @property
    def free(self) -> int:
        """Slots that nobody counts on."""
        return self.worker.slots - self.held - self.draining

    @property
    def load(self) -> float:
        """Share of the slots in use; what drains takes room, but is about to end."""
        return self.held / self.worker.slots


class Fleet:
    """Static workers, in file order. Until probes exist each of them counts as ready.

    Args:
        now: the clock, in seconds.
        first_pause: seconds that a worker without room is left alone at first.

    Attributes:
        models: routes by public id; ``routes`` has them by alias too.
        changed: called when a placement may have become possible or impossible.
    """

    def __init__(
        self,
        workers: Iterable[Worker],
        routes: Iterable[Route],
        now: Callable[[], float],
        first_pause: float = 1.0,
    ) -> None:
        self._now = now
        self._first_pause = first_pause
        self.books: dict[str, WorkerBook] = {worker.id: WorkerBook(worker) for worker in workers}
        self.models: dict[str, Route] = {route.model: route for route in routes}
        self.routes: dict[str, Route] = {
            name: route for route in self.models.values() for name in (route.model, *route.aliases)
        }
        self.changed: Callable[[], None] = _nothing

    # -- models

    def serves(self, model: str) -> bool:
        """Whether any worker serves a public model."""
        return bool(self.serving(model))

    def serving(self, model: str) -> list[WorkerBook]:
        """Workers that serve a public model."""
        route = self.routes.get(model)
        return [] if route is None else [self.books[name] for name in route.workers]

    def engine_fields(self, model: str) -> frozenset[str]:
        """Body fields that steer an engine which may get a request for ``model``."""
        return frozenset().union(*(book.worker.dialect.engine_fields for book in self.serving(model)))

    # -- placement, called by admission

    def choose(self, request: InternalRequest, without: frozenset[str]) -> Worker | None:
        """Pick the worker with the smallest share of its slots in use; equal ones in file order."""
        now = self._now()
        best: WorkerBook | None = None
        for book in self.serving(request.model):
            if book.worker.id in without or book.free < slots_for(request, book.worker):
                continue
            if not book.outages.get(request.model, _NONE).open(now):
                continue
            if best is None or book.load < best.load:
                best = book
        return None if best is None else best.worker

    def tries_at(self, request: InternalRequest, without: frozenset[str]) -> float | None:
        """When the first worker that is not in ``without`` may be tried; 0.0: room is all it lacks.

        None: no worker that is large enough is left to try.
        """
        times = [
            book.outages.get(request.model, _NONE).opens_at() or 0.0
            for book in self.serving(request.model)
            if book.worker.id not in without and slots_for(request, book.worker) <= book.worker.slots
        ]
        return min(times, default=None)

    def next_opening(self) -> float | None:
        """When the next outage lets a trial through; moments that are past tell nothing new."""
        now = self._now()
        times = [
            at
            for book in self.books.values()
            for outage in book.outages.values()
            if (at := outage.opens_at()) is not None and at > now
        ]
        return min(times, default=None)

    def hold(self, request: InternalRequest, worker: Worker) -> int:
        """Take the slots of a request; answers how many."""
        slots = slots_for(request, worker)
        book = self.books[worker.id]
        book.held += slots
        if (outage := book.outages.get(request.model)) is not None:
            outage.placed()
            book.trials[request.model] = request.exchange_id
        return slots

    def drain(self, request: InternalRequest, worker: Worker, slots: int) -> None:
        """Count held slots as draining."""
        book = self.books[worker.id]
        book.held -= slots
        book.draining += slots
        self._end_trial(book, request)

    def free(self, request: InternalRequest, worker: Worker, slots: int, *, drained: bool) -> None:
        """Give slots back."""
        book = self.books[worker.id]
        if drained:
            book.draining -= slots
        else:
            book.held -= slots
            self._end_trial(book, request)

    def _end_trial(self, book: WorkerBook, request: InternalRequest) -> None:
        """Let another exchange try, if this one was the trial and told nothing, or was never made."""
        if book.trials.get(request.model) == request.exchange_id:
            del book.trials[request.model]
            if (outage := book.outages.get(request.model)) is not None:
                outage.trial_over()

    # -- FleetPort: what attempts teach

    def attempted(self, worker: Worker) -> None:
        """See FleetPort."""
        self.books[worker.id].attempts += 1

    def output(self, worker: Worker, model: str) -> None:
        """See FleetPort."""
        book = self.books[worker.id]
        if (outage := book.outages.get(model)) is not None:
            outage.output(self._now())
            if outage.over:
                del book.outages[model]
                book.trials.pop(model, None)
            self.changed()

    def rejected(
        self, worker: Worker, model: str, status: int, retry_after: float | None, began: float
    ) -> None:
        """See FleetPort."""
        outage = self.books[worker.id].outages.setdefault(model, Outage(self._first_pause))
        outage.rejected(self._now(), status, retry_after, began)
        self.changed()

    def fault(self, worker: Worker, model: str) -> None:
        """See FleetPort."""
        self.books[worker.id].faults += 1

    def rejection(self, model: str) -> int:
        """How the model's workers said that they have no room: 429 if any of them did, else 503."""
        classes = {b.outages[model].status for b in self.serving(model) if model in b.outages}
        return 429 if 429 in classes else 503

    def retry_after(self, model: str) -> float | None:
        """Longest outage still running among the model's workers, in seconds."""
        now = self._now()
        left = [b.outages[model].remaining(now) for b in self.serving(model) if model in b.outages]
        return max(left, default=None)


def slots_for(request: InternalRequest, worker: Worker) -> int:
    """How many slots a request takes at a worker."""
    return request.n if worker.dialect.slot_per_choice and request.operation.choices else 1


def _nothing() -> None:
    """Nobody listens yet."""
