"""Run, check and publish the notebooks.

`python docs/notebooks.py run|check|readme`; CONTRIBUTING.md describes the workflow.
"""

import argparse
import ast
import base64
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from configparser import ConfigParser, SectionProxy
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

import nbformat
from nbformat import NotebookNode
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS_FOLDER = ROOT / "nbs"
IMAGES_FOLDER = ROOT / "docs/images"
DIRECTIVE_LINE = re.compile(r"^\s*#\s*\|.*\n?", re.M)
TOP_LEVEL = "top"  # name of the group of modules that belong to no subpackage
SUBPACKAGES = {  # what each subpackage contains; a module imports only from subpackages before it
    "utils": "Checks of arguments, durable files and versions; every package may import them.",
    "core": "Frozen models, insertion plans, and the loop over the layers.",
    "data": "From rows of text to batches of examples.",
    "families": "One module for each family of Hugging Face models.",
    "training": "The training loop, evaluation, caches and checkpoints.",
    "backbones": "Open a backbone by name, and fetch its weights.",
    "methods": "One module for each method, named as in its paper.",
    "assembly": "Models built from a method, a task and a backbone; controls and probes.",
    "saving": "Save trained prompts, and load them again.",
    "runs": "Train a configuration, keep its record, compare methods.",
    TOP_LEVEL: "The estimators of scikit-learn, and the methods in one file.",
    "huggingface": "Prompts for a Hugging Face model object.",
    "serving": "Several tasks on one backbone.",
    "cli": "Commands for a shell.",
    "papers": "Protocols, published scores, and the runs of a table.",
    "analysis": "What the hidden states and the prompts contain.",
    "efficiency": "Parameters, time and memory of a method.",
    "reproduction": "Helpers of the course.",
}
FIRST_NOTEBOOKS = ("index", "what_works")
NOTEBOOK_FOLDERS = [  # in reading order
    ".",
    "course",
    "course/solutions",
    *(f"engine/{subpackage}" for subpackage in SUBPACKAGES),
    "lab",
]


def read_directives(cell: NotebookNode) -> set[str]:
    """Return the `#|` lines of a code cell, such as `{'slow', 'eval: false'}`."""
    if cell.cell_type != "code":
        return set()
    directives = re.findall(r"^\s*#\s*\|\s*(.+?)\s*$", cell.source, re.M)
    return {re.sub(r"\s*:\s*", ": ", directive) for directive in directives}


def read_settings() -> SectionProxy:
    """Return the content of `settings.ini`, which describes the project."""
    ini = ConfigParser(delimiters=["="], interpolation=None)
    ini.read(ROOT / "settings.ini", encoding="utf-8")
    return ini["DEFAULT"]


def notebook_name(path: Path) -> str:
    """Return the name of a notebook: `course/03_reading` for `nbs/course/03_reading.ipynb`."""
    return path.relative_to(NOTEBOOKS_FOLDER).with_suffix("").as_posix()


def notebook_folder(path: Path) -> str:
    """Return the folder of a notebook below `nbs/`; `.` for the index."""
    return path.relative_to(NOTEBOOKS_FOLDER).parent.as_posix()


def reading_order_key(path: Path) -> tuple[int, bool, str]:
    """Return a key that sorts notebooks: index, course, engine by subpackage, lab.

    The notebooks in `FIRST_NOTEBOOKS` come first in their folders.
    """
    folder = notebook_folder(path)
    is_known = folder in NOTEBOOK_FOLDERS
    rank = NOTEBOOK_FOLDERS.index(folder) if is_known else len(NOTEBOOK_FOLDERS)
    return rank, path.stem not in FIRST_NOTEBOOKS, notebook_name(path)


def strip_number(path: Path) -> str:
    """Return the name of a notebook without its folder and its number."""
    return re.sub(r"^\d+[a-z]?_", "", path.stem)


