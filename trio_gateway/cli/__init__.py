"""The commands: serve, worker, check-config, keys, tenants, admin, top, usage, demo, simulate."""

from ._app import SUPERSEDED, app, main
from ._common import CANNOT_START, DEFAULT_FILE, USAGE_ERROR

__all__ = ["CANNOT_START", "DEFAULT_FILE", "SUPERSEDED", "USAGE_ERROR", "app", "main"]
