"""The definition of a task: its labels, splits, templates, encoding and metrics.

Many differences between the scores of the papers are not differences between methods. They are
differences between *tasks of the same name*: another template, another split for selecting the
checkpoint, another F1. So a task is defined once, completely, and every method uses the same
definition.

A masked language model predicts masked tokens. LPT therefore formulates classification as a
masked token: `S1 . It was <mask> .`, where *great* means positive and *terrible* negative. GPT-2
has no mask token and continues the text: `S1 It was …`

`TaskConfig` has the options that choose a task, its data and its examples.
"""

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from idp_tutorial.data.encoding import append_targets, tokenize_rows
from idp_tutorial.data.metrics import (
    METRICS,
    MULTI_LABEL_METRICS,
    QUESTION_METRICS,
    REGRESSION_METRICS,
    compute_metric,
    exact_match,
)
from idp_tutorial.data.templates import check_max_len
from idp_tutorial.utils.batch import Batch
from idp_tutorial.utils.checks import Range, UserError
from idp_tutorial.utils.digests import compute_digest
from idp_tutorial.utils.schemas import Count, Finite, Rule

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXT_COLUMNS = ("sentence1", "sentence2")  # columns of a row with its texts


def _template_variants(
    code: str, causal: str, paper: str | None = None, causal_paper: str | None = None
) -> dict[str, str]:
    """Return the four variants of a template by name; those of the paper default to the code's."""
    return {
        "code": code,
        "paper": paper or code,
        "causal code": causal,
        "causal paper": causal_paper or causal,
    }


_THEY_ARE_TEMPLATES = dict(
    causal="{s1}{s2} They are {mask}", causal_paper="{s1} {s2} They are {mask}"
)  # LPT's code writes no space between the sentences
TEMPLATES = {  # LPT, Tables 8 and 9 (Table 9 has only Subj, TREC, MRPC and RTE)
    "review": _template_variants(
        "{s1} . It was {mask} .", "{s1} It was {mask}", paper="{s1} It was {mask} ."
    ),
    # in the paper the mask comes first, which is impossible for GPT-2
    "question": _template_variants(
        "{mask} : {s1}", "{s1} It was {mask}", causal_paper="{mask} : {s1}"
    ),
    "entailment": _template_variants("{s1} ? {mask} , {s2}", **_THEY_ARE_TEMPLATES),
    "paraphrase": _template_variants(
        "{s1} ? {mask} , {s2}", paper="{s1} {mask} , {s2}", **_THEY_ARE_TEMPLATES
    ),
    "duplicate": _template_variants("{s1} {mask} , {s2}", **_THEY_ARE_TEMPLATES),
}


def _check_metric(task: "Task") -> None:
    """Raise `UserError` unless the main metric fits the labels."""
    if task.is_generation:
        allowed = ["exact_match"]
    elif task.multi_label:
        allowed = [*MULTI_LABEL_METRICS]
    elif task.labels:
        excluded = {"micro_f1", "subset_accuracy", *REGRESSION_METRICS}
        excluded |= {"f1"} if len(task.labels) != 2 else set()
        excluded |= set() if task.grouping else {*QUESTION_METRICS}
        allowed = [name for name in METRICS if name not in excluded]
    else:
        allowed = [*REGRESSION_METRICS]
    if not {*task.metric.split("+")} <= {*allowed}:
        raise UserError(
            f"task {task.name!r:.80}: metric {task.metric!r:.80} does not fit a task that "
            f"{_describe_labels(task)}: use {', '.join(allowed)}, or a mean of two joined by +."
        )


def _check_task(task: "Task") -> None:
    """Raise `UserError` unless the labels, label words, metric and grouping fit together."""
    labels, words = task.labels, task.label_words
    are_tuples = isinstance(labels, tuple) and isinstance(words, tuple)
    groupings = ["", "choose", "each"] if len(labels) == 2 and not task.multi_label else [""]
    if not are_tuples or not all(isinstance(name, str) for name in labels + words):
        problem = "labels and label_words must be tuples of strings"
    elif len({*labels}) < len(labels):
        problem = "labels must be different names"
    elif len(labels) == 1:
        problem = f"there is only the class {labels[0]!r:.80}, and at least two are needed"
    elif len(words) not in (0, len(labels)):
        problem = "give one label word for each label or none"
    elif task.grouping not in groupings:
        problem = "grouping must be 'choose' or 'each' with two labels, false and true, or ''"
    elif (task.is_generation and labels) or (task.multi_label and not labels):
        problem = "is_generation=True takes no labels, and multi_label=True needs labels"
    else:
        _check_metric(task)
        return
    raise UserError(
        f"task {task.name!r:.80}: {problem}, got labels={labels!r:.200}, "
        f"label_words={words!r:.200} and grouping={task.grouping!r:.80}."
    )


