"""The plot of `shoal bench comm`: bandwidth by size, and the share of a step that communication takes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.bench.comm import by_size, in_units

_EXPOSED, _HIDDEN = "#c44e52", "#d9d9d9"
_BY_COLLECTIVE = {"all_reduce": ("#4c72b0", "o"), "all_gather": ("#55a868", "s"), "reduce_scatter": ("#dd8452", "^")}


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Two panels into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = max(4.2, 1.4 + 0.32 * len(result["settings"]))
    figure = Figure(figsize=(12, height), layout="constrained")
    FigureCanvasAgg(figure)
    bandwidth, shares = figure.subplots(1, 2)
    _draw_bandwidth(bandwidth, result)
    _draw_shares(shares, result)
    figure.savefig(path, dpi=120)


def _draw_bandwidth(axes: Any, result: Mapping[str, Any]) -> None:
    rows = by_size(result["collectives"])
    for name, (colour, marker) in _BY_COLLECTIVE.items():
        rates = [records[name]["bus_gb_per_s"] for records in rows.values()]
        axes.plot(list(rows), rates, color=colour, marker=marker, markersize=5, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(rows), [in_units(size) for size in rows], rotation=30, ha="right")
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_title(f"{result['backend']} between {result['workers']} workers on the {_place(result)}", fontsize=11)
    axes.set_xlabel("size")
    axes.set_ylabel("bus bandwidth, GB/s")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _draw_shares(axes: Any, result: Mapping[str, Any]) -> None:
    rows = result["settings"]
    names = [f"{row['name']}  ({row['step_ms']:.0f} ms)" for row in rows]
    exposed = [100 * row["exposed_share"] for row in rows]
    hidden = [100 * (row["communication_share"] - row["exposed_share"]) for row in rows]
    axes.barh(names, exposed, 0.65, color=_EXPOSED, label="exposed")
    axes.barh(names, hidden, 0.65, left=exposed, color=_HIDDEN, label="hidden behind computing")
    for number, (share, more) in enumerate(zip(exposed, hidden, strict=True)):
        axes.annotate(
            f"{share:.1f}%", (share + more, number), (4, 0), textcoords="offset points", va="center", fontsize=9
        )
    axes.invert_yaxis()
    axes.set_xlim(0, max(1.0, 1.15 * max(map(sum, zip(exposed, hidden, strict=True)))))
    axes.set_title(f"communication in a step of {result['recipe']}", fontsize=11)
    axes.set_xlabel("% of the step; the number is what is exposed")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)


def _place(result: Mapping[str, Any]) -> str:
    return "GPU" if result["device"] == "cuda" else "CPU"
