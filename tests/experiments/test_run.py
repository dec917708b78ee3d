"A run and its record, a choice of a rate, a comparison: what is recorded, what repeats, who sees the test split."
import json
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch
from small import backbone, config, small_task

from idp_tutorial import provenance, records
from idp_tutorial.analysis.layer_sweep import plot_sweep, sweep_table
from idp_tutorial.data.tasks import load_task
from idp_tutorial.experiments import comparison, evidence, rates
from idp_tutorial.experiments import run as experiments
from idp_tutorial.experiments.comparison import compare, compare_to, with_seeds
from idp_tutorial.experiments.conclusions import conclusion, primary_said
from idp_tutorial.experiments.rates import chosen_rate, head_rate, tune
from idp_tutorial.experiments.results import across_tasks, format_table, plot_scores, results_table, write_results
from idp_tutorial.experiments.run import run, trained
from idp_tutorial.methods.build import build
from idp_tutorial.methods.glove import write_glove
from idp_tutorial.methods.registry import METHODS
from idp_tutorial.model.prompted_model import learnt
from idp_tutorial.records import as_recorded, read_records
from idp_tutorial.tensor_files import PROMPTS, save_tensors
from idp_tutorial.training.fit import fit

TIME = ('ms_per_step','peak_memory_mb','made','tried','edge')

@pytest.fixture(scope='module')
def cfg(small_folder): return lambda **kw: config(**{**dict(backbone=str(small_folder), steps=3), **kw})

@pytest.fixture(scope='module')
def task(): return small_task()

def timeless(r): return {k:v for k,v in r.items() if k not in TIME}

def test_what_a_record_says(cfg, task, tmp_path):
    r = run(cfg(k=64), task, tmp_path/'new/records.jsonl')
    assert {*'method task backbone k seed metric score params ms_per_step peak_memory_mb '
        'steps versions'.split()} <= r.keys()
    assert {*r['params']}=={'prompt','head','backbone'} and r['params']['head']==2*32+2 and r['params']['backbone']==0
    assert (r['method'],r['task'],r['k'],r['seed'],r['metric'],r['steps'],r['lr'])==('lpt-npg','sentiment',64,0,
        'accuracy',3,1e-2)
    assert 0<=r['score']<=100 and r['score']==r['scores']['accuracy'] and r['ms_per_step']>0 and r['peak_memory_mb']>0
    assert r['validation']==max(s for _,s in r['history']) and r['sizes']==dict(train=64, validation=24, test=24)
    assert r['versions']['torch']==torch.__version__ and {'python','transformers',
        'idp_tutorial'} <= r['versions'].keys()
    again = json.loads(json.dumps(r, allow_nan=False))
    assert read_records(tmp_path/'new/records.jsonl')==[again] and len(results_table([again]))==1

@pytest.mark.parametrize('method', METHODS)
def test_equal_configs_give_equal_records(method, cfg, task):
    a = run(cfg(method=method), task)
    torch.rand(3)
    assert timeless(a)==timeless(run(cfg(method=method), task))
    assert timeless(a)!=timeless(run(cfg(method=method, seed=1), task))

def test_a_run_leaves_nothing_behind(cfg, task):
    before = run(cfg(method='lpt'), task)
    run(cfg(method='fine-tuning', lr=.05), task)
    run(cfg(method='prompt-tuning', precision='bf16', accumulate=2), task)
    assert timeless(run(cfg(method='lpt'), task))==timeless(before)

def test_the_name_of_the_task_that_was_trained(cfg, task, tmp_path):
    from dataclasses import replace
    mine = replace(task, name='mine')
    assert run(cfg(task='trec'), mine)['task']=='mine'
    assert experiments.train(cfg(task='trec'), tmp_path/'run', mine)['task']=='mine'

def test_default_learning_rates(cfg, task):
    for m in METHODS: assert run(cfg(method=m, lr=None, steps=1), task)['lr']==METHODS[m].rate
    assert run(cfg(method='head-only', head='verbalizer'), task)['steps']==0 # nothing is trained

@pytest.mark.parametrize('name,k', [('questions',12), ('entailment',10), ('similarity',8)])
def test_few_shot_runs_of_bundled_tasks(name, k, cfg):
    r = run(cfg(task=name, k=k, steps=1, batch_size=4, eval_every=1))
    assert r['sizes']=={'train':k,'validation':1000,'test':1000} and r['metric']==('pearson+spearman'
        if name=='similarity' else 'accuracy')

