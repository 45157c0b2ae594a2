"""Words that the rooms share: the request, its ending, and the ports between rooms.

Data and protocols only; nothing here waits, reads a clock or touches a socket.
"""

from ._outcome import Ending, Outcome, Phase
from ._ports import (
    AdmissionPort,
    AnswerHead,
    ClientPort,
    EngineAnswer,
    EnginePort,
    FleetPort,
    LeasePort,
    TicketPort,
)
from ._request import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    DETOKENIZE,
    EMBEDDINGS,
    MESSAGES,
    OPERATIONS,
    RERANK,
    RESPONSES,
    SCORE,
    TOKENIZE,
    TRANSCRIPTIONS,
    Form,
    InternalRequest,
    Operation,
    RawJson,
    Style,
)
from ._worker import Dialect, Rejection, Worker, WorkerStatus

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "COUNT_TOKENS",
    "DETOKENIZE",
    "EMBEDDINGS",
    "MESSAGES",
    "OPERATIONS",
    "RERANK",
    "RESPONSES",
    "SCORE",
    "TOKENIZE",
    "TRANSCRIPTIONS",
    "AdmissionPort",
    "AnswerHead",
    "ClientPort",
    "Dialect",
    "Ending",
    "EngineAnswer",
    "EnginePort",
    "FleetPort",
    "Form",
    "InternalRequest",
    "LeasePort",
    "Operation",
    "Outcome",
    "Phase",
    "RawJson",
    "Rejection",
    "Style",
    "TicketPort",
    "Worker",
    "WorkerStatus",
]
