"""The loop: the same numbers under the same seed, the checkpoint that is kept, accumulation, clipping, schedule,
divergence, regression, and what must not move."""
import contextlib
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small import Killed, backbone, batch_of, config, kill_at, model_of, small_task
from torch import nn

from idp_tutorial.data.task import scaled
from idp_tutorial.methods.build import backbone_for, build
from idp_tutorial.methods.prompt_files import from_pretrained, save_pretrained
from idp_tutorial.methods.registry import METHODS
from idp_tutorial.model.heads import ClassificationHead
from idp_tutorial.model.layer_loop import run_layers
from idp_tutorial.model.plan import Step
from idp_tutorial.model.prompted_model import PromptedModel, learnt
from idp_tutorial.model.small_models import SMALL, attentions, one_step, random_prompt, small_backbone, text
from idp_tutorial.training.evaluation import answers, evaluate
from idp_tutorial.training.fit import fit, warm_up
from idp_tutorial.training.processes import compiled


class Still(nn.Module):
    "A static prompt without dropout"
    def __init__(self, t=4, d=32):
        super().__init__()
        self.p = nn.Parameter(torch.randn(t, d))
    def forward(self, ctx): return self.p.expand(len(ctx.h), -1, -1)

def quiet(std=.2, n_out=2, layer=2):
    "A model whose numbers depend on the data only: no dropout anywhere"
    torch.manual_seed(0)
    bb = backbone(std=std)
    for m in bb.model.modules():
        if isinstance(m, nn.Dropout): m.p = 0.
    for l in bb.layers: l.attention.self.dropout.p = 0.
    return PromptedModel(bb, ClassificationHead(bb.d, n_out, 'mean'), {layer: Step('insert', Still())})

def tensors(model): return {n: p.detach().clone() for n,p in model.trained().items()}

@pytest.fixture
def adamw(monkeypatch):
    "Every optimizer step: learning rate, gradient norm, and which tensors"
    steps = []
    class Recorder(torch.optim.AdamW):
        def step(self, *args, **kwargs):
            params = [p for g in self.param_groups for p in g['params']]
            # of what is there, at least one
            norm = torch.stack([p.grad.norm() for p in params if p.grad is not None]).norm()
            steps.append(dict(lr=self.param_groups[0]['lr'], decay=self.param_groups[0]['weight_decay'],
                norm=norm.item(), params=params))
            return super().step(*args, **kwargs)
    monkeypatch.setattr(torch.optim, 'AdamW', Recorder)
    return steps

# --- the same and not the same

@pytest.mark.parametrize('method', METHODS)
def test_a_seed_decides_everything(method):
    task = small_task()
    def go(seed):
        cfg = config(method=method, seed=seed, steps=3, lr=1e-3)
        bb = backbone()
        model = build(cfg, bb, task)
        torch.rand(seed+3)
        log = fit(model, task, cfg)
        return log['losses'],log['history'],tensors(model)
    (l1,h1,w1),(l2,h2,w2),(l3,_,w3) = go(0),go(0),go(1)
    assert l1==l2 and h1==h2 and all(torch.equal(w1[n], w2[n]) for n in w1)
    assert l1!=l3 and any(not torch.equal(w1[n], w3[n]) for n in w1)

@pytest.mark.parametrize('method', [m for m in METHODS if m not in ('fine-tuning','efl')])
def test_what_is_frozen_does_not_move(method, adamw):
    task,bb = small_task(),backbone()
    model = build(cfg := config(method=method, steps=3, lr=.1), bb, task)
    before = {n: v.clone() for n,v in model.state_dict().items()}
    trained = model.trained()
    fit(model, task, cfg)
    after = model.state_dict()
    moved = {n for n in after if not torch.equal(after[n], before[n])}
    ids = {id(p) for p in trained.values()} # a generator that layers share has several names
    # all that is trained moves, and nothing else
    assert moved=={n for n,p in model.named_parameters(remove_duplicate=False) if id(p) in ids}
    assert {id(p) for s in adamw for p in s['params']}=={id(p) for p in trained.values()}

