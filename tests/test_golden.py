"Numbers that moving code must not change (golden/make.py writes golden/*.json), and a model that version 0.1.0 saved."
import json
import re
from functools import cache

import pytest
import torch
from golden import make

stored = cache(make.stored)
NUMBER = re.compile(r'-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?')

def differences(new, old, exact, at=''):
    "Where two values differ; on the machine of the old one by the last digits, elsewhere by rounding"
    if isinstance(old, dict) and isinstance(new, dict):
        if [*new]!=[*old]:
            yield f'{at}: keys {[*new]}, not {[*old]}'
            return # their order as well
        for k in old:
            if exact or k!='bits': yield from differences(new[k], old[k], exact, f'{at}/{k}')
    elif isinstance(old, list) and isinstance(new, list):
        if len(new)!=len(old):
            more,less = [[o for o in a if o not in b][:5] for a,b in ((new, old), (old, new))]
            yield f'{at}: {len(new)} entries, not {len(old)}; new {more}, gone {less}'
            return
        for i,(n,o) in enumerate(zip(new, old)): yield from differences(n, o, exact, f'{at}[{i}]')
    elif exact and isinstance(old, float) and isinstance(new, float): # two kinds of one processor: numpy's own sums
        if new!=pytest.approx(old, rel=1e-12, abs=0, nan_ok=True): yield f'{at}: {new!r}, not {old!r}'
    elif not exact and isinstance(old, float) and isinstance(new, (int,float)):
        near = 1e-2 if '/bf16' in at else 5e-4 if '/logits' in at or '/losses' in at else 1e-5 # AdamW steps by rounding
        if new!=pytest.approx(old, rel=1e-3 if '/choice' in at else 1e-4, abs=near): yield f'{at}: {new!r}, not {old!r}'
    elif not exact and isinstance(old, str) and isinstance(new, str) and '/help' not in at and '/error' not in at:
        a,b = [[float(v.replace(',', '')) for v in NUMBER.findall(s)] for s in (new, old)]
        if NUMBER.sub('#', new)!=NUMBER.sub('#', old) or a!=pytest.approx(b, rel=1e-3, abs=.06): # they are rounded
            yield f'{at}: {new!r}, not {old!r}'
    elif type(new) is not type(old) or new!=old: yield f'{at}: {new!r}, not {old!r}'

def check(new, old, machine, at=''):
    wrong = [*differences(new, old, machine==make.machine(), at)]
    assert not wrong, '\n'.join([f'{len(wrong)} differences', *wrong[:12]])

@pytest.mark.parametrize('file,name', [(f, n) for f,(_,names) in make.FILES.items() for n in names], ids=lambda v: v)
def test_as_stored(file, name):
    machine,old = stored(file)
    check(make.value(file, name), old[name], machine, f'{file}/{name}')

@pytest.mark.parametrize('file', make.FILES)
def test_nothing_is_left_out(file): assert [*stored(file)[1]]==[*make.FILES[file][1]]

def test_differences_are_found():
    a = dict(x=[1.,2], s='score 21.7', bits='ab')
    b = dict(x=[1.+1e-7,2], s='score 21.74', bits='cd')
    assert [*differences(a, a, True)]==[*differences(b, a, False)]==[] and len([*differences(b, a, True)])==3
    assert [*differences(dict(x=1.+1e-15), dict(x=1.), True)]==[]!=[*differences(dict(x=1.+1e-11), dict(x=1.), True)]
    for kw in (dict(x=[1.001,2]), dict(x=[1.,3]), dict(x=[1.]), dict(s='score 22.7'), dict(s='scores 21.7'),
        dict(new=1)):
        other = {**a, **kw}
        assert len([*differences(other, a, False)])==1

def test_a_model_that_0_1_0_saved():
    "Its prompts are found by name, and answer as they did"
    old = json.loads((make.SAVED/'answers.json').read_text(encoding='utf-8'))
    machine = old.pop('machine')
    check(json.loads(json.dumps(make.said_by(make.SAVED))), old, machine)
    assert len({a['label'] for a in old['answers']})>2 and not torch.is_inference_mode_enabled()
