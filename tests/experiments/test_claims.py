"Effects and verdicts; and no link to a claim leads nowhere."
import json
import re
from pathlib import Path

import numpy as np
import pytest

from idp_tutorial.data.task import Task
from idp_tutorial.experiments import claims, contrasts
from idp_tutorial.experiments.claims import COLUMNS, MEASURED, claims_page, judge, measured, read_claims, write_claims
from idp_tutorial.experiments.conclusions import enough, verdict
from idp_tutorial.experiments.contrasts import contrast, has_texts, holm, paired, right
from idp_tutorial.experiments.published_scores import METHOD_NAMES, beside, published_scores, published_tables

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = ROOT/'results/claims.csv'
NUMBER = r'(\d+|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|twenty)'
PAPER = re.compile(r"\b(papers?|authors|abstract)\b|\b(Table|Figure|Fig\.)\s*\d|"
    r"\b(IDPG|LPT|ID-SPAM)['’]s (headline|order|template)\b")
RESULT = re.compile(rf"\b(outperform\w*|better|worse|beats?|{NUMBER} points?|points (above|below)|gains?|improve\w*|"
    r"the best|comparable|on par|ahead|hump|fastest|seen here|effects? (is|are) there|in the papers?['’]s? order|"
    r"(more|less|fewer|faster|slower|higher|lower)\b[^.:;]*\bthan in)\b", re.I)
VERDICT = { # words that say what came of a claim, the first that fits
    'not seen':re.compile(r'\b(not|no|none|nothing|never|nowhere)\b[^.:;]*\bseen\b|\*not seen\*', re.I),
    'seen':re.compile(r'\b(is|are|was|were)( \w+)? \*{0,2}seen\b|\*seen\*'),
    'opposite':re.compile(r'\bopposite\b'), 'open':re.compile(r'\b(is|are|stays?|remains?) \[?\*{0,2}open\b|\*open\*')}
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


def _made_up(rng, seeds, texts, by_text, by_seed, luck): # answers of two methods that are equal in the mean
    hard = rng.normal(1.2, 1, texts)
    parts = [rng.normal(0, s, (2,*size)) for s,size in ((by_text,(1,texts)), (by_seed,(seeds,1)), (luck,(seeds,texts)))]
    return 100.*(hard+sum(parts)>0)


@pytest.mark.parametrize('spread', [(0,0,.5), (.5,0,.5), (0,.05,.5), (.5,.2,.5), (1,0,.2)])
def test_the_interval_is_as_wide_as_what_makes_the_spread(spread):
    "Seeds, texts or the luck of one seed with one text: 95 % of the intervals hold 0, and not nearly all"
    rng = np.random.default_rng(0)
    found = [paired(*_made_up(rng, 5, 300, *spread), 400, i) for i in range(200)]
    assert 178<=sum(f['low']<=0<=f['high'] for f in found)<=197
    if not any(spread[:2]): # luck alone: Student's t over the seeds is right
        t = [2*2.776*(a-b).mean(1).std(ddof=1)/5**.5 for a,b in (_made_up(rng, 5, 300, *spread) for _ in range(200))]
        assert np.mean([f['high']-f['low'] for f in found])==pytest.approx(np.mean(t), rel=.15)


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
    kw = dict(task='t', k=None, draw=0, backbone='b', head='h', metric='accuracy', sizes=dict(test=1000)) | kw
    return dict(method=method, seed=seed, score=score, **kw)


def test_few_seeds_make_a_wide_interval():
    "Student's t: with three seeds the same spread is wider than with nine, and 95 % of the intervals cover"
    rng = np.random.default_rng(0)
    missed = 0
    for i in range(100):
        f = paired(rng.normal(0, 1, (3, 1)), np.zeros((3, 1)), 400, i)
        missed += not f['low']<=0<=f['high']
    assert missed<=12 # a bootstrap of three without Student misses 30
    spread = np.tile([[-1.], [0.], [1.]], (3, 1))
    assert paired(spread[:3], 0*spread[:3])['high']>1.5*paired(spread, 0*spread)['high']


