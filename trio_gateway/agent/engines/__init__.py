"""Engines that an agent can stand beside; see `trio_gateway.agent._engine` for the port."""

from ._choose import ENGINES, EngineOptions, make_engine, names, read_secret
from ._llamacpp import EngineEnded, LlamaCppEngine
from ._openai import OpenAIEngine
from ._simulated_engine import SimulatedEngine, Sink
from ._simulated_faults import Fault, PlannedFault
from ._simulated_generation import Generation, Limits, Output, Refusal, Speed
from ._simulated_http import SimulatedServer
from ._simulated_process import SimulatedSettings, serve_simulated

__all__ = [
    "ENGINES",
    "EngineEnded",
    "EngineOptions",
    "Fault",
    "Generation",
    "Limits",
    "LlamaCppEngine",
    "OpenAIEngine",
    "Output",
    "PlannedFault",
    "Refusal",
    "SimulatedEngine",
    "SimulatedServer",
    "SimulatedSettings",
    "Sink",
    "Speed",
    "make_engine",
    "names",
    "read_secret",
    "serve_simulated",
]
