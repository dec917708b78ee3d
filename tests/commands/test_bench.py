"Timing through `fit` and beside peft: turns, rows, a backbone that comes back as it was. No test looks at a time."
import json
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from small import backbone

from idp_tutorial.commands import bench as room
from idp_tutorial.commands.bench import idp_bench
from idp_tutorial.efficiency import growth, peft_times
from idp_tutorial.efficiency import method_times as turns
from idp_tutorial.efficiency.cost_model import ONE_ROW, paper_speeds, speed_up
from idp_tutorial.efficiency.growth import GROW, grow, plot_growth
from idp_tutorial.efficiency.method_times import LENGTHS, Variant, base_config, bench, made_task, variants
from idp_tutorial.efficiency.peft_times import PEFT, steps
from idp_tutorial.methods.registry import METHODS
from idp_tutorial.model import pretrained
from idp_tutorial.model.pretrained import load_backbone
from idp_tutorial.records import stored

FAMILY = ('roberta','bert','gpt2','deberta')
ROW = {'method','layer','cached','t','refused','ms','spread','ratio','tokens_per_ms','ideal','share','mb','saved',
    'paper','paper_saved','weights_dtype'}

def tiny_base(bb, **kw): return base_config(bb, **{**dict(batch_size=2, length=24, m=8), **kw})
def state(bb): return {n: p.detach().clone() for n,p in bb.model.state_dict().items()}

def as_it_was(bb, before):
    "Same tensors (fine-tuning at a rate of 1e-8 moves nothing), nothing trained, no gradient, eval mode"
    now = bb.model.state_dict()
    return now.keys()==before.keys() and all(torch.allclose(now[n], before[n], atol=1e-5)
        for n in now) and not hasattr(bb, 'changed') \
        and not any(p.requires_grad or p.grad is not None for p in bb.model.parameters()) and not any(m.training
        for m in bb.model.modules())

# --- texts and variants

@pytest.mark.parametrize('template', [None,'code'])
@pytest.mark.parametrize('family', ['roberta','gpt2'])
def test_texts_have_the_wanted_length(family, template):
    bb,task = backbone(family),made_task(5, 30)
    assert {s: len(r) for s,r in task.splits.items()}==dict(train=5, validation=1, test=1)
    texts = task.encode(task.splits['train'], bb.tokenizer, 30, template)
    assert {len(e['ids']) for e in texts}=={30} and len({tuple(e['ids']) for e in texts})==5 and {e['label']
        for e in texts}=={0,1}
    assert made_task(5, 30).splits==task.splits

def test_variants():
    v = variants(['lpt-npg','head-only','adapterdrop','prompt-tuning','lpt-npg','m-idpg-phm','m-idpg-phm-glove'], 24,
        [6,18])
    assert [o[:3] for o in v]==[('fine-tuning',None,False), ('lpt-npg',6,False), ('lpt-npg',6,True),
        ('lpt-npg',18,False), ('lpt-npg',18,True), ('head-only',None,False), ('head-only',None,True),
        ('adapterdrop',12,False), ('adapterdrop',12,True), ('prompt-tuning',None,False), ('m-idpg-phm',None,False),
        ('m-idpg-phm',None,True), ('m-idpg-phm-glove',None,False)]
    assert [o.layer for o in variants(['lpt'], 24, cached=False)[1:]]==[6,12,18] and variants([],
        3)==[Variant('fine-tuning')]
    assert [(o.layer,o.cached) for o in variants(['id-spam'], 3, [0])[1:]]==[(0,False)] # nothing lies below
    assert [o.layer for o in variants(['lpt'], 1, cached=False)[1:]]==[0]

def test_lengths_are_the_papers():
    assert (LENGTHS['prompt-tuning'],LENGTHS['p-tuning-v2'],LENGTHS['s-idpg-phm'],LENGTHS['lpt-npg'],
        LENGTHS['lpt-appg'])==(20,20,5,5,10) and LENGTHS.keys()<=METHODS.keys()

# --- through fit, with `fit` replaced: who comes when, and what is made of it

