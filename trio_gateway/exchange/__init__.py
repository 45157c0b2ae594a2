"""One request: its scope, its attempts, its delivery, its retries, its ending."""

from ._attempt import AttemptLimits, AttemptParts
from ._delivery import DeliveryLimits
from ._endings import OWNER, SHUT_DOWN
from ._exchange import Exchange, ExchangeLimits, Parts, admit
from ._live import LiveExchanges, Standing
from ._retry import RetryBudget

__all__ = [
    "OWNER",
    "SHUT_DOWN",
    "AttemptLimits",
    "AttemptParts",
    "DeliveryLimits",
    "Exchange",
    "ExchangeLimits",
    "LiveExchanges",
    "Parts",
    "RetryBudget",
    "Standing",
    "admit",
]
