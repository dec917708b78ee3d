"""Late prompt tuning: pooling and generators against slow references on ragged batches, what lies below the prompt,
decoders, sizes, inits, and what is refused."""
import math
from functools import cache

import pytest
import small
import torch
import torch.nn.functional as F
from small import batch_of, one, same, small_task
from torch import nn

from idp_tutorial.methods.lpt import NaivePromptGenerator, PoolingPromptGenerator, adaptive_pool, lpt_plan
from idp_tutorial.methods.prompt_tuning import SoftPrompt
from idp_tutorial.model.heads import ClassificationHead, VerbalizerHead
from idp_tutorial.model.layer_loop import run_layers
from idp_tutorial.model.pretrained import load_backbone
from idp_tutorial.model.prompted_model import PromptedModel, count_parameters

backbone = cache(small.backbone) # built once a family

FAMILY = ('roberta','bert','gpt2','deberta')
SOURCES = {'lpt':lambda d, t=4, **kw: SoftPrompt(t, d, std=1.), 'lpt-npg':lambda d, t=4,
    **kw: NaivePromptGenerator(d, t, 8, **kw),
    'lpt-appg':lambda d, t=4, **kw: PoolingPromptGenerator(d, t, 8, 'mean', **kw), 'lpt-mppg':lambda d, t=4,
    **kw: PoolingPromptGenerator(d, t, 8, 'max', **kw)}


def model_of(method, bb, layer=1, head='verbalizer', lower_dropout=False, **kw):
    "A model under seed 0; built without the registry"
    torch.manual_seed(0)
    source = SOURCES[method](bb.d, **kw)
    reader = VerbalizerHead(bb, small_task().word_ids(bb.tokenizer)) if head=='verbalizer' else ClassificationHead(bb.d,
        2, 'mean')
    return PromptedModel(bb, reader, lpt_plan(bb, source, layer), lower_dropout).eval()

def prompt_of(model, batch):
    "What the source gives, and the context's hidden states when it was asked"
    (layer, step), = model.plan.items()
    ctx = run_layers(model.backbone, batch, stop=layer)
    return step.source(ctx),ctx.h

# --- pooling