@pytest.fixture
def fits(monkeypatch):
    "Records the config of each `fit`; `times[method]` are its times, one a call"
    seen,times = [],{}
    def fit(model, task, cfg):
        seen.append(cfg)
        return dict(ms_per_step=times.get(cfg.method, [10.]*99)[sum(c.method==cfg.method and c.layer==cfg.layer
            and c.cache==cfg.cache for c in seen)-1], peak_memory_mb={'fine-tuning':800.}.get(cfg.method, 200.))
    monkeypatch.setattr(turns, 'fit', fit)
    monkeypatch.setattr(turns.gc, 'collect', lambda: 0)
    return seen,times

def test_turns_ratios_and_warm_up(fits):
    seen,times = fits
    times.update({'fine-tuning':[999.,30,60,90], 'lora':[999.,10,30,20], 'head-only':[999.,1,2,3]})
    said = []
    rows = bench(backbone(), variants(['lora','head-only'], 3, cached=False), base_config(backbone(), 2, 24), repeats=3,
        say=said.append)
    assert [c.method for c in seen]==['fine-tuning','lora','head-only']*4 and said==['warmed up','round 1 of 3',
        'round 2 of 3','round 3 of 3']
    # of 30/10, 60/30, 90/20 the middle one
    assert [r['ms'] for r in rows]==[60,20,2] and [r['ratio'] for r in rows]==[1,3,30]
    assert [r['saved'] for r in rows]==[0,.75,.75] and rows[1]['tokens_per_ms']==2*24/20
    assert all((c.steps,c.max_len,c.readout)==(3,24,'cls') for c in seen) and len({c.cache_dir for c in seen})==1

def test_rows_beside_model_and_paper(fits, monkeypatch):
    monkeypatch.setattr(turns, 'build', lambda cfg, bb, task: None)
    bb = load_backbone('roberta-large', weights='meta')
    rows = bench(bb, variants(['prompt-tuning','lpt-npg','adapterdrop','head-only','m-idpg-phm'], 24, [6,12,13]),
        base_config(bb, 4, 64), repeats=1, warmup=0)
    by = {(r['method'],r['layer'],r['cached']): r for r in rows}
    assert set(rows[0])==ROW and by['fine-tuning',None,False]['paper']==1 and by['fine-tuning',None,False]['t'] is None
    p = paper_speeds().set_index(['backbone','method'])
    assert np.isclose(by['prompt-tuning',None,False]['paper'],
        16.9/11.6) and np.isclose(by['prompt-tuning',None,False]['paper_saved'], 1-17.8/23.5)
    assert np.isclose(by['lpt-npg',12,False]['paper'], 2) and np.isclose(by['lpt-npg',6,False]['paper'],
        18.5/11.6) and np.isclose(by['adapterdrop',12,False]['paper'], 21.6/11.6)
    assert all(by[k]['paper'] is None for k in (('lpt-npg',12,True), ('lpt-npg',13,False),
        ('m-idpg-phm',None,False))) and len(p)==28
    r,last = by['lpt-npg',12,True],ONE_ROW if bb.reads_one_row else 1.
    assert np.isclose(r['ideal'], speed_up('lpt-npg', 24, 12, True, t=5, T=64, d=1024,
        last=last)) and np.isclose(r['share'], r['ratio']/r['ideal']) and r['t']==5
    # nothing is left to do
    assert by['head-only',None,True]['ideal'] is None and by['head-only',None,True]['share'] is None

def test_a_family_that_cannot_take_a_method(fits, monkeypatch):
    def no(bb, cfg):
        raise ValueError('not on this one')
    monkeypatch.setitem(METHODS, 'lora', replace(METHODS['lora'], build=no))
    seen,_ = fits
    bb = backbone()
    rows = bench(bb, variants(['lora','bitfit'], 3), base_config(bb, 2, 24), repeats=2)
    assert [r['refused'] for r in rows]==[None,'not on this one',None] and 'ms' not in rows[1] and rows[2]['ms']==10
    monkeypatch.setitem(METHODS, 'fine-tuning', replace(METHODS['fine-tuning'], build=no))
    with pytest.raises(ValueError, match='not on this one'):
        bench(bb, variants(['bitfit'], 3), base_config(bb, 2, 24), repeats=1) # no yardstick

