"Effects and verdicts; and no link to a claim leads nowhere."
import json
import re
from pathlib import Path

import numpy as np
import pytest

from idp_tutorial.data.task import Task
from idp_tutorial.experiments.claims import (
    COLUMNS,
    claims_page,
    contrast,
    contrast_of_files,
    holm,
    paired,
    read_claims,
    right,
    verdict,
)
from idp_tutorial.experiments.published_scores import METHOD_NAMES, beside, published_scores, published_tables

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = ROOT/'results/claims.csv'
LINK = re.compile(r'claims(?:\.ipynb|\.html|\.md)?#([\w-]+)')


def test_the_interval_covers():
    "Of 60 experiments without an effect a 95 % interval leaves out 0 in a few; with a large one in all"
    rng = np.random.default_rng(1)
    def missed(gain):
        out = 0
        for i in range(60):
            hard = rng.random(120)
            a,b = [100.*(rng.random((5, 120))<np.clip(hard+g, 0, 1)) for g in (gain, 0)]
            f = paired(a, b, 400, i)
            out += not f['low']<=0<=f['high']
        return out
    assert missed(0)<=9 and missed(.25)>=58


def test_pairing_helps():
    "Two methods that err on the same texts differ less by chance"
    rng = np.random.default_rng(0)
    a = 100.*(rng.random((5, 200))<.7)
    b = a.copy()
    b[:,:6] = 0
    f = paired(a, b)
    assert f['low']>=0 and f['effect']==pytest.approx((a-b).mean())
    assert f['detectable']<paired(a, 100.*(rng.random((5, 200))<.7))['detectable']
    with pytest.raises(ValueError, match='same seeds and texts'):
        paired([1.], [2.])


def test_holm_is_monotone_and_never_smaller():
    p = [.001, .2, .01, .011]
    q = holm(p)
    assert q==pytest.approx([.004, .2, .03, .03]) and all(x>=y for x,y in zip(q, p))


def record(method, seed, score, **kw):
    return dict(method=method, seed=seed, score=score, task='t', k=None, draw=0, backbone='b', head='h', **kw)


def test_a_contrast_takes_what_both_have(tmp_path):
    rs = [record('a', s, 80.+s) for s in range(3)]+[record('b', s, 78.+s) for s in range(2)]
    f = contrast(rs, 'a', 'b')
    assert (f['effect'],f['seeds'],f['items'])==(2., 2, 0) and verdict(f, 1.)=='open'
    assert contrast(rs, 'a', 'c') is None and verdict(None)=='open'


def test_texts_are_paired_where_logits_are(tmp_path):
    task = Task('t', labels=('x','y'), splits=dict(test=[dict(label=i%2) for i in range(40)]))
    good = np.eye(2)[[i%2 for i in range(40)]]
    (tmp_path/'logits').mkdir()
    rs = []
    for m in 'ab':
        for s in range(5):
            out = good.copy()
            if m=='b':
                out[:10] = out[:10,::-1]
            np.savez(tmp_path/f'logits/{m}{s}.npz', test=out.astype(np.float16))
            rs.append(record(m, s, 0., logits=f'logits/{m}{s}.npz'))
    f = contrast(rs, 'a', 'b', {'t':task}, tmp_path)
    assert (f['effect'],f['items'],f['seeds'])==(25., 40, 5)
    assert (verdict(f, 20.),verdict(f, -20.))==('seen','opposite')
    assert right(rs[0], tmp_path, task).tolist()==[100.]*40
    with pytest.raises(ValueError, match='give the data'):
        right(rs[0], tmp_path, Task('t', labels=('x','y'), splits=dict(test=[dict(label=0)])))


def test_the_claims_of_the_project():
    rows = read_claims(CLAIMS)
    assert len(rows)>=40 and {r['paper'] for r in rows}=={'IDPG','LPT','ID-SPAM'}
    page = claims_page(rows)
    assert all(f"id=\"{r['id']}\"" in page for r in rows)
    for r in rows: # an effect is what its records say
        if r['effect']:
            *names,pair = re.split(r'\.jsonl ', r['records'])
            a,b = re.fullmatch(r'(\S+) − (\S+), \d+ seeds', pair).groups()
            f = contrast_of_files(*[ROOT/f'results/{n}.jsonl' for n in names], a=a, b=b)
            assert float(r['effect'])==pytest.approx(f['effect'], abs=.006), r['id']
            assert r['verdict']==verdict(f, float(r['published']) if r['published'] else None), r['id']


def test_links_to_claims_lead_to_rows():
    ids = {r['id'] for r in read_claims(CLAIMS)}
    pages = [ROOT/'README.md', *(ROOT/'nbs').rglob('*.ipynb'), *(ROOT/'docs').glob('*.md')]
    lost = [(p.name, i) for p in pages for i in LINK.findall(p.read_text(encoding='utf-8')) if i not in ids]
    assert not lost, lost


@pytest.mark.parametrize('field,value,words', [
    ('verdict', 'proved', 'unknown verdict'), ('decides', '', 'has no decides'),
    ('sentence', '', 'has no sentence'), ('id', 'idpg-m-over-prompt', 'is there twice')])
def test_a_broken_claim_is_refused(field, value, words, tmp_path):
    import csv
    rows = read_claims(CLAIMS)
    rows = [rows[0], {**next(r for r in rows[1:] if r['verdict']=='open'), field:value}]
    with open(tmp_path/'c.csv', 'w', newline='', encoding='utf-8') as f:
        w = csv.DictWriter(f, COLUMNS)
        w.writeheader()
        w.writerows(rows)
    with pytest.raises(ValueError, match=words):
        read_claims(tmp_path/'c.csv')


def test_every_published_table_has_a_command_and_a_verdict():
    t = published_tables()
    assert len(t)==38 and t.table.is_unique and t.verdict.isin(['seen','not seen','opposite','open']).all()
    assert t.command.str.match(r'idp_\w+ ').all() and (t.decides.str.len()>0).all()
    assert {*published_scores().table}<={*t.table}


def test_published_scores_are_theirs():
    t = published_scores('idpg-1')
    mean = t[(t.method=='M-IDPG-PHM') & (t.task!='Avg')]['mean'].mean()
    assert mean==pytest.approx(91.85, abs=.06)
    s = beside([{**record('lpt-npg', i, 50.+i), 'task':'sst2'} for i in range(2)], 'lpt-2')
    row = s[(s.method=='LPT w/ NPG') & (s.task=='SST-2')].iloc[0]
    assert (row['mean'],row['our mean'],row['runs'])==(92.7, 50.5, 2) and s['our mean'].notna().sum()==1
    assert {*published_scores('lpt-2').method}<=METHOD_NAMES.keys()
    with pytest.raises(ValueError, match='unknown table of scores'):
        published_scores('lpt-22')


def test_a_row_is_json():
    json.dumps(read_claims(CLAIMS))
