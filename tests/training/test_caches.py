"""States kept on disk: the same losses as without them, nothing computed twice, nothing stale, nothing half-written,
and which layers still run."""
import errno
import hashlib
import os
import shutil
import time
from collections import namedtuple
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from small import backbone, config, model_of, small_task
from torch import nn

from idp_tutorial.data.batches import collate
from idp_tutorial.data.synthetic import make_rows
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.efficiency.part_times import cache_times
from idp_tutorial.methods.idpg import PromptGenerator, idpg_plan
from idp_tutorial.methods.idpg_multilayer import multilayer_plan
from idp_tutorial.methods.lpt import NaivePromptGenerator
from idp_tutorial.methods.sentence_vectors import mean_sentence, sentence
from idp_tutorial.model.backbone import fingerprint
from idp_tutorial.model.heads import ClassificationHead, VerbalizerHead
from idp_tutorial.model.layer_loop import run_layers
from idp_tutorial.model.plan import Step
from idp_tutorial.model.prompted_model import PromptedModel
from idp_tutorial.training import caches
from idp_tutorial.training.caches import cache_states, sentences_used, with_caches
from idp_tutorial.training.evaluation import evaluate
from idp_tutorial.training.fit import fit
from idp_tutorial.training.state_store import StateStore, cache_size, text_key

FAMILIES = ['roberta','bert','gpt2','deberta']

@pytest.fixture(scope='module')
def bbs(): return {f: backbone(f) for f in FAMILIES}

class FromSentence(nn.Module):
    "A prompt from M(x), as IDPG's is"
    def __init__(self, d, t=3):
        super().__init__()
        self.net,self.d,self.drop = nn.Linear(d, t*d),d,nn.Dropout(.1)
    def forward(self, ctx): return self.drop(self.net(sentence(ctx))).unflatten(-1, (-1,self.d))

class FromMean(FromSentence):
    "The same from the mean over the words"
    def forward(self, ctx): return self.drop(self.net(mean_sentence(ctx))).unflatten(-1, (-1,self.d))

def npg(bb): return NaivePromptGenerator(bb.d, 3, 8)
PLANS = {'late': lambda bb: {2: Step('insert', npg(bb))},
    'words': lambda bb: {'words': Step('insert', FromSentence(bb.d), 0 if bb.causal else 1)},
    'both': lambda bb: {1: Step('insert', FromSentence(bb.d))}, 'head': lambda bb: {}}
IDPG = {'m-idpg': lambda bb: multilayer_plan(bb, 3, 8, n=4),
    's-idpg': lambda bb: idpg_plan(bb, PromptGenerator(bb.d, bb.d, 3, 8, n=4), encoder=mean_sentence)}

def make(bb, plan, task=None, head='mean'):
    torch.manual_seed(0)
    task = task or small_task()
    head = VerbalizerHead(bb, task.word_ids(bb.tokenizer)) if head=='mask' else ClassificationHead(bb.d,
        len(task.labels), bb.readout if head=='cls' else head)
    return PromptedModel(bb, head, (PLANS|IDPG)[plan](bb))

def rows_of(bb, task=None, template=None, n=10, split='train'):
    task = task or small_task()
    return task.encode(task.splits[split][:n], bb.tokenizer, 60, template)

def close(a, b, atol=1e-5): torch.testing.assert_close(a, b, atol=atol, rtol=0)

# --- the store

KEYS = [bytes([i])*16 for i in range(4)]

def ragged(lengths=(3,1,4,2), d=5):
    return [np.random.default_rng(n).normal(size=(n,d)).astype(np.float32) for n in lengths]

