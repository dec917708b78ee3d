"""The scores that the three papers print, and the command that reproduces each table and figure.

The scores are copied from the papers: IDPG (NAACL 2022) Tables 1, 3, 6 and 7, LPT (Findings of
EMNLP 2022) Tables 1 to 5 and 10, ID-SPAM (2025) Tables 2 to 6, 8 to 11, 14 and 15, and the
losses of 16.
Means and standard deviations are as printed; mistakes in the papers are not corrected. The
scores are stored in `assets/published_scores.csv`.
"""

from importlib.resources import files

import pandas as pd

from idp_tutorial.utils.checks import check_name

__all__ = [
    "METHOD_NAMES",
    "TASK_NAMES",
    "load_published_tables",
    "load_published_scores",
]


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


METHOD_NAMES = {  # published name: key of `METHODS`
    "RoBERTa": "fine-tuning",
    "Model Tuning": "fine-tuning",
    "Fine-tuning": "fine-tuning",
    "Fine-Tuning": "fine-tuning",
    "EFL": "efl",
    "Fine-tuning (EFL)": "efl",
    "Adapter": "adapter",
    "AdapterDrop": "adapterdrop",
    "Compacter": "compacter",
    "Adapter-tuning (Compacter)": "compacter",
    "BitFit": "bitfit",
    "BitFiT": "bitfit",
    "LoRA": "lora",
    "Prompt-tuning": "prompt-tuning",
    "prompt tuning": "prompt-tuning",
    "Prompt Tuning": "prompt-tuning",
    "Prompt-tuning-134": "prompt-tuning-134",
    "Ptuningv2": "p-tuning-v2",
    "P-Tuningv2": "p-tuning-v2",
    "P-tuning v2": "p-tuning-v2",
    "P-Tuning": "p-tuning",
    "S-IDPG-PHM": "s-idpg-phm",
    "S-IDPG-DNN": "s-idpg-dnn",
    "M-IDPG-PHM": "m-idpg-phm",
    "M-IDPG-DNN": "m-idpg-dnn",
    "M-IDPG-PHM-GloVe": "m-idpg-phm-glove",
    "LPT w/o PG": "lpt",
    "LPT w/ NPG": "lpt-npg",
    "LPT w/ MPPG": "lpt-mppg",
    "LPT w/ APPG": "lpt-appg",
    "LPT": "lpt-npg",
    "SMoP": "smop",
    "DEPT": "dept",
    "DePT": "dept",
    "ID-SPAM": "id-spam",
    "Mean-pooling": "id-spam-mean",
}
TASK_NAMES = {  # published name: key of `TASKS`
    "SST-2": "sst2",
    "MPQA": "mpqa",
    "MR": "mr",
    "CR": "cr",
    "Subj": "subj",
    "TREC": "trec",
    "MNLI": "mnli",
    "QNLI": "qnli",
    "RTE": "rte",
    "MRPC": "mrpc",
    "QQP": "qqp",
    "STS-B": "stsb",
    "CB": "cb",
    "COPA": "copa",
    "MultiRC": "multirc",
    "BoolQ": "boolq",
}
