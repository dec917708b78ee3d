"What surrounds the library: exported code, clean notebooks, README, packaging, versions."
import ast, base64, importlib, importlib.util, io, re, shutil, subprocess, sys
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
    if not (ROOT/'.git').exists() or not shutil.which('git'): pytest.skip('not a git checkout')
    res = subprocess.run(['git', 'ls-files', '--cached', '--others', '--exclude-standard', '-z'], cwd=ROOT,
        capture_output=True, text=True, check=True)
    return [p for p in map(ROOT.joinpath, filter(None, res.stdout.split('\0'))) if p.is_file()]

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
    res = subprocess.run([sys.executable, '-m', 'ruff', 'check', '--output-format=concise', 'idp_tutorial', 'tests',
        'docs', 'setup.py'], cwd=ROOT, capture_output=True, text=True)
    assert res.returncode==0, res.stdout+res.stderr

def test_no_machine_paths():
    found = []
    for p in tracked():
        try: text = p.read_text(encoding='utf-8')
        except UnicodeDecodeError: continue
        found += [f'{p.relative_to(ROOT)}:{i}: {m[0]}' for i,
            l in enumerate(text.splitlines(), 1) for m in MACHINE_PATH.finditer(l)]
    assert not found, '\n'.join(found)

def test_modules_import_outside_the_notebooks():
    "In a fresh interpreter, and every name that they offer is there"
    modules = sorted(p.stem for p in (ROOT/cfg['lib_path']).glob('[a-z]*.py'))
    call = f"""import importlib
for name in {modules}:
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
    subprocess.run([sys.executable, 'setup.py', '-q', 'egg_info', '--egg-base', str(tmp_path), 'build', '--build-base',
        str(tmp_path/'build')],
        cwd=ROOT, check=True, capture_output=True)
    built = {str(p.relative_to(tmp_path/'build/lib')) for p in (tmp_path/'build/lib'/lib).rglob('*') if p.is_file()}
    wanted = {str(p.relative_to(ROOT)) for p in tracked() if (ROOT/lib) in p.parents}
    assert wanted and wanted<=built, f'missing from the package: {sorted(wanted-built)}'

def test_versions_agree():
    module = ast.parse((ROOT/cfg['lib_path']/'__init__.py').read_text(encoding='utf-8'))
    in_package = next(ast.literal_eval(n.value) for n in module.body if isinstance(n, ast.Assign)
        and n.targets[0].id=='__version__')
    in_changelog = re.search(r'^## v?(\d+\.\d+\.\d+)', (ROOT/'CHANGELOG.md').read_text(encoding='utf-8'), re.M)[1]
    assert cfg['version']==in_package==in_changelog

@pytest.mark.parametrize('group', ['requirements', 'dev_requirements', 'docs_requirements'])
def test_every_requirement_is_pinned(group):
    lines = (ROOT/'constraints.txt').read_text(encoding='utf-8').splitlines()
    pinned = names(l for l in lines if l.strip() and not l.startswith('#'))
    assert names(cfg[group].split())<=pinned, f'add to constraints.txt: {sorted(names(cfg[group].split())-pinned)}'

# ---- docs/notebooks.py itself

def cell(source): return notebooks.nbformat.v4.new_code_cell(source)

@pytest.mark.parametrize('source,skip', [('#| slow\nx', True), ('#|eval:false\nx', True), ('#| gpu\nx', True),
    ('#| export\nx', False), ('x # | slow', False)])
def test_flagged_cells_are_skipped(source, skip): assert notebooks.skipped(cell(source)) is skip

def test_unknown_notebook_lists_the_known_ones():
    with pytest.raises(SystemExit, match='No notebook starts with nonsense. There are: '):
        notebooks.notebooks(['nonsense'])

def test_readme_hides_directives_and_moves_links(tmp_path):
    text = '# T\n\n[a](00_tasks.ipynb#x) [b](../CHANGELOG.md) [c](https://e.org) [d](#x) `m[0](y)`'
    v4 = notebooks.nbformat.v4
    shown = cell('#| echo: false\nsecret = 1')
    shown.outputs = [v4.new_output('stream', text='seen\n')]
    nb = v4.new_notebook(cells=[v4.new_markdown_cell(text), cell('#| hide\nhidden = 1'), shown,
        cell('#| export\nx = names[0](3)')])
    notebooks.nbformat.write(nb, tmp_path/'index.ipynb')
    out,images = notebooks.readme(tmp_path/'index.ipynb')
    assert '[a](nbs/00_tasks.ipynb#x) [b](CHANGELOG.md) [c](https://e.org) [d](#x) `m[0](y)`' in out
    assert '```text\nseen\n```' in out and '```python\nx = names[0](3)\n```' in out and not images
    assert not re.search('secret|hidden|#[|]', out)

def test_failing_notebook_is_reported_and_left_alone(tmp_path, monkeypatch, capsys):
    bad = tmp_path/'90_bad.ipynb'
    notebooks.nbformat.write(notebooks.nbformat.v4.new_notebook(cells=[cell('fine = 1'), cell('1/0')]), bad)
    before = bad.read_bytes()
    monkeypatch.setattr(notebooks, 'NBS', tmp_path)
    assert notebooks.run([])==1 and bad.read_bytes()==before
    out = capsys.readouterr().out
    assert '1/0' in out and 'ZeroDivisionError' in out and 'fine = 1' not in out

def test_pictures_are_kept_with_few_colours():
    from PIL import Image
    def png(im):
        out = io.BytesIO()
        im.save(out, 'png')
        return base64.b64encode(out.getvalue()).decode()
    def opened(data): return Image.open(io.BytesIO(base64.b64decode(data)))
    ramp = Image.linear_gradient('L').convert('RGB')
    noisy = Image.merge('RGB', [Image.effect_noise((64, 64), s) for s in (30, 60, 90)])
    plot = Image.new('RGB', (200, 100), 'white')
    plot.paste((31,119,180), (20,20,180,60))
    shown = cell('plot')
    shown.outputs = [notebooks.nbformat.v4.new_output('display_data', {'image/png':png(im)})
        for im in (ramp, noisy, plot)]
    nb = notebooks.lighten(notebooks.nbformat.v4.new_notebook(cells=[shown]))
    pictures = [o.data['image/png'] for o in shown.outputs]
    assert all(len(p)<=len(png(im)) and len(opened(p).getcolors())<=128 for p,im in zip(pictures[1:], (noisy, plot)))
    assert opened(pictures[2]).convert('RGB').tobytes()==plot.tobytes() # a plot with few colours loses none
    assert notebooks.lighten(nb).cells[0].outputs[2].data['image/png']==pictures[2]

def test_stored_outputs_are_small():
    size = {p.name: sum(len(str(o)) for c in notebooks.nbformat.read(p, 4).cells for o in c.get('outputs', ()))
        for p in notebooks.notebooks()}
    assert {n: s for n,s in size.items() if s>100_000}=={}

# ---- docs/site_pages.py

@pytest.fixture
def site(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT/'docs'))
    return importlib.import_module('site_pages')

def test_site_shows_no_directives(site):
    v4 = notebooks.nbformat.v4
    nb = v4.new_notebook(cells=[v4.new_markdown_cell('# T\n\nsee [it](../settings.ini)'), cell('#| hide\nhidden = 1'),
        cell('#| export\nx = 1')])
    cells = site.read(notebooks.nbformat.writes(nb)).cells
    assert [c.source for c in cells]==[f"# T\n\nsee [it]({cfg['git_url']}/blob/{cfg['branch']}/settings.ini)", 'x = 1']

def test_the_site_keeps_the_output_of_a_cell_whose_input_is_hidden(site):
    shown = cell('#| echo: false\nsecret = 1')
    shown.outputs = [notebooks.nbformat.v4.new_output('stream', text='seen\n')]
    c, = site.read(notebooks.nbformat.writes(notebooks.nbformat.v4.new_notebook(cells=[shown]))).cells
    # myst-nb passes over a cell without a source
    assert c.source.strip() and 'secret' not in c.source and c.outputs and 'remove-input' in c.metadata['tags']

@pytest.mark.parametrize('markdown,rst', [('`a` b', '``a``\\  b'), ('$x_1$s', ':math:`x_1`\\ s'),
    ('*args, a_', '\\*args, a\\_'), ('plain', 'plain')])
def test_docstrings_are_markdown(site, markdown, rst): assert site.rst(markdown)==rst

def test_every_module_has_a_page(site):
    assert set(site.modules())=={p.stem for p in (ROOT/cfg['lib_path']).glob('[a-z]*.py')}
