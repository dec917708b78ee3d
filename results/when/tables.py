"""Write six tables of texts and labels, in six of the accepted formats, for `run.py`.

    python results/when/tables.py --data FOLDER --out FOLDER

Five tables are drawn from public tasks (`--data` has TASK/{train,validation,test}.jsonl). The
sixth is made from the documentation of Python's standard library: which module does a sentence
describe? It has about twenty classes, by the version of Python, and anybody can make it again.
"""

import argparse
import ast
import json
import lzma
import random
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pandas as pd

MODULES = (
    *("argparse", "asyncio", "collections", "configparser", "ctypes", "datetime", "decimal"),
    *("email", "fractions", "http", "importlib", "inspect", "logging", "multiprocessing"),
    *("pathlib", "statistics", "tarfile", "tkinter", "unittest", "xml"),
)
SPLIT_SIZES = {"train": 2000, "test": 1000}
Rows = list[dict]
Splits = dict[str, Rows]


def read_rows(file: Path) -> Rows:
    """Return the rows of a file of JSON lines, which may be compressed."""
    opened = lzma.open if file.suffix == ".xz" else open
    with opened(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def draw(rows: Rows, n: int, seed: int = 0) -> Rows:
    """Return `n` rows, or all in another order if there are fewer."""
    return random.Random(seed).sample(rows, min(n, len(rows)))


def read_splits(folder: Path, test: str = "test", suffix: str = ".jsonl") -> Splits:
    """Return a sample of the training and the test rows of a task."""
    names = {"train": "train", "test": test}
    return {
        split: draw(read_rows(folder / f"{name}{suffix}"), SPLIT_SIZES[split])
        for split, name in names.items()
    }


def make_long(data: Path) -> Splits:
    """Return film reviews: half as many rows, each ten times as long."""
    splits = read_splits(data / "imdb", suffix=".jsonl.xz")
    return {split: rows[: len(rows) // 2] for split, rows in splits.items()}


def make_few(data: Path) -> Splits:
    """Return one of IDPG's own samples of 100 product reviews."""
    return read_splits(data / "cr") | {"train": read_rows(data / "cr/k100/train.jsonl")}


def make_imbalanced(data: Path) -> Splits:
    """Return sentences of which a tenth is subjective, in training and in test."""
    folder = data / "subj"
    splits = {}
    for split, n in SPLIT_SIZES.items():
        rows = read_rows(folder / f"{split}.jsonl")
        rare, common = ([r for r in rows if r["label"] == label] for label in (0, 1))
        splits[split] = draw(draw(rare, n // 10) + draw(common, n - n // 10), n)
    return splits


def make_many_classes(_data: Path) -> Splits:
    """Return first sentences of docstrings, with the module that they document as label."""
    library = Path(sysconfig.get_path("stdlib"))
    rows, seen = [], set()
    for module in MODULES:
        path = library / module
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
        for file in files:
            if "test" in file.parts:
                continue
            for text in first_sentences(file):
                if text not in seen:
                    seen.add(text)
                    rows.append({"sentence1": text, "label": module})
    rows = draw(rows, len(rows))
    n_test = len(rows) // 3
    return {"train": rows[n_test:][: SPLIT_SIZES["train"]], "test": rows[:n_test]}


def first_sentences(file: Path) -> list[str]:
    """Return the first sentences of the docstrings in a file that have at least four words."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    sentences = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, documented) and (doc := ast.get_docstring(node)):
            text = " ".join(re.split(r"\n\s*\n|(?<=\.)\s", doc)[0].split())
            if len(text.split()) >= 4:
                sentences.append(text)
    return sentences


TABLES: dict[str, tuple[str, Callable[[Path], Splits]]] = {  # format and content of each table
    "short": ("csv", lambda data: read_splits(data / "trec")),
    "long": ("jsonl", make_long),
    "few-rows": ("tsv", make_few),
    "many-classes": ("json", make_many_classes),
    "imbalanced": ("parquet", make_imbalanced),
    "pairs": ("xlsx", lambda data: read_splits(data / "mrpc", test="validation")),
}


def write_table(rows: Rows, file: Path) -> None:
    """Write rows in the format that the name of the file says."""
    table = pd.DataFrame(rows)
    table["label"] = table.label.map(lambda label: label if isinstance(label, str) else f"c{label}")
    match file.suffix:
        case ".parquet":
            table.to_parquet(file)
        case ".xlsx":
            table.to_excel(file, index=False)
        case ".jsonl" | ".json":
            table.to_json(file, orient="records", lines=file.suffix == ".jsonl", force_ascii=False)
        case suffix:
            table.to_csv(file, index=False, sep="\t" if suffix == ".tsv" else ",")


def main() -> None:
    """Write all tables, a folder each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    for name, (suffix, make) in TABLES.items():
        for split, rows in make(args.data).items():
            file = args.out / name / f"{split}.{suffix}"
            file.parent.mkdir(parents=True, exist_ok=True)
            write_table(rows, file)
            print(f"{file}: {len(rows)} rows, {len({row['label'] for row in rows})} classes")


if __name__ == "__main__":
    main()