@pytest.fixture
def no_test_split(monkeypatch, task):
    "A task whose test split tells when it is looked at"
    looks = []
    class Watched(list):
        def __iter__(self):
            looks.append(1)
            return super().__iter__()
        def __getitem__(self, i):
            looks.append(1)
            return super().__getitem__(i)
    watched = small_task()
    watched.splits['test'] = Watched(task.splits['test'])
    return watched,looks

def test_tuning_never_looks_at_the_test_split(cfg, no_test_split):
    task,looks = no_test_split
    tune(cfg(method='lpt'), task, METHODS['lpt'].rates)
    assert not looks
    run(cfg(method='lpt'), task)
    assert looks # it would have told

@pytest.fixture
def fakes(monkeypatch):
    "Runs that take no time: all (method, rate, head's rate, seed) that are trained, and those whose test is scored"
    def make(validation):
        trained,tested = [],[]
        def train(c, task):
            trained.append((c.method, c.lr, c.head_lr, c.seed))
            if (v := validation(c))=='diverges':
                raise FloatingPointError('no number')
            return c,dict(validation=v)
        def record(c, log, task, cfg, test=True, beside=None):
            if test: tested.append((c.method, c.lr, c.seed))
            return {**as_recorded(c), 'metric':'accuracy', 'score':100.-c.lr if test else None,
                'validation':log['validation'], 'sizes':{s: len(r) for s,r in task.splits.items()}}
        for m in (rates,experiments):
            monkeypatch.setattr(m, 'trained', train)
            monkeypatch.setattr(m, 'record_of', record)
        return trained,tested
    return make

def test_tune_takes_the_best_on_validation(cfg, task, fakes):
    scores = {1e-3:50., 1e-2:60., 1e-1:60., 1.:'diverges'}
    trained,tested = fakes(lambda c: scores[c.lr])
    assert tune(cfg(), task, [*scores])['lr']==1e-2 and [r[1] for r in trained]==[*scores] and not tested
    # nobody else sees the test split
    assert tune(cfg(), task, [*scores], test=True)['score']==100-1e-2 and [r[1] for r in tested]==[1e-2]
    with pytest.raises(FloatingPointError, match=r"'lpt-npg' diverged on 'sentiment' with every rate of \[1.0\]"):
        tune(cfg(), task, [1.])

def test_the_record_of_tuning_is_the_record_of_the_run(cfg, task):
    assert timeless(tune(cfg(), task, (1e-2,1e-2), test=True))==timeless(run(cfg(lr=1e-2), task))

def test_every_method_is_tuned_alike(cfg, fakes):
    trained,tested = fakes(lambda c: float(c.lr==METHODS[c.method].rates[2])) # the test split prefers another rate
    records = compare([*METHODS], cfg(lr=None), seeds=2, tuned=True, say=lambda s: None)
    for m in METHODS:
        # seed 0 of the best rate is not trained twice
        rates = METHODS[m].rates
        assert [(r[1],r[3]) for r in trained if r[0]==m]==[*[(lr, 0) for lr in rates], (rates[2], 1)]
    assert tested==[(m, METHODS[m].rates[2], s) for m in METHODS for s in (0,1)]
    made = [(r['method'],r['lr'],r['seed']) for r in records]
    assert made==[(m, METHODS[m].rates[2], s) for m in METHODS for s in (0,1)]
    assert len(records)==2*len(METHODS) and all('best of 3 on validation' in r['lr_selected'] for r in records)
    trained.clear()
    given = compare(['lpt'], cfg(lr=.5), seeds=1, tuned=True, say=lambda s: None)
    assert trained==[('lpt', .5, None, 0)] and given[0]['lr_selected']=='given'
    trained.clear()
    given = compare(['lpt'], cfg(lr=None), seeds=1, tuned=False, say=lambda s: None)
    assert trained==[('lpt', METHODS['lpt'].rate, None, 0)] and given[0]['lr_selected']=='default'

@pytest.mark.parametrize('tuned', [False,True])
@pytest.mark.parametrize('half', [False,True])
def test_a_killed_comparison_goes_on(cfg, fakes, tmp_path, tuned, half):
    out,base = tmp_path/'a'/'r.jsonl',cfg(lr=None)
    def go(seeds=2, base=base, **kw): return compare(['lpt','lpt-npg'], base, seeds, tuned, out, lambda s: None, **kw)
    fakes(lambda c: c.lr)
    whole = go()
    lines = out.read_text().splitlines()
    out.write_text('\n'.join(lines[:2])+'\n'+(lines[2][:-20] if half else ''))
    trained,_ = fakes(lambda c: c.lr)
    again = go()
    assert [(r['method'],r['seed'],r['lr']) for r in again]==[(r['method'],r['seed'],r['lr']) for r in whole]
    # the rate of the other is in the file
    assert len(trained)==(4 if tuned else 2) and {r[0] for r in trained}=={'lpt-npg'}
    assert len(out.read_text().splitlines())==4
    trained,_ = fakes(lambda c: c.lr)
    go()
    assert not trained
    assert len(go(3))==6 and [r[3] for r in trained]==[2,2] # one more seed only, at the same rate
    for other in (dict(steps=4), dict(t=3), dict(weight_decay=.5), dict(standardise=True)):
        trained,_ = fakes(lambda c: c.lr)
        go(base=cfg(**{'lr':None, **other}))
        assert trained # another config is another run

