"""What engines' metrics pages and lists of slots say of load, whatever else stands on them."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.wire._gauges import (
    GAUGES,
    MAX_PAGE,
    Gauges,
    read_gauges,
    read_llamacpp_slots,
    read_sglang_loads,
)

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:generation_tokens_total{engine="0",model_name="m"} 1.2345e+06
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e+09
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="m"} 0.0
"""
SGLANG = b"""sglang:num_running_reqs{model_name="m",tp_rank="0"} 5.0
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 0.0
sglang:token_usage{model_name="m",tp_rank="0"} 0.5
sglang:gen_throughput{model_name="m",tp_rank="0"} 86.5
"""
LLAMACPP = b"""# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 77
llamacpp:predicted_tokens_seconds 41.5
llamacpp:requests_processing 1
llamacpp:requests_deferred 4
"""
TGI = b"""tgi_queue_size 6
tgi_batch_current_size 2
tgi_batch_current_max_tokens 4096
"""


@pytest.mark.parametrize(
    ("kind", "page", "expected"),
    [
        ("vllm", VLLM, Gauges(3, 2, 0.25, None, 1_234_500)),
        ("sglang", SGLANG, Gauges(5, 0, 0.5, 86.5)),
        ("llamacpp", LLAMACPP, Gauges(1, 4, None, 41.5, 77)),
        ("tgi", TGI, Gauges(2, 6)),
    ],
)
def test_each_kind_of_engine_is_read(kind: str, page: bytes, expected: Gauges) -> None:
    assert read_gauges(kind, page) == expected
    assert read_gauges(kind, page.replace(b"\n", b"\r\n")) == expected
    assert read_gauges(kind, page.rstrip()) == expected


def test_other_kinds_and_pages_of_others_tell_nothing() -> None:
    assert read_gauges("openai", VLLM) is None
    assert read_gauges("vllm", SGLANG) is None
    assert read_gauges("vllm", b"") is None
    assert read_gauges("vllm", b"<html>not found</html>") is None


def test_parts_of_an_engine_add_up_and_the_fullest_cache_counts() -> None:
    second = VLLM.replace(b'engine="0"', b'engine="1"').replace(b"} 0.25", b"} 0.75")
    assert read_gauges("vllm", VLLM + second) == Gauges(6, 4, 0.75, None, 2_469_000)


def test_ranks_that_tell_the_same_part_count_once() -> None:
    line = b'sglang:num_running_reqs{dp_rank="0",tp_rank="%d"} 5\n'
    told = line % 0 + line % 1
    other = told.replace(b'dp_rank="0"', b'dp_rank="1"').replace(b"} 5", b"} 2")
    gauges = read_gauges("sglang", told + other)
    assert gauges is not None
    assert gauges.running == 7


def test_the_older_name_of_a_gauge_counts_where_the_newer_is_missing() -> None:
    older = VLLM.replace(b"kv_cache_usage_perc", b"gpu_cache_usage_perc")
    gauges = read_gauges("vllm", older)
    assert gauges is not None
    assert gauges.kv_usage == 0.25


@pytest.mark.parametrize(
    "labels",
    [
        b"",
        b"{}",
        b'{engine="0"}',
        b'{engine="0",}',
        b'{ engine = "0" , x="}" }',
        rb'{x="a \"quoted\" } value",engine="0"}',
        rb'{x="\\",engine="0"}',
        b'{x="vllm:num_requests_running 9"}',
    ],
)
@pytest.mark.parametrize("end", [b"", b" 1700000000000", b' # {trace_id="1"} 5 1.0', b"\t"])
def test_labels_timestamps_and_exemplars_of_any_form_are_no_part_of_the_value(
    labels: bytes, end: bytes
) -> None:
    page = b"vllm:num_requests_running" + labels + b" 4" + end + b"\n"
    assert read_gauges("vllm", page) == Gauges(running=4)


@pytest.mark.parametrize("value", [b"NaN", b"-1", b"+Inf", b"1e300", b"", b"four", b'{"a":1}', b"\xff"])
def test_a_value_that_is_no_count_is_left_out(value: bytes) -> None:
    page = b"vllm:num_requests_running " + value + b"\nvllm:num_requests_waiting 2\n"
    assert read_gauges("vllm", page) == Gauges(queued=2)


def test_sums_that_no_engine_reaches_are_no_counts() -> None:
    page = b"".join(b'vllm:num_requests_running{engine="%d"} 9e15\n' % part for part in range(2))
    assert read_gauges("vllm", page + b"vllm:num_requests_waiting 2\n") == Gauges(queued=2)