def _describe_labels(task: "Task") -> str:
    """Return what the rows of a task have instead of one class, or its classes."""
    if task.is_generation:
        return "generates texts"
    if not task.labels:
        return "is a regression"
    if task.multi_label:
        return "may have several labels in a row"
    return f"has the classes {task.labels}"


def require_classes(
    task: "Task",  # the task to check
    purpose: str,  # what needs the classes, as the subject of the error message
) -> None:
    """Raise `UserError` unless every row of the task has one class."""
    if task.multi_label or not task.labels:
        raise UserError(
            f"{purpose} needs one class for each row, but task {task.name!r} "
            f"{_describe_labels(task)}: use another task, such as 'sentiment'."
        )


_DIGESTED_FIELDS = (  # fields of `Task` that can change a result
    "labels",
    "metric",
    "pair",
    "label_words",
    "templates",
    "label_range",
    "is_generation",
    "max_answer_len",
    "grouping",
)
_DIGESTED_COLUMNS = (*TEXT_COLUMNS, "label", "target")


def _contents_of_rows(rows: Sequence[dict]) -> list[dict]:
    """Return texts and labels; a group, which may be a line number, is numbered from 0."""
    contents = []
    group_numbers: dict[Any, int] = {}
    for row in rows:
        content = {name: row[name] for name in _DIGESTED_COLUMNS if name in row}
        if row.get("group") is not None:
            content["group"] = group_numbers.setdefault(row["group"], len(group_numbers))
        contents.append(content)
    return contents


def mark_best_candidates(
    scores: Sequence[float],  # how likely each row is the correct candidate `[N]`
    groups: Sequence[Hashable],  # the question of each row `[N]`
) -> list[int]:  # 1 for the best row of each question (the first of equals), 0 for the others
    """Choose the candidate with the highest score of each question (COPA)."""
    best: dict[Hashable, int] = {}
    for i, (score, group) in enumerate(zip(scores, groups, strict=True)):
        if group not in best or score > scores[best[group]]:
            best[group] = i
    return [int(best[group] == i) for i, group in enumerate(groups)]


def _is_relative_name(text: str) -> bool:
    path = Path(text)
    is_short = 0 < len(text) <= 300 and "\0" not in text
    return is_short and not path.is_absolute() and ".." not in path.parts


_RelativeName = Annotated[
    str,
    Rule("a name of at most 300 characters without '..' or an absolute path", _is_relative_name),
]