def test_a_damaged_file_is_told_and_left(tmp_path):
    out = tmp_path/'r.jsonl'
    out.write_text('{"seed": 0}\nnot a record\n{"half')
    with pytest.raises(ValueError, match='r.jsonl, line 2 is not a record'): records.stored(out)
    out.write_text('{"seed": 0}\n{"half')
    assert records.stored(out)==[{'seed':0}] and out.read_text()=='{"seed": 0}\n'
    out.write_text('{"seed": 0}\n{"seed": 1}')
    # whole, but for its newline
    assert records.stored(out)==[{'seed':0},{'seed':1}] and out.read_text()=='{"seed": 0}\n{"seed": 1}\n'

def test_a_row_without_training_is_found_again(cfg, tmp_path):
    out = tmp_path/'r.jsonl'
    def go():
        said = []
        compare(['head-only'], cfg(head='verbalizer', k=12, task='questions'), 1, False, out, said.append)
        return len(said)
    assert (go(),go())==(1,0) and len(out.read_text().splitlines())==1

def test_other_data_of_the_same_name_are_another_task(cfg, fakes, tmp_path, monkeypatch):
    out = tmp_path/'r.jsonl'
    def go(n):
        monkeypatch.setattr(comparison, 'load_task', lambda *a: small_task(train=n))
        return compare(['lpt'], cfg(), 1, False, out, lambda s: None)
    trained,_ = fakes(lambda c: 1.)
    go(64)
    go(64)
    assert len(trained)==1
    go(32)
    assert len(trained)==2

@pytest.mark.parametrize('kw,words', [(dict(method='lpt-ngp'),
    ["unknown method 'lpt-ngp'","did you mean 'lpt-npg'?",'Known: head-only']),
    (dict(head='verbalisr'), ["unknown head 'verbalisr'","'verbalizer'"]),
    (dict(task='sentimnt'), ["unknown task 'sentimnt'","'sentiment'"]),
    (dict(backbone='tinny'), ["no backbone 'tinny'","Did you mean 'tiny'?"]), (dict(layer=9), ['layer 9','0 to 2']),
    (dict(template='oral', head='verbalizer'), ["no template 'oral'"])])
def test_names_that_are_not_known(kw, words, cfg, tmp_path):
    with pytest.raises(ValueError) as e: run(cfg(**kw), out=tmp_path/'records.jsonl')
    assert all(w in str(e.value) for w in words), str(e.value)
    assert not any(tmp_path.iterdir())

@pytest.mark.parametrize('kw,words', [(dict(steps=0), ['steps=0','at least 1']), (dict(batch_size=0), ['batch_size=0']),
    (dict(accumulate=0), ['accumulate=0']),
    (dict(eval_every=0), ['eval_every=0']), (dict(lr=0.), ['lr=0.0','positive']), (dict(lr=-1.), ['lr=-1.0']),
    (dict(lr=float('nan')), ['lr=nan']),
    (dict(device='gpu'), ["device 'gpu'","'auto' or 'cpu'"]), (dict(precision='half'), ["precision 'half'","'bf16'"])])
def test_numbers_that_make_no_run(kw, words):
    with pytest.raises(ValueError) as e: config(**kw)
    assert all(w in str(e.value) for w in words), str(e.value)