@pytest.mark.parametrize(("told", "read"), [(b"1.0001", 1.0), (b"97", None), (b"0", 0.0)])
def test_a_cache_is_used_from_none_to_all(told: bytes, read: float | None) -> None:
    gauges = read_gauges("vllm", b"vllm:num_requests_running 1\nvllm:kv_cache_usage_perc " + told)
    assert gauges is not None
    assert gauges.kv_usage == read


def test_names_within_other_lines_are_not_samples() -> None:
    page = b"# vllm:num_requests_running 9\nx vllm:num_requests_running 9\nvllm:num_requests_running_x 9\n"
    page += b"vllm:num_requests_running7 9\n"
    assert read_gauges("vllm", page + b"vllm:num_requests_waiting 1") == Gauges(queued=1)


def test_a_page_that_is_too_long_is_none() -> None:
    assert read_gauges("tgi", TGI + b"#" * MAX_PAGE) is None


def test_no_more_samples_of_a_name_are_read_than_an_engine_has() -> None:
    page = b"".join(b'vllm:num_requests_running{engine="%d"} 1\n' % part for part in range(5000))
    gauges = read_gauges("vllm", page)
    assert gauges is not None
    assert gauges.running == 1024


NAMES = sorted(
    {name for names in GAUGES.values() for name in (*names.running, *names.queued, *names.kv_usage)}
)
PIECES = st.sampled_from(
    [
        *NAMES,
        b"\n",
        b"\n",
        b" ",
        b"{",
        b"}",
        b'"',
        b"\\",
        b'engine="0"',
        b",",
        b"=",
        b"1",
        b"0.5",
        b"NaN",
        b"#",
        b"\xff",
    ]
)


@given(st.sampled_from(sorted(GAUGES)), st.lists(PIECES, max_size=40).map(b"".join))
def test_any_bytes_are_read_to_counts_or_to_nothing(kind: str, page: bytes) -> None:
    gauges = read_gauges(kind, page)
    if gauges is not None:
        assert gauges.running is not None or gauges.queued is not None
        for value in (gauges.running, gauges.queued, gauges.generated, gauges.tokens_per_second):
            assert value is None or 0 <= value < math.inf
        assert gauges.kv_usage is None or 0 <= gauges.kv_usage <= 1


@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=5),
    st.lists(st.text(alphabet='ab"\\}\n{ ', max_size=6), min_size=5, max_size=5),
)
def test_what_a_page_was_written_from_is_read_from_it(
    parts: list[tuple[int, int]], models: list[str]
) -> None:
    lines = []
    for number, (running, queued) in enumerate(parts):
        model = models[number].replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        labels = f'{{model_name="{model}",engine="{number}"}}'
        lines += [
            f"vllm:num_requests_running{labels} {running}",
            f"vllm:num_requests_waiting{labels} {float(queued)}",
        ]
    expected = Gauges(sum(r for r, _ in parts), sum(q for _, q in parts))
    assert read_gauges("vllm", "\n".join(lines).encode()) == expected


# Lists of slots -------------------------------------------------------------------------------------------


def test_llamacpp_lists_its_slots() -> None:
    slots = [{"id": 0, "is_processing": True, "prompt": "x"}, {"id": 1, "is_processing": False}, {"id": 2}]
    assert read_llamacpp_slots(json.dumps(slots).encode()) == Gauges(running=1, slots=3)


@pytest.mark.parametrize("body", [b"[]", b"{}", b"", b"[1]", b'[{"is_processing":1}]', b'[{"is_pr', b"\xff"])
def test_what_is_no_list_of_slots_tells_nothing(body: bytes) -> None:
    assert read_llamacpp_slots(body) is None


def test_sglang_tells_the_loads_of_its_parts() -> None:
    part = {"dp_rank": 0, "num_running_reqs": 3, "num_waiting_reqs": 1, "max_running_requests": 16}
    loads = {"version": "1", "loads": [part | {"token_usage": 0.5, "gen_throughput": 9.5}, part]}
    assert read_sglang_loads(json.dumps(loads).encode()) == Gauges(6, 2, 0.5, 9.5, None, 32)


@pytest.mark.parametrize(
    "body", [b"[]", b"", b'{"loads":[]}', b'{"loads":[{}]}', b'{"loads":[{"num_running_reqs":-1}]}']
)
def test_what_are_no_loads_tells_nothing(body: bytes) -> None:
    assert read_sglang_loads(body) is None


@pytest.mark.parametrize("read", [read_llamacpp_slots, read_sglang_loads])
def test_answers_that_are_too_long_tell_nothing(read: object) -> None:
    assert callable(read)
    body = (
        b'[{"is_processing":true}]' if read is read_llamacpp_slots else b'{"loads":[{"num_running_reqs":1}]}'
    )
    assert read(body)
    assert read(body + b" " * MAX_PAGE) is None
