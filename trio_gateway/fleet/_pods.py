"""What Kubernetes tells of pods, and what follows from it for the workers that run in them. Pure.

A pod becomes a worker when it is ready for the first time. From then on it is one until
it is gone: while it is not ready, or terminates, nothing new is placed there and what
runs goes on. A pod of the same name with another uid is another process.

Lists and watches are as `Kubernetes API concepts`_ has them: a list says which version
of the world it shows, a watch tells what changed since, bookmarks only move the version
on, and a version that is too old is answered with 410, after which all is listed again.

.. _Kubernetes API concepts: https://kubernetes.io/docs/reference/using-api/api-concepts/
"""

from __future__ import annotations

import enum
import ipaddress
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

MOST_PODS: Final = 4096  # of one selector that are looked at
MOST_PAGES: Final = 1000  # of one list; a selector may leave none of the pods of a page
MOST_SLOTS: Final = 100_000
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9.-]{0,252}")  # a DNS subdomain, as all names of pods are
GONE: Final = 410  # HTTP status, and code of a Status object: the version is too old
FIRST_PAUSE: Final = 0.5  # seconds after a failure, doubling to the last
LAST_PAUSE: Final = 30.0


class PodState(enum.Enum):
    """What of a pod's life matters to those who call it."""

    READY = "ready"
    UNREADY = "not ready"
    TERMINATING = "terminating"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod.

    Attributes:
        address: its IP address; empty: it has none yet.
        slots: as its annotation or label says; None: it says nothing that could be read.
    """

    name: str
    uid: str
    address: str
    state: PodState
    slots: int | None = None


# Decisions --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrived:
    """The pod is a worker from now on."""

    pod: Pod


@dataclass(frozen=True, slots=True)
class Described:
    """The pod, which is a worker, has another number of slots."""

    pod: Pod


@dataclass(frozen=True, slots=True)
class Withheld:
    """Nothing new is placed at the pod; ``why`` is its state. What runs there goes on."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """The pod gets requests again."""

    name: str


@dataclass(frozen=True, slots=True)
class Left:
    """The pod is no worker any more: it, or the process that it was, is gone."""

    name: str


Decision = Arrived | Described | Withheld | Resumed | Left


class PodSet:
    """The pods of one selector that are workers."""

    def __init__(self) -> None:
        self._workers: dict[str, Pod] = {}

    def listed(self, pods: Iterable[Pod]) -> list[Decision]:
        """Take all pods that there are; those that are not among them are gone."""
        found = {pod.name: pod for pod in pods}
        decisions: list[Decision] = [self._leave(name) for name in [*self._workers] if name not in found]
        for pod in found.values():
            decisions += self.saw(pod)
        return decisions

    def saw(self, pod: Pod) -> list[Decision]:
        """Take a pod as it is now."""
        decisions: list[Decision] = []
        known = self._workers.get(pod.name)
        if known is not None and (pod.state is PodState.GONE or _is_another(known, pod)):
            decisions.append(self._leave(pod.name))
            known = None
        if known is None:
            if pod.state is PodState.READY and len(self._workers) < MOST_PODS:
                self._workers[pod.name] = pod
                decisions.append(Arrived(pod))
            return decisions
        self._workers[pod.name] = pod
        if pod.state is not known.state:
            ready = pod.state is PodState.READY
            decisions.append(Resumed(pod.name) if ready else Withheld(pod.name, pod.state.value))
        if pod.slots != known.slots:
            decisions.append(Described(pod))
        return decisions

    def deleted(self, pod: Pod) -> list[Decision]:
        """Take that a pod is gone."""
        known = self._workers.get(pod.name)
        return [self._leave(pod.name)] if known is not None and known.uid == pod.uid else []

    def _leave(self, name: str) -> Left:
        del self._workers[name]
        return Left(name)


def _is_another(known: Pod, pod: Pod) -> bool:
    """Whether what was known is another process; one that ends may lose its address before it is gone."""
    return known.uid != pod.uid or pod.address not in ("", known.address)


# Reading ----------------------------------------------------------------------------------------------------


class OutOfDate(Exception):
    """The version that is known is too old, or nobody knows any more what it was: list again."""


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a list; ``rest`` asks for the next one and is empty on the last."""

    pods: tuple[Pod, ...]
    version: str
    rest: str


def read_page(body: bytes, slots_key: str) -> Page:
    """Read a page of a list of pods. A pod that can not be read is left out.

    Args:
        slots_key: annotation, or else label, that has the number of slots.

    Raises:
        ValueError: this is no list.
    """
    value = _read_object(body)
    meta = _table(value, "metadata")
    items, version, rest = value.get("items"), meta.get("resourceVersion"), meta.get("continue")
    if items is None:
        items = []  # how Go writes an empty list
    if not isinstance(items, list) or not isinstance(version, str) or not version:
        raise ValueError("no list of pods")
    pods = (read_pod(item, slots_key) for item in items)
    return Page(tuple(pod for pod in pods if pod is not None), version, rest if isinstance(rest, str) else "")


