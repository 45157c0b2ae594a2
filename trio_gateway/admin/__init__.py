"""The operators' door: statistics and metrics, on a listener of its own."""

from ._app import make_app
from ._server import serve_admin

__all__ = ["make_app", "serve_admin"]
