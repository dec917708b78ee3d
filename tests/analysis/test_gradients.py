"What chooses and judges a prompt layer: gradients, information, the choice, sweeps that go on where they stopped and keep to themselves, and what is read from their records."
import json, math, subprocess, sys
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
import pytest, torch
import torch.nn.functional as F
from idp_tutorial.analysis import depth, layer_sweep as sweeps
from idp_tutorial.experiments import comparison, run as experiments
from idp_tutorial.analysis.depth import regret, sweep_shape, tradeoff_table
from idp_tutorial.analysis.layer_choice import layer_choice, made_for
from idp_tutorial.analysis.layer_sweep import sweep_file
from idp_tutorial.commands.sweep import idp_sweep
from idp_tutorial.analysis.information import Probe, StateProbe, mutual_information, probe_layers, states_by_layer
from idp_tutorial.model.layer_loop import run_layers
from idp_tutorial.model.plan import Step
from idp_tutorial.methods.lpt import NaivePromptGenerator, lpt_plan
from idp_tutorial.model.heads import ClassificationHead, VerbalizerHead
from idp_tutorial.model.prompted_model import PromptedModel
from idp_tutorial.analysis.probes import layer_features
from idp_tutorial.analysis.gradients import gradient_norms, plot_gradients, prompt_gradients
from idp_tutorial.analysis.layer_choice import choose_prompt_layer
from idp_tutorial.analysis.probes import entropy, linear_bits, logistic
from idp_tutorial.methods.prompt_tuning import SoftPrompt
from idp_tutorial.records import read_records
from idp_tutorial.analysis.layer_sweep import information_curves, one_sweep, plot_convergence, plot_information, plot_sweep, sweep_prompt_layer, sweep_table
from idp_tutorial.data.tasks import load_task
from idp_tutorial.config import RunConfig
import small
from small import batch_of, one, small_task

FAMILY = ('roberta','bert','gpt2','deberta')
backbone = cache(small.backbone)

def same(a, b, atol=1e-5, rtol=1e-5): torch.testing.assert_close(a, b, atol=atol, rtol=rtol)

def setting(family='roberta', n=24, head='classification', name='sentiment'):
    bb,task = backbone(family),small_task(name)
    examples = task.encode(task.splits['train'][:n], bb.tokenizer, 60, 'code' if head=='verbalizer' else None)
    torch.manual_seed(0)
    reader = VerbalizerHead(bb, task.word_ids(bb.tokenizer)) if head=='verbalizer' else ClassificationHead(bb.d,
        len(task.labels), 'mean')
    return bb,task,examples,reader

# --- states and gradients

@pytest.mark.parametrize('family', FAMILY)
def test_layer_features_are_hugging_faces(family):
    bb,task,examples,_ = setting(family, 7)
    got = layer_features(bb, examples, batch_size=3)
    assert got.shape==(4,7,32) and not got.requires_grad
    for i,e in enumerate(examples):
        x = dict(input_ids=torch.tensor([e['ids']]), attention_mask=torch.ones(1, len(e['ids'])).long())
        with torch.no_grad():
            hidden = bb.model(**x, output_hidden_states=True).hidden_states # Hugging Face norms the last of GPT-2's
        same(got[:,i], torch.stack([h[0].mean(0) for h in hidden]), 1e-4)

def test_logistic_is_the_minimum():
    torch.manual_seed(0)
    x,y = torch.randn(60, 5)*torch.tensor([1.,10,.1,3,1])+4,torch.randint(3, (60,))
    W,b = logistic(x, y, 3, l2=6.)
    z = (x-x.mean(0))/x.std(0, correction=0)
    V = (W*x.std(0, correction=0)).requires_grad_()
    c = (b+W@x.mean(0)).detach().requires_grad_()
    (F.cross_entropy(z@V.T+c, y)+6*V.pow(2).sum()/120).backward()
    assert V.grad.abs().max()<2e-3 and c.grad.abs().max()<2e-3
    assert V.norm()>1e-2 and logistic(x, y, 4)[0].shape==(4,5) # a class that does not occur

@pytest.mark.parametrize('head', ['classification','verbalizer'])
@pytest.mark.parametrize('layer', [0,1,2])
@pytest.mark.parametrize('family', FAMILY)
def test_gradients_of_each_text(family, layer, head):
    "They add up to that of a static prompt's vectors, are those of the text alone, and start from given states as well"
    bb,task,examples,reader = setting(family, 6, head)
    batch = batch_of(bb, task, 6, 'code' if head=='verbalizer' else None)
    torch.manual_seed(1)
    source = SoftPrompt(4, bb.d, std=1.)
    model = PromptedModel(bb, reader, lpt_plan(bb, source, layer)).eval()
    model.loss(batch).backward()
    G = prompt_gradients(bb, reader, batch, layer, source.p)
    assert G.shape==(6,4,32) and G[0].abs().max()>1e-6 and (G[0]-G[1]).abs().max()>1e-6
    same(G.mean(0), source.p.grad, 1e-6, 1e-3)
    same(torch.cat([prompt_gradients(bb, reader, one(batch, i), layer, source.p) for i in range(6)]), G, 1e-5, 1e-3)
    same(prompt_gradients(bb, reader, batch, layer, source.p.expand(6, -1, -1), run_layers(bb, batch, stop=layer).h), G,
        1e-6, 1e-4)

