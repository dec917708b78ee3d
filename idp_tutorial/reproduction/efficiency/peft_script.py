"""Prompt tuning or LoRA with `peft` and `transformers.Trainer`, without this package."""

import csv
import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any


def train_with_peft() -> None:
    """Train on `train.csv` of a folder, and write the accuracy on its `test.csv`."""
    parser = ArgumentParser()
    for name in ("data", "backbone", "method", "out", "device"):
        parser.add_argument(f"--{name}")
    for name in ("prompt_length", "batch_size", "max_len", "lr"):
        parser.add_argument(f"--{name}", type=float if name == "lr" else int)
    args = parser.parse_args()
    import transformers as hf
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    tokenizer = hf.AutoTokenizer.from_pretrained(args.backbone)
    data: Any = {}
    labels: list[str] = []  # of the training split
    for split in ("train", "validation", "test"):
        with open(Path(args.data) / f"{split}.csv", newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
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


if __name__ == "__main__":
    train_with_peft()
