"""An LLM inference gateway in which every request owns what it uses.

One request with its one answer is an *exchange*: a single Trio nursery that owns the worker's slot, the
engine's stream and the client's writer. However it ends (answer complete, client gone, deadline, engine
dead, shutdown), that one scope closes all three, and exactly one record says what happened.

The rooms of this package follow a request in order; ``docs/reading-order.md`` walks through them. Most
people want the command ``trio-gateway`` (`trio_gateway.cli`); a program that embeds the gateway starts at
`trio_gateway.gateway`.
"""

__version__ = "0.1.0.dev0"
