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

import pytest

ROOT = Path(__file__).resolve().parents[1]
NBS = ROOT / "nbs"
NOTEBOOKS = sorted(
    p for p in NBS.rglob("*.ipynb") if not re.search("/[_.]", f"/{p.relative_to(NBS).as_posix()}")
)
SERVER = """
"Import the large libraries once, and run each notebook in a child process of its own."
import json, os, signal, sys
import accelerate, matplotlib.pyplot, nbformat, pandas, peft, scipy.stats, sklearn.linear_model
import torch
import transformers, transformers.trainer_pt_utils
from IPython.core.interactiveshell import InteractiveShell
import notebooks
torch.set_num_threads(1)
assert not any(m.startswith('idp_tutorial') for m in sys.modules)

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
        signal.alarm(120)
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


@pytest.mark.notebook
@pytest.mark.parametrize(
    "path", NOTEBOOKS, ids=lambda p: p.relative_to(NBS).with_suffix("").as_posix()
)
def test_a_notebook_runs_and_is_unchanged(path, run):
    before = path.read_bytes()
    status, output = run(path)
    if status:
        timed_out = status == -signal.SIGALRM
        pytest.fail(f"{path.name} took more than 120 s" if timed_out else output, pytrace=False)
    assert path.read_bytes() == before


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
