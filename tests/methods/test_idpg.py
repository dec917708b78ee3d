"""S-IDPG: the generator against its formula term by term, two passes of Hugging Face's own forward, M(x) and who
computes it, the way back to prompt tuning, sizes, and what is refused."""
import pytest
import torch
import torch.nn.functional as F
from small import backbone, batch_of, one, same, small_task, text_of
from torch import nn

from idp_tutorial.methods.idpg import GeneratedPrompt, PromptGenerator, idpg_plan
from idp_tutorial.methods.phm import PHMLinear
from idp_tutorial.methods.prompt_tuning import SoftPrompt, prompt_plan
from idp_tutorial.methods.sentence_vectors import SentenceVector, Standardise, mean_sentence, noisy_sentence, sentence
from idp_tutorial.model.heads import ClassificationHead, VerbalizerHead
from idp_tutorial.model.layer_loop import run_layers
from idp_tutorial.model.plan import Context
from idp_tutorial.model.pretrained import load_backbone
from idp_tutorial.model.prompted_model import PromptedModel, count_parameters

FAMILY,t,d = ('roberta','bert','gpt2','deberta'),3,32
KINDS = [dict(kind='dnn'), dict(kind='phm', n=4), dict(kind='phm', n=4, shared_A=True)]

def loud(g, std=.3):
    "A generator whose output shows"
    with torch.no_grad(): [p.normal_(std=std) for p in g.parameters()]
    return g
def generator(kind='phm', n=4, d_in=d, **kw): return loud(PromptGenerator(d_in, d, t, 8, kind, n, **kw))
def model_of(bb, g, position=0, n_out=2, encoder=None, **kw):
    return PromptedModel(bb, ClassificationHead(d, n_out, 'mean'), idpg_plan(bb, g, position, encoder, **kw)).eval()
def matrix(layer): # [d_in,d_out], entry by entry
    "W of a PHM layer: W[i·p+k, j·r+l] = Σ_q A[q,i,j]·B[q,k,l]"
    if not isinstance(layer, PHMLinear): return layer.weight.T
    A,B = layer.A,layer.B
    n,p,r = B.shape
    rows = []
    for i in range(n):
        for k in range(p): rows.append(torch.cat([sum(A[q,i,j]*B[q,k] for q in range(n)) for j in range(n)]))
    return torch.stack(rows)
def by_hand(g, z, layer=0): # one text: `[d_in]` → `[t,d]`
    u = z@matrix(g.down)+g.down.bias
    v = .5*u*(1+torch.erf(u/2**.5))
    return (v@matrix(g.up)+g.b2[layer]).reshape(t, -1)

# --- the generator

@pytest.mark.parametrize('kw', KINDS, ids=str)
def test_generator_is_the_formula(kw):
    g = generator(**kw, tables=3).eval()
    z = torch.randn(5, d)
    for k in range(3): same(g(z, k), torch.stack([by_hand(g, o, k) for o in z]))
    assert (g.down.A is g.up.A)==bool(kw.get('shared_A')) if kw['kind']=='phm' else True

@pytest.mark.parametrize('residual,layer_norm,want,extra',
    [(None,True,lambda p,z,ln: ln(p),1), ('paper',False,lambda p,z,ln: p+z,0),
    ('paper',True,lambda p,z,ln: ln(ln(p)+ln(z)),3),
    ('code',False,lambda p,z,ln: ln(p)+z,1), ('code',True,lambda p,z,ln: ln(ln(p)+z),2)])
def test_table_7(residual, layer_norm, want, extra):
    g = PromptGenerator(d, d, t, 8, 'phm', 4, residual=residual, layer_norm=layer_norm).eval()
    z = torch.randn(5, d)
    def ln(x): return (x-x.mean(-1, keepdim=True))/(x.var(-1, unbiased=False, keepdim=True)+1e-5).sqrt()
    for o,p in zip(z, g(z)): same(p, want(by_hand(g, o), o, ln))
    assert sum(p.numel() for p in g.parameters())==sum(p.numel()
        for p in PromptGenerator(d, d, t, 8, 'phm', 4).parameters())+2*d*extra
    g(z).square().mean().backward() # not through the last norm's weights alone
    assert all(p.grad is not None for p in g.parameters())

@pytest.mark.parametrize('kind,tables,std', [('dnn',1,(.02,0.,.02,0.)), ('dnn',24,(.02,0.,.02,.02)),
    ('phm',1,(.05,.05,.05,.02)), ('phm',24,(.05,.05,.05,.02))])
