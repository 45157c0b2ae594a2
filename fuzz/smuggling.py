"""Requests that two readers may see differently, and what the gateway does with each.

Whoever stands in front of the gateway may have read such bytes as one request
where the gateway reads two, or the other way round; then one client's bytes
become another client's request. So each case holds a second request, `HIDDEN`,
at the place where a fooled reader would find it, and it must never be answered.

The table is used twice: as seeds of the fuzz targets, and by
``tests/edge/test_smuggling_corpus.py``, which sends each case to a gateway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BODY: Final = b'{"model":"m1","messages":[{"role":"user","content":"hi"}]}'
HIDDEN: Final = b"GET /v1/models/hidden HTTP/1.1\r\nHost: g\r\n\r\n"
LINE: Final = b"POST /v1/chat/completions HTTP/1.1\r\n"
HOST: Final = b"Host: g\r\n"
SIZED: Final = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED: Final = b"Transfer-Encoding: chunked\r\n"
IN_CHUNKS: Final = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)


@dataclass(frozen=True)
class Case:
    """One connection's bytes, and what comes back.

    Attributes:
        status: of the one answer.
        code: of the error in it; None for an answer that is none.
        kept: the connection goes on afterwards; where framing is doubtful it is closed.
        asked: whether an engine gets the request (with `BODY` as its body).
    """

    name: str
    raw: bytes
    status: int
    code: str | None
    kept: bool
    asked: bool


def _post(*fields: bytes, line: bytes = LINE, host: bytes = HOST, body: bytes = BODY) -> bytes:
    return line + host + b"".join(fields) + b"\r\n" + body


def _refused(**raws: bytes) -> list[Case]:
    """Cases whose framing is doubtful: told so, and closed."""
    return [
        Case(name.replace("_", " "), raw + HIDDEN, 400, "bad_framing", False, False)
        for name, raw in raws.items()
    ]


def _served(**raws: bytes) -> list[Case]:
    """Cases that are unusual and clear."""
    return [Case(name.replace("_", " "), raw, 200, None, True, True) for name, raw in raws.items()]


def _answered(status: int, code: str | None, kept: bool = True, **raws: bytes) -> list[Case]:
    """Cases that are answered before any engine is asked."""
    return [Case(name.replace("_", " "), raw, status, code, kept, False) for name, raw in raws.items()]


def _coded(coding: bytes) -> bytes:
    """A request that some read to its length and some to its last chunk, or to its end at once."""
    return _post(SIZED, coding, body=b"0\r\n\r\n")


def _chunks(body: bytes) -> bytes:
    return _post(CHUNKED, body=body)


LENGTHS: Final = _refused(
    length_and_chunks=_post(SIZED, CHUNKED, body=b"0\r\n\r\n"),
    chunks_and_length=_post(CHUNKED, SIZED, body=b"0\r\n\r\n"),
    length_zero_and_chunks=_post(b"Content-Length: 0\r\n", CHUNKED, body=IN_CHUNKS),
    two_lengths=_post(SIZED, b"Content-Length: 0\r\n"),
    two_lengths_the_other_way_round=_post(b"Content-Length: 0\r\n", SIZED),
    two_equal_lengths=_post(SIZED, SIZED),
    two_lengths_in_other_letters=_post(SIZED, b"CONTENT-LENGTH: 0\r\n"),
    a_list_of_lengths=_post(b"Content-Length: 0, %d\r\n" % len(BODY)),
    a_list_of_equal_lengths=_post(b"Content-Length: %d, %d\r\n" % (len(BODY), len(BODY))),
    a_length_with_a_sign=_post(b"Content-Length: +%d\r\n" % len(BODY)),
    a_length_below_zero=_post(b"Content-Length: -1\r\n"),
    a_length_in_hexadecimal=_post(b"Content-Length: 0x3a\r\n"),
    a_length_with_an_underscore=_post(b"Content-Length: 5_8\r\n"),
    a_length_with_a_fraction=_post(b"Content-Length: 58.0\r\n"),
    a_length_with_an_exponent=_post(b"Content-Length: 58e0\r\n"),
    a_length_with_a_blank_inside=_post(b"Content-Length: 5 8\r\n"),
    a_length_in_quotes=_post(b'Content-Length: "58"\r\n'),
    an_empty_length=_post(b"Content-Length:\r\n"),
    a_length_beyond_64_bits=_post(b"Content-Length: 18446744073709551616\r\n"),
    a_length_in_other_digits=_post("Content-Length: \u0665\u0668\r\n".encode()),
    a_length_behind_a_no_break_space=_post(b"Content-Length: \xa058\r\n"),
    a_length_behind_a_vertical_tab=_post(b"Content-Length: \x0b58\r\n"),
    a_length_before_a_NUL=_post(b"Content-Length: 58\x00\r\n"),
    a_length_folded_to_the_next_line=_post(b"Content-Length:\r\n 58\r\n"),
    a_length_that_goes_on_in_the_next_line=_post(b"Content-Length: 5\r\n 8\r\n"),
)

CODINGS: Final = _refused(
    identity=_coded(b"Transfer-Encoding: identity\r\n"),
    identity_alone=_post(b"Transfer-Encoding: identity\r\n"),
    gzip_and_chunked=_post(b"Transfer-Encoding: gzip, chunked\r\n", body=IN_CHUNKS),
    chunked_and_identity=_post(b"Transfer-Encoding: chunked, identity\r\n", body=IN_CHUNKS),
    chunked_twice_in_one=_post(b"Transfer-Encoding: chunked, chunked\r\n", body=IN_CHUNKS),
    chunked_twice=_post(CHUNKED, CHUNKED, body=IN_CHUNKS),
    chunked_and_another=_post(CHUNKED, b"Transfer-Encoding: x\r\n", body=IN_CHUNKS),
    chunked_with_a_parameter=_post(b"Transfer-Encoding: chunked;q=1\r\n", body=IN_CHUNKS),
    chunked_with_a_comma=_post(b"Transfer-Encoding: ,chunked\r\n", body=IN_CHUNKS),
    chunked_in_quotes=_post(b'Transfer-Encoding: "chunked"\r\n', body=IN_CHUNKS),
    chunked_misspelt=_post(b"Transfer-Encoding: xchunked\r\n", body=IN_CHUNKS),
    chunked_cut_short=_post(b"Transfer-Encoding: chunke\r\n", body=IN_CHUNKS),
    no_coding_at_all=_post(b"Transfer-Encoding:\r\n", body=IN_CHUNKS),
    chunked_behind_a_vertical_tab=_post(b"Transfer-Encoding: \x0bchunked\r\n", body=IN_CHUNKS),
    chunked_before_a_form_feed=_post(b"Transfer-Encoding: chunked\x0c\r\n", body=IN_CHUNKS),
    chunked_before_a_no_break_space=_post(b"Transfer-Encoding: chunked\xa0\r\n", body=IN_CHUNKS),
    chunked_before_a_next_line=_post(b"Transfer-Encoding: chunked\x85\r\n", body=IN_CHUNKS),
    chunked_before_a_NUL=_post(b"Transfer-Encoding: chunked\x00\r\n", body=IN_CHUNKS),
    chunked_in_the_next_line=_post(b"Transfer-Encoding:\r\n chunked\r\n", body=IN_CHUNKS),
    chunked_in_HTTP_1_0=_post(CHUNKED, line=LINE.replace(b"1.1", b"1.0"), body=IN_CHUNKS),
)

FIELDS: Final = _refused(
    a_blank_before_the_colon_of_a_length=_post(b"Content-Length : %d\r\n" % len(BODY)),
    a_tab_before_the_colon_of_a_length=_post(b"Content-Length\t: %d\r\n" % len(BODY)),
    a_blank_before_the_colon_of_a_coding=_coded(b"Transfer-Encoding : chunked\r\n"),
    a_tab_before_the_colon_of_a_coding=_coded(b"Transfer-Encoding\t: chunked\r\n"),
    a_no_break_space_before_the_colon=_coded(b"Transfer-Encoding\xa0: chunked\r\n"),
    a_blank_before_the_name=_coded(b" Transfer-Encoding: chunked\r\n"),
    a_tab_before_the_name=_coded(b"\tTransfer-Encoding: chunked\r\n"),
    a_folded_header=_post(SIZED, b"X: a\r\n b\r\n"),
    a_folded_header_by_a_tab=_post(SIZED, b"X: a\r\n\tb\r\n"),
    a_folded_blank_line=_post(SIZED, b"X: a\r\n \r\n"),
    a_coding_behind_a_bare_LF=_coded(b"X: x\nTransfer-Encoding: chunked\r\n"),
    a_coding_behind_a_bare_CR=_coded(b"X: x\rTransfer-Encoding: chunked\r\n"),
    a_coding_behind_a_NUL=_coded(b"X: x\x00Transfer-Encoding: chunked\r\n"),
    a_line_that_ends_with_CR_CR_LF=_post(SIZED, b"X: y\r\r\n"),
    a_head_that_ends_with_two_LF=LINE + HOST + SIZED + b"X: y\n\n" + BODY,
    a_head_that_ends_with_LF_CR_LF=LINE + HOST + SIZED + b"X: y\n\r\n" + BODY,
    a_head_with_LF_only=_post(SIZED).replace(b"\r\n", b"\n"),
    a_head_with_CR_only=_post(SIZED).replace(b"\r\n", b"\r"),
    a_name_that_begins_with_a_byte_order_mark=_coded(b"\xef\xbb\xbfTransfer-Encoding: chunked\r\n"),
    a_name_with_a_NUL=_coded(b"Transfer-Encoding\x00: chunked\r\n"),
    a_name_beyond_ASCII=_coded("Tr\u00e4nsfer-Encoding: chunked\r\n".encode()),
    a_name_in_brackets=_post(SIZED, b"(X): y\r\n"),
    a_name_with_a_blank=_post(SIZED, b"X Y: z\r\n"),
    no_name=_post(SIZED, b": chunked\r\n"),
    no_colon=_post(SIZED, b"Transfer-Encoding chunked\r\n"),
    an_escape_character=_post(SIZED, b"X: \x1b[2J\r\n"),
    a_DEL=_post(SIZED, b"X: \x7f\r\n"),
    two_hosts=_post(HOST, SIZED),
    two_hosts_that_differ=_post(SIZED, b"Host: evil\r\n"),
    no_host=_post(SIZED, host=b""),
    a_host_behind_a_blank=_post(SIZED, host=b" Host: g\r\n"),
    two_keys=_post(SIZED, b"Authorization: Bearer a\r\nAuthorization: Bearer b\r\n"),
    two_equal_keys=_post(SIZED, b"Authorization: Bearer a\r\nAuthorization: Bearer a\r\n"),
    two_named_keys=_post(SIZED, b"X-Api-Key: a\r\nX-Api-Key: a\r\n"),
    keys_that_differ=_post(SIZED, b"Authorization: Bearer a\r\nX-Api-Key: b\r\n"),
    two_types=_post(SIZED, b"Content-Type: application/json\r\nContent-Type: text/plain\r\n"),
)

LINES: Final = _refused(
    no_version=_post(SIZED, line=b"POST /v1/chat/completions\r\n"),
    HTTP_0_9=b"GET /v1/models\r\n\r\n",
    HTTP_2=_post(SIZED, line=LINE.replace(b"1.1", b"2.0")),
    HTTP_1_2=_post(SIZED, line=LINE.replace(b"1.1", b"1.2")),
    HTTP_1_10=_post(SIZED, line=LINE.replace(b"1.1", b"1.10")),
    HTTP_01_1=_post(SIZED, line=LINE.replace(b"1.1", b"01.1")),
    a_version_in_small_letters=_post(SIZED, line=LINE.replace(b"HTTP", b"http")),
    a_version_with_a_blank_behind_it=_post(SIZED, line=LINE.replace(b"1.1", b"1.1 ")),
    tabs_between_the_parts=_post(SIZED, line=LINE.replace(b" ", b"\t")),
    two_blanks_between_the_parts=_post(SIZED, line=LINE.replace(b" ", b"  ")),
    a_blank_before_the_method=_post(SIZED, line=b" " + LINE),
    a_blank_in_the_target=_post(SIZED, line=b"POST /v1/chat/completions /x HTTP/1.1\r\n"),
    a_request_in_the_target=_post(SIZED, line=b"POST /x HTTP/1.1\n/v1/chat/completions HTTP/1.1\r\n"),
    a_NUL_in_the_target=_post(SIZED, line=b"POST /v1/chat/completions\x00 HTTP/1.1\r\n"),
    a_target_beyond_ASCII=_post(SIZED, line="POST /v1/chat/completi\u00f6ns HTTP/1.1\r\n".encode()),
    a_method_that_is_no_token=_post(SIZED, line=LINE.replace(b"POST", b"P@ST")),
    the_greeting_of_HTTP_2=b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    the_greeting_of_a_load_balancer=b"PROXY TCP4 192.0.2.1 192.0.2.2 1 2\r\n" + _post(SIZED),
    TLS=b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + bytes(range(16)) + b"\r\n\r\n",
    an_answer_instead_of_a_request=b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
)

BODIES: Final = _refused(
    a_chunk_size_with_a_sign=_chunks(b"+" + IN_CHUNKS),
    a_chunk_size_below_zero=_chunks(b"-1\r\n\r\n"),
    a_chunk_size_with_a_prefix=_chunks(b"0x" + IN_CHUNKS),
    a_chunk_size_with_an_underscore=_chunks(b"0_" + IN_CHUNKS),
    a_chunk_size_behind_a_blank=_chunks(b" " + IN_CHUNKS),
    a_chunk_size_in_other_digits=_chunks("\u0665\r\nhello\r\n0\r\n\r\n".encode()),
    a_chunk_size_beyond_64_bits=_chunks(b"10000000000000005\r\nhello\r\n0\r\n\r\n"),
    a_chunk_size_with_a_NUL=_chunks(b"5\x00\r\nhello\r\n0\r\n\r\n"),
    no_chunk_size=_chunks(b"\r\nhello\r\n0\r\n\r\n"),
    no_chunk_size_but_an_extension=_chunks(b";x\r\n\r\n"),
    a_chunk_size_that_ends_with_LF=_chunks(IN_CHUNKS.replace(b"\r\n", b"\n", 1)),
    a_chunk_size_that_ends_with_CR=_chunks(IN_CHUNKS.replace(b"\r\n", b"\r", 1)),
    chunks_with_LF_only=_chunks(IN_CHUNKS.replace(b"\r\n", b"\n")),
    an_extension_with_a_bare_LF=_chunks(b"5;x\ny\r\nhello\r\n0\r\n\r\n"),
    an_extension_with_a_bare_CR=_chunks(b"5;x\ry\r\nhello\r\n0\r\n\r\n"),
    an_extension_with_a_NUL=_chunks(b"5;x\x00\r\nhello\r\n0\r\n\r\n"),
    an_extension_without_end=_chunks(b"5;" + b"x" * 2000 + b"\r\nhello\r\n0\r\n\r\n"),
    a_chunk_longer_than_its_size=_chunks(b"2\r\nhello\r\n0\r\n\r\n"),
    a_chunk_shorter_than_its_size=_chunks(b"8\r\nhello\r\n0\r\n\r\n"),
    a_chunk_that_ends_with_LF=_chunks(b"5\r\nhello\n0\r\n\r\n"),
    a_chunk_that_ends_with_CR=_chunks(b"5\r\nhello\r0\r\n\r\n"),
    a_chunk_without_a_line_end=_chunks(b"5\r\nhello0\r\n\r\n"),
    a_last_chunk_with_LF=_chunks(b"5\r\nhello\r\n0\n\n"),
    a_trailer_with_LF=_chunks(b"0\r\nA: b\n\r\n"),
    a_trailer_with_a_bare_CR=_chunks(b"0\r\nA: b\r\r\n\r\n"),
    a_trailer_with_a_NUL=_chunks(b"0\r\nA: \x00\r\n\r\n"),
    a_trailer_that_is_no_field=_chunks(b"0\r\n" + HIDDEN),
    a_trailer_that_is_folded=_chunks(b"0\r\nA: b\r\n c\r\n\r\n"),
    a_trailer_without_end=_chunks(b"0\r\n" + b"A: b\r\n" * 2000 + b"\r\n"),
)

CLEAR: Final = [
    *_served(
        chunks=_chunks(IN_CHUNKS),
        chunks_in_capitals=_post(b"TRANSFER-ENCODING:\tCHUNKED \r\n", body=IN_CHUNKS),
        chunk_sizes_with_zeros_in_front=_chunks(b"000" + IN_CHUNKS),
        chunks_with_extensions=_chunks(IN_CHUNKS.replace(b"\r\n", b';a="b;c";d\r\n', 1)),
        trailers_that_would_be_headers=_chunks(
            IN_CHUNKS[:-2] + b"Content-Length: 0\r\nAuthorization: Bearer x\r\nHost: evil\r\n\r\n"
        ),
        a_length_with_zeros_in_front=_post(b"Content-Length: 00%d\r\n" % len(BODY)),
        blank_lines_in_front=b"\r\n\r\n" + _post(SIZED),
        a_length_by_another_name=_post(SIZED, b"Content_Length: 0\r\nContent.Length: 0\r\n"),
        a_coding_by_another_name=_post(SIZED, b"Transfer_Encoding: chunked\r\nTE: chunked\r\n"),
        a_coding_in_a_value=_post(SIZED, b"X: y, Transfer-Encoding: chunked\r\n"),
        a_length_that_proxies_should_drop=_post(SIZED, b"Connection: content-length, host\r\n"),
        the_offer_of_HTTP_2=_post(
            SIZED, b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n"
        ),
        the_offer_of_a_websocket=_post(
            SIZED, b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        ),
        another_method_in_a_header=_post(SIZED, b"X-HTTP-Method-Override: DELETE\r\n"),
        another_path_in_a_header=_post(SIZED, b"X-Original-URL: /admin\r\nX-Rewrite-URL: /admin\r\n"),
        another_host_in_a_header=_post(SIZED, b"X-Forwarded-Host: evil\r\nForwarded: host=evil\r\n"),
        a_second_question_mark=_post(SIZED, line=LINE.replace(b" HTTP", b"?a=?b HTTP")),
    ),
    *_answered(
        400,
        "invalid_json",
        a_request_as_a_body=_post(b"Content-Length: %d\r\n" % len(HIDDEN), body=HIDDEN),
        a_request_as_a_chunk=_chunks(b"%x\r\n%b\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN)),
        chunks_as_a_body=_post(b"Content-Length: %d\r\n" % (5 + len(HIDDEN)), body=b"0\r\n\r\n" + HIDDEN),
    ),
    *_answered(
        200,
        None,
        a_request_in_the_body_of_a_GET=b"GET /livez HTTP/1.1\r\nHost: g\r\nContent-Length: %d\r\n\r\n%b"
        % (len(HIDDEN), HIDDEN),
        a_request_in_a_chunk_of_a_GET=b"GET /livez HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"%x\r\n%b\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN),
    ),
    *_answered(
        404,
        "unknown_route",
        an_absolute_target=_post(SIZED, line=LINE.replace(b"/v1", b"http://evil/v1")),
        a_target_without_a_slash=_post(SIZED, line=b"POST v1/chat/completions HTTP/1.1\r\n"),
        a_target_with_two_slashes=_post(SIZED, line=LINE.replace(b"/v1", b"//v1")),
        a_target_with_a_step_back=_post(SIZED, line=LINE.replace(b"/v1", b"/x/../v1")),
        a_target_with_coded_steps=_post(SIZED, line=LINE.replace(b"/v1", b"/%2e%2e/v1")),
        a_target_with_a_parameter=_post(SIZED, line=LINE.replace(b" HTTP", b";a=b HTTP")),
        a_target_with_a_fragment=_post(SIZED, line=LINE.replace(b" HTTP", b"#a HTTP")),
        a_star=_post(SIZED, line=b"POST * HTTP/1.1\r\n"),
        a_tunnel=_post(SIZED, line=b"CONNECT g:443 HTTP/1.1\r\n"),
    ),
    *_answered(
        405,
        "method_not_allowed",
        a_method_in_small_letters=_post(SIZED, line=LINE.replace(b"POST", b"post")),
        a_method_of_another_kind=_post(SIZED, line=LINE.replace(b"POST", b"TRACE")),
    ),
    *_answered(
        404,
        "unknown_route",
        False,
        a_length_of_which_nothing_comes=_post(
            b"Content-Length: 99999999\r\n", line=b"POST /x HTTP/1.1\r\n", body=HIDDEN
        ),
        a_body_that_nobody_asked_for=_post(
            SIZED, b"Expect: 100-continue\r\n", line=b"POST /x HTTP/1.1\r\n", body=HIDDEN
        ),
        broken_chunks_that_nobody_reads=_post(
            CHUNKED, line=b"POST /x HTTP/1.1\r\n", body=b"5\r\nhelloX\r\n0\r\n\r\n" + HIDDEN
        ),
    ),
]

CASES: Final = (*LENGTHS, *CODINGS, *FIELDS, *LINES, *BODIES, *CLEAR)
