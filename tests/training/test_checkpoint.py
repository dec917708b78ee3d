"""A run that was killed and started again is the run that was not killed, to the bit; what is in its file, and which
files are refused."""
import os
import random
import threading

import numpy as np
import pytest
import torch
from small import Killed, backbone, config, kill_at, model_of, numbers, small_task

from idp_tutorial import files as files_of
from idp_tutorial import snapshots
from idp_tutorial.locks import alone, writing
from idp_tutorial.methods.build import build
from idp_tutorial.methods.glove import write_glove
from idp_tutorial.methods.registry import METHODS
from idp_tutorial.model import prompted_model
from idp_tutorial.snapshots import last_step
from idp_tutorial.tensor_files import PROMPTS, save_tensors
from idp_tutorial.training.checkpoint import Checkpoint, identity
from idp_tutorial.training.fit import fit


def make(cfg, task=None): return build(cfg, backbone(), task or small_task())

def kill_and_go_on(cfg, folder, at, every, task=None): # the log and the model of the second start
    first = make(cfg, task)
    kill_at(first, at)
    with pytest.raises(Killed): fit(first, task or small_task(), cfg, save=folder, save_every=every)
    model = make(cfg, task)
    if [*folder.glob('checkpoint-*')]:
        torch.rand(5)
        random.random() # whatever happened to the generators
    seen = kill_at(model, 0)
    return fit(model, task or small_task(), cfg, save=folder, save_every=every),model,len(seen)

def files(folder): return sorted(p.name for p in folder.glob('[!.]*'))

def tensors(model): return {n: p.detach().clone() for n,p in prompted_model.learnt(model).items()}
def same(a, b): assert a.keys()==b.keys() and all(torch.equal(a[n], b[n]) for n in a)

@pytest.mark.parametrize('method', METHODS)
def test_as_if_nothing_had_happened(method, tmp_path):
    cfg = config(method=method, steps=7, eval_every=3, lr=1e-3, standardise=True) # dropout is on; 4 batches a pass
    log = fit(whole := make(cfg), small_task(), cfg)
    rest,model,steps = kill_and_go_on(cfg, tmp_path/method, 6, 2)
    assert numbers(rest)==numbers(log) and steps==3 # steps 5, 6, 7
    same(tensors(model), tensors(whole))

@pytest.mark.parametrize('at,every,left', [(1,1,5), (2,1,4), (5,1,1), (3,2,3), (5,5,5), (5,100,5)])
def test_wherever_it_is_killed(at, every, left, tmp_path):
    cfg = config(steps=5, eval_every=2)
    log = fit(make(cfg), small_task(), cfg)
    rest,model,steps = kill_and_go_on(cfg, tmp_path, at, every)
    assert numbers(rest)==numbers(log) and steps==left

@pytest.mark.parametrize('kw', [dict(accumulate=2, batch_size=8), dict(precision='bf16'),
    dict(warmup=.5, clip=.01, weight_decay=.3), dict(lower_dropout=True)], ids=str)
def test_accumulation_precision_and_schedule(kw, tmp_path):
    cfg = config(steps=6, **kw)
    log = fit(make(cfg), small_task(), cfg)
    assert numbers(kill_and_go_on(cfg, tmp_path, 5*cfg.accumulate, 2)[0])==numbers(log)

def test_caches_and_regression(tmp_path):
    task = small_task('similarity')
    cfg = config(task='similarity', steps=6, cache='hidden', cache_dir=str(tmp_path/'cache'), lr=1e-3)
    log = fit(make(cfg, task), task, cfg)
    assert numbers(kill_and_go_on(cfg, tmp_path/'run', 5, 2, task)[0])==numbers(log)

def test_the_best_so_far_outlives_a_kill(tmp_path, monkeypatch):
    "The best look lies before the kill, all later ones are worse"
    cfg,seen = config(steps=6, eval_every=2, lr=.05),[]
    def scripted(scores):
        left = iter(scores)
        monkeypatch.setattr('idp_tutorial.training.fit.evaluate', lambda m,
            *a, **k: seen.append(tensors(m)) or ({'accuracy':next(left)},None))
    scripted([70,60,50])
    fit(whole := make(cfg), small_task(), cfg)
    best = seen[0]
    same(tensors(whole), best)
    seen.clear()
    scripted([70,60,50])
    log,model,_ = kill_and_go_on(cfg, tmp_path, 5, 1)
    assert log['validation']==70 and log['history']==[(2,70),(4,60),(6,50)]
    same(tensors(model), best)
    assert not all(torch.equal(seen[-1][n], best[n]) for n in best)

