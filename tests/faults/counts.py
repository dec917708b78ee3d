"Counts of the campaigns (counts.jsonl) for docs/promises.md: `python tests/faults/counts.py` writes them there"
import json
import re
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
COUNTS,PAGE = HERE/'counts.jsonl',HERE.parents[1]/'docs/promises.md'
BETWEEN = re.compile('(<!-- counts -->\n).*?(<!-- end of counts -->)', re.S)
COLUMNS = { # of the table: the campaign, and how its outcomes begin
    'killed before': ('kills','kill'), 'half-way': ('kills','half'), 'power cut': ('kills','power'),
    'disk full': ('kills','refuse'), 'two at once': ('pairs',''), 'files spoilt': ('damaged','')}


def lines():
    return [json.loads(l) for l in COUNTS.read_text(encoding='utf-8').splitlines()]


def table():
    "Cases by work and by fault, and what came of them"
    cases,came,bad = Counter(),Counter(),0
    for line in lines():
        bad += line['bad']
        for outcome,n in line['outcomes'].items():
            how,_,what = outcome.partition(': ')
            asked = [c for c,(kind,begin) in COLUMNS.items() if kind==line['campaign'] and how.startswith(begin)]
            column = asked[0] if asked else how
            cases[line['work'], column] += n
            came[f'{column}, {how}' if line['campaign']=='damaged' else column, what] += n
    works = [w for w in dict.fromkeys(l['work'] for l in lines()) if w!='input']
    rows = [[w, *(cases[w, c] for c in COLUMNS)] for w in works]
    rows.append(['**all**', *(sum(r[i] for r in rows) for i in range(1, len(COLUMNS)+1))])
    out = [f"| work | {' | '.join(COLUMNS)} |", '|---|'+'--:|'*len(COLUMNS)]
    out += [f"| {' | '.join(f'{v:,}' if isinstance(v, int) else v for v in r)} |" for r in rows]
    said = [f"- {column}: {', '.join(f'{n:,} {what}' for (c,what),n in sorted(came.items()) if c==column)}"
        for column in dict.fromkeys(c for c,_ in came)]
    return '\n'.join([*out, '', f"What came of them; {bad:,} broke a promise:", '', *said, ''])


def main():
    page = PAGE.read_text(encoding='utf-8')
    PAGE.write_text(BETWEEN.sub(lambda m: m[1]+table()+m[2], page), encoding='utf-8')


if __name__=='__main__':
    main()
