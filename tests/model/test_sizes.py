"Published configurations: what they come to, against the counts that their authors or model cards print."
import pytest
import torch

from idp_tutorial.config import RunConfig
from idp_tutorial.data.synthetic import make_rows
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.methods.build import build
from idp_tutorial.model.families import FAMILIES
from idp_tutorial.model.layer_loop import run_layers
from idp_tutorial.model.parity import gap, theirs
from idp_tutorial.model.pretrained import HUB, load_backbone
from idp_tutorial.model.prompted_model import count_parameters
from idp_tutorial.model.sizes import ENCODERS, FULL_SCALE, ON_HUB

# 'all' with the language-model head, 'base' without it, 'rest' without the table of words
PUBLISHED = {
    'bert-base': ('all', '110M'), 'bert-large': ('all', '336M'), # google-bert's model cards
    'roberta-base': ('all', '125M'), 'roberta-large': ('all', '355M'), # fairseq
    'xlm-roberta-base': ('all', '278M'), 'xlm-roberta-large': ('all', '560M'), # the hub's count
    'electra-small': ('all', '14M'), 'electra-base': ('all', '110M'), 'electra-large': ('all', '335M'), # its README
    'deberta-base': ('rest', '100M'), 'deberta-large': ('rest', '350M'), # its README: backbone
    'deberta-v3-base': ('rest', '86M'), 'deberta-v3-large': ('rest', '304M'),
    'distilbert': ('base', '66M'), # the paper, Table 3
    'mpnet-base': ('base', '109M'), # as BERT, the hub's count
    'modernbert-base': ('all', '149M'), 'modernbert-large': ('all', '395M'), # the paper
    't5-base': ('base', '110M'), 't5-large': ('base', '335M'), # the encoders, as Sentence-T5 has them
    'gpt2': ('all', '124M'), 'gpt2-medium': ('all', '355M'), 'gpt2-large': ('all', '774M'), 'gpt2-xl': ('all', '1558M'),
    # the hub's count
    'smollm2-135m': ('all', '135M'), 'smollm2-360m': ('all', '362M'), 'smollm2-1.7b': ('all', '1.71B'),
    'llama-3.2-1b': ('all', '1.23B'), 'llama-3.2-3b': ('all', '3.21B'), # model cards
    'mistral-7b': ('all', '7.24B'), # the hub's count
    'qwen2.5-0.5b': ('all', '0.49B'), 'qwen2.5-1.5b': ('all', '1.54B'), 'qwen2.5-7b': ('all', '7.61B'), # model cards
    'qwen3-0.6b': ('rest', '0.44B'), 'qwen3-1.7b': ('rest', '1.4B'), 'qwen3-8b': ('all', '8.2B'), # model cards
    'gemma-2b': ('rest', '1981.884416M'), # the paper, Table 2
    'gemma-2-2b': ('rest', '2024.517888M'), 'gemma-3-1b': ('rest', '698M'), # the papers, Tables 2 and 1
}


def numbers(printed):
    return float(printed[:-1])*{'M':1e6, 'B':1e9}[printed[-1]]


@pytest.mark.parametrize('name', FULL_SCALE)
def test_it_is_as_large_as_published(name):
    bb = load_backbone(name, 'meta')
    what,printed = PUBLISHED[name]
    part = bb.base if what=='base' else bb.model
    n = sum(p.numel() for k,p in part.named_parameters() if 'pooler' not in k)
    if what=='rest': n -= bb.words.weight.numel()
    near = max(.01*numbers(printed), .5e6 if printed in ('14M','66M') else 0) # 14M has two digits
    if name=='deberta-large': near = 5e6 # so has 350M
    assert abs(n-numbers(printed))<=near, (n, printed)
    assert bb.max_tokens>=512 and bb.causal==(name not in ENCODERS)


def test_every_family_has_a_published_size_but_camembert():
    assert {FULL_SCALE[n]().model_type for n in FULL_SCALE}==set(FAMILIES)-{'camembert'}
    assert set(PUBLISHED)==set(FULL_SCALE) and set(ON_HUB)<=set(FULL_SCALE) and set(ON_HUB)<set(HUB)


SMALLER = dict(num_hidden_layers=3, vocab_size=8192)
ONE_EACH = ['bert-base','xlm-roberta-base','electra-small','deberta-base','deberta-v3-base','distilbert','mpnet-base',
    'modernbert-base','t5-base','gpt2','smollm2-135m','llama-3.2-1b','mistral-7b','qwen2.5-0.5b','qwen3-0.6b','gemma-2b',
    'gemma-2-2b','gemma-3-1b']
METHODS = ['prompt-tuning','p-tuning','p-tuning-v2','s-idpg-phm','m-idpg-phm','lpt-npg','lpt-appg','id-spam',
    'smop','dept',
    'lora','adapter','compacter']


@pytest.mark.parametrize('name', ONE_EACH)
def test_every_method_is_counted_on_it(name):
    "On the meta device, as idp_params does"
    for method in METHODS:
        bb = load_backbone(name, 'meta', **SMALLER)
        cfg = RunConfig(method, backbone=name, t=5, m=16)
        if name=='electra-small' and method in ('m-idpg-phm','id-spam'): # its words are narrower than its layers
            with pytest.raises(ValueError, match='word vectors have 128 numbers and its layers 256'):
                build(cfg, bb, TASKS['sentiment'])
            continue
        with torch.device('meta'):
            n = count_parameters(build(cfg, bb, TASKS['sentiment']))
        assert n['head']==2*bb.d+2 and n['prompt']+n['backbone']>0, (method, n)
        if method=='prompt-tuning': assert n['prompt']==5*bb.d_words
        if method=='p-tuning-v2': assert n['prompt']==3*5*(bb.d_kv if bb.takes_kv else bb.d)
        if method=='lora': assert n['backbone']>0


@pytest.mark.parametrize('name', ['distilbert','smollm2-135m','deberta-v3-base','t5-base'])
def test_random_weights_run(name):
    bb = load_backbone(name, 'random', num_hidden_layers=2, vocab_size=8192)
    task = TASKS['sentiment']
    rows = task.encode(make_rows('sentiment', 'train', n=3), bb.tokenizer, 40, causal=bb.causal)
    ids = torch.tensor([e['ids'][:9] for e in rows])
    batch = dict(ids=ids, keep=torch.ones_like(ids), types=torch.zeros_like(ids))
    with torch.no_grad():
        assert gap(run_layers(bb, batch).h, theirs(bb, batch))<1e-5
