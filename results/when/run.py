"""Compare the methods on the six tables of `tables.py`, as a user would: `idp compare TABLE`.

    python results/when/tables.py --data FOLDER --out TABLES
    python results/when/run.py --tables TABLES
    python results/when/others.py --tables TABLES

Each table is compared with the options that the command has by itself, so the backbone is MiniLM.
The records and logits of a table are kept in `results/when/TABLE`. A second call continues.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
OPTIONS = {  # what the command cannot know
    "pairs": ["--text2", "sentence2"],
    "imbalanced": ["--metric", "macro_f1"],
    "long": ["--max_len", "256"],
}
KEPT = "compare.jsonl", "logits"  # the rest of the output can be made from these


def compare_table(folder: Path, out: Path) -> None:
    """Compare the default methods on a table, and keep the records and logits."""
    options = [*OPTIONS.get(folder.name, ()), "--out", str(out)]
    program = [sys.executable, "-m", "idp_tutorial.cli.main", "compare", str(folder)]
    subprocess.run([*program, *options], check=True)
    for path in out.iterdir():
        if path.name not in KEPT:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def main() -> None:
    """Compare on every table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tables", type=Path, required=True, help="folder that tables.py wrote")
    parser.add_argument("--only", nargs="+", help="names of tables (default: all)")
    parser.add_argument("--out", type=Path, default=HERE)
    args = parser.parse_args()
    for folder in sorted(path for path in args.tables.iterdir() if path.is_dir()):
        if not args.only or folder.name in args.only:
            print(f"== {folder.name}", flush=True)
            compare_table(folder, args.out / folder.name)


if __name__ == "__main__":
    main()
