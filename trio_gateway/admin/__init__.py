"""The operators' door and the agents': each an application on a listener of its own."""

from ._app import make_app
from ._server import serve_admin
from ._workers import make_internal_app

__all__ = ["make_app", "make_internal_app", "serve_admin"]