def match_notebooks(name: str, notebooks: list[Path]) -> list[Path]:
    """Return the notebooks to which a name refers.

    A name is the beginning of a file name (`03`, `05_prompt`), a file name without its number
    (`idpg`), a folder (`methods`), or a path (`engine/model/backbone`).
    """
    name = re.sub(r"^(.*/)?nbs/", "", name.removesuffix(".ipynb")).strip("/")
    exact = [
        path
        for path in notebooks
        if f"/{name}/" in f"/{notebook_name(path)}/" or strip_number(path) == name
    ]
    return exact or [
        path
        for path in notebooks
        if notebook_name(path).startswith(name)
        or path.stem.startswith(name)
        or strip_number(path).startswith(name)
    ]


def is_project_notebook(path: Path) -> bool:
    """Return whether a notebook is published: no part of its path starts with `_` or `.`."""
    parts = path.relative_to(NOTEBOOKS_FOLDER).parts
    return not any(part.startswith(("_", ".")) for part in parts)


def list_notebooks(names: Iterable[str] = ()) -> list[Path]:
    """Return all notebooks in reading order, or those to which `names` refer."""
    paths = NOTEBOOKS_FOLDER.rglob("*.ipynb")
    notebooks = sorted(filter(is_project_notebook, paths), key=reading_order_key)
    matches = {name: match_notebooks(name, notebooks) for name in names}
    if not matches:
        return notebooks
    unknown = [name for name, paths in matches.items() if not paths]
    if unknown:
        raise SystemExit(
            f"No notebook has a name that starts with {', '.join(unknown)}. "
            f"The notebooks are: {', '.join(map(notebook_name, notebooks))}"
        )
    return [path for path in notebooks if any(path in paths for paths in matches.values())]


# ---- run

STORED_OUTPUTS_ENVIRONMENT = {
    "IDP_STATIC_OUTPUTS": "1",  # a picture instead of a slider
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    "PYTHONHASHSEED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",  # with ipywidgets, progress bars would be widgets
}


def is_skipped(cell: NotebookNode) -> bool:
    """Return whether a cell is not run: `#| eval: false`, or a test flag of `settings.ini`."""
    return bool(read_directives(cell) & {"eval: false", *read_settings()["tst_flags"].split()})


def _quantize(png: bytes) -> bytes:
    """Return a picture with at most 128 colours, or the same bytes if that saves nothing."""
    image = Image.open(io.BytesIO(png))
    if image.mode == "P":  # has a palette already
        return png
    compressed = io.BytesIO()
    quantized = image.convert("RGB").quantize(128, dither=Image.Dither.NONE)
    quantized.save(compressed, "png", optimize=True)
    return min(png, compressed.getvalue(), key=len)


def compress_pictures(nb: NotebookNode) -> NotebookNode:
    """Reduce the pictures of a notebook to 128 colours, which saves two thirds of the bytes."""
    for cell in nb.cells:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                png = base64.b64decode(data["image/png"])
                compressed = _quantize(png)
                if compressed != png:
                    data["image/png"] = base64.b64encode(compressed).decode()
    return nb


def number_tables(nb: NotebookNode) -> NotebookNode:
    """Replace the random names in styled tables of pandas, which differ in every run.

    Cells of a table without styles need no names.
    """
    for index, cell in enumerate(nb.cells):
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "text/html" in data:
                html = re.sub(r"T_[0-9a-f]{5}", f"T_{index:05x}", data["text/html"])
                if '<style type="text/css">\n</style>' in html:
                    html = re.sub(r' (?:id|class)="(?:T_|col|row|data|blank|index)[^"]*"', "", html)
                data["text/html"] = html
    return nb


