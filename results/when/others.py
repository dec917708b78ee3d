"""Train two other libraries on the tables of `tables.py`, with MiniLM as `run.py` does.

    pip install setfit
    python results/when/others.py --tables TABLES --library peft
    python results/when/others.py --tables TABLES --library setfit

`peft` trains LoRA with the Trainer of Transformers, at this package's learning rate or at `--lr`;
its head reads the first token, through BERT's pooling layer. `setfit` fine-tunes the sentence
encoder on pairs of texts and fits a logistic regression; it has no pairs of sentences as inputs.
Both get as many steps as `run.py` gave LoRA. A line of `others.jsonl` is a table and a library.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn.metrics import accuracy_score, f1_score

from idp_tutorial.backbones.load import find_local_backbone
from idp_tutorial.utils.records import read_records

HERE = Path(__file__).parent
BATCH_SIZE = 16
LEARNING_RATE = 5e-3  # of LoRA, as the package's default; SetFit has its own
MAX_LENGTHS = {"long": 256}  # tokens; 128 otherwise


def read_table(file: Path) -> pd.DataFrame:
    """Return a table with the columns sentence1, label and for pairs sentence2."""
    match file.suffix:
        case ".parquet":
            return pd.read_parquet(file)
        case ".xlsx":
            return pd.read_excel(file, dtype=str)
        case ".jsonl" | ".json":
            return pd.read_json(file, lines=file.suffix == ".jsonl")
        case suffix:
            return pd.read_csv(file, sep="\t" if suffix == ".tsv" else ",", dtype=str)


def train_peft(
    train: pd.DataFrame, test: pd.DataFrame, steps: int, max_len: int, lr: float
) -> list[str]:
    """Return the classes that LoRA of `peft` predicts after so many steps of `Trainer`."""
    import transformers as hf
    from peft import LoraConfig, get_peft_model

    path = str(find_local_backbone("minilm"))
    tokenizer = hf.AutoTokenizer.from_pretrained(path)
    labels = sorted(train.label.unique())

    def encode(table: pd.DataFrame) -> list[dict[str, Any]]:
        """Return the examples of a table."""
        columns = [table[name].tolist() for name in ("sentence1", "sentence2") if name in table]
        tokens = tokenizer(*columns, truncation=True, max_length=max_len)
        tokens["labels"] = [labels.index(label) for label in table.label]
        return [dict(zip(tokens, example)) for example in zip(*tokens.values())]

    hf.set_seed(0)
    auto = hf.AutoModelForSequenceClassification
    model = auto.from_pretrained(path, num_labels=len(labels), dtype="float32")
    model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16))
    with tempfile.TemporaryDirectory() as folder:
        arguments = hf.TrainingArguments(
            folder,
            max_steps=steps,
            learning_rate=lr,
            per_device_train_batch_size=BATCH_SIZE,
            per_device_eval_batch_size=4 * BATCH_SIZE,
            warmup_steps=0.06,
            weight_decay=0.01,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
        )
        trainer = hf.Trainer(model, arguments, hf.DataCollatorWithPadding(tokenizer), encode(train))
        trainer.train()
        examples: Any = encode(test)  # a list will do
        output: Any = trainer.predict(examples)
    return [labels[i] for i in np.asarray(output.predictions).argmax(-1)]


def train_setfit(
    train: pd.DataFrame, test: pd.DataFrame, steps: int, max_len: int, lr: float
) -> list[str]:
    """Return the classes that SetFit predicts after so many steps on pairs of texts."""
    from datasets import Dataset
    from setfit import SetFitModel, Trainer, TrainingArguments

    path = str(find_local_backbone("minilm"))
    labels = sorted(train.label.unique())
    model = SetFitModel.from_pretrained(path, labels=labels)
    model.model_body.max_seq_length = max_len
    texts, classes = train.sentence1.tolist(), train.label.tolist()
    data = Dataset.from_dict({"text": texts, "label": [labels.index(c) for c in classes]})
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, batch_size=BATCH_SIZE, max_steps=steps, seed=0, report_to="none"
        )
        Trainer(model, arguments, train_dataset=data).train()
    return [str(label) for label in model.predict(test.sentence1.tolist())]


LIBRARIES: dict[str, Callable[..., list[str]]] = {"peft": train_peft, "setfit": train_setfit}


def main() -> None:
    """Train one library on every table, and append a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tables", type=Path, required=True, help="folder that tables.py wrote")
    parser.add_argument("--library", choices=LIBRARIES, required=True)
    parser.add_argument("--only", nargs="+", help="names of tables (default: all)")
    parser.add_argument("--lr", type=float, default=LEARNING_RATE, help="learning rate of LoRA")
    parser.add_argument("--steps", type=int, help="default: those of LoRA in run.py")
    parser.add_argument("--out", type=Path, default=HERE / "others.jsonl")
    args = parser.parse_args()
    for folder in sorted(path for path in args.tables.iterdir() if path.is_dir()):
        if args.only and folder.name not in args.only:
            continue
        (train_file,), (test_file,) = folder.glob("train.*"), folder.glob("test.*")
        train, test = read_table(train_file), read_table(test_file)
        if args.library == "setfit" and "sentence2" in train:
            continue
        steps = args.steps
        if steps is None:
            records = read_records(HERE / folder.name / "compare.jsonl")
            (steps,) = {r["steps"] for r in records if r["method"] == "lora"}
        start = time.perf_counter()
        max_len = MAX_LENGTHS.get(folder.name, 128)
        predicted = LIBRARIES[args.library](train, test, steps, max_len, args.lr)
        line = dict(
            table=folder.name,
            library=args.library,
            version=version(args.library),
            steps=steps,
            lr=args.lr if args.library == "peft" else None,
            accuracy=round(100 * float(accuracy_score(test.label, predicted)), 2),
            macro_f1=round(100 * float(f1_score(test.label, predicted, average="macro")), 2),
            seconds=round(time.perf_counter() - start, 1),
        )
        print(json.dumps(line), flush=True)
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
