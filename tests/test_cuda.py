"""What runs on a GPU gives the CPU's numbers: every method, caches, resuming, half precision, files, several tasks.
Skipped where PyTorch sees no GPU."""
import pytest
import torch
from small import Killed, backbone, batch_of, config, kill_at, model_of, numbers, small_task, text_of

from idp_tutorial.analysis.information import probe_layers, states_by_layer
from idp_tutorial.analysis.layer_choice import choose_prompt_layer
from idp_tutorial.experiments.multitask import Member, MultiTaskModel
from idp_tutorial.experiments.run import run
from idp_tutorial.methods.build import build
from idp_tutorial.methods.phm import PHMLinear
from idp_tutorial.methods.prompt_files import from_pretrained, save_pretrained
from idp_tutorial.methods.registry import METHODS
from idp_tutorial.training.evaluation import predict
from idp_tutorial.training.fit import fit

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason='PyTorch sees no GPU')
HEADS = ('classification','verbalizer')

def on_gpu(batch): return {k: v.cuda() for k,v in batch.items()}

def loss_and_gradients(model, batch):
    loss = model.loss(batch)
    trained = model.trained()
    return loss.item(), dict(zip(trained, [g.cpu() for g in torch.autograd.grad(loss,
        list(trained.values()))])) if trained else {}

@pytest.mark.parametrize('head', HEADS)
@pytest.mark.parametrize('family', ['roberta','bert','gpt2','deberta'])
@pytest.mark.parametrize('method', METHODS)
def test_loss_and_gradients_are_the_cpus(method, family, head):
    if (method,head)==('efl','verbalizer'): pytest.skip('EFL has a head of its own')
    bb = backbone(family)
    try: model = model_of(method, bb, head=head)
    except ValueError as e: pytest.skip(str(e))
    batch = batch_of(bb, template='code' if head=='verbalizer' else None)
    want,slopes = loss_and_gradients(model, batch)
    got,others = loss_and_gradients(model.cuda(), on_gpu(text_of(batch)))
    assert abs(got-want)<1e-4*max(1, abs(want))
    for n,g in slopes.items():
        torch.testing.assert_close(others[n], g, atol=1e-4*max(1, g.abs().max().item()), rtol=1e-3)

def log_of(cfg, task=None, **kw):
    task = task or small_task()
    model = build(cfg, backbone(), task)
    return fit(model, task, cfg, **kw),model

@pytest.mark.parametrize('method', METHODS)
def test_every_method_trains(method):
    log,model = log_of(config(method=method, device='auto', lr=1e-3, standardise=True))
    assert next(model.parameters()).is_cuda
    assert len(log['losses'])==4
    assert log['peak_memory_mb']>0
    assert log['ms_per_step']>0

@pytest.mark.parametrize('cache', ['hidden','sentence','both'])
@pytest.mark.parametrize('method', ['lpt-npg','s-idpg-phm','m-idpg-dnn'])
def test_caches_change_no_loss(method, cache, tmp_path):
    cfg = dict(method=method, device='auto', prompt_dropout=0., readout='cls')
    plain = log_of(config(**cfg))[0]
    kept = log_of(config(**cfg, cache=cache, cache_dir=str(tmp_path)))[0]
    torch.testing.assert_close(torch.tensor(kept['losses']), torch.tensor(plain['losses']), atol=1e-5, rtol=1e-5)

@pytest.mark.parametrize('precision', ['bf16','fp16'])
@pytest.mark.parametrize('method', ['lpt-npg','m-idpg-phm','p-tuning-v2','id-spam','fine-tuning'])
def test_half_precision_stays_near(method, precision):
    whole,half = [log_of(config(method=method, device='auto', lr=1e-3, precision=p, prompt_dropout=0.))[0]['losses'][0]
        for p in ('no',precision)]
    assert abs(whole-half)<.1*max(1, whole)

