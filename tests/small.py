"Models of three layers and 32 dimensions, one of each family, with the bundled tokenizer: what the tests run on."
from copy import deepcopy
from dataclasses import replace
from functools import cache

import torch
from transformers import BertConfig, BertForMaskedLM

from idp_tutorial.config import RunConfig
from idp_tutorial.data.batches import collate
from idp_tutorial.data.synthetic import make_rows
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.methods.build import build
from idp_tutorial.model.families import open_model
from idp_tutorial.model.heads import ClassificationHead, VerbalizerHead
from idp_tutorial.model.pretrained import load_backbone

FULL = dict(roberta='roberta-base', gpt2='gpt2', deberta='deberta-large')
SIZES = dict(vocab_size=8192, hidden_size=32, num_hidden_layers=3, num_attention_heads=4)

@cache
def _made(family, std, **kw):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        if family=='bert':
            tok = load_backbone('roberta-base', weights='meta', **SIZES).tokenizer
            bb = open_model(BertForMaskedLM._from_config(BertConfig(**SIZES, intermediate_size=64),
                attn_implementation='sdpa'), tok, 'bert')
        else:
            bb = load_backbone(FULL[family], weights='random', **SIZES, **kw,
                **({} if family=='gpt2' else dict(intermediate_size=64)))
        for p in bb.model.parameters():
            torch.nn.init.normal_(p, std=std) if p.dim()>1 else p.data.add_(.1*torch.randn_like(p))
    return bb

def backbone(family='roberta', std=.2, **kw):
    "Frozen, with weights large enough for a difference to show; a copy, whose tokenizer others share"
    bb = _made(family, std, **kw)
    return open_model(deepcopy(bb.model), bb.tokenizer, bb.name)

def small_task(name='sentiment', train=64, validation=24, test=24):
    n = dict(train=train, validation=validation, test=test)
    return replace(TASKS[name], splits={s: make_rows(name, s, n=k) for s,k in n.items()})

def config(**kw):
    return RunConfig(**{**dict(method='lpt-npg', t=4, m=8, steps=4, batch_size=16, eval_every=2, device='cpu', lr=1e-2),
        **kw})

def model_of(method, bb, task=None, head='classification', jolt=.1, **kw):
    "A model of `METHODS`; what it trains, but the head, moved off its start, where some tensors are zero"
    model = build(config(method=method, head=head, **kw), bb, task or small_task())
    with torch.no_grad():
        for p in [*model.sources.parameters(), *(p for p in model.lm.parameters() if p.requires_grad)]:
            p.add_(jolt*torch.randn_like(p))
    return model.eval()

def batch_of(bb, task=None, n=6, template=None, split='train'):
    task = task or small_task()
    return collate(task.encode(task.splits[split][:n], bb.tokenizer, 60, template), bb.tokenizer.pad_token_id)

def text_of(batch):
    # without what earlier passes left in it
    return {k: v for k,v in batch.items() if k in ('ids','keep','types','mask','label')}

def one(batch, i):
    "One text of a batch, its padding cut off"
    n = int(batch['keep'][i].sum())
    return {k: v[i:i+1,:n] if k in ('ids','keep','types') else v[i:i+1] for k,v in text_of(batch).items()}


def same(a, b, atol=1e-5, rtol=1e-5): torch.testing.assert_close(a, b, atol=atol, rtol=rtol)

FAMILY = ('roberta','bert','gpt2','deberta')
kept = cache(backbone)

def setting(family='roberta', n=24, head='classification', name='sentiment'):
    "A backbone that is made once, a task, `n` of its examples, and a head that nobody trained"
    bb,task = kept(family),small_task(name)
    examples = task.encode(task.splits['train'][:n], bb.tokenizer, 60, 'code' if head=='verbalizer' else None)
    torch.manual_seed(0)
    if head=='verbalizer': return bb,task,examples,VerbalizerHead(bb, task.word_ids(bb.tokenizer))
    return bb,task,examples,ClassificationHead(bb.d, len(task.labels), 'mean')

class Killed(BaseException): pass

def stop_at(monkeypatch, n):
    "A run is interrupted before its nth step; returned is a list that grows with every step that was asked for"
    from idp_tutorial.training.fit import Run
    step,asked = Run.step,[]
    def stop(run):
        asked.append(1)
        if len(asked)==n:
            raise KeyboardInterrupt
        step(run)
    monkeypatch.setattr(Run, 'step', stop)
    return asked

def kill_at(model, step):
    "The model's loss of that call never comes"
    calls,plain = [],model.forward
    def forward(batch, loss=False):
        if loss: calls.append(1)
        if loss and len(calls)==step:
            raise Killed
        return plain(batch, loss)
    model.forward = forward
    return calls

def numbers(log):
    "Of a log: all that two runs of one config share"
    return log['losses'],log['history'],log['validation'],log['steps']
