"""What came out of a grid: rows, a table, a Parquet file and a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from plotly.graph_objects import Bar, Scatter
from plotly.subplots import make_subplots
from rich.box import SIMPLE_HEAD
from rich.console import ConsoleRenderable, Group
from rich.table import Table

from obsspec.errors import writing
from obsspec.lab.run import Figures, Point
from obsspec.lab.schedules import SCHEDULES
from obsspec.lab.workload import names, read, validated

Row = dict[str, Any]
"""The keys of a point's grid, its ``schedule``, and its figures."""

_FIGURES = tuple(Figures.__dataclass_fields__)
_RATIOS = ("latency_ratio", "makespan_ratio")


def rows(points: Sequence[Point], figures: Sequence[Figures]) -> list[Row]:
    """One for each point. The ratios are to the point that differs in being sequential; None where there is none."""
    results = [
        {
            "schedule": point.workload.schedule,
            **{key: _plain(value) for key, value in point.keys.items()},
            **asdict(own),
        }
        for point, own in zip(points, figures, strict=True)
    ]
    sequential = {_apart_from_schedule(row): row for row in results if row["schedule"] == "sequential"}
    for row in results:
        base = sequential.get(_apart_from_schedule(row))
        for ratio, name in zip(_RATIOS, ("mean_latency", "makespan"), strict=True):
            row[ratio] = None if base is None else row[name] / base[name]
    return results


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float) else json.dumps(value)


def _keys(row: Mapping[str, Any]) -> Row:
    return {key: value for key, value in row.items() if key not in (*_FIGURES, *_RATIOS)}


def _apart_from_schedule(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(value for key, value in _keys(row).items() if key != "schedule")


def points_table(results: Sequence[Row], title: str) -> ConsoleRenderable:
    shown = ("latency s", "ratio", "makespan s", "ratio", "hits", "of", "hidden s", "wasted", "busy s", "CPU s")
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for key in _keys(results[0]):
        table.add_column(key, overflow="fold")
    for name in shown:
        table.add_column(name, justify="right")
    for row in results:
        table.add_row(
            *(str(value) for value in _keys(row).values()),
            f"{row['mean_latency']:.2f}",
            _ratio(row["latency_ratio"]),
            f"{row['makespan']:.1f}",
            _ratio(row["makespan_ratio"]),
            f"{row['hits']}",
            f"{row['attempted']}",
            f"{row['hidden_seconds']:.0f}",
            f"{row['wasted_tokens'] / (row['wasted_tokens'] + row['kept_tokens']):.1%}",
            f"{row['busy_seconds']:.1f}",
            f"{row['cpu_seconds']:.1f}",
        )
    return Group(
        table, "hits of attempted calls; wasted: tokens of all; ratio: to sequential; CPU s: real, of this machine"
    )


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}"


def names_tables() -> ConsoleRenderable:
    """The shipped workloads and the schedules."""
    workloads = Table("workload", "rollouts", "turns", "mean tool s", "mean tokens", "seats")
    for name in names():
        own = validated(read(name), name)
        figures = f"{own.tool.mean_seconds:.2f}", f"{own.mean_tokens:.0f}", f"{own.server.seats}"
        workloads.add_row(name, f"{own.rollouts}", f"{own.turns}", *figures)
    schedules = Table("schedule", "what it does")
    for name, schedule in SCHEDULES.items():
        schedules.add_row(name, schedule.what)
    return Group(workloads, schedules)


def write(results: Sequence[Row], directory: Path, title: str) -> None:
    """Writes ``points.parquet`` and ``points.html``. Raises InputError where it cannot."""
    columns = {key: _column([row[key] for row in results]) for key in results[0]}
    with writing(f"--output {directory}", "directory"):
        pyarrow.parquet.write_table(pyarrow.table(columns), directory / "points.parquet")
        (directory / "points.html").write_text(_plot(results, title))


def _column(values: list[Any]) -> list[Any]:
    """Of one type: as text where a grid mixes numbers with anything else."""
    mixed = any(isinstance(value, str) for value in values)
    return [str(value) for value in values] if mixed else values


def _plot(results: Sequence[Row], title: str) -> str:
    """Latency and makespan against the grid's longest axis of numbers, a line for each combination of the others;
    bars where it has no such axis. The page needs no network."""
    panels = {"mean_latency": "mean agent latency, s", "makespan": "makespan, s", "busy_seconds": "server busy, s"}
    figure = make_subplots(rows=1, cols=len(panels), subplot_titles=list(panels.values()))
    keys = list(_keys(results[0]))
    values = {key: {row[key] for row in results} for key in keys}
    numeric = [key for key in keys if all(isinstance(value, int | float) for value in values[key])]
    axis = max(numeric, key=lambda key: len(values[key]), default=None)

    def label(row: Row) -> str:
        varying = (key for key in keys if key != axis and len(values[key]) > 1)
        return ", ".join(row[key] if key == "schedule" else f"{key} {row[key]}" for key in varying) or row["schedule"]

    for place, (_, group) in enumerate(groupby(sorted(results, key=label), key=label)):
        line = sorted(group, key=lambda row: row[axis] if axis else 0)
        for column, name in enumerate(panels, start=1):
            trace = Scatter if axis else Bar
            figure.add_trace(
                trace(
                    x=[row[axis] if axis else label(row) for row in line],
                    y=[row[name] for row in line],
                    name=label(line[0]),
                    legendgroup=label(line[0]),
                    showlegend=column == 1,
                    marker_color=_COLOURS[place % len(_COLOURS)],
                ),
                row=1,
                col=column,
            )
    figure.update_xaxes(title_text=axis)
    figure.update_layout(title_text=title)
    return str(figure.to_html(include_plotlyjs=True))


_COLOURS = (
    "#1f77b4",
    "#ff7f0e",
    "#2ca02c",
    "#9467bd",
    "#d62728",
    "#8c564b",
    "#e377c2",
    "#7f7f7f",
    "#bcbd22",
    "#17becf",
)