def execute_notebook(path: Path) -> NotebookNode:
    """Run a notebook in a new kernel, in its folder; return it with the new outputs.

    Cells that are skipped keep their stored outputs.
    """
    from nbclient import NotebookClient

    nb = nbformat.read(path, 4)
    # the cells are shared with `nb`, which therefore gets the outputs
    cells = [cell for cell in nb.cells if not is_skipped(cell)]
    NotebookClient(
        nbformat.v4.new_notebook(cells=cells, metadata=nb.metadata),
        timeout=300,
        coalesce_streams=True,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    nb.metadata = {
        "kernelspec": {"name": "python3", "display_name": "python3", "language": "python"}
    }
    return number_tables(compress_pictures(nb))


def _run_and_describe(path: Path, write: bool) -> str:
    """Run a notebook; return what the report says about it."""
    before = path.read_bytes()
    nb = execute_notebook(path)
    if not write:
        return ""
    nbformat.write(nb, path)
    run_nbdev("nbdev_clean", fname=str(path))
    return "unchanged" if path.read_bytes() == before else "new outputs"


def run_notebooks(names: Iterable[str], write: bool = True) -> int:
    """Run notebooks and return the number of failures; `write` stores the outputs."""
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    os.environ.update(STORED_OUTPUTS_ENVIRONMENT)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    n_failed = 0
    for path in list_notebooks(names):
        start = time.perf_counter()
        try:
            note = _run_and_describe(path, write)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as e:
            # without escape sequences for colours, because the report may go to a log file
            message = re.sub(r"\x1b\[[\d;]*m", "", str(e))
            n_failed += 1
            note = f"FAILED (the file is unchanged)\n{message}"
        seconds = time.perf_counter() - start
        print(f"{notebook_name(path):42} {seconds:6.1f} s  {note}", flush=True)
    return n_failed


# ---- check


def run_nbdev(command: str, cwd: Path = ROOT, **options: Any) -> None:
    """Run an nbdev command of this environment; exit with its output if it fails."""
    module = "clean" if "clean" in command else "doclinks"
    script = f"from nbdev.{module} import {command}; {command}(**{options})"
    process = subprocess.run(
        [sys.executable, "-c", script],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": ""},
    )
    if process.returncode:
        raise SystemExit(f"{command} failed:\n{process.stdout}{process.stderr}")


def is_generated(path: Path) -> bool:
    """Return whether a module was exported from a notebook; its docstring precedes that line."""
    beginning = path.read_text(encoding="utf-8")[:2000]
    return re.search(r"^# AUTOGENERATED", beginning, re.M) is not None


def export_copy(folder: Path) -> Path:
    """Export and clean a copy of the project in `folder`, without modules of deleted notebooks."""
    lib = read_settings()["lib_path"]
    shutil.copy(ROOT / "settings.ini", folder)
    shutil.copytree(NOTEBOOKS_FOLDER, folder / "nbs", ignore=shutil.ignore_patterns(".*", "_*"))
    ignored = shutil.ignore_patterns("__pycache__", "assets")
    shutil.copytree(ROOT / lib, folder / lib, ignore=ignored)
    for path in list((folder / lib).rglob("*.py")):
        is_empty = not path.stat().st_size  # nbdev creates an empty `__init__.py` again
        if is_generated(path) or is_empty:
            path.unlink()
    run_nbdev("nbdev_export", cwd=folder)
    run_nbdev("nbdev_clean", cwd=folder)
    return folder


def files_differ(a: Path, b: Path) -> bool:
    """Return whether two files differ, or one of them is missing."""
    return not (a.exists() and b.exists() and a.read_bytes() == b.read_bytes())


def check_modules(copy: Path) -> Iterator[str]:
    """Yield the problems of the modules, compared with an exported copy of the project."""
    lib = read_settings()["lib_path"]
    names = set()
    for root in (ROOT, copy):
        names |= {path.relative_to(root).as_posix() for path in (root / lib).rglob("*.py")}
    for name in sorted(names):
        if not (copy / name).exists():
            yield f"{name}: no notebook exports it: delete it"
        elif files_differ(ROOT / name, copy / name):
            yield f"{name} is not what its notebook exports: edit the notebook, then `make prepare`"


def check_notebooks(copy: Path) -> Iterator[str]:
    """Yield the problems of the notebooks, compared with a cleaned copy of the project."""
    for path in list_notebooks():
        short_name = notebook_name(path)
        name = f"nbs/{short_name}.ipynb"
        if files_differ(path, copy / name):
            yield f"{name} is not clean (execution counts or metadata): run `nbdev_clean`"
        outputs = []
        for cell in nbformat.read(path, 4).cells:
            outputs += cell.get("outputs", ())
        if any(output.output_type == "error" for output in outputs):
            yield f"{name} has a stored error: run `python docs/notebooks.py run {short_name}`"
        if "site-packages" in str(outputs):
            yield (
                f"{name} has a stored warning with a path of this machine: "
                "remove its cause, and run the notebook again"
            )


def check_readme() -> Iterator[str]:
    """Yield the problems of README.md, its pictures and the list of notebooks."""
    index = NOTEBOOKS_FOLDER / "index.ipynb"
    if not index.exists():
        return
    if update_index(index) != nbformat.read(index, 4):
        yield "nbs/index.ipynb has old titles or minutes: run `python docs/notebooks.py readme`"
    text, images = render_readme()
    expected = {
        "README.md": text.encode(),
        "nbs/engine/README.md": render_engine_list().encode(),
        **{f"docs/images/{name}": data for name, data in images.items()},
    }
    stored = {f"docs/images/{path.name}" for path in IMAGES_FOLDER.glob("index_*")}
    for name in sorted(stored | set(expected)):
        path = ROOT / name
        if not path.exists() or path.read_bytes() != expected.get(name):
            yield (
                f"{name} is not what the notebooks give (nbs/index.ipynb and the titles): "
                "run `python docs/notebooks.py readme`"
            )


def check_all() -> list[str]:
    """Return the problems of modules, notebooks and README.md, without changing a file."""
    with tempfile.TemporaryDirectory() as folder:
        copy = export_copy(Path(folder))
        return [*check_modules(copy), *check_notebooks(copy), *check_readme()]


# ---- readme

README_TEMPLATE = """{% extends 'markdown/index.md.j2' %}
{% block stream %}```text
{{ output.text.rstrip() }}
```
{% endblock %}{% block data_text scoped %}```text
{{ output.data['text/plain'].rstrip() }}
```
{% endblock %}"""


def link_from_root(link: str) -> str:
    """Return a link of a file in `nbs/` relative to the root of the repository."""
    if re.match(r"[a-z]+:|[#/]", link):
        return link
    path, separator, anchor = link.partition("#")
    from_root = os.path.normpath(PurePosixPath("nbs", path)).replace(os.sep, "/")
    return from_root + separator + anchor


def rewrite_links(text: str, move: Callable[[str], str] = link_from_root) -> str:
    """Return a Markdown text with `move(link)` for each of its links; code is unchanged."""
    parts = re.split(r"(```.*?```|`[^`\n]+`)", text, flags=re.S)
    link_pattern = re.compile(r'(\]\(|\b(?:src|srcset|href)=")([^)\s"]+)')
    for i in range(0, len(parts), 2):  # the odd parts are code
        parts[i] = link_pattern.sub(lambda m: m[1] + move(m[2]), parts[i])
    return "".join(parts)


def filter_cell(cell: NotebookNode) -> NotebookNode | None:
    """Return a cell as readers of README and site see it; None if it is hidden."""
    directives = read_directives(cell)
    if any(d == "hide" or d.startswith("default_exp") for d in directives):
        return None
    if cell.cell_type != "code":
        return cell
    if directives & {"output: false", "hide_output"}:
        cell.outputs = []
    if directives & {"echo: false", "hide_input"}:
        cell.source = ""
    else:
        cell.source = DIRECTIVE_LINE.sub("", cell.source).strip()
    return cell if cell.source or cell.outputs else None


def read_title_and_summary(path: Path) -> tuple[str, str]:
    """Return the first heading of a notebook and the line below it that starts with `>`.

    The texts contain no links, so that they may be used on other pages. A comment is not read: in
    a chapter it has the docstring of the module, for which nbdev takes the first such line.
    """
    cells = nbformat.read(path, 4).cells[:2]
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text).replace("|", "\\|")
    title = re.search(r"^# +(.+)$", text, re.M)
    quoted = re.search(r"(?:^>.*\n?)+", text, re.M)
    summary = re.sub(r"^> ?", "", quoted[0], flags=re.M) if quoted else ""
    first_sentence = re.match(r".*?[.?!](?=\s|$)", " ".join(summary.split()))
    return title[1].strip() if title else "", first_sentence[0] if first_sentence else ""