def test_the_seed_orders_the_texts():
    def order(seed):
        model,seen = quiet(),[]
        plain = model.head.loss
        model.head.loss = lambda ctx, y: seen.append(ctx.ids.sum(1).tolist()) or plain(ctx, y)
        fit(model, small_task(), config(steps=2, seed=seed))
        return seen
    assert order(0)==order(0)!=order(1)

def test_evaluate_switches_dropout_off():
    bb,task = backbone(),small_task()
    model = model_of('lpt', bb, task)
    examples = task.encode(task.splits['test'], bb.tokenizer, 60)
    seen = []
    model.head.register_forward_hook(lambda m, i, out: seen.append(out))
    for _ in range(2):
        model.train()
        evaluate(model, examples, task)
    assert torch.equal(*seen)

# --- which checkpoint

@pytest.mark.parametrize('scores,kept', [([50,60,60,40],1), ([70,60,60,40],0), ([10,20,30,40],3), ([5,5,5,5],0)])
def test_the_best_on_validation_is_put_back_and_a_tie_keeps_the_earlier(scores, kept, monkeypatch):
    model,seen = quiet(),[]
    def scripted(m, examples, task, *args, **how):
        assert [e['label'] for e in examples]==[r['label'] for r in task.splits['validation']]
        seen.append(tensors(model))
        return {'accuracy':scores[len(seen)-1]},None
    monkeypatch.setattr('idp_tutorial.training.fit.evaluate', scripted)
    log = fit(model, small_task(), config(steps=7, eval_every=2, lr=.05))
    # the last step is always looked at
    assert log['history']==list(zip([2,4,6,7], scores)) and log['validation']==max(scores)
    for n,p in tensors(model).items(): assert torch.equal(p, seen[kept][n])
    assert not torch.equal(seen[0]['sources.0.p'], seen[3]['sources.0.p'])

# --- accumulation, clipping, schedule

@pytest.mark.parametrize('warmup,steps', [(0,5), (2,6), (6,6), (3,100)])
def test_the_schedule_is_the_librarys(warmup, steps):
    from transformers import get_linear_schedule_with_warmup
    def rates(schedule):
        opt,found = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=.3),[]
        s = schedule(opt, warmup, steps)
        for _ in range(steps):
            found += s.get_last_lr()
            opt.step()
            s.step()
        return found
    assert rates(warm_up)==rates(get_linear_schedule_with_warmup)

def test_two_halves_equal_one_whole():
    task = small_task(train=32)
    def go(batch_size, accumulate):
        model = quiet()
        log = fit(model, task, config(steps=4, lr=1e-3, batch_size=batch_size, accumulate=accumulate))
        return tensors(model),log['losses']
    (a,l),(b,m) = go(32, 1),go(16, 2)
    for n in a: torch.testing.assert_close(a[n], b[n], atol=1e-5, rtol=0)
    assert l==pytest.approx(m, abs=1e-4) # the loss of a step is the mean over its batches

@pytest.mark.parametrize('n', [32,48,80])
def test_every_step_is_taken_wherever_the_epoch_ends(n, adamw):
    model = quiet()
    # 3 or 5 batches a pass: a step crosses its end
    fit(model, small_task(train=n), config(steps=7, lr=1e-3, batch_size=16, accumulate=2))
    assert len(adamw)==7

def test_the_gradient_of_a_step_is_the_mean_over_its_batches(adamw):
    task = small_task(train=32)
    for size,n in ((32,1),(16,2),(8,4)):
        fit(quiet(), task, config(steps=1, lr=1e-3, batch_size=size, accumulate=n, clip=1e9))
    norms = [s['norm'] for s in adamw]
    assert norms[0]>1e-3 and norms==pytest.approx([norms[0]]*3, rel=1e-4)

def test_weight_decay_is_the_configs(adamw):
    fit(quiet(), small_task(), config(steps=1, weight_decay=.3))
    assert [s['decay'] for s in adamw]==[.3]

def test_gradients_are_clipped(adamw):
    model = quiet()
    task = small_task()
    fit(model, task, config(steps=2, clip=1e9))
    free = max(s['norm'] for s in adamw)
    adamw.clear()
    fit(quiet(), task, config(steps=2, clip=free/100))
    assert [s['norm'] for s in adamw]==pytest.approx([free/100]*2, rel=1e-3)

