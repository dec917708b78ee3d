"What surrounds the library: exported code, clean notebooks, README, packaging, versions."
import ast
import base64
import importlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MACHINE_PATH = re.compile(r'(?<![\w.~$}\])/])/(?:home|root|work|tmp|Users)/[\w.-]+')

spec = importlib.util.spec_from_file_location('notebooks', ROOT/'docs/notebooks.py')
notebooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(notebooks)
cfg = notebooks.settings()

def tracked():
    "Files of the repository, new ones included"
    if not (ROOT/'.git').exists() or not shutil.which('git'):
        pytest.skip('not a git checkout')
    res = subprocess.run(['git', 'ls-files', '--cached', '--others', '--exclude-standard', '-z'], cwd=ROOT,
        capture_output=True, text=True, check=True)
    return [p for p in map(ROOT.joinpath, filter(None, res.stdout.split('\0'))) if p.is_file()]

def modules():
    "The modules of the package, named as in `model.backbone`"
    lib = ROOT/cfg['lib_path']
    return sorted('.'.join(p.relative_to(lib).with_suffix('').parts) for p in lib.rglob('[a-z]*.py'))

def names(requirements):
    "Distribution names in a list of requirements"
    return {re.match(r'[\w.-]+', r)[0].lower().replace('_', '-') for r in requirements}

@pytest.fixture(scope='module')
def found(): return notebooks.check()

@pytest.mark.parametrize('what', ['exports', 'not clean', 'index.ipynb', 'stored error'])
def test_in_step(found, what):
    wrong = [f for f in found if what in f]
    assert not wrong, '\n'.join(wrong)

def test_lint():
    folders = [cfg['lib_path'], 'tests', 'docs', 'setup.py']
    call = [sys.executable, '-m', 'ruff', 'check', '--output-format=concise', *folders]
    res = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert res.returncode==0, res.stdout+res.stderr

def test_no_machine_paths():
    found = []
    for p in tracked():
        try:
            lines = p.read_text(encoding='utf-8').splitlines()
        except UnicodeDecodeError:
            continue
        found += [f'{p.relative_to(ROOT)}:{i}: {m[0]}' for i,text in enumerate(lines, 1)
            for m in MACHINE_PATH.finditer(text)]
    assert not found, '\n'.join(found)

def test_modules_import_outside_the_notebooks():
    "In a fresh interpreter, and every name that they offer is there"
    call = f"""import importlib
for name in {modules()}:
    m = importlib.import_module('{cfg['lib_path']}.'+name)
    assert not (missing := [n for n in m.__all__ if not hasattr(m, n)]), (name, missing)"""
    res = subprocess.run([sys.executable, '-c', call], cwd=ROOT/'tests', capture_output=True, text=True)
    assert res.returncode==0, res.stderr

@pytest.mark.parametrize('script', cfg['console_scripts'].split())
def test_console_script(script):
    command,module,function = re.fullmatch(r'(\w+)=([\w.]+):(\w+)', script).groups()
    assert callable(getattr(importlib.import_module(module), function)), command

def test_package_contains_its_data(tmp_path):
    "What setuptools would put into a wheel is every file of the package in the repository"
    pytest.importorskip('setuptools')
    lib = cfg['lib_path']
    subprocess.run([sys.executable, 'setup.py', '-q', 'egg_info', '--egg-base', str(tmp_path),
        'build', '--build-base', str(tmp_path/'build')], cwd=ROOT, check=True, capture_output=True)
    built = {str(p.relative_to(tmp_path/'build/lib')) for p in (tmp_path/'build/lib'/lib).rglob('*') if p.is_file()}
    wanted = {str(p.relative_to(ROOT)) for p in tracked() if (ROOT/lib) in p.parents}
    assert wanted and wanted<=built, f'missing from the package: {sorted(wanted-built)}'

def test_the_source_distribution_can_be_built_from(tmp_path):
    "`python -m build` makes the wheel from it: what setup.py reads is there"
    pytest.importorskip('setuptools')
    subprocess.run([sys.executable, 'setup.py', '-q', 'egg_info', '--egg-base', str(tmp_path)], cwd=ROOT, check=True,
        capture_output=True)
    there = next(tmp_path.glob('*/SOURCES.txt')).read_text().splitlines()
    assert {'settings.ini','README.md','LICENSE','CHANGELOG.md','CITATION.cff','constraints.txt'}<={*there}
    assert not [f for f in there if f.startswith('tests/')] # a part of them runs nowhere

