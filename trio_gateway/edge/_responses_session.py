"""One socket of OpenAI's Responses: lanes, in each of which one response follows the other."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Final

import trio

from ..contract import RESPONSES
from ..errors import Problem
from ..tenancy import Caller
from ..wire import ENVELOPE, LaneRequest, LaneWriter, NoRequest, read_lane_request
from ._generate import Asked, new_id
from ._problems import error_object, problem_headers
from ._response_stream import ResponseStream
from ._socket_streams import SocketStreams, StreamRun
from ._websocket import WebSocket


class ResponsesSession:
    """The client's side of one socket.

    Args:
        max_streams: lanes that are at work at a time, and requests that wait behind others.
        asked: what the handshake says for all requests.
    """

    def __init__(self, max_streams: int, streams: SocketStreams, caller: Caller, asked: Asked) -> None:
        self.caller: Caller | None = caller
        self._tenant_caller: Final = caller
        self._max_streams = max_streams
        self._streams = streams
        # Engines keep responses, the gateway none: a turn that names the last one had better get there.
        self._asked = dataclasses.replace(asked, content_type=b"", envelope=ENVELOPE, home=new_id())
        self._lanes: dict[str | None, deque[_Turn]] = {}
        self._socket: WebSocket | None = None

    def serve(self, socket: WebSocket) -> None:
        """Name the socket whose messages will be heard."""
        self._socket = socket

    @property
    def running(self) -> int:
        """How many responses are under way or wait for their turn."""
        return sum(map(len, self._lanes.values()))

    def hear(self, text: str) -> None:
        """Take one message."""
        socket = self._socket
        assert socket is not None
        message = text.encode()
        try:
            request = read_lane_request(message)
        except NoRequest as none:
            _say_error(socket, none.lane, none.problem)
            return
        problem = self._no_room(request.lane)
        if problem is None:
            self._create(socket, request, message)
        else:
            self._streams.turn_away(problem)
            _say_error(socket, request.lane, problem)

    def going_away(self, seconds: float) -> bytes | None:
        """See Session. There is no such message; what waits for its turn is refused when that comes."""
        return None

    def end(self) -> None:
        """The socket is over; its responses know that already."""
        self._socket = None
        for lane in self._lanes.values():
            for turn in lane:
                if turn.run is not None:
                    turn.run.leave()
        self._lanes.clear()

    def _no_room(self, lane: str | None) -> Problem | None:
        most = self._max_streams
        if lane not in self._lanes:
            if len(self._lanes) < most:
                return None
            return Problem.of("websocket_stream_limit_reached", f"{most} lanes of this socket are at work")
        if self.running - len(self._lanes) < most:
            return None
        return Problem.of("queue_full", f"{most} requests of this socket wait behind others of their lanes")

    def _create(self, socket: WebSocket, request: LaneRequest, message: bytes) -> None:
        name = request.lane
        lane = self._lanes.setdefault(name, deque())
        turn = _Turn()
        event = trio.Event() if lane else None
        lane.append(turn)
        stream = ResponseStream(name, socket, lambda: self._next(name))
        turn.run = self._streams.start(
            stream, self._asked, message, RESPONSES, self._tenant_caller, turn=event, problem=request.problem
        )

    def _next(self, name: str | None) -> None:
        """A response is over: the next of its lane has its turn."""
        lane = self._lanes.get(name)
        if lane is None:
            return
        lane.popleft()
        if not lane:
            del self._lanes[name]
        elif (run := lane[0].run) is not None:
            if self._socket is not None and self._socket.open:
                run.take_turn()
            else:
                run.leave()


@dataclasses.dataclass(slots=True)
class _Turn:
    """A place in a lane. ``run`` is there as soon as it was begun."""

    run: StreamRun | None = None


def _say_error(socket: WebSocket, lane: str | None, problem: Problem) -> None:
    message = LaneWriter(lane).error(problem.status, error_object(problem, None), problem_headers(problem))
    socket.say(message)
