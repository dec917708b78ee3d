"What a commit computes, for the next to compare with; `python tests/golden/make.py [FILE…]` writes *.json here."
import contextlib
import copy
import dataclasses
import hashlib
import io
import json
import os
import platform
import re
import sys
import tempfile
import warnings
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE='1', HF_DATASETS_OFFLINE='1', TOKENIZERS_PARALLELISM='false', MPLBACKEND='Agg')
HERE = Path(__file__).resolve().parent
sys.path[:0] = [p for p in (str(HERE.parent), str(HERE.parents[1])) if p not in sys.path]
import pandas as pd
import torch
from safetensors.torch import save as save_bytes
from small import backbone, config, model_of, small_task

from idp_tutorial.commands.bench import idp_bench

# --- everything that is taken from the package, in one block
from idp_tutorial.commands.command_line import parser
from idp_tutorial.commands.compare import idp_compare
from idp_tutorial.commands.params import idp_params
from idp_tutorial.commands.predict import idp_predict
from idp_tutorial.commands.pretrain import idp_pretrain
from idp_tutorial.commands.sweep import idp_sweep
from idp_tutorial.commands.train import idp_train
from idp_tutorial.commands.transfer import idp_transfer
from idp_tutorial.config import RunConfig
from idp_tutorial.data.synthetic import make_rows
from idp_tutorial.efficiency.cost_model import cost, paper_speeds, paper_times, speed_up
from idp_tutorial.efficiency.full_scale import RECIPES, flops, largest_batch, memory, seconds_per_step
from idp_tutorial.efficiency.parameter_counts import lora_count, meta_model, method_counts, printed, size
from idp_tutorial.efficiency.published_counts import averages, claims, published_counts
from idp_tutorial.experiments.transfer_comparison import published
from idp_tutorial.methods.build import build
from idp_tutorial.methods.p_tuning_v2 import deep_plan
from idp_tutorial.methods.prompt_files import from_pretrained, save_pretrained
from idp_tutorial.methods.registry import METHODS
from idp_tutorial.model.backbone import fingerprint
from idp_tutorial.model.heads import ClassificationHead
from idp_tutorial.model.pretrained import load_backbone
from idp_tutorial.model.prompted_model import PromptedModel, count_parameters, learnt
from idp_tutorial.pretraining import pretrain as pretraining
from idp_tutorial.pretraining.pretrain import PretrainConfig
from idp_tutorial.records import read_records
from idp_tutorial.tensor_files import load_tensors
from idp_tutorial.training.evaluation import answers, predict
from idp_tutorial.training.fit import fit

GRID = {name: m.rates for name,m in METHODS.items()}
# their order in the file
KIND = ('head-only fine-tuning efl bitfit lora lora-all adapter compacter adapterdrop '
    'prompt-tuning prompt-tuning-134 p-tuning '
    'smop dept m-idpg-phm-glove p-tuning-v2 s-idpg-dnn s-idpg-phm m-idpg-dnn m-idpg-phm lpt lpt-npg lpt-mppg lpt-appg '
    'id-spam id-spam-mean').split()
# ---

COMMANDS = dict(idp_pretrain=idp_pretrain, idp_compare=idp_compare, idp_sweep=idp_sweep, idp_params=idp_params,
    idp_train=idp_train, idp_predict=idp_predict, idp_bench=idp_bench, idp_transfer=idp_transfer)
ROWS = dict(train=24, validation=12, test=12)

def machine()->dict:
    "On another one the last digits may differ"
    try: cpu = re.search(r'model name\s*:\s*(.*)', Path('/proc/cpuinfo').read_text())[1]
    except (OSError,TypeError): cpu = platform.processor()
    return dict(machine=platform.machine(), cpu=cpu,
        capability=torch.backends.cpu.get_cpu_capability(),
        python=platform.python_version(), **{p: version(p)
        for p in ('torch','numpy','transformers','accelerate','tokenizers')})

# --- a: three steps of every method

@cache
def _first(family): return backbone(family, max_position_embeddings=258) if family=='roberta' else backbone(family)

def fresh(family='roberta'):
    "A backbone of its own: some methods change it"
    bb = _first(family)
    return copy.deepcopy(bb, {id(bb.tokenizer): bb.tokenizer})

SHORT = dict(steps=3, eval_every=3, batch_size=8)

