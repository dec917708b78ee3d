"Run, check and publish the notebooks: `python docs/notebooks.py run|check|readme` (see CONTRIBUTING.md)."
import argparse
import base64
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from configparser import ConfigParser
from pathlib import Path, PurePosixPath

import nbformat
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
NBS,IMAGES = ROOT/'nbs',ROOT/'docs/images'
DIRECTIVE = re.compile(r'^\s*#\s*\|.*\n?', re.M)
ROOMS = { # of the package and of `nbs/engine`, in the order in which they may import; what each of them holds
    'hall': 'What every room may use.',
    'data': 'From text to examples.',
    'model': 'A frozen model that can be opened.',
    'training': 'One loop that trains, measures and resumes.',
    'pretraining': 'How the bundled models were made.',
    'methods': 'One module a method, named as in its paper.',
    'experiments': 'A question with several runs.',
    'efficiency': 'What a method costs.',
    'analysis': 'Looking inside.',
    'commands': 'What can be called from a shell.',
}
SHELVES = ['.', 'course', 'course/solutions', *(f'engine/{room}' for room in ROOMS), 'lab'] # folders in reading order

def directives(cell):
    "The `#|` lines of a code cell as `{'slow', 'eval: false', ...}`"
    if cell.cell_type!='code':
        return set()
    found = re.findall(r'^\s*#\s*\|\s*(.+?)\s*$', cell.source, re.M)
    return {re.sub(r'\s*:\s*', ': ', d) for d in found}

def settings():
    "`settings.ini`, the one description of the project"
    ini = ConfigParser(delimiters=['='], interpolation=None)
    ini.read(ROOT/'settings.ini', encoding='utf-8')
    return ini['DEFAULT']

def place(path):
    "Where a notebook is, as one names it: `course/03_reading` for `nbs/course/03_reading.ipynb`"
    return path.relative_to(NBS).with_suffix('').as_posix()

def shelf(path):
    "The folder of a notebook below `nbs/`, `.` for the index"
    return path.relative_to(NBS).parent.as_posix()

def reading_order(path):
    "A key to sort notebooks by: index, course, engine by rooms, lab"
    where = SHELVES.index(shelf(path)) if shelf(path) in SHELVES else len(SHELVES)
    return where, path.stem!='index', place(path)

def bare(path):
    "The name of a notebook without its number"
    return re.sub(r'^\d+[a-z]?_', '', path.stem)

def meant(name, known):
    "The notebooks that `name` means: `03`, `05_prompt`, `idpg`, `engine/model/backbone`, `methods`, a path"
    name = re.sub(r'^(.*/)?nbs/', '', name.removesuffix('.ipynb')).strip('/')
    exact = [p for p in known if f'/{name}/' in f'/{place(p)}/' or bare(p)==name]
    return exact or [p for p in known if any(s.startswith(name) for s in (place(p), p.stem, bare(p)))]

def ours(path):
    "Whether a notebook belongs to the project: no part of its path starts with `_` or `.`"
    return not any(part.startswith(('_', '.')) for part in path.relative_to(NBS).parts)

def notebooks(names=()):
    "Committed notebooks in reading order, or those that `names` mean"
    known = sorted(filter(ours, NBS.rglob('*.ipynb')), key=reading_order)
    found = {n: meant(n, known) for n in names}
    if missing := [n for n in names if not found[n]]:
        raise SystemExit(f"No notebook starts with {', '.join(missing)}. There are: {', '.join(map(place, known))}")
    return [p for p in known if not names or any(p in ps for ps in found.values())]

# ---- run

def skipped(cell):
    "Cells that never run by themselves: `#| eval: false` and the test flags of settings.ini (slow, gpu, ...)"
    return bool(directives(cell) & {'eval: false', *settings()['tst_flags'].split()})

