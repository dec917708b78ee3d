"What a reader of the course walks through: `python docs/course.py run|write`; tests/test_course.py has the rules"
import argparse
import ast
import json
import math
import os
import re
import resource
import statistics
import sys
import textwrap
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[1]
COURSE,HOME,SECONDS = ROOT/'nbs/course',ROOT/'nbs/index.ipynb',ROOT/'nbs/course/seconds.json'
WORDS,LINES = 200,20 # that one reads a minute: words of prose, lines of code
COLAB = 'https://colab.research.google.com/github/idp-tutorial/idp_tutorial/blob/main/nbs/course'
BINDER = 'https://mybinder.org/v2/gh/idp-tutorial/idp_tutorial/main?labpath=nbs%2Fcourse%2F00_why.ipynb'
CLOSING = ('What you saw', 'What you can do now', 'Next', 'Exercises')

def chapters():
    "The chapters in order"
    return sorted(COURSE.glob('[0-9][0-9]_*.ipynb'))

def solution(path):
    "The notebook with a chapter's solutions"
    return COURSE/'solutions'/path.name

def prose(nb):
    "What is to be read: without the alternative texts of pictures, addresses and tables' rules"
    text = '\n'.join(c.source for c in nb.cells if c.cell_type=='markdown')
    return re.sub(r'!\[.*?\]\(.*?\)|\]\([^)]*\)|\|[-: |]+\|', ' ', text)

def code(nb):
    "The lines of code that a reader sees"
    cells = [c.source for c in nb.cells if c.cell_type=='code' and not re.match(r'#\|\s*(hide|default_exp)', c.source)]
    return [l for s in cells for l in s.split('\n') if l.strip() and not l.strip().startswith('#')]

def drawings(nb):
    "Pictures of the course's grammar"
    return re.findall(r'!\[[^\]]*\]\(\S*images/course/(\w+)\.svg\)', '\n'.join(c.source for c in nb.cells))

def exercises(nb):
    "The three kinds that are there"
    text = next((c.source for c in nb.cells if '## Exercises' in c.source), '')
    return re.findall(r'^\d\. \*(Predict|Modify|Invent)\.\*', text, re.M)

def ideas(nb):
    "`{name: lines}` of the functions and classes that a chapter defines, docstrings and comments left out"
    res = {}
    for c in nb.cells:
        if c.cell_type!='code' or re.match(r'#\|\s*export', c.source):
            continue
        for n in ast.parse(re.sub(r'^(\s*)[%!].*$', r'\1pass', c.source, flags=re.M)).body:
            if isinstance(n, (ast.FunctionDef, ast.ClassDef)):
                res[n.name] = len(ast.unparse(n).split('\n'))
    return res

def needs(path):
    "Numbers of the chapters that the line *You need* names"
    text = prose_with_links(path)
    found = re.search(r'\*\*You need\*\*.*?(?=\*\*|\n\n|\Z)', text, re.S)
    return [int(n) for n in re.findall(r'\]\((\d\d)_\w+\.ipynb', found[0])] if found else []

def prose_with_links(path):
    "All prose, as written"
    return '\n'.join(c.source for c in nbformat.read(path, 4).cells if c.cell_type=='markdown')

def scores(path):
    "Methods that a chapter trains to a score on the running example: `(mean, what is said of it)`"
    number = path.stem[:2]
    rows = json.loads((COURSE/'scores.json').read_text(encoding='utf-8'))
    return {r['method']: (statistics.mean(r['scores']), said(r['scores'])) for r in rows
        if r['chapter']==number and r['task']=='two-domains'}

def said(scores):
    "Mean, deviation and number of runs"
    if len(scores)==1:
        return f'{scores[0]:.1f} (one run)'
    return f'{statistics.mean(scores):.1f} ± {statistics.stdev(scores):.1f} ({len(scores)} seeds)'

def seconds():
    "Seconds of one core that each chapter was seen to take: `python docs/course.py run`"
    return json.loads(SECONDS.read_text(encoding='utf-8')) if SECONDS.exists() else {}

def minutes(cells):
    "Of reading: what cells take that are alone in a notebook"
    nb = nbformat.v4.new_notebook(cells=cells)
    return len(prose(nb).split())/WORDS+len(code(nb))/LINES

def row(path):
    "A line of the table"
    nb = nbformat.read(path, 4)
    best = max(scores(path).items(), key=lambda o: o[1][0], default=None)
    return dict(chapter=path.stem, words=len(prose(nb).split()), code=len(code(nb)), minutes=round(minutes(nb.cells)),
        seconds=seconds().get(path.stem, 0), drawings=len(drawings(nb)), exercises=len(exercises(nb)),
        score=f'{best[0]}: {best[1][1]}' if best else '')

def first_score():
    "Minutes from the first word to the first trained score: reading up to it, and running the chapter"
    path = chapters()[0]
    cells = nbformat.read(path, 4).cells
    upto = next(i for i,c in enumerate(cells) if c.cell_type=='code' and re.search(r'\bnote\(', c.source))
    return minutes(cells[:upto+1])+seconds().get(path.stem, 0)/60

# ---- what is made from the table

def takes(path):
    "What a chapter says of itself"
    r = row(path)
    run = f"{5*math.ceil(r['seconds']/5)} s" if r['seconds'] else 'less than a minute'
    return f"**It takes** {r['minutes']} minutes to read and {run} to run"