@pytest.mark.parametrize('dtype', ['float32','float16'])
def test_a_store_gives_back_what_it_was_given_and_takes_what_was_predicted(dtype, tmp_path):
    texts = ragged()
    store = StateStore(tmp_path/'s', 5, dtype)
    store.add(KEYS, [3,1,4,2], [np.concatenate(texts[:2]), np.concatenate(texts[2:])])
    for s in (store, StateStore(tmp_path/'s', 5, dtype)):
        assert len(s)==4 and KEYS[0] in s and b'x'*16 not in s
        for k,t in zip(KEYS, texts): np.testing.assert_array_equal(s[k], t.astype(dtype))
    files = [f for f in tmp_path.rglob('*') if f.is_file()]
    assert sum(f.stat().st_size for f in files)==cache_size([3,1,4,2], 5, dtype)==10*5*np.dtype(dtype).itemsize+4*32+16
    assert not store[KEYS[0]].flags.owndata and not store[KEYS[0]].flags.writeable # a view of the file, not a copy

def test_parts_add_up_and_a_part_that_is_there_is_left_alone(tmp_path):
    texts = ragged()
    a,b = StateStore(tmp_path, 5),StateStore(tmp_path, 5)
    a.add(KEYS[:2], [3,1], [np.concatenate(texts[:2])])
    b.add(KEYS[2:], [4,2], [np.concatenate(texts[2:])])
    assert len(b)==4 and len(a)==2
    a.add(KEYS[2:], [4,2], [np.zeros((6,5))]) # as if two processes had computed the same
    assert len(a)==4 and len([*tmp_path.iterdir()])==2
    np.testing.assert_array_equal(a[KEYS[3]], texts[3])

def breaks(error):
    yield np.ones((3,5), np.float32)
    raise error

@pytest.mark.parametrize('error', [KeyboardInterrupt(), RuntimeError('out of memory'),
    OSError(errno.ENOSPC, 'No space left on device')], ids=['stopped','failed','disk full'])
def test_nothing_half_written(error, tmp_path):
    store = StateStore(tmp_path, 5)
    with pytest.raises(type(error)): store.add(KEYS, [3,1,4,2], breaks(error))
    assert not any(tmp_path.iterdir()) and len(store)==0
    store.add(KEYS[:1], [3], ragged()[:1])
    assert len(store)==1

def test_what_a_killed_process_leaves_is_no_part_of_the_store(tmp_path):
    old,young = tmp_path/'.writing-old',tmp_path/'.writing-young'
    for f in (old, young):
        f.mkdir()
        (f/'rows').write_bytes(b'half')
    os.utime(old, (time.time()-2*86_400,)*2)
    store = StateStore(tmp_path, 5)
    assert len(store)==0
    store.add(KEYS[:1], [3], ragged()[:1])
    assert not old.exists() and young.exists() and len(store)==1

def flipped(file, at=-1):
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)

@pytest.mark.parametrize('harm', ['shorter','longer','no rows','no index','a row','a key','an end','the seal'])
def test_a_damaged_part_is_made_anew(harm, tmp_path, bbs):
    bb,rows = bbs['roberta'],rows_of(bbs['roberta'], n=4)
    kept,_ = cache_states(bb, rows, 2, tmp_path)
    whole = [e['hidden'].copy() for e in kept]
    file, = tmp_path.rglob('rows')
    index = file.with_name('index')
    if harm=='shorter': file.write_bytes(file.read_bytes()[:-4])
    elif harm=='longer': file.write_bytes(file.read_bytes()+b'1234')
    elif harm.startswith('no'): (file if harm=='no rows' else index).unlink()
    else: flipped(file if harm=='a row' else index, {'a row':5, 'a key':3, 'an end':16, 'the seal':-1}[harm])
    with pytest.warns(UserWarning, match='is damaged .*: its states are computed again'):
        again,said = cache_states(bb, rows, 2, tmp_path)
    assert said['computed']==len(rows)
    for e,h in zip(again, whole): np.testing.assert_array_equal(e['hidden'], h)
    assert cache_states(bb, rows, 2, tmp_path)[1]['computed']==0

def test_a_part_of_another_store_is_none_of_this_one(tmp_path):
    for name in 'ab': StateStore(tmp_path/name, 5).add(KEYS[:2], [3,1], [ragged()[i]+(name=='b') for i in range(2)])
    part, = (tmp_path/'a').iterdir()
    shutil.rmtree(part)
    shutil.copytree(tmp_path/'b'/part.name, part)
    with pytest.warns(UserWarning, match='is damaged'): assert len(StateStore(tmp_path/'a', 5))==0

