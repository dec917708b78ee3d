"Several processes, gradient accumulation, Accelerate's configs, recipes; memory and work counted against real steps."
import inspect
import json
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small import backbone, config, small_task
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from idp_tutorial.commands.train import idp_train
from idp_tutorial.config import RunConfig
from idp_tutorial.data.tasks import TASKS, load_task
from idp_tutorial.efficiency import full_scale as scaling
from idp_tutorial.efficiency.full_scale import PEAK, RECIPES, flops, largest_batch, memory, seconds_per_step
from idp_tutorial.methods.build import build
from idp_tutorial.methods.prompt_files import from_pretrained, save_pretrained
from idp_tutorial.methods.registry import METHODS
from idp_tutorial.model.pretrained import FULL_SCALE, load_backbone
from idp_tutorial.model.prompted_model import learnt
from idp_tutorial.pretraining.bundled_backbone import save_backbone
from idp_tutorial.snapshots import last_step
from idp_tutorial.training import fit as training
from idp_tutorial.training.fit import fit
from idp_tutorial.training.processes import end_process_group, parts

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT/'configs'

def quiet(model):
    "No dropout anywhere: what two processes draw differs from what one draws"
    for m in model.modules():
        if isinstance(m, nn.Dropout): m.p = 0.
        for k in ('dropout','dropout_prob'):
            if isinstance(getattr(m, k, None), float): setattr(m, k, 0.)
    return model

RAGGED = dict(train=37, validation=23) # the last step of a pass has 5 texts, and 23 are not shared out evenly
def one_run(method, processes, accumulate=1, save=None, quiet=quiet, **kw):
    cfg = config(method=method, batch_size=16//processes//accumulate, accumulate=accumulate, lr=3e-3, steps=4,
        eval_every=2, prompt_dropout=0., **kw)
    model = quiet(build(cfg, backbone(), small_task()))
    log = fit(model, small_task(**RAGGED), cfg, save=save)
    return dict(losses=log['losses'], history=log['history'],
        sums=[getattr(t, 'full_tensor', lambda: t)().sum().item() for t in learnt(model).values()])

# --- two processes (this file is also what they run)

def two(folder):
    "What each of two processes does; it writes what it found"
    torch.set_num_threads(1)
    rank = int(os.environ['RANK'])
    out = dict(methods={m: one_run(m, 2) for m in METHODS}, accumulated=one_run('lpt-npg', 2, accumulate=2))
    noisy = lambda **kw: one_run('lpt-npg', 2, quiet=lambda m: m, **kw) # noqa: E731
    out['noisy'],step,n = noisy(),training.Run.step,[]
    def killed(run):
        n.append(1)
        if len(n)==4:
            raise KeyboardInterrupt
        step(run)
    training.Run.step = killed
    try: noisy(save=folder/'run')
    except KeyboardInterrupt: out['killed'] = len(n)
    training.Run.step = step
    out['resumed'] = noisy(save=folder/'run')
    try: noisy(save=folder/'alone')
    except ValueError as e: out['refused'] = str(e)
    if rank==0: shutil.copytree(folder/'run', folder/'run0') # of which the other machine knows nothing
    try: noisy(save=folder/f'run{rank}')
    except ValueError as e: out['apart'] = str(e)
    with_shards()
    out['sharded'] = {m: one_run(m, 2) for m in SHARDED}
    try: one_run('lpt-npg', 2, save=folder/'shards')
    except ValueError as e: out['no checkpoints'] = str(e)
    cfg = config(backbone=str(folder/'backbone'), batch_size=8, lr=3e-3, eval_every=2)
    model = quiet(build(cfg, load_backbone(cfg.backbone), small_task()))
    out['wrapped'] = fit(model, small_task(**RAGGED), cfg)['losses']
    out['kinds'] = sorted({type(m).__name__ for m in model.modules() if type(m).__name__.startswith('FSDP')})
    save_pretrained(model, folder/'prompts', small_task(), cfg)
    (folder/f'{rank}.json').write_text(json.dumps(out))