def lighten(nb):
    "Store the pictures of a notebook with 128 colours: a plot looks the same in a third of the bytes"
    for data in (o.get('data', {}) for c in nb.cells for o in c.get('outputs', ())):
        if 'image/png' not in data:
            continue
        png,small = base64.b64decode(data['image/png']),io.BytesIO()
        if (im := Image.open(io.BytesIO(png))).mode=='P': # it is one already
            continue
        im.convert('RGB').quantize(128, dither=Image.Dither.NONE).save(small, 'png', optimize=True)
        if len(small.getvalue())<len(png):
            data['image/png'] = base64.b64encode(small.getvalue()).decode()
    return nb

def execute(path):
    "Run one notebook in a fresh kernel and its own folder; return it with new outputs (skipped cells keep theirs)"
    from nbclient import NotebookClient
    nb = nbformat.read(path, 4)
    cells = [c for c in nb.cells if not skipped(c)] # the same objects: outputs land in `nb`
    todo = nbformat.v4.new_notebook(cells=cells, metadata=nb.metadata)
    NotebookClient(todo, timeout=300, kernel_name='python3', extra_arguments=['--log-level=ERROR'],
        resources={'metadata': {'path': str(path.parent)}}).execute()
    nb.metadata = {'kernelspec': {'name': 'python3', 'display_name': 'python3', 'language': 'python'}}
    return lighten(nb)

def run(names, write=True):
    "Run notebooks; with `write`, store their outputs and clean them. Returns the number of failures"
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
    os.environ.update(TOKENIZERS_PARALLELISM='false', PYTHONHASHSEED='0',
        MPLBACKEND='module://matplotlib_inline.backend_inline')
    os.environ.setdefault('HF_HUB_OFFLINE', '1')
    failed = 0
    for path in notebooks(names):
        start,before = time.perf_counter(),path.read_bytes()
        try:
            nb = execute(path)
            if write:
                nbformat.write(nb, path)
                nbdev('nbdev_clean', fname=str(path))
            note = '' if not write else 'unchanged' if path.read_bytes()==before else 'new outputs'
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as e:
            plain = re.sub(r'\x1b\[[\d;]*m', '', str(e)) # no colours: this ends in log files
            failed,note = failed+1,f'FAILED (file left as it was)\n{plain}'
        print(f'{place(path):42} {time.perf_counter()-start:6.1f} s  {note}', flush=True)
    return failed

# ---- check

def nbdev(command, cwd=ROOT, **options):
    "Run an nbdev command of this environment, and stop with its output if it fails"
    module = 'clean' if 'clean' in command else 'doclinks'
    call = f'from nbdev.{module} import {command}; {command}(**{options})'
    res = subprocess.run([sys.executable, '-c', call], cwd=cwd, capture_output=True, text=True,
        env={**os.environ, 'PYTHONPATH': ''})
    if res.returncode:
        raise SystemExit(f'{command} failed:\n{res.stdout}{res.stderr}')

def generated(py):
    "Whether a module says at its top that it was made from a notebook (its docstring stands before that line)"
    return re.search(r'^# AUTOGENERATED', py.read_text(encoding='utf-8')[:2000], re.M) is not None

def exported(folder):
    "Export and clean a copy of the project in `folder`; no module survives there whose notebook is gone"
    lib = settings()['lib_path']
    shutil.copy(ROOT/'settings.ini', folder)
    shutil.copytree(NBS, folder/'nbs', ignore=shutil.ignore_patterns('.*', '_*'))
    shutil.copytree(ROOT/lib, folder/lib, ignore=shutil.ignore_patterns('__pycache__', 'assets'))
    for py in list((folder/lib).rglob('*.py')):
        if generated(py) or not py.stat().st_size: # nbdev writes them again, and the empty `__init__.py` of a room
            py.unlink()
    nbdev('nbdev_export', cwd=folder)
    nbdev('nbdev_clean', cwd=folder)
    return folder

def differ(a, b):
    "Whether two files differ, or one of them is missing"
    return not (a.exists() and b.exists() and a.read_bytes()==b.read_bytes())