@dataclass(frozen=True)
class Task:
    """Definition of a task: how rows are encoded, and how predictions are scored.

    The types of its fields are also the schema with which a saved task is compared.
    """

    name: _RelativeName  # name of the task, and of its folder in `data`
    labels: tuple[str, ...] = ()  # class names in index order; empty for regression
    metric: str = "accuracy"  # main metric, as in `compute_metric`
    pair: bool = False  # whether a row has `sentence1` and `sentence2`
    label_words: tuple[str, ...] = ()  # one word for each class, for a language-model head
    # template by variant: code, paper, causal code, causal paper
    templates: dict[str, str] = field(default_factory=dict, repr=False)
    # 'LPT' if template and label words are those of LPT; 'ours' if this project chose them
    template_source: Literal["ours", "LPT"] = "ours"
    label_range: tuple[Finite, Finite] = (0.0, 5.0)  # lowest and highest label of a regression
    is_generation: bool = False  # whether a decoder generates the answer, the `target` of a row
    max_answer_len: Count = 32  # generation: maximum number of tokens of an answer, EOS included
    allow_empty_text: bool = False  # accept empty sentences (four of CR's 3,775 published rows are)
    # dataset id on the Hugging Face hub, and configuration; ('bundled',) for the bundled tasks
    hub_dataset: tuple[str, ...] = ()
    # columns on the hub: format strings of the sentences, name of the label column
    columns: tuple[str, str | None, str] = ("{sentence1}", "{sentence2}", "label")
    # label values on the hub in index order, if they are not the indices
    hub_labels: tuple[str | int | float | bool, ...] = ()
    # `(record, its number) → rows`, where format strings are not enough
    convert_row: Callable | None = field(default=None, repr=False)
    # rows of a `group` form a question: 'choose' one (COPA), 'each' may be true (MultiRC)
    grouping: Literal["", "choose", "each"] = ""
    # a row may have any number of the labels, and its `label` is an indicator for each, 0 or 1
    multi_label: bool = False
    # number of training rows held out to select the checkpoint; 0: a tenth, at most 1,000
    max_validation_size: Count = 0
    # rows by split: train, validation (selects the checkpoint), test (reports the score)
    splits: dict[str, list] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("labels", "label_words"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        _check_task(self)

    def split_sizes(self) -> dict[str, int]:
        """Return the number of rows of each split."""
        return {split: len(rows) for split, rows in self.splits.items()}

    def digest(
        self,
        include_test: bool = True,  # False: the test split is not read
    ) -> str:  # 16 hexadecimal digits
        """Return a digest of all that the task asks and of the texts and labels of its splits.

        The name of the task, and the files and lines that rows come from, are not part of it.
        """
        definition = [getattr(self, name) for name in _DIGESTED_FIELDS]
        definition += ["multi_label"] if self.multi_label else []
        parts: list[Any] = [definition]
        for split, rows in self.splits.items():
            if include_test or split != "test":
                parts.append([split, _contents_of_rows(rows)])
        return compute_digest(json.dumps(part, sort_keys=True).encode() for part in parts)

    def with_metric(
        self,
        metric: str | None,  # as in `compute_metric`; None: that of the task
    ) -> "Task":
        """Return the task with another main metric, which selects checkpoints.

        Raises: `UserError` for a metric that does not fit the labels.
        """
        return self if metric in (None, self.metric) else replace(self, metric=metric)

    @property
    def text_columns(self) -> tuple[str, ...]:
        """Names of the one or two columns of a row with its texts."""
        return TEXT_COLUMNS[: 1 + self.pair]

    @property
    def source_columns(self) -> tuple[str | None, str | None, str | None]:
        """Names of the columns of text, second text and label in the table of the rows."""
        text, text2, label = [(column or "").strip("{}") or None for column in self.columns]
        return text, text2, label

    @property
    def is_regression(self) -> bool:
        """True for a task whose labels are numbers."""
        return not self.labels and not self.is_generation

    def template(
        self,
        variant: str | None,  # None, 'code', 'paper', or a string with `{s1}` `{s2}` `{mask}`
        causal: bool = False,  # is the model a decoder, without a mask token?
    ) -> str | None:
        """Return the template of a variant; None and strings with slots are returned unchanged."""
        if variant is None or "{" in variant:
            return variant
        key = f"causal {variant}" if causal else variant
        if self.is_generation and not self.templates:
            return "{s1}{s2} ={mask}" if self.pair else "{s1} ={mask}"
        if key not in self.templates:
            known = "code and paper" if self.templates else "none"
            raise UserError(
                f"task {self.name!r} has no template {variant!r} (known: {known}): "
                "pass a string such as '{s1} It was {mask} .', or None for plain text."
            )
        return self.templates[key]

    def encode(
        self,
        rows: Sequence[dict],  # rows with `sentence1`, perhaps `sentence2`, perhaps `label`
        tokenizer: "PreTrainedTokenizerBase",  # with or without a mask token
        # maximum number of tokens of an example; sentences are truncated, the template is not
        max_len: int = 256,
        template: str | None = None,  # variant or string, as for `template`
        # is the model a decoder? None: yes if the tokenizer has no mask token
        causal: bool | None = None,
        # `input_ids`, `token_type_ids`, `label`; with a template `mask_position`
    ) -> list[dict]:
        """Convert rows to token ids."""
        if causal is None:
            causal = tokenizer.mask_token_id is None
        if not self.is_generation:
            return tokenize_rows(rows, tokenizer, max_len, self.template(template, causal), causal)
        if not causal:
            raise UserError(
                f"task {self.name!r} needs a model that generates text: use a decoder ('smollm2')."
            )
        check_max_len(max_len, self.max_answer_len, "the answer (max_answer_len)")
        template = self.template(template or "code", causal)
        examples = tokenize_rows(rows, tokenizer, max_len - self.max_answer_len, template, causal)
        return append_targets(examples, rows, tokenizer, self.max_answer_len)

    def word_ids(
        self,
        tokenizer: "PreTrainedTokenizerBase",  # tokenizer of the model
    ) -> list[int]:  # one token id for each class, in index order
        """Return the token ids of the label words, as they are encoded after a space."""
        if not self.label_words:
            raise UserError(
                f"task {self.name!r} has no label words: use a classification head, or label_words="
            )
        token_ids = []
        for word in self.label_words:
            ids = tokenizer(" " + word, add_special_tokens=False)["input_ids"]
            if len(ids) != 1 or ids[0] == tokenizer.unk_token_id or ids[0] in token_ids:
                raise UserError(
                    f"task {self.name!r}: each label word must be another single token, but "
                    f"{word!r} is {tokenizer.tokenize(' ' + word)}: use other label_words."
                )
            token_ids.append(ids[0])
        return token_ids

    def to_predictions(
        self,
        # output of a model: logits `[N,C]`, numbers from 0 to 1 `[N,1]` for regression, or texts
        outputs: Any,
        # the question of each row `[N]`, if rows are grouped
        groups: Sequence[Hashable] | None = None,
    ) -> list:  # class indices, numbers or texts; for several labels of a row indicators `[N,C]`
        """Convert the output of a model to predictions.

        Of several labels of a row, those with a probability above .5 are predicted.
        """
        if self.is_generation:
            return outputs
        if self.multi_label:
            return (outputs > 0).int().tolist()
        if self.is_regression:
            low, high = self.label_range
            return (outputs[:, 0] * (high - low) + low).tolist()
        if self.grouping == "choose":
            return mark_best_candidates((outputs[:, 1] - outputs[:, 0]).tolist(), groups or ())
        return outputs.argmax(-1).tolist()

    def label_indicators(
        self,
        names: Sequence[str],  # labels of a row
    ) -> list[int]:  # 1 or 0 for each label of the task
        """Return an indicator for each label of the task, as the rows of `splits` have it."""
        return [int(name in names) for name in self.labels]

    def label_names(
        self,
        indicators: Sequence[int],  # 1 or 0 for each label
    ) -> list[str]:
        """Return the names of the labels of a row that may have several."""
        return [name for name, is_true in zip(self.labels, indicators) if is_true]

    def to_probabilities(
        self,
        outputs: Any,  # logits `[N,C]`
    ) -> Any:  # `[N,C]`; of several labels of a row each is independent of the others
        """Convert logits to the probabilities of the labels, in float64."""
        outputs = outputs.double()
        return outputs.sigmoid() if self.multi_label else outputs.softmax(-1)

    def score(
        self,
        predictions: Any,  # class indices, numbers for regression, or texts `[N]`
        labels: Any,  # labels or target texts `[N]`
        # the question of each row `[N]`, if rows are grouped
        groups: Sequence[Hashable] | None = None,
        all_metrics: bool = True,  # compute all metrics? False: only the main metric
        probabilities: Any = None,  # of each class `[N,C]`, for the main metric `neg_log_loss`
    ) -> dict:  # metric name → percent, the main metric first
        """Compute the metrics that apply to the task."""
        if self.is_generation:
            return dict(exact_match=exact_match(predictions, labels))
        if self.is_regression:
            names = ["pearson+spearman", "pearson", "spearman"]
        elif self.multi_label:
            names = ["micro_f1", "macro_f1", "subset_accuracy"]
        else:
            names = ["accuracy", "macro_f1"]
        if len(self.labels) == 2 and not self.multi_label:
            names += ["f1", "accuracy+f1", "accuracy+macro_f1"]
        if self.grouping and groups is not None:
            names += QUESTION_METRICS if self.grouping == "each" else ["exact"]
        requested = dict.fromkeys([self.metric, *names]) if all_metrics else [self.metric]
        return {
            name: compute_metric(name, predictions, labels, groups, probabilities)
            for name in requested
        }

    def score_outputs(
        self,
        outputs: Any,  # output of a model, as for `to_predictions`
        examples: Sequence[dict],  # output of `encode`, in the same order
        all_metrics: bool = True,  # compute all metrics? False: only the main metric
    ) -> tuple[dict, list]:  # scores by metric, predictions
        """Convert the output of a model to predictions and score them."""
        groups = [e.get("group") for e in examples]
        predictions = self.to_predictions(outputs, groups)
        labels = [e["target" if self.is_generation else "label"] for e in examples]
        probabilities = self.to_probabilities(outputs) if self.metric == "neg_log_loss" else None
        return self.score(predictions, labels, groups, all_metrics, probabilities), predictions


def make_column_templates(
    text: str,  # column of the texts in a table
    text2: str | None,  # column of the second texts; None: the texts are no pairs
    label: str,  # column of the labels
) -> tuple[str, str | None, str]:
    """Return the `columns` of a task whose rows come from these columns of a table."""
    return "{" + text + "}", "{" + text2 + "}" if text2 else None, label


def scale_labels(
    batch: Batch,
    task: Task,  # the task of the batch
) -> Batch:  # the batch with its labels scaled; the same batch for classes
    """Scale the labels of a regression to 0…1 (IDPG divides STS-B's labels by 5)."""
    if not task.is_regression or "label" not in batch:
        return batch
    low, high = task.label_range
    return batch | dict(label=(batch["label"] - low) / (high - low))


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Options that choose a task, its data and its examples."""

    option_group: ClassVar[str] = "a known task"

    task: str = "sentiment"  # key of `TASKS`
    data: str | None = None  # folder of tasks: DATA/TASK/{train,validation,test}.jsonl
    shots: int | None = None  # few-shot: number of training examples (default: all)
    # seed of the few-shot sample and of the held-out split
    split_seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    # few-shot samples keep the proportions of the labels (LPT); False: sample at random (IDPG)
    stratified: bool = True
    max_len: Annotated[int, Range(1, 10**6)] = 128  # tokens of an example; longer ones are cut