def test_versions_agree():
    module = ast.parse((ROOT/cfg['lib_path']/'__init__.py').read_text(encoding='utf-8'))
    values = {n.targets[0].id: n.value for n in module.body if isinstance(n, ast.Assign)}
    in_package = ast.literal_eval(values['__version__'])
    in_changelog = re.search(r'^## v?(\d+\.\d+\.\d+)', (ROOT/'CHANGELOG.md').read_text(encoding='utf-8'), re.M)[1]
    assert cfg['version']==in_package==in_changelog

@pytest.mark.parametrize('group', ['requirements', 'dev_requirements', 'docs_requirements', 'experiments_requirements',
    'backbones_requirements', 'serve_requirements', 'completion_requirements'])
def test_every_requirement_is_pinned(group):
    lines = (ROOT/'constraints.txt').read_text(encoding='utf-8').splitlines()
    pinned = names(text for text in lines if text.strip() and not text.startswith('#'))
    assert names(cfg[group].split())<=pinned, f'add to constraints.txt: {sorted(names(cfg[group].split())-pinned)}'

# ---- docs/notebooks.py itself

v4 = notebooks.nbformat.v4

def cell(source):
    return v4.new_code_cell(source)

def notebook(path, *cells):
    "Write a notebook with these cells"
    path.parent.mkdir(parents=True, exist_ok=True)
    notebooks.nbformat.write(v4.new_notebook(cells=list(cells)), path)
    return path

@pytest.mark.parametrize('source,skip', [('#| slow\nx', True), ('#|eval:false\nx', True), ('#| gpu\nx', True),
    ('#| export\nx', False), ('x # | slow', False)])
def test_flagged_cells_are_skipped(source, skip):
    assert notebooks.skipped(cell(source)) is skip

PLACES = ['index', 'course/03_reading', 'course/09_idpg', 'course/10_idpg_in_every_layer',
    'course/solutions/03_reading', 'engine/hall/config', 'engine/model/backbone', 'engine/methods/registry',
    'engine/commands/compare', 'lab/claims']

@pytest.fixture
def shelves(tmp_path, monkeypatch):
    "A folder of empty notebooks, some of which are nobody's business"
    monkeypatch.setattr(notebooks, 'NBS', tmp_path)
    for name in [*PLACES, 'lab/_scratch', '_old/03_gone', 'course/.ipynb_checkpoints/03_reading-checkpoint']:
        notebook(tmp_path/f'{name}.ipynb')

def found_by(*names):
    return [notebooks.place(p) for p in notebooks.notebooks(names)]

def test_notebooks_come_in_reading_order(shelves):
    assert found_by()==PLACES

@pytest.mark.parametrize('name,wanted', [('03', ['course/03_reading', 'course/solutions/03_reading']),
    ('09_i', ['course/09_idpg']), ('idpg', ['course/09_idpg']), ('idpg_in', ['course/10_idpg_in_every_layer']),
    ('engine/model/backbone', ['engine/model/backbone']), ('backbone.ipynb', ['engine/model/backbone']),
    ('methods', ['engine/methods/registry']), ('nbs/course/09_idpg.ipynb', ['course/09_idpg']),
    ('../nbs/lab/', ['lab/claims']), ('course/1', ['course/10_idpg_in_every_layer'])])
def test_a_notebook_has_many_names(shelves, name, wanted):
    assert found_by(name)==wanted

def test_unknown_notebook_lists_the_known_ones(shelves):
    with pytest.raises(SystemExit, match='No notebook starts with nonsense. There are: index, course/03_reading, '):
        found_by('nonsense', '09')