@pytest.mark.parametrize('kw,words', [(dict(clip=0.),'clip=0.0: the largest gradient norm is a positive number'),
    (dict(warmup=6.),'warmup=6.0: it is a share of the steps'), (dict(warmup=-1.),'warmup=-1.0')])
def test_values_that_would_train_nothing(kw, words):
    with pytest.raises(ValueError, match=words): config(**kw)

def test_warm_up_then_a_straight_line_down(adamw):
    fit(quiet(), small_task(), config(steps=20, warmup=.25, lr=.02, eval_every=20))
    want = [.02*(i/5 if i<5 else (20-i)/15) for i in range(20)]
    assert [s['lr'] for s in adamw]==pytest.approx(want)

# --- divergence

@pytest.mark.parametrize('at,steps', [(1,3), (12,15), (13,13)])
def test_a_loss_that_is_no_number_ends_the_run(at, steps, monkeypatch):
    model = quiet()
    calls,plain = [],model.head.loss
    def loss(ctx, label):
        calls.append(1)
        return plain(ctx, label)*(float('nan') if len(calls)>=at else 1.)
    monkeypatch.setattr(model.head, 'loss', loss)
    with pytest.raises(FloatingPointError, match=r"loss is nan at step \d+ of 'lpt-npg' \(learning rate 0.01, "
        r"precision 'no'\).*A lower lr usually fixes it"):
        fit(model, small_task(), config(steps=steps, eval_every=100))

def test_weights_that_are_no_numbers_are_never_kept():
    model = quiet()
    h = model.head.net.weight.register_hook(lambda g: g*float('nan')) # a finite loss, and a step into nothing
    with pytest.raises(FloatingPointError, match='lower'): fit(model, small_task(), config(steps=1))
    h.remove()
    for name in ('sentiment','similarity'):
        model = quiet(n_out=2 if name=='sentiment' else 1)
        model.head.net.weight.data.fill_(float('nan'))
        task = small_task(name)
        with pytest.raises(FloatingPointError, match='lower'):
            evaluate(model, task.encode(task.splits['test'], model.backbone.tokenizer, 60), task)

# --- precision, devices, silence

def test_bf16_after_fp32_in_one_process():
    out = {}
    for precision in ('no','bf16','no'):
        model = quiet()
        log = fit(model, small_task(), config(steps=3, lr=1e-3, precision=precision))
        assert all(map(math.isfinite, log['losses'])) and all(p.dtype==torch.float32 for p in model.trained().values())
        out.setdefault(precision, []).append(log['losses'])
    assert out['no'][0]==out['no'][1]!=out['bf16'][0] and out['bf16'][0]==pytest.approx(out['no'][0], rel=.05)

def seen_by(model):
    "Of every pass: is it one of training, and under autocast?"
    seen,plain = [],model.context
    def context(batch):
        seen.append((model.training, torch.is_autocast_enabled('cpu')))
        return plain(batch)
    model.context = context
    return seen

@pytest.mark.parametrize('compile', [False,True])
def test_scores_are_taken_without_autocast(compile, small_folder, tmp_path, monkeypatch):
    "The trained model answers, before and after a save, as its weights do that autocast has never seen"
    traced = nn.Module.compile
    monkeypatch.setattr(nn.Module, 'compile', lambda m, **kw: traced(m, **kw, backend='eager'))
    task,cfg = small_task(),config(lr=1e-3, precision='bf16', compile=compile, backbone=str(small_folder))
    model,other = [build(cfg, backbone_for(cfg), task) for _ in range(2)]
    seen = seen_by(model)
    log = fit(model, task, cfg)
    assert {*seen}=={(True,True),(False,False)}
    with torch.no_grad():
        for n,t in learnt(other).items(): t.copy_(learnt(model)[n])
    examples,valid = [task.encode(task.splits[s], model.backbone.tokenizer, 60) for s in ('test','validation')]
    want = answers(model, examples)
    assert torch.equal(want, answers(other, examples))
    assert log['validation']==evaluate(other, valid, task)[0]['accuracy']
    save_pretrained(model, tmp_path, task, cfg)
    again,_,_ = from_pretrained(tmp_path, str(small_folder))
    assert torch.equal(want, answers(again, examples))