def test_gradient_norms_by_hand():
    bb,task,examples,head = setting(n=5)
    X = layer_features(bb, examples)
    got = gradient_norms(bb, head, examples, X, layers=[2,0], t=3, batch_size=2)
    assert [r['layer'] for r in got]==[2,0]
    for r in got:
        k = r['layer']
        G,length = [],[]
        for e in examples:
            b = dict(ids=torch.tensor([e['ids']]), keep=torch.ones(1, len(e['ids'])).long(),
                types=torch.zeros(1, len(e['ids'])).long(), label=torch.tensor([e['label']]))
            p = X[k].mean(0).repeat(1, 3, 1).requires_grad_()
            head.loss(run_layers(bb, b, {k: Step('insert', lambda ctx: p)}), b['label']).backward()
            G.append(p.grad.flatten())
            length += run_layers(bb, b, stop=k).h[0].norm(dim=-1).tolist()
        G = torch.stack(G)
        norm = G.norm(dim=1).mean().item()
        assert r['norm']==pytest.approx(norm, rel=1e-3) and r['agreement']==pytest.approx(G.mean(0).norm().item()/norm,
            rel=1e-3)
        assert r['signal']==pytest.approx(norm*3**.5*sorted(length)[(len(length)-1)//2], rel=1e-3)

# --- information

def channel(n, eps, seed, d=8):
    "A label of four through a channel that spoils it; what comes out is one row among others"
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (n,), generator=g)
    x = (y+(torch.rand(n, generator=g)<eps)*torch.randint(1, 4, (n,), generator=g))%4
    states = [torch.randn(int(k), d, generator=g).mul(.3) for k in torch.randint(1, 5, (n,), generator=g)]
    for h,c in zip(states, x): h[torch.randint(len(h), (1,), generator=g), c] += 4.
    return states,y

def both_of(make, sizes=(1200,300,1200)):
    s = {name: make(n, i) for i,(name,n) in enumerate(zip(('train','validation','test'), sizes))}
    return {k: v[0] for k,v in s.items()},{k: v[1] for k,v in s.items()}

@pytest.mark.parametrize('eps', [0,.25,.75])
def test_information_is_found_where_it_is_known(eps):
    known = 2-(-(eps*math.log2(eps)+(1-eps)*math.log2(1-eps)) if eps else 0)-eps*math.log2(3)
    r = mutual_information(*both_of(lambda n, i: channel(n, eps, i)), depth=1, width=16, steps=120, lr=1e-2)
    assert abs(r['bits']-known)<.12 and abs(r['entropy']-2)<.02
    assert abs(r['accuracy']-100*max(1-eps, .25))<5

def parity(n, seed):
    "The label is whether two rows agree: no row and no mean of rows has a bit of it"
    g = torch.Generator().manual_seed(seed)
    a,b = torch.randint(2, (2,n), generator=g)
    h = torch.zeros(n, 3, 6)
    h[:,0,0],h[:,1,1] = 2.*a-1,2.*b-1
    h[:,2] = .3*torch.randn(n, 6, generator=g)
    h[:,0,2] = h[:,1,3] = 1.
    return list(h),(a!=b).long()

def test_size_of_the_probe_matters():
    data = both_of(parity, (600,200,400))
    assert mutual_information(*data, depth=0, steps=150, lr=1e-2)['bits']<.05
    assert mutual_information(*data, depth=1, width=16, steps=150, lr=1e-2)['bits']>.8

def test_probe_ignores_padding():
    torch.manual_seed(0)
    probe = StateProbe(6, 3, Probe(depth=2, width=16)).eval()
    h = torch.randn(2, 7, 6)
    keep = torch.ones(2, 7)
    keep[1,4:] = 0
    with torch.no_grad(): same(probe(h, keep)[1:], probe(h[1:,:4], keep[1:,:4]))

def test_same_seed_same_bits_and_the_callers_random_numbers():
    data = both_of(parity, (80,40,40))
    torch.manual_seed(5)
    want = torch.rand(1)
    torch.manual_seed(5)
    a,b,c = [mutual_information(*data, steps=20, seed=s)['bits'] for s in (0,0,1)]
    assert a==b!=c and torch.equal(torch.rand(1), want)

@pytest.mark.parametrize('steps', [dict(lr=1e30), dict(lr=1e30, depth=0)])
def test_a_probe_that_diverges_says_so(steps):
    with pytest.raises(FloatingPointError, match='diverged at lr=1e[+]30. A lower lr'):
        mutual_information(*both_of(parity, (40,20,20)), width=4, **{**steps, 'steps':3})

PLANS = {'late':lambda bb: lpt_plan(bb, NaivePromptGenerator(bb.d, 4, 8), 1),
    'deep':lambda bb: {0:Step('insert', SoftPrompt(4, bb.d, std=1.)), 2:Step('replace', SoftPrompt(4, bb.d, std=1.))},
    'among the words':lambda bb: {'words':Step('insert', SoftPrompt(4, bb.d, std=1.), at=1)},
    'keys':lambda bb: {1:Step('kv', SoftPrompt(4, 2*bb.d, std=1.))}}

@pytest.mark.parametrize('plan', PLANS)
@pytest.mark.parametrize('family', FAMILY)
def test_states_under_a_prompt(family, plan):
    "Those of a loop that is stopped there, text by text; every layer is applied once to each batch"
    if (family,plan)==('deberta','keys'): pytest.skip('its attention takes no keys')
    bb,task,examples,head = setting(family, 5)
    torch.manual_seed(0)
    model = PromptedModel(bb, head, PLANS[plan](bb))
    plain = PromptedModel(bb, head)
    with pytest.MonkeyPatch.context() as m:
        applied,inner = [],bb.layer
        m.setattr(bb, 'layer', lambda k, *a, **kw: (applied.append(k), inner(k, *a, **kw))[1])
        text,rows = list(states_by_layer(model, examples, batch_size=2)),list(states_by_layer(model, examples,
            prompt=True, batch_size=2))
    assert sorted(applied)==sorted([0,1,2]*3*2) # three layers, three batches, two calls
    first = dict(late=1, deep=0, keys=1).get(plan, -1)
    for k,bare in zip((0,1,2,3), states_by_layer(plain, examples)):
        assert [len(h) for h in text[k]]==[len(e['ids']) for e in examples]
        assert [len(h) for h in rows[k]]==[len(e['ids'])+4*(k>first and plan!='keys') for e in examples]
        with torch.no_grad(): ctx = run_layers(bb, batch_of(bb, task, 5), model.plan, stop=k)
        same(torch.cat(text[k]), ctx.h[ctx.text==1], 1e-4)
        same(torch.cat(rows[k]), ctx.h[ctx.keep==1], 1e-4)
        moved = max((a-b).abs().max() for a,b in zip(text[k], bare))
        # its embeddings have no positions to move
        same_here = k<=first or (family,plan,k)==('deberta','among the words',0)
        assert moved<1e-4 if same_here else moved>1e-3

def test_probe_layers_is_one_probe_a_layer():
    bb,task,_,head = setting()
    model = PromptedModel(bb, head)
    got = probe_layers(model, task, n=24, depth=0, steps=5)
    assert [r['layer'] for r in got]==[1,2,3] and len({r['bits'] for r in got})==3
    encoded = {s: task.encode(r[:24], bb.tokenizer, 128) for s,r in task.splits.items()}
    again = mutual_information({s: list(states_by_layer(model, e))[2] for s,e in encoded.items()},
        {s: [r['label'] for r in t[:24]] for s,t in task.splits.items()}, depth=0, steps=5)
    assert got[1]=={'layer':2, **again} and probe_layers(model, task, [2,0], n=24, depth=0, steps=5)[0]==got[1]

def test_each_layer_is_computed_once(monkeypatch):
    bb,task,_,head = setting()
    applied,inner = [],bb.layer
    monkeypatch.setattr(bb, 'layer', lambda k, *a, **kw: (applied.append(k), inner(k, *a, **kw))[1])
    probe_layers(PromptedModel(bb, head), task, n=24, depth=0, steps=1)
    assert applied==[0]*3+[1]*3+[2]*3 # of three splits, a batch each
    applied.clear()
    probe_layers(PromptedModel(bb, head), task, [1], n=24, depth=0, steps=1)
    assert applied==[0]*3

@pytest.fixture
def curves_of(monkeypatch):
    "Curves of a three-layer model; which prompt layers, seeds and rates were trained is in the list"
    trained,bb = [],backbone()
    monkeypatch.setattr(sweeps, 'load_backbone', lambda name: bb)
    monkeypatch.setattr(sweeps, 'fit', lambda model, task, cfg: trained.append((cfg.layer, cfg.seed, cfg.lr)))
    def call(cfg={}, rows=64, **kw):
        return information_curves(small.config(method='lpt', lr=.2, **cfg), small_task(train=rows),
            **{**dict(seeds=2, n=24, depth=0, steps=3, say=lambda s: None), **kw})
    return call,trained

def test_curves_for_three_prompt_layers(curves_of):
    call,trained = curves_of
    records = call(lrs={1:.7})
    assert trained==[(p, s, .7 if p==1 else .2) for s in (0,1) for p in (0,1,2)]
    assert [(r['seed'],r['prompt_layer'],r['layer']) for r in records]==[(s,p,k) for s in (0,1) for p in (0,1,2)
        for k in (1,2,3)]
    bits = {(r['prompt_layer'],r['layer']): r['bits'] for r in records if r['seed']==0}
    assert bits[1,1]==bits[2,1] and bits[1,2]!=bits[2,2]!=bits[0,2] # below a prompt there is nothing of it
    ax = plot_information(records)
    assert {l.get_label() for l in ax.lines if not l.get_label().startswith('_')}=={f'prompt at layer {p}'
        for p in range(3)}
    thick = next(l for l in ax.lines if l.get_label()=='prompt at layer 1')
    assert list(thick.get_ydata())==pytest.approx([sum(r['bits'] for r in records
        if (r['prompt_layer'],r['layer'])==(1,k))/2 for k in (1,2,3)])

def test_curves_go_on(curves_of, tmp_path):
    call,trained = curves_of
    out = tmp_path/'i.jsonl'
    call(prompt_layers=[1], out=out)
    n = len(trained)
    records = call(prompt_layers=[1,2], out=out)
    assert n==2 and [t[0] for t in trained[2:]]==[2,2] and len(records)==12==len(out.read_text().splitlines())
    assert all(r['t']==4 and r['data'] is None and r['cache_dir'] is None
        and r['probe']==dict(n=24, prompt=False, depth=0, width=64, heads=4, steps=3, lr=3e-3, batch_size=64, looks=10,
        seed=0) for r in records)

@pytest.mark.parametrize('change', [dict(depth=1), dict(width=8), dict(steps=4), dict(seed=1), dict(n=20),
    dict(prompt=True), dict(cfg=dict(t=5)), dict(cfg=dict(steps=5)), dict(cfg=dict(head_lr=.1)), dict(rows=60),
    dict(lrs={1:.7})], ids=str)
def test_curves_of_other_settings_are_others(curves_of, tmp_path, change):
    call,trained = curves_of
    out = tmp_path/'i.jsonl'
    kw = dict(prompt_layers=[1], seeds=1, layers=[2], out=out)
    call(**kw)
    call(**kw)
    assert len(trained)==1
    call(**{**kw, **change})
    assert len(trained)==2 and len(read_records(out))==2
    if 'lrs' not in change:
        with pytest.raises(ValueError, match='records of several sweeps'): plot_information(read_records(out))

@pytest.mark.parametrize('cut', [0,30])
def test_a_curve_cut_short_is_not_done(curves_of, tmp_path, cut):
    "Lines of the curve are missing, or half of one is there: the rest is probed, and nothing is there twice"
    call,trained = curves_of
    out = tmp_path/'i.jsonl'
    kw = dict(prompt_layers=[1], seeds=1, out=out)
    whole = call(**kw)
    lines = out.read_text().splitlines(True)
    out.write_text(''.join(lines[:1]) if not cut else ''.join(lines)[:-cut])
    again = call(**kw)
    assert again==whole and sorted(r['layer'] for r in read_records(out))==[1,2,3] and len(trained)==2
    assert call(**{**kw, 'layers':[3,1]})==[whole[2],whole[0]] and len(trained)==2

# --- the choice

def test_bits_of_a_linear_reader():
    torch.manual_seed(0)
    y = (torch.arange(200)%2)[torch.randperm(200)]
    assert abs(linear_bits(F.one_hot(y).float()+.01*torch.randn(200, 2), y, 2)[0]-1)<.1
    bits,l2 = linear_bits(torch.randn(200, 100), y, 2)
    assert math.isfinite(linear_bits(torch.randn(8, 3), torch.tensor([0,0,0,0,0,0,0,1]), 2)[0])
    assert -.1<bits<.05 and l2==1000 and entropy(y)==1 and abs(entropy(torch.tensor([0,0,0,1]))-.8113)<1e-3

@pytest.mark.parametrize('head', ['classification','verbalizer'])
@pytest.mark.parametrize('family', FAMILY)
def test_choice_and_its_reasons(family, head):
    bb,task,_,_ = setting(family)
    c = choose_prompt_layer(bb, task, head, n=32, t=3, max_len=60)
    again = choose_prompt_layer(bb, task, head, n=32, t=3, max_len=60)
    assert c['layer'] in range(3) and [r['layer'] for r in c['rows']]==[0,1,
        2] and c['rows']==again['rows'] and c['seconds']>0
    best = max(r['score'] for r in c['rows'])
    assert c['layer']==(max(r['layer'] for r in c['rows'] if r['score']>=best-.1) if c['informed'] else 1)
    assert all(0<=r['score']<=2+1e-6 and r['cost']==(6-r['layer'])/9 and r['signal']>0 for r in c['rows'])
    assert all(p.grad is None for p in bb.model.parameters())

def test_choice_only_sees_training_texts():
    bb,task,_,_ = setting()
    blind = replace(task, splits=dict(train=task.splits['train']))
    assert choose_prompt_layer(bb, blind, n=16)['rows']==choose_prompt_layer(bb, task, n=16)['rows']

def test_choice_is_between_the_two_forces(monkeypatch):
    "Known bits and signals, and the layer that they must give"
    bb,task,_,_ = setting()
    def chosen(bits, signal, **kw):
        values = iter([(b, 10.) for b in (*bits, 0.)])
        monkeypatch.setattr('idp_tutorial.analysis.probes.linear_bits', lambda *a: next(values))
        monkeypatch.setattr('idp_tutorial.analysis.gradients.gradient_norms', lambda *a,
            **k: [dict(layer=i, signal=s) for i,s in enumerate(signal)])
        c = choose_prompt_layer(bb, task, n=16, **kw)
        assert c['informed']==(max(bits)>=.05)
        return c['layer']
    assert chosen([.1,.5,.6], [9.,8.,1.])==1           # a middle one
    assert chosen([.3,.3,.3], [9.,1.,.1])==0           # all know the same: the signal decides
    assert chosen([.1,.2,.9], [1.,1.,1.])==2           # all can do the same: what is known decides
    assert chosen([.300,.301,.303], [1.,1.02,.99])==2  # noise: the cheapest
    assert chosen([.1,.5,.6], [9.,8.,1.], tolerance=1.5)==2 # as good, and the cheapest
    assert chosen([-.2,.01,0.], [9.,1.,.1])==1         # nothing is known: the middle

def test_choice_says_what_it_was_made_for():
    bb,task,_,_ = setting()
    c = choose_prompt_layer(bb, task, n=16, t=3, max_len=60, seed=2)
    assert (c['t'],c['max_len'],c['seed'],c['n'],c['template'])==(3,60,2,16,None) and choose_prompt_layer(bb, task,
        'verbalizer', n=16)['template']=='code'

def test_plot_of_gradients():
    ax = plot_gradients(dict(layer=1, rows=[dict(layer=k, norm=n, signal=s) for k,
        (n,s) in enumerate([(4.,1.),(2.,5.),(1.,2.)])]))
    assert [list(l.get_ydata()) for l in ax.lines]==[[1.,.5,.25],[.2,1.,.4],
        [0,1]] and list(ax.lines[2].get_xdata())==[1,1]

# --- sweeps

def pretend(monkeypatch, crash_after=None):
    "Runs that take no time; returns the configs that were run"
    ran = []
    def train(cfg, task):
        if crash_after is not None and len(ran)>=crash_after:
            raise KeyboardInterrupt
        ran.append((cfg.method, cfg.layer, cfg.seed, cfg.lr))
        return cfg,dict(validation=70+10*(cfg.lr or 0)+(cfg.layer or 0))
    def record(c, log, task, cfg, test=True):
        score = log['validation']
        return {**asdict(c), 'data':c.data and c.data.split('/')[-1], 'metric':'accuracy', 'score':score,
            'validation':score, 'params':dict(prompt=4, head=2, backbone=0), 'history':[[1,50.],[2,score]],
            'ms_per_step':10.-(c.layer or 0), 'peak_memory_mb':5., 'steps':c.steps,
            'sizes':{s: len(r) for s,r in task.splits.items()}}
    for m in (comparison,experiments):
        monkeypatch.setattr(m, 'trained', train)
        monkeypatch.setattr(m, 'record_of', record)
    return ran

BASE,TASK = RunConfig(task='sentiment', steps=3, device='cpu'),small_task()
def swept(methods=('lpt',), layers=(0,2), seeds=2, base=BASE, **kw):
    return sweep_prompt_layer(list(methods), base, layers, seeds, task=TASK, say=lambda s: None, **kw)

def test_sweep_runs_every_layer_and_seed_once(monkeypatch):
    ran = pretend(monkeypatch)
    records = swept(['head-only','lpt','lpt-npg'])
    assert [r[:3] for r in ran]==[('head-only',None,0),
        ('head-only',None,1)]+[(m,k,s) for m in ('lpt','lpt-npg') for k in (0,2) for s in (0,1)]
    assert {r['lr_selected'] for r in records}=={'default'} and all(r['n_layers']>2 and r['seconds']>=0
        for r in records)
    assert {(r[0],r[3]) for r in ran}=={(m, sweeps.METHODS[m].rate) for m in ('head-only','lpt','lpt-npg')}

def test_all_layers_by_default(monkeypatch):
    ran = pretend(monkeypatch)
    L = sweeps.load_backbone('tiny').n_layers
    swept(layers=None, seeds=1)
    assert [r[1] for r in ran]==list(range(L))

def test_rates_are_tuned_at_every_layer(monkeypatch):
    ran = pretend(monkeypatch)
    records = swept(tuned=True)
    grid = sweeps.METHODS['lpt'].rates
    # seed 0 of the best rate is not trained twice
    assert [r[1:] for r in ran]==[x for k in (0,2) for x in [*[(k,0,lr) for lr in grid], (k,1,grid[2])]]
    assert [(r['layer'],r['seed'],r['lr']) for r in records]==[(k,s,grid[2]) for k in (0,2) for s in (0,1)]
    assert {r['lr_selected'] for r in records}=={'best of 3 on validation, seed 0'}

def test_given_rate(monkeypatch):
    ran = pretend(monkeypatch)
    records = swept(base=replace(BASE, lr=.5), tuned=True)
    assert {r[3] for r in ran}=={.5} and {r['lr_selected'] for r in records}=={'given'}

@pytest.mark.parametrize('tuned', [False,True])
@pytest.mark.parametrize('half', [False,True])
def test_a_killed_sweep_goes_on(monkeypatch, tmp_path, tuned, half):
    out = tmp_path/'a'/'sweep.jsonl'
    ran = pretend(monkeypatch, crash_after=5 if tuned else 3)
    with pytest.raises(KeyboardInterrupt): swept(tuned=tuned, out=out)
    n = len(out.read_text().splitlines())
    if half:
        out.write_text(out.read_text()[:-30])
        n -= 1
    ran = pretend(monkeypatch)
    records = swept(tuned=tuned, out=out)
    assert [(r['layer'],r['seed']) for r in records]==[(0,0),(0,1),(2,0),(2,1)]
    # layer 0 has its rate
    assert len(ran)==(2-n+4 if tuned else 4-n) and not (tuned
        and any(r[1]==0 and r[3]!=sweeps.METHODS['lpt'].rates[2] for r in ran))
    assert [json.loads(l)['layer'] for l in out.read_text().splitlines()]==[0,0,2,2]
    ran = pretend(monkeypatch)
    assert [r['score'] for r in swept(tuned=tuned, out=out)]==[r['score'] for r in records] and not ran

SETTINGS = [dict(steps=4), dict(t=3), dict(k=5), dict(draw=1), dict(head='verbalizer'), dict(lr=.7),
    dict(weight_decay=.5), dict(batch_size=8), dict(max_len=64), dict(head_lr=.1), dict(eval_every=3),
    dict(precision='bf16'), dict(cache='hidden')]

@pytest.mark.parametrize('change', SETTINGS, ids=str)
def test_a_file_has_one_sweep(monkeypatch, tmp_path, change):
    out = tmp_path/'s.jsonl'
    ran = pretend(monkeypatch)
    swept(out=out)
    before = out.read_text()
    ran = pretend(monkeypatch)
    with pytest.raises(ValueError, match=f"has another sweep than this "
        f"one.*{'lr_selected' if 'lr' in change else next(iter(change))} is .* in some of them.*--out"):
        swept(out=out, base=replace(BASE, **change))
    assert not ran and out.read_text()==before
    swept(out=out, base=replace(BASE, device='auto'))
    assert not ran # the device changes nothing
    swept(['lpt-npg'], [1], 3, out=out)
    assert len(ran)==3 # nor does another method, layer or seed

def test_other_texts_are_another_sweep(monkeypatch, tmp_path):
    pretend(monkeypatch)
    swept(out=tmp_path/'s.jsonl')
    with pytest.raises(ValueError, match='has another sweep.*sizes is'):
        sweep_prompt_layer(['lpt'], BASE, [0], 1, task=small_task(train=32), out=tmp_path/'s.jsonl')

def test_a_layer_given_twice_is_swept_once(monkeypatch):
    ran = pretend(monkeypatch)
    swept(['lpt','lpt'], [2,2], 1)
    assert len(ran)==1

def test_a_real_sweep_of_one_run(tmp_path):
    r, = sweep_prompt_layer(['lpt-npg'], replace(BASE, batch_size=8, t=2), [1], 1, task=TASK, out=tmp_path/'s.jsonl',
        say=lambda s: None)
    s, = sweep_prompt_layer(['lpt-npg'], replace(BASE, batch_size=8, t=2), [1], 1, task=TASK, out=tmp_path/'s.jsonl',
        say=lambda s: pytest.fail('run again'))
    assert s==json.loads(json.dumps(r)) and r['layer']==1 and r['seconds']>0 and len(sweep_table([r]))==1

# --- what is read from the records

def fake(scores, noise=.5, seeds=3, m='lpt', **kw):
    return [{**dict(method=m, task='toy', k=None, backbone='toy', head='classification', metric='accuracy', layer=k,
        n_layers=len(scores), seed=s, score=v+noise*(s-1), validation=v, history=[[1,v-5],[2,v+s]],
        seconds=10., tuning_seconds=5., params=dict(prompt=10, head=2), ms_per_step=2.*len(scores)-k,
        peak_memory_mb=100.-5*k, lr=.1), **kw} for k,v in enumerate(scores) for s in range(seeds)]
HUMP = fake([60,63,66,66,63,60])

@pytest.mark.parametrize('read', [one_sweep, sweep_table, sweep_shape, plot_sweep, tradeoff_table,
    lambda r: plot_convergence(r, 'lpt'), lambda r: regret(r, dict(layer=1, seconds=1.))],
    ids=['one_sweep','table','shape','plot','tradeoff','convergence','regret'])
def test_different_experiments_are_not_averaged(read):
    for change in SETTINGS+[dict(task='b'), dict(backbone='b'), dict(data='b'), dict(sizes=dict(train=5)),
        dict(compile=True), dict(lr_selected='given')]:
        with pytest.raises(ValueError, match='several sweeps.*one sweep at a time'):
            read(HUMP+[{**r, 'seed':r['seed']+3, **({'lr_selected':'given'} if 'lr' in change else change)}
                for r in HUMP])
    with pytest.raises(ValueError, match="'lpt' at layer 0 with seed 0 is there 2 times"):
        read(HUMP+[{**HUMP[0], 'lr':.7}])
    read(HUMP+[{**r, 'seed':r['seed']+3, 'lr':.3, 'device':'cpu'} for r in HUMP])

def test_a_bare_heads_records_belong_to_the_sweep():
    "It trains at no rate for the head beside its own, and under a verbalizer it takes no step"
    one_sweep(fake([60,61], head_lr=.03, steps=300)+fake([50], m='head-only', layer=None, steps=0)
        +fake([90], m='fine-tuning', layer=None, head_lr=.03, steps=300))

STORED = sorted((Path(__file__).parents[2]/'results/depth').glob('sweep-*.jsonl'))
@pytest.mark.parametrize('path', STORED, ids=lambda p: p.stem)
def test_stored_sweeps_are_read(path):
    r = read_records(path)
    choice = path.with_name(path.name.replace('sweep', 'choice'))
    assert one_sweep(r)==r and len(sweep_shape(r))>0 and len(tradeoff_table(r))>0
    if choice.exists():
        c = read_records(choice)[-1]
        assert made_for(c, r[0]) and (regret(r, c).regret>=0).all()

def test_a_stored_sweep_goes_on(monkeypatch, tmp_path):
    "Its settings, read from its own records, run nothing again"
    file = next(p for p in STORED if p.name=='sweep-trec-tiny.jsonl')
    records = read_records(file)
    names = [f for f in RunConfig.__dataclass_fields__ if f in records[0]]
    late = next(r for r in records if r['method']=='lpt')
    base = RunConfig(**{**{k: late[k] for k in names}, 'layer':None, 'seed':0, 'lr':None})
    task = replace(small_task(), splits={s: [0]*n for s,n in late['sizes'].items()})
    ran = pretend(monkeypatch)
    (tmp_path/'s.jsonl').write_text(file.read_text())
    got = sweep_prompt_layer(['lpt'], base, None, 3, True, tmp_path/'s.jsonl', task, lambda s: None)
    assert not ran and got==[r for r in records if r['method']=='lpt']

def test_table_of_a_sweep():
    t = sweep_table(fake([60,62])+fake([90], m='fine-tuning', layer=None))
    assert t.score.tolist()==[60,62,
        90] and t['std'].tolist()==[.5]*3 and t.seeds.tolist()==[3]*3 and t.params.tolist()==[12]*3 and t.layer.isna().tolist()==[False,False,True]

@pytest.mark.parametrize('scores,noise,is_one', [([60,63,66,66,63,60],.5,True), ([60,62,63,64,66,67],.5,False),
    ([67,66,64,63,62,60],.5,False), ([60,63,66,66,63,60],9,False), ([66,60,60,60,60,66],.5,False),
    ([60,60.2,60.4,60.4,60.2,60],.5,False)], ids=['hump','rising','falling','noise','valley','too small'])
def test_middle_maximum(scores, noise, is_one):
    s, = sweep_shape(fake(scores, noise)).to_dict('records')
    assert s['middle_maximum'] is is_one or bool(s['middle_maximum'])==is_one
    assert (s['first'],s['last'],s['best'])==(scores[0],scores[-1],max(scores)) and s['middle']==sum(scores[2:4])/2
    assert s['error']==pytest.approx(noise*(1.5/3)**.5)

def test_no_maximum_without_seeds_or_ends():
    assert not sweep_shape(fake([60,63,66,66,63,60], seeds=1)).middle_maximum[0] # one seed has no error
    assert not sweep_shape([r for r in HUMP if r['layer'] not in (0,)]).middle_maximum[0]

def test_tradeoff_is_table_10():
    full = fake([80], m='fine-tuning', layer=None, n_layers=24, ms_per_step=72., peak_memory_mb=200.)
    t = tradeoff_table(fake(list(range(24)), ms_per_step=None)+full)
    assert t.layer.tolist()==[6,12,18] and t.ideal.round(2).tolist()==[1.71,2.,2.4] and t.ideal_cached.tolist()==[2.,3.,
        6.]
    t = tradeoff_table(fake(list(range(24)))+full)
    assert t.speed_up.tolist()==[72/(48-k) for k in (6,12,18)] and t.memory_saved.tolist()==[1-(100-5*k)/200
        for k in (6,12,18)]
    # nothing to compare with
    assert tradeoff_table(HUMP).speed_up.isna().all() and tradeoff_table(HUMP).measured.isna().all()

def test_tradeoff_with_measured_times():
    "At the same share of the layers; between two that were measured a step's time is on the line; outside nothing is known"
    def row(k, ratio, cached=False, **kw):
        return dict(method='lpt-npg', backbone='big', n_layers=24, k=k, cached=cached, ratio=ratio, **kw)
    times = [row(6, 2.), row(12, 4.), row(12, 5., True), row(18, 10., True)]
    t = tradeoff_table(fake(list(range(8))), times=times)
    assert t.layer.tolist()==[2,4,6] and t.measured.tolist()[:2]==[2.,4.] and t.measured_cached.tolist()[1:]==[5.,
        10.] and math.isnan(t.measured[2]) and math.isnan(t.measured_cached[0])
    third, = tradeoff_table(fake(list(range(6))), shares=[1/3], times=times).measured
    assert third==pytest.approx(1/(1/2-(1/2-1/4)/3))
    for wrong in (times+[row(12, 3.)|{'method':'lpt'}], [row(12, 3.)|{'method':'lora'}]):
        with pytest.raises(ValueError, match='one late method on one backbone'): tradeoff_table(HUMP, times=wrong)

def test_regret():
    r, = regret(HUMP, dict(layer=4, seconds=3.)).to_dict('records')
    assert (r['best'],r['chosen'],r['regret'],r['middle'],r['random'])==(2,4,3,0,
        3) and r['share_of_sweep']==3/270 and r['noise']==pytest.approx(.5/3**.5)
    assert made_for(dict(layer=4, t=10), HUMP[0]) and not made_for(dict(layer=4, t=20),
        HUMP[0]) and made_for(dict(layer=4), HUMP[0])
    both = regret(HUMP+fake([1,2,3,4,5,6], m='lpt-npg'), dict(layer=5, seconds=3.))
    assert both.method.tolist()==['lpt','lpt-npg'] and both.regret.tolist()==[6,0]

def test_plots():
    ax = plot_sweep(HUMP+fake([90], m='fine-tuning', layer=None))
    line, = [l for l in ax.lines if len(l.get_xdata())==6 and l.get_linestyle()=='-']
    assert list(line.get_ydata())==[60,63,66,66,63,60] and {l.get_label() for l in ax.lines}>={'lpt','fine-tuning'}
    ax = plot_convergence(HUMP, 'lpt')
    assert {l.get_label() for l in ax.lines if not l.get_label().startswith('_')}=={'layer 0','layer 3','layer 5'}
    thick = next(l for l in ax.lines if l.get_label()=='layer 3')
    assert list(thick.get_ydata())==[61,67]

def test_names_of_files():
    assert sweep_file('r', RunConfig(task='sst2', k=1000, backbone='a/b/minilm',
        head='verbalizer')).as_posix()=='r/sweep-sst2-k1000-verbalizer-minilm.jsonl'
    assert sweep_file('r', RunConfig(task='trec'), 'choice').name=='choice-trec-tiny.jsonl'

# --- the command

def test_the_command(tmp_path, capsys):
    "As a program once; called again it finds everything done"
    kw = dict(task='sentiment', methods='lpt', layers='1', seeds=1, steps=1, batch_size=4, max_len=16, k=16,
        device='cpu', out=str(tmp_path))
    call = [sys.executable, '-m', 'idp_tutorial.depth', *[o for k,v in kw.items() for o in (f'--{k}', str(v))]]
    got = subprocess.run(call, capture_output=True, text=True, timeout=300)
    assert got.returncode==0 and 'layer 1  seed 0' in got.stdout, got.stderr
    choice,sweep = tmp_path/'choice-sentiment-k16-tiny.jsonl',tmp_path/'sweep-sentiment-k16-tiny.jsonl'
    idp_sweep.__wrapped__(**kw)
    assert 'seed 0' not in (said := capsys.readouterr().out) and sweep.name in said and choice.name in said
    assert len(choice.read_text().splitlines())==len(sweep.read_text().splitlines())==1 and json.loads(choice.read_text())['rows']

def test_the_command_probes_with_the_sweeps_rates(monkeypatch, tmp_path):
    pretend(monkeypatch)
    seen = {}
    monkeypatch.setattr(depth, 'choose_prompt_layer', lambda *a, **kw: dict(layer=1, seconds=1.))
    monkeypatch.setattr(depth, 'information_curves', lambda cfg, task, layers, seeds, lrs, out, say,
        **size: seen.update(method=cfg.method, seeds=seeds, lrs=lrs, out=out.name, size=Probe(**size)))
    idp_sweep.__wrapped__(task='sentiment', methods='lpt,lpt-npg', layers='0,1', seeds=2, tune=True, probe=True,
        probe_depth=2, probe_width=32, out=str(tmp_path))
    kinds = []
    monkeypatch.setattr(depth, 'sweep_prompt_layer', lambda names, cfg, *a, **kw: kinds.append(cfg.cache) or swept())
    for kind in ('none','hidden'):
        idp_sweep.__wrapped__(task='sentiment', methods='lpt', layers='0,2', cache=kind, out=str(tmp_path/kind))
    assert kinds==['none','hidden']
    assert seen==dict(method='lpt', seeds=2, lrs={0:sweeps.METHODS['lpt'].rates[2], 1:sweeps.METHODS['lpt'].rates[2]},
        out='information-sentiment-tiny.jsonl', size=Probe(depth=2, width=32, steps=400))

def test_a_sweep_without_a_choice(tmp_path, capsys):
    "A regression has no classes for the probes of the choice, and can be swept all the same"
    idp_sweep.__wrapped__(task='similarity', methods='lpt', layers='1', seeds=1, steps=1, batch_size=4, max_len=16,
        k=16, device='cpu', out=str(tmp_path))
    said = capsys.readouterr().out
    assert 'no layer is chosen without training' in said and 'needs classes' in said and [p.name
        for p in tmp_path.iterdir()]==['sweep-similarity-k16-tiny.jsonl']

def test_a_choice_is_for_its_settings(monkeypatch, tmp_path):
    "Made again where prompt length, text length, head or texts are others, and not where they are the same; older records had the defaults"
    made,out = [],tmp_path/'choice.jsonl'
    monkeypatch.setattr(depth, 'choose_prompt_layer', lambda bb, task, head, t,
        max_len: made.append((head, t, max_len)) or dict(layer=len(made), head=head, t=t, max_len=max_len, seconds=1.))
    def layer(task=TASK, **kw): return layer_choice(replace(BASE, **kw), task, out)['layer']
    assert [layer(), layer(), layer(t=3), layer(t=3, max_len=64), layer(t=3, head='verbalizer'),
        layer(small_task(train=32)), layer(t=3), layer(lr=.5)]==[1,1,2,3,4,5,2,1] and len(made)==5
    assert [(r['t'],r['max_len'],r['sizes']['train']) for r in read_records(out)]==[(10,128,64),(3,128,64),(3,64,64),
        (3,128,64),(10,128,32)]
    out.write_text(json.dumps(dict(task='sentiment', head='classification', layer=7, seconds=1.))+'\n')
    assert [layer(), layer(t=3), layer()]==[7,6,7]

def test_baselines_alone(monkeypatch, tmp_path, capsys):
    pretend(monkeypatch)
    monkeypatch.setattr(depth, 'choose_prompt_layer', lambda *a, **kw: dict(layer=1, seconds=1.))
    idp_sweep.__wrapped__(task='sentiment', methods='head-only', out=str(tmp_path))
    assert 'written' in capsys.readouterr().out

WRONG = [(dict(methods='ltp'), "did you mean 'lpt'?"), (dict(task='sst-2'), "did you mean 'sst2'?"),
    (dict(lr=-1.), 'positive number'), (dict(layers='99'), 'prompts at layers 0 to 7'),
    (dict(layers='a'), "--layers 'a': numbers, parted by commas"), (dict(seeds=0), 'at least one seed'),
    (dict(t=0), 't=0'), (dict(head='verbaliser'), "did you mean 'verbalizer'?"),
    (dict(backbone='nowhere'), "no backbone 'nowhere'"),
    (dict(probe=True, probe_width=10), 'width 10 with 4 heads'), (dict(probe=True, probe_steps=0), 'steps=0'),
    (dict(probe=True, probe_depth=-1), 'depth=-1')]
@pytest.mark.parametrize('kw,word', WRONG, ids=lambda v: str(v)[:40])
def test_the_command_says_what_is_wrong(kw, word, tmp_path, capsys, monkeypatch):
    ran = pretend(monkeypatch)
    with pytest.raises(SystemExit) as e:
        idp_sweep.__wrapped__(**{'task':'sentiment', 'methods':'lpt,lpt-npg', **kw}, out=str(tmp_path/'x'))
    assert e.value.code==2 and word in capsys.readouterr().err and not (tmp_path/'x').exists() and not ran

def test_another_sweep_writes_nothing(monkeypatch, tmp_path, capsys):
    ran = pretend(monkeypatch)
    monkeypatch.setattr(depth, 'choose_prompt_layer', lambda *a, **kw: dict(layer=1, seconds=1.))
    kw = dict(task='sentiment', methods='lpt', layers='0', seeds=1, out=str(tmp_path))
    idp_sweep.__wrapped__(**kw)
    n = len(ran)
    before = {p.name: p.read_text() for p in tmp_path.iterdir()}
    with pytest.raises(SystemExit): idp_sweep.__wrapped__(**kw, t=3)
    assert 't is 10 in some of them and 3 in others' in capsys.readouterr().err and len(ran)==n and {p.name: p.read_text() for p in tmp_path.iterdir()}==before

# --- refused

@pytest.mark.parametrize('make,words', [
    (lambda: swept(['ltp']), ["unknown method 'ltp'","'lpt'"]), (lambda: swept(seeds=0), ['seeds=0','at least one']),
    (lambda: swept(layers=[99]), ['layer 99',"'tiny'",'layers 0 to']),
    (lambda: sweep_table([]), ['no records','sweep_prompt_layer']),
    (lambda: plot_convergence(HUMP, 'lpt-npg'), ["'lpt-npg'",'there are lpt']),
    (lambda: sweep_shape(fake([1], m='fine-tuning')), ['no records of a late method','lpt-npg']),
    (lambda: sweep_shape(HUMP+fake([1,2,3], task='b')), ['one sweep at a time']),
    (lambda: tradeoff_table(fake([1], m='fine-tuning')), ['no records of a late method']),
    (lambda: regret(HUMP, dict(layer=7, seconds=1.)), ['not 7','sweep every layer first']),
    (lambda: choose_prompt_layer(backbone(), small_task('similarity')), ['regression','needs classes']),
    (lambda: choose_prompt_layer(backbone(), small_task(), 'verbaliser'), ["head 'verbaliser'","'verbalizer'"]),
    (lambda: probe_layers(PromptedModel(backbone(), None), small_task('similarity')), ['regression','needs classes']),
    (lambda: Probe(width=10, heads=4), ['width 10','4 heads']), (lambda: Probe(depth=-1), ['depth=-1','0 (linear)']),
    (lambda: Probe(lr=0.), ['lr=0.0','positive']), *[(lambda k=k: mutual_information({}, {}, **{k:0}),
    [f'{k}=0','at least 1']) for k in ('steps','looks','batch_size','width','heads')],
    (lambda: probe_layers(PromptedModel(backbone(), None), small_task(), [1,4]), ['after 4 layers','0 to 3']),
    (lambda: linear_bits(torch.randn(7, 2), torch.arange(7)%2, 2), ['7 texts','at least 8']),
    (lambda: linear_bits(torch.randn(9, 2), torch.zeros(9).long(), 2), ['1 of the labels','two labels']),
    (lambda: choose_prompt_layer(backbone(), small_task(train=1)), ['1 texts','at least 8 texts']),
    (lambda: regret(HUMP, dict(layer=4, seconds=1., t=20)), ['made for t=20','choose again']),
    (lambda: regret(HUMP, dict(layer=4, seconds=1., backbone='minilm')), ["made for backbone='minilm'"]),
    (lambda: plot_convergence([{**HUMP[0], 'layer':None}], 'lpt'), ["no records of 'lpt' at layers"]),
    (lambda: mutual_information(dict(train=[torch.zeros(1, 2)]*2, validation=[], test=[]),
    dict(train=[0,1], validation=[], test=[])), ['0 states and 0 labels','at least one'])])
def test_what_is_refused(make, words):
    with pytest.raises(ValueError) as e: make()
    assert all(w in str(e.value) for w in words), str(e.value)

# --- what is chosen, fitted and measured on which texts

def test_probe_is_chosen_on_validation():
    h,y = [torch.tensor([[2.*(i%2)-1]]) for i in range(40)],[i%2 for i in range(40)]
    def bits(n):
        return mutual_information(dict.fromkeys(('train','validation','test'), h),
            dict(train=y, validation=[1-v for v in y], test=y), depth=0, steps=n, looks=n, lr=.1)['bits']
    assert bits(20)==bits(1) # every step makes the reversed validation labels worse and the test labels better

def test_entropy_is_of_the_test_labels():
    r = mutual_information(dict.fromkeys(('train','validation','test'), [torch.zeros(1, 1)]*40),
        dict(train=[0,1]*20, validation=[0,1]*20, test=[0,0,0,1]*10), depth=0, steps=1)
    assert abs(r['entropy']-.8113)<1e-3

def test_the_probe_can_see_the_prompt():
    bb,task,_,head = setting()
    model = PromptedModel(bb, head, lpt_plan(bb, SoftPrompt(4, bb.d, std=1.), 1))
    a,b = [probe_layers(model, task, [2], n=24, prompt=p, depth=0, steps=5)[0]['bits'] for p in (False,True)]
    assert a!=b

def test_gradients_are_of_texts_the_head_has_not_seen(monkeypatch):
    bb,task,_,_ = setting()
    seen = {}
    where = 'idp_tutorial.propagation.'
    monkeypatch.setattr(where+'linear_bits', lambda *a: (.1, 10.))
    monkeypatch.setattr(where+'logistic', lambda x, y, *a: seen.update(x=x) or (torch.zeros(2, bb.d), torch.zeros(2)))
    monkeypatch.setattr(where+'gradient_norms', lambda bb, head, ex, X,
        t=10: seen.update(ex=ex, t=t) or [dict(layer=k, signal=1.) for k in range(3)])
    choose_prompt_layer(bb, task, n=16, t=3)
    assert len(seen['x'])==12 and seen['t']==3 and torch.cdist(layer_features(bb, seen['ex'])[-1], seen['x']).min()>1e-3

def test_error_is_that_of_the_layer_with_the_fewest_seeds():
    s, = sweep_shape([r for r in HUMP if (r['layer'],r['seed'])!=(2,2)]).to_dict('records')
    assert s['error']==pytest.approx(((5*.25+.125)/6*1.5/2)**.5)

def test_the_draw_reaches_the_sweep(monkeypatch):
    monkeypatch.setattr(sweeps, 'with_seeds', lambda cfg, task, *a, **kw: [task])
    want,other = [load_task('sentiment', None, 8, i).splits['train'] for i in (3,0)]
    task, = sweep_prompt_layer(['lpt'], replace(BASE, k=8, draw=3), (0,), 1)
    assert task.splits['train']==want!=other

def test_the_table_has_the_mean():
    records = fake([60])
    records[0]['score'] += 3
    assert sweep_table(records).score.item()==61