def test_the_bare_head_chooses_its_rate_first(cfg, fakes):
    trained,_ = fakes(lambda c: -abs(c.lr-(.1 if c.method=='head-only' else .005)))
    head = [('head-only', lr, None, 0) for lr in METHODS['head-only'].rates]
    npg = [('lpt-npg', lr, .1, 0) for lr in METHODS['lpt-npg'].rates]
    records = compare(['lpt-npg','head-only'], cfg(lr=None), seeds=1, head_first=True, say=lambda s: None)
    # the head's own row is its choice
    assert trained==head+npg and [(r['lr'],r['head_lr']) for r in records]==[(.005,.1),(.1,None)]
    trained.clear()
    compare(['lpt-npg'], cfg(lr=None), seeds=1, head_first=True, say=lambda s: None)
    assert trained==head+npg
    trained.clear()
    compare(['lpt-npg','head-only'], cfg(lr=None, head_lr=1e-3), seeds=1, tuned=False, say=lambda s: None) # given
    assert trained==[('lpt-npg', METHODS['lpt-npg'].rate, 1e-3, 0),('head-only', METHODS['head-only'].rate, None, 0)]
    trained.clear()
    compare(['lpt-npg','head-only'], cfg(lr=None), seeds=1, tuned=False, head_first=True, say=lambda s: None)
    assert trained==head+[('lpt-npg', METHODS['lpt-npg'].rate, .1, 0),('head-only', METHODS['head-only'].rate, None, 0)]
    trained.clear()
    compare(['lpt-npg'], cfg(lr=None, head='verbalizer'), seeds=1, head_first=True, say=lambda s: None)
    assert {r[2] for r in trained}=={None} and {r[0] for r in trained}=={'lpt-npg'} # a verbalizer has no head to train

def test_the_heads_rate_is_its_own(cfg, task):
    def moved(**kw):
        r = build(c := cfg(method='lpt', steps=3, **kw), backbone(), task)
        old = {n: p.detach().clone() for n,p in r.trained().items()}
        fit(r, task, c)
        return [max((p-old[n]).abs().max().item() for n,p in r.trained().items() if n.startswith(part))
            for part in ('head','sources')]
    both,head,prompt = moved(lr=1e-2),moved(lr=1e-6, head_lr=1e-2),moved(lr=1e-2, head_lr=1e-6)
    assert head[0]==pytest.approx(both[0],
        rel=.2) and head[1]<1e-5 and prompt[0]<1e-5 and prompt[1]==pytest.approx(both[1], rel=.2)
    with pytest.raises(ValueError, match='head_lr=0'): cfg(head_lr=0.)

def test_nothing_to_compare(cfg):
    with pytest.raises(ValueError, match='at least one seed'): compare(['lpt'], cfg(), seeds=0)
    with pytest.raises(ValueError, match="unknown method 'ltp'"): compare(['ltp'], cfg())

# --- tables

def rec(**kw):
    return {**dict(task='a', k=None, backbone='b', head='c', method='m', metric='accuracy', validation=1.,
        params=dict(prompt=1, head=2, backbone=0), ms_per_step=1., peak_memory_mb=1., steps=1, lr=.1), **kw}

def test_spread_over_seeds_and_gain():
    two = [rec(score=s, seed=i) for i,s in enumerate((70.,80.))]
    t = results_table(two)
    assert (t.score[0],t.seeds[0])==(75.,2) and t['std'][0]==pytest.approx(50**.5)
    assert across_tasks(two+[rec(method='base', score=65., seed=0)], 'base').loc['m',
        'a']==10. and across_tasks(two).loc['m','a']=='75.0 ± 7.1'

def test_a_cell_is_of_one_comparison():
    one,two = rec(score=70., seed=0),rec(score=60., seed=0, method='n')
    for f in (results_table, across_tasks):
        with pytest.raises(ValueError, match="'m' with seed 0 is there more than once"):
            f([one, two, {**one, 'layer':3}])
    with pytest.raises(ValueError, match='records of 2 kinds'): plot_scores([one, {**one, 'task':'b'}])
    t = results_table([one, two])
    assert '60.0' in format_table(t[t.method=='n']) # any rows of it

def test_a_method_named_twice_runs_once(cfg, fakes):
    trained,_ = fakes(lambda c: 1.)
    assert len(compare(['lpt','lpt'], cfg(), 1, False, say=lambda s: None))==len(trained)==1

def test_a_layer_that_is_given_leaves_adapterdrop_at_its_half(cfg, fakes):
    fakes(lambda c: 1.)
    def layers(*methods): return [r['layer'] for r in compare([*methods], cfg(layer=2), 1, False, say=lambda s: None)]
    assert layers('adapterdrop','lpt-npg','lpt')==[None,2,2] and layers('adapterdrop','adapter')==[2,2]

def test_records_name_files_without_their_folders(cfg, tmp_path):
    c = cfg(data='a/data', glove='b/own.txt', start='c/first', cache_dir='d')
    r = as_recorded(c)
    assert [r[k] for k in ('data','glove','start','cache_dir')]==['data','own.txt','first',None]
    assert as_recorded(cfg(backbone=str(tmp_path)))['backbone']==tmp_path.name
    assert as_recorded(cfg(backbone='org/model'))['backbone']=='org/model'

