"""The workers and models of this process, the slots in use, and the choice among them."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Final

from ..contract import InternalRequest, Rejection, Worker, WorkerStatus
from ..errors import Problem
from ..wire import Gauges
from ._book import UNTOUCHED, FleetSettings, Portion, WorkerBook, slots_for, tokens_of
from ._breaker import Breaker
from ._choice import (
    LOOKED_AT,
    MANY,
    Candidate,
    choose,
    choose_near,
    draw,
    drawn,
    filtered,
    prefix_keys,
    session_keys,
)
from ._circle import Circle, place_of
from ._outage import Outage
from ._snapshot import Snapshot, Source

REMEMBERED: Final = 3600.0  # seconds that a name is known after the last worker that reported it
MOST_NAMES_GONE: Final = 10_000  # names that are known though nobody reports them any more
KEYED_FROM: Final = 2048  # bytes of a body below which no worker's cache is worth a detour
FRESH: Final = 0.02  # seconds; how old news may be by which the last attempt of an exchange is placed
KEPT: Final = 0.05  # seconds for which idle slots stay with whoever may need them soon
IN_ORDER: Final = 4  # workers that are wanted in the order of a choice
_RECENT: Final = 0.05  # weight of the newest request in what is usual


@dataclass(frozen=True, slots=True)
class Route:
    """One public model: the name its engines know, and the workers that serve it.

    Attributes:
        workers: their ids, or labels of theirs, in order; None: every worker that reports the upstream name.
        aliases: further public names.
        defaults: body fields for callers that leave them out, as JSON.
        max_output_tokens: most output tokens that may be asked for; None: no bound of ours.
        fallbacks: public models that are asked instead while no worker of this one can be.
        full_timeout: seconds that a slow client may keep an engine from being read; None: no such limit.
    """

    model: str
    upstream: str
    workers: tuple[str, ...] | None = None
    aliases: tuple[str, ...] = ()
    defaults: Mapping[str, bytes] = field(default_factory=dict)
    max_output_tokens: int | None = None
    fallbacks: tuple[str, ...] = ()
    full_timeout: float | None = None


class Fleet:
    """All workers, in file order, those that registered behind them.

    Args:
        now: the clock, in seconds.
        dice: numbers from 0 to 1.

    Attributes:
        books: by the worker's id; that of a removed worker is gone from here, and lives on for its leases.
        models: routes by public id; ``routes`` has them by alias too.
        changed: called when a placement may have become possible or impossible.
        asked: called with a book that is to be probed at once.
    """

    def __init__(
        self,
        workers: Iterable[Worker],
        routes: Iterable[Route],
        now: Callable[[], float],
        settings: FleetSettings = FleetSettings(),  # noqa: B008  (immutable)
        dice: Callable[[], float] = random.random,
    ) -> None:
        self._now = now
        self.settings = settings
        self._dice = dice
        self._portion: Portion | None = None
        self.books: dict[str, WorkerBook] = {}
        self._of_worker: dict[Worker, WorkerBook] = {}
        self._loose: dict[WorkerBook, None] = {}  # those that may have slots which were lent and are idle
        self._resized: dict[str, None] = {}  # workers with such slots that have more or fewer in all now
        self._usual = 0.0
        self.models: dict[str, Route] = {route.model: route for route in routes}
        self.routes: dict[str, Route] = {}
        self._reported_only = not self.models
        self._touched: OrderedDict[str, str] = OrderedDict()  # what operators did, by the worker's id
        self._reported: set[str] = set()
        self._known: dict[str, float] = {}  # until when a reported name is known
        self._serving: dict[str, list[WorkerBook]] = {}
        self._called: dict[str, list[WorkerBook]] = {}  # by id and by label, in order
        self._fields: dict[str, frozenset[str]] = {}
        self._pools: dict[str, str] = {}
        self._pool_books: dict[str, list[WorkerBook]] = {}
        # What follows is kept up to date, so that a request does not look at all workers.
        self._pool_sizes: dict[str, tuple[int, list[WorkerBook]]] = {}  # slots, and who was taken out
        self._orders: dict[str, dict[WorkerBook, int]] = {}
        self._circles: dict[str, Circle[WorkerBook]] = {}
        self._roomy: dict[WorkerBook, None] = {}  # those with a slot that this process does not use
        self._gated: dict[WorkerBook, None] = {}  # those that failed or had no room, until that is over
        self.changed: Callable[[], None] = _nothing
        self.asked: Callable[[WorkerBook], None] = _nothing_of
        for worker in workers:
            self._add(worker)
        self._see_to_names()

    # -- workers

    def add(
        self, worker: Worker, models: Iterable[str] | None = None, snapshot: Snapshot | None = None
    ) -> WorkerBook:
        """Take a worker in; one of the same id is removed, and its book lives on for its leases only.

        Args:
            snapshot: what is known of it at first, before anybody can be placed there.
        """
        self.remove(worker.id)
        book = self._add(worker)
        if snapshot is not None:
            book.snapshot = snapshot
        book.models = None if models is None else tuple(models)
        self._see_to_names()
        self.changed()
        return book

    def _add(self, worker: Worker) -> WorkerBook:
        book = self.books[worker.id] = self._of_worker[worker] = WorkerBook(
            worker, self.settings, self._portion
        )
        book.operator = self._touched.get(worker.id, UNTOUCHED)
        self._note_room(book)
        return book

    def describe(self, worker: Worker) -> None:
        """Describe the worker of this id, which must be there, anew; its place, state and counts stay."""
        book = self.books[worker.id]
        size = book.size
        book.describe(worker)
        self._note_size(book, size)
        self._of_worker[worker] = book
        self._see_to_names()
        self.changed()

    def arrange(self, ids: Iterable[str]) -> None:
        """Let the named workers come first, in this order, as they do in the file."""
        first = {name: self.books[name] for name in ids if name in self.books}
        self.books = {**first, **self.books}
        self._see_to_names()

    def reroute(self, routes: Iterable[Route]) -> None:
        """Serve other models from now on. Who waits for one that is gone is refused; streams go on."""
        self.models = {route.model: route for route in routes}
        self._reported_only = not self.models
        self._see_to_names()
        self.changed()

    def touch(self, worker_id: str, how: str) -> str:
        """Take a worker out, or back in, as an operator says; answers how it was.

        Args:
            how: `DRAINED` or `EJECTED`: nothing more is placed there, nor at another process of that
                name; `UNTOUCHED`: all is as if nobody had.

        Raises:
            KeyError: there is no such worker.
        """
        book = self.books[worker_id]
        before, book.operator = book.operator, how
        self._pool_sizes.clear()
        self._touched.pop(worker_id, None)
        if how != UNTOUCHED:
            self._touched[worker_id] = how
            if len(self._touched) > MOST_NAMES_GONE:
                self._touched.popitem(last=False)
        self.changed()
        return before

    def withhold(self, worker_id: str, why: str | None) -> None:
        """Place nothing new at a worker, whatever operators say of it; None: it gets requests again.

        Raises:
            KeyError: there is no such worker.
        """
        self.books[worker_id].withheld = why
        self._pool_sizes.clear()
        self.changed()

    @property
    def touched(self) -> dict[str, str]:
        """What operators did to workers, by id, of those too that are not here now."""
        return dict(self._touched)

    def touch_anywhere(self, worker_id: str, how: str) -> None:
        """As `touch`, also for a worker that may only come yet."""
        if worker_id in self.books:
            self.touch(worker_id, how)
        elif how == UNTOUCHED:
            self._touched.pop(worker_id, None)
        else:
            self._touched[worker_id] = how

    def divide(self, portion: Portion | None) -> None:
        """Use only a portion of each worker's slots from now on; None: all. What runs goes on."""
        self._portion = portion
        for book in self.books.values():
            size = book.size
            book.divide(portion)
            self._note_size(book, size)
        self._pool_sizes.clear()

    def remove(self, worker_id: str) -> WorkerBook | None:
        """Place nothing more at a worker; what runs there may finish."""
        book = self.books.pop(worker_id, None)
        if book is None:
            return None
        book.removed = True
        self._roomy.pop(book, None)
        self._gated.pop(book, None)
        self._forget(book)
        self._see_to_names()
        self.changed()
        return book

    def _forget(self, book: WorkerBook) -> None:
        if book.held or book.draining:
            return
        if book.removed:
            self._of_worker.pop(book.worker, None)
        while book.earlier:
            self._of_worker.pop(book.earlier.pop(), None)

    def report_models(self, book: WorkerBook, models: Iterable[str]) -> None:
        """Take the list of models that a worker reports."""
        names = tuple(models)
        book.snapshot = book.snapshot.listed()
        if names != book.models:
            book.models = names
            self._see_to_names()
        self.changed()

    def expire(self) -> list[WorkerBook]:
        """Remove the registered workers that have not been heard of for too long; answers them."""
        now = self._now()
        late = [b for b in self.books.values() if b.expires_at is not None and b.expires_at <= now]
        for book in late:
            self.remove(book.worker.id)
        if any(until <= now for until in self._known.values()):
            self._see_to_names()
        return late

    def _see_to_names(self) -> None:
        """Bring the public names up to date with what workers report."""
        self._serving.clear()
        self._called.clear()
        self._orders.clear()
        self._circles.clear()
        self._fields.clear()
        self._pools.clear()
        self._pool_sizes.clear()
        if self._reported_only:
            now = self._now()
            before, self._reported = self._reported, {n for b in self.books.values() for n in b.models or ()}
            # From now on, for those too that nobody reports any more since this moment.
            self._known |= dict.fromkeys(sorted(before | self._reported), now + REMEMBERED)
            self._known = {name: until for name, until in self._known.items() if until > now}
            self._forget_names()
            self.models = {name: self.models.get(name, Route(name, name)) for name in self._known}
        self.routes = {
            name: route for route in self.models.values() for name in (route.model, *route.aliases)
        }

    def _forget_names(self) -> None:
        """Keep a bounded number of the names that nobody reports any more, the latest of them."""
        gone = [name for name in self._known if name not in self._reported]
        for name in sorted(gone, key=self._known.__getitem__)[: max(len(gone) - MOST_NAMES_GONE, 0)]:
            del self._known[name]

    # -- models

    def serves(self, model: str) -> bool:
        """Whether any worker serves a public model."""
        return bool(self.serving(model))

    def serving(self, model: str) -> list[WorkerBook]:
        """Workers that serve a public model, the first choice of equals first."""
        found = self._serving.get(model)
        if found is None:
            route = self.routes.get(model)
            if route is None:
                return []
            found = self._serving[model] = self._find_serving(route)
        return found

    def _find_serving(self, route: Route) -> list[WorkerBook]:
        if route.workers is None:
            return [book for book in self.books.values() if book.reports(route.upstream)]
        if not self._called:
            for book in self.books.values():
                for name in {book.worker.id, *book.worker.labels}:
                    self._called.setdefault(name, []).append(book)
        named = {book.worker.id: book for name in route.workers for book in self._called.get(name, ())}
        return list(named.values())

    def pool_of(self, model: str) -> str:
        """Name the workers of a model: by the first model that shares any of them, directly or not."""
        if not self._pools:
            self._find_pools()
        return self._pools.get(model, model)

    def _find_pools(self) -> None:
        """Join models that share workers."""
        pool_of_worker: dict[str, str] = {}
        members: dict[str, list[str]] = {}
        for model in self.models:
            ids = [book.worker.id for book in self.serving(model)]
            joined = list(dict.fromkeys(pool_of_worker[name] for name in ids if name in pool_of_worker))
            pool = joined[0] if joined else model
            members.setdefault(pool, []).append(model)
            for other in joined[1:]:
                members[pool] += members.pop(other)
                pool_of_worker |= {name: pool for name, of in pool_of_worker.items() if of == other}
            pool_of_worker |= dict.fromkeys(ids, pool)
        self._pools = {model: pool for pool, models in members.items() for model in models}
        self._pool_books = {
            pool: list({book.worker.id: book for model in models for book in self.serving(model)}.values())
            for pool, models in members.items()
        }

    def pool_slots(self, pool: str) -> int:
        """Slots of all workers of a pool; of those that were taken out, the ones that are still in use."""
        if not self._pools:
            self._find_pools()
        if (known := self._pool_sizes.get(pool)) is None:
            books = self._pool_books.get(pool, [])
            size = sum(book.size for book in books if book.placeable)
            known = self._pool_sizes[pool] = size, [book for book in books if not book.placeable]
        size, out = known
        return size + sum(book.held for book in out)

    def pool_members(self, pool: str) -> tuple[list[str], list[WorkerBook]]:
        """Answer the models and the workers of a pool."""
        if not self._pools:
            self._find_pools()
        return [model for model, of in self._pools.items() if of == pool], self._pool_books.get(pool, [])

    def pause_at_first(self, seconds: float) -> None:
        """Leave a worker that has no room alone for another time at first."""
        self.settings = replace(self.settings, first_pause=seconds)

    def asks_for_any(self, names: Iterable[str]) -> bool:
        """Whether a model is served by whoever reports it, and these names are enough for that."""
        wanted = {route.upstream for route in self.models.values() if route.workers is None}
        return not wanted or not wanted.isdisjoint(names)

    def engine_fields(self, model: str) -> frozenset[str]:
        """Body fields that steer an engine which may get a request for ``model``."""
        found = self._fields.get(model)
        if found is None:
            fields = (book.worker.dialect.engine_fields for book in self.serving(model))
            found = self._fields[model] = frozenset().union(*fields)
        return found

    def route_or_fallback(self, route: Route, allowed: Callable[[str], bool]) -> Route:
        """Answer the first of a route and its fallbacks that has a worker which could be asked."""
        if not route.fallbacks:
            return route
        for name in (route.model, *route.fallbacks):
            other = self.routes.get(name)
            if other is not None and (other is route or allowed(other.model)) and self._can_be_asked(other):
                return other
        return route

    def _can_be_asked(self, route: Route) -> bool:
        now = self._now()
        return any(
            book.ready(now) and book.snapshot.takes(route.upstream) and not book.refuses(route.model, now)
            for book in self.serving(route.model)
        )

    def ready(self) -> bool:
        """Whether some worker is ready; while there is no model to serve, none is missed."""
        now = self._now()
        return any(book.ready(now) for book in self.books.values())

    # -- placement, called by admission

    def choose(self, request: InternalRequest, without: frozenset[str]) -> Worker | None:
        """Pick a worker as `_choice.choose` does."""
        if self.settings.lent:
            return self._choose_lent(request, without)
        books = self.serving(request.model)
        keys = self._keys(request) if len(books) > 1 else ()
        if len(books) <= MANY:
            return self._choose_among(books, request, without, keys)
        return self._choose_of_many(books, request, without, keys)

    def _choose_of_many(
        self,
        books: Sequence[WorkerBook],
        request: InternalRequest,
        without: frozenset[str],
        keys: Sequence[bytes],
    ) -> Worker | None:
        """As `_choose_among`, with a look at some; at all that have a slot free only if those are few."""
        if not self._roomy:
            return None
        some = drawn(books, LOOKED_AT, self._dice)
        if keys and (home := self._choose_near(some, request, without, keys)) is not None:
            return home
        if len(self._roomy) > MANY and (found := self._choose_among(some, request, without, ())) is not None:
            return found
        serving = self._order_of(request.model)
        now = self._now()
        able = [book for book in self._roomy if book in serving and book.open(request, now)]
        left = sorted(able, key=serving.__getitem__)
        return self._choose_among(left, request, without, ())

    def _choose_near(
        self,
        some: Sequence[WorkerBook],
        request: InternalRequest,
        without: frozenset[str],
        keys: Sequence[bytes],
    ) -> Worker | None:
        """Pick a worker near the keys of a request; some of all tell what is usual."""
        now, usual = self._now(), self._usual or 1.0

        def shown(book: WorkerBook) -> Candidate:
            return book.candidate(request, usual, now, excluded=book.worker.id in without)

        circle = self._circle_of(request.model)
        orders = []
        for key in keys:
            near = [
                (draw(key, book.worker.id) / book.room, book) for book in circle.near(place_of(key), MANY)
            ]
            near.sort(key=itemgetter(0), reverse=True)
            orders.append(shown(book) for _, book in near)
        home = choose_near(
            orders,
            [shown(book) for book in some],
            size=tokens_of(request) / usual,
            oldest=_oldest_news(request, some),
        )
        return None if home is None else self.books[home.name].worker

    def _order_of(self, model: str) -> dict[WorkerBook, int]:
        """The workers that serve a model, each with its place in their order."""
        found = self._orders.get(model)
        if found is None:
            found = self._orders[model] = {book: at for at, book in enumerate(self.serving(model))}
        return found

    def _circle_of(self, model: str) -> Circle[WorkerBook]:
        found = self._circles.get(model)
        if found is None:
            found = self._circles[model] = Circle((book.place, book) for book in self.serving(model))
        return found

    def _note_room(self, book: WorkerBook) -> None:
        """Keep in mind whether a worker has a slot that this process does not use."""
        if book.idle > 0 and not book.removed:
            self._roomy[book] = None
        else:
            self._roomy.pop(book, None)

    def _note_size(self, book: WorkerBook, before: int) -> None:
        """As `_note_room`, of a worker that had so many slots before."""
        self._note_room(book)
        if self.settings.lent and book.slots and book.size != before:
            self._resized[book.worker.id] = None

    def _choose_among(
        self,
        books: Sequence[WorkerBook],
        request: InternalRequest,
        without: frozenset[str],
        keys: Sequence[bytes],
    ) -> Worker | None:
        now = self._now()
        usual = self._usual or 1.0
        candidates = [
            book.candidate(request, usual, now, excluded=book.worker.id in without) for book in books
        ]
        oldest = _oldest_news(request, books)
        chosen = choose(candidates, self._dice, size=tokens_of(request) / usual, keys=keys, oldest=oldest)
        return None if chosen is None else self.books[chosen.name].worker

    def choose_kept(
        self, request: InternalRequest, without: frozenset[str], kept: Mapping[str, int]
    ) -> Worker | None:
        """Pick the best of all workers if enough slots are kept there, by its id; None: they are not."""
        books = self.serving(request.model)
        if len(books) == 1:  # nothing is to be chosen
            (book,) = books
            found = self.open_worker(request, without, book.worker.id)
        else:
            found = self._choose_any(books, request, without)
        enough = found is not None and slots_for(request, found) <= kept.get(found.id, 0)
        return found if enough else None

    def open_worker(self, request: InternalRequest, without: frozenset[str], worker: str) -> Worker | None:
        """Answer a worker by its id if the request may be placed there, whoever counts its slots."""
        book = self.books.get(worker)
        if book is None or worker in without or book not in self.serving(request.model):
            return None
        return book.worker if book.open(request, self._now()) else None

    def open_workers(
        self, request: InternalRequest, without: frozenset[str]
    ) -> tuple[Worker | None, list[Worker]]:
        """All workers at which the request may be placed, in order; before them the one of `choose`."""
        now = self._now()
        found = [
            book.worker
            for book in self.serving(request.model)
            if book.worker.id not in without and book.open(request, now)
        ]
        return self.choose(request, without) if len(found) > 1 else None, found

    # -- slots that are lent

    def wanted(self, request: InternalRequest, without: frozenset[str]) -> list[tuple[str, int]]:
        """Name the workers that a request could be placed at if it had slots there, the best first.

        Each with the slots that it takes. As `choose` would choose if all their slots were free; of many
        workers only the first few are in order.
        """
        now = self._now()
        usual = self._usual or 1.0
        books = self.serving(request.model)
        keys = self._keys(request) if len(books) > 1 else ()
        size, oldest = tokens_of(request) / usual, _oldest_news(request, books)
        left = [
            book.candidate(request, usual, now, excluded=book.worker.id in without, free=book.size)
            for book in books
        ]
        found: list[Candidate] = []
        while len(found) < IN_ORDER:
            best = choose(left, self._dice, size=size, keys=keys, oldest=oldest)
            if best is None:
                break
            found.append(best)
            left.remove(best)
        rest = [each for each in filtered(left, 1) if each.age <= oldest and each.suspect <= found[0].suspect]
        return [
            (each.name, slots_for(request, self.books[each.name].worker))
            for each in (*found, *sorted(rest, key=lambda each: each.load))
        ]

    def size_of(self, worker_id: str) -> tuple[int, float]:
        """Answer how many slots of a worker this gateway may use, and its ``cancel_grace``."""
        book = self.books[worker_id]
        return book.size, book.worker.cancel_grace

    def resized(self) -> list[str]:
        """Name workers of which slots were lent, and there are more or fewer since this was last asked."""
        if not self._resized:
            return []
        resized = [name for name in self._resized if name in self.books]
        self._resized.clear()
        return resized

    def lend(self, worker_id: str, slots: int) -> bool:
        """Take slots that were lent; answers whether there is such a worker still."""
        book = self.books.get(worker_id)
        if book is None:
            return False
        book.slots += slots
        book.fresh += slots
        self._loose[book] = None
        self._note_room(book)
        return True

    def idle(self, wanted: Collection[str]) -> list[tuple[str, int]]:
        """Give up slots that were lent and are not in use, by worker; answers how many.

        Those that may be of use soon are kept for `KEPT` seconds, but for those of workers that are wanted
        here: what is free is to be lent in the order in which it is wanted.
        """
        now = self._now()
        found = []
        for book in tuple(self._loose):
            book.fresh = 0
            at_once = book.removed or book.worker.id in wanted
            if (slots := book.idle if at_once else book.spare(now, KEPT)) > 0:
                found.append((book.worker.id, slots))
                book.slots -= slots
                self._note_room(book)
            if book.idle <= 0:
                book.idle_from = None
                del self._loose[book]
        return found

    def idle_until(self) -> float | None:
        """When slots that are kept are to be given up."""
        return min(
            (book.idle_from + KEPT for book in self._loose if book.idle_from is not None), default=None
        )

    def give_up(self, worker_id: str) -> int:
        """Give up the slots of a worker that were lent and are not in use; answers how many."""
        book = self.books.get(worker_id)
        if book is None or book not in self._loose:
            return 0
        del self._loose[book]
        idle, book.slots, book.fresh, book.idle_from = book.idle, book.slots - book.idle, 0, None
        self._note_room(book)
        return idle

    def _choose_lent(self, request: InternalRequest, without: frozenset[str]) -> Worker | None:
        """Choose among slots that were just lent for who waits; else only the very best, if it has any."""
        books = self.serving(request.model)
        keys = self._keys(request) if len(books) > 1 else ()
        fresh = [book for book in books if book.fresh > 0]
        if fresh and (found := self._choose_among(fresh, request, without, keys)) is not None:
            return found
        if not any(book.idle > 0 for book in books):
            return None
        best = self._choose_any(books, request, without)
        if best is None:
            return None
        return best if self.books[best.id].idle >= slots_for(request, best) else None

    def _choose_any(
        self, books: Sequence[WorkerBook], request: InternalRequest, without: frozenset[str]
    ) -> Worker | None:
        """Choose as if all slots were free."""
        now, usual = self._now(), self._usual or 1.0
        keys = self._keys(request) if len(books) > 1 else ()
        candidates = [
            book.candidate(request, usual, now, excluded=book.worker.id in without, free=book.size)
            for book in books
        ]
        size, oldest = tokens_of(request) / usual, _oldest_news(request, books)
        best = choose(candidates, self._dice, size=size, keys=keys, oldest=oldest)
        return None if best is None else self.books[best.name].worker

    def _keys(self, request: InternalRequest) -> tuple[bytes, ...]:
        """What leads the request to a worker; found once, however often it is tried."""
        if request.affinity is None:
            affinity = self.settings.affinity
            keys: tuple[bytes, ...] = ()
            if affinity != "none" and request.session is not None:
                keys = session_keys(request.session, request.tenant)
            elif affinity == "prefix" and request.size >= KEYED_FROM:
                keys = prefix_keys(request.members, request.tenant)
            request.affinity = keys
        return request.affinity

    def tries_at(self, request: InternalRequest, without: frozenset[str]) -> float | None:
        """When the first worker that is not in ``without`` may be tried; 0.0: room is all it lacks.

        None: none is left to try. One that is spared for its faults is none.
        """
        now, model, first = self._now(), request.model, None
        for book in self.serving(model):
            if book.worker.id in without or not book.takes(request, now) or book.refuses(model, now):
                continue
            outage = book.outages.get(model)
            at = 0.0 if outage is None else outage.opens_at() or 0.0
            if not at:
                return at  # as nearly always of the first: others need not be looked at
            first = at if first is None else min(first, at)
        return first

    def obstacle(self, request: InternalRequest) -> Problem:
        """Say why no worker can be tried for a request now, or ever."""
        now = self._now()
        books = self.serving(request.model)
        spared = [book for book in books if book.takes(request, now) and book.refuses(request.model, now)]
        if spared:
            wait = min(book.breaker(request.model).remaining(now) for book in spared)
            return Problem.of(
                "engine_unavailable",
                "all workers of this model failed lately and are spared for a while",
                retry_after=max(wait, 1.0),
            )
        sized = [book for book in books if book.size]
        if sized and all(slots_for(request, book.worker) > book.size for book in sized):
            return Problem.of(
                "invalid_value", "'n' is more than any worker of this model can do at once", param="n"
            )
        return Problem.of("no_worker", "no worker serves this model now")

    def next_opening(self, after: float) -> float | None:
        """When an outage, or a breaker without probes, next lets a trial through; not before ``after``."""
        gates: list[Outage | Breaker] = []
        for book in tuple(self._gated):
            breakers = [each for each in book.breakers.values() if each.opens_at() is not None]
            if not book.outages and not breakers:
                del self._gated[book]
            gates += book.outages.values()
            if not self.settings.probed:  # else the result of a probe is the moment
                gates += breakers
        return min((at for gate in gates if (at := gate.opens_at()) is not None and at > after), default=None)

    def hold(self, request: InternalRequest, worker: Worker) -> int:
        """Take the slots of a request; answers how many."""
        slots, tokens = slots_for(request, worker), tokens_of(request)
        book = self._of_worker[worker]
        book.held += slots
        book.tokens += tokens
        if self.settings.lent:
            book.use_lent(slots)
        if book.idle <= 0:
            self._roomy.pop(book, None)
        book.placed(request.exchange_id)
        self._usual += (tokens - self._usual) * (_RECENT if self._usual else 1.0)
        if (outage := book.outages.get(request.model)) is not None:
            outage.placed()
            book.trials[request.model] = request.exchange_id
        book.breaker(request.model).placed(request.exchange_id, self._now())
        return slots

    def drain(self, request: InternalRequest, worker: Worker, slots: int) -> None:
        """Count held slots as draining."""
        book = self._of_worker[worker]
        book.draining += slots
        self._end_holding(book, request, slots)

    def free(self, request: InternalRequest, worker: Worker, slots: int, *, drained: bool) -> None:
        """Give slots back."""
        book = self._of_worker[worker]
        if drained:
            book.draining -= slots
        else:
            self._end_holding(book, request, slots)
        if self.settings.lent:
            self._loose[book] = None
        self._note_room(book)
        book.let_go(request.exchange_id, self._now())
        self._forget(book)

    def _end_holding(self, book: WorkerBook, request: InternalRequest, slots: int) -> None:
        """An attempt is over: if it was a trial and told nothing, another exchange may try."""
        book.held -= slots
        book.tokens = max(book.tokens - tokens_of(request), 0.0) if book.held else 0.0
        book.progress.ended(request.exchange_id)
        book.breaker(request.model).ended(request.exchange_id, self._now())
        if book.trials.get(request.model) == request.exchange_id:
            del book.trials[request.model]
            if (outage := book.outages.get(request.model)) is not None:
                outage.trial_over()

    # -- FleetPort: what attempts teach

    def attempted(self, worker: Worker) -> None:
        """See FleetPort."""
        self._of_worker[worker].attempts += 1

    def output(self, worker: Worker, request: InternalRequest) -> None:
        """See FleetPort."""
        book, now = self._of_worker[worker], self._now()
        held_back = request.model in book.outages or not book.breaker(request.model).allows(now)
        before = book.snapshot
        book.snapshot = before.gave_output()
        if book.hints:
            book.hints.pop(request.model, None)
        book.probe.event(now)
        book.breaker(request.model).output(request.exchange_id, now)
        self._end_outage(book, request.model)
        if held_back or book.snapshot is not before:
            self.changed()

    def _end_outage(self, book: WorkerBook, model: str) -> None:
        if (outage := book.outages.get(model)) is not None:
            outage.output(self._now())
            if outage.over:
                del book.outages[model]
                book.trials.pop(model, None)

    def rejected(self, worker: Worker, request: InternalRequest, rejection: Rejection) -> None:
        """See FleetPort."""
        book, now = self._of_worker[worker], self._now()
        self._gate(book)
        if rejection.reason != "model_not_loaded":
            outage = book.outages.setdefault(request.model, Outage(self.settings.first_pause))
            outage.rejected(now, rejection.status, rejection.retry_after, rejection.placed_at)
        if self.settings.probed or book.reporting:  # else nothing would ever tell that it is over
            own = book.held + book.draining - slots_for(request, worker)
            book.snapshot = book.snapshot.rejected(
                rejection.reason, request.upstream_model, now, book.all_slots, max(own, 0)
            )
        if rejection.reason != "capacity":
            self.asked(book)
        self.changed()

    def _gate(self, book: WorkerBook) -> None:
        """Something may close it for a while."""
        if not book.removed:
            self._gated[book] = None

    def reported(self, worker: Worker, status: WorkerStatus) -> None:
        """See FleetPort. Of a worker that was replaced nothing is taken any more, and no older news.

        A configured agent only ever reports with its rejections, so nothing would
        correct its counts, its state or its list afterwards: probes tell of it.
        """
        book = self._of_worker.get(worker)
        if book is None or book.removed or not book.reporting:
            return
        if (status.incarnation, status.seq) < (book.snapshot.incarnation, book.snapshot.seq):
            return
        now = self._now()
        reading = Snapshot(
            incarnation=status.incarnation,
            seq=status.seq,
            source=Source.HEARTBEAT,
            taken_at=now,
            running=status.running,
            queued=status.queued,
            own=book.own_among(status, now),
            kv_usage=status.kv_usage,
            slots=status.slots,
            tokens_per_second=status.tokens_per_second,
            paused=status.paused,
            state=status.state,
        )
        self.read(book, reading)
        if status.state == "ready":
            book.snapshot = book.snapshot.probed_well()  # an agent asks its engine; that is a probe
        self.report_models(book, status.models)

    def fault(self, worker: Worker, request: InternalRequest) -> None:
        """See FleetPort."""
        book = self._of_worker[worker]
        self._gate(book)
        book.faults += 1
        book.snapshot = book.snapshot.faulted()
        book.breaker(request.model).fault(request.exchange_id, self._now())
        if book.refuses(request.model, self._now()):
            self.asked(book)  # so that whoever watches learns when a probe is due
            self.changed()

    def progressed(self, worker: Worker, exchange_id: str, at: float, events: int | None) -> None:
        """A stream that is being read has delivered ``events`` since last told of, the newest at ``at``.

        None: it is not read, since its reader is slow. That says nothing of the worker.
        """
        book = self._of_worker.get(worker)
        if book is None:
            return
        if events is None:
            book.progress.ended(exchange_id)
        elif events:
            book.probe.event(at)
            book.progress.progressed(exchange_id, at, events)

    # -- what gateways tell each other of breakers

    def spared(self) -> list[tuple[str, str, float, int]]:
        """Workers and models whose breaker opened here, for how many seconds more, and how often before."""
        now = self._now()
        return [
            (worker_id, model, breaker.remaining(now), opening)
            for worker_id, book in self.books.items()
            for model, breaker in book.breakers.items()
            if (opening := breaker.opening(now)) is not None
        ]

    def hint(self, worker_id: str, model: str, seconds: float) -> None:
        """Another gateway's breaker of a worker opened: it comes last here, until the time or an output."""
        book = self.books.get(worker_id)
        if book is not None and model in self.routes:
            book.hints[model] = self._now() + seconds
            self.asked(book)

    # -- what operators say of breakers

    def breaker_states(self, worker_id: str) -> dict[str, str]:
        """Answer the state of each breaker of a worker, by model. Raises KeyError: there is none."""
        now = self._now()
        return {model: each.state(now).value for model, each in self.books[worker_id].breakers.items()}

    def reset_breakers(self, worker_id: str, models: Iterable[str]) -> None:
        """Forget the faults of a worker for some models. Raises KeyError: there is no such worker."""
        for model in models:
            self.books[worker_id].breaker(model).reset(self._now())
        self.changed()

    def force_breaker(self, worker_id: str, model: str) -> None:
        """Place nothing of a model at a worker until its breaker is reset. Raises KeyError, likewise."""
        self.books[worker_id].breaker(model).force_open(self._now())
        self.changed()

    # -- what is read of workers

    def probed(self, book: WorkerBook, healthy: bool) -> None:
        """Take the result of a probe."""
        now = self._now()
        book.probe.result(healthy)
        for breaker in book.breakers.values():
            breaker.probe(healthy, now)
        if healthy:
            book.snapshot = book.snapshot.probed_well()
        self.changed()

    def wants_probe(self, book: WorkerBook) -> float | None:
        """When a breaker of the worker wants a probe; None: none does."""
        now = self._now()
        for breaker in book.breakers.values():
            breaker.state(now)
        times = [at for each in book.breakers.values() if (at := each.opens_at()) is not None]
        return min(times, default=None)

    def read(self, book: WorkerBook, reading: Snapshot) -> None:
        """Take a reading of a worker's gauges, or its own report.

        One with room ends outages whose length the worker did not name.
        """
        book.snapshot = book.snapshot.read(reading)
        size = book.size
        book.report_slots(reading.slots)
        if book.size != size:
            self._note_size(book, size)
            self._pool_sizes.clear()
        if book.has_room and reading.state == "ready":
            for model, outage in tuple(book.outages.items()):
                if reading.taken_at > outage.began:
                    self._end_outage(book, model)
        self.changed()

    def scraped(self, book: WorkerBook, gauges: Gauges) -> None:
        """Take what an engine's own gauges say."""
        known = book.snapshot
        reading = Snapshot(
            incarnation=known.incarnation,
            seq=known.seq + 1,
            source=Source.SCRAPED,
            taken_at=self._now(),
            running=gauges.running or 0,
            queued=gauges.queued or 0,
            own=book.held + book.draining,
            kv_usage=gauges.kv_usage,
            slots=gauges.slots,
            tokens_per_second=gauges.tokens_per_second,
        )
        self.read(book, reading)

    # -- for answers

    def rejection(self, model: str) -> int:
        """How the model's workers said that they have no room: 429 if any of them did, else 503."""
        classes = {b.outages[model].status for b in self.serving(model) if model in b.outages}
        return 429 if 429 in classes else 503

    def retry_after(self, model: str) -> float | None:
        """Longest outage still running among the model's workers, in seconds."""
        now = self._now()
        left = [b.outages[model].remaining(now) for b in self.serving(model) if model in b.outages]
        return max(left, default=None)


def _oldest_news(request: InternalRequest, books: Iterable[WorkerBook]) -> float:
    """How old news of a worker may be for a request, in seconds, see `FRESH`."""
    if not request.last_try:
        return math.inf
    return FRESH if all(book.snapshot.source is Source.HEARTBEAT for book in books) else math.inf


def _nothing() -> None:
    """Nobody listens yet."""


def _nothing_of(book: WorkerBook) -> None:
    """Nobody probes."""
