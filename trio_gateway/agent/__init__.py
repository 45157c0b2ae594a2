"""The agent: a process beside an engine, which registers it, guards its slots and speaks to gateways."""

from ._agent import Agent, HowEnded
from ._engine import AgentEngine, EngineStatus, EngineStream, Rejected, Released, Work
from ._settings import AgentSettings

__all__ = [
    "Agent",
    "AgentEngine",
    "AgentSettings",
    "EngineStatus",
    "EngineStream",
    "HowEnded",
    "Rejected",
    "Released",
    "Work",
]