def says(text, path):
    "A chapter's paragraph with the minutes and seconds of the table"
    new = re.sub(r'\*\*It takes\*\*\s[^;.]*?\sto\s+run', takes(path), text)
    if new==text:
        return text
    return '\n\n'.join(filled(p) if '**It takes**' in p else p for p in new.split('\n\n'))

def filled(text):
    "A paragraph of 98 columns, in which no bold words are parted"
    whole = re.sub(r'\*\*[^*]+\*\*', lambda m: re.sub(r'\s', '\0', m[0]), text)
    return textwrap.fill(whole, 98, break_long_words=False, break_on_hyphens=False).replace('\0', ' ')

def links(text):
    "The home page's road with the minutes of the table"
    known = {p.stem: row(p)['minutes'] for p in chapters()}
    return re.sub(r'(course/(\d\d_\w+)\.ipynb\)) \d+′', lambda m: f'{m[1]} {known[m[2]]}′', text)

def page():
    "`nbs/course/chapters.md`: the course in one table"
    rows = [row(p) for p in chapters()]
    title = {p.stem: nbformat.read(p, 4).cells[0].source.split('\n')[0].strip('# ') for p in chapters()}
    lines = ['<!-- Made by `python docs/course.py write`: do not edit. -->', '# The course in one table', '',
        f'A reader takes a minute for {WORDS} words, and a minute for {LINES} lines of code. *Seconds* are those of '
        'one core, all cells of the chapter together. *Score* is the best that the chapter trains on the running task '
        '`two-domains`: right answers in %, on 500 texts that training has not seen.', '',
        f'Without installing anything: [in Colab]({COLAB}/00_why.ipynb), by a link in each row, or all of them '
        f'[on Binder]({BINDER}). Colab has Python, PyTorch and matplotlib already. There the first cell clones the '
        'repository and installs the package beside them, with newer companions where it needs them, and goes to the '
        "chapters' folder. No accelerator is needed. Binder makes Python 3.12, PyTorch for a CPU, the package and "
        'JupyterLab from `.binder/`, which takes some minutes on the first visit. `.ci/first_chapter` does by itself '
        'what both do: an empty environment, the package, and the first chapter alone.', '',
        '| | chapter | words | code lines | minutes | seconds | drawings | exercises | trained score | |',
        '|---|---|--:|--:|--:|--:|--:|--:|---|---|']
    for r in rows:
        n = r['chapter'][:2]
        lines.append(f"| {n} | [{title[r['chapter']]}]({r['chapter']}.ipynb) | {r['words']:,} | {r['code']} | "
            f"{r['minutes']} | {r['seconds'] or 'not measured'} | {r['drawings']} | {r['exercises']} | {r['score']} | "
            f"[Colab]({COLAB}/{r['chapter']}.ipynb) |")
    total = {k: sum(r[k] for r in rows) for k in ('words', 'code', 'minutes', 'seconds')}
    return '\n'.join([*lines, '', f"In all {total['words']:,} words and {total['code']:,} lines of code: "
        f"{total['minutes']/60:.1f} hours to read, {total['seconds']/60:.0f} minutes of a core for what was timed. "
        f'The first trained score is there {first_score():.0f} minutes after the first word.', ''])

def edited(path, change):
    "A notebook with `change(text)` for each Markdown cell; whether something is new"
    nb = nbformat.read(path, 4)
    before = [c.source for c in nb.cells]
    for c in nb.cells:
        if c.cell_type=='markdown':
            c.source = change(c.source)
    return nb,before!=[c.source for c in nb.cells]

def made():
    "Notebooks that the table changes, and the page"
    todo = {p: edited(p, lambda text, p=p: says(text, p)) for p in chapters()}|{HOME: edited(HOME, links)}
    return {p: nb for p,(nb,new) in todo.items() if new},page()

def write():
    "Headings, home page and the page of chapters as the table has them"
    for path,nb in made()[0].items():
        nbformat.write(nb, path)
    text = page() # once the headings have their last words
    (COURSE/'chapters.md').write_text(text, encoding='utf-8')
    print(text)

def used():
    "Seconds of a core that ended processes took"
    u = resource.getrusage(resource.RUSAGE_CHILDREN)
    return u.ru_utime+u.ru_stime

def run(names):
    "Run chapters in fresh kernels with one thread; keep their outputs, and the seconds of the core"
    os.environ.update(OMP_NUM_THREADS='1', PYTHONHASHSEED='0', TOKENIZERS_PARALLELISM='false', HF_HUB_OFFLINE='1',
        MPLBACKEND='module://matplotlib_inline.backend_inline')
    import notebooks as nbs
    for path in [p for p in chapters() if not names or p.stem[:2] in names]:
        before = used()
        nb = nbs.execute(path)
        known = seconds()|{path.stem: round(used()-before)}
        nbformat.write(nb, path)
        nbs.nbdev('nbdev_clean', fname=str(path))
        SECONDS.write_text(json.dumps(known, indent=1, sort_keys=True)+'\n', encoding='utf-8')
        print(path.stem, known[path.stem], flush=True)

def main():
    "The command line"
    p = argparse.ArgumentParser(description=__doc__)
    sub = p.add_subparsers(dest='command', required=True)
    sub.add_parser('write', help="minutes and seconds into headings, home page and the course's page of chapters")
    r = sub.add_parser('run', help='run chapters with one thread, store their outputs and how many seconds they took')
    r.add_argument('names', nargs='*', help='such as 05 (default: all)')
    args = p.parse_args()
    if args.command=='run':
        run(args.names)
    return write()

if __name__=='__main__':
    sys.exit(main())
