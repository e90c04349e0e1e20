"""Writes what was found: a page of tables with its plots, the same as JSON, and the timelines."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from aserve.cli.lab.findings import Cell, Claim, Experiment, Table
from aserve.cli.lab.plots import draw
from aserve.obs.trace import render

PAGE = "README.md"


def write(folder: Path, experiments: Sequence[Experiment], *, command: str, device: str) -> None:
    """The whole folder, whose files of an earlier run are replaced. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for experiment in experiments:
        if experiment.panels:
            (folder / "plots").mkdir(exist_ok=True)
            (folder / plot_of(experiment)).write_text(draw(experiment.panels, experiment.heading), encoding="utf-8")
        if experiment.timelines:
            (folder / "timelines").mkdir(exist_ok=True)
            about = {"experiment": experiment.title, "device": device}
            (folder / timeline_of(experiment)).write_bytes(render(experiment.timelines, about=about))
    (folder / PAGE).write_text("\n".join(page(experiments, command=command, device=device)), encoding="utf-8")
    (folder / "results.json").write_text(as_json(experiments, command=command, device=device), encoding="utf-8")


def plot_of(experiment: Experiment) -> str:
    return f"plots/{experiment.name}.svg"


def timeline_of(experiment: Experiment) -> str:
    return f"timelines/{experiment.name}.json"


def as_json(experiments: Sequence[Experiment], *, command: str, device: str) -> str:
    found = [
        {
            "number": experiment.number,
            "title": experiment.title,
            "tables": [asdict(table) for table in experiment.tables],
            "claims": [asdict(claim) for claim in experiment.claims],
        }
        for experiment in experiments
    ]
    return json.dumps({"command": command, "device": device, "experiments": found}, indent=1, ensure_ascii=False) + "\n"


def page(experiments: Sequence[Experiment], *, command: str, device: str) -> Iterator[str]:
    """The lines of the page."""
    yield "# What the laboratory found"
    yield ""
    yield f"Made by `{command}`; device: {device}. Means over the seeds where arrivals or steps are random."
    yield "Plots are pictures, `timelines/` opens in Perfetto (ui.perfetto.dev) or chrome://tracing."
    yield ""
    yield from _summary(experiments)
    for experiment in experiments:
        yield ""
        yield f"## {experiment.heading}"
        yield ""
        yield experiment.about
        for table in experiment.tables:
            yield ""
            yield from markdown(table)
        yield ""
        yield from (_line(claim) for claim in experiment.claims)
        if experiment.panels:
            yield ""
            yield f"![{experiment.title}]({plot_of(experiment)})"
        if experiment.timelines:
            yield ""
            yield f"Timelines, one below the other: [{timeline_of(experiment)}]({timeline_of(experiment)})"
    yield ""


def _summary(experiments: Sequence[Experiment]) -> Iterator[str]:
    claims = [claim for experiment in experiments for claim in experiment.claims]
    agreeing = sum(claim.agreement == "agrees" for claim in claims)
    yield f"{agreeing} of {len(claims)} expectations were met."
    contradictions = [
        (experiment, claim)
        for experiment in experiments
        for claim in experiment.claims
        if claim.agreement == "contradicts"
    ]
    if contradictions:
        yield "Those that were not:"
        yield ""
        yield from (f"- {experiment.heading}: {_sentence(claim)}" for experiment, claim in contradictions)


def _line(claim: Claim) -> str:
    return f"- {'✓' if claim.agreement == 'agrees' else '✗'} {_sentence(claim)}"


def _sentence(claim: Claim) -> str:
    return f"{claim.expected}: **{claim.found}**" + (f". Why: {claim.reason}." if claim.reason else "")


def markdown(table: Table) -> Iterator[str]:
    if table.title:
        yield f"**{table.title}**"
        yield ""
    yield f"| {' | '.join(table.columns)} |"
    yield f"|{'---|' * len(table.columns)}"
    yield from (f"| {' | '.join(map(_cell, row))} |" for row in table.rows)
    if table.note:
        yield ""
        yield table.note


def _cell(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:,.1f}" if abs(cell) >= 1000 else f"{cell + 0.0:g}"  # no -0
    return f"{cell:,}" if isinstance(cell, int) else cell