def test_a_run_in_bf16_leaves_no_trace_in_the_model():
    "Neither of its end nor of a kill: the next run is of its own precision"
    task = small_task()
    def losses(*before):
        model = quiet()
        start = tensors(model)
        for precision,kill in before:
            clean = {*vars(model)}
            if kill: kill_at(model, 2)
            with pytest.raises(Killed) if kill else contextlib.nullcontext():
                fit(model, task, config(lr=1e-3, precision=precision))
            if kill: del model.forward
            assert {*vars(model)}==clean and model.forward.__func__ is PromptedModel.forward
            with torch.no_grad():
                for n,p in model.trained().items(): p.copy_(start[n])
        seen = seen_by(model)
        log = fit(model, task, config(lr=1e-3))
        assert not any(low for _,low in seen)
        return log['losses']
    want = losses()
    assert losses(('bf16',False))==losses(('bf16',True))==want
    model = quiet()
    fit(model, task, config(lr=1e-3))
    seen = seen_by(model)
    fit(model, task, config(lr=1e-3, precision='bf16'))
    assert {*seen}=={(True,True),(False,False)}

def test_a_device_or_precision_that_is_not_known():
    for kw,words in ((dict(device='gpu'),["device 'gpu'","'auto' or 'cpu'"]),
        (dict(precision='half'),["precision 'half'",'bf16'])):
        with pytest.raises(ValueError) as e: fit(quiet(), small_task(), config(**kw))
        assert all(w in str(e.value) for w in words), str(e.value)

def test_no_progress_bar_where_there_is_no_terminal(capfd):
    fit(quiet(), small_task(), config())
    assert capfd.readouterr()==('','')

# --- regression, order, memory

def test_regression_is_learnt_on_0_to_1_and_answered_in_0_to_5(monkeypatch):
    task,model,labels = small_task('similarity'),quiet(n_out=1),[]
    plain = model.head.loss
    monkeypatch.setattr(model.head, 'loss', lambda ctx, y: labels.append(y) or plain(ctx, y))
    log = fit(model, task, config(lr=1e-3))
    y = torch.cat(labels)
    assert y.dtype==torch.float32 and 0<=y.min()<.2 and .8<y.max()<=1 and len(log['losses'])==4
    nn.init.zeros_(model.head.net.weight)
    nn.init.constant_(model.head.net.bias, .5)
    scores,pred = evaluate(model, task.encode(task.splits['test'], model.backbone.tokenizer, 60), task)
    assert pred==[2.5]*24 and scores['pearson+spearman']==0 # a constant has no correlation
    batch = batch_of(model.backbone, task)
    assert torch.equal(scaled(batch, task)['label']*5, batch['label'])
    out = model.head.loss(model.context(batch), torch.zeros(6))
    torch.testing.assert_close(out, torch.tensor(.25))

def test_evaluate_answers_in_the_order_of_the_examples():
    bb,task = backbone(),small_task('questions', test=20)
    model = model_of('lpt-npg', bb, task)
    for p in model.head.parameters(): torch.nn.init.normal_(p, std=2.) # so that answers differ
    examples = task.encode(task.splits['test'], bb.tokenizer, 60)
    assert len({len(e['ids']) for e in examples})>5
    scores,pred = evaluate(model, examples, task, batch_size=3)
    assert pred==[evaluate(model, [e], task)[1][0] for e in examples] and len({*pred})>1
    assert scores['accuracy']==pytest.approx(100*sum(p==e['label'] for p,e in zip(pred, examples))/20)
    assert evaluate(model, examples, task, batch_size=20)[1]==pred and not model.training

def test_memory_falls_with_the_height_of_the_prompt():
    mb = [fit(quiet(layer=k), small_task(), config(steps=2, batch_size=32))['peak_memory_mb'] for k in (0,1,2)]
    assert mb[0]>mb[1]>mb[2]>0

