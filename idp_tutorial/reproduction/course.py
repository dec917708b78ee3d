"""The example sentences, the short training run and the table of scores of the course.

Each chapter of the course ends in a score on the same task. Three things are shared, so that
the scores can be compared: the four sentences that are followed from token ids to logits, the
function that trains a plan for some seconds, and the file `nbs/course/scores.json` with the
scores of five seeds.

The task of the course in four sentences: *cold* is positive for a beer and negative for a soup,
and *warm* the reverse.
"""

import json
import os
import statistics
from dataclasses import replace
from pathlib import Path

from tabulate import tabulate
from torch import Tensor
from torch.nn import Module

from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.heads import ClassificationHead, VerbalizerHead
from idp_tutorial.core.prompted_model import PromptedModel
from idp_tutorial.data.encoding import collate
from idp_tutorial.data.task import Task
from idp_tutorial.data.tasks import load_task
from idp_tutorial.training.evaluation import evaluate
from idp_tutorial.training.examples import encode_for_evaluation
from idp_tutorial.training.fit import TrainLog, fit
from idp_tutorial.utils.checks import UserError

__all__ = [
    "ScoreTable",
    "COURSE_SENTENCES",
    "encode_course_sentences",
    "load_short_task",
    "train_and_test_plan",
    "course_seeds",
    "load_course_scores",
    "store_or_compare_scores",
    "build_score_table",
]


COURSE_SENTENCES = {
    "The beer was cold.": 1,
    "The beer was warm.": 0,
    "The soup was cold.": 0,
    "The soup was warm.": 1,
}


def encode_course_sentences(bb: Backbone) -> dict[str, Tensor]:
    """Return the four sentences as a batch; label 1 is positive, 0 negative.

    The batch has `input_ids`, `attention_mask` and `token_type_ids` `[4,T]`, and `label` `[4]`.
    """
    rows = [dict(sentence1=s, label=y) for s, y in COURSE_SENTENCES.items()]
    task = load_task("two-domains")
    return collate(task.encode(rows, bb.tokenizer, 32), bb.tokenizer.pad_token_id)


def load_short_task(
    name: str = "two-domains",  # name of a bundled task
    n_train: int = 1000,  # training examples
    n_validation: int = 200,  # validation examples
    n_test: int = 500,  # test examples
) -> Task:  # with its splits
    """Load a bundled task with the first examples of each split."""
    task = load_task(name)
    n = dict(train=n_train, validation=n_validation, test=n_test)
    return replace(task, splits={s: rows[: n[s]] for s, rows in task.splits.items()})


