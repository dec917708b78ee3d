"What Sphinx reads: the notebooks without their `#|` lines, one page per module, docments as parameter tables."
import ast, inspect, re, shutil
from enum import Enum
import nbformat
import notebooks as nbs

def title_and_promise(path):
    "The first heading of a notebook and the line below it that starts with `>`"
    text = '\n'.join(c.source for c in nbformat.read(path, 4).cells[:2] if c.cell_type=='markdown')
    found = [re.search(rf'^{mark} +(.+)$', text, re.M) for mark in ('#', '>')]
    return [m[1].strip() if m else '' for m in found]

def modules():
    "`{module: notebook}` of the package, in reading order"
    lib,res = nbs.ROOT/nbs.settings()['lib_path'],{}
    for py in lib.glob('[a-z]*.py'):
        made_from = re.search(r'File to edit: \S*?([\w-]+)\.ipynb', py.read_text(encoding='utf-8'))
        res[py.stem] = made_from[1] if made_from else ''
    return dict(sorted(res.items(), key=lambda kv: (kv[1] or '~', kv[0])))

def constants(module):
    "`{name: (type, comment)}` of the values that a module exports (`METHODS`, ...)"
    text = (nbs.ROOT/nbs.settings()['lib_path']/f'{module}.py').read_text(encoding='utf-8')
    lines,res,offered = text.splitlines(),{},()
    for n in ast.parse(text).body:
        if not isinstance(n, (ast.Assign, ast.AnnAssign)): continue
        target = n.target if isinstance(n, ast.AnnAssign) else n.targets[0]
        if getattr(target, 'id', '')=='__all__': offered = ast.literal_eval(n.value)
        if getattr(target, 'id', '_').startswith('_') or target.id not in offered: continue
        comment = re.search(r'  ?# (.*)$', lines[n.lineno-1])
        res[target.id] = (ast.unparse(n.annotation) if isinstance(n, ast.AnnAssign) else '', comment[1] if comment else '')
    return res

def exports():
    "`{name: full name}` of what the modules export; names that two modules use are left out"
    lib,res,twice = nbs.settings()['lib_path'],{},set()
    for m in modules():
        tree = ast.parse((nbs.ROOT/lib/f'{m}.py').read_text(encoding='utf-8'))
        defs = [n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and not n.name.startswith('_')]
        for n in [*defs, *constants(m)]:
            if n in res: twice.add(n)
            res[n] = f'{lib}.{m}.{n}'
    return {k:v for k,v in res.items() if k not in twice}

# ---- pages

def toctree(caption, entries):
    "A hidden contents list: it is what the sidebar shows"
    return '\n'.join(['```{toctree}', ':hidden:', f':caption: {caption}', '', *entries, '```', ''])

def contents():
    "The sidebar: tutorial, then reference"
    parts = [f"{p.stem.split('_')[0]} · {title_and_promise(p)[0].replace('`', '') or p.stem} <{p.stem}>" for p in nbs.notebooks() if p.stem!='index']
    return toctree('Tutorial', parts) + toctree('Reference', ['api/index', 'changelog', 'contributing'])

def promise(notebook):
    "The promise of a notebook, or nothing"
    path = nbs.NBS/f'{notebook}.ipynb'
    return title_and_promise(path)[1] if path.exists() else ''

def module_page(module, notebook):
    "An API page: everything that `module` exports"
    full = f"{nbs.settings()['lib_path']}.{module}"
    path = nbs.NBS/f'{notebook}.ipynb'
    made = f'\n\nThe notebook [{title_and_promise(path)[0]}](../{path.name}) builds this module step by step.' if path.exists() else ''
    rst_lines = [f'.. automodule:: {full}', '', f'.. py:currentmodule:: {full}', '']
    for name,(type_,comment) in constants(module).items():
        rst_lines += [f'.. py:data:: {name}', *([f'   :type: {type_}'] if type_ else []), '', f'   {rst(comment)}', '']
    return '\n'.join([f'# {module}{made}', '', '```{eval-rst}', *rst_lines, '```', ''])

def api_index():
    "The list of all modules"
    rows = [f'| [{m}]({m}.md) | {promise(n)} |' for m,n in modules().items()]
    toc = '\n'.join(['```{toctree}', ':hidden:', '', *modules(), '```'])
    return '\n'.join(['# API', '', 'One module for each notebook, in reading order.', '', '| module | what it is for |', '|---|---|', *rows, '', toc, ''])

def fallback_index():
    "A front page for a checkout that has no `nbs/index.ipynb` yet"
    cfg = nbs.settings()
    rows = [f"- [{title_and_promise(p)[0] or p.stem}]({p.name}): {title_and_promise(p)[1]}" for p in nbs.notebooks()]
    return '\n'.join([f"# {cfg['title']}", '', cfg['description']+'.', '', *rows, '', contents()])

def write(folder):
    "Fill Sphinx's source folder anew"
    read = lambda name: (nbs.ROOT/name).read_text(encoding='utf-8')
    pages = {p.name: p.read_text(encoding='utf-8') for p in nbs.notebooks()}
    if 'index.ipynb' not in pages: pages['index.md'] = fallback_index()
    pages |= {f'api/{m}.md': module_page(m, n) for m,n in modules().items()}
    pages |= {'api/index.md': api_index(), 'changelog.md': read('CHANGELOG.md'), 'contributing.md': read('CONTRIBUTING.md')}
    shutil.rmtree(folder, ignore_errors=True)
    (folder/'api').mkdir(parents=True)
    for name,text in pages.items(): (folder/name).write_text(text, encoding='utf-8')

# ---- notebooks