def test_zero_shot_has_nothing_to_train():
    bb,task = backbone(),small_task()
    model = model_of('head-only', bb, task, 'verbalizer')
    log = fit(model, task, cfg := config(method='head-only', head='verbalizer'))
    assert log['steps']==0 and log['losses']==[] and log['validation']==evaluate(model,
        task.encode(task.splits['validation'], bb.tokenizer, 60, cfg.template), task)[0]['accuracy']

# --- several processes

SCRIPT = """
import hashlib, sys, torch
from small import backbone, config, model_of, small_task
from test_fit import seen_by
from idp_tutorial.training.fit import fit
torch.set_num_threads(1)
bb,task = backbone(),small_task(); model = model_of('lpt-npg', bb, task, jolt=0)
seen,low = seen_by(model),sys.argv[1]=='bf16'
log = fit(model, task, config(steps=3, lr=1e-3, batch_size=8, precision=sys.argv[1]))
assert {*seen}=={(True,low),(False,False)} and '_original_forward' not in vars(model), seen
trained = b''.join(p.detach().numpy().tobytes() for p in model.trained().values())
print('RESULT', log['losses'][0], hashlib.sha256(trained).hexdigest())
"""

def test_what_is_compiled(monkeypatch):
    "The layers that training passes through, and only for the time of the run"
    done = []
    monkeypatch.setattr(nn.Module, 'compile', lambda m,
        **kw: done.append(m) or setattr(m, '_compiled_call_impl', m._call_impl))
    def run(layer, **kw):
        done.clear()
        model = quiet(layer=layer)
        fit(model, small_task(), config(method='lpt', **kw))
        return model.backbone.layers
    for layer in (0,2):
        layers = run(layer, compile=True)
        assert done==list(layers[layer:]) and all(l._compiled_call_impl is None for l in layers)
    run(0)
    assert not done

QUICK = ('bert','llama') # the others take a minute together

@pytest.mark.parametrize('name', [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in SMALL])
def test_compiled_layers_compute_the_same(name):
    "Of every family: rows and a prompt's gradient, for a prompt of rows and one of keys and values, padding included"
    bb = small_backbone(name, attentions(name)[0])
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    def step(op):
        p = random_prompt(bb, op, 1)
        h = run_layers(bb, text(), one_step(bb, op, 1, lambda ctx: p)).row('last')
        (h*torch.linspace(-1, 1, bb.d)).sum().backward()
        return h.detach(),p.grad
    for op in ('insert', *['kv']*bb.takes_kv):
        want = step(op)
        with compiled(SimpleNamespace(backbone=bb, first=0), backend='eager'): got = step(op)
        torch.testing.assert_close(got, want, atol=2e-6, rtol=0)
    assert torch._dynamo.utils.counters['stats']['calls_captured']>=bb.n_layers

@pytest.mark.slow
def test_a_compiled_run_is_the_same_run():
    a,b = [fit(quiet(), small_task(), config(method='lpt', steps=6, compile=c)) for c in (False,True)]
    assert a['losses']==pytest.approx(b['losses'], abs=1e-4)

@pytest.mark.slow
@pytest.mark.parametrize('precision', ['no','bf16'])
def test_two_processes_train_one_model(precision, tmp_path):
    (tmp_path/'two.py').write_text(SCRIPT)
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = str(s.getsockname()[1])
    tests = Path(__file__).parents[1]
    path = os.pathsep.join(map(str, (tests.parent, tests, tests/'training')))
    env = {**os.environ, 'PYTHONPATH':path, 'OMP_NUM_THREADS':'1', 'MASTER_ADDR':'127.0.0.1', 'MASTER_PORT':port,
        'WORLD_SIZE':'2'}
    both = [subprocess.Popen([sys.executable, tmp_path/'two.py', precision], stdout=subprocess.PIPE, text=True,
        env={**env, 'RANK':r, 'LOCAL_RANK':r}) for r in '01']
    a,b = [p.communicate(timeout=120)[0].split()[-2:] for p in both]
    assert a==b and a # loss of all texts, same weights; tests/efficiency/test_full_scale.py compares with one process
