"What a reader of the course walks through: `python docs/course.py` prints a table; tests/test_course.py has the rules"
import ast
import json
import re
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[1]
COURSE = ROOT/'nbs/course'
WORDS,LINES = 200,20 # that one reads a minute: words of prose, lines of code
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
        for n in ast.parse(re.sub(r'^[%!].*$', '', c.source, flags=re.M)).body:
            if isinstance(n, (ast.FunctionDef, ast.ClassDef)):
                res[n.name] = len(ast.unparse(n).split('\n'))
    return res

def needs(path):
    "Numbers of the chapters that the line *You need* names"
    text = prose_with_links(path)
    found = re.search(r'\*\*You need\*\*.*?(?=\*\*|\n\n|\Z)', text, re.S)
    return [int(n) for n in re.findall(r'\]\((\d\d)_\w+\.ipynb', found[0])] if found else []

def prose_with_links(path):
    return '\n'.join(c.source for c in nbformat.read(path, 4).cells if c.cell_type=='markdown')

def scores(path):
    "Methods that a chapter trains to a score, with their means on the running example"
    number = path.stem[:2]
    rows = json.loads((COURSE/'scores.json').read_text(encoding='utf-8'))
    return {r['method']: sum(r['scores'])/len(r['scores']) for r in rows
        if r['chapter']==number and r['task']=='two-domains'}

def row(path):
    "A line of the table"
    nb = nbformat.read(path, 4)
    words,lines = len(prose(nb).split()),len(code(nb))
    best = max(scores(path).items(), key=lambda o: o[1], default=None)
    return dict(chapter=path.stem, words=words, code=lines, minutes=round(words/WORDS+lines/LINES),
        drawings=len(drawings(nb)), exercises=len(exercises(nb)), score=f'{best[0]} {best[1]:.1f}' if best else '')

def main():
    rows = [row(p) for p in chapters()]
    keys = list(rows[0])
    print('| '+' | '.join(keys)+' |\n|'+'---|'*len(keys))
    for r in rows:
        print('| '+' | '.join(str(r[k]) for k in keys)+' |')
    print(f"\n{sum(r['words'] for r in rows):,} words, {sum(r['code'] for r in rows):,} lines of code, "
        f"{sum(r['minutes'] for r in rows)/60:.1f} hours")

if __name__=='__main__':
    sys.exit(main())