def test_a_backbone_in_half_precision_is_refused():
    bb = backbone()
    bb.model.half()
    with pytest.raises(ValueError, match="weights in torch.float16: load it without dtype=, or with dtype='bfloat16'"):
        build(config(), bb, small_task())

# --- the draw and the seed reach what they decide

def test_the_draw_reaches_the_task(cfg, monkeypatch):
    monkeypatch.setattr(comparison, 'with_seeds', lambda cfg, task, *a: [task])
    want,other = [load_task('sentiment', None, 8, i).splits['train'] for i in (3,0)]
    task, = compare(['lpt'], cfg(k=8, draw=3))
    assert task.splits['train']==want!=other

def test_the_draw_reaches_a_run(cfg, monkeypatch):
    class Seen(Exception): pass
    def see(c, task):
        raise Seen(task)
    monkeypatch.setattr(experiments, 'trained', see)
    with pytest.raises(Seen) as e: run(cfg(k=8, draw=3))
    assert e.value.args[0].splits['train']==load_task('sentiment', None, 8, 3).splits['train']!=load_task('sentiment',
        None, 8).splits['train']

def test_tuning_is_with_seed_0(cfg, fakes):
    trained,_ = fakes(lambda c: 1.)
    compare(['lpt'], cfg(lr=None, seed=7), seeds=1, say=lambda s: None)
    assert {r[3] for r in trained}=={0}


def test_a_control_keeps_no_prompt(tmp_path):
    from idp_tutorial.experiments.run import train
    with pytest.raises(ValueError, match='majority.* is a control, with no prompt to keep'):
        train(config(method='majority'), tmp_path/'new')
    assert not (tmp_path/'new').exists()

def test_other_rows_are_another_comparison(cfg, task, tmp_path):
    "Equal names, sizes and settings: only the rows, or the weights, say that a score is an old one"
    out,ran = tmp_path/'c.jsonl',[]
    def scores(task, **kw):
        return with_seeds(cfg(method='head-only', lr=.1, **kw), task, 'given', 1, read_records(out) if ran else [], out,
            ran.append)
    turned = replace(task, splits={s: [{**r, 'label':1-r['label']} for r in rows] for s,rows in task.splits.items()})
    first = scores(task)
    assert scores(task)[0]['made']==first[0]['made'] and len(ran)==1
    other, = scores(turned)
    assert len(ran)==2 and other['digests']['data']!=first[0]['digests']['data']
    assert other['logits']!=first[0]['logits'] and len([*(tmp_path/'logits').iterdir()])==2
    bb = tmp_path/'bb'
    shutil.copytree(cfg().backbone, bb, ignore=shutil.ignore_patterns('SHA256SUMS'))
    weights = safetensors.torch.load_file(bb/'model.safetensors')
    for n in (3,3,4): # written again with other weights before the third
        if n==4:
            name = next(k for k in weights if 'word_embeddings' in k)
            safetensors.torch.save_file({**weights, name:weights[name]+1}, bb/'model.safetensors', {'format':'pt'})
        scores(task, backbone=str(bb))
        assert len(ran)==n

def test_logits_of_other_weights_lie_beside_the_old_ones(cfg, task, tmp_path):
    "Another backbone in a folder of the same name: each record keeps the answers that it was scored by"
    out,kept = tmp_path/'c.jsonl',[]
    bb = shutil.copytree(cfg().backbone, tmp_path/'a'/'bb', ignore=shutil.ignore_patterns('SHA256SUMS'))
    other = shutil.copytree(bb, tmp_path/'b'/'bb')
    weights = safetensors.torch.load_file(bb/'model.safetensors')
    name = next(k for k in weights if 'word_embeddings' in k)
    safetensors.torch.save_file({**weights, name:weights[name]+1}, other/'model.safetensors', {'format':'pt'})
    for folder in (bb,other,bb):
        r = run(cfg(method='head-only', lr=.1, backbone=str(folder)), task, out)
        kept.append((r['logits'], np.load(tmp_path/r['logits'])['test']))
    (a,one),(b,two),(c,same) = kept
    assert a==c!=b and (one==same).all() and not (one==two).all() and (np.load(tmp_path/a)['test']==one).all()