def trained(model, task, cfg)->dict:
    "Three steps of `fit`, and four texts answered"
    log = fit(model, task, cfg)
    model.eval()
    kept = learnt(model)
    bb,template = model.backbone,cfg.template if model.head.readout=='mask' else None
    rows = task.encode(task.splits['test'][:4], bb.tokenizer, min(cfg.max_len, bb.max_tokens), template)
    for source in model.modules():
        if hasattr(source, 'prepare'): rows = source.prepare(rows)
    raw = b''.join(t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in kept.values())
    return dict(losses=log['losses'], validation=log['validation'], params=count_parameters(model),
        logits=answers(model, rows).tolist(), bits=hashlib.blake2b(raw, digest_size=6).hexdigest(),
        tensors=[f"{n} {'x'.join(map(str, t.shape))}" for n,t in kept.items()])

def run(family:str, head:str, method:str, task:str='sentiment', **kw)->dict:
    "What training gives, or the error that refuses it"
    task = small_task(task, **ROWS)
    try:
        with tempfile.TemporaryDirectory() as tmp:
            cfg = config(method=method, head=head, cache_dir=tmp, **SHORT, **kw)
            return trained(model_of(method, fresh(family), task, head, **kw), task, cfg)
    except ValueError as e: return dict(error=str(e))

HEADS = dict(classification=('roberta','bert','gpt2','deberta'), verbalizer=('roberta','gpt2'))
RUNS = [f'{family} {head} {m}' for head,families in HEADS.items() for family in families for m in METHODS]

VARIANTS = { # with another option
    **{f'position {i}': dict(method='prompt-tuning', position=i) for i in (1,4)},
    **{f'position {i}': dict(method='prompt-tuning', position=i, task='similarity') for i in (2,3)},
    **{f'position {i} of M-IDPG': dict(method='m-idpg-phm', position=i) for i in (1,4)},
    **{f'layer {i}': dict(method='lpt-npg', layer=i) for i in (0,2)},
    'lower dropout': dict(method='lpt-npg', lower_dropout=True), 'own m': dict(method='s-idpg-dnn', m=None),
    'cls': dict(method='s-idpg-phm', readout='cls'), 'cls head': dict(method='head-only', readout='cls'),
    'standardised': dict(method='s-idpg-phm', standardise=True), 'accumulated': dict(method='id-spam', accumulate=2),
    'paper template': dict(method='lpt', head='verbalizer', template='paper'),
    'label words': dict(method='lpt', head='verbalizer', loss_vocab='labels'),
    'number': dict(method='s-idpg-phm', task='similarity'), 'pair': dict(method='efl', task='entailment'),
    'six classes': dict(method='efl', task='questions'), 'head rate': dict(method='dept', head_lr=.003),
    'warm': dict(method='lora', warmup=.5, weight_decay=.1, clip=.01), 'bf16': dict(method='lpt-npg', precision='bf16'),
    'no prompt dropout': dict(method='m-idpg-dnn', prompt_dropout=0.), 'other seed': dict(method='smop', seed=3),
    'cached sentence': dict(method='s-idpg-phm', cache='sentence'),
    'both caches': dict(method='lpt-appg', cache='both'),
    'cached states': dict(method='lpt-npg', cache='hidden'),
    'half states': dict(method='lpt', cache='hidden', cache_dtype='float16')}

def variant(name:str)->dict:
    "A run with another option"
    kw = dict(VARIANTS[name])
    return run('roberta', kw.pop('head', 'classification'), kw.pop('method'), **kw)

DEEP = [f'{family} {way}' for family in ('roberta','gpt2','deberta') for way in ('kv','replace','add')]

def deep(name:str)->dict:
    "A prompt in every layer, in each way"
    family,way = name.split()
    bb,task,cfg = fresh(family),small_task(**ROWS),config(**SHORT)
    try:
        torch.manual_seed(0)
        model = PromptedModel(bb, ClassificationHead(bb.d, 2, 'mean'), deep_plan(bb, 4, way))
        return trained(model, task, cfg)
    except ValueError as e: return dict(error=str(e))

# --- b: counts

def _plain(v): return None if v is None or isinstance(v, float) and v!=v else v.item() if hasattr(v, 'item') else v

def _records(df:pd.DataFrame)->dict: # columns, and a list a row
    rows = [[str(i), *map(_plain, r)] for i,r in zip(df.index, df.values.tolist())]
    return dict(columns=[*map(str, df.columns)], rows=rows)