def _load_course() -> ModuleType:
    """Load `docs/course.py`, which measures how long a chapter is."""
    spec = importlib.util.spec_from_file_location("course", ROOT / "docs/course.py")
    if spec is None or spec.loader is None:
        raise ImportError("docs/course.py is missing")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def render_chapter_table() -> str:
    """Return the table of chapters: core path, title, minutes to read, and its summary."""
    course = _load_course()
    lines = ["| | chapter | minutes | summary |", "|---|---|--:|---|"]
    for path in list_notebooks():
        if notebook_folder(path) != "course":
            continue
        title, summary = read_title_and_summary(path)
        row = course.summarise_chapter(path)
        link = f"[{path.stem[:2]} · {title}]({notebook_name(path)}.ipynb)"
        core = "◆" if row["is_core"] else ""
        lines.append(f"| {core} | {link} | {row['minutes']} | {summary} |")
    total = course.summarise_course()
    lines += [
        "",
        f"The core path takes {total['core_hours']:.1f} hours to read, all chapters "
        f"{total['hours']:.1f}; one core runs them in {total['minutes_to_run']:.0f} minutes.",
    ]
    return "\n".join(lines)


def render_generator() -> str:
    """Return the class `NPG` of `minimal.py` as a block of code."""
    source = (ROOT / "idp_tutorial/minimal.py").read_text(encoding="utf-8")
    lines = source.splitlines()
    (node,) = (n for n in ast.parse(source).body if getattr(n, "name", "") == "NPG")
    return "\n".join(["```python", *lines[node.lineno - 1 : node.end_lineno], "```"])