@pytest.mark.parametrize('field', ['glove','start'])
def test_a_record_of_other_files_of_one_name_is_another(field, cfg, task, tmp_path, monkeypatch):
    "Word vectors, and prompts to start with: known by what they hold, as weights are; an older record does not say"
    words = sorted({w for r in task.splits['train'] for w in r['sentence1'].lower().split()})
    def one(folder, sign):
        if field=='glove':
            (tmp_path/folder).mkdir(exist_ok=True)
            vectors = sign*np.arange(8.*len(words)).reshape(-1, 8)%7
            write_glove({w: i for i,w in enumerate(words)}, vectors, tmp_path/folder/'glove.txt')
            return cfg(method='m-idpg-phm-glove', glove=str(tmp_path/folder/'glove.txt'), lr=.1)
        first = tmp_path/folder/'first'
        first.mkdir(parents=True, exist_ok=True)
        first_stage = build(cfg(), backbone(max_position_embeddings=258), task)
        own = {n: p.detach()+.1*sign for n,p in learnt(first_stage).items()}
        save_tensors(first/PROMPTS, own, {})
        return cfg(start=str(first), lr=.1)
    out,ran = tmp_path/'c.jsonl',[]
    def scores(c):
        return with_seeds(c, task, 'given', 1, read_records(out) if ran else [], out, ran.append)[0]
    r = scores(one('a', 1))
    assert {*r['digests']}=={'weights','data',field} and len(r['digests'][field])==16
    assert scores(one('b', 1))['logits']==r['logits'] and len(ran)==1 # where they lie does not matter
    other = scores(one('b', -1))
    assert len(ran)==2 and other['digests'][field]!=r['digests'][field] and other['logits']!=r['logits']
    assert scores(one('b', -1))['made']==other['made'] and len(ran)==2
    old = json.loads(json.dumps(r))
    del old['digests'][field]
    assert evidence.made_by(old, one('b', -1), 'given', task)
    assert experiments.failed(one('b', -1), task, 'why', 0.)['digests']==other['digests']

def test_a_finished_model_knows_its_word_vectors(cfg, task, tmp_path):
    "The same run takes its place; one of another file of that name is refused"
    def train(sign, folder):
        (tmp_path/folder).mkdir(exist_ok=True)
        write_glove(dict(a=0, the=1), sign*np.arange(16.).reshape(2, 8), tmp_path/folder/'glove.txt')
        c = cfg(method='m-idpg-phm-glove', glove=str(tmp_path/folder/'glove.txt'))
        return experiments.train(c, tmp_path/'run', task, save_every=0)
    assert train(1, 'a')['score']==train(1, 'b')['score']
    with pytest.raises(ValueError, match="holds another run .glove read '"):
        train(-1, 'b')

def test_a_run_that_patience_ended_is_found_again(cfg, task, tmp_path):
    out,ran,one = tmp_path/'c.jsonl',[],cfg(method='lpt', lr=1e-9, steps=40, eval_every=1, patience=2)
    for _ in range(2):
        r, = with_seeds(one, task, 'given', 1, read_records(out) if ran else [], out, ran.append)
    assert len(ran)==1 and r['steps']==40>r['steps_done']

def test_a_number_of_steps_is_whole(cfg):
    for kw,words in ((dict(steps=2.5), 'steps=2.5: a whole number'), (dict(t='5'), "t='5'"), (dict(k=8.), 'k=8.0'),
        (dict(steps=None), 'steps=None'), (dict(lr='1e-3'), "lr='1e-3': a positive number")):
        with pytest.raises(ValueError, match=words):
            cfg(**kw)

def test_a_seed_that_diverges_ends_no_comparison(cfg, tmp_path, monkeypatch):
    "The others go on, a second start does not try it again, and table, picture and sweep leave it out"
    calls,bad,real = [],{1},experiments.trained
    def trained(c, task, **kw):
        calls.append(c.seed)
        if c.seed in bad:
            raise FloatingPointError('the loss is nan at step 2')
        return real(c, task, **kw)
    monkeypatch.setattr(experiments, 'trained', trained)
    base,out,said = cfg(lr=1e-2, steps=2, eval_every=2),tmp_path/'a.jsonl',[]
    for _ in range(2):
        records = compare(['lpt'], base, 3, out=out, say=said.append)
        assert calls==[0,1,2] and [r['status'] for r in records]==['done','diverged','done']
    assert 'seed 1  lr 1.0e-02  diverged: the loss is nan at step 2' in said[1]
    assert results_table(records).seeds.tolist()==[2]==sweep_table(records).seeds.tolist()
    assert len(write_results(records, tmp_path/'table')) and len(plot_sweep(records).lines)==2
    bad.add(0) # also the first one
    for _ in range(2):
        records = compare(['lpt'], replace(base, lr=2e-2), 3, out=out, say=said.append)
        assert [r['status'] for r in records]==['diverged','diverged','done'] and calls==[0,1,2,0,1,2]
    assert '(2 diverged)' in format_table(results_table(records))