def test_settings_count_alike():
    "A task with many texts weighs as much as one with few"
    few,many = np.full((5, 10), 10.),np.zeros((5, 1000))
    assert paired([few, many], [0*few, many])['effect']==5.


def test_a_contrast_takes_what_both_have():
    rs = [record('a', s, 80.+s) for s in range(3)]+[record('b', s, 78.+s) for s in range(2)]
    f = contrast(rs, 'a', 'b')
    assert (f['effect'],f['runs'],f['texts'])==(2., 2, 0) and verdict(f, 1.)=='open'
    assert contrast(rs, 'a', 'c') is None and verdict(None)=='open' and not enough(f)
    known = contrast([{**r, 'sizes':dict(test=10**9)} for r in rs], 'a', 'b')
    assert known['high']-known['low']<1<f['high']-f['low'] # 1,000 texts are a sample


def test_a_side_says_which_records():
    rs = [record('lpt', s, 60.+l, layer=l, bits=l/10) for s in range(5) for l in (0, 3, 6)]
    assert contrast(rs, 'lpt layer=3', 'lpt layer=0,6')['effect']==0
    assert contrast(rs, 'lpt layer=6 @bits', 'lpt layer=0 @bits')['effect']==pytest.approx(.6)
    with pytest.raises(ValueError, match='say what tells the records apart'):
        contrast(rs, 'lpt', 'lpt layer=0')
    both = rs+[{**r, 'method':'npg', 'score':r['score']+r['layer']} for r in rs]
    f = contrast(both, 'npg', 'lpt', by=('layer',))
    assert (f['effect'],len(f['settings']))==(3., 3)


def test_few_shot_needs_four_draws_of_two_seeds():
    runs = [(d, s) for d in range(4) for s in range(2)]
    found = [contrast([record(m, s, v, draw=d) for m,v in (('a',90.), ('b',60.)) for d,s in runs[:n]], 'a', 'b')
        for n in (6, 8)]
    assert [verdict(f, 5.) for f in found]==['open','seen'] and found[1]['runs']==8


def test_a_draw_counts_once_whatever_its_seeds():
    gain = [20., 24., 6., 11.]
    rs = [record(m, s, 60.+(m=='a')*(g+s), draw=d) for m in 'ab' for d,g in enumerate(gain) for s in (0,1)]
    f = contrast(rs, 'a', 'b')
    want = paired(np.array([[g+.5] for g in gain]), np.zeros((4,1)), noise=[contrasts._noise(rs[:2],
        [('score',np.mean([r['score'] for r in rs if r['method']==m])) for m in 'ab'])])
    assert (f['runs'],f['draws'])==(8, 4) and f['effect']==pytest.approx(want['effect'])
    assert (f['low'],f['high'])==pytest.approx((want['low'],want['high']))


def test_one_draw_of_a_few_examples_is_no_verdict():
    def said(k, seeds=5):
        rs = [record(m, s, v, k=k) for m,v in (('a',90.), ('b',60.)) for s in range(seeds)]
        return verdict(contrast(rs, 'a', 'b'), 5.)
    assert [said(100), said(500), said(100, 9)]==['open']*3 and said(1000)==said(None)=='seen'


def test_not_seen_needs_an_interval_that_does_not_lean_to_the_claim_and_a_size():
    f = dict(effect=-1.9, low=-3.3, high=-.4, p=.01, detectable=2.1, runs=5)
    assert verdict(f, -5., p=.07)=='open' and verdict({**f, 'high':.4}, -5., p=.07)=='not seen'
    assert verdict(f, 5., p=.07)=='not seen' and verdict(f, 5., p=.04)=='opposite' # 5 points up are out of reach
    assert verdict(f, 2., p=.07)=='open'
    null = {**f, 'high':.4, 'p':.2, 'detectable':.07}
    assert verdict(null)=='not seen' and verdict({**null, 'points':False})=='open'
    rs = [record(m, s, 60., bits=.5+s/100) for m in 'ab' for s in range(5)]
    assert (contrast(rs, 'a @bits', 'b @bits')['points'],contrast(rs, 'a', 'b')['points'])==(False, True)


