"""Measure the chapters of the course: minutes to read, seconds to run.

`python docs/course.py run [05 ...]` runs chapters and stores their outputs and seconds.
`python docs/course.py write` updates the minutes and seconds that the chapters state.
`python docs/course.py fold` hides cells of imports and of checks in JupyterLab.
`python docs/course.py size` prints cells, lines of code and minutes of each chapter.
`tests/test_course.py` contains the rules.
"""

import argparse
import ast
import json
import math
import os
import re
import resource
import tempfile
import textwrap
from collections.abc import Callable, Iterable
from configparser import ConfigParser
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
COURSE_FOLDER = ROOT / "nbs/course"
SECONDS_FILE = ROOT / "nbs/course/seconds.json"
HIDDEN_CELL = re.compile(r"#\|\s*hide\b")
WORDS_PER_MINUTE = 200  # speed of a reader
CODE_LINES_PER_MINUTE = 25  # the formatter puts long calls on several lines
EXERCISES = ("Predict", "Change", "Break", "Build")  # the kinds, in order
# The other chapters are the core path.
OPTIONAL_CHAPTERS = ("03", "07", "10", "11", "12")
COLAB_URL = (
    "https://colab.research.google.com/github/idp-tutorial/idp_tutorial/blob/main/nbs/course"
)
BINDER_URL = (
    "https://mybinder.org/v2/gh/idp-tutorial/idp_tutorial/main?labpath=nbs%2Fcourse%2F00_why.ipynb"
)


def list_chapters() -> list[Path]:
    """Return the notebooks of the chapters in order."""
    return sorted(COURSE_FOLDER.glob("[0-9][0-9]_*.ipynb"))


def _join_markdown(nb: NotebookNode) -> str:
    return "\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")


def read_markdown(path: Path) -> str:
    """Return the text of all Markdown cells of a notebook, as written."""
    return _join_markdown(nbformat.read(path, 4))


def extract_prose(nb: NotebookNode) -> str:
    """Return the text that is read, without comments, alternative texts, addresses and rules."""
    text = re.sub(r"<!--.*?-->", " ", _join_markdown(nb), flags=re.S)
    return re.sub(r"!\[.*?\]\(.*?\)|\]\([^)]*\)|\|[-: |]+\|", " ", text)


def is_folded(cell: NotebookNode) -> bool:
    """Return whether JupyterLab and the site show a cell as a line that a click opens."""
    return cell.metadata.get("jupyter", {}).get("source_hidden", False)


def list_visible_code(nb: NotebookNode) -> list[str]:
    """Return the sources of the code cells that a reader sees without a click."""
    return [
        cell.source
        for cell in nb.cells
        if cell.cell_type == "code" and not is_folded(cell) and not is_foldable(cell.source)
    ]


def extract_code_lines(nb: NotebookNode) -> list[str]:
    """Return the lines of code that a reader sees, without comments and lone brackets."""
    lines = "\n".join(list_visible_code(nb)).split("\n")
    return [line for line in lines if not re.match(r"[\s()\[\]{},:]*(#|$)", line)]


def measure_size(path: Path) -> dict[str, int]:
    """Return the numbers of cells, of lines of code, and of lines that go into a module.

    Comments and empty lines do not count.
    """
    cells = nbformat.read(path, 4).cells
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    exported = [source for source in code if re.search(r"^#\|\s*exporti?\b", source, re.M)]

    def count_lines(sources: list[str]) -> int:
        lines = "\n".join(sources).split("\n")
        return sum(not re.match(r"\s*(#|$)", line) for line in lines)

    return dict(
        cells=len(cells), code_lines=count_lines(code), exported_lines=count_lines(exported)
    )


def list_drawings(nb: NotebookNode) -> list[str]:
    """Return the names of the drawings of `docs/pictures.py` that a notebook shows."""
    text = "\n".join(cell.source for cell in nb.cells)
    return re.findall(r"!\[[^\]]*\]\(\S*images/course/(\w+)\.svg\)", text)


def list_exercises(nb: NotebookNode) -> list[str]:
    """Return the kinds of the exercises in a notebook, as `EXERCISES` names them."""
    text = next((cell.source for cell in nb.cells if "## Exercises" in cell.source), "")
    return re.findall(r"^\d\. \*(\w+)\.\*", text, re.M)


def replace_magics(source: str) -> str:
    """Return the source of a cell with `pass` for each line of IPython, so that it parses."""
    return re.sub(r"^(\s*)[%!].*$", r"\1pass", source, flags=re.M)