@pytest.mark.parametrize('kind,layer', [('mean',nn.AdaptiveAvgPool1d), ('max',nn.AdaptiveMaxPool1d)])
@pytest.mark.parametrize('t', [1,2,3,5,10,20])
def test_pooling_is_pytorchs_text_by_text(kind, layer, t):
    torch.manual_seed(t)
    lengths = [1,2,3,4,5,7,9,10,11,13]
    T = 13
    x = torch.randn(len(lengths), T, 6, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    w = torch.randn(len(lengths), t, 6)
    keep = (torch.arange(T)<torch.tensor(lengths)[:,None]).long()
    got = adaptive_pool(x, keep, t, kind)
    want = torch.stack([layer(t)(r[:n].T[None])[0].T for r,n in zip(y, lengths)])
    same(got, want, 1e-6)
    (got*w).sum().backward()
    (want*w).sum().backward()
    same(x.grad, y.grad, 1e-5)
    assert not x.grad[keep==0].any() and x.grad[keep==1].any()

@pytest.mark.parametrize('kind', ['mean','max'])
def test_rows_to_pool_may_lie_anywhere(kind):
    torch.manual_seed(0)
    x = torch.randn(3, 9, 4)
    keep = torch.tensor([[1,0,0,1,1,1,1,0,0],[1,1,1,1,1,1,1,1,1],[0,0,0,0,0,0,0,0,1]])
    want = torch.cat([adaptive_pool(r[k==1][None], torch.ones(1, int(k.sum())).long(), 5, kind) for r,
        k in zip(x, keep)])
    same(adaptive_pool(x, keep, 5, kind), want)
    # nothing of the other rows comes through
    same(adaptive_pool(x.masked_fill(keep[...,None]==0, float('nan')), keep, 5, kind), want)

def test_pooling_is_one_call_for_the_batch(monkeypatch):
    "Cost in operators does not grow with the number of texts"
    def n_ops(B):
        with torch.profiler.profile() as prof: adaptive_pool(torch.randn(B, 12, 4), torch.ones(B, 12).long(), 5)
        return len([e for e in prof.events() if e.name.startswith('aten::')])
    assert n_ops(2)==n_ops(16)

# --- generators, written from the paper: one text at a time, no padding, Hugging Face's own hidden states

def states_by_hand(bb, x, q):
    # `[n,d]`
    return bb.model(input_ids=x['ids'], attention_mask=x['keep'], output_hidden_states=True).hidden_states[q][0]

def bins(n, t): return [(math.floor(i*n/t), math.ceil((i+1)*n/t)) for i in range(t)]

def by_hand(method, gen, h, t, last=None, off_by_one=False):
    "The prompt of one text from its states `[n,d]`; `last`: the decoder's last context row"
    def down(r): return F.linear(r, gen.down.weight, gen.down.bias)
    def up(r): return F.linear(r, gen.up.weight, gen.up.bias)
    if method=='lpt-npg': return up(F.relu(down(h[0] if last is None else h[last]))).reshape(t, -1)
    u = [down(r) for r in (h if last is None else h[:last] if off_by_one else h[:last+1])]
    pool = {'lpt-appg':lambda rows: sum(rows)/len(rows),
        'lpt-mppg':lambda rows: torch.stack(rows).max(0).values}[method]
    return torch.stack([up(F.relu(pool(u[a:b]))) for a,b in bins(len(u), t)])

@pytest.mark.parametrize('t', [4,40], ids=['shorter than the texts','longer'])
@pytest.mark.parametrize('q', [0,1,2])
@pytest.mark.parametrize('family', FAMILY)
@pytest.mark.parametrize('method', ['lpt-npg','lpt-appg','lpt-mppg'])
def test_generators_are_the_papers(method, family, q, t):
    bb = backbone(family)
    model = model_of(method, bb, q, t=t)
    batch = batch_of(bb, template='code')
    lengths = batch['keep'].sum(1)
    assert lengths.min()<lengths.max() and (t<lengths.min() or t>lengths.max())
    with torch.no_grad():
        got,_ = prompt_of(model, batch)
        for i in range(len(got)):
            x = one(batch, i)
            last = int(x['mask']) if family=='gpt2' else None
            same(got[i], by_hand(method, model.sources[0], states_by_hand(bb, x, q), t, last), 2e-5)

@pytest.mark.parametrize('q', [0,1,2])
@pytest.mark.parametrize('family', FAMILY)
@pytest.mark.parametrize('method', ['lpt-appg','lpt-mppg'])
def test_the_whole_model_by_hand(method, family, q):
    """Prompt in front of the states after q layers, the remaining layers, the frozen language-model head at the
    answer's row, two label words"""
    bb,task,t = backbone(family),small_task(),4
    model = model_of(method, bb, q)
    batch = batch_of(bb, template='code')
    words = task.word_ids(bb.tokenizer)
    with torch.no_grad():
        got = model(batch)
        for i in range(len(got)):
            x = one(batch, i)
            h = states_by_hand(bb, x, q)
            h = torch.cat([by_hand(method, model.sources[0], h, t, int(x['mask']) if family=='gpt2' else None),
                h])[None]
            mask,more = torch.full((h.shape[1],)*2, float('-inf')).triu(1)[None,None] if family=='gpt2' else None,{}
            if family=='deberta':
                enc = bb.base.encoder
                mask,more = torch.ones(1, 1, *(h.shape[1],)*2).long(),dict(relative_pos=enc.get_rel_pos(h),
                    rel_embeddings=enc.get_rel_embedding())
            for layer in (bb.base.h if family=='gpt2' else bb.base.encoder.layer)[q:]:
                h = layer(h, attention_mask=mask, **more)
                h = h[0] if isinstance(h, tuple) else h
            if family=='gpt2': h = bb.base.ln_f(h)
            head = next(getattr(bb.model, n) for n in ('lm_head','cls','lm_predictions') if hasattr(bb.model, n))
            row = h[0,t+x['mask'][0]]
            same(got[i], (head(row, bb.words) if hasattr(bb.model, 'lm_predictions') else head(row))[words], 1e-4)

@pytest.mark.parametrize('head', ['verbalizer','classification'])
@pytest.mark.parametrize('family', FAMILY)
@pytest.mark.parametrize('method', SOURCES)
def test_padding_and_company_change_nothing(method, family, head):
    bb = backbone(family)
    model = model_of(method, bb, head=head)
    batch = batch_of(bb, template='code' if head=='verbalizer' else None)
    with torch.no_grad():
        together = model(batch)
        order = torch.tensor([3,0,5,1,4,2])
        same(torch.cat([model(one(batch, i)) for i in range(len(together))]), together)
        same(model({k: v[order] for k,v in batch.items()}), together[order])
        far = {k: F.pad(v, (0,7)) if v.dim()==2 else v for k,v in batch.items()}
        same(model(far), together)
    assert (together[0]-together[1]).abs().max()>1e-3

# --- below the prompt

@pytest.mark.parametrize('layer', [0,1,2])
@pytest.mark.parametrize('family', FAMILY)
@pytest.mark.parametrize('method', SOURCES)
def test_below_the_prompt_nothing_is_saved(method, family, layer, monkeypatch):
    bb = backbone(family)
    model = model_of(method, bb, layer, 'classification').train()
    batch = batch_of(bb)
    saved,inner = {},bb.layer
    def watched(k, h, mask, kv=None):
        saved[k] = 0
        def pack(x):
            saved[k] += 1
            return x
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x): out = inner(k, h, mask, kv)
        assert out.requires_grad==(k>=layer)
        return out
    monkeypatch.setattr(bb, 'layer', watched)
    model.loss(batch).backward()
    assert all(saved[k]==0 for k in range(layer)) and all(saved[k]>0 for k in range(layer, 3))
    assert all(p.grad is not None and p.grad.any() for p in model.sources.parameters())
    assert all(p.grad is None for p in bb.model.parameters())