def link(m):
    "Links out of `nbs/` lead to the repository, or to the page that we have for the file"
    here = {'../CHANGELOG.md': 'changelog.md', '../CONTRIBUTING.md': 'contributing.md', '../README.md': 'index.ipynb'}
    repo = f"{nbs.settings()['git_url']}/blob/{nbs.settings()['branch']}"
    return m[1] + here.get(m[2], f'{repo}/{m[2][3:]}' if m[2].startswith('../') else m[2])

def prose(text, known):
    "Markdown for the site: links out of `nbs/`, and `names` that we export lead to their API entry"
    parts = re.split(r'(```.*?```|:::.*?:::)', text, flags=re.S)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r'(\]\()([^)\s]+)', link, parts[i])
        parts[i] = re.sub(r'(?m)(?<![`\[{}])`(\w+)`(?![`\]])', lambda m: f'{{py:obj}}`{m[1]} <{known[m[1]]}>`' if m[1] in known else m[0], parts[i])
    return ''.join(parts)

def read(text):
    "myst-nb's reader for our notebooks: hidden cells and `#|` lines are for nbdev, not for readers"
    nb,known = nbformat.reads(text, 4),exports()
    nb.cells = [c for c in map(nbs.shown, nb.cells) if c]
    for c in nb.cells:
        if c.cell_type=='markdown': c.source = prose(c.source, known)
        elif not c.source: c.source,c.metadata['tags'] = '#',['remove-input'] # a cell without a source would lose its outputs
    index = nbs.NBS/'index.ipynb'
    if index.exists() and text==index.read_text(encoding='utf-8'): nb.cells.append(nbformat.v4.new_markdown_cell(contents()))
    nb.metadata['kernelspec'] = {'name': 'python3', 'display_name': 'Python 3', 'language': 'python'}
    return nb

# ---- docstrings

def rst(text):
    "One line of Markdown (code and maths) as reStructuredText"
    parts = re.split(r'(``[^`]+``|`[^`]+`|\$[^$]+\$)', text.strip())
    for i,p in enumerate(parts):
        if i%2==0: parts[i] = re.sub(r'([\\*_|`])', r'\\\1', p)
        else: parts[i] = f':math:`{p[1:-1]}`' if p[0]=='$' else f'``{p.strip("`").strip()}``'
    return '\\ '.join(p for p in parts if p) # an escaped space: markup may touch a letter

def type_is(anno, name):
    "Sphinx wraps defaults to keep their spelling, and fastcore takes the wrapper for a type"
    return getattr(anno, '__name__', '')==name

def type_name(anno):
    "A type as it is written in code"
    if anno is inspect.Parameter.empty or anno is None or type_is(anno, 'DefaultValue'): return ''
    if isinstance(anno, str): return anno
    return getattr(anno, '__name__', str(anno)) if inspect.isclass(anno) and not getattr(anno, '__args__', None) else re.sub(r'\b[a-z_]\w*\.', '', str(anno))

def default(value):
    "A default value as it is written in code"
    if value is inspect.Parameter.empty or '<factory>' in repr(value): return ''
    if callable(value) or isinstance(value, Enum): return getattr(value, '__name__', str(value))
    return repr(value) if len(repr(value))<40 else '...'

def table(rows):
    "Parameters `(name, type, default, meaning)` as a list-table"
    code = lambda s: f'``{s}``' if s else ''
    lines = ['.. list-table::', '   :class: parameters', '   :widths: auto', '   :header-rows: 1', '',
        '   * - name', '     - type', '     - default', '     - meaning']
    for name,anno,value,meaning in rows: lines += [f'   * - {code(name)}', f'     - {code(anno)}', f'     - {code(value)}', f'     - {rst(meaning)}']
    return lines

def stars(obj, name):
    "`*` or `**` where a parameter takes any number of arguments"
    kind = inspect.signature(obj).parameters.get(name, inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)).kind
    return {inspect.Parameter.VAR_POSITIONAL: '*', inspect.Parameter.VAR_KEYWORD: '**'}.get(kind, '')

def fields(cls):
    "The rows of a `NamedTuple`, whose comments fastcore does not read"
    found = re.findall(r'^    (\w+) *: *(.+?)(?: *= *(.+?))?(?: +# *(.*))?$', inspect.getsource(cls), re.M)
    return [f for f in found if f[0] in cls._fields]

def docstring(app, what, name, obj, options, lines):
    "Docstrings are Markdown; below them goes a table of the docments"
    from fastcore.docments import docments
    lines[:] = [rst(l) for l in lines]
    if what=='property': obj = obj.fget
    if what not in ('function', 'class', 'method', 'property') or obj is None: return
    try: found = docments(obj, full=True, returns=True)
    except Exception: return # no source to read comments from (a C function, a generated class)
    returns = found.pop('return', None)
    rows = [(stars(obj, k)+k, type_name(v.anno), default(v.default), v.docment or '') for k,v in found.items() if k not in ('self', 'cls')]
    if what=='class' and hasattr(obj, '_fields'): rows = fields(obj)
    if any(r[3] for r in rows): lines += ['', *table(rows), '']
    if returns and what!='class' and returns.docment: lines += ['', f'**Returns** ``{type_name(returns.anno)}`` {rst(returns.docment)}', '']

def signature(app, what, name, obj, options, args, returns):
    "`<factory>` is not Python, and Sphinx cannot break such a line"
    return (args.replace('<factory>', '...') if args else args), returns

def skip(app, what, name, obj, skipped, options):
    "Attributes of a class are left out: a dataclass has them in its table, a module has nothing to say about them"
    return True if what=='class' and not callable(obj) and not isinstance(obj, (property, classmethod, staticmethod)) else None
