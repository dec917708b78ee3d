"Every family equals Hugging Face's own forward, and every way of prompting it trains the prompt and nothing else."
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from idp_tutorial.methods.adapters import add_adapters, add_lora
from idp_tutorial.model.dtypes import cast_weights
from idp_tutorial.model.families import FAMILIES, family_of, register_family
from idp_tutorial.model.layer_loop import run_layers
from idp_tutorial.model.parity import CLOSE, EXACT, gap, parity, theirs
from idp_tutorial.model.small_models import (
    RAGGED,
    SMALL,
    attentions,
    every_step,
    one_step,
    random_prompt,
    small_backbone,
    text,
)

ALL = [(name, attn) for name in SMALL for attn in attentions(name)]
ONE = [(name, attentions(name)[0]) for name in SMALL]
each = pytest.mark.parametrize('name,attn', ALL)
each_once = pytest.mark.parametrize('name,attn', ONE)


def test_every_family_has_a_small_model():
    assert {n.partition(',')[0] for n in SMALL}==set(FAMILIES) and len(FAMILIES)==19


@each
def test_it_computes_what_the_library_computes(name, attn):
    bb = small_backbone(name, attn)
    assert bb.config._attn_implementation==attn
    got = parity(bb)
    assert all((got[k] or 0.)<=2e-6 for k in EXACT) and all((got[k] or 0.)<=1e-5 for k in CLOSE), got
    assert [k for k in got if got[k] is None]==[
        *(['logits'] if not bb.has_lm_head else []), *(['cache'] if not bb.causal else []),
        *(['labels'] if not bb.has_lm_head else []), *(['one_row'] if not bb.reads_one_row else []),
        *(['mixed'] if not bb.takes_kv else [])]


@each
def test_a_prompt_of_every_kind_learns_and_nothing_frozen_does(name, attn):
    bb,seen = small_backbone(name, attn),0
    plain,w = run_layers(bb, text()),torch.randn(bb.d)
    def words(ctx): # all of them: in a local layer the last may be too far from the prompt
        return ctx.h[ctx.text==1]
    for op,layer in every_step(bb):
        p = random_prompt(bb, op, layer)
        ctx = run_layers(bb, text(), one_step(bb, op, layer, lambda ctx: p))
        (words(ctx)*w).sum().backward()
        assert (p.grad.abs().sum((1,2))>0).all(), (op, layer)
        assert gap(words(ctx), words(plain))>1e-6, (op, layer)
        assert all(q.grad is None for q in bb.model.parameters())
        seen += 1
    assert seen==(11 if bb.takes_kv else 8)


@each_once
def test_lora_and_adapters_go_into_its_layers(name, attn):
    bb,b = small_backbone(name, attn),text()
    plain = run_layers(bb, b).h
    for where,n in (('qv',len(bb.qv)*bb.n_layers),('all',None)):
        with add_lora(bb, 2, where=where):
            trained = [p for p in bb.model.parameters() if p.requires_grad]
            assert trained and (n is None or len(trained)==2*n) and gap(run_layers(bb, b).h, plain, b['keep'])<1e-6
            for p in trained: p.data += .1*torch.randn_like(p)
            changed = run_layers(bb, b)
            assert gap(changed.h, theirs(bb, b), b['keep'])<1e-5 and gap(changed.h, plain, b['keep'])>1e-4
            one = run_layers(bb, b, read='last')
            assert gap(one.row('last'), changed.row('last'))<1e-5
            (one.row('last')*torch.randn(bb.d)).sum().backward()
            assert all(p.grad is not None for p in trained)
    with add_adapters(bb, 4, std=.1):
        trained = [p for p in bb.model.parameters() if p.requires_grad]
        changed = run_layers(bb, b)
        assert len(trained)==8*bb.n_layers and gap(changed.h, theirs(bb, b), b['keep'])<1e-5
        assert gap(run_layers(bb, b, read='last').row('last'), changed.row('last'))<1e-5
        (changed.h[b['keep']==1]*torch.randn(bb.d)).sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum()>0 for p in trained)
    assert torch.equal(run_layers(bb, b).h, plain) # as it was


@each_once
def test_weights_in_bfloat16(name, attn):
    "Prompts, their gradients and what a head reads stay float32"
    bb = small_backbone(name, attn)
    b,want = text(),run_layers(bb, text()).h
    cast_weights(bb.model, torch.bfloat16)
    assert all(x.dtype==torch.float32 for n,x in bb.model.named_buffers() if 'inv_freq' in n)
    seen = []
    def source(ctx, p):
        seen.append(ctx.states.dtype)
        return p
    for op,layer in every_step(bb):
        p = random_prompt(bb, op, layer)
        ctx = run_layers(bb, b, one_step(bb, op, layer, lambda ctx: source(ctx, p)), read='last')
        assert ctx.h.dtype==torch.bfloat16 and ctx.row('last').dtype==ctx.mean().dtype==torch.float32, (op, layer)
        (ctx.row('last')*torch.randn(bb.d)).sum().backward()
        assert p.grad.dtype==torch.float32 and p.grad.isfinite().all()
    assert set(seen)=={torch.float32}
    ctx = run_layers(bb, b)
    if bb.has_lm_head:
        row = ctx.row('mask')
        assert bb.lm_words(row, torch.tensor([7,50])).dtype==bb.lm_logits(row).dtype==torch.float32
    off = (ctx.states-want)[b['keep']==1].abs().mean()/want.std()
    assert off<.05