def _costs():
    "The cost model, in small and in large"
    at = ((12,{}), (24,dict(t=10, T=128, d=1024)), (24,dict(t=20, T=64, d=1024, last=1/6)))
    cached = [dict(cached=False), dict(cached=True), dict(cached=True, epochs=3)]
    return {m: [[*cost(m, L, **kw), *(speed_up(m, L, **c, **kw) for c in cached)] for L,kw in at] for m in KIND}

def _flops(c): return [flops(c, 16, 128), seconds_per_step(c, 16, 128), seconds_per_step(c, 2, 512, 'T4')]

MEMORY = {
    'fine-tuning': RunConfig('fine-tuning', backbone='roberta-base', precision='bf16'),
    'lpt-npg': RunConfig('lpt-npg', backbone='gpt2', layer=0)}

def _memory():
    out = {}
    for n,cfg in MEMORY.items():
        out[n] = dict(memory={f'{b}x{T}': memory(cfg, b, T) for b,T in ((1,64),(16,128),(32,512))},
            largest=[largest_batch(cfg, T, gb) for T,gb in ((128,16),(512,80))])
    return out

def _published():
    keys = 'paper table backbone method reported exact ours status'.split()
    return [[r[k] for k in keys] for r in published_counts()]

def _methods(backbone, methods, **kw): return _records(method_counts(backbone, RunConfig(**kw), methods))

def _fields():
    def kind(t): return t if isinstance(t, str) else getattr(t, '__name__', str(t))
    return [[f.name, kind(f.type), f.default] for f in dataclasses.fields(RunConfig)]

COUNTS = {
    'methods gpt2': lambda: _methods('gpt2', ['lpt-npg','p-tuning-v2','lora','smop','efl'], head='verbalizer', t=5,
    m=16),
    'methods deberta-large': lambda: _methods('deberta-large', ['p-tuning-v2','lpt-npg','dept','lora-all','bitfit'],
    t=7),
    'published': _published, 'claims': lambda: _records(claims().drop(columns=['note','claim','formula'])),
    'averages': lambda: _records(averages()), 'transfer': lambda: _records(published()),
    'sizes': lambda: {n: [size(meta_model(n, kind)) for kind in ('lm','encoder','classifier')]
        for n in ('roberta-base','gpt2-medium','gemma-2b','flan-t5-xl')},
    'lora': lambda: {n: lora_count(meta_model(n), 8) for n in ('roberta-base','gpt2-medium','gemma-2b')},
    'printed': lambda: [printed(n, like, u) for n in (105_472,1_549_999) for u in (1000,1024) for like in
        ('105K','1.55M','2,064,384')],
    'costs': _costs, 'paper speeds': lambda: _records(paper_speeds()), 'paper times': lambda: _records(paper_times()),
    'memory': _memory, 'flops': lambda: {n: _flops(RECIPES[n]) for n in ('idpg-multi',)},
    'rates': lambda: {m: [*r] for m,r in GRID.items()}, 'recipes': lambda: {n: asdict(c) for n,c in RECIPES.items()},
    'config': _fields}

# --- c: the commands

def help_of(name:str)->dict:
    "What `NAME --help` says, by option"
    p = parser(COMMANDS[name].__wrapped__)
    def kind(a): return a.type.__name__ if a.type else type(a).__name__
    options = {(a.option_strings or [a.dest])[-1]: [str(a.default), a.help, kind(a)] for a in p._actions}
    return dict(about=p.description, **options)

TIMES = {*'ms_per_step peak_memory_mb seconds tuning_seconds sweep_seconds share_of_sweep versions'.split(),
    *'threads made mb ms ratio spread share saved tokens_per_ms tokens_per_s over_ours'.split()}

def masked(o):
    "A record without what is another in every run"
    if isinstance(o, dict): return {k: '*' if k in TIMES else masked(v) for k,v in o.items()}
    return [*map(masked, o)] if isinstance(o, (list,tuple)) else o

def _names(folder): return sorted(p.name for p in folder.glob('[!.]*') if p.is_file())
def _lines(file): return [masked(r) for r in read_records(file)]

