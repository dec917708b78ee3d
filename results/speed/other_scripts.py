"""Train with `peft` and classify with a Transformers pipeline, without this package.

`end_to_end` runs them beside `idp train` and `idp predict`.
"""

import csv
import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import torch


def _read_rows(file: Path | str) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with open(file, newline="", encoding="utf-8") as opened:
        return list(csv.DictReader(opened))


def train_with_peft(args: Namespace) -> None:
    """Train prompt tuning or LoRA with `Trainer`, and write the accuracy on `test.csv`."""
    import transformers as hf
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    tokenizer = hf.AutoTokenizer.from_pretrained(args.backbone)
    data: Any = {}
    labels: list[str] = []  # of the training split
    for split in ("train", "validation", "test"):
        rows = _read_rows(Path(args.data) / f"{split}.csv")
        labels = labels or sorted({row["label"] for row in rows})
        texts = [row["text"] for row in rows]
        tokens = tokenizer(texts, truncation=True, max_length=args.max_len)
        tokens["labels"] = [labels.index(row["label"]) for row in rows]
        data[split] = [dict(zip(tokens, example)) for example in zip(*tokens.values())]
    hf.set_seed(0)
    auto = hf.AutoModelForSequenceClassification
    model = auto.from_pretrained(args.backbone, num_labels=len(labels), dtype="float32")
    lora = LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16)
    prompt = PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=args.prompt_length)
    model = get_peft_model(model, lora if args.method == "lora" else prompt)
    arguments = hf.TrainingArguments(
        args.out,
        num_train_epochs=1,
        learning_rate=args.lr,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=4 * args.batch_size,
        warmup_steps=0.06,
        weight_decay=0.01,
        eval_strategy="epoch",
        save_strategy="no",
        use_cpu=args.device == "cpu",
    )
    pad = hf.DataCollatorWithPadding(tokenizer)
    trainer = hf.Trainer(model, arguments, pad, data["train"], data["validation"])
    trainer.train()
    output: Any = trainer.predict(data["test"])
    model.save_pretrained(args.out)
    score = 100 * float((output.predictions.argmax(-1) == output.label_ids).mean())
    (Path(args.out) / "record.jsonl").write_text(json.dumps(dict(score=score)) + "\n")


def classify_with_pipeline(args: Namespace) -> None:
    """Classify the texts of a CSV file, and write each text with its class."""
    from transformers import pipeline

    device = 0 if args.device != "cpu" and torch.cuda.is_available() else -1
    classify = pipeline("text-classification", args.backbone, device=device, dtype=args.dtype)
    texts = [row["text"] for row in _read_rows(args.data)]
    predictions = classify(texts, truncation=True, max_length=args.max_len)
    with open(args.out, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "prediction"])
        writer.writerows([text, p["label"]] for text, p in zip(texts, predictions))


if __name__ == "__main__":
    parser = ArgumentParser()
    for name in ("data", "backbone", "out", "device", "dtype", "method"):
        parser.add_argument(f"--{name}")
    for name in ("prompt_length", "batch_size", "max_len", "lr"):
        parser.add_argument(f"--{name}", type=float if name == "lr" else int)
    arguments = parser.parse_args()
    if arguments.method:
        train_with_peft(arguments)
    else:
        classify_with_pipeline(arguments)