@pytest.fixture(scope='module')
def stale(tmp_path_factory):
    "What `check` says about a small project in which a module's notebook has gone, and another one was edited by hand"
    root = tmp_path_factory.mktemp('project')
    lib = root/cfg['lib_path']
    shutil.copy(ROOT/'settings.ini', root)
    notebook(root/'nbs/engine/model/backbone.ipynb', cell('#| default_exp model.backbone'), cell('#| export\nx = 1'))
    notebook(root/'nbs/engine/hall/config.ipynb', cell('#| default_exp config'), cell('#| export\ny = 1'))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(notebooks, 'ROOT', root)
        patch.setattr(notebooks, 'NBS', root/'nbs')
        (lib/'model').mkdir(parents=True)
        (lib/'__init__.py').write_text('__version__ = "0"\n')
        first = notebooks.check()
        notebooks.nbdev('nbdev_export', cwd=root)
        fresh = notebooks.check()
        made = (lib/'model/backbone.py').read_text()
        (lib/'gone').mkdir()
        (lib/'gone/__init__.py').touch()
        (lib/'gone/old.py').write_text(f'"""A docstring stands first."""\n\n{made}')
        (lib/'by_hand.py').write_text('z = 1\n')
        (lib/'config.py').write_text((lib/'config.py').read_text()+'# by hand\n')
        return first,fresh,notebooks.check()

def test_a_module_that_was_never_exported_is_missed(stale):
    first,fresh,_ = stale
    assert {f.split(' ')[0] for f in first if 'exports' in f}=={f"{cfg['lib_path']}/{n}.py" for n in
        ('__init__', '_modidx', 'config', 'model/__init__', 'model/backbone')}
    assert not [f for f in fresh if 'exports' in f]

@pytest.mark.parametrize('name', ['gone/old.py', 'gone/__init__.py'])
def test_a_stale_module_is_found(stale, name):
    assert f"{cfg['lib_path']}/{name}: no notebook exports it: delete it" in stale[2]

def test_an_edited_module_is_found_and_one_written_by_hand_may_stay(stale):
    assert sum('config.py is not what its notebook exports' in f for f in stale[2])==1
    assert not [f for f in stale[2] if 'by_hand' in f]

def test_readme_hides_directives_and_moves_links(tmp_path):
    text = '# T\n\n[a](course/00_why.ipynb#x) [b](../CHANGELOG.md) [c](https://e.org) [d](#x) `m[0](y)`'
    shown = cell('#| echo: false\nsecret = 1')
    shown.outputs = [v4.new_output('stream', text='seen\n'),
        v4.new_output('display_data', {'text/markdown': '[e](lab/claims.ipynb)'})]
    notebook(tmp_path/'index.ipynb', v4.new_markdown_cell(text), cell('#| hide\nhidden = 1'), shown,
        cell('#| export\nx = names[0](3)'))
    out,images = notebooks.readme(tmp_path/'index.ipynb')
    assert '[a](nbs/course/00_why.ipynb#x) [b](CHANGELOG.md) [c](https://e.org) [d](#x) `m[0](y)`' in out
    assert '[e](nbs/lab/claims.ipynb)' in out
    assert '```text\nseen\n```' in out and '```python\nx = names[0](3)\n```' in out and not images
    assert not re.search('secret|hidden|#[|]', out)

def test_links_of_the_front_page_resolve():
    links = re.findall(r'(?:\]\(|src=")([^)#\s:"]+)[)#"]', (ROOT/'README.md').read_text(encoding='utf-8'))
    assert len(links)>20 and not [link for link in links if not (ROOT/link).exists()]

def test_failing_notebook_is_reported_and_left_alone(tmp_path, monkeypatch, capsys):
    here = cell("import os\nassert os.path.basename(os.getcwd())=='course'")
    bad = notebook(tmp_path/'course/90_bad.ipynb', here, cell('fine = 1'), cell('1/0'))
    before = bad.read_bytes()
    monkeypatch.setattr(notebooks, 'NBS', tmp_path)
    assert notebooks.run([])==1 and bad.read_bytes()==before
    out = capsys.readouterr().out
    assert 'course/90_bad' in out
    assert '1/0' in out and 'ZeroDivisionError' in out and 'fine = 1' not in out

def test_only_the_notebook_that_ran_is_cleaned(tmp_path):
    "`nbdev_clean` without a file cleans all of them"
    shutil.copy(ROOT/'settings.ini', tmp_path)
    (tmp_path/'nbs').mkdir()
    both = [tmp_path/'nbs'/name for name in ('a.ipynb', 'b.ipynb')]
    for p in both:
        c = cell('x = 1')
        c.execution_count = 3
        notebooks.nbformat.write(notebooks.nbformat.v4.new_notebook(cells=[c]), p)
    before = both[1].read_bytes()
    notebooks.nbdev('nbdev_clean', cwd=tmp_path, fname=str(both[0]))
    assert b'"execution_count": 3' not in both[0].read_bytes() and both[1].read_bytes()==before