def _columns(text, *names)->list[str]: # lines
    "The words of a text; under these names of a table a star"
    out,at,width = [],[],-1
    for line in text.splitlines():
        if line.split()[:1]==['method'] and names:
            for n in names: line = line.replace(n, n.replace(' ', '_'))
            words = line.split()
            at,width = [words.index(n.replace(' ', '_')) for n in names],len(words)
        else:
            words = [w for w in line.split() if not re.fullmatch('-{5,}', w)]
            if len(words)==width: words = ['*' if i in at else w for i,w in enumerate(words)]
        if words: out.append(' '.join(words))
    return out

@contextlib.contextmanager
def _folder():
    "A folder with small files of three tasks"
    with tempfile.TemporaryDirectory() as tmp:
        tmp = Path(tmp)
        for task in ('sentiment','questions','two-domains'):
            (tmp/'data'/task).mkdir(parents=True)
            for split,n in dict(train=40, validation=20, test=24).items():
                lines = ''.join(json.dumps(r)+'\n' for r in make_rows(task, split, n=n))
                (tmp/'data'/task/f'{split}.jsonl').write_text(lines)
        yield tmp

def _said(f, tmp, **kw):
    "What a command prints to standard output"
    kw = {k: str(v) if isinstance(v, Path) else v for k,v in kw.items()}
    with contextlib.redirect_stdout(out := io.StringIO()), contextlib.redirect_stderr(io.StringIO()): f(**kw)
    return out.getvalue().replace(str(tmp), 'TMP')

TEXTS = ['who wrote the play ?','where is the river ?','how many people live there ?','what is an atom ?',
    'what does NASA stand for ?','which animal runs fastest ?']

def _params(tmp, **kw): return [' '.join(l.split()) for l in _said(idp_params, tmp, **{'t':10, **kw}).splitlines()]

SMALL = dict(batch_size=8, device='cpu')

def _compare(tmp):
    text = _said(idp_compare, tmp, methods='head-only,lpt-npg', seeds=1, steps=3, t=10, task='questions',
        data=tmp/'data', out=tmp/'out', **SMALL)
    table = pd.read_csv(tmp/'out/compare.csv')
    return dict(text=_columns(text, 'ms/step', 'memory MB'), records=_lines(tmp/'out/compare.jsonl'),
        csv=_records(table.drop(columns=[c for c in table if re.search('ms|mem|seconds', c)])), files=_names(tmp/'out'))

def _train(tmp):
    text = _said(idp_train, tmp, task='questions', steps=3, t=3, m=8, data=tmp/'data', out=tmp/'run', **SMALL)
    (tmp/'in').write_text('\n'.join(TEXTS[:4])+'\n'+json.dumps(dict(sentence1=TEXTS[4], id=3))+'\n')
    said = _said(idp_predict, tmp, model=tmp/'run', texts=tmp/'in', proba=True)
    about,tensors = load_tensors(tmp/'run/prompts.safetensors')
    first = dict(cfg=about['cfg'], task=about['task'], fingerprint=fingerprint(load_backbone()), glove=about['glove'])
    return dict(text=text.splitlines(), record=_lines(tmp/'run/record.jsonl'),
        answers=[*map(json.loads, said.splitlines())], about=first,
        bits=hashlib.sha256(save_bytes(tensors)).hexdigest()[:12], files=_names(tmp/'run'))

def _sweep(tmp):
    text = _said(idp_sweep, tmp, task='sentiment', methods='head-only,lpt', layers='1,4', seeds=1, steps=1, max_len=16,
        data=tmp/'data', out=tmp/'out', **SMALL)
    return dict(text=_columns(text, 'ms_per_step', 'peak_memory_mb'),
        files={n: _lines(tmp/'out'/n) for n in _names(tmp/'out')})

def _transfer(tmp):
    text = _said(idp_transfer, tmp, source='sentiment', target='two-domains', methods='lpt', seeds=1, steps=2,
        test_rows=20, shots=10, max_len=32, data=tmp/'data', out=tmp/'out', **SMALL)
    return dict(text=_columns(text), files={n: _lines(tmp/'out'/n) for n in _names(tmp/'out')})

def _bench(tmp):
    text = _said(idp_bench, tmp, backbone='tiny', methods='prompt-tuning,lpt-npg', layers='1', length=24,
        repeats=1, warmup=0, json=True, **SMALL)
    return [masked(json.loads(l)) for l in text.splitlines()]