def test_init_is_the_authors(kind, tables, std):
    g = PromptGenerator(1024, 1024, 5, 256, kind, tables=tables)
    w = [l.B if kind=='phm' else l.weight for l in (g.down,g.up)]
    for p,s in zip((w[0], g.down.bias, w[1], g.b2), std):
        assert abs(p.std().item()-s)<=.12*s and abs(p.mean().item())<=.2*s
    if kind=='phm': assert all(abs(l.A.std().item()-.05)<.004 for l in (g.down,g.up))

def test_dropout_after_gelu_and_nowhere_on_the_prompt():
    g = generator(dropout=.5)
    z = torch.randn(64, d)
    p,q = g(z),g(z)
    assert (p-q).abs().max()>1e-2 and (p!=0).all()
    g.eval()
    assert torch.equal(g(z), g(z))
    g = generator('dnn', dropout=.5).train()
    with torch.no_grad():
        g.up.weight.copy_(torch.eye(8).repeat(t*d//8, 1))
        g.b2.zero_()
        v = F.gelu(g.down(z))
    p = g(z).reshape(64, -1, 8)
    same(p[:,0], p[:,5])
    assert .35<(p[:,0]==0).float().mean()<.65
    kept = p[:,0]!=0
    same(p[:,0][kept], 2*v[kept])

# --- two passes

PLACES = [(f,p,pair) for f in ('roberta','bert') for pair in (False,True) for p in ((0,1,2,3,4) if pair else (0,1,4))]
@pytest.mark.parametrize('family,position,pair', PLACES)
def test_two_passes_of_hugging_face(family, position, pair):
    bb,g = backbone(family),generator()
    model = model_of(bb, g, position)
    batch = batch_of(bb, small_task('entailment' if pair else 'sentiment'), 4)
    got = model(batch)
    sep = bb.tokenizer.sep_token_id
    assert batch['keep'].sum(1).min()<batch['keep'].sum(1).max()
    for i in range(4):
        x = one(batch, i)
        ids = x['ids'][0].tolist()
        n = len(ids)
        z = bb.base(input_ids=x['ids'], attention_mask=x['keep'], token_type_ids=x['types']).last_hidden_state[0,0]
        p,e = by_hand(g, z),bb.words(x['ids'][0])
        s = bb.words.weight[sep][None]
        first = ids.index(sep)
        gap = 2 # the tokenizer of both is RoBERTa's
        at = {0:1, 1:first, 2:first+gap, 3:n-1, 4:n}[position]
        new = torch.cat([s, p, s]) if position==4 else p
        types = torch.zeros(1, n+len(new), dtype=torch.long)
        types[0] = torch.cat([x['types'][0,:at], torch.zeros(len(new), dtype=torch.long), x['types'][0,at:]])
        h = bb.base(inputs_embeds=torch.cat([e[:at], new, e[at:]])[None], attention_mask=torch.ones_like(types),
            token_type_ids=types).last_hidden_state[0]
        same(got[i], model.head.net(torch.cat([h[:at], h[at+len(new):]]).mean(0)))

@pytest.mark.parametrize('position', [0,1,2,3,4,None])
@pytest.mark.parametrize('family', FAMILY)
def test_padding_and_neighbours_change_nothing(family, position):
    bb = backbone(family)
    batch = batch_of(bb, small_task('entailment'), 5)
    if family=='gpt2' and position: return
    model = model_of(bb, generator(), position)
    with torch.no_grad():
        together = model(batch)
        order = torch.randperm(5)
        same(torch.cat([model(one(batch, i)) for i in range(5)]), together)
        same(model({k: v[order] for k,v in text_of(batch).items()}), together[order])
    assert (together[0]-together[1]).abs().max()>1e-3

def test_positions_a_text_does_not_have():
    bb = backbone()
    batch = batch_of(bb)
    for p in (2,3):
        with pytest.raises(ValueError, match='use position 0, 1 or 4'): model_of(bb, generator(), p)(batch)
    with pytest.raises(ValueError, match='use position 0'): idpg_plan(backbone('gpt2'), generator(), 4)

@pytest.mark.parametrize('family', ['roberta','gpt2'])
def test_with_a_verbalizer(family):
    bb,task = backbone(family),small_task('questions')
    batch = batch_of(bb, task, template='code')
    model = PromptedModel(bb, VerbalizerHead(bb, task.word_ids(bb.tokenizer)), idpg_plan(bb, generator())).eval()
    same(torch.cat([model(one(batch, i)) for i in range(len(batch['ids']))]), model(batch), 1e-4)

# --- M(x)

def passes(bb, f): # how often the first layer runs
    n = []
    hook = bb.layers[0].register_forward_hook(lambda *a: n.append(1))
    f()
    hook.remove()
    return len(n)

@pytest.mark.parametrize('family', FAMILY)
def test_sentence_vector(family):
    bb = backbone(family)
    batch = batch_of(bb)
    model = model_of(bb, generator()).train()
    given = set(batch)
    assert passes(bb, lambda: model(batch))==2 and set(batch)==given # what a source computes is not put into the batch
    ctx = run_layers(bb, batch, stop=0)
    z,end = sentence(ctx),batch['keep'].sum(1)-1
    assert passes(bb, lambda: sentence(ctx))==0 # the context keeps it
    assert passes(bb, lambda: model({**batch, 'sentence':z}))==1 # and so does a cache
    h = bb.base.eval()(input_ids=batch['ids'], attention_mask=batch['keep']).last_hidden_state
    same(z, h[torch.arange(len(h)),end] if family=='gpt2' else h[:,0])
    assert not z.requires_grad

def test_cached_vectors_are_used():
    bb = backbone()
    batch = batch_of(bb)
    model = model_of(bb, generator())
    a = model(batch)
    z = sentence(run_layers(bb, batch, stop=0))
    b = model({**batch, 'sentence':z.flip(0)})
    assert (a-b).abs().max()>1e-3

def test_another_encoder_takes_one_pass():
    bb = backbone()
    batch = batch_of(bb)
    vectors = torch.randn(len(batch['ids']), 12)
    model = model_of(bb, g := generator(n=4, d_in=12), encoder=lambda ctx: vectors)
    assert passes(bb, lambda: model(batch))==1 and 'sentence' not in batch
    for i in (0,3): same(model.sources[0](run_layers(bb, batch, stop=0))[i], by_hand(g, vectors[i]))

def test_an_encoder_with_parameters_is_trained_and_counted():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Linear(d, 12)
        def forward(self, ctx): return self.w(ctx.mean())
    bb = backbone()
    model = model_of(bb, g := generator(d_in=12), encoder=(e := Words()))
    assert count_parameters(model)['prompt']==sum(p.numel() for p in [*g.parameters(),*e.parameters()])
    model.loss(batch_of(bb)).backward()
    assert e.w.weight.grad.any()

def test_dropout_on_z_is_drawn_once_a_pass():
    bb = backbone()
    batch = batch_of(bb)
    read = SentenceVector(dropout=.5).train()
    a,b = [run_layers(bb, batch, stop=0) for _ in range(2)]
    assert torch.equal(read(a), read(a)) and not torch.equal(read(a), read(b))
    zero = read(a)==0
    assert .3<zero.float().mean()<.7
    same(read(a)[~zero], 2*sentence(a)[~zero])
    assert torch.equal(read.eval()(run_layers(bb, batch, stop=0)), sentence(a))

@pytest.mark.parametrize('family', FAMILY)
def test_mean_and_noisy_vectors(family):
    bb = backbone(family)
    batch = batch_of(bb)
    bb.model.train()
    def ctx(): return run_layers(bb, batch, stop=0)
    a,b = [noisy_sentence(ctx()) for _ in range(2)]
    assert (a-b).abs().max()>1e-3 and not a.requires_grad
    m = mean_sentence(ctx())
    assert all(x.training for x in bb.model.modules()) and not m.requires_grad
    again = ctx()
    assert torch.equal(mean_sentence(again), m) and passes(bb, lambda: mean_sentence(again))==0
    bb.model.eval()
    same(noisy_sentence(ctx()), sentence(ctx()))
    for i in (0,1,4):
        x = one(batch, i)
        same(m[i], bb.base(input_ids=x['ids'], attention_mask=x['keep']).last_hidden_state[0].mean(0))

# --- what depends on what

@pytest.mark.parametrize('kw', KINDS, ids=str)
@pytest.mark.parametrize('family', FAMILY)
def test_gradients(family, kw):
    bb = backbone(family)
    batch = batch_of(bb)
    model = model_of(bb, generator(**kw)).train()
    model.loss(batch).backward()
    assert all(p.grad is not None and p.grad.any() for p in model.trained().values())
    assert all(p.grad is None for p in bb.model.parameters())

@pytest.mark.parametrize('position', [0,1,4,None])
@pytest.mark.parametrize('family', FAMILY)
def test_without_w2_it_is_prompt_tuning(family, position):
    "To the bit, in the answer and in the gradient, in training mode too: dropout has nothing to act on"
    if family=='gpt2' and position: return
    bb = backbone(family, hidden_dropout_prob=0.,
        attention_probs_dropout_prob=0.) if family=='roberta' else backbone(family)
    batch,g,soft = batch_of(bb),generator(),SoftPrompt(t, d, std=.5)
    with torch.no_grad():
        [w.zero_() for w in g.up.parameters()]
        g.b2.copy_(soft.p.flatten())
    ours = model_of(bb, g, position)
    static = PromptedModel(bb, ours.head, prompt_plan(bb, soft, position)).eval()
    if family=='roberta':
        ours.train()
        static.train()
    a,b = ours(batch),static(batch)
    assert torch.equal(a, b) and (a-PromptedModel(bb, ours.head).eval()(batch)).abs().max()>1e-3
    for y in (a,b): (y*torch.arange(1., 1+y.numel()).view_as(y)).sum().backward()
    assert soft.p.grad.any() and torch.equal(g.b2.grad[0], soft.p.grad.flatten())

def test_a_float32_generator_on_a_bfloat16_backbone():
    bb = backbone(dtype=torch.bfloat16)
    batch = batch_of(bb)
    g = generator()
    plan = idpg_plan(bb, g)
    h = run_layers(bb, batch, plan).h
    assert h.dtype==torch.bfloat16
    h.float().square().sum().backward()
    assert g.b2.grad.dtype==torch.float32 and g.b2.grad.any()

def test_the_authors_low_rank_generator():
    "`lphm`: rank 1, one rule, factors that start at .2236; the rest starts as with full factors"
    g = PromptGenerator(1024, 1024, 5, 256, n=4, shared_A=True, rank=1)
    for l in (g.down, g.up):
        assert l.A is g.down.A and all(abs(p.std()-.2236)<.02 for p in (l.s, l.t)) and abs((l.s@l.t).std()-.05)<.01
    assert abs(g.down.bias.std()-.05)<.01 and abs(g.b2.std()-.02)<.002 and abs(g.down.A.std()-.05)<.015
    assert sum(p.numel() for p in g.parameters())==4**3+(1024+256)+(256+5120)+256+5120

# --- sizes

SIZES = [('S-IDPG-DNN',dict(kind='dnn'),'roberta-large',1_578_240), ('S-IDPG-PHM, code',{},'roberta-large',111_872),
    ('S-IDPG-PHM, paper 105K',dict(shared_A=True),'roberta-large',107_776),
    ('LPT Table 5: m=d/4',dict(m=320),'gpt2-large',168_512), ('m=256',dict(m=256),'gpt2-large',137_728)]
@pytest.mark.parametrize('kw,name,published', [s[1:] for s in SIZES], ids=[s[0] for s in SIZES])
def test_published_sizes(kw, name, published):
    bb = load_backbone(name, weights='meta')
    with torch.device('meta'):
        model = PromptedModel(bb, ClassificationHead(bb.d, 2),
            idpg_plan(bb, PromptGenerator(bb.d, bb.d, 5, **{'m':256, **kw})))
    # with its head 113,922: LPT's 114K
    assert count_parameters(model)==dict(prompt=published, head=2*bb.d+2, backbone=0)
    m,n = kw.get('m', 256),16
    if kw.get('kind')!='dnn': assert published==(bb.d*m//n+m)+(m*5*bb.d//n+5*bb.d)+(1 if kw.get('shared_A') else 2)*n**3
    else: assert published==m*(bb.d+1)+5*bb.d*(m+1) # §3.1

# --- refused

@pytest.mark.parametrize('args,kw,words', [((8,8,0),{},['t=0','at least 1']), ((8,8,5,0),{},['m=0','at least 1']),
    ((8,8),dict(kind='mlp'),["'mlp'","'phm' or 'dnn'"]),
    ((300,128),{},['n=16','divide both widths']), ((8,8),dict(residual=True, kind='dnn'),
    ['residual True',"'paper' or 'code'"]), ((300,128),dict(n=4, residual='paper'),['300 and 128','residual=None']),
    ((8,8),dict(kind='dnn', shared_A=True),['shared_A=True',"use kind='phm'"]),
    ((8,8),dict(kind='dnn', rank=1),['rank=1',"use kind='phm'"]),
    ((8,8,5,8),dict(n=4, rank=0),['rank=0','at least 1'])])
def test_what_cannot_be_built(args, kw, words):
    with pytest.raises(ValueError) as e: PromptGenerator(*args, **kw)
    assert all(w in str(e.value) for w in words), str(e.value)

def test_a_vector_of_another_width():
    bb = backbone()
    plan = idpg_plan(bb, generator(n=2, d_in=12))
    with pytest.raises(ValueError, match=r'\(6, 32\).*reads 12.*d_in=32'): run_layers(bb, batch_of(bb), plan)
    with pytest.raises(ValueError, match='needed is'):
        run_layers(bb, batch_of(bb), idpg_plan(bb, PromptGenerator(d, 16, t, 8, n=4)))

def test_a_prompt_source_is_a_vector_and_a_generator():
    g = generator(tables=2).eval()
    bb = backbone()
    ctx: Context = run_layers(bb, batch_of(bb), stop=1)
    for k in (0,1): assert torch.equal(GeneratedPrompt(g, Context.mean, k)(ctx), g(ctx.mean(), k))
    assert not torch.equal(g(ctx.mean(), 0), g(ctx.mean(), 1))


# --- in units of its spread

def test_standardise_learns_mean_and_spread_in_training_only():
    s,z = Standardise(d),2+.2*torch.randn(400, d)*torch.linspace(1, 5, d)
    assert not list(s.parameters())                                       # nothing to train, nothing to count
    same(s.eval()(z), z)                                                  # nothing seen: as it is
    s.train()
    [s(part) for part in z.split(80)]
    s.eval()
    want = (z-z.mean(0))/z.std(0, unbiased=False)
    same(s(z), want, 1e-3)
    same(s(z[:1]), want[:1], 1e-3)                # a text alone
    s(z+100)
    same(s(z), want, 1e-3)                                      # evaluation teaches nothing
    other = Standardise(d).eval()
    other.load_state_dict(s.state_dict())
    same(other(z), want, 1e-3) # and is saved with the prompt

def test_standardise_survives_a_dimension_that_never_varies():
    s = Standardise(2)
    z = torch.stack([torch.randn(50), torch.full((50,), 3.)], 1)
    assert s(z).isfinite().all() and s.eval()(z)[:,1].abs().max()<1e-2

def test_plan_reads_the_standardised_vector_where_told():
    bb = backbone('roberta')
    batch = batch_of(bb)
    ctx = run_layers(bb, batch, stop=0)
    def source(**kw): return idpg_plan(bb, PromptGenerator(d, d, t, 8, 'dnn'), **kw)['words'].source
    plain,ready = source(),source(standardise=True)
    assert not any(isinstance(m, Standardise) for m in plain.modules())
    seen = []
    hook = ready.generator.register_forward_pre_hook(lambda m, a: seen.append(a[0]))
    ready.train()
    ready.read.dropout.eval()
    ready(ctx)
    hook.remove()
    z = sentence(ctx)
    same(seen[0], (z-z.mean(0))/z.std(0, unbiased=False), 1e-3)

def test_statistics_are_of_vectors_without_dropout():
    bb = backbone('roberta')
    ctx = run_layers(bb, batch_of(bb), stop=0)
    read = SentenceVector(dropout=.5, standardise=d).train()
    z = read(ctx)
    same(read.scale.total, sentence(ctx).sum(0))
    assert .3<(z==0).float().mean()<.7


@pytest.mark.parametrize('mean', [0., 100., 3000., 1e5])
def test_a_large_mean_does_not_blow_a_vector_up(mean):
    "Float32 sums of squares say nothing of a spread of 1 beside 3000: what is left stays small"
    g,s = torch.Generator().manual_seed(0),Standardise(8)
    batches = [mean+torch.randn(32, 8, generator=g) for _ in range(20)]
    for z in batches:
        s(z)
    out = torch.cat([s.eval()(z) for z in batches])
    assert out.abs().max()<20 and (mean>100 or abs(out.std()-1)<.1)