@pytest.mark.parametrize('method', ['fine-tuning','lora','adapter','bitfit'])
def test_an_interrupted_turn_gives_the_backbone_back(method, monkeypatch):
    def stop(*args):
        raise KeyboardInterrupt
    bb = backbone()
    before = state(bb)
    monkeypatch.setattr(turns, 'fit', stop)
    with pytest.raises(KeyboardInterrupt): bench(bb, [Variant(method)], base_config(bb, 2, 24), repeats=1)
    assert as_it_was(bb, before)

# --- the real thing, on small models

SOME = ['prompt-tuning','p-tuning-v2','s-idpg-phm','lpt-npg','id-spam','lora','adapterdrop']
@pytest.mark.parametrize('family', FAMILY)
def test_every_method_is_timed(family):
    bb = backbone(family, max_position_embeddings=258) if family!='bert' else backbone(family)
    before,plan = state(bb),variants(METHODS if family=='roberta' else SOME, 3, [1])
    rows = bench(bb, plan, tiny_base(bb), repeats=1, warmup=0)
    assert [(r['method'],r['layer'],r['cached'],r['weights_dtype']) for r in rows]==plan
    assert all(r['refused'] is None and r['ms']>0 and r['ratio']>0 for r in rows)
    assert as_it_was(bb, before) and json.loads(json.dumps(rows))==rows
    mb = {r['method']: r['mb'] for r in rows}
    weights = sum(p.numel() for p in bb.model.parameters())*4e-6
    assert all(v>weights for v in mb.values()) and mb['fine-tuning']==max(mb[m] for m in SOME
        +['fine-tuning']) and rows[0]['saved']==0 and rows[0]['ratio']==1

@pytest.mark.parametrize('cached', [False,True])
def test_cached_variants_really_go_on_from_states(cached, monkeypatch):
    bb = backbone()
    started = set()
    inner = turns.fit
    def fit(model, task, cfg):
        context = model.context
        def watched(batch):
            if model.training: started.add((cfg.method, 'hidden' in batch, 'sentence' in batch))
            return context(batch)
        model.context = watched
        return inner(model, task, cfg)
    monkeypatch.setattr(turns, 'fit', fit)
    bench(bb, [Variant('fine-tuning'),Variant('lpt-npg',2,cached),Variant('s-idpg-phm',None,cached)], tiny_base(bb),
        repeats=1, warmup=0)
    assert started=={('fine-tuning',False,False), ('lpt-npg',cached,False), ('s-idpg-phm',False,cached)}

def test_a_verbalizer_head():
    bb = backbone()
    rows = bench(bb, variants(['prompt-tuning','lpt-npg'], 3, [1]), tiny_base(bb, head='verbalizer'), repeats=1,
        warmup=0)
    assert len(rows)==4 and all(r['ms']>0 for r in rows)

# --- plain steps, Hugging Face and peft

@pytest.mark.parametrize('family,peft', [('roberta',PEFT), ('gpt2',PEFT), ('bert',()),
    ('deberta',('prompt-tuning','p-tuning'))])
def test_beside_peft(family, peft):
    bb = backbone(family, max_position_embeddings=258) if family!='bert' else backbone(family)
    before,said = state(bb),[]
    rows = steps(bb, tiny_base(bb), True, t=4, repeats=1, warmup=1, say=said.append)
    names = [r['name'] for r in rows]
    both = (*peft,'lora') if family!='bert' else () # Hugging Face's classifier needs a pooler, which this BERT has not
    assert names==['fine-tuning','forward, Hugging Face','forward']+[n for m in both for n in (m,f'peft {m}')], (names,
        said)
    assert len(said)==len(PEFT)+1-len(both) and all(s.startswith('no ') and family in s for s in said)
    ms = {r['name']: r['ms'] for r in rows}
    assert all((r['over_ours'] is not None)==(r['name'].startswith('peft') or 'Hugging' in r['name']) for r in rows)
    assert np.isclose(rows[1]['over_ours'], ms['forward, Hugging Face']/ms['forward']) and (not both
        or np.isclose(rows[-1]['over_ours'], ms['peft lora']/ms['lora']))
    assert as_it_was(bb, before)