def test_a_record_says_what_other_texts_would_move():
    def found(**more):
        rs = [record('a', s, 60., found=dict(top=55.+s%2, bare=50.), **more) for s in range(5)]
        return contrast(rs, 'a @found.top', 'a @found.bare')
    alone,known = found(),found(errors={'found.top':3.})
    assert known['effect']==alone['effect']==pytest.approx(5.4) and (alone['points'],known['points'])==(False, True)
    assert alone['high']-alone['low']<3<known['high']-known['low']==pytest.approx(2*1.96*3, rel=.15)


def test_texts_of_one_task_are_drawn_together():
    rng = np.random.default_rng(0)
    d = rng.choice([-100.,0.,100.], (1,200), p=[.1,.7,.2]).repeat(5, 0)
    def width(n, **how):
        f = paired([d]*n, [0*d]*n, **how)
        return f['high']-f['low']
    assert width(4, share=['t']*4)==pytest.approx(width(1), rel=.1) and width(4)<.7*width(1)
    rs = [record(m, s, 60.+s, backbone=b) for m in 'ab' for s in range(5) for b in ('x','y')]
    one = contrast([r for r in rs if r['backbone']=='x'], 'a', 'b')
    assert contrast(rs, 'a', 'b')['high']==pytest.approx(one['high'], rel=.1)
    apart = contrast([{**r, 'task':r['backbone']} for r in rs], 'a', 'b')
    assert apart['high']<.8*one['high']


def test_the_better_control_is_that_of_its_setting():
    controls = [record(m, s, v, task=t, validation=v) for s in range(5)
        for t,m,v in (('t','probe',80.), ('t','side-network',70.), ('u','probe',60.), ('u','side-network',90.))]
    mine = [record('a', s, 85., task=t, layer=layer) for s in range(5) for t in 'tu' for layer in (2,4)]
    for by,rs in (((), mine[::2]), (('layer',), mine)):
        assert claims._over('a', rs, controls, {}, by)['effect']==0. # 5 above the probe, 5 below the side network


@pytest.fixture
def results(tmp_path):
    "Two methods on 40 texts, five seeds: `a` is right, `b` on 30; a probe on 36"
    task = Task('t', labels=('x','y'), splits=dict(test=[dict(label=i%2) for i in range(40)]))
    good = np.eye(2)[[i%2 for i in range(40)]]
    (tmp_path/'claims/logits').mkdir(parents=True)
    for name,errs in (('runs', dict(a=0, b=10)), ('controls-b', dict(probe=4))):
        lines = []
        for m,n in errs.items():
            for s in range(5):
                out = good.copy()
                out[:n] = out[:n,::-1]
                np.savez(tmp_path/f'claims/logits/{m}{s}.npz', test=out.astype(np.float16))
                lines.append(json.dumps(record(m, s, 100-2.5*n, logits=f'logits/{m}{s}.npz')))
        (tmp_path/f'claims/{name}.jsonl').write_text('\n'.join(lines)+'\n')
    return tmp_path,task


def test_texts_are_paired_where_logits_are(results):
    folder,task = results
    rs = [json.loads(l) for l in (folder/'claims/runs.jsonl').read_text().splitlines()]
    f = contrast(rs, 'a', 'b', {'t':task}, folder/'claims')
    assert (f['effect'],f['texts'],f['runs'])==(25., 40, 5)
    assert (verdict(f, 20.),verdict(f, -20.),verdict(f, says='='))==('seen','opposite','opposite')
    assert right(rs[0], folder/'claims', task).tolist()==[100.]*40
    with pytest.raises(ValueError, match='give the data'):
        right(rs[0], folder/'claims', Task('t', labels=('x','y'), splits=dict(test=[dict(label=0)])))


