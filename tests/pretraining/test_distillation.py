"A teacher's embeddings and states: components, pieces of a token, and a loss that a perfect student brings to zero."
import numpy as np
import pytest
import torch

from idp_tutorial.data.synthetic import make_rows
from idp_tutorial.model.pretrained import load_backbone
from idp_tutorial.pretraining import distillation
from idp_tutorial.pretraining.distillation import Distillation, align_streams, teacher_embeddings
from idp_tutorial.pretraining.pretrain import PretrainConfig, pretrain
from idp_tutorial.pretraining.text import train_tokenizer


@pytest.fixture(scope='module')
def lines(): return [r['sentence1'] for t in ('sentiment','questions') for r in make_rows(t, 'train', n=300)]

@pytest.fixture(scope='module')
def tok(lines): return train_tokenizer(lines, 500)

@pytest.fixture(scope='module')
def teacher(): return load_backbone('minilm', attn='eager')

@pytest.fixture(scope='module')
def arrays(lines, tok, teacher): return align_streams([*lines, 'naïve café — ok', ' '], tok, teacher.tokenizer)

def test_teacher_embeddings(tok):
    teacher = load_backbone('tiny')
    d = teacher.d
    E = teacher_embeddings(tok, teacher, 32)
    assert E.shape==(len(tok),32) and E.isfinite().all() and E.std().item()==pytest.approx(.15, rel=1e-4)
    assert E.mean(0).abs().max()<1e-4 and not E.requires_grad
    C = E.T@E
    off = C-C.diag().diag()
    # principal components, the largest first
    assert off.abs().max()<1e-3*C.diag().max() and (C.diag()[:-1]>=C.diag()[1:]-1e-3).all()
    both = [i for i in range(5, len(tok)) if len(teacher.tokenizer(tok.decode([i]).strip(),
        add_special_tokens=False).input_ids)==1][:100]
    T = teacher.words.weight[[teacher.tokenizer(tok.decode([i]).strip(), add_special_tokens=False).input_ids[0]
        for i in both]]
    full = teacher_embeddings(tok, teacher, d)[both] # distances survive where no component is dropped
    a,b = torch.pdist(full),torch.pdist(T)
    assert torch.corrcoef(torch.stack([a, b]))[0,1]>.999
    with pytest.raises(ValueError, match=f'd={d+1}.*{d} dimensions'): teacher_embeddings(tok, teacher, d+1)

def test_every_token_covers_the_pieces_that_share_its_characters(arrays, tok, teacher):
    S,T,a,b = (arrays[k] for k in ('stream','teacher','start','stop'))
    # ' ' is dropped
    assert len(S)==len(a)==len(b) and (b>a).all() and b[-1]==len(T) and (np.diff(a)>=0).all()
    assert (S==tok.eos_token_id).sum()==(T==teacher.tokenizer.sep_token_id).sum()==601
    words = teacher.tokenizer.convert_ids_to_tokens(T.tolist())
    spelt = 0
    for i in range(len(S)):
        ours,theirs = tok.decode([S[i]]).strip(),''.join(w.removeprefix('##') for w in words[a[i]:b[i]])
        if S[i]==tok.eos_token_id: assert theirs=='[SEP]'
        else: spelt += ours in theirs or theirs in ours
    assert spelt>.99*(len(S)-601)

@pytest.fixture(scope='module')
def dist(teacher, arrays): return Distillation(teacher, arrays, d=32, n_layers=3)

@pytest.mark.parametrize('causal', [False,True])
def test_targets_are_means_of_the_teachers_states(causal, teacher, arrays, monkeypatch):
    dtype = torch.bfloat16 if causal else torch.float32 # what the processor gains by
    monkeypatch.setattr(distillation, 'faster_dtype', lambda model: dtype)
    dist = Distillation(teacher, arrays, 32, 3, causal=causal)
    rng = np.random.default_rng(0)
    at = rng.integers(0, len(arrays['stream'])-24, 4)[:,None]+np.arange(24)
    got = dist.targets(at)
    bert = dist.kept[0]
    assert bert.dtype==dtype and teacher.model.dtype==torch.float32 # a copy: the caller's is as it was
    for w,row in enumerate(at):
        lo,hi = arrays['start'][row[0]],arrays['stop'][row[-1]]
        hs = bert(torch.tensor([[101,*arrays['teacher'][lo:hi].tolist(),102]]), output_hidden_states=True).hidden_states
        for k,layer in enumerate((2,4,6)):
            h = hs[layer][0].float()
            want = torch.stack([h[1+arrays['start'][p]-lo:1+arrays['stop'][p]-lo].mean(0) for p in row])
            want[-1 if causal else 0] = h[1:-1].mean(0)
            err = (got[k,w]-want).square().mean(-1).sqrt()
            assert err.max()<.05*want.std() # bfloat16; a neighbour's state is more than ten times as far
    assert (got[:,:,1:]-got[:,:,:-1]).square().mean().sqrt()>.5*got.std()

def test_a_constant_reaches_one_and_a_perfect_map_zero(dist, arrays):
    at = np.arange(24)[None]+24*np.arange(8)[:,None]
    for f in dist.maps:
        torch.nn.init.zeros_(f.weight)
        torch.nn.init.zeros_(f.bias)
    assert dist([torch.zeros(8,24,32)]*4, at).item()==pytest.approx(1, abs=.3)
    for f in dist.maps: torch.nn.init.eye_(f.weight)
    wide = torch.nn.Linear(384, 384)
    torch.nn.init.eye_(wide.weight)
    torch.nn.init.zeros_(wide.bias)
    maps,dist.maps = dist.maps,torch.nn.ModuleList([wide]*3)
    t = (dist.targets(at)-dist.mean)/dist.std
    assert dist([None,*t], at).item()<1e-10 and dist.mine==[1,2,3]
    dist.maps = maps

def test_a_taught_run_learns_the_teachers_states(tok, arrays, teacher):
    dist = Distillation(teacher, arrays, 32, 3)
    before = [p.clone() for p in teacher.model.parameters()]
    cfg = PretrainConfig(d=32, n_layers=3, steps=40, tokens=512, lr=5e-3, warmup=4, held_out=1000)
    _,log = pretrain(arrays['stream'], tok, cfg, words=teacher_embeddings(tok, teacher, 32), extra=dist, every=10,
        say=lambda s: None)
    # a miniature: far from what six thousand steps reach
    assert log[-1]['held_out_distil']<.95*log[0]['held_out_distil']
    assert all(torch.equal(a, b) for a,b in zip(before, teacher.model.parameters()))
    assert not any(p.requires_grad for p in teacher.model.parameters())