def test_both_sides_have_the_same_weights(monkeypatch):
    bb,made = backbone(max_position_embeddings=258),[]
    inner = peft_times._stepper
    monkeypatch.setattr(peft_times, '_stepper', lambda model, *a: made.append(model) or inner(model, *a))
    steps(bb, tiny_base(bb), True, t=4, repeats=1, warmup=1)
    whole,*pairs = made
    own = {p.data_ptr() for p in bb.base.parameters()}
    for ours,theirs in zip(pairs[::2], pairs[1::2]):
        frozen,trained = [{p.data_ptr() for n,p in theirs.named_parameters() if p.requires_grad==flag
            and 'classifier' not in n} for flag in (False,True)]
        if any('lora' in n for n,_ in theirs.named_parameters()):
            mine = {p.data_ptr() for n,p in ours.named_parameters() if p.requires_grad and not n.startswith('head')}
            assert trained==mine and len(mine)==3*2*2 and not mine&own
        else: assert own<=frozen and trained and own<={p.data_ptr() for p in ours.parameters()}
    assert own<={p.data_ptr() for p in whole.parameters()}

def test_the_plain_step_trains_what_it_should():
    bb = backbone()
    before = state(bb)
    rows = []
    class Watch(torch.optim.AdamW):
        def step(self):
            rows.append(sum(p.grad is not None for g in self.param_groups for p in g['params']))
            super().step()
    with pytest.MonkeyPatch.context() as m:
        m.setattr(torch.optim, 'AdamW', Watch)
        steps(bb, tiny_base(bb), repeats=1, warmup=1)
    # every tensor of the encoder, and the head's two
    assert rows==[len(list(bb.base.parameters()))+2]*2 and as_it_was(bb, before)

# --- growth

@pytest.mark.parametrize('what,values,check', [('t',[2,9],lambda c, v: c.t==v),
    ('length',[16,40],lambda c, v: c.max_len==v), ('batch',[1,3],lambda c, v: c.batch_size==v),
    ('depth',[0,2],lambda c, v: c.layer==v)])
def test_one_thing_grows(what, values, check, fits):
    bb = backbone()
    rows = grow(what, bb, base_config(bb, 2, 24), ['lpt-npg','prompt-tuning'], values, repeats=1, warmup=0)
    seen,_ = fits
    assert all(check(c, r['value']) for c,r in zip(seen, rows) if c.method=='lpt-npg') and {r['grow']
        for r in rows}=={what}
    late = [(r['value'],r['cached']) for r in rows if r['method']=='lpt-npg']
    assert late==([(0,False),(2,False),(2,True)] if what=='depth' else [(v,c) for v in values for c in (False,True)])
    assert {r['method'] for r in rows}=={'fine-tuning','lpt-npg',*(() if what=='depth' else ('prompt-tuning',))}
    assert {c.max_len for c in seen}==(set(values) if what=='length' else {24}) and {c.batch_size
        for c in seen}==(set(values) if what=='batch' else {2})

def test_depth_goes_through_the_whole_model(fits):
    bb = backbone()
    rows = grow('depth', bb, base_config(bb, 2, 24), repeats=1, warmup=0)
    assert [r['value'] for r in rows if not r['cached'] and r['method']=='lpt-npg']==[0,1,2]

def test_plot_of_growth(capsys):
    assert plot_growth([]) is None and capsys.readouterr().out
    plot_growth([dict(method='lora', ms=1.)])
    out = capsys.readouterr().out # rows of another kind are no growth
    assert all(f'idp_bench --backbone roberta-large --grow {w} --out results/' in out for w in GROW)
    def row(w, m, v): return dict(grow=w, value=v, method=m, cached=False, ms=1., ratio=v/10, ideal=v/20)
    fig = plot_growth([row(w, m, v) for w in ('t','batch') for m in ('fine-tuning','lpt-npg') for v in (8,2,4)])
    assert [ax.get_xlabel() for ax in fig.axes]==['prompt length $t$','texts a batch']
    dots,line = fig.axes[0].lines
    assert dots.get_marker()=='o' and [*dots.get_xdata()]==[2,4,8] and np.allclose(dots.get_ydata(),
        (.2,.4,.8)) and np.allclose(line.get_ydata(), (.1,.2,.4)) and len(fig.axes[0].lines)==2
    plt.close(fig)