def read_pod(value: object, slots_key: str) -> Pod | None:
    """Read a pod; None: this is none."""
    meta, status = _table(value, "metadata"), _table(value, "status")
    name, uid, address = meta.get("name"), meta.get("uid"), status.get("podIP")
    if not (isinstance(name, str) and _NAME.fullmatch(name) and isinstance(uid, str) and uid):
        return None
    shown = address if isinstance(address, str) and _is_address(address) else ""
    slots = _slots(_table(meta, "annotations").get(slots_key) or _table(meta, "labels").get(slots_key))
    return Pod(name, uid, shown, _state(meta, status, shown), slots)


def _state(meta: dict[str, Any], status: dict[str, Any], address: str) -> PodState:
    if status.get("phase") in ("Succeeded", "Failed"):
        return PodState.GONE
    if meta.get("deletionTimestamp"):
        return PodState.TERMINATING
    conditions = status.get("conditions")
    ready = isinstance(conditions, list) and any(
        isinstance(each, dict) and each.get("type") == "Ready" and each.get("status") == "True"
        for each in conditions
    )
    return PodState.READY if ready and address else PodState.UNREADY


def _slots(text: object) -> int | None:
    if not isinstance(text, str) or not (text.isascii() and text.isdigit() and len(text) <= 6):
        return None
    return int(text) if 1 <= int(text) <= MOST_SLOTS else None


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text  # a zone means something on one machine only


def _table(value: object, key: str) -> dict[str, Any]:
    inner = value.get(key) if isinstance(value, dict) else None
    return inner if isinstance(inner, dict) else {}


def _read_object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value


# Following --------------------------------------------------------------------------------------------------


class PodWatch:
    """Follows the pods of one selector through lists and watches.

    Args:
        slots_key: as `read_page` takes it.

    Attributes:
        version: from which on changes are to be asked for; None: all is to be listed.
        rest: asks for the next page of the list that is being read; empty: for its first.
    """

    def __init__(self, slots_key: str) -> None:
        self._slots_key = slots_key
        self._pods = PodSet()
        self._pages: list[Pod] = []
        self._read = 0
        self.version: str | None = None
        self.rest = ""

    def take_page(self, page: Page) -> list[Decision]:
        """Take the next page; decides when the list is whole.

        Raises:
            OutOfDate: the list does not come to its end.
        """
        self._pages += page.pods
        self._read += 1
        self.rest = page.rest
        if page.rest and self._read >= MOST_PAGES:
            self.start_anew()
            raise OutOfDate(f"the list has more than {MOST_PAGES} pages")
        if page.rest and len(self._pages) < MOST_PODS:
            return []
        pods = self._pages[:MOST_PODS]
        self.start_anew()
        self.version = page.version
        return self._pods.listed(pods)

    def take_line(self, line: bytes) -> list[Decision]:
        """Take one line of a watch.

        Raises:
            OutOfDate: `version` is None from now on.
            ValueError: the server says that it can not go on; the version stays.
        """
        try:
            value = _read_object(line)
        except ValueError:
            self.start_anew()
            raise OutOfDate("a line of the watch can not be read") from None
        kind, shown = value.get("type"), value.get("object")
        if kind == "ERROR":
            self._take_error(shown)
        version = _table(shown, "metadata").get("resourceVersion")
        if kind not in ("ADDED", "MODIFIED", "DELETED", "BOOKMARK") or not isinstance(version, str):
            self.start_anew()
            raise OutOfDate("a line of the watch is no event")
        self.version = version
        pod = None if kind == "BOOKMARK" else read_pod(shown, self._slots_key)
        if pod is None:
            return []
        return self._pods.deleted(pod) if kind == "DELETED" else self._pods.saw(pod)

    def _take_error(self, status: object) -> None:
        code = status.get("code") if isinstance(status, dict) else None
        if code == GONE:
            self.start_anew()
            raise OutOfDate("the watch fell behind")
        raise ValueError(f"the watch ends with code {code}")

    def start_anew(self) -> None:
        """List all at the next opportunity. The workers stay until then."""
        self.version, self.rest, self._pages, self._read = None, "", [], 0


def pause_after(failures: int, dice: float) -> float:
    """Seconds until the next try after so many failures in a row, 1 at least.

    Args:
        dice: from 0 to 1; spreads gateways that lost the same server over half of the time.
    """
    return float(min(FIRST_PAUSE * 2 ** min(failures - 1, 16), LAST_PAUSE)) * (0.5 + dice / 2)
