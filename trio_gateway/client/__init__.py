"""The Python client of ``trio-gateway.tokens.v1``: acknowledgements, credit and resume without further ado.

    async with open_tokens("ws://127.0.0.1:8080", key="tg_...") as tokens:
        async with tokens.generate({"model": "m", "messages": [...]}, resumable=True) as stream:
            async for delta in stream:
                print(delta.text, end="")

What is known of one stream is decided in `_state`, and when to come back in `_reconnect`, both without Trio;
`_socket` has trio-websocket, `_tokens` the tasks.
"""

from ._errors import SocketLost, SocketRejected, StreamCancelled, StreamFailed, TokensError
from ._messages import Delivery, Delta
from ._stream import TokenStream
from ._tokens import Tokens, open_tokens

__all__ = [
    "Delivery",
    "Delta",
    "SocketLost",
    "SocketRejected",
    "StreamCancelled",
    "StreamFailed",
    "TokenStream",
    "Tokens",
    "TokensError",
    "open_tokens",
]