SHARDED = ('lpt-npg','s-idpg-phm','fine-tuning')
def with_shards():
    "Accelerate's FSDP as configs/fsdp.yaml asks for it, on CPUs, where its launcher does not offer it"
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType
    plain = training.accelerator
    os.environ.update({k: v for k,v in launched('fsdp')[1].items() if k.startswith('FSDP')})
    def accelerator(cfg):
        acc = plain(cfg)
        AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP,
            fsdp_plugin=FullyShardedDataParallelPlugin())
        PartialState._shared_state['distributed_type'] = DistributedType.FSDP
        return acc
    training.accelerator = accelerator
    # bytes of shards are not its business
    training.Meter.watch,training.Meter.mb = lambda self, n: torch.enable_grad(),lambda self: 0.

@pytest.fixture(scope='module')
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp('two')
    one_run('lpt-npg', 1, save=folder/'alone')
    bb = backbone()
    save_backbone(bb.model, bb.tokenizer, folder/'backbone')
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = str(s.getsockname()[1])
    env = {**os.environ, 'PYTHONPATH':f'{ROOT}{os.pathsep}{ROOT/"tests"}', 'OMP_NUM_THREADS':'1',
        'MASTER_ADDR':'127.0.0.1', 'MASTER_PORT':port, 'WORLD_SIZE':'2', 'LOCAL_WORLD_SIZE':'2'}
    both = [subprocess.Popen([sys.executable, __file__, folder], stderr=subprocess.PIPE, text=True,
        env={**env, 'RANK':r, 'LOCAL_RANK':r}) for r in '01']
    errors = [p.communicate(timeout=240)[1] for p in both]
    codes = [p.returncode for p in both]
    assert codes==[0,0], f'exit codes of the two workers: {codes}\n'+'\n'.join(errors)
    assert not any('terminate called' in e or 'destroy_process_group() was not called' in e for e in errors), errors
    return json.loads((folder/'0.json').read_text()),json.loads((folder/'1.json').read_text()),folder

def same(a, b): # two runs, with rounding
    assert a['losses']==pytest.approx(b['losses'], abs=1e-5) and [*map(tuple, a['history'])]==[*map(tuple,
        b['history'])]

@pytest.mark.parametrize('method', [m for m in METHODS if m!='smop']) # SMoP's routing draws noise in training
def test_two_processes_are_one_with_the_same_texts(method, pair):
    a,b = pair[0]['methods'][method],pair[1]['methods'][method]
    assert a==b # losses are means over both, tensors are the same
    same(a, one := one_run(method, 1))
    assert a['losses'][0]!=a['losses'][1]
    if method not in ('fine-tuning','efl','bitfit','lora-all'):
        # AdamW makes steps of rounding errors where a gradient is zero
        assert a['sums']==pytest.approx(one['sums'], abs=1e-4)

def test_noise_differs_between_processes_and_nothing_else_does(pair):
    assert pair[0]['methods']['smop']==pair[1]['methods']['smop']
    assert pair[0]['noisy']==pair[1]['noisy']!=pair[0]['methods']['lpt-npg']

def test_a_process_group_ends_when_the_interpreter_exits(monkeypatch):
    "Nothing to leave is fine; a group is left once"
    left = []
    end_process_group()
    monkeypatch.setattr(torch.distributed, 'is_initialized', lambda: True)
    monkeypatch.setattr(torch.distributed, 'destroy_process_group', lambda: left.append(1))
    end_process_group()
    assert left==[1]

def test_two_processes_accumulate(pair):
    same(pair[0]['accumulated'], one_run('lpt-npg', 1))
    assert pair[0]['accumulated']==pair[1]['accumulated']

def test_two_processes_are_killed_and_go_on(pair):
    for p in pair[:2]: assert p['killed']==4 and p['resumed']==p['noisy'] # dropout of both included
    assert len(last_step(pair[2]/'run')['random'])==2