def modules_in_step(copy):
    "What is wrong with the modules, their `__init__.py` and nbdev's index, beside an exported copy"
    lib = settings()['lib_path']
    for name in sorted({p.relative_to(d).as_posix() for d in (ROOT, copy) for p in (d/lib).rglob('*.py')}):
        if not (copy/name).exists():
            yield f'{name}: no notebook exports it: delete it'
        elif differ(ROOT/name, copy/name):
            yield f'{name} is not what its notebook exports: edit the notebook, then `make prepare`'

def notebooks_in_step(copy):
    "What is wrong with the notebooks, beside a cleaned copy"
    for p in notebooks():
        name = f'nbs/{place(p)}.ipynb'
        if differ(p, copy/name):
            yield f'{name} is not clean (execution counts or metadata): `nbdev_clean`'
        outputs = [o for c in nbformat.read(p, 4).cells for o in c.get('outputs', ())]
        if any(o.output_type=='error' for o in outputs):
            yield f'{name} has a stored error: `python docs/notebooks.py run {place(p)}`'
        if 'site-packages' in str(outputs):
            yield f'{name} stores a warning with a path of this machine: silence its cause, and run it again'

def readme_in_step():
    "What is wrong with README.md and its pictures"
    if not (NBS/'index.ipynb').exists():
        return
    text,images = readme()
    wanted = {'README.md': text.encode(), 'nbs/engine/README.md': engine_list().encode(),
        **{f'docs/images/{n}': data for n,data in images.items()}}
    stored = {f'docs/images/{p.name}' for p in IMAGES.glob('index_*')} | set(wanted)
    for name in sorted(stored):
        if not (ROOT/name).exists() or (ROOT/name).read_bytes()!=wanted.get(name):
            yield f'{name} is not what the notebooks (nbs/index.ipynb) give: `python docs/notebooks.py readme`'

def check():
    "What a commit would get wrong, as a list of sentences; works on a copy, changes nothing"
    with tempfile.TemporaryDirectory() as tmp:
        copy = exported(Path(tmp))
        return [*modules_in_step(copy), *notebooks_in_step(copy), *readme_in_step()]

# ---- readme

FENCES = """{% extends 'markdown/index.md.j2' %}
{% block stream %}```text
{{ output.text.rstrip() }}
```
{% endblock %}{% block data_text scoped %}```text
{{ output.data['text/plain'].rstrip() }}
```
{% endblock %}"""

def from_root(link):
    "A link written in `nbs/` as seen from the repository's root"
    if re.match(r'[a-z]+:|[#/]', link):
        return link
    path,hash_,anchor = link.partition('#')
    return os.path.normpath(PurePosixPath('nbs', path)).replace(os.sep, '/') + hash_ + anchor

def relink(text, move=from_root):
    "A Markdown text with `move(link)` for each of its links; code is left alone"
    parts = re.split(r'(```.*?```|`[^`\n]+`)', text, flags=re.S)
    links = re.compile(r'(\]\(|\b(?:src|srcset|href)=")([^)\s"]+)')
    return ''.join(p if i%2 else links.sub(lambda m: m[1]+move(m[2]), p) for i,p in enumerate(parts))

def shown(cell):
    "The cell as a reader of README or site sees it (None: not at all)"
    flags = directives(cell)
    if any(f=='hide' or f.startswith('default_exp') for f in flags):
        return None
    if cell.cell_type=='code':
        if flags & {'output: false', 'hide_output'}:
            cell.outputs = []
        cell.source = '' if flags & {'echo: false', 'hide_input'} else DIRECTIVE.sub('', cell.source).strip()
        if not (cell.source or cell.outputs):
            return None
    return cell