# --- the command

FAST = dict(methods='prompt-tuning,lpt-npg', layers='1', batch_size=2, length=24, repeats=1, warmup=0, device='cpu')

def test_the_command(small_folder, capsys, tmp_path):
    out = tmp_path/'new'/'bench.jsonl'
    idp_bench(str(small_folder), **FAST, json=True, out=str(out))
    said = capsys.readouterr()
    rows = [json.loads(l) for l in said.out.splitlines()]
    assert stored(out)==rows and 'round 1 of 1' in said.err
    assert [(r['method'],r['layer'],r['cached']) for r in rows if 'refused' in r]==[('fine-tuning',None,False),
        ('prompt-tuning',None,False),('lpt-npg',1,False),('lpt-npg',1,True)]
    assert [r['method'] for r in rows if r.get('plain')]==['fine-tuning','forward, Hugging Face','forward']
    assert all(r['backbone']==small_folder.name and r['batch_size']==2 and r['length']==24 and r['device']=='cpu'
        and r['threads']>0 and r['versions']['torch'] and r['ms']>0 for r in rows)
    # no path of this machine
    assert str(tmp_path) not in out.read_text() and str(small_folder.parent) not in out.read_text()

def test_the_commands_table(small_folder, capsys):
    idp_bench(str(small_folder), **FAST)
    out = capsys.readouterr().out
    assert all(w in out for w in ('2 × 24 tokens','ratio','ideal','share','saved','tokens_per_ms',
        'forward, Hugging Face','over_ours')) and 'nan' not in out.lower() and 'versions' not in out
    idp_bench(str(small_folder), **{**FAST, 'layers':None}, grow='length', values='16,32')
    out = capsys.readouterr().out
    assert 'value' in out and [l.split()[-1] for l in out.splitlines() if 'prompt-tuning' in l]==['16','32']

def test_what_is_measured_is_written_at_once(small_folder, tmp_path, monkeypatch, capsys):
    inner,out = growth.grow,tmp_path/'g.jsonl'
    def stops(*a, **kw):
        if out.exists():
            raise KeyboardInterrupt
        return inner(*a, **kw)
    monkeypatch.setattr(growth, 'grow', stops)
    with pytest.raises(SystemExit):
        idp_bench(str(small_folder), **{**FAST, 'methods':'lora', 'layers':None}, grow='batch', values='1,3',
            out=str(out))
    assert [(r['method'],r['batch_size'],r['value'],r['grow'])
        for r in map(json.loads, out.read_text().splitlines())]==[('fine-tuning',1,1,'batch'), ('lora',1,1,'batch')]

def test_precision_reaches_both_kinds_of_step(monkeypatch):
    bb,seen = backbone(),[]
    monkeypatch.setattr(bb, 'layer', lambda *a, f=bb.layer,
        **kw: (seen.append(torch.is_autocast_enabled('cpu')), f(*a, **kw))[1])
    bench(bb, [Variant('fine-tuning')], tiny_base(bb, precision='bf16'), repeats=1, warmup=0)
    n = len(seen)
    assert True in seen # `evaluate` does without
    steps(bb, tiny_base(bb, precision='bf16'), repeats=1, warmup=1)
    assert len(seen)>n and all(seen[n:])
    n = len(seen)
    steps(bb, tiny_base(bb), repeats=1, warmup=1)
    assert not any(seen[n:])

def test_growing_texts_get_a_position_table(monkeypatch):
    monkeypatch.setattr(pretrained, 'load_backbone', lambda name, weights=None, **kw: load_backbone(name, 'meta', **kw))
    assert room._load('roberta-base', 'length', 2000, 50).max_tokens>=2050 and room._load('roberta-base', None, 2000,
        50).max_tokens==512 and room._load('roberta-base', 'batch', 64, 20).max_tokens>=512

