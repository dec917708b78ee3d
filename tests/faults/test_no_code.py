"Reading runs no code: what could do that does not stand in the package."
import ast
import re
from pathlib import Path

import pytest

LIB = Path(__file__).resolve().parents[2]/'idp_tutorial'
NEVER = {'eval', 'exec', 'pickle', 'cPickle', 'dill', 'joblib', 'shelve', 'marshal', 'torch.load', 'torch.save'}
LOADS = re.compile(r'Auto\w+\.from_pretrained') # it could bring code; data sets cannot, from datasets 4 on


def named(node):
    "`torch.load` of a call or an import"
    if isinstance(node, ast.Attribute):
        return f'{named(node.value)}.{node.attr}'
    return getattr(node, 'id', '')


@pytest.mark.parametrize('path', sorted(LIB.rglob('*.py')), ids=lambda p: p.stem)
def test_nothing_unpickles_or_evaluates(path):
    found = []
    for n in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(n, ast.Call) and named(n.func) in NEVER:
            found.append(named(n.func))
        if isinstance(n, (ast.Import, ast.ImportFrom)):
            found += [a.name for a in n.names if a.name.split('.')[0] in NEVER]
        asked = isinstance(n, ast.keyword) and n.arg in ('trust_remote_code','allow_pickle')
        if asked and ast.unparse(n.value)!='False':
            found.append(f'{n.arg}={ast.unparse(n.value)}')
        if isinstance(n, ast.Call) and LOADS.fullmatch(named(n.func)):
            safe = any(k.arg=='trust_remote_code' for k in n.keywords)
            found += [] if safe else [f'{named(n.func)} without trust_remote_code=False']
    assert not found
