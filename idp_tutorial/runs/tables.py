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

import pandas as pd

from idp_tutorial.utils.checks import UserError, require_packages
from idp_tutorial.utils.durable_files import write_atomically
from idp_tutorial.utils.records import dump_record

__all__ = [
    "select_finished",
    "results_table",
    "format_table",
    "check_same_settings",
    "format_std",
    "plot_scores",
    "write_results",
]


_GROUP_COLUMNS = ["task", "shots", "backbone", "head", "method"]  # fields that define a row


def _check_unique_seeds(runs: pd.DataFrame, method: str) -> None:
    """Check that no seed of a split occurs twice among the runs of one row."""
    duplicated = runs.seed[runs.duplicated(["split_seed", "seed"])]
    if len(duplicated):
        raise UserError(
            f"{method!r} has more than one record with seed {duplicated.iloc[0]}. They are of "
            "several comparisons (other layers, lengths or steps), or some are given twice: give "
            "the records of one comparison."
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
_OPTIONAL_COLUMNS = ["status", "seed", "split_seed", "lr_selection", "lr_at_grid_edge"]
_ZERO_PARAM_COUNTS = dict(prompt=0, head=0, backbone=0)  # for a method that always diverged


def _summarise_seeds(key: tuple, runs: pd.DataFrame) -> dict:
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
    row = {
        **dict(zip(_GROUP_COLUMNS, key)),
        "metric": example.metric,
        "score": runs.score.mean(),
        "std": runs.score.std(),
        "seeds": len(runs),
        "validation": runs.validation.mean(),
        **{f"{group}_params": n for group, n in params.items()},
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


def results_table(records: list[dict]) -> pd.DataFrame:
    """Return a row for each method (and task, number of shots, backbone and head).

    A row has the mean, standard deviation and number of its finished seeds, the number of trained
    parameters by group, time, memory, and how the learning rate was chosen.
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
    groups = df.groupby(_GROUP_COLUMNS, sort=False, dropna=False)
    table = pd.DataFrame([_summarise_seeds(key, runs) for key, runs in groups])
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


def _format_row(row: pd.Series) -> tuple[str, ...]:
    """Return the cells of a row of `format_table`."""
    cost: tuple[str, ...] = ("–",) * 5
    if row.seeds:
        cost = (
            f"{row.prompt_params:,}",
            f"{row.head_params:,}",
            f"{row.backbone_params:,}",
            f"{row.ms_per_step:.0f}",
            f"{row.peak_memory_mb:.0f}",
        )
    edge = "*" if row.get("lr_at_grid_edge") == 1 else ""
    lr = "–" if pd.isna(row.lr) else f"{row.lr:.1e}{edge}"
    return (row.method, _format_score(row), *cost, lr)


def format_table(
    table: pd.DataFrame,  # from `results_table`
) -> str:
    """Return a table as text: score ± std over seeds, trained parameters, time and memory.

    A * after the learning rate says that it is the smallest or largest of those that were tried.
    """
    require_packages("tabulate")
    from tabulate import tabulate

    metric = table.metric.iloc[0]
    header = ("method", metric, "prompt", "head", "backbone", "ms/step", "memory MB", "lr")
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
            f"{settings.values.tolist()}), but {requirement}: select the records of one setting."
        )


def format_std(
    std: float,  # already rounded; NaN for a single seed
) -> str:
    """Return ` ± std`, or an empty string where there is no standard deviation."""
    return "" if pd.isna(std) else f" ± {std}"


def _describe_seed_count(row: pd.Series) -> str:
    """Return the number of runs of a row as words for a title."""
    if row.get("draws", 0) > 1:
        return f"{row.seeds} runs on {row.draws:.0f} splits"
    return "1 seed" if row.seeds == 1 else f"{row.seeds} seeds"


def plot_scores(
    records: list[dict],  # of one task, backbone and head
    ax: Any = None,  # matplotlib axes; None: a new figure
) -> Any:  # the axes
    """Plot the score of every seed against the number of trained parameters.

    Dashed lines show the means of head-only and fine-tuning, the two extremes.
    Raises: `UserError` if no run finished, or if the records differ in task, backbone or head.
    """
    require_packages("matplotlib", "adjustText")
    import matplotlib.pyplot as plt
    from adjustText import adjust_text

    table = results_table(select_finished(records))
    df = pd.DataFrame(select_finished(records))
    check_same_settings(
        table, _GROUP_COLUMNS[:-1], "one picture has one task, number of shots, backbone and head"
    )
    ax = ax or plt.subplots(figsize=(5.5, 3.5))[1]
    labels = []
    bars: list[Any] = []
    for i, row in enumerate(table.itertuples()):
        n_params = max(1, row.prompt_params + row.head_params + row.backbone_params)
        scores = df[df.method == row.method].score
        color = f"C{i}"
        ax.plot([n_params] * len(scores), scores, "o", ms=4, alpha=0.5, color=color)
        bars += ax.plot(n_params, row.score, "_", ms=16, mew=2.5, color=color)
        labels.append(ax.text(n_params, row.score, row.method, fontsize=9, color=color))
        if row.method in ("head-only", "fine-tuning"):
            ax.axhline(row.score, color=color, ls="--", lw=0.8, alpha=0.5)
    first = table.iloc[0]
    n_examples = "" if pd.isna(first.shots) else f", {first.shots:.0f} examples"
    ax.set(
        xscale="log",
        xlabel="trained parameters, including the head",
        ylabel=f"{first.metric} (%), test",
        title=f"{first.task}{n_examples}, {first.backbone}: {_describe_seed_count(first)}, "
        "bar = mean",
    )
    ax.margins(x=0.2)
    ax.spines[["top", "right"]].set_visible(False)
    line = dict(arrowstyle="-", lw=0.6)
    adjust_text(labels, objects=bars, ax=ax, expand=(1.2, 1.7), iter_lim=500, arrowprops=line)
    return ax


def write_results(
    records: list[dict],  # of one task
    path_prefix: Path | str,  # folder and base name of the three files
) -> pd.DataFrame:  # the table
    """Write the records, their table and their picture to PREFIX.jsonl, .csv and .png.

    Each file is replaced as a whole; the records are written first, since the others follow from
    them.
    """
    require_packages("matplotlib", "adjustText")
    from matplotlib.figure import Figure  # unlike a figure of pyplot it needs no `close`

    lines = "".join(dump_record(r) + "\n" for r in records)
    write_atomically(Path(f"{path_prefix}.jsonl"), lines.encode())
    table = results_table(records)
    write_atomically(Path(f"{path_prefix}.csv"), table.to_csv(index=False).encode())
    figure = Figure(figsize=(5.5, 3.5))
    plot_scores(records, figure.add_subplot())
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150, bbox_inches="tight")
    write_atomically(Path(f"{path_prefix}.png"), picture.getvalue())
    return table
