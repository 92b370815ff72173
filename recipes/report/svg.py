"""Charts as inline SVG. Colour number i is the class ``s<i>`` of the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 12, 10, 26  # on the left, labels as long as 1.5e-07
_BAR, _GAP, _LABEL = 16, 10, 18
_CHARACTER = 7.4
"""Approximate width of a character of a label in the page's font."""
_SIDE_FROM = 700
"""Charts wider than this have labels next to their bars, others above them."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of length `size` at `start`, or where the bar before it ends; `text` describes it."""

    colour: int
    size: float
    text: str
    start: float | None = None


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of length `size` from `first`. `label` is the text of the last number."""

    size: float
    label: str
    first: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """The bars of one line."""

    name: str
    bars: Sequence[Bar]


def line(
    title: str, points: Sequence[tuple[int, float]], width: int, y_max: float, target: float = 0.0
) -> Markup:
    """Draw a line through `points`, and a dashed one at `target` unless 0."""
    height = 220
    xs = [x for x, _ in points]
    x_min, x_max = min(xs), max(max(xs), min(xs) + 1)
    scale_x = (width - _LEFT - _RIGHT) / (x_max - x_min)
    scale_y = (height - _TOP - _BOTTOM) / (y_max or 1)

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + (x - x_min) * scale_x, height - _BOTTOM - y * scale_y

    parts = _grid(width, height, y_max)
    ticks = _ticks(x_min, x_max, width // 90)
    parts += [
        _x_label(place(x, 0)[0], height, f"step {x:g}" if x == ticks[-1] else f"{x:g}", width) for x in ticks
    ]
    if target:
        (x, y), (end, _) = place(x_min, target), place(x_max, target)
        parts.append(_tag("line", {"class": "target", "x1": x, "x2": end, "y1": y, "y2": y}))
    parts.append(_tag("path", {"class": "line s0", "d": _path([place(x, y) for x, y in points])}))
    return _svg(title, width, height, parts)


def columns(title: str, stacks: Sequence[tuple[str, Sequence[Bar]]], width: int, y_max: float) -> Markup:
    """Draw a labelled column of bars for each of `stacks`."""
    height = 220
    each = (width - _LEFT - _RIGHT) / max(len(stacks), 1)
    scale = (height - _TOP - _BOTTOM) / (y_max or 1)
    parts = _grid(width, height, y_max)
    every = -(-len(stacks) // max(width // 60, 1))
    for number, (label, bars) in enumerate(stacks):
        x = _LEFT + number * each
        for start, bar in _placed(bars):
            y = height - _BOTTOM - (start + bar.size) * scale
            parts.append(_rectangle(bar, x + each * 0.1, y, each * 0.8, bar.size * scale))
        if number % every == 0:
            parts.append(_x_label(x + each / 2, height, label, width))
    return _svg(title, width, height, parts)


def lanes(title: str, rows: Sequence[Row], width: int, axis: Axis) -> Markup:
    """Draw a line of bars for each of `rows`."""
    side = width >= _SIDE_FROM
    left = 190 if side else 2
    scale = (width - left - _RIGHT) / axis.size
    pitch = _BAR + _GAP + (0 if side else _LABEL)
    height = _TOP + pitch * len(rows) + _BOTTOM
    parts: list[Markup] = []
    ticks = _ticks(axis.first, axis.first + axis.size, int(axis.size * scale) // 80)
    for tick in ticks:
        x = left + (tick - axis.first) * scale
        parts.append(_tag("line", {"class": "grid", "x1": x, "x2": x, "y1": _TOP, "y2": height - _BOTTOM}))
        label = axis.label if tick == ticks[-1] else "{:g}"
        parts.append(_x_label(x, height, label.format(tick), width))
    for number, row in enumerate(rows):
        y = _TOP + number * pitch + (0 if side else _LABEL)
        name = _fit(row.name, left - 16 if side else width)
        at = {"x": left - 10, "y": y + 12, "text-anchor": "end"} if side else {"x": left, "y": y - 5}
        parts.append(_tag("text", at, _tag("title", {}, row.name), name))
        for start, bar in _placed(row.bars):
            parts.append(_rectangle(bar, left + start * scale, y, max(bar.size * scale, 1.5), _BAR))
    return _svg(title, width, height, parts)


def _placed(bars: Sequence[Bar]) -> Iterator[tuple[float, Bar]]:
    end = 0.0
    for bar in bars:
        start = end if bar.start is None else bar.start
        yield start, bar
        end = start + bar.size


def _svg(title: str, width: int, height: int, parts: Sequence[Markup]) -> Markup:
    size = {"viewBox": f"0 0 {width} {height}", "width": width, "height": height}
    return _tag("svg", {"role": "img", "aria-label": title, **size}, _tag("title", {}, title), *parts)


def _grid(width: int, height: int, y_max: float) -> list[Markup]:
    """Draw horizontal lines with their values."""
    parts = []
    for y in _ticks(0, y_max, 4):
        at = height - _BOTTOM - y / (y_max or 1) * (height - _TOP - _BOTTOM)
        parts.append(_tag("line", {"class": "grid", "x1": _LEFT, "x2": width - _RIGHT, "y1": at, "y2": at}))
        parts.append(_tag("text", {"x": _LEFT - 8, "y": at + 4, "text-anchor": "end"}, f"{y:g}"))
    return parts


def _x_label(x: float, height: int, text: str, width: int) -> Markup:
    half = len(text) * _CHARACTER / 2
    anchor = "start" if x < half else "end" if x > width - half else "middle"
    return _tag("text", {"x": x, "y": height - 8, "text-anchor": anchor}, text)


def _rectangle(bar: Bar, x: float, y: float, width: float, height: float) -> Markup:
    place = {"x": x, "y": y, "width": width, "height": max(height, 0.0), "rx": min(2.0, width / 3)}
    return _tag("rect", {"class": f"s{bar.colour}", **place}, _tag("title", {}, bar.text))


def _path(points: Sequence[tuple[float, float]]) -> str:
    texts = [f"{x:.1f} {y:.1f}" for x, y in points]
    return "M" + "L".join([*texts, texts[-1]])  # a single point is a dot


def _ticks(least: float, most: float, about: int) -> list[float]:
    """Return round numbers from `least` to `most`, about `about` of them."""
    rough = (most - least) / max(about, 1)
    if rough <= 0:
        return [least]
    power = 10.0 ** int(f"{rough:e}".partition("e")[2])
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = -(-least // step) * step
    return [round(first + number * step, 10) for number in range(int((most - first) / step + 1.0001))]


def _fit(text: str, width: float) -> str:
    most = max(int(width / _CHARACTER), 4)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _tag(name: str, attributes: Mapping[str, object], *inside: str) -> Markup:
    """Return an element with escaped texts and attributes."""
    pairs = Markup("").join(
        Markup(' {}="{}"').format(key, f"{value:.2f}" if isinstance(value, float) else value)
        for key, value in attributes.items()
    )
    content = Markup("").join(escape(part) for part in inside)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), pairs, content)