@pytest.fixture
def wild(monkeypatch):
    "Fine-tuning diverges with every rate and seed, the rest is trained; which runs were begun is in the list"
    calls,real = [],experiments.trained
    def trained(c, task, *where, **kw):
        calls.append((c.method,c.lr,c.seed))
        if c.method=='fine-tuning' or c.lr==9.:
            raise FloatingPointError('the loss is nan at step 2')
        return real(c, task, *where, **kw)
    for m in (rates,experiments):
        monkeypatch.setattr(m, 'trained', trained)
    return calls


def test_a_method_that_diverges_with_every_rate(cfg, tmp_path, wild):
    "One record says so, with all that was tried; the next method goes on; a second start trains nothing"
    base,out = cfg(lr=None, steps=2, eval_every=2),tmp_path/'a.jsonl'
    for _ in range(2):
        records = compare(['fine-tuning','lpt'], base, 2, out=out, say=list)
        assert [(r['method'],r['seed'],r['status']) for r in records]==[('fine-tuning',0,'diverged'),
            ('lpt',0,'done'),('lpt',1,'done')]
        assert len(wild)==3+3+1 and read_records(out)==json.loads(json.dumps(records))
    left = records[0]
    assert left['tried']==[[lr,'diverged'] for lr in METHODS['fine-tuning'].rates] and left['lr'] is None
    assert left['versions']['torch']==torch.__version__ and left['schema']==2 and left['made']['start']
    assert 'with every rate of' in left['message'] and left['tuning_seconds']>=0==left['seconds']
    assert left['digests']==records[1]['digests']
    table = write_results(records, tmp_path/'table')
    row = format_table(table).splitlines()[2]
    assert row.split()[:3]==['fine-tuning','diverged','–'] and table.seeds.tolist()==[0,2]
    compare(['fine-tuning'], replace(base, t=3), 2, out=out, say=list) # another config is another run
    assert len(wild)==7+3


def test_other_weights_may_converge(cfg, task, tmp_path, wild):
    "A diverged run is that of its weights: with others it is begun again"
    bb = tmp_path/'bb'
    shutil.copytree(cfg().backbone, bb, ignore=shutil.ignore_patterns('SHA256SUMS'))
    one,old = cfg(method='fine-tuning', lr=.1, backbone=str(bb)),[]
    for n in (1,1,2):
        if n==2:
            weights = safetensors.torch.load_file(bb/'model.safetensors')
            name = next(k for k in weights if 'word_embeddings' in k)
            safetensors.torch.save_file({**weights, name:weights[name]+1}, bb/'model.safetensors', {'format':'pt'})
        old += with_seeds(one, task, 'given', 1, old, say=list)
        assert len(wild)==n


@pytest.mark.parametrize('where', ['out','beside'])
def test_a_run_that_diverges_leaves_a_record(where, cfg, task, tmp_path, wild):
    with pytest.raises(FloatingPointError, match='nan at step 2'):
        run(cfg(lr=9.), task, **{where:tmp_path/'a.jsonl'})
    left, = read_records(tmp_path/'a.jsonl')
    assert (left['status'],left['lr'],left['message'])==('diverged', 9., 'the loss is nan at step 2')
    assert {*left['versions']}=={'python',*records.VERSIONS} and left['sizes']['test']==24
    with pytest.raises(FloatingPointError):
        experiments.train(cfg(lr=9.), tmp_path/'run', task)
    assert read_records(tmp_path/'run'/'record.jsonl')[0]['status']=='diverged'
    experiments.train(cfg(lr=1e-2), tmp_path/'run', task)
    assert read_records(tmp_path/'run'/'record.jsonl')[0]['status']=='done'


def test_a_rate_that_nobody_can_choose_is_not_looked_for_again(cfg, task, tmp_path, monkeypatch):
    ran = []
    def trained(c, task):
        ran.append(c.method)
        raise FloatingPointError('nan')
    monkeypatch.setattr(rates, 'trained', trained)
    for choose,n in ((lambda: head_rate(cfg(), task, out=tmp_path/'a.jsonl'), 3),
        (lambda: chosen_rate(cfg(lr=None, k=8), (1.,2.), tmp_path, list), 2)):
        ran.clear()
        for _ in range(2):
            with pytest.raises(FloatingPointError, match='with every rate of'):
                choose()
            assert len(ran)==n
    for _ in range(2): # the head of the others would have no rate
        with pytest.raises(FloatingPointError, match="'head-only' diverged"):
            compare(['head-only','lpt'], cfg(lr=None), 1, out=tmp_path/'b.jsonl', head_first=True, say=list)
        assert ran[-3:]==['head-only']*3 and len(ran)==5
    assert [r['status'] for r in read_records(tmp_path/'b.jsonl')]==['diverged']


