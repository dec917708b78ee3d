"What a run will cost, with a forward pass that takes a second"
import torch
from small import config, small_task

from idp_tutorial.efficiency import expected as module
from idp_tutorial.efficiency.expected import expected


def test_efl_asks_two_descriptions_to_train_and_all_to_answer(small_folder, monkeypatch):
    monkeypatch.setattr(module, '_seconds', lambda *a: 1.)
    task = small_task('questions') # of six labels
    def of(method):
        cfg = config(method=method, backbone=str(small_folder), steps=4, eval_every=2, batch_size=4)
        e = expected(cfg, task)
        return e['ms_per_step'],e['seconds']-4*e['ms_per_step']/1000 # a step; the looks at validation
    (step,looks),(plain_step,plain_looks) = of('efl'),of('fine-tuning')
    assert .9<step/(2*plain_step)<1.1 and .9<looks/(6*plain_looks)<1.1


def test_a_step_is_foretold_under_autocast_and_a_look_without(small_folder, monkeypatch):
    monkeypatch.setattr(module, '_seconds', lambda *a: 1. if torch.is_autocast_enabled('cpu') else 2.)
    task = small_task('questions')
    def of(precision):
        cfg = config(backbone=str(small_folder), steps=4, eval_every=2, batch_size=4, precision=precision)
        e = expected(cfg, task)
        return e['ms_per_step'],e['seconds']-4*e['ms_per_step']/1000,e['memory_mb']
    (step,looks,memory),(plain_step,plain_looks,plain_memory) = of('bf16'),of('no')
    assert step==plain_step/2 and abs(looks-plain_looks)<1e-6
    assert memory!=plain_memory # what is kept has half the bytes, beside attention that is not fused
