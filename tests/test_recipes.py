"The recipes of CONTRIBUTING run as they stand."
import re
from pathlib import Path

from idp_tutorial.methods.registry import METHODS
from idp_tutorial.model.family import FAMILIES

TEXT = (Path(__file__).resolve().parents[1]/'CONTRIBUTING.md').read_text(encoding='utf-8')
RECIPES = dict(re.findall(r'<!-- recipe: (\w+)\b[^>]*-->\n```python\n(.*?)```', TEXT, re.S))


def followed(name):
    "What a recipe defines; the registry forgets it again"
    before,names = dict(METHODS),{'__name__':f'recipe_{name}'}
    try:
        exec(compile(RECIPES[name], f'CONTRIBUTING.md: {name}', 'exec'), names)
        return names,{m: row for m,row in METHODS.items() if m not in before}
    finally:
        for m in METHODS.keys()-before.keys():
            del METHODS[m]


def test_both_are_there():
    assert RECIPES.keys()=={'method', 'family'}


def test_add_a_method(capsys):
    names,added = followed('method')
    assert [*added]==['gated-mean'] and added['gated-mean'].starts_late
    assert names['record']['params']['prompt']==2*10*192 and names['record']['score']>55
    assert 'gated-mean' not in METHODS


def test_add_a_family():
    "It equals Hugging Face's own forward, which the recipe asserts itself"
    assert 'ernie' not in FAMILIES
    try:
        names,_ = followed('family')
        assert type(names['bb']) is names['ErnieBackbone'] and FAMILIES['ernie'].cls is names['ErnieBackbone']
    finally:
        FAMILIES.pop('ernie', None)
