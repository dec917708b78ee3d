"Frozen weights in bfloat16: who gets them, how far they are, and what stays float32"
import pytest
import torch
import torch.nn.functional as F
from small import backbone, config, small_task

from idp_tutorial.config import RunConfig
from idp_tutorial.experiments.run import run
from idp_tutorial.methods.build import backbone_for, build
from idp_tutorial.methods.registry import METHODS
from idp_tutorial.model import dtypes
from idp_tutorial.model.dtypes import bfloat16_speed, cast_weights, faster_dtype
from idp_tutorial.model.layer_loop import run_layers
from idp_tutorial.model.plan import Step
from idp_tutorial.model.pretrained import load_backbone
from idp_tutorial.model.small_models import SMALL, attentions, small_backbone, text


def test_what_is_measured_is_measured_once(monkeypatch):
    calls = []
    times = {torch.float32:2., torch.bfloat16:1.}
    monkeypatch.setattr(dtypes, '_seconds', lambda x, w: calls.append(x.dtype) or times[x.dtype])
    bfloat16_speed.cache_clear()
    assert bfloat16_speed('cpu', 8, 16)==bfloat16_speed('cpu', 8, 16)==2. and len(calls)==12
    assert faster_dtype(backbone().model, 'cpu')==torch.bfloat16 and len(calls)==24
    bfloat16_speed.cache_clear()
    monkeypatch.setattr(dtypes, '_seconds', lambda x, w: 1.)
    assert faster_dtype(backbone().model, 'cpu')==torch.float32
    bfloat16_speed.cache_clear()


def test_auto_takes_what_the_measurement_says(monkeypatch):
    from idp_tutorial.model import pretrained
    for dtype in (torch.bfloat16, torch.float32):
        monkeypatch.setattr(pretrained, 'faster_dtype', lambda model, device=None: dtype)
        assert load_backbone('tiny', dtype='auto').words.weight.dtype==dtype
    assert load_backbone('tiny').words.weight.dtype==torch.float32 # whatever is faster
    with pytest.raises(ValueError, match="unknown dtype 'float16': use 'float32', 'bfloat16' or 'auto'"):
        RunConfig(dtype='float16')
    with pytest.raises(ValueError, match="unknown dtype 'float8': use 'float32', 'bfloat16' or 'auto'"):
        load_backbone('tiny', dtype='float8') # and no word of damage


@pytest.mark.parametrize('method', METHODS)
def test_what_is_trained_is_float32(method):
    if method=='m-idpg-phm-glove':
        return # reads a file
    cfg = config(method=method, backbone='tiny', dtype='bfloat16')
    model = build(cfg, backbone_for(cfg), small_task())
    assert {p.dtype for p in model.trained().values()}=={torch.float32}
    held = 'float32' if method in ('fine-tuning','efl','bitfit') else 'bfloat16'
    assert model.backbone.weights_are['weights_dtype']==held


def test_a_record_says_what_the_weights_were_held_in():
    cfg = config(method='lpt-npg', backbone='tiny', dtype='bfloat16', steps=2, eval_every=2, cache='none')
    record = run(cfg, small_task())
    assert (record['dtype'],record['weights_dtype'])==('bfloat16','bfloat16') and record['score']>=0


@pytest.mark.parametrize('held', ('weights','autocast'))
def test_what_learns_in_bfloat16_takes_plain_attention(held, monkeypatch):
    "From the prompt on; its gradient is about as near to float32's as that of fused attention"
    bb,fused,attend = small_backbone('llama', 'sdpa'),[],F.scaled_dot_product_attention
    def seen(*args, **kwargs):
        fused.append(torch.backends.cuda.flash_sdp_enabled())
        return attend(*args, **kwargs)
    monkeypatch.setattr(F, 'scaled_dot_product_attention', seen)
    batch,p = text(),torch.randn(3, bb.d, generator=torch.Generator().manual_seed(0)).requires_grad_()
    plan = {1:Step('insert', lambda ctx: p.expand(len(ctx.h), -1, -1))}
    def gradient(dtype):
        with torch.autocast('cpu', dtype, enabled=dtype==torch.bfloat16 and held=='autocast'):
            loss = run_layers(bb, batch, plan).h.float().pow(2).mean()
        return torch.autograd.grad(loss, p)[0]
    want = gradient(torch.float32)
    if held=='weights':
        cast_weights(bb.model, torch.bfloat16)
    got = gradient(torch.bfloat16)
    n = bb.n_layers
    assert fused==[True]*(n+1)+[False]*(n-1)
    monkeypatch.setattr(dtypes, 'SHORT', 2)
    other = gradient(torch.bfloat16)
    assert all(fused[2*n:])
    plain,as_before = [((g-want).norm()/want.norm()).item() for g in (got, other)]
    assert plain<max(.01, 1.5*as_before)<.1


@pytest.mark.parametrize('name', [n for n in SMALL if small_backbone(n, attentions(n)[0]).has_lm_head])
@torch.no_grad()
def test_logits_of_every_family_are_near_those_in_float32(name):
    bb = small_backbone(name, attentions(name)[0])
    b = text()
    want = bb.lm_logits(run_layers(bb, b).row('mask'))
    cast_weights(bb.model, torch.bfloat16)
    got = bb.lm_logits(run_layers(bb, b).row('mask'))
    assert got.dtype==torch.float32 and ((got-want).abs().mean()/want.std()).item()<.03