def test_records_become_verdicts(results, monkeypatch, capsys):
    "By one command; the rest of the row stays; a second time nothing changes"
    from idp_tutorial.commands.reproduce import idp_reproduce
    from idp_tutorial.experiments import claims
    folder,task = results
    monkeypatch.setattr(claims, 'load_task', lambda *a: task)
    row = dict.fromkeys(COLUMNS, '')|dict(id='x', paper='LPT', where='§1', sentence='s', contrast='c', published='20',
        family='f', a='a', b='b', records='claims/runs.jsonl', verdict='open', decides='runs')
    counted = row|dict(id='y', a='', b='', family='', records='counted', verdict='seen')
    write_claims([row, counted], folder/'claims.csv')
    idp_reproduce(claims=str(folder/'claims.csv'), data='somewhere')
    assert 'seen (was open)' in capsys.readouterr().out
    one,two = read_claims(folder/'claims.csv')
    assert (one['effect'],one['texts'],one['verdict'],two)==('25.00', '40', 'seen', counted)
    assert one['above'].startswith('+10.0') and {k: one[k] for k in row if k not in MEASURED}=={
        k: row[k] for k in row if k not in MEASURED}
    assert judge([one, two], folder, 'somewhere')==[one, two]


def test_a_control_counts_where_it_saw_the_same_draws(tmp_path):
    row = dict(a='a', b='b', keep='', records='claims/runs.jsonl')
    (tmp_path/'claims').mkdir()
    def write(name, methods, draws):
        lines = [json.dumps(record(m, s, v, draw=d)) for m,v in methods.items() for d in range(draws) for s in range(2)]
        (tmp_path/f'claims/{name}.jsonl').write_text('\n'.join(lines)+'\n')
    write('runs', dict(a=80., b=70.), 4)
    for draws,above in ((1, None), (4, 5.)):
        write('controls-b', dict(probe=75., **{'side-network':60.}), draws)
        found,over = measured(row, tmp_path)
        assert found['effect']==10 and (over and over['effect'])==above


def test_a_family_is_corrected(results):
    folder,_ = results
    row = dict.fromkeys(COLUMNS, '')|dict(published='20', family='f', a='a', b='b', records='claims/runs.jsonl')
    alone, = judge([row|dict(id='0')], folder)
    many = judge([row|dict(id=str(i)) for i in range(4)], folder)
    assert float(many[0]['p'])==pytest.approx(4*float(alone['p']), rel=.2)


def test_the_claims_of_the_project():
    "Effects, intervals and verdicts are what the records say"
    rows = read_claims(CLAIMS)
    assert len(rows)>=40 and {r['paper'] for r in rows}=={'IDPG','LPT','ID-SPAM'}
    page = claims_page(rows)
    assert all(f"id=\"{r['id']}\"" in page for r in rows)
    for old,new in zip(rows, judge(rows, ROOT/'results')):
        for c in MEASURED:
            close = c in ('effect','low','high','p','detectable') and old[c] and new[c]
            assert float(old[c])==pytest.approx(float(new[c]), abs=.011) if close else old[c]==new[c], (old['id'], c)


def blocks(page):
    "Its paragraphs and lines of lists and tables, code left out"
    text = page.read_text(encoding='utf-8')
    if page.suffix=='.ipynb':
        cells = [c for c in json.loads(text)['cells'] if c['cell_type']=='markdown']
        text = '\n\n'.join(''.join(c['source']) for c in cells)
    return re.split(r'\n\s*\n|\n(?=[|*-] )', re.sub(r'```.*?```|`[^`]*`', '', text, flags=re.S))


PAGES = [ROOT/'README.md', ROOT/'nbs/index.ipynb', *sorted((ROOT/'nbs/course').glob('*.ipynb')),
    *sorted((ROOT/'nbs/lab').glob('*.ipynb'))]


