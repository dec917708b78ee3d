"Every notebook runs from top to bottom, in its folder, without a network, in a process of its own, and stays as it is."
# `make prepare` runs them in Jupyter's kernel; here heavy imports are shared.
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NBS = ROOT/'nbs'
NOTEBOOKS = sorted(p for p in NBS.rglob('*.ipynb') if not re.search('/[_.]', f'/{p.relative_to(NBS).as_posix()}'))
SERVER = '''
"Imports the libraries once; then each notebook runs in a child that has seen none of our modules"
import json, os, signal, sys
import accelerate, matplotlib.pyplot, nbformat, pandas, peft, scipy.stats, sklearn.linear_model, torch
import transformers, transformers.trainer_pt_utils
from IPython.core.interactiveshell import InteractiveShell
import notebooks
torch.set_num_threads(1)
assert not any(m.startswith('idp_tutorial') for m in sys.modules)

def run(path): # 1: a cell has failed, and said why
    shell = InteractiveShell.instance(colors='NoColor')
    for cell in nbformat.read(path, 4).cells:
        if cell.cell_type=='code' and not notebooks.skipped(cell) and not shell.run_cell(cell.source).success:
            print(f'--- in this cell:\\n{cell.source}'); return 1
    return 0

for line in iter(sys.stdin.readline, ''):
    path,report = json.loads(line)
    pid = os.fork()
    if not pid:
        torch.set_num_threads(1) # a child makes its pool of threads anew: before two threads of a loader ask at once
        fd = os.open(report, os.O_CREAT|os.O_WRONLY|os.O_TRUNC); os.dup2(fd, 1); os.dup2(fd, 2)
        os.chdir(os.path.dirname(path)); signal.alarm(120)
        code = 70
        try: code = run(path); sys.stdout.flush()
        finally: os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
'''

@pytest.fixture(scope='module')
def run(tmp_path_factory):
    "`run(path)` gives the exit status and what the notebook printed"
    home = tmp_path_factory.mktemp('notebooks')
    (home/'server.py').write_text(SERVER)
    env = {**os.environ, 'OMP_NUM_THREADS': '1', 'MPLBACKEND': 'Agg', 'PYTHONHASHSEED': '0',
        'PYTHONPATH': os.pathsep.join([str(ROOT), str(ROOT/'docs')])}
    with subprocess.Popen([sys.executable, home/'server.py'], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=env, cwd=home) as server:
        def call(path):
            server.stdin.write(json.dumps([str(path), str(home/'report')])+'\n')
            server.stdin.flush()
            return int(server.stdout.readline()),(home/'report').read_text()
        yield call
        server.stdin.close()

@pytest.mark.notebook
@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.relative_to(NBS).with_suffix('').as_posix())
def test_notebook(path, run):
    before = path.read_bytes()
    code,said = run(path)
    if code:
        pytest.fail(f'{path.name} took more than 120 s' if code==-14 else said, pytrace=False)
    assert path.read_bytes()==before

@pytest.mark.notebook
def test_a_cell_that_fails_is_told(run, tmp_path):
    def cell(source):
        id = f'c{len(source)}'
        return dict(cell_type='code', id=id, metadata={}, outputs=[], execution_count=None, source=source)
    cells = [cell('#| slow\n1/0'), cell('x = 1'), cell('assert x==2, "not two"')]
    path = tmp_path/'bad.ipynb'
    path.write_text(json.dumps(dict(cells=cells, metadata={}, nbformat=4, nbformat_minor=5)))
    code,said = run(path)
    assert code==1 and 'AssertionError: not two' in said and 'assert x==2' in said