def test_pictures_are_kept_with_few_colours():
    from PIL import Image
    def png(im):
        out = io.BytesIO()
        im.save(out, 'png')
        return base64.b64encode(out.getvalue()).decode()
    def opened(data):
        return Image.open(io.BytesIO(base64.b64decode(data)))
    ramp = Image.linear_gradient('L').convert('RGB')
    noisy = Image.merge('RGB', [Image.effect_noise((64, 64), s) for s in (30, 60, 90)])
    plot = Image.new('RGB', (200, 100), 'white')
    plot.paste((31,119,180), (20,20,180,60))
    shown = cell('plot')
    shown.outputs = [v4.new_output('display_data', {'image/png': png(im)}) for im in (ramp, noisy, plot)]
    nb = notebooks.lighten(v4.new_notebook(cells=[shown]))
    pictures = [o.data['image/png'] for o in shown.outputs]
    for p,im in zip(pictures[1:], (noisy, plot), strict=True):
        assert len(p)<=len(png(im)) and len(opened(p).getcolors())<=128
    assert opened(pictures[2]).convert('RGB').tobytes()==plot.tobytes() # a plot with few colours loses none
    assert notebooks.lighten(nb).cells[0].outputs[2].data['image/png']==pictures[2]

def test_stored_outputs_are_small():
    def outputs(p):
        return (o for c in notebooks.nbformat.read(p, 4).cells for o in c.get('outputs', ()))
    size = {notebooks.place(p): sum(len(str(o)) for o in outputs(p)) for p in notebooks.notebooks()}
    assert {n: s for n,s in size.items() if s>100_000}=={}

# ---- docs/site_pages.py

REPO = f"{cfg['git_url']}/blob/{cfg['branch']}"

@pytest.fixture
def site(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT/'docs'))
    return importlib.import_module('site_pages')

def test_site_shows_no_directives(site):
    nb = v4.new_notebook(cells=[v4.new_markdown_cell('# T'), cell('#| hide\nhidden = 1'), cell('#| export\nx = 1')])
    assert [c.source for c in site.page(nb, 'nbs/lab/a.ipynb', {}).cells]==['# T', 'x = 1']

def test_the_site_keeps_the_output_of_a_cell_whose_input_is_hidden(site):
    shown = cell('#| echo: false\nsecret = 1')
    shown.outputs = [v4.new_output('stream', text='seen\n'),
        v4.new_output('display_data', {'text/markdown': '[e](lab/claims.ipynb)'})]
    c, = site.page(v4.new_notebook(cells=[shown]), 'nbs/lab/a.ipynb', {}).cells
    assert c.source.strip() and 'secret' not in c.source # myst-nb passes over a cell without a source
    assert c.outputs and 'remove-input' in c.metadata['tags']

def test_a_plot_has_an_alternative_text_on_the_site(site):
    drawn,bare = cell("ax.set(title='Lines $n$', ylabel='loss')"),cell('draw()')
    for c in (drawn, bare):
        c.outputs = [v4.new_output('display_data', data={'image/png': ''})]
    head = v4.new_markdown_cell('# T\n\n## [By](a.md) hand')
    _,*made = site.page(v4.new_notebook(cells=[head, drawn, bare]), 'nbs/a.ipynb', {}).cells
    assert [c.metadata['mystnb']['image']['alt'] for c in made]==['Plot. Lines n; upwards: loss', 'Plot. By hand']

@pytest.mark.parametrize('file,target,wanted', [
    ('nbs/index.ipynb', 'course/00_why.ipynb#now', 'course/00_why.ipynb#now'),
    ('nbs/engine/model/backbone.ipynb', '../../course/00_why.ipynb', '../../course/00_why.ipynb'),
    ('nbs/engine/model/backbone.ipynb', '../../../settings.ini', f'{REPO}/settings.ini'),
    ('nbs/engine/model/backbone.ipynb', '../../../CHANGELOG.md', '../../changelog.md'),
    ('nbs/lab/claims.ipynb', '../../README.md', '../index.ipynb'),
    ('nbs/lab/claims.ipynb', '../../docs/images/house.svg', '../images/house.svg'),
    ('nbs/lab/claims.ipynb', 'https://e.org/a', 'https://e.org/a'), ('nbs/lab/claims.ipynb', '#a', '#a'),
    ('CONTRIBUTING.md', 'nbs/course/00_why.ipynb', 'course/00_why.ipynb'),
    ('CONTRIBUTING.md', 'configs/', f'{REPO}/configs')])
