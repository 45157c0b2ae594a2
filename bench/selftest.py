"""Does the load client see each way in which an answer can be wrong?

A bench whose client accepts a cut answer measures a proxy that cuts answers as fast.
Each case is served whole and byte by byte, so that every split of the framing is met.
And does the engine serve one paced answer after the other on a kept connection, those of one token too?

Run: ``.venv/bin/python -m bench.selftest`` (about a second; exit status 1 on a miss).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import sys
import threading
from typing import Final

from . import native, peers

TOKENS: Final = 3
HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END: Final = b"0\r\n\r\n"
FINISH: Final = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
USAGE: Final = b'data: {"choices":[],"usage":{"prompt_tokens":9}}\n\n'
ERROR: Final = b'data: {"error":{"message":"failed"}}\n\n'
DONE: Final = b"data: [DONE]\n\n"
PING: Final = b": keep-alive\n\n"


def token(index: int) -> bytes:
    """Answer one content event as the engine writes it."""
    return b'data: {"choices":[{"index":0,"delta":{"content":" t%08d"},"finish_reason":null}]}\n\n' % index


def chunks(*events: bytes) -> bytes:
    """Frame each event as one HTTP chunk."""
    return b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)


TOLD: Final = (token(0), token(1), token(2))
WHOLE: Final = HEAD + chunks(*TOLD, FINISH, DONE)

# What is served, and what the client must say of it; None: a good answer.
CASES: Final[dict[str, tuple[bytes, str | None]]] = {
    "whole": (WHOLE + END, None),
    "after an interim answer": (b"HTTP/1.1 100 Continue\r\n\r\n" + WHOLE + END, None),
    "with a heartbeat": (HEAD + chunks(PING, *TOLD, FINISH, DONE) + END, None),
    "all events in one chunk": (HEAD + chunks(b"".join((*TOLD, FINISH, DONE))) + END, None),
    "no last chunk": (WHOLE, "cut"),
    "cut in an event": (HEAD + chunks(*TOLD)[:100], "cut"),
    "no [DONE]": (HEAD + chunks(*TOLD, FINISH) + END, "not one [DONE]"),
    "torn [DONE]": (HEAD + chunks(*TOLD, FINISH, DONE[:-1]) + END, "not one [DONE]"),
    "no finish": (HEAD + chunks(*TOLD, DONE) + END, "not one finish"),
    "a token twice": (HEAD + chunks(token(0), *TOLD[:2], FINISH, DONE) + END, "token out of order"),
    "a token missing": (HEAD + chunks(*TOLD[:2], FINISH, DONE) + END, "wrong number of tokens"),
    "[DONE] twice": (WHOLE + chunks(DONE) + END, "bytes after [DONE]"),
    "a token after [DONE]": (WHOLE + chunks(token(3)) + END, "bytes after [DONE]"),
    "usage nobody asked for": (HEAD + chunks(*TOLD, FINISH, USAGE, DONE) + END, "usage not as asked"),
    "an error event": (HEAD + chunks(token(0), ERROR) + END, "error event"),
    "a status": (b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\n\r\n{}", "status 503"),
    "no chunk size": (HEAD + b"zz\r\n", "bad framing"),
}


def said_of(answer: bytes, step: int) -> str | None:
    """Serve the answer in pieces of ``step`` bytes; return what the client found wrong with it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                client.recv(65536)
                for at in range(0, len(answer), step):
                    client.sendall(answer[at : at + step])
                client.shutdown(socket.SHUT_WR)
                client.recv(1)

        server = threading.Thread(target=serve)
        server.start()
        found = native.load("stream", listener.getsockname()[1], tokens=TOKENS, limit_s=10)
        server.join()
    return next(iter(found["broken"]), None)


def engine_serves(*connections: tuple[int, ...]) -> bool:
    """Ask the engine for paced streams of so many tokens on kept connections; answer whether all came."""
    with peers.engine(limit_s=10) as engine, contextlib.ExitStack() as stack:
        for lengths in connections:
            connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=5)
            stack.callback(connection.close)
            for tokens in lengths:
                asked = {"stream": True, "bench_tokens": tokens, "bench_pace_us": 20_000}
                try:
                    connection.request("POST", "/v1/chat/completions", json.dumps(asked))
                    told = connection.getresponse().read()
                except (OSError, http.client.HTTPException):
                    return False
                if told.count(b'"content":" t') != tokens:
                    return False
    return True


def main() -> int:
    """Serve every case; answer the exit status."""
    missed = 0
    if not engine_serves((1, 3), (3,)):
        missed += 1
        print("the engine did not serve all answers")
    for name, (answer, expected) in CASES.items():
        for step in (len(answer), 1):
            said = said_of(answer, step)
            if said != expected:
                missed += 1
                print(f"{name}, {step} bytes at a time: said {said!r}, should say {expected!r}")
    print(f"{2 * len(CASES)} answers and an engine, {missed} misjudged")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
