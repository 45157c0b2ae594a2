"""One request: its scope, its lease, its pump, its delivery, its retries."""

from ._endings import SHUT_DOWN
from ._exchange import Exchange, ExchangeLimits, Parts
from ._live import LiveExchanges
from ._retry import RetryBudget

__all__ = ["SHUT_DOWN", "Exchange", "ExchangeLimits", "LiveExchanges", "Parts", "RetryBudget"]
