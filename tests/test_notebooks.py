"""Run every notebook from top to bottom, in its folder, without a network, in a new process.

`make prepare` runs them in Jupyter's kernel; these tests import the large libraries only once.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
NBS = ROOT / "nbs"
NOTEBOOKS = sorted(
    p for p in NBS.rglob("*.ipynb") if not re.search("/[_.]", f"/{p.relative_to(NBS).as_posix()}")
)
SERVER = """
"Import the large libraries once, and run each notebook in a child process of its own."
import gc, json, os, signal, sys
sys.modules['rfc3987_syntax'] = None # as in conftest.py
import accelerate, matplotlib.pyplot, nbformat, pandas, peft, scipy.stats, sklearn.linear_model
import torch
import transformers, transformers.trainer_pt_utils
from IPython.core.interactiveshell import InteractiveShell
import notebooks
torch.set_num_threads(1)
assert not any(m.startswith('idp_tutorial') for m in sys.modules)
gc.collect()
gc.freeze() # the collector does not visit the libraries

def run(path): # 1 if a cell fails
    shell = InteractiveShell.instance(colors='NoColor')
    for cell in nbformat.read(path, 4).cells:
        if cell.cell_type!='code' or notebooks.is_skipped(cell):
            continue
        if not shell.run_cell(cell.source).success:
            print(f'--- in this cell:\\n{cell.source}')
            return 1
    return 0

