"""Turn records of runs into tables, pictures and files.

A record is one line of JSON with everything that determined a run. This module reads records,
reduces them to a table of means and standard deviations over seeds, and plots them. It trains
nothing. `runs.conclusions` writes the sentence below a table.

The table has a row for each method, in the order in which the methods were run. It contains the
sample standard deviation over seeds, which is undefined for one seed. The parameters of prompt,
head and backbone are counted separately, since a linear head can have more parameters than the
prompt.
"""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from idp_tutorial.runs.statistics import (
    has_per_example_results,
    paired_bootstrap,
    per_example_scores,
)
from idp_tutorial.utils.checks import UserError, require_packages
from idp_tutorial.utils.durable_files import write_atomically
from idp_tutorial.utils.records import dump_record

_GROUP_COLUMNS = ["task", "shots", "backbone", "head", "method"]  # fields that define a row


def _check_unique_seeds(runs: pd.DataFrame, method: str) -> None:
    """Check that no seed of a split occurs twice among the runs of one row."""
    duplicated = runs.seed[runs.duplicated(["split_seed", "seed"])]
    if len(duplicated):
        raise UserError(
            f"{method!r} has more than one record with seed {duplicated.iloc[0]}: give those of "
            "one comparison (layer, length and steps), each once."
        )


_RUN_COLUMNS = (  # further fields that a table shows
    "metric",
    "score",
    "validation",
    "params",
    "ms_per_step",
    "peak_memory_mb",
    "steps",
    "lr",
)
_OPTIONAL_COLUMNS = [
    *("status", "seed", "split_seed", "lr_selection", "lr_at_grid_edge"),
    *("seconds", "tuning_seconds"),
]
_ZERO_PARAM_COUNTS = dict(prompt=0, head=0, backbone=0)  # for a method that always diverged


def estimate_interval(
    records: list[dict],  # of one method with all its seeds
    folder: Path | str | None,  # folder of the records, with their logits; None: no interval
) -> tuple[float, float]:  # in points; NaN where no interval is known
    """Return the 95 % interval of the score over test examples, and over seeds if there are some.

    That of one accuracy is Wilson's, others are of the bootstrap.
    """
    if folder is None or not all(has_per_example_results(r, folder) for r in records):
        return np.nan, np.nan
    scores = np.stack([per_example_scores(r, folder) for r in records])
    if len(records) == 1 and records[0]["metric"] == "accuracy":
        n_correct = round(scores.sum() / 100)
        interval = stats.binomtest(n_correct, scores.size).proportion_ci(method="wilson")
        return 100 * interval.low, 100 * interval.high
    estimate = paired_bootstrap(scores, np.zeros_like(scores), 4000)
    return estimate["low"], estimate["high"]


def _summarise_seeds(key: tuple, runs: pd.DataFrame, folder: Path | str | None) -> dict:
    """Return the row of one method, from its runs with all seeds."""
    is_diverged = runs.status.eq("diverged")
    example = runs[~is_diverged | is_diverged.all()].iloc[0]
    runs = runs[~is_diverged]
    _check_unique_seeds(runs, key[-1])
    params = example.params if len(runs) else _ZERO_PARAM_COUNTS
    if not (isinstance(params, dict) and _ZERO_PARAM_COUNTS.keys() <= params.keys()):
        raise UserError(
            f"a record of {key[-1]!r} has no params with prompt, head and backbone: train it again."
        )
    low, high = np.nan, np.nan
    if len(runs):
        low, high = estimate_interval(runs.to_dict("records"), folder)
    row = {
        **dict(zip(_GROUP_COLUMNS, key)),
        "metric": example.metric,
        "score": runs.score.mean(),
        "std": runs.score.std(),
        "seeds": len(runs),
        "validation": runs.validation.mean(),
        **{f"{group}_params": n for group, n in params.items()},
        "low": low,
        "high": high,
        "file_bytes": runs.file_bytes.max(),
        "seconds": runs.seconds.median() + runs.tuning_seconds.fillna(0).sum(),
        "texts_per_second": runs.texts_per_second.median(),
        "ms_per_step": runs.ms_per_step.median(),
        "peak_memory_mb": runs.peak_memory_mb.max(),
        "steps": example.steps,
        "lr": example.lr,
        "lr_selection": example.lr_selection,
    }
    if runs.lr_at_grid_edge.eq(True).any():
        row["lr_at_grid_edge"] = True
    if is_diverged.any():
        row["diverged"] = is_diverged.sum()
    if runs.split_seed.nunique() > 1:
        row["draws"] = runs.split_seed.nunique()
    return row


