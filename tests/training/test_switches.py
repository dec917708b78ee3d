"What the papers' protocols ask for: each switch does what it says, and its default does nothing."
from dataclasses import asdict, replace

import pytest
import torch
from small import backbone, config, model_of, small_task

from idp_tutorial.config import RunConfig
from idp_tutorial.data.few_shot import few_shot
from idp_tutorial.experiments import rates
from idp_tutorial.experiments.rates import beyond
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


@pytest.mark.parametrize('method', ['lpt-npg','m-idpg-phm'])
def test_the_optimizer_is_as_the_config_says(method):
    model,cfg = model_of(method, backbone()),config(weight_decay=.1, beta2=.98, eps=1e-6)
    plain,free = [optimizer(model, replace(cfg, no_decay=n), .01) for n in (False, True)]
    assert plain.defaults['betas']==(.9,.98) and plain.defaults['eps']==1e-6
    decay = {id(p): g['weight_decay'] for g in free.param_groups for p in g['params']}
    assert decay.keys()=={id(p) for p in model.trained().values()}
    for n,p in model.trained().items():
        assert decay[id(p)]==(0. if n.endswith(('bias','b2')) else .1), n
    assert all(g['weight_decay']==.1 for g in plain.param_groups)


def test_the_head_of_two_layers():
    bb = backbone()
    one,two = [count_parameters(model_of('lpt', bb, head_hidden=h))['head'] for h in (False, True)]
    assert two-one==bb.d*bb.d+bb.d


@pytest.mark.parametrize('switch', [dict(share='L'), dict(share='S'), dict(reads='layer0'), dict(inject='replace')])
def test_m_idpg_says_which_one_it_is(switch):
    "Another variant, other parameters or other losses"
    assert trained_numbers('m-idpg-phm', **switch)!=trained_numbers('m-idpg-phm')


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


def trained_numbers(method, **kw):
    "Counts and losses of three steps"
    family = 'gpt2' if method=='lpt-appg' else 'roberta' # its option is a decoder's
    model = model_of(method, backbone(family), **kw)
    log = fit(model, small_task(), config(method=method, steps=3, eval_every=3, lr=.01, **kw))
    return count_parameters(model),log['losses']


@pytest.mark.parametrize('method,switch', [('s-idpg-phm', dict(sentence_pass='cls')),
    ('s-idpg-phm', dict(sentence_pass='noisy')), ('m-idpg-phm', dict(sentence_pass='cls')),
    ('s-idpg-dnn', dict(sentence_dropout=.6)), ('m-idpg-phm', dict(generator_dropout=.6)), ('lpt', dict(init_std=.3)),
    ('s-idpg-phm', dict(generator='residual')), ('s-idpg-phm', dict(generator='both')),
    ('prompt-tuning', dict(init_std=.3)), ('p-tuning-v2', dict(way='add')), ('p-tuning-v2', dict(way='replace')),
    ('id-spam', dict(embeds='embeddings')), ('lpt-appg', dict(skip_last=True))])
def test_a_method_is_as_its_option_says(method, switch):
    assert trained_numbers(method, **switch)!=trained_numbers(method)


def test_idpgs_own_p_tuning_v2_has_half_the_numbers():
    rows,pairs = [count_parameters(model_of('p-tuning-v2', backbone(), way=w))['prompt'] for w in ('add','kv')]
    assert 2*rows==pairs


def test_separate_dropouts_are_where_they_say():
    plan = model_of('s-idpg-phm', backbone(), sentence_dropout=.3, generator_dropout=.4).plan
    source = next(iter(plan.values())).source
    assert (source.read.dropout.p,source.generator.dropout.p)==(.3, .4)


def test_epochs_are_steps():
    "Of 64 texts in batches of 16 two passes are 8 steps, with as many looks; twice told is once told"
    cfg = config(method='lpt', epochs=2., steps=4, eval_every=2)
    log = fit(model_of('lpt', backbone()), small_task(), cfg)
    assert (log['steps'],[s for s,_ in log['history']])==(8, [4, 8])
    once = cfg.in_steps(64)
    assert (once.steps,once.eval_every)==(8, 4) and once.in_steps(64)==once and cfg.in_steps(64, 2).steps==4
    assert config().in_steps(64)==config()


def test_a_plain_draw_does_not_count_the_labels():
    rows = [dict(s1=str(i), label=int(i<10)) for i in range(100)]
    ones = {s: {sum(r['label'] for r in few_shot(rows, 20, seed, s)[0]) for seed in range(8)} for s in (True, False)}
    assert ones[True]=={2} and len(ones[False])>1


def test_a_grid_is_widened():
    "Beyond its first or last rate by the same factor"
    assert beyond(1e-2, [1e-3, 1e-2])==[.1] and beyond(1e-3, [1e-2, 1e-3])==[1e-4]
    assert beyond(3e-3, [1e-3, 3e-3, 1e-2])==[]==beyond(.1, [.1])


def test_a_run_chooses_its_rate_once(monkeypatch, tmp_path):
    monkeypatch.setattr(rates, 'trained', lambda c, task: (c, dict(validation=c.lr)))
    monkeypatch.setattr(rates, 'record_of', lambda c, log, task, cfg, *a: {**asdict(c), 'schema':2,
        'sizes':{split: len(rows) for split,rows in task.splits.items()}})
    cfg = config(method='lpt', task='sentiment', k=8, lr=None)
    for _ in range(2):
        chosen,said = rates.chosen_rate(cfg, (1e-3, 1e-2), tmp_path)
        monkeypatch.setattr(rates, 'trained', None) # the second time nothing runs
    assert chosen.lr==100. and said['edge'] and [r for r,_ in said['tried']]==[1e-3, 1e-2, .1, 1., 10., 100.]


def test_a_grid_grows_while_its_edge_is_best(monkeypatch):
    monkeypatch.setattr(rates, 'trained', lambda c, task: (c, dict(validation=-abs(c.lr-1))))
    tried = [[r for r,_ in rates._try_all(config(lr=None), None, (.01,.1), print, n)[1]] for n in (0,1,4)]
    assert tried==[[.01, .1], [.01, .1, 1.], [.01, .1, 1., 10.]]