@pytest.mark.parametrize('family', FAMILY)
@pytest.mark.parametrize('method', SOURCES)
def test_dropout_below_is_off_unless_asked_for(method, family):
    bb = backbone(family)
    batch = batch_of(bb)
    (_,a),(_,b) = [prompt_of(model_of(method, bb, 2, 'classification').train(), batch) for _ in range(2)]
    assert torch.equal(a, b)
    (_,a),(_,b) = [prompt_of(model_of(method, bb, 2, 'classification', lower_dropout=True).train(), batch)
        for _ in range(2)]
    torch.manual_seed(1)
    c = run_layers(bb, batch, stop=2).h
    assert (a-c).abs().max()>1e-3
    bb.model.eval()

@pytest.mark.parametrize('rate', [0.,.1,.5])
@pytest.mark.parametrize('method', ['lpt-npg','lpt-appg','lpt-mppg'])
def test_dropout_on_generated_prompts(method, rate):
    bb = backbone()
    model = model_of(method, bb, t=40, dropout=rate)
    batch = batch_of(bb)
    model.train()
    torch.manual_seed(3)
    p,_ = prompt_of(model, batch)
    q,_ = prompt_of(model.eval(), batch)
    assert abs((p==0).float().mean()-rate)<.03 and (q!=0).all()
    same(p[p!=0], (q/(1-rate))[p!=0]) # what remains is scaled up, as dropout does

def test_static_prompts_have_no_dropout():
    bb = backbone()
    model = model_of('lpt', bb).train()
    p,_ = prompt_of(model, batch_of(bb))
    assert (p!=0).all()

# --- decoders

@pytest.mark.parametrize('template', ['code',None])
@pytest.mark.parametrize('method', ['lpt-npg','lpt-appg','lpt-mppg'])
def test_the_last_context_word(method, template):
    "NPG reads it; pooling includes it, or with `skip_last` leaves out exactly that row, as the released code does"
    bb = backbone('gpt2')
    batch = batch_of(bb, template=template)
    q = 2
    kw = {} if method=='lpt-npg' else dict(skip_last=True)
    model = model_of(method, bb, q, **kw)
    with torch.no_grad():
        got,h = prompt_of(model, batch)
        for i in range(len(got)):
            x = one(batch, i)
            last = int(batch['keep'][i].sum())-1
            if template: assert last==int(batch['mask'][i]) # the template ends where the answer begins
            same(got[i], by_hand(method, model.sources[0], states_by_hand(bb, x, q), 4, last, off_by_one=True), 2e-5)
        if kw: assert (got-prompt_of(model_of(method, bb, q), batch)[0]).abs().max()>1e-3

def test_skip_last_is_for_decoders():
    bb = backbone()
    batch = batch_of(bb, template='code')
    model = model_of('lpt-appg', bb)
    with torch.no_grad():
        want = prompt_of(model, batch)[0]
        model.sources[0].skip_last = True
        assert torch.equal(prompt_of(model, batch)[0], want)

