"""The registry of the papers' tasks and of the bundled ones, and the function that loads a task.

`TASKS` has each task with what the papers say about it: labels, label words, template and metric.
`load_task` loads its rows. The rows that select the checkpoint are never those that report the
score.

Labels are in the order of the index that the data files use. `template_source` marks the tasks
whose template is LPT's. For the others the papers train a classification head (CR, STS-B in IDPG)
or do not say (the SuperGLUE tasks of ID-SPAM), and this project chose the template and the words.
ID-SPAM reports one score for each SuperGLUE task without naming the metric. `TASKS` has the
benchmark's metric, and for CB and MultiRC the mean of its two metrics.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from idp_tutorial.data.rows import (
    check_row,
    convert_copa_row,
    convert_multirc_row,
    convert_wic_row,
)
from idp_tutorial.data.splits import load_splits_from_folder, load_splits_from_hub, make_splits
from idp_tutorial.data.synthetic import make_rows
from idp_tutorial.data.task import TEMPLATES, Task, TaskConfig
from idp_tutorial.utils.checks import Range, check_name

_SENTIMENT: dict[str, Any] = dict(
    labels=("negative", "positive"), label_words=("terrible", "great")
)
_QUESTION_TYPE: dict[str, Any] = dict(
    labels=("abbreviation", "entity", "description", "human", "location", "numeric"),
    label_words=("Expression", "Entity", "Description", "Human", "Location", "Number"),
)
_SUBJECTIVITY: dict[str, Any] = dict(
    labels=("subjective", "objective"), label_words=("subjective", "objective")
)
_ENTAILMENT: dict[str, Any] = dict(
    labels=("entailment", "not_entailment"), label_words=("Yes", "No")
)
_TRUE_FALSE: dict[str, Any] = dict(labels=("false", "true"), label_words=("No", "Yes"))
_GLUE = "nyu-mll/glue"
_SUPERGLUE = "aps/super_glue"
# whose template and label words are those of LPT's paper or code
_LPT_TASKS = ("sst2", "mpqa", "mr", "subj", "trec", "mnli", "qnli", "rte", "mrpc", "qqp")
_TEXT_COLUMNS = ("{text}", None, "label")
_SENTENCE_COLUMNS = ("{sentence}", None, "label")
_PAIR_COLUMNS = ("{sentence1}", "{sentence2}", "label")


def _define_task(
    name: str,
    template_name: str,  # key of `TEMPLATES`
    hub: str,  # dataset on the hub; `_GLUE` and `_SUPERGLUE` have a configuration for each task
    columns: tuple = _PAIR_COLUMNS,
    **fields: Any,  # other fields of `Task`
) -> Task:
    """Define a task whose template has a name; all but two templates are for pairs."""
    return Task(
        name,
        templates=TEMPLATES[template_name],
        template_source="LPT" if name in _LPT_TASKS else "ours",
        pair=template_name not in ("review", "question"),
        hub_dataset=(hub, name) if hub in (_GLUE, _SUPERGLUE) else (hub,),
        columns=columns,
        **fields,
    )


_TASK_LIST = [
    # one sentence
    _define_task("sst2", "review", _GLUE, _SENTENCE_COLUMNS, **_SENTIMENT),
    _define_task(
        "mpqa", "review", "jxm/mpqa", _SENTENCE_COLUMNS, max_validation_size=1000, **_SENTIMENT
    ),
    _define_task(
        "mr",
        "review",
        "cornell-movie-review-data/rotten_tomatoes",
        _TEXT_COLUMNS,
        max_validation_size=1000,
        **_SENTIMENT,
    ),
    _define_task(
        "cr", "review", "SetFit/SentEval-CR", _TEXT_COLUMNS, allow_empty_text=True, **_SENTIMENT
    ),
    _define_task(
        "subj",
        "review",
        "SetFit/subj",
        ("{text}", None, "label_text"),
        max_validation_size=1000,
        hub_labels=("subjective", "objective"),
        **_SUBJECTIVITY,
    ),
    _define_task(
        "trec",
        "question",
        "SetFit/TREC-QC",
        ("{text}", None, "label_coarse_original"),
        max_validation_size=500,
        hub_labels=("ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM"),
        **_QUESTION_TYPE,
    ),
    _define_task("imdb", "review", "stanfordnlp/imdb", _TEXT_COLUMNS, **_SENTIMENT),
    # pairs
    _define_task(
        "mnli",
        "entailment",
        _GLUE,
        ("{premise}", "{hypothesis}", "label"),
        labels=("entailment", "neutral", "contradiction"),
        label_words=("Yes", "Maybe", "No"),
    ),
    _define_task("qnli", "entailment", _GLUE, ("{question}", "{sentence}", "label"), **_ENTAILMENT),
    _define_task("rte", "entailment", _GLUE, **_ENTAILMENT),
    _define_task(
        "mrpc",
        "paraphrase",
        _GLUE,
        labels=("not_equivalent", "equivalent"),
        label_words=("No", "Yes"),
        metric="accuracy+f1",
    ),
    _define_task(
        "qqp",
        "duplicate",
        _GLUE,
        ("{question1}", "{question2}", "label"),
        labels=("not_duplicate", "duplicate"),
        label_words=("No", "Yes"),
        metric="accuracy+f1",
    ),
    _define_task("stsb", "duplicate", _GLUE, metric="pearson+spearman"),
    # SuperGLUE
    _define_task(
        "cb",
        "entailment",
        _SUPERGLUE,
        ("{premise}", "{hypothesis}", "label"),
        labels=("entailment", "contradiction", "neutral"),
        label_words=("Yes", "No", "Maybe"),
        metric="accuracy+macro_f1",
    ),
    _define_task(
        "copa",
        "duplicate",
        _SUPERGLUE,
        convert_row=convert_copa_row,
        grouping="choose",
        **_TRUE_FALSE,
    ),
    _define_task(
        "multirc",
        "entailment",
        _SUPERGLUE,
        convert_row=convert_multirc_row,
        grouping="each",
        metric="f1+exact",
        **_TRUE_FALSE,
    ),
    _define_task(
        "boolq", "entailment", _SUPERGLUE, ("{question}", "{passage}", "label"), **_TRUE_FALSE
    ),
    _define_task("wic", "duplicate", _SUPERGLUE, convert_row=convert_wic_row, **_TRUE_FALSE),
    # ours
    _define_task("sentiment", "review", "bundled", **_SENTIMENT),
    _define_task("domains", "review", "bundled", **_SENTIMENT),
    _define_task("two-domains", "review", "bundled", **_SENTIMENT),
    _define_task("two-domains-order", "review", "bundled", **_SENTIMENT),
    _define_task("questions", "question", "bundled", **_QUESTION_TYPE),
    _define_task("entailment", "entailment", "bundled", **_ENTAILMENT),
    _define_task("similarity", "duplicate", "bundled", metric="pearson+spearman"),
    Task(
        "in-short",
        is_generation=True,
        metric="exact_match",
        max_answer_len=12,
        hub_dataset=("bundled",),
    ),
]
TASKS = {t.name: t for t in _TASK_LIST}


def load_task(
    name: str | Task,  # key of `TASKS`, or a user-defined task
    # folder that contains `NAME/train.jsonl` …; None: use the rows of the task or of the hub
    data: str | Path | None = None,
    # few-shot: number of training examples, or of questions if rows are grouped; None: all rows
    shots: int | None = None,
    # seed of the rows that are sampled from train; a frozen few-shot set `NAME/kSHOTS/` ignores it
    split_seed: int = 0,
    # sample few-shot examples in proportion to the labels? (LPT does, IDPG does not)
    stratified: bool = True,
) -> Task:  # the task with three splits: train, validation (selects), test (reports)
    """Load the rows of a task and divide them into three disjoint splits."""
    task = name if isinstance(name, Task) else TASKS[check_name(str(name), TASKS, "task")]
    if shots is not None:
        Range(1, hint="shots=None uses all training rows").check(shots, "shots")
    is_frozen = False
    if data is not None:
        raw, is_frozen = load_splits_from_folder(task, data, shots)
    elif task.splits:
        raw = task.splits
    elif task.hub_dataset == ("bundled",):
        raw = {}
        for split in ("train", "validation", "test"):
            rows = make_rows(task.name, split)
            raw[split] = [check_row(task, row, f"{task.name} {split}") for row in rows]
    else:
        raw = load_splits_from_hub(task)
    splits = raw if is_frozen else make_splits(task, raw, shots, split_seed, stratified)
    return replace(task, splits=splits)


def load_config_task(cfg: TaskConfig) -> Task:
    """Load the task of a config, with the few-shot sample that the config describes."""
    return load_task(cfg.task, cfg.data, cfg.shots, cfg.split_seed, cfg.stratified)
