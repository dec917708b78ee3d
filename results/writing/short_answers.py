"""Measure the short answers of SmolLM2.

    python results/writing/short_answers.py MODEL MODEL --out FOLDER

The models are folders that `idp train --task in-short` saved. The model without a prompt is
measured too, with and without eight solved examples in the context.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.generation import generate_ids
from idp_tutorial.core.heads import GenerationHead
from idp_tutorial.core.planned_model import PlannedModel
from idp_tutorial.data.metrics import exact_match
from idp_tutorial.data.task import Task
from idp_tutorial.data.tasks import load_task
from idp_tutorial.saving.prompt_files import from_pretrained
from idp_tutorial.training.evaluation import evaluate, generate
from idp_tutorial.training.examples import encode_for_model
from idp_tutorial.utils.records import append_record, read_records

N_SENTENCES = 200  # sentences of the test split
BATCH_SIZE = 40


def split_answer(text: str) -> list[str]:
    """Split an answer such as 'hot soup, good' into its words and its verdict."""
    words, _, verdict = text.rpartition(",")
    return [words.strip(), verdict.strip()]


def score_parts(texts: Sequence[str], rows: Sequence[dict]) -> dict:
    """Return the percentages of answers with the target's noun and descriptor, and its verdict."""
    pairs = [(split_answer(t), split_answer(row["target"])) for t, row in zip(texts, rows)]
    words, verdict = (
        round(100 * sum(a[i] == b[i] for a, b in pairs) / len(pairs), 1) for i in (0, 1)
    )
    return dict(n=len(pairs), words=words, verdict=verdict)


def answer_after_examples(model: PlannedModel, task: Task, n: int = 8) -> list[str]:
    """Generate answers with `n` solved training examples in the context."""
    tokenizer = model.backbone.tokenizer
    answers = []
    examples = task.splits["train"][:n]
    solved = "\n".join(f"{row['sentence1']} = {row['target']}" for row in examples)
    for i in range(0, N_SENTENCES, BATCH_SIZE):
        rows = task.splits["test"][i : i + BATCH_SIZE][: N_SENTENCES - i]
        ids = [tokenizer(f"{solved}\n{row['sentence1']} =").input_ids for row in rows]
        generated = generate_ids(model, ids, 12)
        answers += [tokenizer.decode(new).split("\n")[0].strip() for new in generated]
    return answers


def measure_short_answers() -> None:
    """Measure the saved models and the baselines, and write their records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs=2, type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True)  # fails for an existing folder, so that no record is repeated
    task = load_task("in-short")
    answers = {}
    rows = task.splits["test"][:N_SENTENCES]
    sentences = [row["sentence1"] for row in rows]
    for folder in args.models:
        model, _, cfg = from_pretrained(folder)
        answers[cfg.method] = generate(model, sentences, task, cfg)
        run = read_records(folder / "record.jsonl")[0]
        run.pop("digest", None)  # the digest of the record without `parts`
        parts = score_parts(answers[cfg.method], rows)
        append_record(run | dict(parts=parts), args.out / "in-short.jsonl")
    bb = load_backbone("smollm2", dtype="bfloat16")
    bare = PlannedModel(bb, GenerationHead(bb), {}).eval()
    answers["no prompt"] = generate(bare, sentences[:3], task, cfg)
    answers["eight examples"] = answer_after_examples(bare, task)
    no_prompt = evaluate(bare, encode_for_model(bare, task, cfg, rows), task)[0]["exact_match"]
    with_examples = exact_match(answers["eight examples"], [row["target"] for row in rows])
    for name, score in (
        ("no prompt", no_prompt),
        ("no prompt, 8 examples in front", with_examples),
    ):
        append_record(
            dict(
                method=name,
                task="in-short",
                backbone="smollm2",
                **bb.weights_info,
                metric="exact_match",
                score=score,
                split_sizes=dict(test=N_SENTENCES),
            ),
            args.out / "in-short.jsonl",
        )
    for i, row in enumerate(rows[:3]):
        generated = {name: texts[i] for name, texts in answers.items()}
        append_record(
            dict(sentence1=row["sentence1"], target=row["target"], **generated),
            args.out / "texts.jsonl",
        )


if __name__ == "__main__":
    measure_short_answers()