def _is_check(node: ast.stmt) -> bool:
    """Return whether a statement only checks: an assertion, or a `with` or `for` of checks."""
    if isinstance(node, ast.Assert):
        return True
    if isinstance(node, (ast.With, ast.For)):
        return all(map(_is_check, node.body))
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = ast.unparse(node.value.func)
        return re.fullmatch(r"test_\w+|(torch\.)?testing\.\w+|assert_\w+", function) is not None
    return False


def _is_import(node: ast.stmt) -> bool:
    return isinstance(node, (ast.Import, ast.ImportFrom))


def is_foldable(source: str) -> bool:
    """Return whether a code cell has only imports, checks or comments, or is hidden on the site."""
    if HIDDEN_CELL.match(source):
        return True
    nodes = ast.parse(replace_magics(source)).body
    return all(map(_is_import, nodes)) or all(map(_is_check, nodes))


def describe_folded(source: str) -> str:
    """Return what a folded code cell contains: `imports`, `check` or `code`."""
    nodes = ast.parse(replace_magics(source)).body
    if nodes and all(map(_is_import, nodes)):
        return "imports"
    return "check" if nodes and all(map(_is_check, nodes)) else "code"


def list_notebooks_of_course() -> list[Path]:
    """Return the notebooks of chapters and solutions."""
    return [*list_chapters(), *sorted((COURSE_FOLDER / "solutions").glob("*.ipynb"))]


def fold_cells(path: Path) -> NotebookNode | None:
    """Return a notebook with folded cells of imports, checks and options; None if nothing changes.

    Cells that are already folded, such as plots and the package's classes, stay so.

    JupyterLab shows a folded cell as a line that a click opens. `allowed_cell_metadata_keys` of
    `settings.ini` lets nbdev keep this metadata.
    """
    nb = nbformat.read(path, 4)
    has_changed = False
    for cell in nb.cells:
        if cell.cell_type != "code":
            continue
        metadata = dict(cell.metadata)
        if is_foldable(cell.source):
            metadata["jupyter"] = {"source_hidden": True}
        has_changed = has_changed or cell.metadata != metadata
        cell.metadata = nbformat.from_dict(metadata)
    return nb if has_changed else None


def write_folds(numbers: Iterable[str]) -> None:
    """Fold the cells of imports and checks in chapters and their solutions."""
    selected = set(numbers)
    for path in list_notebooks_of_course():
        if selected and path.stem[:2] not in selected:
            continue
        nb = fold_cells(path)
        if nb:
            nbformat.write(nb, path)
            print(f"folded {path.relative_to(ROOT)}")


def load_seconds() -> dict[str, int]:
    """Return the measured seconds of each chapter on one core."""
    return json.loads(SECONDS_FILE.read_text(encoding="utf-8")) if SECONDS_FILE.exists() else {}


def estimate_reading_minutes(cells: list[NotebookNode]) -> float:
    """Return the minutes that a reader needs for prose and code of some cells."""
    nb = nbformat.v4.new_notebook(cells=cells)
    n_words = len(extract_prose(nb).split())
    return n_words / WORDS_PER_MINUTE + len(extract_code_lines(nb)) / CODE_LINES_PER_MINUTE


def summarise_chapter(path: Path) -> dict[str, Any]:
    """Return what the table of chapters on the front page states of a chapter."""
    nb = nbformat.read(path, 4)
    return {
        "chapter": path.stem,
        "is_core": path.stem[:2] not in OPTIONAL_CHAPTERS,
        "minutes": round(estimate_reading_minutes(nb.cells)),
        "seconds": load_seconds().get(path.stem, 0),
    }


def summarise_course() -> dict[str, float]:
    """Return hours to read all chapters and the core path, and minutes of one core to run them."""
    rows = [summarise_chapter(path) for path in list_chapters()]
    return {
        "hours": sum(row["minutes"] for row in rows) / 60,
        "core_hours": sum(row["minutes"] for row in rows if row["is_core"]) / 60,
        "minutes_to_run": sum(row["seconds"] for row in rows) / 60,
        "minutes_to_first_score": minutes_to_first_score(),
    }


def minutes_to_first_score() -> float:
    """Return the minutes from the first word of the course to the first trained score.

    They are the time to read up to it, and to run the whole chapter.
    """
    path = list_chapters()[0]
    cells = nbformat.read(path, 4).cells
    index = next(
        i
        for i, cell in enumerate(cells)
        if cell.cell_type == "code" and re.search(r"\bscore\(\*", cell.source)
    )
    return estimate_reading_minutes(cells[: index + 1]) + load_seconds().get(path.stem, 0) / 60


# ---- chapters that state their minutes and seconds


def format_duration(path: Path) -> str:
    """Return the sentence in which a chapter states its minutes and seconds."""
    row = summarise_chapter(path)
    rounded = 5 * math.ceil(row["seconds"] / 5)
    duration = f"{rounded} s" if rounded else "less than a minute"
    return f"**It takes** {row['minutes']} minutes to read and {duration} to run"


