"Run, check and publish the notebooks: `python docs/notebooks.py run|check|readme` (see CONTRIBUTING.md)."
import argparse, base64, io, os, re, shutil, subprocess, sys, tempfile, time
from configparser import ConfigParser
from pathlib import Path, PurePosixPath
import nbformat
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
NBS,IMAGES = ROOT/'nbs',ROOT/'docs/images'
DIRECTIVE = re.compile(r'^\s*#\s*\|.*\n?', re.M)

def directives(cell):
    "The `#|` lines of a code cell as `{'slow', 'eval: false', ...}`"
    if cell.cell_type!='code': return set()
    found = re.findall(r'^\s*#\s*\|\s*(.+?)\s*$', cell.source, re.M)
    return {re.sub(r'\s*:\s*', ': ', d) for d in found}

def settings():
    "`settings.ini`, the one description of the project"
    ini = ConfigParser(delimiters=['='], interpolation=None)
    ini.read(ROOT/'settings.ini', encoding='utf-8')
    return ini['DEFAULT']

def notebooks(names=()):
    "Committed notebooks in reading order, or those whose name starts with one of `names` (`03` is enough)"
    known = sorted(p for p in NBS.glob('*.ipynb') if not p.name.startswith(('_', '.')))
    wanted = [Path(n).name.removesuffix('.ipynb') for n in names]
    missing = [n for n in wanted if not any(p.stem.startswith(n) for p in known)]
    if missing: raise SystemExit(f"No notebook starts with {', '.join(missing)}. There are: {', '.join(p.stem for p in known)}")
    exact = [p for p in known if p.stem in wanted]
    return exact if len(exact)==len(wanted)>0 else [p for p in known if not wanted or any(p.stem.startswith(n) for n in wanted)]

# ---- run

def skipped(cell):
    "Cells that never run by themselves: `#| eval: false` and the test flags of settings.ini (slow, gpu, ...)"
    return bool(directives(cell) & {'eval: false', *settings()['tst_flags'].split()})

def lighten(nb):
    "Store the pictures of a notebook with 128 colours: a plot looks the same in a third of the bytes"
    for data in (o.get('data', {}) for c in nb.cells for o in c.get('outputs', ())):
        if 'image/png' not in data: continue
        png,small = base64.b64decode(data['image/png']),io.BytesIO()
        if (im := Image.open(io.BytesIO(png))).mode=='P': continue # it is one already
        im.convert('RGB').quantize(128, dither=Image.Dither.NONE).save(small, 'png', optimize=True)
        if len(small.getvalue())<len(png): data['image/png'] = base64.b64encode(small.getvalue()).decode()
    return nb

def execute(path):
    "Run one notebook in a fresh kernel and return it with its new outputs; skipped cells keep their old ones"
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
    os.environ.update(TOKENIZERS_PARALLELISM='false', PYTHONHASHSEED='0', MPLBACKEND='module://matplotlib_inline.backend_inline')
    os.environ.setdefault('HF_HUB_OFFLINE', '1')
    failed = 0
    for path in notebooks(names):
        start,before = time.perf_counter(),path.read_bytes()
        try:
            nb = execute(path)
            if write:
                nbformat.write(nb, path)
                nbdev('nbdev_clean', '--fname', str(path))
            note = '' if not write else 'unchanged' if path.read_bytes()==before else 'new outputs'
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as e:
            failed,note = failed+1,'FAILED (file left as it was)\n'+re.sub(r'\x1b\[[\d;]*m', '', str(e)) # no colours: this ends in log files
        print(f'{path.stem:28} {time.perf_counter()-start:6.1f} s  {note}', flush=True)
    return failed

# ---- check

def nbdev(command, *args, cwd=ROOT):
    "Run an nbdev command of this environment, and stop with its output if it fails"
    call = f"import sys; from nbdev.{'clean' if 'clean' in command else 'doclinks'} import {command} as f; sys.argv[0]='{command}'; f()"
    res = subprocess.run([sys.executable, '-c', call, *args], cwd=cwd, capture_output=True, text=True, env={**os.environ, 'PYTHONPATH': ''})
    if res.returncode: raise SystemExit(f'{command} failed:\n{res.stdout}{res.stderr}')

def drift(pairs):
    "Names whose two files differ (or where one of them is missing)"
    read = lambda p: p.read_bytes() if p.exists() else None
    return [name for name,a,b in pairs if read(a)!=read(b)]

