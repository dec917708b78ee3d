"""Write the model card of a saved model from its description and the record of its run.

A user of a saved model has four questions: what does it predict, how good is it, which weights
does it need, and may I use it? The description in the file and the record of the run answer the
first three. The licence is chosen by the author; the card says so if no licence was chosen.

A proportion of `n` examples has Wilson's confidence interval, which stays between 0 and 100 and
is accurate for few examples. It does not apply to a correlation or an F1, so these have no
interval.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.backbones.fetch import BACKBONE_SOURCES
from idp_tutorial.backbones.load import BACKBONE_HUB_NAMES
from idp_tutorial.data.task import TEXT_COLUMNS, Task
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.saving.descriptions import PROMPT_MODEL_FORMAT, parse_run


def wilson_interval(
    score: float,  # proportion in percent, such as an accuracy
    n: int,  # number of examples
) -> tuple[float, float]:  # lower and upper limit, in percent
    """Return Wilson's 95 % confidence interval of a proportion."""
    from scipy.stats import binomtest

    interval = binomtest(round(n * score / 100), n).proportion_ci(method="wilson")
    return 100 * interval.low, 100 * interval.high


_PROPORTION_METRICS = "accuracy", "exact_match"  # metrics that are proportions of the examples


def _measured_scores(record: dict) -> list[tuple[str, float, int]]:
    """Return split, score and number of examples; the test split is first."""
    scores = dict(test=record.get("score"), validation=record["validation"])
    return [
        (split, score, record["split_sizes"].get(split, 0))
        for split, score in scores.items()
        if score is not None
    ]


def _card_metadata(
    task: Task,
    cfg: RunConfig,
    backbone: dict[str, Any],  # its part of the description
    record: dict | None,
    licence: str | None,
) -> ModelCardData:
    """Return the metadata that the hub reads."""
    base_model = BACKBONE_HUB_NAMES.get(backbone["name"], backbone["name"])
    name = task.name
    kind = "text-generation" if task.is_generation else "text-classification"
    results = None
    if record:
        split, score, _ = _measured_scores(record)[0]
        score = round(score, 2)
        results = [EvalResult(kind, name, name, record["metric"], score, dataset_split=split)]
    return ModelCardData(
        library_name="idp_tutorial",
        license=licence,
        pipeline_tag=kind,
        tags=["soft-prompt", cfg.method],
        base_model=base_model if "/" in base_model and not backbone.get("local") else None,
        model_name=f"{cfg.method} on {name}",
        eval_results=results,
    )


def _format_interval(record: dict, score: float, n: int) -> str:
    if record["metric"] not in _PROPORTION_METRICS or not n or not 0 <= score <= 100:
        return "–"
    low, high = wilson_interval(score, n)
    return f"{low:.1f} to {high:.1f}"


def _score_table(record: dict | None, controls: Sequence[dict]) -> str:
    """Return a table with the scores of the model and of the controls."""
    if record is None:
        return "No record of the training was saved, so its quality is unknown."
    lines = ["| | examples | score | 95 % interval |", "|---|--:|--:|--:|"]
    named_records = [(f"**{record['method']}**, this model", record)]
    named_records += [(control["method"], control) for control in controls]
    for name, measured in named_records:
        for split, score, n in _measured_scores(measured):
            interval = _format_interval(measured, score, n)
            lines.append(
                f"| {name} | {n:,} {split} | {measured['metric']} {score:.1f} | {interval} |"
            )
    n_examples = record["split_sizes"].get("train", 0)
    lines += [
        "",
        f"Trained on {n_examples:,} examples for {record['steps']:,} steps "
        f"with learning rate {record['lr']:g} and seed {record['seed']}; "
        f"{record['checkpoint_selection']}. The validation score is slightly too high, because the "
        "validation split was used for selection.",
    ]
    if not controls:
        lines.append(
            "No controls were recorded: the scores of the head alone, a probe and the majority "
            "class are unknown."
        )
    return "\n".join(lines)


def _loading_instructions(location: Path | str, description: dict[str, Any], task: Task) -> str:
    if description["format"] == PROMPT_MODEL_FORMAT:
        return f"""```python
from idp_tutorial.huggingface import PromptModel
model = PromptModel.from_pretrained(hf_model, {str(location)!r})  # around a Hugging Face model
```"""
    is_local = description["backbone"].get("local")
    row = dict.fromkeys(TEXT_COLUMNS[: 1 + task.pair], "…")
    bb = ", 'THE FOLDER OF THE BACKBONE'" if is_local else ""
    return f"""```python
from idp_tutorial.saving.prompt_files import from_pretrained
from idp_tutorial.training.evaluation import predict
model, task, cfg = from_pretrained({str(location)!r}{bb})
predict(model, task, cfg, [{row}])
```
or `echo '…' | idp predict --model {location}{" --backbone FOLDER" if is_local else ""}`"""


def _requirements_text(description: dict[str, Any]) -> str:
    backbone = description["backbone"]
    source = BACKBONE_SOURCES.get(backbone["name"])
    origin = f" ({source.description}; {source.licence})" if source else ""
    pinned = f", revision `{backbone['revision']}`" if backbone.get("revision") else ""
    digest = f"`{backbone['digests'][backbone['dtype']]}` ({backbone['dtype']})"
    return (
        f"The frozen backbone **{backbone['name']}**{origin}{pinned}, which is not included. It is "
        f"compared with the digest {digest} when the model is loaded."
    )


def build_model_card(
    description: dict[str, Any],  # description that `read_prompts` returned
    record: dict | None = None,  # record of its run, if there is one
    # records of other methods on the same examples, such as the head alone or the majority class
    controls: Sequence[dict] = (),
    location: Path | str = "FOLDER",  # folder or hub repository, for the instructions
    licence: str | None = None,  # licence as the hub spells it, such as 'apache-2.0'
) -> ModelCard:
    """Write the model card of a saved model."""
    task, cfg = parse_run(description)
    row = METHODS[cfg.method]
    low, high = task.label_range
    output = "generated text" if task.is_generation else f"a number from {low} to {high}"
    labels = ", ".join(f"`{name}`" for name in task.labels) or output
    if task.multi_label:
        labels = f"any number of the labels {labels}"
    texts = "pairs of texts" if task.pair else "texts"
    prompt_length = getattr(cfg.method_config, "prompt_length", None)
    length = f", prompt_length={prompt_length}" if prompt_length else ""
    formulas = "\n".join(f"- {f}" for f in description.get("formula", ())) or f"- {row.reference}"
    params = (
        f"\n{sum(record['params'].values()):,} trained parameters: {record['params']}."
        if record
        else ""
    )
    method = f"**{cfg.method}** ({row.reference}){length}, seed {cfg.seed}"
    parts = {
        f"{cfg.method} on {task.name}": f"Predicts {labels} for {texts}.",
        "Scores": _score_table(record, controls),
        "Requirements": _requirements_text(description),
        "Usage": _loading_instructions(location, description, task),
        "Method": f"{method}:\n\n{formulas}\n{params}",
        "Licence": licence or "The author has not chosen a licence: ask before you use the model.",
    }
    text = "\n\n".join(
        f"{'##' if i else '#'} {name}\n\n{section}"
        for i, (name, section) in enumerate(parts.items())
    )
    metadata = _card_metadata(task, cfg, description["backbone"], record, licence)
    return ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{text}\n")
