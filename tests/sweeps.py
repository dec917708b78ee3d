"Sweeps that take no time, and records of sweeps that nobody ran."
from dataclasses import asdict

from small import small_task

from idp_tutorial.analysis.layer_sweep import sweep_prompt_layer
from idp_tutorial.config import RunConfig
from idp_tutorial.experiments import rates
from idp_tutorial.experiments import run as experiments


def pretend(monkeypatch, crash_after=None):
    "Runs that take no time; returns the configs that were run"
    ran = []
    def train(cfg, task):
        if crash_after is not None and len(ran)>=crash_after:
            raise KeyboardInterrupt
        ran.append((cfg.method, cfg.layer, cfg.seed, cfg.lr))
        return cfg,dict(validation=70+10*(cfg.lr or 0)+(cfg.layer or 0))
    def record(c, log, task, cfg, test=True, beside=None):
        score = log['validation']
        return {**asdict(c), 'data':c.data and c.data.split('/')[-1], 'metric':'accuracy', 'score':score,
            'validation':score, 'params':dict(prompt=4, head=2, backbone=0), 'history':[[1,50.],[2,score]],
            'ms_per_step':10.-(c.layer or 0), 'peak_memory_mb':5., 'steps':c.steps,
            'sizes':{s: len(r) for s,r in task.splits.items()}}
    for m in (rates,experiments):
        monkeypatch.setattr(m, 'trained', train)
        monkeypatch.setattr(m, 'record_of', record)
    return ran

BASE = RunConfig(task='sentiment', steps=3, device='cpu')
TASK = small_task()
def swept(methods=('lpt',), layers=(0,2), seeds=2, base=BASE, **kw):
    return sweep_prompt_layer(list(methods), base, layers, seeds, task=TASK, say=lambda s: None, **kw)

SETTINGS = [dict(steps=4), dict(t=3), dict(k=5), dict(draw=1), dict(head='verbalizer'), dict(lr=.7),
    dict(weight_decay=.5), dict(batch_size=8), dict(max_len=64), dict(head_lr=.1), dict(eval_every=3),
    dict(precision='bf16'), dict(cache='hidden')]

def fake(scores, noise=.5, seeds=3, m='lpt', **kw):
    "Records of a sweep with these mean scores, one a layer"
    of_all = dict(method=m, task='toy', k=None, backbone='toy', head='classification', metric='accuracy',
        n_layers=len(scores), seconds=10., tuning_seconds=5., params=dict(prompt=10, head=2), lr=.1)
    def one(layer, v, s):
        return {**of_all, 'layer':layer, 'seed':s, 'score':v+noise*(s-1), 'validation':v, 'history':[[1,v-5],[2,v+s]],
            'ms_per_step':2.*len(scores)-layer, 'peak_memory_mb':100.-5*layer, **kw}
    return [one(layer, v, s) for layer,v in enumerate(scores) for s in range(seeds)]

HUMP = fake([60,63,66,66,63,60])