for line in iter(sys.stdin.readline, ''):
    path, report = json.loads(line)
    pid = os.fork()
    if not pid:
        torch.set_num_threads(1) # builds the pool of threads before two threads of a loader need it
        file = os.open(report, os.O_CREAT|os.O_WRONLY|os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.chdir(os.path.dirname(path))
        signal.alarm(300)
        code = 70
        try:
            code = run(path)
            sys.stdout.flush()
        finally:
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function of a path, which returns exit status and output of the notebook."""
    folder = tmp_path_factory.mktemp("notebooks")
    (folder / "server.py").write_text(SERVER)
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "IDP_STATIC_OUTPUTS": "1",
        "MPLBACKEND": "Agg",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "docs")]),
    }
    with subprocess.Popen(
        [sys.executable, folder / "server.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
        cwd=folder,
    ) as server:

        def call(path):
            server.stdin.write(json.dumps([str(path), str(folder / "report")]) + "\n")
            server.stdin.flush()
            return int(server.stdout.readline()), (folder / "report").read_text()

        yield call
        server.stdin.close()


# essays that take more than ten seconds; their modules have tests of their own
SLOW_ESSAYS = {
    "analysis/information",
    "analysis/layer_choice",
    "analysis/probes",
    "analysis/prompt_swaps",
    "data/synthetic",
    "efficiency/cost_model",
    "efficiency/parameter_counts",
    "efficiency/published_counts",
    "methods/backbone_edits",
    "methods/efl",
    "methods/glove",
    "methods/smop_dept",
    "papers/supplementary_training",
    "pretraining/distillation",
    "training/cache",
    "training/fit",
}


LONG_PAGES = {"lab/what_works", "lab/what_a_prompt_adds"}  # their numbers have tests of their own


def mark_slow(path):
    """Return the parameters of a test of a notebook; solutions and slow essays run weekly."""
    name = path.relative_to(NBS).with_suffix("").as_posix()
    is_slow = path.parent.name == "solutions" or name.removeprefix("engine/") in SLOW_ESSAYS
    marks = [pytest.mark.slow] if is_slow else [pytest.mark.long] if name in LONG_PAGES else []
    return pytest.param(path, id=name, marks=marks)


@pytest.mark.notebook
@pytest.mark.parametrize("path", [*map(mark_slow, NOTEBOOKS)])
def test_a_notebook_runs_and_is_unchanged(path, run):
    before = path.read_bytes()
    status, output = run(path)
    if status:
        timed_out = status == -signal.SIGALRM
        pytest.fail(f"{path.name} took more than 300 s" if timed_out else output, pytrace=False)
    assert path.read_bytes() == before


def test_every_chapter_runs_each_time():
    chapters = [path for path in NOTEBOOKS if path.parent.name == "course"]
    assert len(chapters) > 10
    assert not any(mark_slow(path).marks for path in chapters)


@pytest.mark.notebook
def test_a_failing_cell_is_reported_with_its_source(run, tmp_path):
    def cell(source):
        return {
            "cell_type": "code",
            "id": f"c{len(source)}",
            "metadata": {},
            "outputs": [],
            "execution_count": None,
            "source": source,
        }

    cells = [cell("#| slow\n1/0"), cell("x = 1"), cell('assert x==2, "not two"')]
    path = tmp_path / "bad.ipynb"
    path.write_text(json.dumps(dict(cells=cells, metadata={}, nbformat=4, nbformat_minor=5)))
    status, output = run(path)
    assert status == 1
    assert "AssertionError: not two" in output
    assert "assert x==2" in output


# ---- GitHub and VS Code render the stored notebooks

# the commands of the formulas; GitHub, JupyterLab and the site know all of them
COMMANDS = re.compile(
    r"\\(?:[,{}]|alpha|big|Big|cdot|frac|in|langle|leftarrow|ln|mathbb|mathrm|otimes|partial|qquad|quad"
    r"|rangle|sigma|sim|sqrt|sum|text|tfrac|times|to|top|varepsilon)"
)
UNRENDERED = {  # what GitHub shows as plain text, or removes
    "a role of MyST": r"\{[a-z][\w:-]*\}`",
    "a directive of MyST": r"(?m)^(?::::?|```)\s*\{",
    "an attachment": r"\]\(attachment:",
    "a link to a page of the site": r"\]\((?!https?:)[^)]*\.html",
    "a formula in brackets": r"\\[\[(]",
    "a tag": r"<(?!!--|/?s>)/?[A-Za-z][^<>]*>",
}
OUTPUT_TYPES = {"text/plain", "text/html", "text/markdown", "image/png"}


def find_unrendered(cell):
    """Return what GitHub does not render in a cell and its outputs."""
    if cell.cell_type == "markdown":
        text = re.sub(r"```.*?```|`[^`\n]+`", "", cell.source, flags=re.S)
        formulas = "".join(re.findall(r"\$\$.+?\$\$|\$[^$]+\$", text, re.S))
        commands = set(re.findall(r"\\(?:[A-Za-z]+|\S)", formulas))
        unknown = {command for command in commands if not COMMANDS.fullmatch(command)}
        roles = ("a role of MyST", "a directive of MyST")
        return [
            *(f"the command {command}" for command in sorted(unknown)),
            *(name for name in roles if re.search(UNRENDERED[name], cell.source)),
            *(name for name, pattern in UNRENDERED.items() if re.search(pattern, text)),
            *(["an attachment"] if "attachments" in cell else []),
        ]
    defects = []
    for output in cell.get("outputs", ()):
        data = output.get("data", {})
        defects += sorted(set(data) - OUTPUT_TYPES)
        html = data.get("text/html", "")
        defects += re.findall(r"<(?:details|script|iframe|img|svg|video)\b", html)
        if "<table" in html and "text/plain" not in data:
            defects.append("a table without a text")
    return defects


@pytest.mark.parametrize(
    "path", NOTEBOOKS, ids=lambda p: p.relative_to(NBS).with_suffix("").as_posix()
)
def test_github_renders_a_notebook(path):
    defects = {}
    for i, cell in enumerate(nbformat.read(path, 4).cells):
        if unrendered := find_unrendered(cell):
            defects[i] = unrendered
    assert not defects


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{ref}`a`", "a role of MyST"),
        ("```{note}\nx\n```", "a directive of MyST"),
        ("[a](../b.html#c)", "a link to a page of the site"),
        ("\\(x\\)", "a formula in brackets"),
        ('<span style="color:red">x</span>', "a tag"),
        ("$\\operatorname{f}$", r"the command \operatorname"),
    ],
)
def test_what_github_does_not_render_is_found(source, expected):
    assert expected in find_unrendered(nbformat.v4.new_markdown_cell(source))
