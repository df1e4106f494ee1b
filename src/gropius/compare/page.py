"""A comparison as one HTML page that opens offline: curves with bands, the table, the sentences. No script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from gropius.compare.curves import Curve
from gropius.compare.verdict import Comparison, quantile

WIDTH, HEIGHT, LEFT, BOTTOM = 720, 320, 44, 28
COLOURS = ("#0b62a4", "#c2410c", "#15803d", "#7c3aed", "#b91c1c", "#0e7490", "#a16207", "#334155")
POINTS = 40
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:820px;margin:32px auto;padding:0 16px}"
    "table{border-collapse:collapse}td,th{padding:4px 12px;text-align:right;border-bottom:1px solid #ddd}"
    "td:first-child,th:first-child{text-align:left}svg{width:100%;height:auto}"
)


def page(found: Comparison, curves: Mapping[str, Sequence[Curve]], command: str) -> str:
    """The page. command: what made it, for a reader who wants to repeat it."""
    rows = "".join(
        f"<tr><td>{escape(s.name)}</td><td>{s.mean:.3f}</td><td>{_pair(s.low, s.high)}</td><td>{s.gain:+.3f}</td>"
        f"<td>{s.steps:.0f}</td></tr>"
        for s in found.standings
    )
    sentences = "".join(f"<li>{escape(d.sentence(len(found.seeds)))}</li>" for d in found.differences)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Comparison</title><style>{STYLE}</style>'
        f"<h1>Held-out at equal sampled tokens</h1><p>{len(found.seeds)} seeds ({', '.join(map(str, found.seeds))}), "
        f"compared after {found.budget:,} sampled tokens. Bands and intervals are 95 %, over seeds.</p>"
        f"{chart(curves, found.budget)}"
        "<table><tr><th>recipe</th><th>held-out</th><th>95 %</th><th>gain</th><th>steps</th></tr>"
        f"{rows}</table><h2>Differences</h2><ul>{sentences}</ul><p><code>{escape(command)}</code></p></html>\n"
    )


def chart(curves: Mapping[str, Sequence[Curve]], budget: int) -> str:
    """Mean held-out curve of each recipe, with its band over seeds where there are two or more, as SVG."""
    grid = np.linspace(0, budget, POINTS)
    drawn, legend = [], []
    for i, (name, own) in enumerate(curves.items()):
        colour = COLOURS[i % len(COLOURS)]
        values = np.array([[c.at(x) for x in grid] for c in own])
        mean = values.mean(axis=0)
        if len(own) > 1:
            half = quantile(len(own) - 1) * values.std(axis=0, ddof=1) / len(own) ** 0.5
            outline = [*_points(grid, mean + half, budget), *_points(grid, mean - half, budget)[::-1]]
            drawn.append(f'<polygon points="{" ".join(outline)}" fill="{colour}" opacity="0.12"/>')
        drawn.append(
            f'<polyline points="{" ".join(_points(grid, mean, budget))}" fill="none" stroke="{colour}" '
            f'stroke-width="2"><title>{escape(name)}</title></polyline>'
        )
        legend.append(f'<span style="color:{colour}">■</span> {escape(name)}')
    axes = "".join(
        f'<text x="{LEFT - 6}" y="{_y(v) + 4:.0f}" text-anchor="end" font-size="11">{v:.1f}</text>'
        f'<line x1="{LEFT}" x2="{WIDTH}" y1="{_y(v):.1f}" y2="{_y(v):.1f}" stroke="#ddd"/>'
        for v in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    )
    label = f'<text x="{WIDTH}" y="{HEIGHT - 6}" text-anchor="end" font-size="11">{budget:,} sampled tokens</text>'
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="held-out mean against sampled tokens">'
        f"{axes}{''.join(drawn)}{label}</svg><p>{' &nbsp; '.join(legend)}</p>"
    )


def _points(xs: np.ndarray, ys: np.ndarray, budget: int) -> list[str]:
    return [f"{LEFT + (WIDTH - LEFT) * x / max(budget, 1):.1f},{_y(y):.1f}" for x, y in zip(xs, ys, strict=True)]


def _y(value: float) -> float:
    return 8 + (HEIGHT - BOTTOM - 8) * (1 - min(1.0, max(0.0, float(value))))


def _pair(low: float | None, high: float | None) -> str:
    return "one seed" if low is None or high is None else f"[{low:.3f}, {high:.3f}]"