def test_links_lead_to_a_page_or_to_the_repository(site, file, target, wanted):
    assert site.link(target, file)==wanted

def test_names_lead_to_their_entry_and_code_stays(site):
    text = '`Backbone` [late prompt tuning](../course/11_lpt.ipynb) `other`\n```\n`Backbone` [x](../a.ipynb)\n```'
    out = site.prose(text, 'nbs/lab/a.ipynb', {'Backbone': 'idp_tutorial.model.backbone.Backbone'})
    assert out==text.replace('`Backbone`', '{py:obj}`Backbone <idp_tutorial.model.backbone.Backbone>`', 1)

class Node(list):
    "As much of a page of Sphinx as is needed to change its formulas"
    def __init__(self, tagname, *children):
        super().__init__(children)
        self.tagname = tagname
    def findall(self, condition):
        return filter(condition, self)
    def get(self, name):
        return None
    def astext(self):
        return ''.join(self)

def test_a_formula_holds_no_tags(site):
    doc = Node('document', Node('math_block', r'h_{\texttt{<s>}} & 1>0'), Node('paragraph', '<s>'))
    site.formulas(None, doc, 'page')
    assert [n.astext() for n in doc]==[r'h_{\texttt{&lt;s&gt;}} &amp; 1&gt;0', '<s>']

@pytest.mark.parametrize('markdown,rst', [('`a` b', '``a``\\  b'), ('$x_1$s', ':math:`x_1`\\ s'),
    ('*args, a_', '\\*args, a\\_'), ('plain', 'plain')])
def test_docstrings_are_markdown(site, markdown, rst):
    assert site.rst(markdown)==rst

def test_every_module_has_a_page(site):
    pages = site.made_pages()
    assert sorted(site.modules())==modules()
    assert {f'api/{m}.md' for m in modules()}<=set(pages)

def test_every_page_stands_in_the_sidebar(site):
    "A page without a place in a contents list cannot be found by a reader"
    pages = {'index.md': site.contents(), **site.made_pages()}
    listed = set()
    for page,text in pages.items():
        for entries in re.findall(r'```{toctree}\n(.*?)```', text, re.S):
            for entry in filter(None, re.sub(r'^:.*\n', '', entries, flags=re.M).splitlines()):
                target = re.sub(r'.*<(.+)>$', r'\1', entry)
                listed.add(os.path.normpath(os.path.join(os.path.dirname(page), target)))
    wanted = {notebooks.place(p) for p in notebooks.notebooks()} | {p.removesuffix('.md') for p in pages}
    assert sorted(wanted-listed)==['index']


def test_the_road_leads_to_every_notebook():
    "README to the course and the lab; the list that is made of the engine, to the rest"
    road = (ROOT/'nbs/index.ipynb').read_text(encoding='utf-8')
    hood = (ROOT/'nbs/engine/README.md').read_text(encoding='utf-8')
    assert '](engine/README.md)' in road
    for p in notebooks.notebooks():
        here = p.relative_to(ROOT/'nbs').as_posix()
        if here.startswith(('course/', 'lab/')) and '/solutions/' not in here:
            assert f']({here})' in road, f'link {here} from nbs/index.ipynb, in the table of the road'
        elif here.startswith('engine/'):
            assert f"]({here.removeprefix('engine/')})" in hood, 'run `python docs/notebooks.py readme`'


@pytest.mark.parametrize('path', notebooks.notebooks(), ids=lambda p: p.stem)
def test_links_between_notebooks_resolve(path):
    prose = [c.source for c in notebooks.nbformat.read(path, 4).cells if c.cell_type=='markdown']
    links = re.findall(r'\]\(([^)#\s:]+\.(?:ipynb|md|svg))(?:#[^)]*)?\)', '\n'.join(prose))
    missing = [link for link in links if not (path.parent/link).exists()]
    assert not missing, f'{path.name} links to what is not there: {missing}'