def test_other_weights_want_a_rate_of_their_own(cfg, task, tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(rates, 'trained', lambda c, task: ran.append(c.lr) or trained(c, task))
    def choose():
        ran.clear()
        head_rate(cfg(steps=1, eval_every=1), task, out=tmp_path/'a.jsonl')
        return len(ran)
    assert (choose(),choose())==(3, 0)
    monkeypatch.setattr(evidence, 'fingerprint', lambda bb: 'others')
    assert choose()==3


def test_a_comparison_in_which_everything_diverged(cfg, tmp_path, wild):
    "Its records are kept, and its error is theirs; it trains nothing when it is started again"
    for _ in range(2):
        with pytest.raises(FloatingPointError, match="'fine-tuning' diverged on 'sentiment' with every rate"):
            compare_to(['fine-tuning'], cfg(lr=None, k=24, m=None), 2, True, tmp_path/'out', list)
        assert len(wild)==3
    left, = read_records(tmp_path/'out'/'compare.jsonl.part')
    assert left['status']=='diverged' and not (tmp_path/'out'/'compare.csv').exists()
    table = compare_to(['fine-tuning','lpt'], cfg(lr=None, k=24, m=None), 1, True, tmp_path/'out', list)
    assert len(wild)==6 and table.diverged.tolist()==[1,0] and not (tmp_path/'out'/'compare.jsonl.part').exists()


def test_runs_that_all_diverged_make_no_table():
    for table in (results_table, across_tasks):
        with pytest.raises(ValueError, match='finished runs'):
            table([dict(status='diverged', method='lpt', task='t')])


def test_a_repository_around_the_package_is_not_its_own(tmp_path, monkeypatch):
    for what in (['init','-q'], ['-c','user.name=a','-c','user.email=a@b','commit','-q','--allow-empty','-m','x']):
        subprocess.run(['git',*what], cwd=tmp_path, check=True)
    (tmp_path/'provenance.py').write_text('')
    monkeypatch.setattr(provenance, 'files', lambda name: tmp_path)
    assert provenance.code_state.__wrapped__()==dict(commit=None, clean=None)
    subprocess.run(['git','add','provenance.py'], cwd=tmp_path, check=True)
    assert len(provenance.code_state.__wrapped__()['commit'])==40


def test_a_command_names_no_folder_of_this_machine(monkeypatch, tmp_path):
    argv = [tmp_path/'idp_run', f"--data={tmp_path/'data'}", '--out', tmp_path/'a.jsonl', '--template', '{s1} a=b']
    monkeypatch.setattr(provenance.sys, 'argv', [*map(str, argv), '--k', '8'])
    assert provenance.command_line()=='idp_run --data=data --out a.jsonl --template {s1} a=b --k 8'


def test_several_draws_are_one_table(cfg, tmp_path):
    "Each has its own texts and every seed; a second start trains nothing; one draw of four is not the same run"
    base,said = cfg(lr=1e-2, k=24, m=None),[]
    table = compare_to(['majority','lpt'], base, 2, False, tmp_path/'out', said.append, draws=2)
    assert table.seeds.tolist()==[4,4] and table.draws.tolist()==[2,2] and len(said)==8
    assert conclusion(table.assign(method=['lpt','lpt-npg'])).count('4 runs of 2 draws')==1
    found = read_records(tmp_path/'out'/'compare.jsonl')
    assert {(r['draw'],r['seed']) for r in found}=={(0,0),(0,1),(1,0),(1,1)}
    assert len({r['digests']['data'] for r in found})==2
    assert '4 runs of 2 draws' in primary_said(found, 'lpt - majority', tmp_path/'out')
    said.clear()
    compare_to(['majority','lpt'], base, 2, False, tmp_path/'out', said.append, draws=2)
    assert not said
    with pytest.raises(ValueError, match='is there more than once'):
        results_table([*found, found[0]])


def test_draws_that_would_all_be_the_same(cfg, tmp_path):
    with pytest.raises(ValueError, match='draws=4 without k: .*give k'):
        compare_to(['majority'], cfg(), 1, False, tmp_path/'out', draws=4)
    (tmp_path/'sentiment'/'k24').mkdir(parents=True)
    with pytest.raises(ValueError, match='each draw would be the same'):
        compare_to(['majority'], cfg(k=24, data=str(tmp_path)), 1, False, tmp_path/'out', draws=4)
    with pytest.raises(ValueError, match='draws'):
        compare_to(['majority'], cfg(k=24), 1, False, tmp_path/'out', draws=0)
    assert not (tmp_path/'out').exists()
