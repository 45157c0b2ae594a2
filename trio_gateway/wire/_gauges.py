"""How busy an engine says it is: its metrics page and its lists of slots, read into a few numbers. Sans-IO.

Metrics pages are long and mostly histograms, so nothing is parsed but the lines of
the names that are wanted: a page of 200 KB costs less than a millisecond. What is
not readable is left out, never guessed. (Names: each engine's own sources, at the
versions that docs/reference/engines.md tells.)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

MAX_PAGE: Final = 4 * 1024 * 1024  # bytes; a longer page is none
_MAX_SAMPLES: Final = 1024  # of one name; engines have one for each of their parts
_MAX_COUNT: Final = 2**53  # counts that no engine reaches are no counts

# Possessive, so that a line without an end is read once.
_LABELS: Final = rb'[ \t]*+(?:\{((?:[^"}\n]|"(?:[^"\\\n]|\\[^\n])*+")*+)\})?'
_SAMPLE = re.compile(_LABELS + rb"[ \t]*+([^ \t\r\n{}\"]++)")


@dataclass(frozen=True, slots=True)
class Gauges:
    """What an engine told; None where it told nothing.

    Attributes:
        running, queued: requests.
        kv_usage: share of the KV cache in use, 0 to 1.
        tokens_per_second: generated now, as the engine measures it.
        generated: tokens since it started; two readings make a speed.
        slots: requests that it runs at once.
    """

    running: int | None = None
    queued: int | None = None
    kv_usage: float | None = None
    tokens_per_second: float | None = None
    generated: int | None = None
    slots: int | None = None


@dataclass(frozen=True, slots=True)
class GaugeNames:
    """The metrics of one kind of engine; the first name of a tuple that is on the page counts.

    Attributes:
        part: label that tells apart the parts of an engine whose counts add up. Samples
            that differ in nothing of it are the same part, told more than once.
    """

    running: tuple[bytes, ...]
    queued: tuple[bytes, ...]
    kv_usage: tuple[bytes, ...] = ()
    tokens_per_second: tuple[bytes, ...] = ()
    generated: tuple[bytes, ...] = ()
    part: bytes | None = None


GAUGES: Final[dict[str, GaugeNames]] = {
    "vllm": GaugeNames(
        running=(b"vllm:num_requests_running",),
        queued=(b"vllm:num_requests_waiting",),
        kv_usage=(b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc"),
        generated=(b"vllm:generation_tokens_total",),
        part=b"engine",
    ),
    "sglang": GaugeNames(
        running=(b"sglang:num_running_reqs",),
        queued=(b"sglang:num_queue_reqs",),
        kv_usage=(b"sglang:token_usage",),
        tokens_per_second=(b"sglang:gen_throughput",),
        generated=(b"sglang:generation_tokens_total",),
        part=b"dp_rank",
    ),
    "llamacpp": GaugeNames(
        running=(b"llamacpp:requests_processing",),
        queued=(b"llamacpp:requests_deferred",),
        kv_usage=(b"llamacpp:kv_cache_usage_ratio",),
        tokens_per_second=(b"llamacpp:predicted_tokens_seconds",),
        generated=(b"llamacpp:tokens_predicted_total",),
    ),
    "tgi": GaugeNames(running=(b"tgi_batch_current_size",), queued=(b"tgi_queue_size",)),
}


def read_gauges(kind: str, page: bytes) -> Gauges | None:
    """Read a Prometheus text page of an engine; None if it tells nothing of load.

    Args:
        kind: a key of `GAUGES`; others tell nothing.
    """
    names = GAUGES.get(kind)
    if names is None or len(page) > MAX_PAGE:
        return None
    gauges = Gauges(
        running=_count(_sum(page, names.running, names.part)),
        queued=_count(_sum(page, names.queued, names.part)),
        kv_usage=_share(_largest(page, names.kv_usage)),
        tokens_per_second=_sum(page, names.tokens_per_second, names.part),
        generated=_count(_sum(page, names.generated, names.part)),
    )
    return None if gauges.running is None and gauges.queued is None else gauges


def _sum(page: bytes, names: tuple[bytes, ...], part: bytes | None) -> float | None:
    """Add up the parts of an engine."""
    parts: dict[bytes, float] = {}
    for labels, value in _samples(page, names):
        name = _label(labels, part) if part else b""
        parts[name] = max(parts.get(name, 0.0), value)
    return sum(parts.values()) if parts else None


def _largest(page: bytes, names: tuple[bytes, ...]) -> float | None:
    """The fullest part of an engine: requests cannot choose theirs."""
    return max((value for _, value in _samples(page, names)), default=None)


def _samples(page: bytes, names: tuple[bytes, ...]) -> Iterator[tuple[bytes, float]]:
    """Labels and value of each readable sample of the first name that has any."""
    for name in names:
        found = list(_samples_of(page, name))
        if found:
            return iter(found)
    return iter(())


def _samples_of(page: bytes, name: bytes) -> Iterator[tuple[bytes, float]]:
    at = 0 if page.startswith(name) else page.find(b"\n" + name) + 1
    for _ in range(_MAX_SAMPLES):
        if not (at or page.startswith(name)):
            return
        sample = _SAMPLE.match(page, at + len(name))
        # A longer name goes on where this one ends.
        if page[at + len(name) : at + len(name) + 1] in (b" ", b"\t", b"{") and sample is not None:
            value = _number(sample[2])
            if value is not None:
                yield sample[1] or b"", value
        at = page.find(b"\n" + name, at) + 1
        if not at:
            return


def _label(labels: bytes, name: bytes) -> bytes:
    """The value of a label as it is written; empty if there is none."""
    found = re.search(rb"(?:^|,)[ \t]*" + name + rb'[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"', labels)
    return found[1] if found else b""


def _number(text: bytes) -> float | None:
    """A number from 0 to what counts can be; None for NaN and whatever else there is."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and 0 <= value <= _MAX_COUNT else None


