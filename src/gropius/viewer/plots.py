"""The curves of a run as pictures, for reports. matplotlib is imported where a picture is drawn."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gropius.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACCENT, WARM, SOFT = "#2450b8", "#b2431b", "#66625b"


@dataclass(frozen=True)
class Plot:
    """One picture: file name, title, and its lines (metric, label, colour); band: metrics of a 95 % interval."""

    name: str
    title: str
    lines: tuple[tuple[str, str, str], ...]
    band: tuple[str, str] | None = None


PLOTS = (
    Plot("reward", "Reward", (("reward", "reward", ACCENT),), ("reward/low", "reward/high")),
    Plot("held-out", "Held-out", (("held_out/mean", "mean", ACCENT),), ("held_out/mean_low", "held_out/mean_high")),
    Plot("dead-groups", "Dead groups, share", (("groups/all_failed", "all failed", WARM),
                                               ("groups/all_solved", "all solved", ACCENT))),
    Plot("entropy", "Entropy, nats", (("entropy", "entropy", ACCENT),)),
    Plot("kl", "KL to the reference, nats", (("kl", "kl", ACCENT),)),
    Plot("clip", "Clipped tokens, share", (("clip_ratio/low_mean", "below", WARM),
                                           ("clip_ratio/high_mean", "above", ACCENT))),
    Plot("length", "Length, tokens", (("completions/mean_length", "mean", ACCENT),
                                      ("completions/max_length", "longest", SOFT))),
    Plot("loss", "Loss", (("loss", "loss", ACCENT),)),
    Plot("gradient", "Gradient norm", (("grad_norm", "norm", ACCENT),)),
)  # fmt: skip


def drawable(series: dict[str, Any]) -> list[Plot]:
    """The plots that have something to show."""
    return [plot for plot in PLOTS if any(series.get(name, {}).get("values") for name, _, _ in plot.lines)]


def draw(plot: Plot, series: dict[str, Any], kind: str) -> bytes:
    """One plot as "svg" or "png", the same bytes each time. Errors: UsageError when matplotlib is not installed."""
    try:
        from matplotlib import rc_context
    except ModuleNotFoundError as error:
        raise UsageError("pictures need matplotlib: pip install 'gropius[view]'") from error
    style: Any = {"svg.fonttype": "path", "svg.hashsalt": "gropius", "font.size": 9.0, "axes.linewidth": 0.6}
    options: dict[str, Any] = {"dpi": 160} if kind == "png" else {"metadata": {"Date": None}}
    out = io.BytesIO()
    with rc_context(style):
        _figure(plot, series).savefig(out, format=kind, facecolor="white", **options)
    return out.getvalue()


def _figure(plot: Plot, series: dict[str, Any]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4, 2.3), layout="constrained")
    axes = figure.add_subplot()
    if plot.band and all(series.get(name, {}).get("values") for name in plot.band):
        low, high = (series[name] for name in plot.band)
        axes.fill_between(low["steps"], low["values"], high["values"], color=ACCENT, alpha=0.16, linewidth=0)
    shown = [(series[name], label, colour) for name, label, colour in plot.lines if name in series]
    for line, label, colour in shown:
        marker = "o" if len(line["steps"]) < 2 else None
        axes.plot(line["steps"], line["values"], color=colour, linewidth=1.3, marker=marker, label=label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=SOFT, width=0.6, labelsize=8)
    axes.grid(axis="y", color="#e2dfd8", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("step", color=SOFT, fontsize=8)
    if len(shown) > 1:
        axes.legend(frameon=False, fontsize=8, loc="best")
    return figure
