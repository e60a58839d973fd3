"""The Grafana dashboard, built from the panels with Grafana's own library, which `shoal[grafana]` brings."""

from collections.abc import Sequence
from typing import Any

from shoal.observe.prometheus import machine_panels, training_panels
from shoal.observe.prometheus.panels import Shown

ROWS: dict[str, Sequence[Shown]] = {
    "Cluster": machine_panels.CLUSTER,
    "GPU": machine_panels.GPU,
    "Training": training_panels.TRAINING,
    "Communication": training_panels.COMMUNICATION,
    "Checkpoints": training_panels.CHECKPOINTS,
    "System": machine_panels.SYSTEM,
}
_HEIGHTS = {"number": 4, "states": 8, "lines": 8, "stacked": 8}
_MOST = 24
"""The width of the page."""


def dashboard_json() -> str:
    """As Grafana imports it."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder

    text: str = JSONEncoder(sort_keys=True, indent=1).encode(_dashboard())
    return text + "\n"


def _dashboard() -> Any:
    from grafana_foundation_sdk.builders import dashboard as builders

    page = (
        builders.Dashboard("Shoal")
        .uid("shoal-training")
        .description("Training runs of Shoal: machines, GPUs, training, communication, checkpoints.")
        .tags(["shoal", "training"])
        .refresh("10s")
        .time("now-1h", "now")
        .timezone("browser")
        .with_variable(builders.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_variable("run", "Run", "label_values(shoal_run_info, run)"))
        .with_variable(_variable("rank", "Worker", 'label_values(shoal_phase_seconds_total{run=~"$run"}, rank)'))
    )
    number, top = 0, 0
    for title, panels in ROWS.items():
        number += 1
        page = page.with_row(builders.Row(title).id(number).grid_pos(_place(0, top, _MOST, 1)))
        left, top, tallest = 0, top + 1, 0
        for shown in panels:
            number, height = number + 1, _HEIGHTS[shown.kind]
            if left + shown.width > _MOST:
                left, top, tallest = 0, top + tallest, 0
            page = page.with_panel(_panel(shown).id(number).grid_pos(_place(left, top, shown.width, height)))
            left, tallest = left + shown.width, max(tallest, height)
        top += tallest
    return page.build()


def _place(left: int, top: int, width: int, height: int) -> Any:
    from grafana_foundation_sdk.models.dashboard import GridPos

    return GridPos(x=left, y=top, w=width, h=height)


def _variable(name: str, label: str, query: str) -> Any:
    from grafana_foundation_sdk.builders.dashboard import QueryVariable
    from grafana_foundation_sdk.models.dashboard import VariableOption, VariableRefresh, VariableSort

    return (
        QueryVariable(name)
        .label(label)
        .query(query)
        .datasource(_source())
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.NATURAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(VariableOption(text="All", value="$__all"))
    )


def _source() -> Any:
    from grafana_foundation_sdk.models.common import DataSourceRef

    return DataSourceRef(type_val="prometheus", uid="$datasource")


def _panel(shown: Shown) -> Any:
    """One that shows it."""
    from grafana_foundation_sdk.builders import dashboard as builders
    from grafana_foundation_sdk.builders import prometheus
    from grafana_foundation_sdk.models.dashboard import Threshold, ThresholdsMode

    panel = _BLANK[shown.kind]().title(shown.title).description(shown.description).datasource(_source())
    for letter, query in zip("ABCDEF", shown.queries, strict=False):
        target = prometheus.Dataquery().expr(query.expr).ref_id(letter).datasource(_source())
        panel = panel.with_target(target.legend_format(query.legend or "__auto"))
    steps = [Threshold(value=None, color="green"), *[Threshold(value, colour) for value, colour in shown.thresholds]]
    panel = panel.thresholds(builders.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
    if shown.kind != "states":
        panel = panel.unit(shown.unit)
    if shown.decimals is not None:
        panel = panel.decimals(shown.decimals)
    if shown.lowest is not None:
        panel = panel.min(shown.lowest)
    return panel.max(shown.highest) if shown.highest is not None else panel


def _lines() -> Any:
    from grafana_foundation_sdk.builders import common, timeseries
    from grafana_foundation_sdk.models import common as models

    tooltip = common.VizTooltipOptions().mode(models.TooltipDisplayMode.MULTI).sort(models.SortOrder.DESCENDING)
    legend = common.VizLegendOptions().display_mode(models.LegendDisplayMode.LIST).show_legend(True)
    legend = legend.placement(models.LegendPlacement.BOTTOM)
    panel = timeseries.Panel().tooltip(tooltip).legend(legend).line_width(1).fill_opacity(8)
    return panel.show_points(models.VisibilityMode.NEVER).span_nulls(60_000.0)


def _stacked() -> Any:
    from grafana_foundation_sdk.builders import common
    from grafana_foundation_sdk.models.common import StackingMode

    return _lines().stacking(common.StackingConfig().mode(StackingMode.NORMAL).group("A")).fill_opacity(60)


def _number() -> Any:
    from grafana_foundation_sdk.builders import common, stat
    from grafana_foundation_sdk.models import common as models

    reduce = common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False)
    return stat.Panel().reduce_options(reduce).graph_mode(models.BigValueGraphMode.AREA)


def _states() -> Any:
    from grafana_foundation_sdk.builders import common, statetimeline
    from grafana_foundation_sdk.models import common as models

    legend = common.VizLegendOptions().show_legend(False).display_mode(models.LegendDisplayMode.LIST)
    legend = legend.placement(models.LegendPlacement.BOTTOM)
    return statetimeline.Panel().legend(legend).show_value(models.VisibilityMode.NEVER).merge_values(True)


_BLANK = {"lines": _lines, "stacked": _stacked, "number": _number, "states": _states}