def test_killed_twice(tmp_path):
    cfg = config(steps=6)
    log = fit(make(cfg), small_task(), cfg)
    for at in (3, 2): # of this start's steps
        m = make(cfg)
        kill_at(m, at)
        with pytest.raises(Killed): fit(m, small_task(), cfg, save=tmp_path, save_every=1)
    assert last_step(tmp_path)['seen']['step']==3
    assert numbers(fit(make(cfg), small_task(), cfg, save=tmp_path, save_every=1))==numbers(log)

def test_a_finished_run_answers_at_once(tmp_path):
    cfg = config()
    log = fit(whole := make(cfg), small_task(), cfg, save=tmp_path)
    model = make(cfg)
    calls = kill_at(model, 1) # would be killed by its first step
    again = fit(model, small_task(), cfg, save=tmp_path)
    assert numbers(again)==numbers(log)
    assert again['ms_per_step']==log['ms_per_step']
    assert again['peak_memory_mb']==log['peak_memory_mb']
    assert not calls
    same(tensors(model), tensors(whole))

def test_saving_changes_nothing(tmp_path):
    cfg = config()
    assert numbers(fit(make(cfg), small_task(), cfg, save=tmp_path, save_every=1))==numbers(fit(make(cfg), small_task(),
        cfg))

# --- the file

def test_what_is_written(tmp_path):
    cfg = config(steps=4, standardise=True, method='s-idpg-phm')
    m = make(cfg)
    kill_at(m, 4)
    with pytest.raises(Killed): fit(m, small_task(), cfg, save=tmp_path, save_every=3)
    was = last_step(tmp_path)
    assert was['tensors'].keys()==prompted_model.learnt(m).keys() and not any(n.startswith('lm.')
        for n in was['tensors']) and len(was['opt']['state'])==len(m.trained())
    assert sum('scale' in n for n in was['tensors'])==3 # the running statistics of `standardise`
    assert was['seen']['step']==3 and len(was['seen']['losses'])==3 and files(tmp_path)==['checkpoint-3.safetensors']
    assert str(tmp_path) not in str(was['about']) and was['about']['frozen weights']==identity(make(cfg), [[]], cfg,
        1.)['frozen weights']
    size = (tmp_path/'checkpoint-3.safetensors').stat().st_size
    fit(make(cfg), small_task(), cfg, save=tmp_path, save_every=3)
    assert (tmp_path/'checkpoint-4.safetensors').stat().st_size<size # finished: no optimizer

@pytest.mark.parametrize('error', [Killed(), OSError(28, 'No space left on device')], ids=['kill','full disk'])
def test_half_a_file_is_none(error, tmp_path, monkeypatch):
    cfg,plain = config(steps=5),files_of.os.fsync
    log = fit(make(cfg), small_task(), cfg)
    done = []
    def half(at):
        if len(done)==2: # a file and its folder
            raise error
        done.append(1)
        plain(at)
    monkeypatch.setattr(files_of.os, 'fsync', half)
    full = pytest.raises(ValueError, match=r'no checkpoint can be written at step 4: no space is left.*one before is')
    with pytest.raises(Killed) if isinstance(error, Killed) else full:
        fit(make(cfg), small_task(), cfg, save=tmp_path, save_every=2)
    monkeypatch.setattr(files_of.os, 'fsync', plain)
    assert files(tmp_path)==['checkpoint-2.safetensors'] and last_step(tmp_path)['seen']['step']==2
    assert numbers(fit(make(cfg), small_task(), cfg, save=tmp_path, save_every=2))==numbers(log)

def test_a_disk_that_was_full_from_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(files_of.os, 'fsync', lambda at: (_ for _ in ()).throw(OSError(28, 'No space left on device')))
    with pytest.raises(ValueError, match='at step 2: no space is left .* There is none before it; then start'):
        fit(make(c := config(steps=5)), small_task(), c, save=tmp_path, save_every=2)

