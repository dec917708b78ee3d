"A layer before any training: its reasons, its texts, and the file that keeps it."
import json
import shutil
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from small import FAMILY, backbone, setting, small_task
from sweeps import BASE, HUMP, TASK

from idp_tutorial.analysis import layer_choice as module
from idp_tutorial.analysis.layer_choice import choice_if_any, choose_prompt_layer, layer_choice, made_for
from idp_tutorial.analysis.probes import layer_features
from idp_tutorial.data.tasks import load_task
from idp_tutorial.experiments.evidence import data_digest
from idp_tutorial.model.backbone import fingerprint
from idp_tutorial.model.pretrained import load_backbone
from idp_tutorial.records import read_records


@pytest.mark.parametrize('head', ['classification','verbalizer'])
@pytest.mark.parametrize('family', FAMILY)
def test_choice_and_its_reasons(family, head):
    bb,task,_,_ = setting(family)
    c = choose_prompt_layer(bb, task, head, n=32, t=3, max_len=60)
    again = choose_prompt_layer(bb, task, head, n=32, t=3, max_len=60)
    assert c['layer'] in range(3) and [r['layer'] for r in c['rows']]==[0,1,2] and c['rows']==again['rows']
    assert c['seconds']>0
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
        monkeypatch.setattr('idp_tutorial.analysis.layer_choice.linear_bits', lambda *a: next(values))
        monkeypatch.setattr('idp_tutorial.analysis.layer_choice.gradient_norms',
            lambda *a, **k: [dict(layer=i, signal=s) for i,s in enumerate(signal)])
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
    assert (c['t'],c['max_len'],c['seed'],c['n'],c['template'])==(3,60,2,16,None)
    assert choose_prompt_layer(bb, task, 'verbalizer', n=16)['template']=='code'

def test_gradients_are_of_texts_the_head_has_not_seen(monkeypatch):
    bb,task,_,_ = setting()
    seen = {}
    where = 'idp_tutorial.analysis.layer_choice.'
    monkeypatch.setattr(where+'linear_bits', lambda *a: (.1, 10.))
    monkeypatch.setattr(where+'logistic', lambda x, y, *a: seen.update(x=x) or (torch.zeros(2, bb.d), torch.zeros(2)))
    monkeypatch.setattr(where+'gradient_norms',
        lambda bb, head, ex, X, t=10: seen.update(ex=ex, t=t) or [dict(layer=k, signal=1.) for k in range(3)])
    choose_prompt_layer(bb, task, n=16, t=3)
    assert len(seen['x'])==12 and seen['t']==3 and torch.cdist(layer_features(bb, seen['ex'])[-1], seen['x']).min()>1e-3

def test_made_for():
    assert made_for(dict(layer=4, t=10), HUMP[0]) and made_for(dict(layer=4), HUMP[0])
    assert not made_for(dict(layer=4, t=20), HUMP[0])

def test_a_choice_is_for_its_settings(monkeypatch, tmp_path):
    "Made again where length, head or texts are others, and not where they are the same; one without digests is none"
    made,out = [],tmp_path/'choice.jsonl'
    def choose(bb, task, head, t, max_len, template):
        made.append((head, t, max_len))
        return dict(layer=len(made), head=head, t=t, max_len=max_len, template=template, seconds=1.)
    monkeypatch.setattr(module, 'choose_prompt_layer', choose)
    def layer(task=TASK, **kw): return layer_choice(replace(BASE, **kw), task, out)['layer']
    got = [layer(), layer(), layer(t=3), layer(t=3, max_len=64), layer(t=3, head='verbalizer'),
        layer(small_task(train=32)), layer(t=3), layer(lr=.5), layer(t=3, head='verbalizer', template='paper')]
    assert got==[1,1,2,3,4,5,2,1,6]
    assert len(made)==6
    assert [(r['t'],r['max_len'],r['sizes']['train']) for r in read_records(out)]==[(10,128,64),(3,128,64),(3,64,64),
        (3,128,64),(10,128,32),(3,128,64)]
    assert all(r['made']['command'] and r['made']['start'] for r in read_records(out))
    old = dict(task='sentiment', head='classification', layer=17, seconds=1.)
    out.write_text(json.dumps(old)+'\n')
    assert [layer(), layer(t=3), layer()]==[7,8,7]
    assert made_for(read_records(out)[0], HUMP[0]|dict(task='sentiment')) # a page may show it
    out.write_text('{"task": \n') # damaged: an error, and no sweep without a choice
    with pytest.raises(ValueError, match='line 1 is not a record'):
        choice_if_any(['lpt'], BASE, TASK, out)

def test_a_choice_of_other_weights_or_rows_is_another(small_folder, monkeypatch, tmp_path):
    "Of the same names and sizes: what was read decides, wherever it lies"
    made,out = [],tmp_path/'choice.jsonl'
    def choose(bb, task, *a, **kw):
        made.append(1)
        return dict(layer=len(made), seconds=1.)
    monkeypatch.setattr(module, 'choose_prompt_layer', choose)
    for folder in 'abc':
        shutil.copytree(small_folder, tmp_path/folder/'bb', ignore=shutil.ignore_patterns('SHA256SUMS'))
    weights = safetensors.torch.load_file(tmp_path/'c'/'bb'/'model.safetensors')
    name = next(k for k in weights if 'word_embeddings' in k)
    changed = {**weights, name:weights[name]+1}
    safetensors.torch.save_file(changed, tmp_path/'c'/'bb'/'model.safetensors', {'format':'pt'})
    turned = replace(TASK, splits={s: [{**r, 'label':1-r['label']} for r in rows] for s,rows in TASK.splits.items()})
    def layer(folder, task=TASK):
        return layer_choice(replace(BASE, backbone=str(tmp_path/folder/'bb')), task, out)['layer']
    assert [layer('a'), layer('b'), layer('c'), layer('a', turned), layer('b'), layer('c')]==[1,1,2,3,1,2]
    r = read_records(out)[0]
    assert r['digests']==dict(weights=fingerprint(load_backbone(str(small_folder))), data=data_digest(TASK))

@pytest.mark.parametrize('make,words', [
    (lambda: choose_prompt_layer(setting()[0], small_task('similarity')), ['regression','needs classes']),
    (lambda: choose_prompt_layer(backbone('gpt2'), load_task('in-short')), ['texts','needs classes']),
    (lambda: choose_prompt_layer(setting()[0], small_task(), 'verbaliser'), ["head 'verbaliser'","'verbalizer'"]),
    (lambda: choose_prompt_layer(setting()[0], small_task(train=1)), ['1 texts','at least 8 texts'])])
def test_what_is_refused(make, words):
    with pytest.raises(ValueError) as e:
        make()
    assert all(w in str(e.value) for w in words), str(e.value)
