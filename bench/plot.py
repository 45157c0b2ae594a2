"""Charts as SVG without a plotting package: a few lines over a doubling or an even axis, and bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 720
HEIGHT: Final = 420
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 48, 52  # margins; the names of the lines stand on the right
BAR_LEFT, BAR_STEP = 130, 30  # where bars begin, and from one to the next
COLOURS: Final = ("#8c8c8c", "#b8860b", "#c0392b", "#1f6fb2", "#2e8b57")


@dataclass(frozen=True)
class Line:
    """One named line through its points; the first coordinate is above 0 if its axis is logarithmic."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """Lines over a first axis, logarithmic if it is not ``linear``, and a linear second; a dashed limit."""

    title: str
    x_name: str
    y_name: str
    lines: Sequence[Line]
    limit: float
    linear: bool = False

    def svg(self) -> str:
        """Answer the picture as text."""
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
            f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            _text(LEFT, 26, self.title, size=16),
            _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, self.x_name, anchor="middle"),
            _text(LEFT - 50, TOP - 8, self.y_name),
            *self._axes(),
            *self._drawn(),
            "</svg>",
        ]
        return "\n".join(parts) + "\n"

    def _range(self) -> tuple[float, float]:
        values = [y for line in self.lines for _, y in line.points] + [self.limit, 1.0]
        return math.floor(min(values) * 10) / 10, math.ceil(max(values) * 10) / 10

    def _x(self, value: float) -> float:
        xs = [x for line in self.lines for x, _ in line.points]
        scale = float if self.linear else math.log
        low, high = scale(min(xs)), scale(max(xs))
        return LEFT + (scale(value) - low) / (high - low or 1) * (WIDTH - LEFT - RIGHT)

    def _y(self, value: float) -> float:
        low, high = self._range()
        return HEIGHT - BOTTOM - (value - low) / (high - low or 1) * (HEIGHT - TOP - BOTTOM)

    def _axes(self) -> list[str]:
        low, high = self._range()
        parts = []
        for tenth in range(round(low * 10), round(high * 10) + 1):
            y = self._y(tenth / 10)
            parts.append(_stroke(LEFT, y, WIDTH - RIGHT, y, "#e4e4e4"))
            parts.append(_text(LEFT - 8, y + 4, f"{tenth / 10:.1f}", anchor="end"))
        marks = sorted({x for line in self.lines for x, _ in line.points if not self.linear or x % 1 == 0})
        parts += [_text(self._x(x), HEIGHT - BOTTOM + 20, f"{x:g}", anchor="middle") for x in marks]
        limit = self._y(self.limit)
        parts.append(_stroke(LEFT, limit, WIDTH - RIGHT, limit, "#444", dashed=True))
        return parts

    def _drawn(self) -> list[str]:
        parts = []
        for line, colour in zip(self.lines, COLOURS, strict=False):
            points = " ".join(f"{self._x(x):.1f},{self._y(y):.1f}" for x, y in line.points)
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
            x, y = line.points[-1]
            parts.append(_text(self._x(x) + 8, self._y(y) + 4, line.name, colour=colour))
        return parts


@dataclass(frozen=True)
class Bar:
    """A named bar as long as its value, with a stroke from the first to the third quartile."""

    name: str
    low: float
    value: float
    high: float
    ours: bool = False


@dataclass(frozen=True)
class BarChart:
    """Bars from zero, one below the other, with their values behind them."""

    title: str
    unit: str
    bars: Sequence[Bar]

    def svg(self) -> str:
        """Answer the picture as text."""
        height = TOP + len(self.bars) * BAR_STEP + 12
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13">',
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
            _text(BAR_LEFT, 26, f"{self.title}, {self.unit}", size=16),
        ]
        for place, bar in enumerate(self.bars):
            parts += self._bar(bar, TOP + place * BAR_STEP)
        return "\n".join([*parts, "</svg>"]) + "\n"

    def _bar(self, bar: Bar, y: float) -> list[str]:
        most = max(max(bar.value, bar.high) for bar in self.bars) or 1
        scale = (WIDTH - BAR_LEFT - 90) / most
        middle = y + BAR_STEP / 2 - 4
        colour = COLOURS[3] if bar.ours else COLOURS[0]
        return [
            _text(BAR_LEFT - 10, middle + 5, bar.name, anchor="end"),
            f'<rect x="{BAR_LEFT}" y="{y:.1f}" width="{bar.value * scale:.1f}" height="{BAR_STEP - 8}" '
            f'fill="{colour}"/>',
            _stroke(BAR_LEFT + bar.low * scale, middle, BAR_LEFT + bar.high * scale, middle, "#222"),
            _text(BAR_LEFT + max(bar.value, bar.high) * scale + 8, middle + 5, f"{bar.value:.3g}"),
        ]


def _text(
    x: float, y: float, text: str, *, size: int = 13, anchor: str = "start", colour: str = "#222"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">'
        f"{escape(text)}</text>"
    )


def _stroke(x1: float, y1: float, x2: float, y2: float, colour: str, *, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="6 4"' if dashed else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dash}/>'