def render_lab_list() -> str:
    """Return links to the pages of the lab."""
    links = [
        f"[{read_title_and_summary(path)[0].replace('`', '')}]({notebook_name(path)}.ipynb)"
        for path in list_notebooks()
        if notebook_folder(path) == "lab"
    ]
    return " · ".join(links)


def render_online_links() -> str:
    """Return links to Colab and Binder, if `settings.ini` says that the repository is public."""
    if not read_settings().getboolean("is_public", fallback=False):
        return ""
    course = _load_course()
    return (
        f"Without an installation: [in Colab]({course.COLAB_URL}/00_why.ipynb) or "
        f"[on Binder]({course.BINDER_URL})."
    )


GENERATED_PARTS: dict[str, Callable[[], str]] = {
    "chapters": render_chapter_table,
    "generator": render_generator,
    "lab": render_lab_list,
    "online": render_online_links,
}


def update_generated_parts(text: str) -> str:
    """Return a text whose parts between `<!-- NAME -->` and `<!-- end -->` are up to date."""

    def render_part(match: re.Match) -> str:
        part = GENERATED_PARTS[match[1]]()
        return f"<!-- {match[1]} -->\n{part}\n<!-- end -->" if part else match[0]

    names = "|".join(GENERATED_PARTS)
    return re.sub(rf"<!-- ({names}) -->\n.*?<!-- end -->", render_part, text, flags=re.S)


def update_index(path: Path) -> NotebookNode:
    """Return the index notebook with its generated parts up to date."""
    nb = nbformat.read(path, 4)
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            cell.source = update_generated_parts(cell.source)
    return nb


def render_engine_list() -> str:
    """Return the text of `nbs/engine/README.md`: all notebooks of the engine by subpackage."""
    lines = [
        "<!-- Made from the notebooks by `make prepare`: do not edit. -->",
        "# Essays on the implementation",
        "",
        "Begin with the [layer loop](core/loop.ipynb), where every prompt enters. A package imports"
        " only from packages above it; [architecture](../../docs/architecture.md) says what each "
        "contains and why.",
    ]
    for subpackage, contents in SUBPACKAGES.items():
        paths = [p for p in list_notebooks() if notebook_folder(p) == f"engine/{subpackage}"]
        if not paths:
            continue
        heading = "modules beside the packages" if subpackage == TOP_LEVEL else subpackage
        lines += ["", f"## {heading}", "", contents, ""]
        for path in paths:
            title, summary = read_title_and_summary(path)
            lines.append(f"- [{title}]({subpackage}/{path.name}): {summary}")
    return "\n".join(lines) + "\n"


