"""Train the prompts of the playground on the bundled model, and store them.

    python results/playground/train.py

The head is frozen: the model's own language-model head reads label words at a mask. So every
prompt, its own or another sentence's, is read by the same model. Each task, method and layer has
one seed and one learning rate, so a score is an illustration; `results/crossing` compares methods.
`runs.jsonl` has one line for each run, `prompts/` its trained tensors in float16; the scores are
those of the rounded tensors. `answers.json` says what the models predict for a few sentences, with
their own prompts and with those of the others. A second call continues.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.core.context import Context
from idp_tutorial.core.planned_model import PlannedModel, restore_state, trained_state
from idp_tutorial.data.encoding import collate
from idp_tutorial.data.tasks import load_task
from idp_tutorial.reproduction.course import COURSE_SENTENCES
from idp_tutorial.runs.experiment import Experiment
from idp_tutorial.training.evaluation import evaluate
from idp_tutorial.training.examples import encode_for_model

HERE = Path(__file__).parent
TASKS = ("two-domains", "questions")
# method and layer before which its prompt enters; None: among the words, IDPG's own place
PROMPTS: tuple[tuple[str, int | None], ...] = (
    ("lpt-npg", 7),
    ("lpt", 7),
    ("id-spam", 7),
    ("lpt-npg", 4),
    ("s-idpg-phm", None),
    ("lpt", 4),
    ("lpt-npg", 2),
    ("lpt", 2),
    ("lpt-npg", 6),
    ("lpt", 6),
)
LEARNING_RATES = {"lpt": 0.3, "lpt-npg": 0.005, "id-spam": 0.006, "s-idpg-phm": 0.02}
OPTIONS: dict[str, dict[str, Any]] = {
    # the states of the bundled model are small. Standardised, they carry their rounding errors
    # along: the decay keeps the weights small that multiply them, so that a browser gives the
    # logits of PyTorch
    "lpt-npg": dict(bottleneck=32, standardise=True, weight_decay=0.6),
    "id-spam": dict(bottleneck=32),
    "s-idpg-phm": dict(standardise=True),
}
SEED = 0
# IDPG's steps are dearest
STEPS = {"lpt": 600, "lpt-npg": 1200, "id-spam": 2400, "s-idpg-phm": 300}
DETAILS = (
    *("method", "task", "layer", "lr", "weight_decay"),
    *("seed", "steps", "batch_size", "prompt_length"),
)


def make_config(task: str, method: str, layer: int | None) -> RunConfig:
    """Return the config of one run."""
    options = dict(OPTIONS.get(method, {}))
    if layer is not None:
        options["layer"] = layer
    return RunConfig(
        method,
        task=task,
        backbone="tiny",
        head="verbalizer",
        lr=LEARNING_RATES[method],
        seed=SEED,
        steps=STEPS[method],
        batch_size=16,
        eval_every=STEPS[method] // 4,
        cache="both",
        prompt_length=5,
        **options,
    )


def round_to_half(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return parameters in float16, and the sums of a standardiser, which are large, unchanged."""
    sums = (".n", ".total", ".square")
    return {
        name: t.detach().clone() if name.endswith(sums) else t.detach().half()
        for name, t in state.items()
    }


def prompt_file(task: str, method: str, layer: int | None) -> Path:
    """Return the file of the trained tensors of a task, method and layer."""
    place = "input" if layer is None else layer
    return HERE / "prompts" / f"{task}-{method}-{place}.safetensors"


def cells() -> Iterator[tuple[str, str, int | None]]:
    """Yield each task, method and layer."""
    for method, layer in PROMPTS:
        for task in TASKS:
            yield task, method, layer


def read_runs() -> list[dict[str, Any]]:
    """Return the stored runs."""
    file = HERE / "runs.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [json.loads(line) for line in lines]


def find_run(task: str, method: str, layer: int | None) -> dict[str, Any] | None:
    """Return the stored run of a cell, or None."""
    for run in read_runs():
        if (run["task"], run["method"], run["layer"]) == (task, method, layer):
            return run
    return None


def load_model(task: str, method: str, layer: int | None) -> tuple[PlannedModel, Experiment]:
    """Return a trained model of the playground, in eval mode."""
    experiment = Experiment(make_config(task, method, layer), load_task(task))
    model = experiment.build_model()
    restore_state(trained_state(model), load_file(prompt_file(task, method, layer)))
    return model.eval(), experiment