def select_finished(records: list[dict]) -> list[dict]:
    """Return the records of runs that finished, without those that diverged."""
    return [r for r in records if r["status"] == "done"]


def results_table(
    records: list[dict],
    folder: Path | str | None = None,  # folder of the records and logits; None: no intervals
) -> pd.DataFrame:
    """Return a row for each method (and task, number of shots, backbone and head).

    A row has the mean, standard deviation, interval and number of its finished seeds, the number
    of trained parameters by group, time, memory, and how the learning rate was chosen.
    Raises: `UserError` if no run finished, or if a seed occurs twice in a row.
    """
    if not select_finished(records):
        raise UserError("there are no records of finished runs: run idp compare first.")
    df = pd.DataFrame(records)
    missing = [c for c in (*_GROUP_COLUMNS, *_RUN_COLUMNS) if c not in df]
    if missing:
        raise UserError(
            f"no record has the field {missing[0]!r}, which a table needs: give records that idp "
            "compare or idp train wrote."
        )
    df = df.reindex(columns=df.columns.union(_OPTIONAL_COLUMNS, sort=False))
    for name in ("texts_per_second", "file_bytes"):
        df[name] = [(r.get("provenance") or {}).get(name) for r in records]
    groups = df.groupby(_GROUP_COLUMNS, sort=False, dropna=False)
    table = pd.DataFrame([_summarise_seeds(key, runs, folder) for key, runs in groups])
    if "diverged" in table:
        table = table.assign(diverged=table.diverged.fillna(0).astype(int))
    return table


def _format_score(row: pd.Series) -> str:
    """Return mean and standard deviation of a row, with the number of diverged seeds."""
    if not row.seeds:
        return "diverged"
    std = f" ± {row['std']:.1f}" if row.seeds > 1 else ""
    lost = f" ({row.diverged} diverged)" if row.get("diverged") else ""
    return f"{row.score:.1f}{std}{lost}"


def _format_bytes(n: float) -> str:
    """Return a size as text."""
    return f"{n / 1e6:.1f} MB" if n >= 1e5 else f"{n / 1e3:.1f} kB"


def _format_row(row: pd.Series) -> tuple[str, ...]:
    """Return the cells of a row of `format_table`."""
    n_params = row.prompt_params + row.head_params + row.backbone_params
    edge = "*" if row.get("lr_at_grid_edge") == 1 else ""
    cells: dict[str, tuple[Any, str]] = {  # value and text
        "interval": (row.low, f"{row.low:.1f} to {row.high:.1f}"),
        "parameters": (n_params if row.seeds else None, f"{n_params:,}"),
        "file": (row.file_bytes, _format_bytes(row.file_bytes)),
        "seconds": (row.seconds if row.seeds else None, f"{row.seconds:,.1f}"),
        "speed": (row.texts_per_second, f"{row.texts_per_second:,.0f}"),
        "lr": (row.lr, f"{row.lr or 0:.1e}{edge}"),
    }
    texts = ["–" if pd.isna(value) else text for value, text in cells.values()]
    return (row.method, _format_score(row), *texts)


def format_table(
    table: pd.DataFrame,  # from `results_table`
) -> str:
    """Return a table as text: score ± std over seeds, interval, trained parameters and costs.

    The size of the file is that of the trained tensors; the seconds are of a run, with a search of
    its learning rate. A * after the learning rate says that it is the smallest or largest of those
    that were tried.
    """
    require_packages("tabulate")
    from tabulate import tabulate

    metric = table.metric.iloc[0]
    costs = ("parameters", "file size", "seconds", "texts/s")
    header = ("method", metric, "95 % interval", *costs, "lr")
    rows = [header, *(_format_row(row) for _, row in table.iterrows())]
    alignment = ("left", *["right"] * (len(rows[0]) - 1))
    return tabulate(rows, "firstrow", disable_numparse=True, colalign=alignment)