@pytest.mark.parametrize('kw,words', [(dict(methods='lpt,lpt_npg'),
    ["unknown method 'lpt_npg'","did you mean 'lpt-npg'?"]), (dict(layers='3'),['layer 3','0 to 2']),
    (dict(layers='one'),["--layers 'one'",'6,12,18']),
    (dict(device='gpu'),["device 'gpu'","'cuda'"]), (dict(device='cuda'),['no GPU','--device cpu|cpu']),
    (dict(length=250),['250','20 prompt positions',"'prompt-tuning'",'256','length=236','t)']),
    (dict(length=300, methods='lora'),['length 300','256','length=256']), (dict(t=0),['t=0','at least 1']),
    (dict(repeats=0),['repeats=0']), (dict(grow='width'),["'width'",'t, length, depth, batch']),
    (dict(grow='t', values='a'),["--values 'a'"]), (dict(values='3'),['is not read without --grow']),
    (dict(grow='t', peft=True),['--peft True is not read with --grow']),
    (dict(batch_size=0),['batch_size=0']), (dict(precision='int8'),["'int8'","'bf16'"]),
    (dict(head='verbaliser'),["'verbaliser'","'verbalizer'"]), (dict(backbone='nowhere'),["no backbone 'nowhere'"]),
    (dict(out='.'),['--out .','folder']), (dict(out='/dev/null/x/y.jsonl'),['nowhere one can write'])],
    ids=lambda v: str(v)[:40])
def test_the_command_says_why(kw, words, small_folder, capsys, monkeypatch, fits):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    fast = {k: v for k,v in FAST.items() if not ('grow' in kw and k=='layers')}
    with pytest.raises(SystemExit) as e: idp_bench(**{'backbone':str(small_folder), **fast, **kw})
    said = capsys.readouterr()
    last = said.err.splitlines()[-1]
    assert e.value.code==2 and said.out=='' and last.startswith('idp_bench: ') and all(any(o in last
        for o in w.split('|')) for w in words), said.err

def test_all_that_the_tables_show_is_one_command(small_folder, tmp_path, monkeypatch):
    from idp_tutorial.efficiency import speed_tables
    monkeypatch.setattr(speed_tables, 'SPEED', ('lpt-npg','lora'))
    out = tmp_path/'speed.jsonl'
    idp_bench(backbone=str(small_folder), tables=True, repeats=1, length=8, batch_size=2, t=2, device='cpu',
        out=str(out), json=True)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {r['part'] for r in rows}=={'methods','beside peft','answers',*(f'growth with {w}'
        for w in ('batch','length','depth'))}
    assert {(r['method'],r['weights_dtype']) for r in rows if r['part']=='methods'}=={('fine-tuning','float32'),
        *((m, d) for m in ('lpt-npg','lora') for d in ('float32','bfloat16'))}
    assert all(r['ms']>0 for r in rows) and all(r['texts_per_s']>0 for r in rows if r['part']=='answers')

def test_only_what_was_measured_under_the_same_conditions_is_left_out(tmp_path, monkeypatch):
    from types import SimpleNamespace

    from idp_tutorial.records import append
    asked = dict(backbone='small', batch_size=2, length=8, repeats=1, head='classification', precision='no', t=None,
        device='cpu', out=tmp_path/'speed.jsonl')
    row = {k: asked[k] for k in ('backbone','batch_size','length','repeats','head','precision','device')}
    row |= dict(threads=torch.get_num_threads(), weights_dtype='float32')
    for part in ('methods','answers','beside peft'):
        append({**row, 'part':part}, asked['out'])
    append({**row, 'part':'growth with batch', 'device':'H200'}, asked['out'])
    def there(**other): return {part for part,_ in room._there(SimpleNamespace(**{**asked, **other}))}
    assert there()=={'methods','answers','beside peft'} and there(t=2)=={'methods','answers'}
    assert not there(precision='bf16') and not there(batch_size=4)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda: 'H200')
    assert there(device='auto')=={'growth with batch','answers'}
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 77)
    assert not there()
