"""The admin application."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route


def make_app(
    statistics: Callable[[], dict[str, Any]],
    render_metrics: Callable[[dict[str, Any]], bytes],
    metrics_type: str,
) -> Starlette:
    """Build the application.

    Args:
        statistics: answers the figures of one moment.
        render_metrics: writes them for Prometheus, as ``metrics_type``; runs in a thread.
    """

    # Starlette would run plain functions in threads of another event loop.
    async def livez(request: Request) -> Response:  # noqa: ASYNC124
        return _json({"status": "ok"})

    async def read_statistics(request: Request) -> Response:  # noqa: ASYNC124
        return _json(statistics())

    async def metrics(request: Request) -> Response:
        figures = statistics()
        page = await trio.to_thread.run_sync(render_metrics, figures, abandon_on_cancel=True)
        return Response(page, headers={"content-type": metrics_type})

    return Starlette(
        routes=[
            Route("/livez", livez),
            Route("/admin/v1/statistics", read_statistics),
            Route("/metrics", metrics),
        ]
    )


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value, enc_hook=str), media_type="application/json")
