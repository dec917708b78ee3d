"""The example sentences, the short training run and the table of scores of the course.

Each chapter of the course ends in a score on the same task. Three things are shared, so that
the scores can be compared: the four sentences that are followed from token ids to logits, the
function that trains a plan for some seconds, and the file `nbs/course/scores.json` with the
scores of stored runs.

The task of the course in four sentences: *cold* is positive for a soda and negative for a soup,
and *warm* the reverse. Both nouns are in the training split of `two-domains`.
"""

import html
import importlib
import inspect
import json
import os
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tabulate import tabulate
from torch import Tensor
from torch.nn import Module

from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.context import Context
from idp_tutorial.core.heads import ClassificationHead, VerbalizerHead
from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.planned_model import PlannedModel
from idp_tutorial.core.steps import PromptSource
from idp_tutorial.data.encoding import collate
from idp_tutorial.data.task import Task
from idp_tutorial.data.tasks import load_task
from idp_tutorial.methods.idpg import PromptGenerator, idpg_plan
from idp_tutorial.methods.sentence_vectors import mean_sentence_vector
from idp_tutorial.methods.soft_prompt import SoftPrompt
from idp_tutorial.training.evaluation import evaluate
from idp_tutorial.training.examples import encode_for_evaluation
from idp_tutorial.training.fit import TrainLog, fit
from idp_tutorial.utils.records import read_records

COURSE_SENTENCES = {
    "The soda was cold.": 1,
    "The soda was warm.": 0,
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


def encode_with_template(
    bb: Backbone,
    task: Task,  # with a template
    sentences: Mapping[str, int],  # sentence → label
) -> dict[str, Tensor]:
    """Return sentences in the template of a task as a batch, with the position of the mask."""
    rows = [dict(sentence1=s, label=y) for s, y in sentences.items()]
    return collate(task.encode(rows, bb.tokenizer, 64, "code"), bb.tokenizer.pad_token_id)


def load_records(
    file: str,  # name of a JSONL file of records
    folder: Path | str = "../../results/claims",  # folder of the file
    *,
    # True: leave out runs without logits, which only chose a learning rate
    with_logits: bool = False,
    **config: Any,  # values that the records must have, such as `layer=0`
) -> list[dict]:
    """Return the stored records with these values; without the file, an empty list.

    A wheel does not contain `results/`, so chapters must work without it.
    """
    path = Path(folder, file)
    if not path.exists():
        return []
    return [
        record
        for record in read_records(path, with_logits=with_logits)
        if all(record.get(key) == value for key, value in config.items())
    ]


def compute_prompts_and_labels(
    model: PlannedModel,  # with one prompt, such as `train_and_test_plan` returns
    sentences: Iterable[str],
) -> tuple[Tensor, list[int]]:  # prompts `[B,t,d]`; predicted labels
    """Return the prompts that a trained model inserts into sentences, and what it predicts."""
    bb = model.backbone
    rows = [dict(sentence1=sentence, label=0) for sentence in sentences]
    encoded = load_task("two-domains").encode(rows, bb.tokenizer, 48)
    batch = collate(encoded, bb.tokenizer.pad_token_id)
    ((layer, step),) = model.plan.items()
    with torch.no_grad():
        prompts = step.source(run_layers(bb, batch, stop=layer))
        labels = model(batch).argmax(1).tolist()
    return prompts, labels


def load_short_task(
    name: str = "two-domains",  # name of a bundled task, or of one that the hub has
    n_train: int = 1000,  # training examples
    n_validation: int = 200,  # validation examples
    n_test: int = 500,  # test examples
) -> Task:  # with its splits
    """Load a task with the first examples of each split."""
    task = load_task(name)
    n = dict(train=n_train, validation=n_validation, test=n_test)
    return replace(task, splits={s: rows[: n[s]] for s, rows in task.splits.items()})


def build_static_prompt(
    bb: Backbone,
    t: int = 5,  # number of prompt vectors
    std: float = 1.0,  # standard deviation of the initial values
) -> PromptSource:  # trainable parameters `[t,d]`
    """Return a prompt that is the same for every text."""
    return SoftPrompt(t, bb.d, std=std)


def build_generated_prompt(
    bb: Backbone,
    t: int = 5,  # number of prompt vectors
    m: int = 256,  # width of the generator's bottleneck
) -> Callable[[Context], Tensor]:  # module that computes `[B,t,d]`
    """Return a prompt that a small network computes from each text.

    The network reads the mean of the frozen model's final hidden states in a first pass without a
    prompt, as IDPG's does. Chapter 06 builds it.
    """
    generator = PromptGenerator(bb.d, bb.d, t=t, m=m, kind="phm")
    plan = idpg_plan(bb, generator, None, mean_sentence_vector, dropout=0.0, standardise=True)
    return plan[0].source


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
) -> tuple[PlannedModel, float, TrainLog]:  # trained model; test accuracy in %; the log of `fit`
    """Train a plan and its head, and evaluate them once on the test split."""
    # created in both cases, so that both draw the same random numbers
    head: Module = ClassificationHead(bb.d, len(task.labels), pooling)
    if use_verbalizer:
        head = VerbalizerHead(bb, task.word_ids(bb.tokenizer), "labels")
    model = PlannedModel(bb, head, plan)
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
    log = fit(model, task, cfg, progress=False)  # a bar would name the method of the config
    examples = encode_for_evaluation(model, task, cfg, task.splits["test"])
    scores, _ = evaluate(model, examples, task, 64, "cpu")
    return model.eval(), next(iter(scores.values())), log