def check_same_settings(
    df: pd.DataFrame,  # a row for each record
    columns: list[str],  # columns in which all rows must agree
    requirement: str,  # what is needed, for the message
) -> None:
    """Check that all records of a table or picture have the same settings.

    Raises: `UserError` if they differ in one of the columns.
    """
    settings = df[columns].drop_duplicates()
    if len(settings) > 1:
        raise UserError(
            f"the records have {len(settings)} different settings ({', '.join(columns)}: "
            f"{settings.values.tolist()!s:.500}), but {requirement}: select the records of one."
        )


PICTURE_GREY = "#7d8590"  # of texts and axes: readable on white and on black


def plot_scores(
    records: list[dict],  # of one task, backbone and head
    ax: Any = None,  # matplotlib axes; None: a new figure
    folder: Path | str | None = None,  # folder of the records and logits; None: no intervals
    title: str = "",  # the message of the picture; "": the task and the backbone
) -> Any:  # the axes
    """Plot the score of every method and seed as dots, with the 95 % interval of each method.

    Raises: `UserError` if no run finished, or if the records differ in task, backbone or head.
    """
    require_packages("matplotlib")
    import matplotlib.pyplot as plt

    table = results_table(select_finished(records), folder)
    df = pd.DataFrame(select_finished(records))
    check_same_settings(
        table, _GROUP_COLUMNS[:-1], "one picture has one task, number of shots, backbone and head"
    )
    ax = ax or plt.subplots(figsize=(6, 0.8 + 0.35 * len(table)))[1]
    for i, row in enumerate(table.itertuples()):
        scores = df[df.method == row.method].score
        ax.plot([row.low, row.high], [i, i], "-", lw=2, color=f"C{i % 10}")
        if len(scores) > 1:
            ax.plot(scores, [i] * len(scores), "o", ms=4, alpha=0.5, color=f"C{i % 10}")
        ax.plot(row.score, i, "o", ms=8, color=f"C{i % 10}")
    first = table.iloc[0]
    ax.set_yticks(range(len(table)), table.method)
    ax.invert_yaxis()
    ax.set_xlabel(f"{first.metric} on test (%), line: 95 % interval", color=PICTURE_GREY)
    ax.set_title(title or f"{first.task}, {first.backbone}", color=PICTURE_GREY, wrap=True)
    ax.tick_params(colors=PICTURE_GREY)
    ax.grid(axis="x", color=PICTURE_GREY, alpha=0.3)
    for side in ax.spines.values():
        side.set_visible(False)
    return ax


def write_results(
    records: list[dict],  # of one task
    path_prefix: Path | str,  # folder and base name of the three files
    title: str = "",  # of the picture; "": the task and the backbone
) -> pd.DataFrame:  # the table
    """Write the records, their table and their picture to PREFIX.jsonl, .csv and .png.

    Each file is replaced as a whole; the records are written first, since the others follow from
    them. The logits of the records, if they have some, are in the same folder.
    """
    require_packages("matplotlib")
    from matplotlib.figure import Figure  # unlike a figure of pyplot it needs no `close`

    lines = "".join(dump_record(r) + "\n" for r in records)
    write_atomically(Path(f"{path_prefix}.jsonl"), lines.encode())
    folder = Path(path_prefix).parent
    table = results_table(records, folder)
    write_atomically(Path(f"{path_prefix}.csv"), table.to_csv(index=False).encode())
    figure = Figure(figsize=(6, 1.2 + 0.35 * len(table)))
    plot_scores(records, figure.add_subplot(), folder, title)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150, bbox_inches="tight", transparent=True)
    write_atomically(Path(f"{path_prefix}.png"), picture.getvalue())
    return table