def test_a_damaged_newest_falls_back(tmp_path):
    cfg = config(steps=5)
    log = fit(make(cfg), small_task(), cfg, save=tmp_path, save_every=2)
    assert files(tmp_path)==['checkpoint-4.safetensors','checkpoint-5.safetensors']
    newest = tmp_path/'checkpoint-5.safetensors'
    for harm in (lambda b: b[:len(b)//2], lambda b: b[:-40]+bytes([b[-40]^4])+b[-39:], lambda b: b''):
        newest.write_bytes(harm(newest.read_bytes()))
        with pytest.warns(UserWarning, match='checkpoint-5.* is damaged: .*; the run goes on from checkpoint-4'):
            again = fit(make(cfg), small_task(), cfg, save=tmp_path, save_every=2)
        assert numbers(again)==numbers(log)
    newest.write_bytes((tmp_path/'checkpoint-4.safetensors').read_bytes()) # swapped
    with pytest.warns(UserWarning, match='it is of step 4'):
        assert numbers(fit(make(cfg), small_task(), cfg, save=tmp_path, save_every=2))==numbers(log)

@pytest.mark.parametrize('name', ['_loss','score'])
def test_a_run_that_diverged_leaves_its_folder_to_another_rate(name, tmp_path, monkeypatch):
    cfg = config(steps=6, lr=1e-3)
    from idp_tutorial.training.fit import Run
    plain,calls = getattr(Run, name),[]
    def once_no_number(self, *args):
        calls.append(1)
        if name=='score' and len(calls)==2: # the loss was one, before the step
            raise FloatingPointError("the model's answers are no numbers")
        return plain(self, *args)*(float('nan') if name=='_loss' and len(calls)==4 else 1)
    monkeypatch.setattr(Run, name, once_no_number)
    with pytest.raises(FloatingPointError, match='nothing is kept of this run. A lower lr usually fixes it'):
        fit(make(cfg), small_task(), cfg, save=tmp_path, save_every=1)
    assert not files(tmp_path)
    fit(make(cfg), small_task(), cfg, lr=1e-4, save=tmp_path)

def test_a_backbone_that_is_no_number_is_named(tmp_path):
    cfg,bb = config(),backbone()
    bb.layers[1].output.dense.weight.data[0,0] = float('nan')
    with pytest.raises(FloatingPointError, match=r"the backbone's weights are none \(lm.*output.dense.weight\)"):
        fit(build(cfg, bb, small_task()), small_task(), cfg)

def test_one_run_a_folder(tmp_path):
    with alone(tmp_path):
        said = []
        def second():
            with pytest.raises(ValueError, match=r'is in use by process \d+ on .*: wait until it ends'):
                fit(make(config()), small_task(), config(), save=tmp_path)
            said.append(1)
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert said and not files(tmp_path)

# --- refusals

@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    fit(make(config()), small_task(), config(), save=(f := tmp_path_factory.mktemp('run')))
    return f

@pytest.mark.parametrize('kw,words', [(dict(lr=.02), 'lr 0.01 there, 0.02 here'),
    (dict(seed=1), 'seed 0 there, 1 here'), (dict(steps=9), 'steps 4 there, 9 here'),
    (dict(method='lpt-appg'), "method 'lpt-npg' there, 'lpt-appg' here"),
    (dict(batch_size=8), 'batch_size 16 there, 8 here'), (dict(precision='bf16'), "precision 'no' there, 'bf16' here")],
    ids=str)
def test_another_config(kw, words, folder):
    cfg = config(**kw)
    before = (folder/'checkpoint-4.safetensors').read_bytes()
    with pytest.raises(ValueError, match='holds another run') as e: fit(make(cfg), small_task(), cfg, save=folder)
    assert words in str(e.value)
    assert 'give another folder, or the same settings' in str(e.value)
    assert (folder/'checkpoint-4.safetensors').read_bytes()==before

def test_the_rate_that_fit_is_given(folder):
    with pytest.raises(ValueError, match=r'\(lr 0.01 there, 0.02 here\)'):
        fit(make(config()), small_task(), config(), lr=.02, save=folder)

def test_other_texts_or_another_backbone(folder):
    for task in (small_task(train=63), small_task(validation=23)):
        with pytest.raises(ValueError, match=r'\(texts \'\w+\' there, \'\w+\' here\)'):
            fit(make(config()), task, config(), save=folder)
    cfg,bb = config(),backbone()
    bb.words.weight.data[7,0] += 1e-4
    with pytest.raises(ValueError, match="frozen weights '"):
        fit(build(cfg, bb, small_task()), small_task(), cfg, save=folder)

@pytest.mark.parametrize('method', ['fine-tuning','efl','lora','bitfit'])
def test_another_backbone_that_is_trained_itself(method, tmp_path):
    "Nothing of it may be frozen: its fingerprint before training says which one it is, also when a model goes on"
    cfg = config(method=method, lr=1e-3)
    whole = fit(make(cfg), small_task(), cfg)
    kill_at(model := make(cfg), 4)
    with pytest.raises(Killed): fit(model, small_task(), cfg, save=tmp_path)
    bb = backbone()
    bb.words.weight.data[7,0] += 1e-4
    with pytest.raises(ValueError, match="holds another run .*weights '"):
        fit(build(cfg, bb, small_task()), small_task(), cfg, save=tmp_path)
    del model.forward
    assert numbers(fit(model, small_task(), cfg, save=tmp_path))==numbers(whole)

def test_other_word_vectors_of_one_name(tmp_path):
    words = sorted({w for r in small_task().splits['train'] for w in r['sentence1'].lower().split()})
    def cfg(folder, sign):
        (tmp_path/folder).mkdir(exist_ok=True)
        write_glove({w: i for i,w in enumerate(words)}, sign*np.arange(8.*len(words)).reshape(-1, 8)%7,
            tmp_path/folder/'glove.txt')
        return config(method='m-idpg-phm-glove', glove=str(tmp_path/folder/'glove.txt'))
    one = cfg('a', 1)
    log = fit(make(one), small_task(), one, save=tmp_path/'run')
    same_words = cfg('b', 1)
    assert numbers(fit(make(same_words), small_task(), same_words, save=tmp_path/'run'))==numbers(log)
    other = cfg('b', -1)
    with pytest.raises(ValueError, match="holds another run .word vectors"):
        fit(make(other), small_task(), other, save=tmp_path/'run')

def test_other_prompts_to_start_with_of_one_name(tmp_path):
    def cfg(folder, jolt):
        own = {n: p.detach()+jolt for n,p in prompted_model.learnt(make(config())).items()}
        (tmp_path/folder).mkdir(parents=True, exist_ok=True)
        save_tensors(tmp_path/folder/PROMPTS, own, {})
        return config(start=str(tmp_path/folder))
    one = cfg('a/first', .01)
    log = fit(make(one), small_task(), one, save=tmp_path/'run')
    moved = cfg('b/first', .01)
    assert numbers(fit(make(moved), small_task(), moved, save=tmp_path/'run'))==numbers(log)
    other = cfg('b/first', .02)
    with pytest.raises(ValueError, match="holds another run .prompts to start with '"):
        fit(make(other), small_task(), other, save=tmp_path/'run')

def test_where_things_lie_is_not_in_it():
    task = small_task()
    m = make(config())
    rows = [task.encode(task.splits['train'], m.backbone.tokenizer)]
    assert identity(m, rows, config(data='a/b', cache_dir='c', backbone='x/tiny'), 1.)==identity(m, rows,
        config(data='d', device='auto', backbone='y/tiny'), 1.)
    assert identity(m, rows, config(), 1., 2)!=identity(m, rows, config(), 1., 1) and identity(m, rows, config(),
        1.)==identity(model_of('lpt-npg', backbone()), rows, config(), 1.)

@pytest.mark.parametrize('harm', [lambda b: b[:len(b)//2], lambda b: b'', lambda b: b'no checkpoint',
    lambda b: b[:300]+bytes(200)+b[500:]], ids=['cut','empty','text','zeros'])
def test_two_damaged_files(harm, tmp_path):
    fit(make(config()), small_task(), config(), save=tmp_path)
    for f in tmp_path.glob('checkpoint-*'): f.write_bytes(harm(f.read_bytes()))
    with pytest.raises(ValueError, match='checkpoint-4.safetensors is damaged: .*; .*checkpoint-2.* is damaged: .*'
        'Delete them to start this run anew'):
        fit(make(config()), small_task(), config(), save=tmp_path)

def test_what_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    fit(make(config()), small_task(), config(), save=tmp_path)
    def refused(file):
        raise PermissionError(13, 'Permission denied', str(file))
    monkeypatch.setattr(snapshots, 'read_tree', refused)
    with pytest.raises(ValueError, match='checkpoint-4.* may not be read .* by this user.*delete nothing') as e:
        fit(make(config()), small_task(), config(), save=tmp_path)
    assert 'damaged' not in str(e.value)

def test_files_of_something_else(tmp_path):
    torch.save({'a':1}, tmp_path/'checkpoint.pt')
    with pytest.raises(ValueError, match='a checkpoint of version 0.1.0, which could run code'):
        fit(make(config()), small_task(), config(), save=tmp_path)
    snapshots.write_step(tmp_path, 3, {'a':1})
    with pytest.raises(ValueError, match='of something else'):
        fit(make(config()), small_task(), config(), save=tmp_path)

def test_folders_that_cannot_be(tmp_path):
    (tmp_path/'file').write_text('')
    for f in (tmp_path/'file', tmp_path/'file/run'):
        with pytest.raises(ValueError, match='give a folder that may'): Checkpoint(f, {}, 1)
    with pytest.raises(ValueError, match='save_every=-1: at least 1 step'):
        fit(make(config()), small_task(), config(), save=tmp_path/'x', save_every=-1)

def test_only_what_was_left_of_the_same_file_is_swept_away(tmp_path, monkeypatch):
    long = 50*'a'
    names = [f'.{name[:40]}.123-0123abcd.part' for name in (long,'compare','compare-2.jsonl','compare.jsonl')]
    def left():
        return [name for name in names if (tmp_path/name).exists()]
    for name in names:
        (tmp_path/name).touch()
        os.utime(tmp_path/name, (0, 0))
    with writing(tmp_path/long):
        assert left()==names[1:]
    with writing(tmp_path/'compare'):
        assert left()==names[2:]
    monkeypatch.setattr(type(tmp_path), 'glob', lambda self, pattern: [tmp_path/'.gone.123-0123abcd.part'])
    with alone(tmp_path): # another process was quicker
        pass
    monkeypatch.undo()
    with alone(tmp_path):
        assert left()==[]