def wrap_paragraph(text: str) -> str:
    """Return a paragraph wrapped at 98 columns, without a line break in bold words."""
    bold = re.sub(r"\*\*[^*]+\*\*", lambda m: re.sub(r"\s", "\0", m[0]), text)
    wrapped = textwrap.fill(bold, 98, break_long_words=False, break_on_hyphens=False)
    return wrapped.replace("\0", " ")


def update_duration(text: str, path: Path) -> str:
    """Return a Markdown cell of a chapter with the present minutes and seconds."""
    updated = re.sub(r"\*\*It takes\*\*\s[^;.]*?\sto\s+run", format_duration(path), text)
    if updated == text:
        return text
    paragraphs = updated.split("\n\n")
    return "\n\n".join(wrap_paragraph(p) if "**It takes**" in p else p for p in paragraphs)


def is_public() -> bool:
    """Return whether the repository is public, so that Colab and Binder find it.

    The setting `is_public` of `settings.ini` says so.
    """
    ini = ConfigParser(delimiters=["="], interpolation=None)
    ini.read(ROOT / "settings.ini", encoding="utf-8")
    return ini["DEFAULT"].getboolean("is_public", fallback=False)


def edit_markdown_cells(path: Path, change: Callable[[str], str]) -> NotebookNode | None:
    """Return a notebook with `change(text)` for each Markdown cell; None if nothing changes."""
    nb = nbformat.read(path, 4)
    has_changed = False
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            updated = change(cell.source)
            has_changed = has_changed or updated != cell.source
            cell.source = updated
    return nb if has_changed else None


def render_updates() -> dict[Path, NotebookNode]:
    """Return updates of the chapters that state old minutes or seconds."""
    updates = {
        path: edit_markdown_cells(path, partial(update_duration, path=path))
        for path in list_chapters()
    }
    return {path: nb for path, nb in updates.items() if nb}


def write_updates() -> None:
    """Write the present minutes and seconds into the chapters, and print those of the course."""
    for path, nb in render_updates().items():
        nbformat.write(nb, path)
    for name, value in summarise_course().items():
        print(f"{name}: {value:.1f}")
    print("`python docs/notebooks.py readme` updates the table of the front page")


def child_cpu_seconds() -> float:
    """Return the CPU time of the child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_chapters(numbers: Iterable[str]) -> None:
    """Run chapters in new kernels with one thread; store their outputs and their CPU seconds.

    The cache of hidden states is empty, as in a reader's first run.
    """
    import notebooks

    os.environ.update(notebooks.STORED_OUTPUTS_ENVIRONMENT)
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    selected = set(numbers)
    for path in list_chapters():
        if selected and path.stem[:2] not in selected:
            continue
        before = child_cpu_seconds()
        with tempfile.TemporaryDirectory() as cache, patch.dict(os.environ, IDP_CACHE=cache):
            nb = notebooks.execute_notebook(path)
        seconds = load_seconds() | {path.stem: round(child_cpu_seconds() - before)}
        nbformat.write(nb, path)
        notebooks.run_nbdev("nbdev_clean", fname=str(path))
        SECONDS_FILE.write_text(
            json.dumps(seconds, indent=1, sort_keys=True) + "\n", encoding="utf-8"
        )
        print(path.stem, seconds[path.stem], flush=True)


def print_sizes() -> None:
    """Print the size of each chapter, and the minutes and seconds that it takes."""
    print(f"{'chapter':40} {'cells':>6} {'code':>6} {'export':>6} {'min':>6} {'s':>6}")
    for path in list_chapters():
        row = summarise_chapter(path)
        numbers = [*measure_size(path).values(), row["minutes"], row["seconds"]]
        print(f"{path.stem:40}", *(f"{number:6}" for number in numbers))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    subparsers = parser.add_subparsers(dest="command", required=True)
    subparsers.add_parser("write", help="update the minutes and seconds that the chapters state")
    run_parser = subparsers.add_parser(
        "run", help="run chapters with one thread, store outputs and seconds, then `write`"
    )
    run_parser.add_argument("numbers", nargs="*", help="such as 05 (default: all)")
    fold_parser = subparsers.add_parser(
        "fold", help="hide cells of imports and of checks in JupyterLab"
    )
    fold_parser.add_argument("numbers", nargs="*", help="such as 05 (default: all)")
    subparsers.add_parser("size", help="print cells, lines of code and minutes of each chapter")
    args = parser.parse_args()
    if args.command == "fold":
        write_folds(args.numbers)
        return
    if args.command == "size":
        print_sizes()
        return
    if args.command == "run":
        run_chapters(args.numbers)
    write_updates()


if __name__ == "__main__":
    main()
