"Every notebook runs from top to bottom in a fresh kernel, without a network, and stays as it is."
import os, subprocess, sys
from pathlib import Path
import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted(p for p in (ROOT/'nbs').glob('*.ipynb') if not p.name.startswith(('_', '.')))

@pytest.mark.notebook
@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook(path):
    before = path.read_bytes()
    call = [sys.executable, str(ROOT/'docs/notebooks.py'), 'run', '--no-write', path.stem]
    try: res = subprocess.run(call, cwd=path.parent, capture_output=True, text=True, timeout=120, env={**os.environ, 'HF_HUB_OFFLINE': '1'})
    except subprocess.TimeoutExpired: pytest.fail(f'{path.name} took more than 120 s', pytrace=False)
    if res.returncode: pytest.fail(f'{res.stdout}\n{res.stderr}', pytrace=False) # the failing cell and its error
    assert path.read_bytes()==before