def test_a_family_that_forgets_something_is_found(monkeypatch):
    def worst(name):
        got = parity(small_backbone(name, attentions(name)[0]))
        return {k for k in got if (got[k] or 0.)>1e-5}
    for name,attribute,wrong in (
        ('mistral', 'near', lambda self, distance: distance<=self.window),
        ('modernbert', 'near', lambda self, distance: distance.abs()<self.window),
        ('roberta', 'positions', lambda self, keep: keep.cumsum(1)*keep),
        ('gemma3_text', 'cap', lambda self, logits: logits),
        ('llama', 'embed', lambda self, e, keep, types: 1.01*e)):
        cls = family_of(SimpleNamespace(model_type=name)).cls
        assert not worst(name)
        with monkeypatch.context() as m:
            m.setattr(cls, attribute, wrong)
            assert worst(name), (name, attribute)


def test_a_layer_may_be_told_other_lengths_for_each_text():
    "RAGGED texts, and prompts of 3, 0 and 1 keys: the text begins behind its own keys"
    bb = small_backbone('llama')
    prefix = torch.tensor([[1,1,1],[0,0,0],[1,0,0]])
    rows,distance,real = bb.places(text(RAGGED)['keep'], prefix)
    assert rows[:,0].tolist()==[3,0,1] and real.shape==(3,14)
    assert distance[0,0,:4].tolist()==[3,2,1,0] and distance[1,0,3].item()==0


def test_heads_that_share_a_key_get_no_mask_where_nothing_is_padded():
    def mask(name, keep, prefix=0, attn='sdpa'):
        bb = small_backbone(name, attn)
        return bb.given(keep, torch.zeros(*keep.shape, bb.d), prefix)['full_attention']['attention_mask']
    whole = torch.ones(2, 5, dtype=torch.long)
    assert mask('llama', whole) is None
    padded = whole.tril(3)
    assert all(m is not None for m in (mask('llama', padded), mask('llama', whole, 2), mask('gpt2', whole),
        mask('llama', whole, attn='eager')))


def test_registering():
    class Loop:
        causal,readout = False,'cls'
    before = deepcopy(dict(FAMILIES))
    try:
        register_family('mine', Loop, 'causal', causal=True)
        assert FAMILIES['mine'].cls.causal and not Loop.causal and FAMILIES['mine'].auto=='AutoModelForCausalLM'
        with pytest.raises(ValueError, match="Loop has no 'casual' to replace"):
            register_family('mine', Loop, casual=True)
    finally:
        for k in set(FAMILIES)-set(before): del FAMILIES[k]
    with pytest.raises(ValueError, match="'state/mamba' is a 'mamba' model.*bert.*t5.*Add a family"):
        family_of(SimpleNamespace(model_type='mamba'), 'state/mamba')


def test_the_modules_that_adapters_stand_behind_are_named_in_every_layer():
    for name in SMALL:
        bb = small_backbone(name, attentions(name)[0])
        for layer in bb.layers:
            assert {n.rpartition('.')[2] for n,_ in layer.named_modules()}>=set(bb.qv)
            assert all(isinstance(layer.get_submodule(o), nn.Module) for o in bb.ends)
        assert hasattr(bb.config, bb.attention_dropout)


def test_a_family_that_drops_the_keys_is_told_so():
    "A class added from outside says what it can; where it is wrong, nothing is left out in silence"
    bb = small_backbone('roberta')
    class Deaf(type(bb)):
        def layer(self, layer, h, given, kv=None):
            return super().layer(layer, h, given)
    class Honest(Deaf):
        takes_kv = False
    plan = one_step(bb, 'kv', 1, lambda ctx: torch.randn(len(ctx.h), 3, bb.d_kv))
    deaf = Deaf(bb.model, bb.tokenizer, 'deaf')
    # without padding there is no mask, so nothing else would notice
    whole = {k: v[:1,:4] for k,v in text().items() if k in ('ids','keep','types')}
    with pytest.raises(ValueError, match='layer 1 of a roberta backbone has not asked .* hand `kv` on in Deaf.layer'):
        run_layers(deaf, whole, plan)
    with pytest.raises(ValueError, match="'kv' at 1 of a roberta backbone: its attention takes no keys and values"):
        run_layers(Honest(bb.model, bb.tokenizer, 'honest'), text(), plan)
    with pytest.raises(ValueError, match="'kv' at 'words' of a roberta backbone: keys and values enter at a layer"):
        run_layers(bb, text(), one_step(bb, 'kv', 'words', plan[1].source))
    run_layers(deaf, text())
    run_layers(bb, text(), plan)