def sentences(page):
    "`(sentence, ids that it links to, ids that its paragraph links to)`, with every white space one blank"
    for b in blocks(page):
        for s in re.split(r'(?<=[.!?])\s+(?!\d)', ' '.join(b.split())):
            yield s,LINK.findall(s),LINK.findall(b)


def without_row(page):
    "Sentences that say what a paper found, in a paragraph that links to no claim"
    return [s for s,_,links in sentences(page) if PAPER.search(s) and RESULT.search(s) and not links]


def said_of(sentence):
    "The verdicts that a sentence speaks of; `not seen` is taken out first"
    found,rest = [],re.sub(r'\]\([^)]*\)', ']', sentence)
    for v,words in VERDICT.items():
        if words.search(rest):
            found.append(v)
            rest = words.sub('', rest)
    return found


def against_row(page, verdicts):
    "Sentences with a verdict that none of their rows has, or without that of a row that they link to"
    for s,here,links in sentences(page):
        said = set(said_of(s))
        about = {verdicts[i] for i in here or (links if PAPER.search(s) else ()) if i in verdicts}
        if said and about and (said-about or here and about-said):
            yield s,sorted(said),sorted(about)


@pytest.mark.parametrize('page', PAGES, ids=lambda p: p.stem)
def test_what_a_paper_claims_has_its_row(page):
    "Where README, course or lab says that a paper found something better, its paragraph links to the claim"
    alone = without_row(page)
    assert not alone, f'without a link to claims.ipynb#ID: {alone}'


@pytest.mark.parametrize('page', PAGES, ids=lambda p: p.stem)
def test_a_verdict_in_prose_is_its_rows(page):
    "A sentence that says *seen*, *not seen*, *opposite* or *open* of a claim says what claims.csv says"
    wrong = [*against_row(page, {r['id']: r['verdict'] for r in read_claims(CLAIMS)})]
    assert not wrong, f'(sentence, it says, its rows say): {wrong}'


@pytest.mark.parametrize('text,n', [
    ('The paper has a gain of 3 points.', 1), ('See [it](claims.md#x): the paper gains 3 points.', 0),
    ('We gain 3 points.', 0), ('`the paper gains`', 0),
    ("So the paper's effect is there, and it is small.", 1),
    ("The static prompt learns fastest in the middle, as in the paper's Figure 2.", 1),
    ("Of IDPG's order (its Table 1: every layer above one) only the second half is seen here.", 1),
    ("On MiniLM the groups stand in the papers' order: input, every layer, late.", 1),
    ('In Table 6 ID-SPAM and SMoP lie within five points and prompt tuning sixteen below.', 1),
    ("More memory is saved than in the paper's columns.", 1),
    ("Where the model fills LPT's template, generators end 24 points and more above prompt tuning.", 1)])
def test_a_sentence_without_its_row_is_found(text, n, tmp_path):
    page = tmp_path/'page.md'
    page.write_text(text)
    assert len(without_row(page))==n


@pytest.mark.parametrize('text,n', [
    ('[This](claims.md#a) is *not seen*.', 0), ('[This](claims.md#a) is *seen*.', 1),
    ('[This](claims.md#b) is seen.', 0),
    ('[This](claims.md#b) is not seen here.', 1), ('Nothing of [this](claims.md#a) is seen.', 0),
    ('[This](claims.md#c) is *open*.', 0), ('[This](claims.md#c) is not seen in eight layers.', 1),
    ('[This](claims.md#a) is *not seen*, [that](claims.md#b) is *seen*.', 0),
    ('[This](claims.md#a) is the opposite.', 1), ('See [this](claims.md#a). The half of its Table 1 is seen here.', 1),
    ('See [this](claims.md#a). No prompt of ours is seen to add something.', 0)])
