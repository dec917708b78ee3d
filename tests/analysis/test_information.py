"The probe that measures information, where it is known; and the states of a model with a prompt."
import math

import pytest
import torch
from small import FAMILY, batch_of, same, setting, small_task

from idp_tutorial.analysis import information
from idp_tutorial.analysis.information import Probe, StateProbe, mutual_information, probe_layers, states_by_layer
from idp_tutorial.methods.lpt import NaivePromptGenerator, lpt_plan
from idp_tutorial.methods.prompt_tuning import SoftPrompt
from idp_tutorial.model.layer_loop import run_layers
from idp_tutorial.model.plan import Step
from idp_tutorial.model.prompted_model import PromptedModel


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

def test_probe_is_chosen_on_validation():
    h,y = [torch.tensor([[2.*(i%2)-1]]) for i in range(40)],[i%2 for i in range(40)]
    def bits(n):
        return mutual_information(dict.fromkeys(('train','validation','test'), h),
            dict(train=y, validation=[1-v for v in y], test=y), depth=0, steps=n, looks=n, lr=.1)['bits']
    assert bits(20)==bits(1) # every step makes the reversed validation labels worse and the test labels better

def test_of_equal_validation_losses_the_first_counts(monkeypatch):
    said = iter([(1.,.5),(9.,.1),(1.,.5),(2.,.9)]) # validation and test, twice: the test texts decide nothing
    monkeypatch.setattr(information, '_scored', lambda *a: next(said))
    found = mutual_information(*both_of(parity, (40,20,20)), width=4, steps=2, looks=2)
    assert found['bits']==found['entropy']-9

def test_entropy_is_of_the_test_labels():
    r = mutual_information(dict.fromkeys(('train','validation','test'), [torch.zeros(1, 1)]*40),
        dict(train=[0,1]*20, validation=[0,1]*20, test=[0,0,0,1]*10), depth=0, steps=1)
    assert abs(r['entropy']-.8113)<1e-3

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

def test_the_probe_can_see_the_prompt():
    bb,task,_,head = setting()
    model = PromptedModel(bb, head, lpt_plan(bb, SoftPrompt(4, bb.d, std=1.), 1))
    a,b = [probe_layers(model, task, [2], n=24, prompt=p, depth=0, steps=5)[0]['bits'] for p in (False,True)]
    assert a!=b

@pytest.mark.parametrize('make,words', [
    (lambda: Probe(width=10, heads=4), ['width 10','4 heads']),
    (lambda: Probe(depth=-1), ['depth=-1','0 is a linear probe']),
    (lambda: Probe(lr=0.), ['lr=0.0','positive']),
    *[(lambda name=name: mutual_information({}, {}, **{name:0}), [f'{name}=0','at least 1'])
        for name in ('steps','looks','batch_size','width','heads')],
    (lambda: probe_layers(PromptedModel(setting()[0], None), small_task('similarity')), ['regression','needs classes']),
    (lambda: probe_layers(PromptedModel(setting()[0], None), small_task('in-short')), ['texts','needs classes']),
    (lambda: probe_layers(PromptedModel(setting()[0], None), small_task(), [1,4]), ['after 4 layers','0 to 3']),
    (lambda: mutual_information(dict(train=[torch.zeros(1, 2)]*2, validation=[], test=[]),
        dict(train=[0,1], validation=[], test=[])), ['0 states and 0 labels','at least one'])])
def test_what_is_refused(make, words):
    with pytest.raises(ValueError) as e:
        make()
    assert all(w in str(e.value) for w in words), str(e.value)
