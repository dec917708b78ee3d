"What the papers' protocols ask for: each switch does what it says, and its default does nothing."
from dataclasses import asdict, replace

import pytest
import torch
from small import backbone, config, model_of, small_task

from idp_tutorial.config import RunConfig
from idp_tutorial.experiments.run import trained
from idp_tutorial.methods.linear_probe import start_at_probe
from idp_tutorial.model.prompted_model import count_parameters
from idp_tutorial.provenance import THEN
from idp_tutorial.training.fit import fit, warm_up
from idp_tutorial.training.processes import optimizer


def test_defaults_are_what_older_records_were_made_with():
    now = asdict(RunConfig())
    assert {k: now[k] for k in THEN}==THEN


def test_a_constant_rate_stays():
    rates = {}
    for how in ('linear','constant'):
        opt = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.)
        schedule,rates[how] = warm_up(opt, 2, 6, how),[]
        for _ in range(6):
            rates[how] += schedule.get_last_lr()
            opt.step()
            schedule.step()
    assert rates['constant']==[0., .5, 1., 1., 1., 1.] and rates['linear'][-1]<.3


def test_the_optimizer_is_as_the_config_says():
    model,cfg = model_of('lpt-npg', backbone()),config(weight_decay=.1, beta2=.98, eps=1e-6)
    plain,free = [optimizer(model, replace(cfg, no_decay=n), .01) for n in (False, True)]
    assert plain.defaults['betas']==(.9,.98) and plain.defaults['eps']==1e-6
    decay = {id(p): g['weight_decay'] for g in free.param_groups for p in g['params']}
    assert decay.keys()=={id(p) for p in model.trained().values()}
    for n,p in model.trained().items():
        assert decay[id(p)]==(0. if n.endswith('bias') else .1), n
    assert all(g['weight_decay']==.1 for g in plain.param_groups)


def test_the_head_of_two_layers():
    bb = backbone()
    one,two = [count_parameters(model_of('lpt', bb, head_hidden=h))['head'] for h in (False, True)]
    assert two-one==bb.d*bb.d+bb.d


@pytest.mark.parametrize('switch', [dict(share='L'), dict(share='S'), dict(reads='layer0'), dict(inject='replace')])
def test_m_idpg_says_which_one_it_is(switch):
    "Another variant, other parameters or other losses"
    def losses(**kw):
        model = model_of('m-idpg-phm', backbone(), **kw)
        log = fit(model, small_task(), config(method='m-idpg-phm', steps=3, eval_every=3, lr=.01, **kw))
        return count_parameters(model),log['losses']
    assert losses(**switch)!=losses()


def test_id_spam_with_the_second_relu():
    model = model_of('id-spam', backbone(), out_relu=True)
    assert next(iter(model.plan.values())).source.out_relu


def test_a_head_that_starts_at_the_probe(small_folder):
    task,cfg = small_task(train=60, validation=24, test=24),config(method='lpt', steps=1, eval_every=1, lr=1e-9,
        head_init='probe', backbone=str(small_folder))
    model = model_of('head-only', backbone())
    chosen = start_at_probe(model, task, cfg)
    assert (chosen['layer'],chosen['readout'])==(model.backbone.n_layers,'mean')
    _,log = trained(replace(cfg, method='head-only'), task)
    _,cold = trained(replace(cfg, method='head-only', head_init='random'), task)
    assert log['losses'][0]<cold['losses'][0]
    with pytest.raises(ValueError, match='a probe is a linear head'):
        start_at_probe(model_of('lpt', backbone(), head_hidden=True), task, replace(cfg, head_hidden=True))


def test_a_wrong_switch_is_refused():
    with pytest.raises(ValueError, match='schedule'):
        config(schedule='cosine')
    with pytest.raises(ValueError, match='head_init'):
        config(head_init='warm')