def _pretrain(tmp):
    rows = [r for t in ('sentiment','questions') for r in make_rows(t, 'train', n=400)]
    (tmp/'text.txt').write_text('\n'.join(r['sentence1'] for r in rows))
    old = pretraining.PretrainConfig
    pretraining.PretrainConfig = lambda **kw: PretrainConfig(**kw, held_out=2000) # it is no book
    kw = dict(n_layers=2, d=32, steps=6, tokens=256, every=3, teacher='', dtype='float32')
    try: _said(idp_pretrain, tmp, text=tmp/'text.txt', out=tmp/'out', **kw)
    finally: pretraining.PretrainConfig = old
    return dict(log=_lines(tmp/'out/log.jsonl'), files=_names(tmp/'out/backbone'))

OUTPUTS = {'idp_params': _params, # of roberta-large
    'idp_params of some':
        lambda tmp: _params(tmp, backbone='roberta-base', t=5, head='verbalizer', methods='efl,lpt-npg,lora-all',
    json=True),
    'idp_compare': _compare, 'idp_train and idp_predict': _train, 'idp_sweep': _sweep, 'idp_transfer': _transfer,
    'idp_bench': _bench, 'idp_pretrain': _pretrain}

def output(name:str):
    "What a command prints and writes, times left out"
    torch.manual_seed(0)
    with _folder() as tmp: return OUTPUTS[name](tmp)

# --- the files

FILES = dict(runs=(lambda n: run(*n.split(' ', 2)), RUNS), variants=(variant, VARIANTS), deep=(deep, DEEP),
    counts=(lambda n: COUNTS[n](), COUNTS), help=(help_of, COMMANDS), output=(output, OUTPUTS))

def value(file:str, name:str):
    "As JSON gives it back"
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return json.loads(json.dumps(FILES[file][0](name)))

def stored(file:str)->tuple[dict,dict]: # the machine, values by name
    "What a file holds; a list of tensors is there once"
    d = json.loads((HERE/f'{file}.json').read_text(encoding='utf-8'))
    lists = d.get('tensors')
    def full(v): return {**v, 'tensors':lists[v['tensors']]} if lists and 'tensors' in v else v
    return d['machine'],{n: full(v) for n,v in d['values'].items()}

def write(file:str):
    values = {n: value(file, n) for n in FILES[file][1]}
    lists = []
    for v in values.values():
        if file in ('runs','variants','deep') and 'tensors' in v:
            if v['tensors'] not in lists: lists.append(v['tensors'])
            v['tensors'] = lists.index(v['tensors'])
    def short(o): return json.dumps(o, ensure_ascii=False, separators=(',',':'))
    lines = ',\n'.join(f'{short(n)}:{short(v)}' for n,v in values.items())
    parts = [f'"machine":{short(machine())}', f'"values":{{\n{lines}\n}}']
    if lists: parts.insert(1, '"tensors":[\n'+',\n'.join(map(short, lists))+'\n]')
    (HERE/f'{file}.json').write_text('{'+',\n'.join(parts)+'}\n', encoding='utf-8')

# --- a model that version 0.1.0 saved

SAVED = HERE/'saved-0.1.0'

def said_by(folder)->dict:
    "Logits and labels of six texts"
    model,task,cfg = from_pretrained(folder)
    rows = [dict(sentence1=t) for t in TEXTS]
    logits = answers(model, task.encode(rows, model.backbone.tokenizer, cfg.max_len, None))
    return dict(texts=TEXTS, logits=logits.tolist(), answers=predict(model, task, cfg, rows))

def save():
    "Only once: later versions must read it"
    task = small_task('questions', 128, 24, 24)
    cfg = RunConfig('lpt-npg', 'questions', 'tiny', t=4, m=8, steps=20, eval_every=10, lr=1e-2, max_len=64,
        device='cpu')
    fit(model := build(cfg, load_backbone(cfg.backbone), task), task, cfg)
    save_pretrained(model, SAVED, task, cfg)
    (SAVED/'answers.json').write_text(json.dumps(dict(machine=machine(), **said_by(SAVED)), indent=1)+'\n')

if __name__=='__main__':
    torch.set_num_threads(1)
    for file in sys.argv[1:] or FILES:
        write(file)
        print(f'{file}.json: {(HERE/f"{file}.json").stat().st_size:,} bytes', flush=True)
    if not SAVED.exists(): save()
