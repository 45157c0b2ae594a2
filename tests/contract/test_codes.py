"""The table of error codes: each with one status and type, and whether coming again can help."""

from __future__ import annotations

import pytest

from trio_gateway.errors import (
    CODES,
    BadFraming,
    ClientGone,
    EngineProtocolError,
    GatewayError,
    Problem,
    Refused,
    UpstreamFailed,
    UpstreamFault,
    WireError,
)

INVALID = "invalid_request_error"

# Status and type, then the codes; as the public API promises them.
PROMISED = {
    (
        400,
        INVALID,
    ): "invalid_json invalid_value missing_field field_not_allowed bad_framing context_length_exceeded "
    "websocket_stream_limit_reached",
    (401, "authentication_error"): "invalid_api_key",
    (403, "permission_error"): "model_not_allowed priority_not_allowed origin_not_allowed",
    (404, INVALID): "model_not_found previous_response_not_found unknown_route request_not_found",
    (405, INVALID): "method_not_allowed",
    (408, INVALID): "request_timeout client_stalled",
    (409, INVALID): "request_cancelled",
    (413, INVALID): "request_too_large",
    (415, INVALID): "unsupported_media_type",
    (426, INVALID): "upgrade_required",
    (429, "rate_limit_error"): "rate_limit_exceeded queue_full wait_exceeds_deadline",
    (431, INVALID): "headers_too_large",
    (500, "server_error"): "internal_error",
    (502, "upstream_error"): "engine_failed engine_protocol_error engine_credentials",
    (503, "overloaded_error"): (
        "no_worker engine_unavailable engine_overloaded queue_timeout gateway_draining records_unavailable "
        "keys_unavailable operator_cancelled"
    ),
    (503, "engine_out_of_memory"): "engine_out_of_memory",
    (504, "timeout_error"): "deadline_exceeded first_token_timeout",
    (508, INVALID): "loop_detected",
}


def test_the_codes_are_those_that_are_promised() -> None:
    promised = {code: place for place, codes in PROMISED.items() for code in codes.split()}
    assert {code: (info.status, info.type) for code, info in CODES.items()} == promised


# What the same request may find changed when it comes again.
MAY_HELP = {
    "client_stalled",
    "websocket_stream_limit_reached",
    "request_timeout",
    "rate_limit_exceeded",
    "queue_full",
    "wait_exceeds_deadline",
    "engine_failed",
    "engine_protocol_error",
    "no_worker",
    "engine_unavailable",
    "engine_overloaded",
    "queue_timeout",
    "gateway_draining",
    "records_unavailable",
    "keys_unavailable",
    "deadline_exceeded",
    "first_token_timeout",
}


def test_coming_again_helps_against_what_passes_and_nothing_else() -> None:
    assert {code for code, info in CODES.items() if not info.final} == MAY_HELP


@pytest.mark.parametrize("code", CODES)
def test_a_problem_of_a_code_is_what_the_table_says(code: str) -> None:
    problem = Problem.of(code, "why", param="a.b", retry_after=2.0, headers=(("allow", "GET"),))
    info = CODES[code]
    assert (problem.code, problem.message, problem.status, problem.type) == (
        code,
        "why",
        info.status,
        info.type,
    )
    assert (problem.param, problem.retry_after, problem.final) == ("a.b", 2.0, info.final)
    assert problem.headers == (("allow", "GET"),)
    assert Problem.of(code, "why") == problem.but(param=None, retry_after=None, headers=())


def test_an_unknown_code_is_nobody_s_problem() -> None:
    with pytest.raises(KeyError):
        Problem.of("made_up", "why")


def test_errors_carry_what_their_catchers_need() -> None:
    problem = Problem.of("queue_full", "why")
    assert (Refused(problem).problem, str(Refused(problem))) == (problem, "queue_full")
    assert (BadFraming("why").code, BadFraming("why", "headers_too_large").code) == (
        "bad_framing",
        "headers_too_large",
    )
    failed = UpstreamFailed(UpstreamFault.BROKEN, "detail")
    assert (failed.fault, str(failed)) == (UpstreamFault.BROKEN, "detail")


def test_all_errors_that_are_meant_stand_in_one_tree() -> None:
    for kind in (Refused, WireError, UpstreamFailed, ClientGone):
        assert issubclass(kind, GatewayError)
    assert issubclass(BadFraming, WireError)
    assert issubclass(EngineProtocolError, WireError)
