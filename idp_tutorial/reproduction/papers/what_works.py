"""Five differences of methods in several settings, beside those that the papers print.

The data of the lab's first page and of its picture. The first four settings are those of a
factorial with MiniLM on TREC and Subj (`results/why/PLAN.md`): the head reads the mean of the
words, begins at random or at a converged linear probe, and learns at .001 or at the learning rate
of the prompt. In the fifth the head reads the first token, as in IDPG and ID-SPAM. In the sixth a
language model predicts a label word; its differences are read from `results/claims.csv`.

Two further sets of runs answer narrower questions. One repeats the comparison on IDPG's own
samples of 1,000 examples, on one task with both kinds of pooling, and on STS-B with pairs; the
other trains a static prompt of the language model at two layers with six learning rates.

A gain that a paper reports may belong to the method or to the setting in which it was measured,
such as a head that begins at random. The contrast of two methods is measured in both settings; the
*interaction* is the difference between the two contrasts, paired by seed and by test example. Its
interval says whether the settings differ, which two separate intervals do not.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from idp_tutorial.reproduction.papers.claims import REFERENCE_CONTROLS, read_claims
from idp_tutorial.reproduction.papers.statements import printed_differences
from idp_tutorial.runs.logits import has_logits
from idp_tutorial.runs.statistics import paired_bootstrap, per_example_scores
from idp_tutorial.utils.checks import UserError
from idp_tutorial.utils.records import read_records

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "collect_scores",
    "estimate_contrast_in_setting",
    "estimate_interaction",
    "CONTRASTS",
    "SETTINGS",
    "read_factorial",
    "read_controls",
    "contrast_table",
    "draw_contrasts",
    "pooling_table",
]


def collect_scores(
    records: Sequence[dict],  # of several tasks, methods, settings and seeds
    method: str,
    setting: Mapping[str, Any],  # options and their values, such as `head_init='random'`
    folder: Path | str,  # folder of the records
) -> dict[str, np.ndarray]:  # task: scores in percent `[S,N]` of S seeds and N examples
    """Return the score of each test example of a method's runs in one setting.

    Runs without logits only served to choose a learning rate, and are left out. Raises: `UserError`
    for two runs of one seed.
    """
    by_task: dict[str, dict[int, np.ndarray]] = {}
    for record in records:
        is_wanted = record["method"] == method and has_logits(record, folder)
        if not is_wanted or any(record.get(name) != value for name, value in setting.items()):
            continue
        runs = by_task.setdefault(record["task"], {})
        if record["seed"] in runs:
            raise UserError(
                f"{method} on {record['task']} has two runs with seed {record['seed']} in the "
                f"setting {dict(setting)}: name more options, or keep one learning rate."
            )
        runs[record["seed"]] = per_example_scores(record, folder)
    scores = {}
    for task, runs in by_task.items():
        scores[task] = np.stack([runs[seed] for seed in sorted(runs)])
    return scores


def _differences(
    records: Sequence[dict], a: str, b: str, setting: Mapping[str, Any], folder: Path | str
) -> dict[str, np.ndarray]:
    """Return `a - b` for each seed and example of every task that both methods have."""
    of_a = collect_scores(records, a, setting, folder)
    of_b = collect_scores(records, b, setting, folder)
    tasks = [task for task in of_a if task in of_b]
    for task in tasks:
        if of_a[task].shape != of_b[task].shape:
            raise UserError(
                f"{a} and {b} have {len(of_a[task])} and {len(of_b[task])} runs on {task} in the "
                f"setting {dict(setting)}: run the missing seeds."
            )
    return {task: of_a[task] - of_b[task] for task in tasks}


def _estimate(differences: dict[str, np.ndarray]) -> dict[str, Any] | None:
    """Return the estimate of the mean over all tasks, which are added to it."""
    if not differences:
        return None
    values = [*differences.values()]
    estimate = paired_bootstrap(values, [np.zeros_like(d) for d in values])
    return dict(estimate, tasks=[*differences])


def estimate_contrast_in_setting(
    records: Sequence[dict],
    a: str,  # name of a method
    b: str,  # the method that is subtracted
    setting: Mapping[str, Any],  # options and their values
    folder: Path | str,  # folder of the records
) -> dict[str, Any] | None:  # of `paired_bootstrap`, and `tasks`; None without common tasks
    """Estimate `a - b` in one setting, over all tasks, seeds and examples."""
    return _estimate(_differences(records, a, b, setting, folder))


def estimate_interaction(
    records: Sequence[dict],
    a: str,  # name of a method
    b: str,  # the method that is subtracted
    first: Mapping[str, Any],  # options of one setting
    second: Mapping[str, Any],  # options of the setting that is subtracted
    folder: Path | str,  # folder of the records
) -> dict[str, Any] | None:  # of `paired_bootstrap`, and `tasks`; None without common tasks
    """Estimate by how much `a - b` is larger in the first setting than in the second."""
    in_first = _differences(records, a, b, first, folder)
    in_second = _differences(records, a, b, second, folder)
    return _estimate({t: in_first[t] - in_second[t] for t in in_first if t in in_second})


# label: the two methods, the published difference, the claim with SmolLM2
CONTRASTS: dict[str, tuple[tuple[str, str], str, str | None]] = {
    "M-IDPG − prompt tuning": (
        ("m-idpg-phm", "prompt-tuning"),
        "idpg-1: M-IDPG-PHM − Prompt-tuning",
        None,
    ),
    "M-IDPG − S-IDPG": (
        ("m-idpg-phm", "s-idpg-phm"),
        "idpg-1: M-IDPG-PHM − S-IDPG-PHM",
        None,
    ),
    "late − input (static)": (
        ("lpt", "prompt-tuning"),
        "lpt-1: LPT w/o PG − Prompt Tuning",
        "lpt-late-lm",
    ),
    "NPG − static (both late)": (
        ("lpt-npg", "lpt"),
        "lpt-1: LPT w/ NPG − LPT w/o PG",
        "lpt-npg-lm",
    ),
    "NPG − prompt tuning": (
        ("lpt-npg", "prompt-tuning"),
        "lpt-1: LPT w/ NPG − Prompt Tuning",
        "lpt-124",
    ),
}
_MEAN = dict(pooling="mean")
CONVERGED = "head from a probe, prompt's learning rate"
FIRST_TOKEN = "head from a probe, at the first token"
SETTINGS: dict[str, dict[str, Any]] = {  # of the factorials
    "random head, learning rate 0.001": dict(_MEAN, head_init="random", head_lr=1e-3),
    "random head, prompt's learning rate": dict(_MEAN, head_init="random", head_lr=None),
    "head from a probe, learning rate 0.001": dict(_MEAN, head_init="probe", head_lr=1e-3),
    CONVERGED: dict(_MEAN, head_init="probe", head_lr=None),
    FIRST_TOKEN: dict(pooling="cls", head_init="probe", head_lr=None),
}
LANGUAGE_MODEL = "SmolLM2, label word"
_TASK_NAMES = {"trec": "TREC", "subj": "Subj"}
FEW_SHOT_TASKS = {"cr": "CR", "mr": "MR", "sst2": "SST-2", "stsb": "STS-B"}  # 1,000 examples


def read_factorial(
    folder: Path | str,  # `results/why`
    steps: int = 310,
    # 'head'; 'readout' for a head that reads `<s>`; 'task' for IDPG's samples of 1,000 examples,
    # 'late-1000' for late prompts, and 'first-token-1000' for a head that reads `<s>` there
    name: str = "head",
) -> list[dict]:
    """Read the records of a factorial on all tasks."""
    return read_records(*sorted(Path(folder).glob(f"{name}-*-{steps}.jsonl")))


def read_controls(
    folder: Path | str,  # `results/why`
) -> list[dict]:
    """Read the runs of the controls with MiniLM on the tasks of the factorials.

    They have as many training examples: all of TREC and Subj, 1,000 of the other tasks.
    """
    return [
        record
        for record in read_records(Path(folder).parent / "claims/controls-minilm.jsonl")
        if record["method"] in REFERENCE_CONTROLS
        and record["task"] in _TASK_NAMES | FEW_SHOT_TASKS
        and record["shots"] == (None if record["task"] in _TASK_NAMES else 1000)
    ]


def _mean_of_controls(
    controls: Sequence[dict],  # of `read_controls`
) -> pd.DataFrame:  # index: task and method
    """Return the mean validation and test score of each control on each task."""
    columns = ["task", "method", "validation", "score"]
    return pd.DataFrame(controls, columns=columns).groupby(["task", "method"]).mean()


def _better_control_scores(
    controls: Sequence[dict],  # of `read_controls`
) -> dict[str, float]:  # by task
    """Return the test score of the control with the better validation score on each task."""
    means = _mean_of_controls(controls)
    better = means.validation.groupby("task").idxmax()
    return {str(task): float(means.score[control]) for task, control in better.items()}


_INTERVAL = ("effect", "low", "high", "detectable")


def _numbers(estimate: Mapping[str, Any], *columns: str) -> dict[str, float]:
    return {column: float(estimate[column]) for column in columns}


def _contrast_row(
    records: Sequence[dict],
    pair: tuple[str, str],
    setting: Mapping[str, Any],
    folder: Path | str,
    published: Mapping[str, float],  # the paper's difference by task
    control_scores: Mapping[str, float],  # by task
) -> dict[str, Any] | None:
    """Return the columns of `contrast_table` for two methods in one setting of a factorial."""
    estimate = estimate_contrast_in_setting(records, *pair, setting, folder)
    if estimate is None:
        return None
    tasks = estimate["tasks"]
    row: dict[str, Any] = dict(_numbers(estimate, *_INTERVAL))
    if common := [task for task in tasks if task in published]:
        row["paper"] = mean(published[task] for task in common)
    if all(task in control_scores for task in tasks):
        scores = collect_scores(records, pair[1], setting, folder)
        row["control"] = mean(control_scores[task] - float(scores[task].mean()) for task in tasks)
    return row | dict(tasks=" ".join(_TASK_NAMES[task] for task in tasks))


def contrast_table(
    records: Sequence[dict],  # of `read_factorial`, with the names 'head' and 'readout'
    folder: Path | str,  # folder of the records
    claims_file: Path | str,  # `results/claims.csv`
    controls: Sequence[dict] = (),  # of `read_controls`
) -> pd.DataFrame:
    """Return the differences in points, a row for each contrast and setting.

    The columns are contrast, setting, effect, low, high, detectable, paper, control and tasks.
    `paper` is the published difference on those of the tasks that the paper has, or NaN.
    `control` is the difference with the first method replaced by the better of two controls
    (on validation), so a method whose `effect` is smaller scores less than the control.
    """
    claims = {row["id"]: row for row in read_claims(claims_file)}
    control_scores = _better_control_scores(controls)
    rows = []
    for label, (pair, printed, claim) in CONTRASTS.items():
        published = printed_differences(f"{printed}; backbone=RoBERTa-large")
        for name, setting in SETTINGS.items():
            row = _contrast_row(records, pair, setting, folder, published, control_scores)
            if row:
                rows.append(dict(contrast=label, setting=name, **row))
        if claim:
            numbers = _numbers(claims[claim], *_INTERVAL)
            # the claim has the first method minus the control
            above = float(claims[claim]["above"].split()[0])
            numbers |= dict(paper=float(claims[claim]["published"]))
            numbers |= dict(control=numbers["effect"] - above)
            names = claims[claim]["tasks"].upper()
            rows.append(dict(contrast=label, setting=LANGUAGE_MODEL, **numbers, tasks=names))
    columns = ["contrast", "setting", *_INTERVAL, "paper", "control", "tasks"]
    return pd.DataFrame(rows, columns=columns)


def draw_contrasts(
    table: pd.DataFrame,  # of `contrast_table`
) -> "Figure":
    """Draw a dot with its interval for each contrast and setting.

    A grey bar has the better control in the place of the first method; hollow: the paper's value.
    """
    import matplotlib.pyplot as plt

    colors = dict(
        zip([*SETTINGS, LANGUAGE_MODEL], ("C3", "C1", "C0", "C9", "C2", "C4"), strict=True)
    )
    figure, axes = plt.subplots(1, len(CONTRASTS), figsize=(10, 3.2), sharey=True)
    names = [*colors]
    control = dict(marker="|", color="0.35", markersize=15, markeredgewidth=2.5, linestyle="none")
    paper = dict(marker="o", color="black", fillstyle="none", markersize=8, linestyle="none")
    for axis, contrast in zip(axes, CONTRASTS, strict=True):
        axis.axvline(0, color="grey", linewidth=0.8)
        for row in table[table.contrast == contrast].itertuples():
            y = -names.index(row.setting)
            axis.plot(row.control, y, **control)
            axis.plot([row.low, row.high], [y, y], color=colors[row.setting])
            axis.plot(row.effect, y, "o", color=colors[row.setting], markersize=5)
            axis.plot(row.paper, y, **paper)
        axis.set_title(contrast, fontsize=8)
        axis.set_xlabel("points", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.margins(x=0.08)
        axis.set_ylim(0.6 - len(names), 0.6)
        axis.spines[["top", "right"]].set_visible(False)
    labels = [f"MiniLM, {name}" if name in SETTINGS else name for name in names]
    axes[0].set_yticks([-i for i in range(len(names))], labels, fontsize=8)
    (in_place,) = axes[0].plot([], [], **control, label="a control in place of the first method")
    (printed,) = axes[0].plot([], [], **paper, label="the paper's value (IDPG: on Subj)")
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.legend(
        handles=[in_place, printed], loc="lower right", ncols=2, fontsize=8, frameon=False
    )
    return figure


POOLING_SETTINGS: dict[str, dict[str, Any]] = {  # what the head reads; it begins at a probe of that
    "mean of the words": SETTINGS[CONVERGED],
    "first token": SETTINGS[FIRST_TOKEN],
}
POOLING_CONTRASTS: dict[str, tuple[str, str]] = {  # label: two methods
    "prompt tuning − head alone": ("prompt-tuning", "head-only"),
    "S-IDPG − head alone": ("s-idpg-phm", "head-only"),
    "M-IDPG − head alone": ("m-idpg-phm", "head-only"),
    "late static prompt − head alone": ("lpt", "head-only"),
    "NPG − head alone": ("lpt-npg", "head-only"),
    **{label: pair for label, (pair, _, _) in CONTRASTS.items()},
}


def pooling_table(
    # of `read_factorial` with a head at the mean and one at the first token, on common tasks
    records: Sequence[dict],
    folder: Path | str,  # folder of the records
    controls: Sequence[dict] = (),  # of `read_controls`
) -> pd.DataFrame:  # columns: contrast, each task with each pooling, difference, p, detectable
    """Return each contrast by task and pooling, and by how much it is larger at the first token.

    The difference, its interval, p-value and detectable size are over all tasks. With controls, the
    last row has the probe of the frozen states, which is the same for both kinds of pooling.
    """
    mean_setting, first_setting = POOLING_SETTINGS.values()
    task_names = _TASK_NAMES | FEW_SHOT_TASKS
    rows = []
    for label, (a, b) in POOLING_CONTRASTS.items():
        interaction = estimate_interaction(records, a, b, first_setting, mean_setting, folder)
        if interaction is None:
            continue
        row: dict[str, Any] = dict(contrast=label)
        for task in interaction["tasks"]:
            of_task = [record for record in records if record["task"] == task]
            for name, setting in POOLING_SETTINGS.items():
                estimate = estimate_contrast_in_setting(of_task, a, b, setting, folder)
                assert estimate is not None  # the interaction has this task
                row[f"{task_names[task]}, {name}"] = float(estimate["effect"])
        for column, key in (("", "effect"), (", low", "low"), (", high", "high")):
            row[f"difference{column}"] = float(interaction[key])
        rows.append(row | _numbers(interaction, "p", "detectable"))
    table = pd.DataFrame(rows)
    if controls:
        row = dict(contrast="probe − head alone")
        for name, setting in POOLING_SETTINGS.items():
            for task, scores in collect_scores(records, "head-only", setting, folder).items():
                column = f"{task_names[task]}, {name}"
                probe = _mean_of_controls(controls).score.get((task, "probe"))
                if probe is not None and column in table:
                    row[column] = probe - float(scores.mean())
        table = pd.concat([table, pd.DataFrame([row])], ignore_index=True)
    return table