@pytest.mark.parametrize('method', SOURCES)
def test_decoders_prompts_stand_in_front(method):
    bb = backbone('gpt2')
    model = model_of(method, bb, 1)
    batch = batch_of(bb, template='code')
    with torch.no_grad():
        p,before = prompt_of(model, batch)
        ctx = run_layers(bb, batch, model.plan)
        assert ctx.h.shape[1]==batch['ids'].shape[1]+4 and torch.equal(ctx.rows['mask'],
            batch['mask']+4) and not ctx.text[:,:4].any()
        # upper layers are causal: the prompt's rows see no word, except through the generator
        alone = p
        for k in (1,2): alone = bb.layer(k, alone, bb.given(torch.ones(p.shape[:2]).long(), p))
        same(ctx.h[:,:4], bb.norm(alone), 1e-4)

# --- sizes and inits

SIZES = [('lpt',20,'roberta-large',20_480), ('lpt-npg',5,'roberta-large',791_680),
    ('lpt-appg',10,'roberta-large',263_296), ('lpt-mppg',20,'roberta-large',263_296),
    ('lpt',20,'gpt2-large',25_600), ('lpt-npg',5,'gpt2-large',989_568), ('lpt-appg',20,'gpt2-large',329_088),
    ('lpt-mppg',15,'gpt2-large',329_088),
    ('lpt-npg',5,'deberta-large',791_680), ('lpt-appg',10,'deberta-large',263_296),
    ('lpt-npg',5,'roberta-base',593_792), ('lpt-appg',10,'roberta-base',197_504)]

@pytest.mark.parametrize('method,t,name,published', SIZES)
def test_published_sizes(method, t, name, published):
    bb = load_backbone(name, weights='meta')
    with torch.device('meta'):
        source = dict(zip(SOURCES, (SoftPrompt(t, bb.d), NaivePromptGenerator(bb.d, t), PoolingPromptGenerator(bb.d, t),
            PoolingPromptGenerator(bb.d, t, pool='max'))))[method]
    model = PromptedModel(bb, VerbalizerHead(bb, [0,1]), lpt_plan(bb, source))
    assert count_parameters(model)==dict(prompt=published, head=0, backbone=0) # the language-model head stays frozen
    # LPT's 13th and 19th layer
    assert model.first=={'roberta-large':12,'gpt2-large':18,'deberta-large':12,'roberta-base':6}[name]

@pytest.mark.parametrize('make', [lambda: NaivePromptGenerator(512, 5, 128),
    lambda: PoolingPromptGenerator(512, 5, 128)], ids=['NPG','PPG'])
def test_inits_are_pytorchs(make):
    torch.manual_seed(0)
    g = make()
    for layer in (g.down, g.up):
        for p in (layer.weight, layer.bias):
            edge = layer.in_features**-.5
            assert .9*edge<p.abs().max()<=edge and p.std().sub(edge/3**.5).abs()<.08*edge
    assert .2<g.up(g.down(torch.randn(500, 512)).relu()).std()<.28 # SPEC 4.2: about 0.24 at m=128

def test_static_init():
    torch.manual_seed(0)
    assert abs(SoftPrompt(20, 1024, std=1.).p.std()-1)<.02

# --- refused

@pytest.mark.parametrize('make,words', [(lambda: NaivePromptGenerator(8, t=0), ['NPG','t=0','at least 1']),
    (lambda: PoolingPromptGenerator(8, m=0), ['PPG','m=0','at least 1']),
    (lambda: PoolingPromptGenerator(8, pool='avg'), ["pooling 'avg'","'mean' (APPG)","'max' (MPPG)"]),
    (lambda: adaptive_pool(torch.zeros(1, 2, 3), torch.ones(1, 2).long(), 2, 'sum'), ["'sum'","'max'"]),
    (lambda: adaptive_pool(torch.zeros(2, 2, 3), torch.tensor([[1,1],[0,0]]), 2),
    ['without rows','at least one token']),
    (lambda: run_layers(backbone(), batch_of(backbone()), lpt_plan(backbone(), SoftPrompt(2, 32), 3)),
    ['layer 3','0 to 2'])])
def test_what_is_refused(make, words):
    with pytest.raises(ValueError) as e: make()
    assert all(w in str(e.value) for w in words), str(e.value)

def test_pooling_takes_a_mask_of_any_kind_and_no_zero_rows():
    x,keep = torch.randn(2, 5, 3),torch.tensor([[1,1,1,0,0],[1,1,1,1,1]])
    assert torch.equal(adaptive_pool(x, keep.bool(), 2), adaptive_pool(x, keep, 2))
    with pytest.raises(ValueError, match='rows to make, t=0: it must be at least 1'): adaptive_pool(x, keep, 0)