def test_a_killed_run_goes_on(tmp_path):
    cfg = config(device='auto', steps=7, eval_every=3)
    want = log_of(cfg)[0]
    first = build(cfg, backbone(), small_task())
    kill_at(first, 6)
    with pytest.raises(Killed): fit(first, small_task(), cfg, save=tmp_path, save_every=2)
    torch.rand(3, device='cuda')
    rest = log_of(cfg, save=tmp_path, save_every=2)[0]
    assert numbers(rest)[1:]==numbers(want)[1:]
    # sums on a GPU have no fixed order
    torch.testing.assert_close(torch.tensor(rest['losses']), torch.tensor(want['losses']), atol=1e-5, rtol=1e-5)

def test_saved_on_the_gpu_answers_on_the_cpu(small_folder, tmp_path):
    from idp_tutorial.model.pretrained import load_backbone
    task = small_task()
    cfg = config(backbone=str(small_folder), device='auto')
    model = build(cfg, load_backbone(small_folder), task)
    fit(model, task, cfg)
    rows = task.splits['test'][:5]
    save_pretrained(model, tmp_path, task, cfg)
    want = predict(model, task, cfg, rows)
    got = predict(*from_pretrained(tmp_path), rows)
    for a,b in zip(got, want): assert a['probabilities']==pytest.approx(b['probabilities'], abs=1e-4)

def test_several_tasks_in_one_batch():
    bb,tasks = backbone(),{n: small_task(n) for n in ('sentiment','questions')}
    members = {n: Member(model_of(m, bb, t), t, config(method=m)) for (n,t),
        m in zip(tasks.items(), ('lpt-npg','p-tuning-v2'))}
    rows = [dict(r, task=n) for n,t in tasks.items() for r in t.splits['test'][:4]]
    model = MultiTaskModel(members).eval()
    batch = model.encode(rows)
    with torch.no_grad():
        want = model(batch)
        got = model.cuda()(on_gpu(batch))
    for a,b in zip(got, want): torch.testing.assert_close(a.cpu(), b, atol=1e-4, rtol=1e-4)
    assert model.answer(rows)

def test_choosing_a_layer_and_probing():
    bb = backbone()
    task = small_task(train=64)
    want = choose_prompt_layer(bb, task)
    bb.model.cuda()
    got = choose_prompt_layer(bb, task)
    assert got['layer']==want['layer'] and [r['bits'] for r in got['rows']]==pytest.approx([r['bits']
        for r in want['rows']], abs=.05)

def test_probes_train_where_the_states_are():
    "On the model's device, from the CPU's start; the caller's random numbers stay"
    task = small_task(train=64)
    model = model_of('lpt-npg', backbone(), task)
    kw = dict(n=24, depth=1, width=16, steps=6)
    want = probe_layers(model, task, **kw)
    model.cuda()
    torch.manual_seed(1)
    numbers = torch.rand(3, device='cuda')
    torch.manual_seed(1)
    got = probe_layers(model, task, **kw)
    assert torch.equal(torch.rand(3, device='cuda'), numbers)
    assert [r['bits'] for r in got]==pytest.approx([r['bits'] for r in want], abs=1e-2)
    rows = task.encode(task.splits['test'][:5], model.backbone.tokenizer, 60)
    assert all(h.is_cuda for states in states_by_layer(model, rows) for h in states)

def test_phm_paths_agree():
    phm = PHMLinear(32, 64, 4).cuda()
    x = torch.randn(6, 32, device='cuda')
    torch.testing.assert_close(phm(x), x@phm.weight+phm.bias, atol=1e-5, rtol=1e-4)

def test_a_record_says_where_it_ran(small_folder):
    r = run(config(backbone=str(small_folder), device='auto', lr=1e-2), small_task())
    assert r['device']=='auto' and r['peak_memory_mb']>0

@pytest.mark.slow
def test_compiled_layers_train_the_same():
    plain,compiled = [log_of(config(device='auto', prompt_dropout=0., compile=c))[0]['losses'] for c in (False,True)]
    torch.testing.assert_close(torch.tensor(compiled), torch.tensor(plain), atol=1e-3, rtol=1e-3)
