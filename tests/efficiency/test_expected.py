"What a run will cost, with a forward pass that takes a second"
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