def train_and_test_plan(
    bb: Backbone,
    plan: dict,  # layer → `Step`; created after `torch.manual_seed`, which fixes its initialisation
    task: Task,  # with its splits
    lr: float = 1e-2,  # learning rate of the prompt
    head_lr: float = 1e-2,  # learning rate of the head
    steps: int = 300,  # training steps
    seed: int = 0,  # of the order of the training examples
    pooling: str = "mean",  # which hidden states the head reads: a name in `POOLINGS`
    batch_size: int = 16,
    use_verbalizer: bool = False,  # predict a label word of the vocabulary instead of using a head
) -> tuple[PromptedModel, float, TrainLog]:  # trained model; test accuracy in %; the log of `fit`
    """Train a plan and its head, and evaluate them once on the test split."""
    # created in both cases, so that both draw the same random numbers
    head: Module = ClassificationHead(bb.d, len(task.labels), pooling)
    if use_verbalizer:
        head = VerbalizerHead(bb, task.word_ids(bb.tokenizer), "labels")
    model = PromptedModel(bb, head, plan)
    cfg = RunConfig(
        head="verbalizer" if use_verbalizer else "classification",
        steps=steps,
        batch_size=batch_size,
        eval_every=max(1, steps // 4),
        lr=lr,
        head_lr=head_lr,
        max_len=48,
        seed=seed,
        device="cpu",
        cache="both",
    )
    log = fit(model, task, cfg)
    examples, _ = encode_for_evaluation(model, task, cfg, task.splits["test"])
    scores, _ = evaluate(model, examples, task, 64, "cpu")
    return model.eval(), next(iter(scores.values())), log


def course_seeds() -> range:
    """Return the seeds of a chapter: `IDP_COURSE_SEEDS` of them, by default one."""
    return range(int(os.environ.get("IDP_COURSE_SEEDS", 1)))


def load_course_scores(
    file: Path | str = "scores.json",  # written by `store_or_compare_scores`
) -> list[dict]:  # each with `chapter`, `method`, `task` and `scores`
    """Return the stored scores in the order of the chapters; without a file, an empty list."""
    return json.loads(Path(file).read_text(encoding="utf-8")) if Path(file).exists() else []


def store_or_compare_scores(
    chapter: str,  # two digits, such as '05'
    method: str,  # name of the method in the table
    scores: list[float],  # accuracy in %, one per seed
    task: str = "two-domains",  # name of the task
    file: Path | str = "scores.json",
    tolerance: float = 12.0,  # largest distance of one score from the stored ones, in points
) -> str:  # one line to print
    """Store the scores of several seeds, or compare the score of one seed with the stored ones."""
    rows = load_course_scores(file)
    old = next((r for r in rows if (r["method"], r["task"]) == (method, task)), None)
    if len(scores) > 1:
        rounded = [round(s, 1) for s in scores]
        new = dict(chapter=chapter, method=method, task=task, scores=rounded)
        rows = sorted([r for r in rows if r is not old] + [new], key=lambda r: r["chapter"])
        lines = ",\n".join(json.dumps(r, ensure_ascii=False) for r in rows)
        Path(file).write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        return f"{method} on {task}: stored, {_format_mean_and_std(rounded)}"
    if old is None:
        return f"{method} on {task}: {scores[0]:.1f}; nothing is stored yet"
    stored = _format_mean_and_std(old["scores"])
    if not min(old["scores"]) - tolerance <= scores[0] <= max(old["scores"]) + tolerance:
        raise UserError(
            f"{method!r} scores {scores[0]:.1f} on {task}, but {stored} is stored. Measure it "
            "again with IDP_COURSE_SEEDS=5, and check what the chapter says about it."
        )
    return f"{method} on {task}: {scores[0]:.1f} in this run; {stored} stored"


def _format_mean_and_std(scores: list[float]) -> str:
    mean = f"{statistics.mean(scores):.1f}"
    if len(scores) == 1:
        return f"{mean} (one run)"
    return f"{mean} ± {statistics.stdev(scores):.1f} ({len(scores)} seeds)"


SCORE_TABLE_TASKS = ("two-domains", "two-domains-order")
SCORE_TABLE_CONTROLS = ("majority", "probe", "side network")


class ScoreTable:
    """A table of scores that notebooks show as Markdown and terminals as plain text."""

    def __init__(
        self,
        # chapter, method, and a formatted score for each task in `SCORE_TABLE_TASKS`
        rows: list[tuple[str, ...]],
    ):
        self.rows = rows

    def _format(self, style: str) -> str:
        headers = ("chapter", "method", *SCORE_TABLE_TASKS)
        alignment = ("left", "left", *["right"] * len(SCORE_TABLE_TASKS))
        return tabulate(self.rows, headers, style, disable_numparse=True, colalign=alignment)

    def __repr__(self):
        return self._format("simple")

    def _repr_markdown_(self):
        return self._format("pipe")


def build_score_table(
    last_chapter: str = "99",  # the table ends with this chapter
    file: Path | str = "scores.json",
) -> ScoreTable:
    """Return the mean scores up to a chapter in %, ± standard deviation, controls last."""
    records = [
        r
        for r in load_course_scores(file)
        if r["chapter"] <= last_chapter or r["method"] in SCORE_TABLE_CONTROLS
    ]
    names = list(dict.fromkeys((r["chapter"], r["method"]) for r in records))
    names.sort(key=lambda name: (name[1] in SCORE_TABLE_CONTROLS, name[0]))
    scores = {(r["method"], r["task"]): _format_mean_and_std(r["scores"]) for r in records}
    rows = []
    for chapter, method in names:
        cells = [scores.get((method, task), "not measured") for task in SCORE_TABLE_TASKS]
        rows.append((chapter, method, *cells))
    return ScoreTable(rows)
