"""Fakes that the package ships, shared by its tests and benches.

* `ScriptedEngine` plays an engine: real sockets, scripted answers, records.
* `RawClient` plays clients: they stall, trickle, half-close and leave.
* `RecordingClient`, `FakeEngine` and `WorkerSet` play all that an exchange meets without
  a socket, so that its clock can be a fake one.
* `FakeAdminPort` plays a process that operators look at and steer.
* `LocalEngine` is no fake: llama.cpp with a small model, as a child process.

Modules in the order of reading::

    _steps              the vocabulary of scripts
    _answers            scripts of OpenAI-compatible answers
    _ollama             scripts of Ollama's, and an engine that behaves like it
    _agent              scripts of agents' answers
    _engine             the server, over _engine_connection
    _client             the client, over _client_answers and _event_stream
    _messages           strict HTTP/1.1 reading, for both sides
    _ports, _tls        bad addresses, certificates
    _kubernetes         the API that tells of pods
    _fake_client        the ports of an exchange, over no socket:
    _fake_engine        clients, engines, and what tells that one said something:
    _fake_poller        a poller,
    _worker_set         and the workers of one process
    _admin_port         the process behind the operators' door
    _recorded, _played  what an operator recorded of an exchange, as scripts,
    _replay             and a real exchange that plays it once more
    _conditions, _until waiting without polling
    _llama              the real engine
"""

from ._admin_port import FakeAdminPort as FakeAdminPort
from ._admin_port import ending_row as ending_row
from ._admin_port import request_row as request_row
from ._admin_port import worker_row as worker_row
from ._agent import AGENT_HEAD as AGENT_HEAD
from ._agent import agent_failure as agent_failure
from ._agent import agent_record as agent_record
from ._agent import agent_rejection as agent_rejection
from ._agent import agent_report as agent_report
from ._agent import agent_result as agent_result
from ._agent import agent_stream as agent_stream
from ._answers import DONE as DONE
from ._answers import Usage as Usage
from ._answers import chat_answer as chat_answer
from ._answers import chat_chunk as chat_chunk
from ._answers import chat_stream as chat_stream
from ._answers import completion_answer as completion_answer
from ._answers import completion_stream as completion_stream
from ._answers import embedding_answer as embedding_answer
from ._answers import error_answer as error_answer
from ._answers import error_body as error_body
from ._answers import error_event as error_event
from ._client import Address as Address
from ._client import RawClient as RawClient
from ._client_answers import Answer as Answer
from ._client_answers import AnswerReader as AnswerReader
from ._client_answers import chat_request as chat_request
from ._client_answers import http_request as http_request
from ._client_answers import json_request as json_request
from ._conditions import Condition as Condition
from ._engine import EngineStatistics as EngineStatistics
from ._engine import ScriptedEngine as ScriptedEngine
from ._engine import Scripting as Scripting
from ._engine import good_answer as good_answer
from ._engine import open_engine as open_engine
from ._engine_connection import EngineRequest as EngineRequest
from ._event_stream import ChatReading as ChatReading
from ._event_stream import EventStreamReader as EventStreamReader
from ._event_stream import StreamEvent as StreamEvent
from ._event_stream import read_chat_stream as read_chat_stream
from ._fake_client import RecordingClient as RecordingClient
from ._fake_engine import FakeAttempt as FakeAttempt
from ._fake_engine import FakeEngine as FakeEngine
from ._fake_engine import FakeScript as FakeScript
from ._fake_engine import FakeScripting as FakeScripting
from ._fake_engine import plain_answer as plain_answer
from ._fake_engine import unreachable as unreachable
from ._fake_poller import FakePoller as FakePoller
from ._kubernetes import KubernetesServer as KubernetesServer
from ._kubernetes import make_pod as make_pod
from ._kubernetes import open_kubernetes as open_kubernetes
from ._llama import MODEL_NAME as MODEL_NAME
from ._llama import MODEL_TITLE as MODEL_TITLE
from ._llama import LocalEngine as LocalEngine
from ._llama import LocalEngineError as LocalEngineError
from ._llama import engine_command as engine_command
from ._llama import missing_parts as missing_parts
from ._llama import model_file as model_file
from ._llama import read_announcement as read_announcement
from ._messages import BodyReader as BodyReader
from ._messages import MessageError as MessageError
from ._messages import body_framing as body_framing
from ._messages import parse_head as parse_head
from ._ollama import NDJSON_HEADERS as NDJSON_HEADERS
from ._ollama import ScriptedOllama as ScriptedOllama
from ._ollama import encode_record as encode_record
from ._ollama import ollama_error as ollama_error
from ._ollama import ollama_record as ollama_record
from ._ollama import ollama_stream as ollama_stream
from ._ports import refusing_port as refusing_port
from ._ports import silent_port as silent_port
from ._recorded import Recorded as Recorded
from ._recorded import UnreadableFlight as UnreadableFlight
from ._replay import Replayed as Replayed
from ._replay import replay as replay
from ._replay import replay_at_once as replay_at_once
from ._steps import SSE_HEADERS as SSE_HEADERS
from ._steps import Chunk as Chunk
from ._steps import CloseFin as CloseFin
from ._steps import CloseReset as CloseReset
from ._steps import EndChunks as EndChunks
from ._steps import Event as Event
from ._steps import Head as Head
from ._steps import Headers as Headers
from ._steps import Hold as Hold
from ._steps import Json as Json
from ._steps import Raw as Raw
from ._steps import ReadOnly as ReadOnly
from ._steps import Repeat as Repeat
from ._steps import Script as Script
from ._steps import Step as Step
from ._steps import Wait as Wait
from ._steps import WaitFor as WaitFor
from ._tls import Certificate as Certificate
from ._tls import make_certificate as make_certificate
from ._until import until as until
from ._worker_set import WorkerSet as WorkerSet
from ._worker_set import make_request as make_request
from ._worker_set import make_worker as make_worker
