"""The metrics page of the simulated engine in the names of each kind, and its account of itself. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from ._simulated_core import SimulatedCore
from ._simulated_generation import Entry

_Line = tuple[str, str, float, str]  # name, type, value, labels behind the common ones


def metrics_page(kind: str, core: SimulatedCore, model: str, now: float) -> bytes:
    """Write the page of an engine of one kind, in the Prometheus text format.

    Args:
        kind: a key of `PAGES`.
        model: the value of the label that names the model, where there is one.
        now: the time, as the core knows it.
    """
    common, lines = PAGES[kind]
    labels = common.format(model=model.replace("\\", r"\\").replace('"', r"\""))
    text: list[str] = []
    described: set[str] = set()
    for name, type_, value, more in lines(core, now):
        if name not in described:
            described.add(name)
            text.append(f"# TYPE {name} {type_}\n")
        inside = ",".join(filter(None, (labels, more)))
        text.append(f"{name}{{{inside}}} {value}\n" if inside else f"{name} {value}\n")
    return "".join(text).encode()


def _vllm(core: SimulatedCore, now: float) -> Iterator[_Line]:
    memory, tokens = core.memory, core.memory.block_tokens
    sizes = f'block_size="{tokens}",num_gpu_blocks="{memory.total}"'
    yield "vllm:num_requests_running", "gauge", core.running, ""
    yield "vllm:num_requests_waiting", "gauge", core.waiting, ""
    yield "vllm:num_requests_waiting_by_reason", "gauge", core.waiting, 'reason="capacity"'
    yield "vllm:num_requests_waiting_by_reason", "gauge", 0, 'reason="deferred"'
    yield "vllm:kv_cache_usage_perc", "gauge", memory.usage, ""
    yield "vllm:cache_config_info", "gauge", 1, sizes
    yield "vllm:num_preemptions_total", "counter", core.preemptions, ""
    yield "vllm:prompt_tokens_total", "counter", core.prompt_tokens, ""
    yield "vllm:generation_tokens_total", "counter", core.generated_tokens, ""
    yield "vllm:prefix_cache_queries_total", "counter", memory.queries * tokens, ""
    yield "vllm:prefix_cache_hits_total", "counter", memory.hits * tokens, ""
    for reason, count in sorted(core.tally.items()):
        yield "vllm:request_success_total", "counter", count, f'finished_reason="{reason}"'


def _sglang(core: SimulatedCore, now: float) -> Iterator[_Line]:
    memory = core.memory
    yield "sglang:num_running_reqs", "gauge", core.running, ""
    yield "sglang:num_queue_reqs", "gauge", core.waiting, ""
    yield "sglang:token_usage", "gauge", memory.usage, ""
    yield "sglang:num_used_tokens", "gauge", memory.held * memory.block_tokens, ""
    yield "sglang:kv_available_tokens", "gauge", memory.free * memory.block_tokens, ""
    yield "sglang:kv_evictable_tokens", "gauge", memory.kept * memory.block_tokens, ""
    yield "sglang:gen_throughput", "gauge", core.tokens_per_second(now), ""
    yield "sglang:cache_hit_rate", "gauge", memory.hits / memory.queries if memory.queries else 0.0, ""


def _llamacpp(core: SimulatedCore, now: float) -> Iterator[_Line]:
    cached = core.memory.hits * core.memory.block_tokens
    yield "llamacpp:requests_processing", "gauge", core.running, ""
    yield "llamacpp:requests_deferred", "gauge", core.waiting, ""
    yield "llamacpp:predicted_tokens_seconds", "gauge", core.tokens_per_second(now), ""
    yield "llamacpp:prompt_tokens_total", "counter", core.prompt_tokens, ""
    yield "llamacpp:prompt_tokens_cached_total", "counter", cached, ""
    yield "llamacpp:tokens_predicted_total", "counter", core.generated_tokens, ""
    yield "llamacpp:n_decode_total", "counter", core.step_count, ""


def _tgi(core: SimulatedCore, now: float) -> Iterator[_Line]:
    yield "tgi_queue_size", "gauge", core.waiting, ""
    yield "tgi_batch_current_size", "gauge", core.running, ""
    yield "tgi_batch_current_max_tokens", "gauge", core.memory.held * core.memory.block_tokens, ""
    yield "tgi_request_count", "counter", core.arrived, ""
    yield "tgi_request_success", "counter", core.outcomes["finished"], ""
    yield "tgi_request_failure", "counter", core.outcomes["cancelled"], 'err="dropped"'
    yield "tgi_request_failure", "counter", core.outcomes["failed"], 'err="generation"'


PAGES: Final[dict[str, tuple[str, Callable[[SimulatedCore, float], Iterator[_Line]]]]] = {
    "vllm": ('engine="0",model_name="{model}"', _vllm),
    "sglang": ('model_name="{model}"', _sglang),
    "llamacpp": ("", _llamacpp),
    "tgi": ("", _tgi),
}


def log_of(core: SimulatedCore, now: float, entries: int) -> dict[str, Any]:
    """Write the engine's own account of itself, against which tests hold what others believe.

    Args:
        entries: how many of the last requests and steps are told one by one.
    """
    memory = core.memory
    return {
        "now": now,
        "ready": core.ready(now),
        "slots": core.limits.slots,
        "running": core.running,
        "waiting": core.waiting,
        "open": len(core.generations),
        "high_water": core.high_water,
        "arrived": core.arrived,
        "refused": core.refused,
        "finished": core.outcomes["finished"],
        "cancelled": core.outcomes["cancelled"],
        "failed": core.outcomes["failed"],
        "released": sum(core.outcomes.values()),
        "preemptions": core.preemptions,
        "steps": core.step_count,
        "prompt_tokens": core.prompt_tokens,
        "cached_tokens": memory.hits * memory.block_tokens,
        "generated_tokens": core.generated_tokens,
        "tokens_per_second": core.tokens_per_second(now),
        "kv": {"total": memory.total, "free": memory.free, "held": memory.held, "kept": memory.kept},
        "requests": [dict(zip(Entry._fields, entry, strict=True)) for entry in _last(core.entries, entries)],
        "last_steps": [step._asdict() for step in _last(core.steps, entries)],
    }


def _last(kept: Any, number: int) -> list[Any]:
    return list(kept)[-number:] if number else []