def render_readme(
    path: Path = NOTEBOOKS_FOLDER / "index.ipynb",
) -> tuple[str, dict[str, bytes]]:
    """Return the index notebook as Markdown, and its pictures by name."""
    from nbconvert import MarkdownExporter

    nb = update_index(path)
    alternative_texts = re.findall(
        r"^#\| fig-alt: (.+)$", "\n".join(c.source for c in nb.cells), re.M
    )
    nb.cells = [cell for cell in map(filter_cell, nb.cells) if cell]
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            cell.source = rewrite_links(cell.source)
        for output in cell.get("outputs", ()):
            if "text/markdown" in output.get("data", ()):
                output.data["text/markdown"] = rewrite_links(output.data["text/markdown"])
    # nbdev_clean removes the language, which the fences of code need
    nb.metadata["language_info"] = {"name": "python"}
    text, resources = MarkdownExporter(raw_template=README_TEMPLATE).from_notebook_node(
        nb, resources=dict(unique_key="index", output_files_dir="docs/images")
    )
    text = re.sub(r"<style.*?</style>\s*", "", text, flags=re.S)
    text = re.sub(r"^```python\s*```$\n*", "", text, flags=re.M)  # hidden inputs
    for alternative_text in alternative_texts:
        text = text.replace("![png](", f"![{alternative_text}](", 1)
    names = "|".join(GENERATED_PARTS)
    text = re.sub(rf"^<!-- ({names}|end) -->\n", "", text, flags=re.M)
    text = re.sub(r"[ \t]+$", "", re.sub(r"\n{3,}", "\n\n", text), flags=re.M).strip()
    header = (
        "<!-- Made from nbs/index.ipynb by `make prepare`: edit the notebook, not this file. -->\n"
    )
    images = {Path(name).name: data for name, data in resources["outputs"].items()}
    return f"{header}{text}\n", images


def write_readme() -> None:
    """Write the index notebook, README.md, its pictures and the list of the engine's notebooks."""
    index = NOTEBOOKS_FOLDER / "index.ipynb"
    nb = update_index(index)
    if nb != nbformat.read(index, 4):
        nbformat.write(nb, index)
        run_nbdev("nbdev_clean", fname=str(index))
    text, images = render_readme()
    for path in IMAGES_FOLDER.glob("index_*"):
        path.unlink()
    if images:
        IMAGES_FOLDER.mkdir(parents=True, exist_ok=True)
    for name, data in images.items():
        (IMAGES_FOLDER / name).write_bytes(data)
    (ROOT / "README.md").write_text(text, encoding="utf-8")
    (NOTEBOOKS_FOLDER / "engine/README.md").write_text(render_engine_list(), encoding="utf-8")
    print(f"README.md: {len(text.splitlines())} lines, {len(images)} pictures")


def build_argument_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    subparsers = parser.add_subparsers(dest="command", required=True)
    run_parser = subparsers.add_parser(
        "run", help="run notebooks in new kernels, store their outputs, clean them"
    )
    run_parser.add_argument(
        "names",
        nargs="*",
        help="such as `03`, `idpg`, `engine/model/backbone`, a package, a path (default: all)",
    )
    run_parser.add_argument(
        "--no-write", action="store_true", help="check that the notebooks run, and store nothing"
    )
    subparsers.add_parser(
        "check",
        help="fail if modules, notebooks or README.md differ from what `make prepare` would write",
    )
    subparsers.add_parser(
        "readme", help="write README.md from nbs/index.ipynb, and nbs/engine/README.md"
    )
    return parser


def main() -> int:  # exit status
    """Run the command line."""
    args = build_argument_parser().parse_args()
    if args.command == "run":
        return 1 if run_notebooks(args.names, not args.no_write) else 0
    if args.command == "readme":
        write_readme()
        return 0
    problems = check_all()
    summary = f"{len(list_notebooks())} notebooks: modules, outputs and README.md are up to date"
    print("\n".join(problems) or summary)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