def test_all_caches_together_have_a_limit(tmp_path, monkeypatch):
    monkeypatch.setenv('IDP_CACHE_LIMIT', str(2.5*cache_size([3], 5)/1e9))
    for i in range(3):
        store = StateStore(tmp_path/f'model{i}'/'layer', 5)
        store.add(KEYS[:1], [3], ragged()[:1])
        os.utime(next(store.folder.iterdir()), (i,i))
    assert [len([*(tmp_path/f'model{i}/layer').iterdir()]) for i in range(3)]==[0,1,1] # the oldest went
    with pytest.raises(ValueError, match='IDP_CACHE_LIMIT allows 0.0 MB for all caches: raise it'):
        StateStore(tmp_path/'x/y', 5).add(KEYS, [9,9,9,9], [])
    monkeypatch.setenv('IDP_CACHE_LIMIT', 'much')
    with pytest.raises(ValueError, match="IDP_CACHE_LIMIT='much': GB"):
        StateStore(tmp_path/'x/y', 5).add(KEYS[:1], [3], ragged()[:1])

def test_no_room_is_said_before_anything_is_written(tmp_path, monkeypatch, bbs):
    usage = namedtuple('usage', 'total used free')
    monkeypatch.setattr(shutil, 'disk_usage', lambda f: usage(2**40, 2**40-70_000_000, 70_000_000))
    ran = []
    monkeypatch.setattr(caches, 'run_layers', lambda *a, **kw: ran.append(1))
    examples = [dict(ids=[7]*50, types=[0]*50, label=i%2)|dict(ids=[5+i%3000,5+i//3000]+[7]*48) for i in range(600)]
    with pytest.raises(ValueError) as e: cache_states(bbs['roberta'], examples, 2, tmp_path)
    assert all(w in str(e.value) for w in ['hidden states after 2 layers for 600 texts','needs 3.9 MB',
        '70.0 MB are free','nothing is written','float16','cache_dir']), str(e.value)
    assert not ran and not [f for f in tmp_path.rglob('*') if f.is_file()]
    monkeypatch.undo()
    monkeypatch.setattr(shutil, 'disk_usage', lambda f: usage(2**40, 0, 2**26+cache_size([50]*600, 32)))
    assert cache_states(bbs['roberta'], examples, 2, tmp_path)[1]['computed']==600 # just enough

# --- names

def test_a_fingerprint_is_of_what_the_numbers_depend_on():
    a,b = backbone(),backbone()
    name = fingerprint(a)
    assert name==fingerprint(b) and len(name)==16
    b.model.train()
    b.tokenizer(['a text']*2, truncation=True, max_length=3, padding=True)
    b.name = 'another'
    assert fingerprint(b)==name # what changes no number changes no name
    changed = {fingerprint(a, 'cuda'), fingerprint(backbone(attn='eager')), fingerprint(backbone('bert'))}
    with torch.no_grad():
        for p in (a.words.weight, a.layers[2].output.LayerNorm.bias):
            p.view(-1)[0] += 1e-5
            changed.add(fingerprint(a))
    a.config.layer_norm_eps = 1e-6
    changed.add(fingerprint(a))
    a.tokenizer = deepcopy(a.tokenizer) # others share it
    a.tokenizer.add_tokens(['zyzzyva'])
    changed.add(fingerprint(a))
    a.model.half()
    changed.add(fingerprint(a))
    assert len(changed)==8 and name not in changed

def test_a_text_is_its_ids_and_types():
    e = dict(ids=[1,2,3], types=[0,0,0])
    k = text_key(e)
    assert len(k)==16 and k==text_key({**e, 'label':1, 'mask':2})
    assert len({k, text_key(dict(ids=[1,2,4], types=[0,0,0])), text_key(dict(ids=[1,2,3], types=[0,0,1])),
        text_key(dict(ids=[1,2], types=[0,0])), text_key(dict(ids=[1,2,3,0], types=[0,0]))})==5

# --- the states

CASES = [('sentiment',None), ('sentiment','code'), ('entailment',None), ('entailment','code')]

@pytest.mark.parametrize('name,template', CASES, ids=['text','template','pair','pair in a template'])
@pytest.mark.parametrize('family', FAMILIES)
def test_going_on_from_the_disk_equals_the_whole_pass(family, name, template, bbs, tmp_path):
    bb,task = bbs[family],small_task(name)
    rows = rows_of(bb, task, template)
    plain = collate(rows, 1)
    assert len({len(r['ids']) for r in rows})>2 # ragged
    want = run_layers(bb, plain)
    for p in range(bb.n_layers+1):
        kept,said = cache_states(bb, rows, p, tmp_path, batch_size=3)
        assert said['computed']==len(rows) and all(k['hidden'].shape==(len(k['ids']),bb.d) for k in kept)
        b = collate(kept, 1)
        got = run_layers(bb, b)
        assert (b['hidden'][b['keep']==0]==0).all() and b['start'].tolist()==[p]*len(rows)
        close(got.h[plain['keep']==1], want.h[plain['keep']==1])
        close(sentence(got), sentence(want))
        assert {k: v.tolist() for k,v in got.rows.items()}=={k: v.tolist() for k,v in want.rows.items()}
    vec = collate(cache_states(bb, rows, 'sentence', tmp_path, batch_size=3)[0], 1)
    close(vec['sentence'], want.row(bb.readout))
    close(vec['sentence'], sentence(run_layers(bb, plain)))
    close(collate(cache_states(bb, rows, 'mean_sentence', tmp_path)[0], 1)['mean_sentence'], want.mean())

@pytest.mark.parametrize('plan,head,name,template', [('late','mean','entailment',None),
    ('late','mask','sentiment','code'), ('both','cls','sentiment',None), ('head','mean','entailment','code')])
@pytest.mark.parametrize('family', FAMILIES)
def test_answers_and_gradients_are_the_same(family, plan, head, name, template, bbs, tmp_path):
    bb,task = bbs[family],small_task(name)
    rows = rows_of(bb, task, template)
    model = make(bb, plan, task, head).eval()
    (kept,),_ = with_caches(model, [rows], config(cache='both', cache_dir=str(tmp_path)))
    assert ('hidden' in kept[0])+('sentence' in kept[0])==(2 if plan=='both' else 1)
    def go(examples):
        model.zero_grad()
        b = collate(examples, 1)
        loss = model.loss(b)
        loss.backward()
        return model(b).detach(),{n: p.grad.clone() for n,p in model.trained().items()}
    (a,ga),(b,gb) = go(rows),go(kept)
    close(a, b, 2e-5)
    for n in ga: close(ga[n], gb[n], 1e-4*max(1, ga[n].abs().max().item()))
    alone = torch.cat([model(collate([k], 1)) for k in kept]).detach() # no padding, another batch
    close(alone, a, 2e-5)

# --- through `fit`

def losses(family, plan, cache, tmp_path, steps=8, **kw):
    bb,task = backbone(family, std=.1),small_task(train=48)
    model = make(bb, plan, task)
    log = fit(model, task, config(steps=steps, lr=1e-3, cache=cache, cache_dir=str(tmp_path), **kw))
    return log,{n: p.detach().clone() for n,p in model.trained().items()}

@pytest.mark.parametrize('family,plan', [('roberta','late'), ('roberta','words'), ('roberta','both'),
    ('roberta','head'), ('bert','late'), ('gpt2','late'), ('gpt2','words'), ('deberta','both'),
    ('roberta','m-idpg'), ('gpt2','m-idpg'), ('bert','s-idpg')])
def test_training_with_a_cache_is_the_same_training(family, plan, tmp_path):
    (a,wa),(b,wb) = losses(family, plan, 'none', tmp_path),losses(family, plan, 'both', tmp_path)
    assert a['losses']==pytest.approx(b['losses'], abs=1e-6) and a['history']==b['history'] and len({*a['losses']})==8
    for n in wa: close(wa[n], wb[n], 1e-5)
    assert b['cache']['computed']>0 and b['cache']['mb']>0 and b['cache']['seconds']>0 and a['cache']=={}

def test_half_precision_rounds_and_no_more(tmp_path):
    a,b = losses('roberta', 'late', 'none', tmp_path)[0],losses('roberta', 'late', 'hidden', tmp_path,
        cache_dtype='float16')[0]
    gap = max(abs(x-y) for x,y in zip(a['losses'], b['losses']))
    assert 1e-7<gap<5e-3
    c = losses('roberta', 'late', 'hidden', tmp_path)[0]
    # float32 does not take what float16 left
    assert b['cache']['mb']<.55*c['cache']['mb'] and c['losses']==pytest.approx(a['losses'], abs=1e-6)

def test_a_cache_under_bf16_is_one_of_bf16(tmp_path):
    a,b = [losses('roberta', 'both', c, tmp_path, precision='bf16')[0]['losses'] for c in ('none','both')]
    assert a==pytest.approx(b, abs=2e-3)
    n = len({r['sentence1'] for r in small_task(train=48).splits['train']})
    # full precision has its own; validation is always in it
    assert losses('roberta', 'both', 'both', tmp_path)[0]['cache']['computed']==2*n
    assert len([*tmp_path.iterdir()])==2

def count_layers(bb):
    calls = [0]*bb.n_layers
    for k,layer in enumerate(bb.layers):
        getattr(layer, 'mlp', getattr(layer, 'output', None)).register_forward_hook(lambda *a,
            k=k: calls.__setitem__(k, calls[k]+1))
    return calls

@pytest.mark.parametrize('plan,cache,want', [('late','hidden',[0,0,1]), ('late','none',[1,1,1]),
    ('head','hidden',[0,0,0]), ('words','sentence',[1,1,1]), ('words','none',[2,2,2]), ('both','both',[0,1,1])])
def test_only_what_can_change_still_runs(plan, cache, want, tmp_path, monkeypatch):
    task,cfg = small_task(),config(cache=cache, cache_dir=str(tmp_path), steps=3, eval_every=99)
    fit(make(backbone(), plan), task, cfg) # fills the cache
    # it runs a text to find out
    monkeypatch.setattr(caches, 'sentences_used', lambda *a: ['sentence']*(plan in ('words','both')))
    bb = backbone()
    model = make(bb, plan)
    calls = count_layers(bb)
    log = fit(model, task, cfg)
    assert log['cache'].get('computed', 0)==0
    assert calls==[w*(3+1) for w in want] # three steps and one look at the validation split

def test_nothing_to_keep_is_no_error(tmp_path):
    task = small_task()
    for method in ('prompt-tuning','fine-tuning'):
        runs = [fit(model_of(method, backbone(), task, jolt=0), task,
            config(method=method, lr=1e-3, cache=c, cache_dir=str(tmp_path))) for c in ('none','both')]
        assert runs[0]['losses']==runs[1]['losses'] and runs[1]['cache']['computed']==0
    assert not any(tmp_path.iterdir())

def test_evaluate_keeps_the_order(bbs, tmp_path):
    bb,task = bbs['roberta'],small_task('questions', test=20)
    model = model_of('lpt-npg', bb, task, layer=2)
    rows = rows_of(bb, task, split='test', n=20)
    (kept,),_ = with_caches(model, [rows], config(cache='hidden', cache_dir=str(tmp_path)))
    assert evaluate(model, kept, task, batch_size=3)==evaluate(model, rows, task,
        batch_size=7) and [k['ids'] for k in kept]==[r['ids'] for r in rows]

# --- shared, and never stale

def test_tasks_draws_and_methods_share_a_text(tmp_path, bbs):
    bb = bbs['roberta']
    rows = make_rows('sentiment', 'train', n=40)
    a,b = [replace(TASKS['sentiment'], name=n, splits=dict(train=r)) for n,r in (('one',rows[:30]),('two',rows[10:]))]
    new = [cache_states(bb, t.encode(t.splits['train'], bb.tokenizer, 60), 'sentence', tmp_path)[1]['computed']
        for t in (a, b, a)]
    texts = [len({r['sentence1'] for r in rows[i:j]}) for i,j in ((0,30),(0,40))]
    assert new==[texts[0], texts[1]-texts[0], 0]
    twice,said = cache_states(bb, rows_of(bb, n=3)*2, 'sentence', tmp_path/'new')
    assert said['computed']==3 and len(twice)==6

def test_what_has_changed_is_computed_anew(tmp_path):
    bb = backbone()
    bb.tokenizer = deepcopy(bb.tokenizer) # it gets a word
    rows = rows_of(bb, n=6)
    def new(bb, rows): return [cache_states(bb, rows, layer, tmp_path)[1]['computed'] for layer in ('sentence', 2)]
    assert new(bb, rows)==[6,6] and new(bb, rows)==[0,0]
    other = rows[:5]+[{**rows[5], 'ids':rows[5]['ids'][:-2]+rows[5]['ids'][-1:], 'types':rows[5]['types'][1:]}]
    assert new(bb, other)==[1,1] # a text
    with torch.no_grad(): bb.layers[0].attention.self.query.weight[0,0] += .5
    assert new(bb, rows)==[6,6] # a weight
    close(collate(cache_states(bb, rows, 'sentence', tmp_path)[0], 1)['sentence'],
        sentence(run_layers(bb, collate(rows, 1))))
    bb.tokenizer.add_tokens(['zyzzyva'])
    assert new(bb, rows)==[6,6] # the tokenizer
    # a layer, a precision
    assert cache_states(bb, rows, 1, tmp_path)[1]['computed']==6 and cache_states(bb, rows, 2, tmp_path,
        'float16')[1]['computed']==6

def test_which_models_ask_for_m_of_x(bbs, tmp_path):
    bb = bbs['roberta']
    row, = rows_of(bb, n=1)
    for plan in PLANS:
        model = make(bb, plan).train()
        modes = [m.training for m in model.modules()]
        assert sentences_used(model, row)==['sentence']*(plan in ('words','both')) and [m.training
            for m in model.modules()]==modes and 'sentence' not in row
    model = PromptedModel(bb, ClassificationHead(bb.d, 2),
        {'words': Step('insert', FromMean(bb.d)), 1: Step('add', FromSentence(bb.d))})
    assert sentences_used(model, row)==['sentence','mean_sentence']
    (kept,),said = with_caches(model, [rows_of(bb)], config(cache='both', cache_dir=str(tmp_path)))
    assert said['computed']==20
    assert torch.equal(model.eval()(b := collate(kept, 1)), model(b)) and {'sentence',
        'mean_sentence'}<=b.keys() and 'hidden' not in b
    close(model(b), model(collate(rows_of(bb), 1)))
    model = make(tuned := backbone(), 'words')
    tuned.base.requires_grad_(True)
    assert not sentences_used(model, row) # it will move

def test_the_folder_and_its_default(tmp_path, monkeypatch, bbs):
    monkeypatch.setenv('IDP_CACHE', str(tmp_path/'env'))
    rows = rows_of(bbs['roberta'], n=2)
    cache_states(bbs['roberta'], rows)
    cache_states(bbs['roberta'], rows, folder=tmp_path/'arg')
    for where in ('env','arg'): assert (tmp_path/where/fingerprint(bbs['roberta'])/'sentence').is_dir()
    monkeypatch.delenv('IDP_CACHE')
    monkeypatch.setenv('HOME', str(tmp_path))
    cache_states(bbs['roberta'], rows)
    assert (tmp_path/'.cache/idp_tutorial').is_dir()

def test_hidden_states_then_m_of_x_then_another_layer(bbs, tmp_path):
    bb = bbs['gpt2']
    rows = rows_of(bb)
    calls = count_layers(bb)
    kept = cache_states(bb, rows, 2, tmp_path)[0]
    assert calls==[1,1,0]
    kept = cache_states(bb, kept, 'sentence', tmp_path)[0]
    assert calls==[1,1,1] # M(x) goes on from there
    kept = cache_states(bb, kept, 1, tmp_path)[0]
    assert {e['start'] for e in kept}=={1}
    b = collate(kept, 1)
    close(b['sentence'], sentence(run_layers(bb, collate(rows, 1))))
    close(sentence(run_layers(bb, b)), b['sentence'])

# --- what would give a wrong number

def test_what_cannot_be_cached_is_refused(tmp_path, bbs):
    bb = bbs['roberta']
    rows = rows_of(bb)
    model = make(bb, 'late')
    (kept,),_ = with_caches(model, [rows], config(cache='hidden', cache_dir=str(tmp_path)))
    for kw,words in ((dict(cache='all'), ["cache 'all'","'sentence', 'hidden' or 'both'"]),
        (dict(cache_dtype='half'), ["cache_dtype 'half'",'float16']),
            (dict(cache='hidden', lower_dropout=True), ["cache='hidden' with lower_dropout=True",'every epoch']),
        (dict(cache='both', lower_dropout=True), ["cache='both'"])):
        with pytest.raises(ValueError) as e: config(**kw)
        assert all(w in str(e.value) for w in words), str(e.value)
    config(cache='sentence', lower_dropout=True) # M(x) is always without dropout
    noisy = PromptedModel(bb, ClassificationHead(bb.d, 2), PLANS['late'](bb), lower_dropout=True)
    with pytest.raises(ValueError, match='a model with lower_dropout=True'):
        with_caches(noisy, [rows], config(cache='hidden', cache_dir=str(tmp_path)))
    batch = collate(kept, 1)
    noisy.eval()(batch)
    with pytest.raises(ValueError, match='dropout below them is on'): noisy.train()(batch)
    with pytest.raises(ValueError, match='states after 2 layers, but the model trains or inserts something below'):
        make(bb, 'both')(batch)
    with pytest.raises(ValueError, match='states after 2 layers'): make(bb, 'words')(batch)
    tuned = backbone()
    model = make(tuned, 'late')
    tuned.base.requires_grad_(True)
    with pytest.raises(ValueError, match='states after 2 layers'): model(batch)
    with pytest.raises(ValueError, match='it would be left out'): run_layers(bb, batch, PLANS['both'](bb))

def test_numbers_too_large_for_half_precision(tmp_path):
    bb = backbone()
    with torch.no_grad(): bb.layers[1].output.LayerNorm.weight.mul_(1e6)
    with pytest.raises(ValueError, match=r"hidden states reach .*float16 cannot hold: use cache_dtype='float32'"):
        cache_states(bb, rows_of(bb), 2, tmp_path, 'float16')
    assert not [f for f in tmp_path.rglob('*') if f.is_file()]
    cache_states(bb, rows_of(bb), 2, tmp_path)

# --- times

def test_every_variant_takes_its_turn_and_no_weight_moves(tmp_path):
    bb = backbone()
    before = hashlib.sha256(b''.join(p.numpy().tobytes() for p in bb.model.parameters())).digest()
    rows = rows_of(bb, n=16)
    out = cache_times(bb, {'fine-tuning':None, **PLANS}, rows, config(cache_dir=str(tmp_path), batch_size=8), rounds=3)
    assert [(r['plan'],r['cache']) for r in out]==[('fine-tuning','none'), ('late','none'), ('late','hidden'),
        ('words','none'), ('words','sentence'), ('both','none'),
        ('both','hidden+sentence'), ('head','none'), ('head','hidden')]
    assert out[0]['ratio']==1 and all(r['ms']>0 and r['ratio']>0 for r in out) and out[2]['mb']>=0
    assert hashlib.sha256(b''.join(p.detach().numpy().tobytes()
        for p in bb.model.parameters())).digest()==before and not any(p.requires_grad for p in bb.model.parameters())

def test_states_are_kept_without_dropout(tmp_path):
    bb = backbone()
    rows = rows_of(bb, n=3)
    want = run_layers(bb, collate(rows, 1)).mean()
    bb.model.train()
    kept = cache_states(bb, rows, 2, tmp_path)[0]
    assert bb.layers[0].training
    bb.model.eval()
    close(run_layers(bb, collate(kept, 1)).mean(), want)