def check():
    "What a commit would get wrong, as a list of sentences; works on a copy, changes nothing"
    lib,found = settings()['lib_path'],[]
    with tempfile.TemporaryDirectory() as tmp:
        tmp = Path(tmp)
        shutil.copy(ROOT/'settings.ini', tmp)
        shutil.copytree(NBS, tmp/'nbs', ignore=shutil.ignore_patterns('.*', '_*'))
        shutil.copytree(ROOT/lib, tmp/lib, ignore=shutil.ignore_patterns('__pycache__', 'assets'))
        for py in (tmp/lib).glob('*.py'): # a module whose notebook is gone must not survive
            if py.read_text(encoding='utf-8').startswith('# AUTOGENERATED'): py.unlink()
        nbdev('nbdev_export', cwd=tmp)
        nbdev('nbdev_clean', cwd=tmp)
        modules = {p.name for d in (ROOT, tmp) for p in (d/lib).glob('*.py')}
        for f in drift((m, ROOT/lib/m, tmp/lib/m) for m in sorted(modules)):
            found.append(f'{lib}/{f} is not what its notebook exports: edit the notebook, then `make prepare`')
        for f in drift((p.name, p, tmp/'nbs'/p.name) for p in notebooks()):
            found.append(f'nbs/{f} is not clean (execution counts or metadata): `nbdev_clean`')
        for p in notebooks():
            outputs = [o for c in nbformat.read(p, 4).cells for o in c.get('outputs', ())]
            if any(o.output_type=='error' for o in outputs): found.append(f'nbs/{p.name} has a stored error: `python docs/notebooks.py run {p.stem}`')
        if (NBS/'index.ipynb').exists():
            text,images = readme()
            (tmp/'README.md').write_text(text, encoding='utf-8')
            for name,data in images.items(): (tmp/name).write_bytes(data)
            stored = {p.name for p in IMAGES.glob('index_*')} | set(images)
            pairs = [('README.md', ROOT/'README.md', tmp/'README.md'), *((f'docs/images/{n}', IMAGES/n, tmp/n) for n in sorted(stored))]
            for f in drift(pairs): found.append(f'{f} is not what nbs/index.ipynb gives: `python docs/notebooks.py readme`')
    return found

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
    if re.match(r'[a-z]+:|[#/]', link): return link
    path,hash_,anchor = link.partition('#')
    return os.path.normpath(PurePosixPath('nbs', path)).replace(os.sep, '/') + hash_ + anchor

def relink(text):
    "The links of a Markdown text, code spans left alone, as seen from the repository's root"
    parts = re.split(r'(```.*?```|`[^`\n]+`)', text, flags=re.S)
    move = lambda m: m[1]+from_root(m[2])
    for i in range(0, len(parts), 2): parts[i] = re.sub(r'(\]\(|\b(?:src|href)=")([^)\s"]+)', move, parts[i])
    return ''.join(parts)

def shown(cell):
    "The cell as a reader of README or site sees it (None: not at all)"
    flags = directives(cell)
    if any(f=='hide' or f.startswith('default_exp') for f in flags): return None
    if cell.cell_type=='code':
        if flags & {'output: false', 'hide_output'}: cell.outputs = []
        cell.source = '' if flags & {'echo: false', 'hide_input'} else DIRECTIVE.sub('', cell.source).strip()
        if not (cell.source or cell.outputs): return None
    return cell

def readme(path=NBS/'index.ipynb'):
    "The index notebook as Markdown, and its pictures `{name: bytes}`"
    from nbconvert import MarkdownExporter
    nb = nbformat.read(path, 4)
    nb.cells = [c for c in map(shown, nb.cells) if c]
    for c in nb.cells:
        if c.cell_type=='markdown': c.source = relink(c.source)
    nb.metadata['language_info'] = {'name': 'python'} # nbdev_clean drops it; the fences need it
    text,res = MarkdownExporter(raw_template=FENCES).from_notebook_node(nb,
        resources=dict(unique_key='index', output_files_dir='docs/images'))
    text = re.sub(r'<style.*?</style>\s*', '', text, flags=re.S)
    text = re.sub(r'^```python\s*```$\n*', '', text, flags=re.M) # inputs that are not shown
    text = re.sub(r'[ \t]+$', '', re.sub(r'\n{3,}', '\n\n', text), flags=re.M).strip()
    header = '<!-- Made from nbs/index.ipynb by `make prepare`: edit the notebook, not this file. -->\n'
    return f'{header}{text}\n',{Path(n).name: d for n,d in res['outputs'].items()}

def write_readme():
    "Write README.md and `docs/images/index_*`"
    text,images = readme()
    for old in IMAGES.glob('index_*'): old.unlink()
    if images: IMAGES.mkdir(parents=True, exist_ok=True)
    for name,data in images.items(): (IMAGES/name).write_bytes(data)
    (ROOT/'README.md').write_text(text, encoding='utf-8')
    print(f'README.md: {len(text.splitlines())} lines, {len(images)} pictures')

def main():
    "The command line"
    p = argparse.ArgumentParser(description=__doc__)
    sub = p.add_subparsers(dest='command', required=True)
    r = sub.add_parser('run', help='execute notebooks in fresh kernels, store their outputs, clean them')
    r.add_argument('names', nargs='*', help='notebooks, e.g. `03` or `nbs/03_training.ipynb` (default: all)')
    r.add_argument('--no-write', action='store_true', help='only see whether they run')
    sub.add_parser('check', help='fail if the modules, the notebooks or README.md are not what `make prepare` would leave')
    sub.add_parser('readme', help='write README.md from nbs/index.ipynb')
    args = p.parse_args()
    if args.command=='run': sys.exit(1 if run(args.names, not args.no_write) else 0)
    if args.command=='readme': return write_readme()
    found = check()
    print('\n'.join(found) or f'{len(notebooks())} notebooks: modules, outputs and README.md are in step')
    sys.exit(1 if found else 0)

if __name__=='__main__': main()
