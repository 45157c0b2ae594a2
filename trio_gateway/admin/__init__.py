"""The operators' door and the agents': each an application on a listener of its own."""

from ._access import Access, AdminToken
from ._app import Metrics, Page, make_admin_app
from ._dashboard import DASHBOARD_PAGES, dashboard_page
from ._openapi import document as openapi_document
from ._port import (
    ADMIN_CODES,
    LOCAL,
    MOST_ROWS,
    Action,
    Actor,
    ActResult,
    AdminPort,
    RequestFilter,
    Role,
    Row,
    Soon,
    answered,
    refusal,
)
from ._routes import ACTS, METRICS, PREFIX, READS, Act, Read
from ._schema import complaints
from ._server import serve_admin
from ._shapes import SHAPES
from ._workers import BODY_LIMIT as WORKER_BODY_LIMIT
from ._workers import MOST_BYTES as MOST_WORKER_BYTES
from ._workers import bearer as bearer_of_worker
from ._workers import make_internal_app

__all__ = [
    "ACTS",
    "ADMIN_CODES",
    "DASHBOARD_PAGES",
    "LOCAL",
    "METRICS",
    "MOST_ROWS",
    "MOST_WORKER_BYTES",
    "PREFIX",
    "READS",
    "SHAPES",
    "WORKER_BODY_LIMIT",
    "Access",
    "Act",
    "ActResult",
    "Action",
    "Actor",
    "AdminPort",
    "AdminToken",
    "Metrics",
    "Page",
    "Read",
    "RequestFilter",
    "Role",
    "Row",
    "Soon",
    "answered",
    "bearer_of_worker",
    "complaints",
    "dashboard_page",
    "make_admin_app",
    "make_internal_app",
    "openapi_document",
    "refusal",
    "serve_admin",
]