def _count(value: float | None) -> int | None:
    return None if value is None or value > _MAX_COUNT else int(value)


def _share(value: float | None) -> float | None:
    """A share; rounding may bring it just above 1."""
    return None if value is None or value > 1.01 else min(value, 1.0)


# -- lists of slots


class _Slot(msgspec.Struct):
    is_processing: bool = False


class _Load(msgspec.Struct):
    num_running_reqs: int | None = None
    num_waiting_reqs: int | None = None
    max_running_requests: int | None = None
    token_usage: float | None = None
    gen_throughput: float | None = None


class _Loads(msgspec.Struct):
    loads: list[_Load]


_read_slots = msgspec.json.Decoder(list[_Slot]).decode
_read_loads = msgspec.json.Decoder(_Loads).decode


def read_llamacpp_slots(body: bytes) -> Gauges | None:
    """Read llama.cpp's ``/slots``: how many there are, and how many work."""
    if len(body) > MAX_PAGE:
        return None
    try:
        slots = _read_slots(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return Gauges(running=sum(slot.is_processing for slot in slots), slots=len(slots)) if slots else None


def read_sglang_loads(body: bytes) -> Gauges | None:
    """Read SGLang's ``/v1/loads``, which has one entry for each data-parallel part."""
    if len(body) > MAX_PAGE:
        return None
    try:
        loads = _read_loads(body).loads
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    gauges = Gauges(
        running=_total(load.num_running_reqs for load in loads),
        queued=_total(load.num_waiting_reqs for load in loads),
        kv_usage=_share(max((_checked(load.token_usage) or 0.0 for load in loads), default=None)),
        tokens_per_second=_total_of(load.gen_throughput for load in loads),
        slots=_total(load.max_running_requests for load in loads) or None,
    )
    return None if gauges.running is None and gauges.queued is None else gauges


def _total(values: Iterator[int | None]) -> int | None:
    return _count(_total_of(values))


def _total_of(values: Iterator[float | None]) -> float | None:
    told = [value for each in values if (value := _checked(each)) is not None]
    return sum(told) if told else None


def _checked(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) and 0 <= value <= _MAX_COUNT else None
