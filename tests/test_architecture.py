"The house: rooms in one order, imports in one direction, lines and modules that fit on a page."
import ast
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIB = ROOT/'idp_tutorial'
# a room imports only from rooms before it; `data` and `model` stand side by side with no arrow between them
ORDER = [['hall'], ['data', 'model'], ['training'], ['pretraining'], ['methods'], ['experiments', 'efficiency'],
    ['analysis'], ['commands']]
FLOOR = {room: i for i,rooms in enumerate(ORDER) for room in rooms}
HEAVY = {'transformers', 'datasets', 'peft', 'accelerate', 'sklearn', 'scipy', 'pandas', 'matplotlib', 'gguf'}
MODULES = sorted(p for p in LIB.rglob('*.py') if p.name not in ('__init__.py', '_modidx.py'))


def name(path):
    "`model.plan` of `idp_tutorial/model/plan.py`"
    return '.'.join(path.relative_to(LIB).with_suffix('').parts)


def room(module):
    "The folder of a module; the three files at the top are the hall"
    return module.split('.')[0] if '.' in module else 'hall'


def imports(path):
    "Of one file: (imported module of the package, or outside package; inside a function?; line)"
    tree = ast.parse(path.read_text(encoding='utf-8'))
    inner = {id(n) for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.Lambda)) for n in ast.walk(f)}
    here = name(path).split('.')
    for n in ast.walk(tree):
        if isinstance(n, ast.Import):
            for a in n.names:
                yield a.name, id(n) in inner, n.lineno
        elif isinstance(n, ast.ImportFrom):
            base = here[:len(here)-n.level] if n.level else []
            full = '.'.join([*base, *(n.module or '').split('.')]).strip('.')
            if n.level and not (LIB/(full.replace('.', '/')+'.py')).exists():
                for a in n.names: # `from ..room import module`
                    yield f'idp_tutorial.{full}.{a.name}', id(n) in inner, n.lineno
            else:
                yield (f'idp_tutorial.{full}' if n.level else full), id(n) in inner, n.lineno


def own(path):
    "Modules of the package that a module imports"
    found = {i.removeprefix('idp_tutorial.') for i,_,_ in imports(path) if i.startswith('idp_tutorial.')}
    return found & {name(p) for p in MODULES}


def test_every_room_has_its_place():
    assert {room(name(p)) for p in MODULES}==set(FLOOR)


@pytest.mark.parametrize('path', MODULES, ids=name)
def test_imports_follow_the_order_of_the_rooms(path):
    here = room(name(path))
    against = [i for i in own(path) if room(i)!=here and FLOOR[room(i)]>=FLOOR[here]]
    rule = f'a room imports only from rooms before it, {ORDER}'
    assert not against, f'{name(path)} (room {here}) imports {against}: {rule}'


def test_no_circle():
    edges,done,path = {name(p): own(p) for p in MODULES},set(),[]
    def visit(m):
        if m in path:
            pytest.fail('a circle: '+' → '.join([*path[path.index(m):], m]))
        if m in done:
            return
        path.append(m)
        for i in sorted(edges[m]):
            visit(i)
        path.pop()
        done.add(m)
    for m in edges:
        visit(m)
    assert done==set(edges)


@pytest.mark.parametrize('path', MODULES, ids=name)
def test_imports_stand_at_the_top(path):
    if room(name(path))=='commands':
        pytest.skip('the roof imports late: --help answers at once (tests/commands/test_command_line.py)')
    late = [f'line {line}: {i}' for i,inside,line in imports(path) if inside and i.split('.')[0] not in HEAVY]
    assert not late, f'{name(path)} imports inside a function what is not heavy and optional: {late}'


@pytest.mark.parametrize('path', MODULES, ids=name)
def test_a_module_fits(path):
    text = path.read_text(encoding='utf-8')
    lines = text.splitlines()
    assert len(lines)<=200, f'{name(path)} has {len(lines)} lines: 200 at most'
    long = {n.name: n.end_lineno-n.lineno+1 for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)}
    over = {k: v for k,v in long.items() if v>40}
    assert not over, f'{name(path)}: functions of more than 40 lines: {over}'
    made = {i for n in ast.parse(text).body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0])=='__all__'
        for i in range(n.lineno, n.end_lineno+1)} # by nbdev
    wide = [i for i,l in enumerate(lines, 1) if len(l)>120 and i not in made]
    assert not wide, f'{name(path)}: lines {wide} are longer than 120 columns'


@pytest.mark.parametrize('path', MODULES, ids=name)
def test_a_raise_has_its_own_line(path):
    inline = [i for i,l in enumerate(path.read_text(encoding='utf-8').splitlines(), 1)
        if re.match(r'\s*(if|elif|else|for|while|try|except|with)\b.*:\s*raise\b', l)]
    assert not inline, f'{name(path)}: lines {inline} raise behind a colon'


@pytest.mark.parametrize('path', MODULES, ids=name)
def test_no_comprehension_for_its_effect(path):
    kinds = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    found = [n.lineno for n in ast.walk(ast.parse(path.read_text(encoding='utf-8')))
        if isinstance(n, ast.Expr) and isinstance(n.value, kinds)]
    assert not found, f'{name(path)}: lines {found} build a list that nobody reads'


@pytest.mark.parametrize('path', sorted((ROOT/'nbs').rglob('*.ipynb')), ids=lambda p: p.stem)
def test_the_code_of_a_notebook_fits(path):
    "120 columns; 100 in the course, which is read on paper and aloud"
    limit = 100 if 'course' in path.relative_to(ROOT).parts else 120
    cells = [c for c in json.loads(path.read_text(encoding='utf-8'))['cells'] if c['cell_type']=='code']
    wide = [l for c in cells for l in ''.join(c['source']).split('\n') if len(l)>limit]
    assert not wide, f'{path.name}: lines of more than {limit} columns: {wide}'


def test_names_of_test_files_differ():
    "pytest imports them by their names alone"
    names = [p.name for p in (ROOT/'tests').rglob('test_*.py')]
    twice = sorted({n for n in names if names.count(n)>1})
    assert not twice, f'two test files are called {twice}: rename one of them'
