"""One request: its scope, its attempts, its delivery, its retries, its ending."""

from ._attempt import AttemptLimits, AttemptParts
from ._clock import ExchangeClocks
from ._delivery import DeliveryLimits
from ._endings import OPERATOR, OWNER, SHUT_DOWN
from ._exchange import Exchange, ExchangeLimits, Parts, admit, exchange_of
from ._flight import Flight, Step
from ._flight_file import FLIGHT_VERSION, flight_file
from ._live import LiveExchanges, Standing
from ._retry import RetryBudget

__all__ = [
    "FLIGHT_VERSION",
    "OPERATOR",
    "OWNER",
    "SHUT_DOWN",
    "AttemptLimits",
    "AttemptParts",
    "DeliveryLimits",
    "Exchange",
    "ExchangeClocks",
    "ExchangeLimits",
    "Flight",
    "LiveExchanges",
    "Parts",
    "RetryBudget",
    "Standing",
    "Step",
    "admit",
    "exchange_of",
    "flight_file",
]