def test_checkpoints_of_one_process_and_of_one_machine(pair):
    "What stops one process stops both"
    for p in pair[:2]:
        assert 'processes 1 there, 2 here' in p['refused'] and '(of steps [4, 0])' in p['apart']
        assert 'the processes find different checkpoints' in p['apart']

@pytest.mark.parametrize('method', SHARDED)
def test_weights_shared_out_layer_by_layer(method, pair):
    a,b = pair[0]['sharded'][method],pair[1]['sharded'][method]
    assert a==b
    same(a, one := one_run(method, 1))
    if method!='fine-tuning': assert a['sums']==pytest.approx(one['sums'], abs=1e-4)

def test_shards_are_saved_whole(pair):
    for p in pair[:2]:
        assert 'save=… with FSDP' in p['no checkpoints'] and p['kinds']==['FSDPPromptedModel','FSDPRobertaLayer']
    model,task,cfg = from_pretrained(pair[2]/'prompts', str(pair[2]/'backbone')) # the note of where it is was theirs
    one = quiet(build(cfg, load_backbone(str(pair[2]/'backbone')), task))
    log = fit(one, small_task(**RAGGED), replace(cfg, batch_size=16))
    assert pair[0]['wrapped']==pytest.approx(log['losses'], abs=1e-5)
    for n,t in learnt(one).items(): torch.testing.assert_close(learnt(model)[n], t, atol=1e-4, rtol=0)

# --- who sees what

class Seat:
    def __init__(self, i, n): self.process_index,self.num_processes = i,n