def course_seeds() -> range:
    """Return the seeds of a chapter: `IDP_COURSE_SEEDS` of them, by default one."""
    return range(int(os.environ.get("IDP_COURSE_SEEDS", 1)))


def _select_final_runs(records: list[dict]) -> list[dict]:
    """Return the runs at the learning rate with the most seeds; the others have fewer."""
    by_learning_rate: dict[float | None, list[dict]] = {}
    for record in records:
        by_learning_rate.setdefault(record["lr"], []).append(record)
    return max(by_learning_rate.values(), key=len)


def build_results_table(
    methods: dict[str, str],  # method → file of records, such as 'why/as-published.jsonl'
    task: str,  # name of the task in the records
    folder: Path | str = "../../results",  # the folder of records in the repository
) -> Any:  # a `DataFrame` to show, or a sentence if a file is missing
    """Return stored scores: mean and standard deviation in %.

    Of each method the runs at its final learning rate count.
    """
    if not all(Path(folder, file).is_file() for file in methods.values()):
        return "not stored here: the records are in the folder results/ of the repository"
    rows = {}
    for method, file in methods.items():
        runs = _select_final_runs(
            load_records(file, folder, method=method, task=task, status="done")
        )
        scores = [r["scores"][runs[0]["metric"]] for r in runs]
        rows[method] = {
            "prompt parameters": f"{runs[0]['params']['prompt']:,}",
            "test accuracy, %": _format_row(method, scores, _format_mean_and_std),
        }
    return pd.DataFrame(rows).T.rename_axis("method")


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
    """Store the scores of several seeds, or compare the score of one seed with the stored ones.

    A score that is far from the stored ones, in either direction, is no error: a hint is appended.
    """
    rows = load_course_scores(file)
    old = next((r for r in rows if (r["method"], r["task"]) == (method, task)), None)
    if len(scores) > 1:
        rounded = [round(s, 1) for s in scores]
        new = dict(chapter=chapter, method=method, task=task, scores=rounded)
        rows = sorted([r for r in rows if r is not old] + [new], key=lambda r: r["chapter"])
        lines = ",\n".join(json.dumps(r, ensure_ascii=False) for r in rows)
        Path(file).write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        return f"{method} on {task}: stored, {_format_row(method, rounded)}"
    if old is None:
        return f"{method} on {task}: {scores[0]:.1f}; nothing is stored yet"
    stored = _format_row(method, old["scores"])
    comparison = f"{method} on {task}: {scores[0]:.1f} in this run; {stored} stored"
    if min(old["scores"]) - tolerance <= scores[0] <= max(old["scores"]) + tolerance:
        return comparison
    return (
        f"{comparison}. Hint: this is more than {tolerance:g} points from the stored score. That "
        "is expected after a change of the code above; the text below describes the stored run."
    )


def _format_mean_and_std(scores: list[float]) -> str:
    mean = f"{statistics.mean(scores):.1f}"
    if len(scores) == 1:
        return f"{mean} (one run)"
    return f"{mean} ± {statistics.stdev(scores):.1f} ({len(scores)} seeds)"


LEARNT = 70  # accuracy in % on a running task from which a run has learnt it; chance is 50