def test_a_sentence_against_its_row_is_found(text, n, tmp_path):
    page = tmp_path/'page.md'
    page.write_text(text)
    assert len([*against_row(page, dict(a='not seen', b='seen', c='open'))])==n


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


def kept(folder, name, label=(0,1,1), **kw):
    np.savez(folder/name, test=np.eye(2)[[0,1,0]], test_label=np.array(label))
    return dict(record('a', 0, 50.), logits=name, folder=folder, **kw)


def test_text_by_text_only_where_a_score_is_such_a_share(tmp_path):
    a = kept(tmp_path, 'a.npz')
    assert has_texts(a, tmp_path)
    for other in (dict(metric='accuracy+f1'), dict(metric='f1+exact'), dict(task='copa'), dict(metric='pearson')):
        assert not has_texts({**a, **other}, tmp_path)


def test_what_cannot_be_compared():
    with pytest.raises(ValueError, match='NaN'):
        paired([[1.,2.]]*2, [[1.,float('nan')]]*2)
    with pytest.raises(ValueError, match="'layer' is no condition"):
        contrast([], 'lpt layer 15', 'lpt')


def test_one_more_seed_of_one_task_hides_no_other():
    rs = [record(m, s, 50.+s, task=t) for m in 'ab' for t,n in (('x',5), ('y',6)) for s in range(n)]
    found = contrast(rs, 'a', 'b')
    assert found['runs']==5 and [s[0] for s in found['settings']]==['x','y']


def test_a_claim_that_its_records_leave_open_says_what_would_decide_it(tmp_path):
    sides = dict(id='i', a='lpt', b='probe', records='none.jsonl', family='f')
    row = dict.fromkeys(COLUMNS, '') | sides | dict(verdict='seen')
    with pytest.raises(ValueError, match="claim 'i' is open with these records"):
        judge([row], tmp_path)
    assert judge([row|dict(decides='more seeds')], tmp_path)[0]['verdict']=='open'


I,L1,L2,L4 = 'idpg-1','lpt-1','lpt-2','lpt-4'
PRINTED = { # a claim's difference: table, two rows of it, and what of them if not the mean of all tasks
    'idpg-m-over-prompt':(I, 'M-IDPG-PHM', 'Prompt-tuning', {}), 'idpg-m-over-ptv2':(I, 'M-IDPG-PHM', 'Ptuningv2', {}),
    'idpg-compacter':(I, 'M-IDPG-PHM', 'Compacter', {}), 'idpg-phm-dnn':(I, 'S-IDPG-PHM', 'S-IDPG-DNN', {}),
    'idpg-phm-dnn-m':(I, 'M-IDPG-DNN', 'M-IDPG-PHM', {}), 'idpg-glove':(I, 'M-IDPG-PHM-GloVe', 'M-IDPG-PHM', {}),
    'idpg-134':(I, 'M-IDPG-PHM', 'Prompt-tuning-134', {}), 'idpg-instance':(I, 'S-IDPG-PHM', 'Prompt-tuning', {}),
    'idpg-glove-wins':(I, 'M-IDPG-PHM-GloVe', 'Prompt-tuning', {}), 'idpg-multi':(I, 'M-IDPG-PHM', 'S-IDPG-PHM', {}),
    'idpg-k100':('idpg-3', 'M-IDPG-PHM', 'prompt tuning', dict(setting=['K=100'])),
    'idpg-k100-ptv2':('idpg-3', 'M-IDPG-PHM', 'P-Tuningv2', dict(setting=['K=100'])),
    'lpt-late':(L1, 'LPT w/o PG', 'Prompt Tuning', {}), 'lpt-late-lm':(L1, 'LPT w/o PG', 'Prompt Tuning', {}),
    'lpt-all-prompts':(L1, 'LPT w/ NPG', 'S-IDPG-PHM', {}), 'lpt-adapterdrop':(L1, 'LPT w/ MPPG', 'AdapterDrop', {}),
    'lpt-npg':(L4, 'LPT w/ NPG', 'LPT w/o PG', {}), 'lpt-npg-lm':(L4, 'LPT w/ NPG', 'LPT w/o PG', {}),
    'lpt-other-ptms':(L4, 'LPT w/o PG', 'Prompt Tuning', {}), 'lpt-50':(L2, 'LPT w/ NPG', 'Model Tuning', {}),
    'lpt-71':(L2, 'LPT w/ NPG', 'Adapter', {}), 'lpt-ppg-few':(L2, 'LPT w/ MPPG', 'LPT w/ NPG', {}),
    'lpt-124':(L2, 'LPT w/ NPG', 'Prompt Tuning', dict(task=['SST-2','TREC'])),
    'lpt-124-trec':(L2, 'LPT w/ NPG', 'Prompt Tuning', dict(task=['TREC'])),
    'spam-lpt':('id-spam-2', 'ID-SPAM', 'LPT', dict(task=['Avg'], backbone=['RoBERTa-base'])),
    'spam-lora':('id-spam-2', 'ID-SPAM', 'LoRA', dict(task=['Avg'], backbone=['RoBERTa-base'])),
    'spam-attention':('id-spam-3', 'ID-SPAM', 'Mean-pooling', dict(task=['MRPC','RTE','QQP'])),
    'spam-zero':('id-spam-6', 'ID-SPAM', 'LPT', dict(task=['QQP->MRPC','MRPC->QQP','SST-2->IMDB','IMDB->SST-2'])),
    'spam-few':('id-spam-11', 'ID-SPAM', 'LPT', dict(task=['QQP->MRPC'])),
    'spam-gpt2':('id-spam-8', 'ID-SPAM', 'LPT', {})}