@pytest.mark.parametrize('size,n,a', [(8,1,1), (4,2,1), (2,2,2), (1,8,1), (1,4,2)])
@pytest.mark.parametrize('texts', [3, 16, 21])
def test_the_texts_of_a_step(size, n, a, texts):
    "Every text once a pass, the same in each step whoever reads it, weighted by its share"
    rows = [dict(ids=[i+5]*(1+i%7), types=[0]*(1+i%7)) for i in range(texts)]
    per_pass = -(-texts//8)
    def steps(size, n, a):
        gens = [parts(Seat(i, n), rows, config(batch_size=size, accumulate=a), 0) for i in range(n)]
        return [[p for g in gens for p in next(g)] for _ in range(2*per_pass)]
    def ids(step): return sorted(i for b,w in step if w for i in b['ids'][:,0].tolist())
    mine,one = steps(size, n, a),steps(8, 1, 1)
    assert [*map(ids, mine)]==[*map(ids, one)] and sorted(sum(map(ids, mine[:per_pass]), []))==[i+5
        for i in range(texts)]
    for step in mine:
        total = sum(len(b['ids']) for b,w in step if w)
        assert len(step)==n*a and all(w==0 or w==pytest.approx(len(b['ids'])*n*a/total) for b,
            w in step) and all(len(b['ids'])<=size for b,w in step)

@pytest.mark.parametrize('accumulate', [2,4])
@pytest.mark.parametrize('head', ['classification','verbalizer'])
def test_parts_count_what_the_loss_counts(accumulate, head):
    "Weights for classes, and answers of several tokens"
    kw = dict(class_weight={'positive':7}, head=head)
    same(one_run('lpt-npg', 1, accumulate=accumulate, **kw), one_run('lpt-npg', 1, **kw))
    task = replace(load_task('in-short', k=37), answer_len=8)
    def written(n):
        cfg = config(method='lpt-npg', backbone='tiny-gpt2', batch_size=8//n, accumulate=n, steps=3, eval_every=3,
            prompt_dropout=0., max_len=48)
        few = replace(task, splits={**task.splits, 'validation':task.splits['validation'][:4]})
        return torch.tensor(fit(quiet(build(cfg, load_backbone(cfg.backbone), few)), few, cfg)['losses'])
    if head=='classification':
        torch.testing.assert_close(written(accumulate), written(1), atol=1e-4, rtol=0)

@pytest.mark.parametrize('accumulate', [2,4,16])
def test_accumulation_over_the_end_of_a_pass(accumulate):
    same(one_run('lpt-npg', 1, accumulate=accumulate), one_run('lpt-npg', 1))

def test_another_precision_than_the_launcher_was_asked_for(monkeypatch):
    monkeypatch.setenv('ACCELERATE_MIXED_PRECISION', 'bf16')
    with pytest.raises(ValueError, match=r"accelerate launch` was asked for bf16, the run for precision='no'"):
        one_run('lpt', 1)
    one_run('lpt', 1, precision='bf16')

# --- configs

def launched(name): # what `accelerate launch` makes of a config: its arguments, and the environment of the processes
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
    args,*_ = _validate_launch_command(launch_command_parser().parse_args(['--config_file', str(CONFIGS/f'{name}.yaml'),
        str(CONFIGS/'train.py'), '--task', 'rte']))
    many = args.multi_gpu or args.use_fsdp
    return args,prepare_multi_gpu_env(args) if many else prepare_simple_launcher_cmd_env(args)[1]

@pytest.mark.parametrize('name,kind', [('one_gpu_bf16',(False,False)), ('ddp',(True,False)), ('fsdp',(False,True))])
def test_configs_are_read_by_the_launcher(name, kind):
    args,env = launched(name)
    assert (args.multi_gpu,args.use_fsdp)==kind and not args.cpu and args.training_script_args==['--task','rte']
    assert env['ACCELERATE_MIXED_PRECISION']=='bf16' and env.get('ACCELERATE_USE_FSDP',
        'false')==str(name=='fsdp').lower() and args.num_processes==(1 if name=='one_gpu_bf16' else 2)

def test_fsdp_shares_out_our_layers(monkeypatch):
    from accelerate import FullyShardedDataParallelPlugin
    for k,v in launched('fsdp')[1].items(): monkeypatch.setenv(k, v)
    plugin,model = FullyShardedDataParallelPlugin(),build(config(method='lpt-npg'), backbone(), small_task())
    plugin.set_auto_wrap_policy(model)
    assert plugin.fsdp_version==2 and plugin.reshard_after_forward and not plugin.cpu_ram_efficient_loading
    assert plugin.auto_wrap_policy.keywords['transformer_layer_cls']=={type(l) for l in model.backbone.layers}
    for family in ('gpt2','deberta'):
        assert type(backbone(family).layers[0]).__name__ in (CONFIGS/'fsdp.yaml').read_text() # named in the comment

def test_what_the_scripts_ask_for_is_there(monkeypatch, capsys):
    known,asked = {f'--{k}' for k in inspect.signature(idp_train).parameters},set()
    for f in [*CONFIGS.glob('*.*'), ROOT/'nbs/engine/efficiency/full_scale.ipynb']:
        for line in re.findall(r'(?:configs/train\.py|train\.slurm|^ +--)(.*)', f.read_text(), re.M):
            asked |= {*re.findall(r'--\w+', line.split('\\n')[0])}
    assert {'--task','--backbone','--batch_size','--save_every','--out','--data'}<=asked<=known|{'--help'}
    script = CONFIGS/'train.slurm'
    assert subprocess.run(['bash','-n',script]).returncode==0
    monkeypatch.setattr(sys, 'argv', ['train.py','--help'])
    with pytest.raises(SystemExit): runpy.run_path(str(CONFIGS/'train.py'), run_name='__main__')
    assert '--save_every' in capsys.readouterr().out

# --- recipes

@pytest.mark.parametrize('name', RECIPES)
def test_recipes_build(name):
    cfg = RECIPES[name]
    model = build(cfg, load_backbone(cfg.backbone, 'meta'), TASKS['sentiment'])
    n = sum(p.numel() for p in model.sources.parameters())
    assert n=={'lpt-roberta':791_680, 'lpt-gpt2':989_568, 'lpt-deberta':791_680, 'idpg-single':111_872,
        'idpg-multi':137_232, 'id-spam':3*1024**2+64*1024*11}[name]
    assert model.first==({'roberta-large':12,'gpt2-large':18,'deberta-large':12}[cfg.backbone] if cfg.layer else -1)

# --- memory and work

SMALL = dict(roberta='roberta-base', gpt2='gpt2', deberta='deberta-large')
@pytest.fixture(params=SMALL)
def small(request, monkeypatch):
    "A configuration of five layers of 32 dimensions among the published ones, and a function that builds it"
    family = request.param
    sizes = dict(hidden_size=32, num_hidden_layers=5, num_attention_heads=4, vocab_size=8192,
        **({} if family=='gpt2' else dict(intermediate_size=64)))
    plain = FULL_SCALE[SMALL[family]]
    def made():
        c = plain()
        c.update(sizes)
        return c
    monkeypatch.setitem(FULL_SCALE, 'small', made)
    scaling._counted.cache_clear()
    return family,lambda cfg, **kw: build(cfg, load_backbone('small', 'random', **kw), TASKS['sentiment']).train()

def kept(model, B, T): return scaling._kept(model, B, T, 'no')

MANY = [('fine-tuning',None), ('prompt-tuning',None), ('m-idpg-phm',None), ('lpt-npg',3), ('lpt-appg',2), ('id-spam',0),
    ('lora',None), ('adapterdrop',2), ('bitfit',None), ('head-only',None)]
FEW = [('fine-tuning',None), ('m-idpg-phm',None), ('lpt-npg',3)]
@pytest.mark.parametrize('small,method,layer', [(f,m,k) for f in SMALL for m,k in (MANY if f=='roberta' else FEW)],
    indirect=['small'])
def test_memory_is_what_a_step_keeps(method, layer, small):
    family,make = small
    cfg = RunConfig(method, backbone='small', t=4, m=8 if method!='adapterdrop' else 4, layer=layer)
    for fused in (True,False):
        real = make(cfg, **(scaling.fused_config(FULL_SCALE['small']()) if fused else {}))
        got = memory(cfg, 5, 37, fused)
        assert got['activations']==pytest.approx(kept(real, 5, 37), rel=.01)
    assert got['weights']==sum(p.nbytes
        for p in real.parameters()) and got['optimizer']==2*got['gradients']==2*sum(p.nbytes
        for p in real.trained().values())
    assert got['total']==sum(v for k,v in got.items() if k!='total')

@pytest.mark.parametrize('small', ['roberta','gpt2'], indirect=True)
def test_memory_of_a_verbalizer_and_of_bf16(small):
    family,make = small
    cfg = RunConfig('lpt', backbone='small', t=4, layer=2, head='verbalizer')
    real = make(cfg, **scaling.fused_config(FULL_SCALE['small']()))
    assert memory(cfg, 3, 29)['activations']==pytest.approx(kept(real, 3, 29), rel=.01)
    low = replace(cfg, precision='bf16')
    assert memory(low, 3, 29)['activations']==pytest.approx(scaling._kept(real, 3, 29, 'bf16'), rel=.01)

@pytest.mark.parametrize('dtype', ['float32','bfloat16'])
@pytest.mark.parametrize('small', ['roberta'], indirect=True)
def test_memory_is_that_of_fit(small, dtype):
    "`peak_memory_mb` of a real run on texts of one length"
    cfg = RunConfig('lpt-npg', backbone='small', t=4, m=8, layer=2, steps=2, eval_every=2, batch_size=8, lr=1e-3,
        device='cpu', dtype=dtype)
    model = small[1](cfg, dtype=dtype)
    task = small_task()
    e = task.encode([dict(sentence1='a '*40, label=0)], model.backbone.tokenizer)[0]
    n = len(e['ids'])
    task = replace(task, splits={s: [dict(sentence1='a '*40, label=i%2) for i in range(16)] for s in task.splits})
    assert fit(model, task, cfg)['peak_memory_mb']==pytest.approx(memory(cfg, 8, n, fused=False)['total']/1e6, rel=.01)

@pytest.mark.parametrize('small', ['roberta'], indirect=True)
def test_the_largest_batch_is_the_largest(small):
    cfg = RunConfig('prompt-tuning', backbone='small', t=4)
    n = largest_batch(cfg, 64, 2.)
    fixed = memory(cfg, 1, 64)['total']-memory(cfg, 1, 64)['activations']
    def room(b): return fixed+1.1*memory(cfg, b, 64)['activations']
    assert n>10 and room(n)<=.5e9<room(n+1)+1e4 and largest_batch(cfg, 64, 1.)==0 and largest_batch(cfg, 128, 2.)<n/1.9

@pytest.mark.parametrize('method,layer,plain', [('fine-tuning',None,'roberta-base'),
    ('prompt-tuning',None,'roberta-base'), ('s-idpg-dnn',None,'roberta-base'), ('lpt-npg',3,'roberta-base'),
    ('head-only',None,'roberta-base'), ('bitfit',None,'roberta-base'), ('prompt-tuning',None,'gpt2-large'),
    ('prompt-tuning',None,'llama-3.2-1b'), ('lpt-npg',3,'gemma-2b')], ids=str)
def test_work_is_what_a_step_does(method, layer, plain, monkeypatch):
    "Multiplications of a real step, counted by PyTorch; the head and the generator are not in the formula"
    def made():
        c = plain()
        c.update(dict(hidden_size=128, num_hidden_layers=5, num_attention_heads=4, intermediate_size=512,
            vocab_size=8192) | more)
        return c
    # a gated feed-forward network, fewer keys than queries, heads wider than the model's share
    more = dict(num_key_value_heads=2, head_dim=48) if 'llama' in plain or 'gemma' in plain else {}
    plain = FULL_SCALE[plain]
    monkeypatch.setitem(FULL_SCALE, 'small', made)
    scaling._work.cache_clear()
    cfg = RunConfig(method, backbone='small', t=4, m=8, layer=layer)
    model = build(cfg, load_backbone('small', 'random', attn='eager'), TASKS['sentiment']).train()
    from idp_tutorial.data.batches import collate
    with FlopCounterMode(display=False) as count: model(collate(scaling._rows(model, 3, 60), 1), loss=True).backward()
    assert flops(cfg, 3, 60)==pytest.approx(count.get_total_flops(), rel=.03)

def test_seconds():
    cfg = RunConfig('lpt-npg', backbone='roberta-large', layer=12)
    assert seconds_per_step(cfg, 32, 256, 'A100', .5)==pytest.approx(flops(cfg, 32,
        256)/(.5*PEAK['A100'])) and seconds_per_step(cfg, 64, 256)==pytest.approx(2*seconds_per_step(cfg, 32, 256))

def test_names_that_are_not_known():
    with pytest.raises(ValueError, match="unknown full-scale backbone 'roberta-larg', did you mean 'roberta-large'"):
        memory(RunConfig(backbone='roberta-larg'), 1, 8)
    with pytest.raises(ValueError, match="unknown GPU 'A10', did you mean 'A100'"):
        seconds_per_step(RunConfig(backbone='roberta-base'), 1, 8, 'A10')
    with pytest.raises(ValueError, match='memory of 0 texts of 8 tokens'):
        memory(RunConfig(backbone='roberta-base'), 0, 8)

if __name__=='__main__': two(Path(sys.argv[1]))

def test_prompt_rows_cost_nothing_below_the_prompt():
    def more(k):
        return flops(replace(RECIPES['lpt-roberta'], layer=k, t=6), 1,
            64)-flops(replace(RECIPES['lpt-roberta'], layer=k, t=5), 1, 64)
    assert more(12)==2*more(18)>0

def test_the_margin_is_on_all_activations(monkeypatch):
    monkeypatch.setattr(scaling, 'memory', lambda cfg, b, *a: dict(activations=(10+b)*1e9, total=(12+b)*1e9))
    assert largest_batch(None, 64, gb=24.5, spare=0.)==10 # 2 + 1.1*(10+10) = 24