def train(task: str, method: str, layer: int | None) -> None:
    """Train one model, round its tensors, score and store it."""
    experiment = Experiment(make_config(task, method, layer), load_task(task))
    model, log = experiment.fit()
    state = trained_state(model)
    rounded = round_to_half(state)
    restore_state(state, rounded)
    model.eval()
    scores = {}
    for split in ("validation", "test"):
        rows = experiment.task.splits[split]
        examples = encode_for_model(model, experiment.task, experiment.cfg, rows)
        scores[split] = round(evaluate(model, examples, experiment.task)[0]["accuracy"], 2)
    record = experiment.score(model, log, score_test=False)
    run = {name: record.get(name) for name in DETAILS} | dict(layer=layer)
    run |= dict(validation=scores["validation"], score=scores["test"])
    run |= dict(parameters=record["params"]["prompt"], digests=record["digests"])
    file = prompt_file(task, method, layer)
    file.parent.mkdir(exist_ok=True)
    save_file(rounded, file)
    with (HERE / "runs.jsonl").open("a", encoding="utf-8") as file_of_runs:
        file_of_runs.write(json.dumps(run) + "\n")
    print(task, method, layer, run["validation"], run["score"], flush=True)


def example_sentences(task: str) -> list[str]:
    """Return the four sentences of the course, or the shortest test text of each class."""
    if task == "two-domains":
        return [*COURSE_SENTENCES]
    rows = sorted(load_task(task).splits["test"], key=lambda row: len(row["sentence1"]))
    shortest = {row["label"]: row["sentence1"] for row in reversed(rows)}
    return [shortest[label] for label in sorted(shortest)]


@torch.inference_mode()
def predict_exchanged(model: PlannedModel, batch: dict[str, Tensor]) -> list[list[list[float]]]:
    """Return the logits of each text with the prompt of each: [prompt][text][class]."""
    (source,) = model.sources
    prompts: list[Tensor] = []
    with source.register_forward_hook(lambda _module, _inputs, prompt: prompts.append(prompt)):
        model(batch)
    logits = []
    for prompt in prompts[0]:
        given = prompt.expand_as(prompts[0])
        with source.register_forward_hook(lambda *_, given=given: given):
            logits.append([[round(x, 4) for x in row] for row in model(batch).tolist()])
    return logits


@torch.inference_mode()
def weigh_tokens(model: PlannedModel, batch: dict[str, Tensor]) -> list[list[float]]:
    """Return the weights that ID-SPAM's attention gives the tokens of each text."""
    source: Any
    (source,) = model.sources
    weights = source.token_weights(Context.from_batch(model.backbone, batch))
    lengths = batch["attention_mask"].sum(1).tolist()
    return [[round(x, 4) for x in row[:n].tolist()] for row, n in zip(weights, lengths)]


def compute_answers(task: str, method: str, layer: int | None) -> dict[str, Any]:
    """Return what a model predicts for the example sentences, with the prompt of each."""
    model, experiment = load_model(task, method, layer)
    rows = [dict(sentence1=sentence, label=0) for sentence in example_sentences(task)]
    examples = encode_for_model(model, experiment.task, experiment.cfg, rows)
    batch = collate(examples, model.backbone.pad_id)
    answers: dict[str, Any] = dict(
        task=task, method=method, layer=layer, logits=predict_exchanged(model, batch)
    )
    with torch.inference_mode():
        without = PlannedModel(model.backbone, model.head)(batch).tolist()
    answers["without"] = [[round(x, 4) for x in row] for row in without]
    if method == "id-spam":
        tokenizer = model.backbone.tokenizer
        answers["tokens"] = [[tokenizer.decode([i]) for i in e["input_ids"]] for e in examples]
        answers["after"] = weigh_tokens(model, batch)
        answers["before"] = weigh_tokens(experiment.build_model().eval(), batch)
    return answers


def write_answers() -> None:
    """Write the answers of all stored models."""
    answers = [compute_answers(*cell) for cell in cells() if find_run(*cell)]
    sentences = json.dumps({task: example_sentences(task) for task in TASKS})
    lines = ",\n".join(json.dumps(answer) for answer in answers)
    text = f'{{"sentences": {sentences},\n"answers": [\n{lines}\n]}}\n'
    (HERE / "answers.json").write_text(text, encoding="utf-8")


def main() -> None:
    """Train what is not stored yet, and compute the answers anew."""
    torch.set_num_threads(1)
    for cell in cells():
        if find_run(*cell) is None:
            train(*cell)
    write_answers()


if __name__ == "__main__":
    main()