@pytest.mark.parametrize('one', PRINTED)
def test_a_published_difference_is_that_of_its_table(one):
    row = next(r for r in read_claims(CLAIMS) if r['id']==one)
    table,a,b,only = PRINTED[one]
    cells = published_scores(table)
    for column,values in dict(task=['Avg'], **only).items() if 'task' not in only else only.items():
        cells = cells[cells[column].isin(values)]
    means = cells.groupby('method')['mean'].mean()
    assert float(row['published'])==pytest.approx(means[a]-means[b], abs=.06)


def test_every_published_size_is_from_a_table_or_a_figure():
    elsewhere = {'idpg-single','idpg-m16','idpg-input','idpg-sml','idpg-residual'} # of variants, or a part of the tasks
    assert {r['id'] for r in read_claims(CLAIMS) if r['published'] and r['a']}=={*PRINTED}|elsewhere


def test_a_row_says_its_records_and_what_would_say_more():
    row = dict.fromkeys(COLUMNS, '') | dict(id='a', paper='P', where='§1', sentence='s', contrast='c', decides='more')
    ran = row | dict(a='x', b='y', records='r.jsonl', effect='1', low='0', high='2', runs='5', detectable='1')
    def last(r): return claims_page([r]).splitlines()[-1].split('|')[-2].strip()
    decided = ran | dict(verdict='seen', tasks='trec', backbones='tiny')
    assert last(decided)=='trec with tiny: `r.jsonl`; to say more: more'
    assert last(ran | dict(verdict='open', effect=''))=='to decide it: more' # its records are still to come
    assert last(row | dict(verdict='seen', records='counted', decides=''))=='counted'


@pytest.mark.parametrize('text', ['{"sentence1": "a precious record"}\n', '', ','.join(COLUMNS)+'\n'])
def test_a_file_without_claims_stays_as_it_is(text, tmp_path, capsys):
    from idp_tutorial.commands.reproduce import idp_reproduce
    (tmp_path/'f').write_text(text)
    with pytest.raises(SystemExit) as e:
        idp_reproduce(claims=str(tmp_path/'f'))
    assert e.value.code==2 and 'holds no claims' in capsys.readouterr().err and (tmp_path/'f').read_text()==text