def format_scores(
    scores: list[float],  # accuracy in % on a running task, one per seed
) -> str:
    """Return the scores of several seeds as text: mean and standard deviation, or a count.

    Runs of which only some have learnt the task have no useful mean: they are counted.
    """
    learnt = sorted(score for score in scores if score >= LEARNT)
    if len(scores) == 1 or statistics.stdev(scores) <= 5 or not learnt:
        return _format_mean_and_std(scores)
    interval = "–".join(f"{end:.1f}" for end in dict.fromkeys((learnt[0], learnt[-1])))
    return f"learnt in {len(learnt)} of {len(scores)} ({interval})"


DETERMINISTIC_CONTROLS = ("majority", "probe")  # the same score with every seed


def _format_row(
    method: str, scores: list[float], format_trained: Callable[[list[float]], str] = format_scores
) -> str:
    """Return the scores of a method as text: of a deterministic control the score alone."""
    if method in DETERMINISTIC_CONTROLS and len(set(scores)) == 1:
        return f"{scores[0]:.1f}"
    return format_trained(scores)


SCORE_TABLE_TASKS = ("two-domains", "two-domains-order")
SCORE_TABLE_CONTROLS = ("majority", "probe", "network on word vectors")


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
    chapter: str = "",  # two digits, such as '05'; by default, all chapters
    file: Path | str = "scores.json",
) -> ScoreTable:
    """Return the scores of a chapter in % over seeds, and the controls, last."""
    records = [
        r
        for r in load_course_scores(file)
        if r["task"] in SCORE_TABLE_TASKS
        and (chapter in ("", r["chapter"]) or r["method"] in SCORE_TABLE_CONTROLS)
    ]
    names = list(dict.fromkeys((r["chapter"], r["method"]) for r in records))
    names.sort(key=lambda name: (name[1] in SCORE_TABLE_CONTROLS, name[0]))
    scores = {(r["method"], r["task"]): _format_row(r["method"], r["scores"]) for r in records}
    rows = []
    for number, method in names:
        cells = [scores.get((method, task), "not measured") for task in SCORE_TABLE_TASKS]
        rows.append((number, method, *cells))
    return ScoreTable(rows)


# Set while notebooks are run to store their outputs, which GitHub and the site show as they are.
STATIC_OUTPUTS_VARIABLE = "IDP_STATIC_OUTPUTS"


PLAYGROUND_URL = "https://idp-tutorial.github.io/idp_tutorial/playground.html"
PANELS = {  # name → identifier of the heading, height in pixels
    "whose prompt": ("pg-whose", 1040),
    "how deep": ("pg-deep", 760),
    "which words": ("pg-words-title", 760),
    "how many parameters": ("pg-count-title", 1190),
}


def _import_widgets() -> Any:
    """Return `ipywidgets`, or None without it and where outputs are stored."""
    if STATIC_OUTPUTS_VARIABLE in os.environ:
        return None
    try:
        return importlib.import_module("ipywidgets")
    except ImportError:
        return None


def show_panel(
    name: str,  # 'whose prompt', 'how deep', 'which words' or 'how many parameters'
    file: Path | str = "panels.html",  # written by docs/playground_page.py
) -> Any:  # a widget, which a notebook shows as the value of the cell; else None
    """Return a panel of the site's playground.

    Where outputs are stored, or without `ipywidgets` or the file, print its address on the site.
    """
    heading, height = PANELS[name]
    widgets = _import_widgets()
    if widgets is None or not Path(file).exists():
        print(f"This panel moves in a notebook with ipywidgets, and at {PLAYGROUND_URL}#{heading}")
        return None
    text = Path(file).read_text(encoding="utf-8")
    text = text.replace('data-panel=""', f'data-panel="{heading}"', 1)
    return widgets.HTML(
        f'<iframe title="{name}" sandbox="allow-scripts" srcdoc="{html.escape(text)}" '
        f'style="width:100%;height:{height}px;border:0"></iframe>'
    )


def show_slider(
    function: Callable[..., Any],  # draws or prints; all arguments have a default
    **values: Iterable[Any],  # name of the argument → values of the slider, the default among them
) -> None:
    """Show a slider that calls a function with its value.

    Without `ipywidgets`, and where outputs are stored, call it once, with its default.
    """
    widgets = _import_widgets()
    if widgets is None:
        function()
        return
    ((name, options),) = values.items()
    default = inspect.signature(function).parameters[name].default
    slider = widgets.SelectionSlider(options=list(options), value=default, description=name)
    widgets.interact(lambda value: function(**{name: value}), value=slider)
