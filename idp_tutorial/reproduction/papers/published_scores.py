"""The scores that the three papers print, and the command that reproduces each table and figure.

The scores are copied from the papers: IDPG (NAACL 2022) Tables 1, 3, 6 and 7, LPT (Findings of
EMNLP 2022) Tables 1 to 5 and 10, ID-SPAM (2025) Tables 2 to 6, 8 to 11, 14 and 15, and the
losses of 16.
Means and standard deviations are as printed; mistakes in the papers are not corrected. The
scores are stored in `assets/published_scores.csv`, and the names of this library beside them in
`assets/published_names.csv`.
"""

from importlib.resources import files

import pandas as pd

from idp_tutorial.utils.checks import check_name


def _read_asset_csv(name: str) -> pd.DataFrame:
    """Return the table in a CSV file of the package's `assets` folder."""
    return pd.read_csv((files("idp_tutorial") / "assets" / name).open(encoding="utf-8"))


def load_published_tables() -> pd.DataFrame:
    """Return a row for each of the 39 tables and figures with results.

    Columns: table, what (its content), kind, command (which reproduces it) and note.
    """
    return _read_asset_csv("published_tables.csv")


def load_published_scores(
    table: str | None = None,  # such as 'lpt-2'; None: all tables
) -> pd.DataFrame:
    """Return the scores that the papers print, a row for each.

    Columns: table, setting, backbone, method, task, metric, mean and std.
    """
    scores = _read_asset_csv("published_scores.csv")
    if table is None:
        return scores
    return scores[scores.table == check_name(table, list(scores.table.unique()), "table of scores")]


def _read_names(kind: str) -> dict[str, str]:
    """Return the names of this library by published name, of 'method' or 'task'."""
    names = _read_asset_csv("published_names.csv").set_index("published")
    return names[names.kind == kind].name.to_dict()


METHOD_NAMES = _read_names("method")  # published name: key of `METHODS`
TASK_NAMES = _read_names("task")  # published name: key of `TASKS`
