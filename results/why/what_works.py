"""Generated minus static prompts at the same place, and five differences of methods in settings.

The data of the lab's first page. `MATCHED_PLACES` lists every contrast of this project in which
only the generation of the prompt differs: both prompts enter before the same layer, or in the same
layers. `matched_place_table` estimates the contrasts, and `draw_matched_places` draws them.

The five differences that the papers print change more than one thing. The first four settings are
those of a factorial with MiniLM on TREC and Subj (`results/why/PLAN.md`): the head reads the mean
of the words, begins at random or at a converged linear probe, and learns at .001 or at the learning
rate of the prompt. In the fifth the head reads the first token, as in IDPG and ID-SPAM.

Two further sets of runs answer narrower questions. One repeats the comparison on IDPG's own
samples of 1,000 examples, on one task with both kinds of pooling, and on STS-B with pairs; the
other trains a static prompt of the language model at two layers with six learning rates.

A gain that a paper reports may belong to the method or to the setting in which it was measured,
such as a head that begins at random. The contrast of two methods is measured in both settings; the
*interaction* is the difference between the two contrasts, paired by seed and by test example. Its
interval says whether the settings differ, which two separate intervals do not. Where the head
learns at two rates, `estimate_main_effect` averages the interaction over them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from idp_tutorial.runs.logits import has_logits
from idp_tutorial.runs.statistics import (
    estimate_contrast,
    paired_bootstrap,
    per_example_scores,
)
from idp_tutorial.utils.checks import UserError
from idp_tutorial.utils.records import read_records
from results.claims.statements import printed_differences
from results.claims.verdicts import REFERENCE_CONTROLS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


def _mean_over_settings(
    records: Sequence[dict],
    a: str,
    b: str,
    settings: Sequence[Mapping[str, Any]],
    folder: Path | str,
) -> dict[str, np.ndarray]:
    """Return `a - b` by seed and example of the tasks that all settings have, as their mean.

    The settings have the same seeds and examples, so these remain the units of an interval.
    """
    by_task: dict[str, list[np.ndarray]] = {}
    for setting in settings:
        for task, differences in _differences(records, a, b, setting, folder).items():
            by_task.setdefault(task, []).append(differences)
    return {task: np.mean(d, axis=0) for task, d in by_task.items() if len(d) == len(settings)}


def estimate_mean_contrast(
    records: Sequence[dict],
    a: str,  # name of a method
    b: str,  # the method that is subtracted
    settings: Sequence[Mapping[str, Any]],  # of the same seeds
    folder: Path | str,  # folder of the records
) -> dict[str, Any] | None:  # of `paired_bootstrap`, and `tasks`; None without common tasks
    """Estimate the mean of `a - b` over several settings, all tasks, seeds and examples."""
    return _estimate(_mean_over_settings(records, a, b, settings, folder))


def estimate_main_effect(
    records: Sequence[dict],
    a: str,  # name of a method
    b: str,  # the method that is subtracted
    first: Sequence[Mapping[str, Any]],  # settings on one side of the factor
    second: Sequence[Mapping[str, Any]],  # settings on the side that is subtracted
    folder: Path | str,  # folder of the records
) -> dict[str, Any] | None:  # of `paired_bootstrap`, and `tasks`; None without common tasks
    """Estimate by how much `a - b` is larger on one side of a factorial than on the other."""
    on_first, on_second = (
        _mean_over_settings(records, a, b, settings, folder) for settings in (first, second)
    )
    return _estimate({t: on_first[t] - on_second[t] for t in on_first if t in on_second})


def find_collapsed_runs(
    records: Sequence[dict],
    fall: float = 20.0,  # in points of the validation score
) -> list[dict]:
    """Return the runs whose last validation score is far below their best one."""
    collapsed = []
    for record in records:
        scores = [score for _, score in record.get("history") or ()]
        if scores and max(scores) - scores[-1] > fall:
            collapsed.append(record)
    return collapsed


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


def _numbers(estimate: Mapping[str, Any], *columns: str) -> dict[str, float]:
    return {column: float(estimate[column]) for column in columns}


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


class MatchedPlace(NamedTuple):
    """A contrast in which only the generation of the prompt differs."""

    group: str  # a key of `GROUP_COLORS`
    setting: str  # what the runs have in common
    a: str  # the generated prompt, a side of a contrast as in `runs.statistics`
    b: str  # the static prompt at the same place
    files: str  # patterns of files in the folder of results
    keep: Mapping[str, Any] = {}  # options and their values
    printed: str = ""  # the difference in the papers, for `printed_differences`


AT_INPUT, EVERY_LAYER, HALF_WAY = "input", "every layer", "half-way"
NO_HEAD, NO_WORD = "no head", "no word decides"
GROUP_COLORS = {AT_INPUT: "C0", EVERY_LAYER: "C2", HALF_WAY: "C1", NO_HEAD: "C3", NO_WORD: "C4"}
TRAINED_HEAD = (AT_INPUT, EVERY_LAYER, HALF_WAY)
_S_ON_ALL = "idpg-1: S-IDPG-PHM − Prompt-tuning"
_NPG_ON_ALL = "lpt-1: LPT w/ NPG − LPT w/o PG; backbone=RoBERTa-large"
_ONE_LAYER = ("s-idpg-phm", "prompt-tuning")
_LAYERS = ("m-idpg-phm", "p-tuning-v2")
_ADDED = ("m-idpg-phm", "p-tuning-v2 insertion=add")
_LATE = ("lpt-npg", "lpt")
_FACTORIAL = [name for name in SETTINGS if name != FIRST_TOKEN]
_HEAD_FILES = "why/head-*-310.jsonl"
_CONVERGED_FILES = "claims/converged-*.jsonl"
_SENTENCES = "why/task-cr-310.jsonl why/task-mr-310.jsonl why/task-sst2-310.jsonl"
_FIRST_TOKEN_FILES = "why/readout-trec-310.jsonl why/confirmation-trec-310.jsonl"
_CR_FILES = "why/first-token-1000-cr-310.jsonl why/late-1000-cr-310.jsonl"


def _k_1000(pair: str) -> str:
    return f"idpg-3: {pair}; setting=K=1000"


MATCHED_PLACES: tuple[MatchedPlace, ...] = (
    *(
        MatchedPlace(AT_INPUT, name, *_ONE_LAYER, _HEAD_FILES, SETTINGS[name], _S_ON_ALL)
        for name in _FACTORIAL
    ),
    *(
        MatchedPlace(
            AT_INPUT,
            f"1,000 sentences, {name}",
            *_ONE_LAYER,
            _SENTENCES,
            dict(head_init=head),
            _k_1000("S-IDPG-PHM − prompt tuning"),
        )
        for head, name in (("random", "random head"), ("probe", "head from a probe"))
    ),
    MatchedPlace(AT_INPUT, "head from a probe, one epoch", *_ONE_LAYER, _CONVERGED_FILES),
    MatchedPlace(
        AT_INPUT, "first token, ten seeds", *_ONE_LAYER, _FIRST_TOKEN_FILES, SETTINGS[FIRST_TOKEN]
    ),
    MatchedPlace(
        AT_INPUT,
        "first token, 1,000 sentences",
        *_ONE_LAYER,
        _CR_FILES,
        SETTINGS[FIRST_TOKEN],
        _k_1000("S-IDPG-PHM − prompt tuning"),
    ),
    MatchedPlace(
        AT_INPUT,
        "IDPG's settings, 500 sentences",
        *_ONE_LAYER,
        "why/as-published.jsonl",
        dict(task="subj"),
        "idpg-3: S-IDPG-PHM − prompt tuning; setting=K=500",
    ),
    *(
        MatchedPlace(
            EVERY_LAYER,
            f"1,000 sentences, {name}",
            *_LAYERS,
            _SENTENCES,
            dict(head_init=head),
            _k_1000("M-IDPG-PHM − P-Tuningv2"),
        )
        for head, name in (("random", "random head"), ("probe", "head from a probe"))
    ),
    MatchedPlace(EVERY_LAYER, "head from a probe, one epoch", *_ADDED, _CONVERGED_FILES),
    MatchedPlace(
        EVERY_LAYER, "100 questions, four samples", *_ADDED, "claims/few-100-minilm.jsonl"
    ),
    *(
        MatchedPlace(HALF_WAY, name, *_LATE, _HEAD_FILES, SETTINGS[name], _NPG_ON_ALL)
        for name in _FACTORIAL
    ),
    MatchedPlace(
        HALF_WAY, "head from a probe, one epoch", *_LATE, _CONVERGED_FILES, {}, _NPG_ON_ALL
    ),
    MatchedPlace(
        HALF_WAY,
        "first token, ten seeds",
        *_LATE,
        _FIRST_TOKEN_FILES,
        SETTINGS[FIRST_TOKEN],
        _NPG_ON_ALL,
    ),
    MatchedPlace(
        HALF_WAY,
        "ID-SPAM, first token, ten seeds",
        "id-spam",
        "lpt",
        f"{_FIRST_TOKEN_FILES} why/id-spam-trec-310.jsonl",
        SETTINGS[FIRST_TOKEN],
    ),
    MatchedPlace(
        HALF_WAY, "first token, 1,000 sentences", *_LATE, _CR_FILES, SETTINGS[FIRST_TOKEN]
    ),
    *(
        MatchedPlace(
            NO_HEAD,
            f"{30 - layer} layer{'s' * (layer < 29)} above",
            f"lpt-npg layer={layer}",
            f"lpt layer={layer}",
            "why/layers-trec-600.jsonl",
            {},
            "lpt-4: LPT w/ NPG − LPT w/o PG; backbone=GPT2-large" if layer == 15 else "",
        )
        for layer in (15, 24, 29)
    ),
    *(
        MatchedPlace(
            NO_HEAD,
            f"{30 - layer} layer{'s' * (layer < 29)} above",
            f"lpt-npg layer={layer}",
            f"lpt layer={layer}",
            "why/layers-subj-k1000-600.jsonl",
        )
        for layer in (24, 27, 29)
    ),
    *(
        MatchedPlace(NO_WORD, "3,000 steps", *_LATE, f"why/toy-{task}-tiny.jsonl")
        for task in ("two-domains", "two-domains-order")
    ),
)


def _final_runs(records: Sequence[dict]) -> list[dict]:
    """Return the runs with logits at the learning rate that has the most seeds.

    The other rates only served to choose it. A run that is stored twice counts once.
    """
    by_rate: dict[tuple, dict[Any, dict[int, dict]]] = {}
    for record in records:
        if record["status"] == "done" and "logits" in record:
            fields = ("task", "method", "layer", "insertion", "split_seed")
            cell = tuple(record.get(field) for field in fields)
            rates = by_rate.setdefault(cell, {})
            rates.setdefault(record.get("lr"), {})[record["seed"]] = record
    final: list[dict] = []
    for rates in by_rate.values():
        final += max(rates.values(), key=len).values()
    return final


def _read_place(contrast: MatchedPlace, results_folder: Path) -> list[dict]:
    """Return the final runs of a contrast, each with its `folder`."""
    records = []
    for pattern in contrast.files.split():
        for file in sorted(results_folder.glob(pattern)):
            records += [{**r, "folder": file.parent} for r in read_records(file)]
    methods = {side.split()[0] for side in (contrast.a, contrast.b)}
    selected = [
        r
        for r in records
        if r["method"] in methods and all(r.get(k) == v for k, v in contrast.keep.items())
    ]
    return _final_runs(selected)


_PLACE_TASK_NAMES = _TASK_NAMES | FEW_SHOT_TASKS | {"two-domains-order": "word order"}


def matched_place_table(
    results_folder: Path | str,
    contrasts: Sequence[MatchedPlace] = MATCHED_PLACES,
) -> pd.DataFrame:
    """Estimate generated minus static of each contrast, paired by seed and test text.

    The columns are group, setting, tasks, contrast, effect, low, high, p, runs, and paper: the
    published difference on those of the tasks that the paper has, or NaN.
    """
    rows = []
    for contrast in contrasts:
        records = _read_place(contrast, Path(results_folder))
        fields = ("task", "shots", "backbone")
        estimate = estimate_contrast(records, contrast.a, contrast.b, setting_fields=fields)
        if estimate is None:
            raise UserError(
                f"{contrast.files} has no runs of both {contrast.a} and {contrast.b} in the "
                f"setting {dict(contrast.keep)}: restore the records in {results_folder}."
            )
        tasks = [setting["task"] for setting in estimate["settings"]]
        published = printed_differences(contrast.printed) if contrast.printed else {}
        common = [task for task in tasks if task in published]
        row: dict[str, Any] = dict(group=contrast.group, setting=contrast.setting)
        row["tasks"] = ", ".join(_PLACE_TASK_NAMES.get(task, task) for task in tasks)
        row["contrast"] = " − ".join(side.split()[0] for side in (contrast.a, contrast.b))
        row |= {key: float(estimate[key]) for key in ("effect", "low", "high", "p")}
        row["runs"] = estimate["runs"]
        row["paper"] = mean(published[task] for task in common) if common else np.nan
        rows.append(row)
    return pd.DataFrame(rows)


def summarise_matched_places(
    table: pd.DataFrame,  # of `matched_place_table`
) -> dict[str, int]:
    """Count the contrasts with a trained head: all, above and below zero, with small limits.

    `above` and `below` count the intervals that are wholly above or below zero, before any
    correction; `at_or_below` the effects that are not above zero; `below_2` the upper limits
    below 2 points.
    """
    with_head = table[table.group.isin(TRAINED_HEAD)]
    return dict(
        contrasts=len(with_head),
        above=int((with_head.low > 0).sum()),
        below=int((with_head.high < 0).sum()),
        at_or_below=int((with_head.effect.round(2) <= 0).sum()),
        below_2=int((with_head.high < 2).sum()),
    )


def draw_matched_places(
    table: pd.DataFrame,  # of `matched_place_table`
) -> "Figure":
    """Draw a dot with its interval for each contrast, in groups; hollow: the papers' values."""
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    titles = {
        AT_INPUT: "head, at the input",
        EVERY_LAYER: "head, in every layer",
        HALF_WAY: "head, half-way",
        NO_HEAD: "no head (SmolLM2)",
        NO_WORD: "synthetic: no word\ndecides alone",
    }
    figure, axis = plt.subplots(figsize=(5.2, 6.2), dpi=100)
    axis.axvspan(-1, 1, color="0.88", zorder=0)
    axis.axvline(0, color="0.5", linewidth=0.8, zorder=1)
    y = 0.0
    ticks, labels = [], []
    for group, title in titles.items():
        rows = table[table.group == group]
        start = y
        for row in rows.itertuples():
            axis.plot([row.low, row.high], [y, y], color=GROUP_COLORS[group], linewidth=1.6)
            axis.plot(row.effect, y, "o", color=GROUP_COLORS[group], markersize=5)
            axis.plot(row.paper, y, "D", color="black", fillstyle="none", markersize=5.5)
            if group == NO_HEAD:
                axis.annotate(
                    f"{row.setting}, {row.tasks}",
                    (row.high + 0.9, y),
                    fontsize=9.5,
                    va="center",
                    color="0.2",
                )
            y -= 1
        ticks.append((start + y + 1) / 2)
        labels.append(f"{title}\n({len(rows)})")
        y -= 0.9
    axis.set_yticks(ticks, labels, fontsize=9.5)
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(y + 1.2, 0.8)
    axis.set_xlim(-12, 42)
    axis.set_xlabel("generated − static at the same place\n(points of accuracy, 95 %)", fontsize=10)
    axis.spines[["top", "right", "left"]].set_visible(False)
    handles = [
        Line2D([], [], color="0.35", marker="o", markersize=5, label="this project"),
        Line2D(
            [],
            [],
            color="black",
            marker="D",
            fillstyle="none",
            linestyle="none",
            label="the paper's value",
        ),
        Line2D([], [], color="0.88", linewidth=8, label="within ±1 point"),
    ]
    axis.legend(handles=handles, loc="upper right", fontsize=9, frameon=False)
    axis.set_title(
        "On real tasks with a trained head, generating gains nothing", fontsize=11, loc="right"
    )
    figure.tight_layout()
    return figure
