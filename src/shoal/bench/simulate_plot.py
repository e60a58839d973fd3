"""Plots of `shoal bench simulate`: efficiency by the number of GPUs; and predictions beside what was measured."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.bench.simulate import efficiencies

_STYLES = {
    "ddp": ("#4c72b0", "o", "-"),
    "ddp_bf16": ("#64b5cd", "s", "--"),
    "ddp_fp16": ("#64b5cd", "x", "-."),
    "ddp_powersgd": ("#8172b3", "D", "--"),
    "fsdp": ("#c44e52", "^", "-"),
    "hsdp": ("#55a868", "v", "-"),
}
_MEASURED, _PREDICTED, _ALONE = "#4c72b0", "#dd8452", "#d9d9d9"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Efficiency, a line for each strategy, into a PNG file."""
    figure, axes = _figure(9.0, 5.4)
    counts = [row["gpus"] for row in result["rows"]]
    lowest = 1.0
    for name in result["strategies"]:
        colour, marker, line = _STYLES[name]
        values = efficiencies(result, name)
        lowest = min(lowest, *values)
        label = f"{name}  ({values[-1]:.0%})"
        axes.plot(
            counts, [100 * value for value in values], line, color=colour, marker=marker, markersize=5, label=label
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set_ylim(0 if lowest < 0.6 else 10 * int(10 * lowest - 0.5), 104)
    per_node = result["gpus_per_node"]
    if counts[-1] > per_node:
        axes.axvline(per_node, color="#999999", linewidth=1, linestyle=":")
        axes.annotate(
            "one machine",
            (per_node, 0.02),
            (4, 0),
            ("data", "axes fraction"),
            "offset points",
            color="#777777",
            fontsize=9,
        )
    axes.set_title(
        f"{result['recipe']}, {result['batch_per_gpu']} samples a GPU, {result['step_ms']:.0f} ms a step; "
        f"simulated on {result['network']['name']}",
        fontsize=11,
    )
    axes.set_xlabel("GPUs")
    axes.set_ylabel("efficiency, % of as many single GPUs")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, title=f"strategy (at {counts[-1]})", loc="lower left", bbox_to_anchor=(0.0, 0.06))
    figure.savefig(path, dpi=120)


def draw_check(result: Mapping[str, Any], path: Path) -> None:
    """Measured and predicted steps, by strategy and number of workers, into a PNG file."""
    rows = result["checks"]
    figure, axes = _figure(9.0, 1.6 + 0.55 * len(rows))
    places = range(len(rows))
    height = 0.38
    measured = [row["measured_ms"] for row in rows]
    predicted = [row["predicted_ms"] for row in rows]
    axes.barh([place - height / 2 for place in places], measured, height, color=_MEASURED, label="measured")
    axes.barh([place + height / 2 for place in places], predicted, height, color=_PREDICTED, label="predicted")
    for place, row in enumerate(rows):
        axes.plot([row["alone_ms"]] * 2, [place - height, place + height], color="black", linewidth=1)
        end = max(row["measured_ms"], row["predicted_ms"])
        axes.annotate(f"{row['error']:+.1%}", (end, place), (5, 0), textcoords="offset points", va="center", fontsize=9)
    axes.plot([], [], color="black", linewidth=1, label="sends nothing")
    axes.set_yticks(list(places), [f"{row['strategy']}, {row['workers']} workers" for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max([*measured, *predicted]))
    axes.set_title(
        f"a step of {result['recipe']} on {result['cores']} cores; at most {result['allowed']:.0%} off", fontsize=11
    )
    axes.set_xlabel("ms")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=120)


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()