def title_and_promise(path):
    "The first heading of a notebook and the line below it that starts with `>`, for lists elsewhere: without links"
    text = '\n'.join(c.source for c in nbformat.read(path, 4).cells[:2] if c.cell_type=='markdown')
    text = re.sub(r'\[([^\]]+)\]\([^)]*\)', r'\1', text).replace('|', '\\|')
    found = [re.search(rf'^{mark} +(.+)$', text, re.M) for mark in ('#', '>')]
    return [m[1].strip() if m else '' for m in found]

def engine_list():
    "`nbs/engine/README.md`: every notebook under the hood, by room"
    parts = ['<!-- Made from the notebooks by `make prepare`: do not edit. -->',
        '# Under the hood: every notebook by room', '',
        'A room imports only from rooms above it. What each holds and why: [architecture](../../docs/architecture.md).']
    for room,holds in ROOMS.items():
        found = [p for p in notebooks() if shelf(p)==f'engine/{room}']
        rows = [f"- [{title}]({room}/{p.name}): {promise}" for p in found for title,promise in [title_and_promise(p)]]
        parts += ['', f'## {room}', '', holds, '', *rows]
    return '\n'.join(parts)+'\n'

def readme(path=NBS/'index.ipynb'):
    "The index notebook as Markdown, and its pictures `{name: bytes}`"
    from nbconvert import MarkdownExporter
    nb = nbformat.read(path, 4)
    nb.cells = [c for c in map(shown, nb.cells) if c]
    for c in nb.cells:
        if c.cell_type=='markdown':
            c.source = relink(c.source)
        for o in c.get('outputs', ()):
            if 'text/markdown' in o.get('data', ()):
                o.data['text/markdown'] = relink(o.data['text/markdown'])
    nb.metadata['language_info'] = {'name': 'python'} # nbdev_clean drops it; the fences need it
    text,res = MarkdownExporter(raw_template=FENCES).from_notebook_node(nb,
        resources=dict(unique_key='index', output_files_dir='docs/images'))
    text = re.sub(r'<style.*?</style>\s*', '', text, flags=re.S)
    text = re.sub(r'^```python\s*```$\n*', '', text, flags=re.M) # inputs that are not shown
    text = re.sub(r'[ \t]+$', '', re.sub(r'\n{3,}', '\n\n', text), flags=re.M).strip()
    header = '<!-- Made from nbs/index.ipynb by `make prepare`: edit the notebook, not this file. -->\n'
    return f'{header}{text}\n',{Path(n).name: d for n,d in res['outputs'].items()}

def write_readme():
    "Write README.md, `docs/images/index_*` and the list of the engine's notebooks"
    text,images = readme()
    for old in IMAGES.glob('index_*'):
        old.unlink()
    if images:
        IMAGES.mkdir(parents=True, exist_ok=True)
    for name,data in images.items():
        (IMAGES/name).write_bytes(data)
    (ROOT/'README.md').write_text(text, encoding='utf-8')
    (NBS/'engine/README.md').write_text(engine_list(), encoding='utf-8')
    print(f'README.md: {len(text.splitlines())} lines, {len(images)} pictures')

def main():
    "The command line"
    p = argparse.ArgumentParser(description=__doc__)
    sub = p.add_subparsers(dest='command', required=True)
    r = sub.add_parser('run', help='execute notebooks in fresh kernels, store their outputs, clean them')
    r.add_argument('names', nargs='*', help='e.g. `03`, `idpg`, `engine/model/backbone`, a room, a path (default: all)')
    r.add_argument('--no-write', action='store_true', help='only see whether they run')
    sub.add_parser('check', help='fail if modules, notebooks or README.md are not what `make prepare` would leave')
    sub.add_parser('readme', help='write README.md from nbs/index.ipynb, and nbs/engine/README.md')
    args = p.parse_args()
    if args.command=='run':
        sys.exit(1 if run(args.names, not args.no_write) else 0)
    if args.command=='readme':
        return write_readme()
    found = check()
    print('\n'.join(found) or f'{len(notebooks())} notebooks: modules, outputs and README.md are in step')
    sys.exit(1 if found else 0)

if __name__=='__main__':
    main()
