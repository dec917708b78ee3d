"From text to a backbone: the tokenizer, windows, masks, the loss, and a killed run against an unbroken one."
import json
import lzma
from dataclasses import replace

import numpy as np
import pytest
import torch

from idp_tutorial import tensor_files
from idp_tutorial.data.synthetic import make_rows
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.model.pretrained import load_backbone, packaged
from idp_tutorial.pretraining import language_modelling
from idp_tutorial.pretraining import pretrain as pretraining
from idp_tutorial.pretraining.language_modelling import held_out_loss, lm_loss, mask_tokens, new_model, next_tokens
from idp_tutorial.pretraining.masters import Masters
from idp_tutorial.pretraining.pretrain import PretrainConfig, pretrain
from idp_tutorial.pretraining.text import (
    LABEL_WORDS,
    draw_batch,
    encode_stream,
    prepare_text,
    read_lines,
    train_tokenizer,
    without,
)
from idp_tutorial.records import read_records
from idp_tutorial.snapshots import write_step


@pytest.fixture(scope='module')
def lines(): return [r['sentence1'] for t in ('sentiment','questions') for r in make_rows(t, 'train', n=400)]

@pytest.fixture(scope='module')
def tok(lines): return train_tokenizer(lines, 700)

@pytest.fixture(scope='module')
def stream(lines, tok): return encode_stream(lines, tok)

# --- tokenizer

def test_round_trip_and_framing(tok, lines):
    for s in lines[:50]:
        ids = tok(s).input_ids
        assert tok.decode(ids[1:-1]).strip()==s.lower() and (ids[0],ids[-1])==(tok.bos_token_id, tok.eos_token_id)
        assert tok.unk_token_id not in ids
    odd = 'naïve 北京 🙂 ﬁ'
    # NFKC, bytes
    assert tok.decode(tok(odd).input_ids[1:-1]).strip()=='naïve 北京 🙂 fi'
    assert tok.unk_token_id not in tok(odd).input_ids
    a,b = (tok(s, add_special_tokens=False).input_ids for s in ('a cold beer','the soup'))
    assert tok('a cold beer', 'the soup').input_ids==[0,*a,2,2,*b,2]
    assert [tok.bos_token_id,tok.pad_token_id,tok.eos_token_id,tok.unk_token_id,tok.mask_token_id]==[0,1,2,3,4]
    assert tok.cls_token_id==0 and tok.sep_token_id==2

@pytest.mark.parametrize('which', ['new','tiny'])
def test_label_words_are_single_tokens(which, tok):
    tok = tok if which=='new' else load_backbone('tiny').tokenizer
    for w in LABEL_WORDS: assert len(tok(' '+w, add_special_tokens=False).input_ids)==1, w
    for t in TASKS.values():
        if t.words: assert len({*t.word_ids(tok)})==len(t.labels)

@pytest.mark.parametrize('which', ['new','tiny'])
def test_mask_takes_the_space_before_it(which, tok):
    tok = tok if which=='new' else load_backbone('tiny').tokenizer
    def ids(s): return tok(s, add_special_tokens=False).input_ids
    was = ids('it was')
    assert ids('it was <mask>')==ids('it was<mask>')==[*was, tok.mask_token_id]
    assert ids('it was <mask> .')==[*was, tok.mask_token_id, *ids(' .')]

# --- text

def test_reading_and_streaming(tok, tmp_path):
    (tmp_path/'a.txt').write_text('one beer\n\n  two beers \n')
    (tmp_path/'b.txt.xz').write_bytes(lzma.compress(b'a third\n'))
    assert list(read_lines(tmp_path/'a.txt', tmp_path/'b.txt.xz'))==['one beer','two beers','a third']
    with pytest.raises(FileNotFoundError, match='no text file at .*one document a line'):
        list(read_lines(tmp_path/'c.txt'))
    s = encode_stream(['one beer','two beers']*600, tok) # more than one chunk
    assert s.dtype==np.uint16 and (s==tok.eos_token_id).sum()==1200 and s[:8].tolist()==s[len(s)//2:][:8].tolist()
    assert tok.decode(s[:len(s)//600]).split()=='one beer</s> two beers</s>'.split() and len(encode_stream([], tok))==0

def test_windows(stream):
    def draw(seed, **kw): return draw_batch(stream, 2048, np.random.default_rng(seed), **kw)
    x = draw(0, lengths=(64,), p=(1.,))
    assert x.shape==(32,64) and (x[:,0]==0).all() and x.dtype==torch.int64
    assert torch.equal(x, draw(0, lengths=(64,), p=(1.,)))
    assert {draw(i).shape[1] for i in range(60)}=={32,64,128, 256}
    assert all(2048-256<draw(i).numel()<=2048 for i in range(20))
    text = stream.tolist()
    row = x[3,1:].tolist()
    assert any(text[i:i+63]==row for i in range(len(text)))
    assert draw_batch(stream[:20], 2048, np.random.default_rng(0)).shape[1]==20 # a short stream is one window

def test_task_rows_are_read_as_sentences(tmp_path):
    rows = [dict(sentence1=' a pair ', sentence2='of texts', label=0), dict(sentence1='alone', label=1)]
    (tmp_path/'r.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    (tmp_path/'r.jsonl.xz').write_bytes(lzma.compress((tmp_path/'r.jsonl').read_bytes()))
    for name in ('r.jsonl','r.jsonl.xz'): assert list(read_lines(tmp_path/name))==['a pair','of texts','alone']

def test_what_is_held_out_is_left_out():
    held = 'one two three four five six seven eight nine ten eleven twelve thirteen'
    cut = ' '.join(held.split()[1:])
    # eleven in a row may be chance
    assert list(without([held.upper()+'!', 'so: '+cut+' and on', ' '.join(held.split()[:11]), 'other'],
        [held]))==[' '.join(held.split()[:11]), 'other']
    # shorter than twelve words: the whole text
    assert list(without(['It is fine.', 'it is fine too', ''], ['it is, fine']))==['it is fine too', '']

def test_prepared_once(lines, tmp_path):
    tok,a = prepare_text(lines, tmp_path, 700)
    tok2,b = prepare_text(lines, tmp_path, 700) # found there
    assert np.array_equal(a['stream'], b['stream']) and tok.get_vocab()==tok2.get_vocab()
    assert (a['stream']==2).sum()==len(lines) and not (tmp_path/'text.tmp').exists()
    _,c = prepare_text(['seen once', *lines[:50]*2], tmp_path/'more', 700)
    # held out: what stands nowhere else
    assert 'seen once' in prepare_text(['seen once', *lines[:50]*2], tmp_path/'more', 700)[0].decode(c['stream'][-12:])
    for kw in (dict(lines=lines[1:]), dict(vocab=600), dict(seed=1)):
        with pytest.raises(ValueError, match='holds other text.*another --out'):
            prepare_text(**{**dict(lines=lines, out=tmp_path, vocab=700), **kw})

def test_the_tokenizer_sees_a_fair_sample(tmp_path, monkeypatch):
    "Repeated texts come first in the stream, but not among the texts that the tokenizer learns from"
    from idp_tutorial.pretraining import text
    seen = []
    real = text.train_tokenizer
    monkeypatch.setattr(text, 'train_tokenizer', lambda lines, vocab: (seen.extend(lines), real(lines, vocab))[1])
    prepare_text([f'seen once {i}' for i in range(200)]+['seen often']*200, tmp_path, 400)
    assert len(seen)==400 and 60<seen[:200].count('seen often')<140

# --- masks and loss

def test_eighty_ten_ten():
    V,rng = 700,np.random.default_rng(0)
    ids = torch.from_numpy(rng.integers(0, V, (400,500)))
    keep = ids.clone()
    seen,rows,target = mask_tokens(ids, 4, V, rng)
    # special tokens are never asked for
    assert torch.equal(ids, keep) and torch.equal(target, ids.flatten()[rows]) and target.min()>=5
    x = seen.flatten()[rows]
    changed = (seen!=ids).flatten()
    changed[rows] = False
    assert not changed.any()
    n = (ids>=5).sum().item()
    assert len(rows)/n==pytest.approx(.15, abs=.005)
    masked,kept = (x==4).float().mean().item(),(x==target).float().mean().item()
    assert masked==pytest.approx(.8, abs=.01) and kept==pytest.approx(.1, abs=.01) and x[x!=4].min()>=5
    assert len(mask_tokens(ids[:2], 4, V, rng, p=0.)[1])==0

def test_next_tokens():
    ids = torch.arange(60).view(3, 20)
    seen,rows,target = next_tokens(ids, np.random.default_rng(0), p=.5)
    # the next of a window, never of another
    assert torch.equal(seen, ids) and torch.equal(target, rows+1) and (rows%20!=19).all() and 15<len(rows)<45

@pytest.mark.parametrize('family', ['roberta','gpt2'])
def test_loss_is_hugging_faces(family, stream, tok):
    torch.manual_seed(0)
    model = new_model(len(tok), 32, 2, family=family).eval()
    rng = np.random.default_rng(0)
    for p in model.parameters():
        if p.dim()>1: torch.nn.init.normal_(p, std=.2)
    ids = draw_batch(stream, 1024, rng)
    seen,rows,target = mask_tokens(ids, 4, len(tok), rng) if family=='roberta' else next_tokens(ids, rng, 1.)
    labels = torch.full_like(ids.flatten(), -100)
    labels[rows] = target
    theirs = model(input_ids=seen, labels=labels.view_as(ids) if family=='roberta' else ids)
    loss,acc = lm_loss(model, model.base_model(seen).last_hidden_state, rows, target)
    torch.testing.assert_close(loss, theirs.loss)
    assert acc==(theirs.logits.flatten(0, 1)[rows].argmax(-1)==target).float().mean()

def test_held_out_loss_repeats_and_changes_nothing(stream, tok):
    model = new_model(len(tok), 32, 1).train()
    before,state = held_out_loss(model, stream, tok, 2000, batches=2),torch.get_rng_state()
    assert held_out_loss(model, stream, tok, 2000, batches=2)==before and model.training
    assert torch.equal(state, torch.get_rng_state())
    # nothing is learnt yet
    assert before['lm']==pytest.approx(np.log(len(tok)), abs=.1) and before.keys()=={'lm','top1'}

def test_masters_are_adamw_in_float32():
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 8)
    twin = torch.nn.Linear(8, 8)
    twin.load_state_dict(net.state_dict())
    cfg = PretrainConfig(lr=1e-2, warmup=2, steps=10, dtype='float32')
    m = Masters([net], cfg)
    opt = torch.optim.AdamW([dict(params=[twin.weight], weight_decay=.01), dict(params=[twin.bias], weight_decay=0.)],
        betas=(.9,.98), eps=1e-6)
    for s in range(4):
        x = torch.randn(4, 8)
        for o in opt.param_groups: o['lr'] = 1e-2*min((s+1)/2, 1., (10-s)/6)
        for n,step in ((net, m.step), (twin, lambda: (torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.), opt.step(),
            opt.zero_grad()))):
            n(x).square().sum().backward()
            step()
    torch.testing.assert_close(net.weight, twin.weight)
    torch.testing.assert_close(net.bias, twin.bias)

def test_masters_keep_steps_that_half_precision_would_lose():
    net = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.ones_(net.weight)
    m = Masters([net], PretrainConfig(lr=1e-4, warmup=1, steps=100))
    for _ in range(60):
        net(torch.ones(1, 4, dtype=torch.bfloat16)).float().sum().backward()
        m.step()
    # 60 steps of 1e-4; one alone rounds away
    assert net.weight.dtype==torch.bfloat16 and m.kept[0].dtype==torch.float32 and (m.kept[0]<.996).all()
    assert (net.weight<1).all()

# --- the run

CFG = PretrainConfig(d=32, n_layers=1, steps=12, tokens=256, lr=3e-3, warmup=4, held_out=1000)
class Kill(Exception): pass
def quiet(line): pass
def timeless(log): return [{k:v for k,v in r.items() if k!='tokens_per_s'} for r in log]

@pytest.fixture(scope='module')
def whole(stream, tok): return pretrain(stream, tok, CFG, every=3, say=quiet)

@pytest.mark.parametrize('when,step', [('said',6), ('said',12), ('writing',6)])
def test_a_killed_run_goes_on_as_if_nothing_had_been(when, step, whole, stream, tok, tmp_path, monkeypatch):
    def stop(line):
        if when=='said' and line.startswith(f'step {step}/'):
            raise Kill # what is said comes before what is kept
    real = tensor_files.write_whole
    def half(file, data):
        if when=='writing' and file.name==f'checkpoint-{step}.safetensors':
            file.with_name('.checkpoint.part').write_bytes(data[:1000])
            raise Kill
        real(file, data)
    monkeypatch.setattr(tensor_files, 'write_whole', half)
    with pytest.raises(Kill): pretrain(stream, tok, CFG, tmp_path, every=3, say=stop)
    monkeypatch.setattr(tensor_files, 'write_whole', real)
    torch.rand(9)
    said = []
    model,log = pretrain(stream, tok, CFG, tmp_path, every=3, say=said.append)
    assert said[0].startswith(f'step {step}/') and len(said)==(12-step)//3+1
    assert timeless(log)==timeless(whole[1])
    assert all(torch.equal(a, b) for a,b in zip(model.parameters(), whole[0].parameters())) and not model.training
    assert read_records(tmp_path/'log.jsonl')==log
    said.clear()
    again,log = pretrain(stream, tok, CFG, tmp_path, every=3, say=said.append) # finished: nothing left to do
    assert not said and all(torch.equal(a, b) for a,b in zip(model.parameters(), again.parameters()))

def test_a_seed_decides_everything(whole, stream, tok):
    torch.rand(3)
    _,log = pretrain(stream, tok, CFG, every=3, say=quiet)
    assert timeless(log)==timeless(whole[1])
    _,log = pretrain(stream, tok, replace(CFG, seed=1), every=3, say=quiet)
    assert log[0]['lm']!=whole[1][0]['lm']

def test_held_out_text_is_not_trained_on(stream, tok, monkeypatch):
    at,real = [],language_modelling.take
    monkeypatch.setattr(language_modelling, 'take', lambda s, a, **kw: at.append(a) or real(s, a, **kw))
    pretrain(stream, tok, replace(CFG, steps=3), every=9, say=quiet)
    n = len(stream)-1000
    assert all(a.max()<n for a in at[:3]) and len(at)>3 and all(a.min()>=n for a in at[3:])

def test_schedule():
    m = Masters([new_model(20, 32, 1)], CFG)
    lrs = []
    for _ in range(12):
        lrs.append(m.opt.param_groups[0]['lr'])
        m.opt.step()
        m.sched.step()
    assert lrs==pytest.approx([CFG.lr*min((s+1)/4, 1, (12-s)/7.2) for s in range(12)])
    assert [g['weight_decay'] for g in m.opt.param_groups]==[.01,0.]

def test_a_decoder_learns_too(stream, tok):
    model,log = pretrain(stream, tok, replace(CFG, family='gpt2', steps=24), every=12, say=quiet)
    assert model.config.model_type=='gpt2' and log[-1]['held_out_lm']<log[0]['held_out_lm']<np.log(len(tok))

def test_a_loss_that_is_no_number_ends_the_run(stream, tok, tmp_path, monkeypatch):
    real = pretraining.losses
    pretrain(stream, tok, CFG, tmp_path, every=3, say=quiet, stop=6)
    whole = (tmp_path/'checkpoint-6.safetensors').read_bytes()
    monkeypatch.setattr(pretraining, 'losses', lambda *a, **kw: {k:v*float('nan') for k,v in real(*a, **kw).items()})
    refused(lambda: pretrain(stream, tok, CFG, tmp_path, every=3, say=quiet), 'loss is nan at step 9', 'lower --lr')
    assert (tmp_path/'checkpoint-6.safetensors').read_bytes()==whole

def refused(f, *words, error=ValueError):
    with pytest.raises(error) as e: f()
    assert all(w in str(e.value) for w in words), str(e.value)

def test_what_cannot_be_resumed(stream, tok, tmp_path):
    pretrain(stream, tok, replace(CFG, steps=2), tmp_path, every=2, say=quiet)
    ckpt = tmp_path/'checkpoint-2.safetensors'
    def go(**kw): return pretrain(stream, tok, replace(CFG, steps=2, **kw), tmp_path, say=quiet)
    refused(lambda: go(d=64, seed=3), 'is of another run', "'d': (32, 64)", "'seed': (0, 3)", 'another --out')
    for harm in (ckpt.read_bytes()[:900], b''):
        ckpt.write_bytes(harm)
        refused(go, f'{ckpt} is damaged', 'Delete it')
    ckpt.unlink()
    torch.save({'weights':torch.zeros(2)}, tmp_path/'checkpoint.pt')
    refused(go, 'a checkpoint of version 0.1.0, which could run code')
    write_step(tmp_path, 3, {'a':1})
    refused(go, 'is of something else')

def test_a_damaged_newest_goes_on_from_the_one_before(stream, tok, tmp_path):
    whole,log = pretrain(stream, tok, replace(CFG, steps=6), tmp_path/'a', every=2, say=quiet)
    pretrain(stream, tok, replace(CFG, steps=6), tmp_path/'b', every=2, say=quiet, stop=4)
    (tmp_path/'b/checkpoint-4.safetensors').write_bytes(b'half')
    with pytest.warns(UserWarning, match='checkpoint-4.* is damaged: .*; the run goes on from checkpoint-2'):
        again,_ = pretrain(stream, tok, replace(CFG, steps=6), tmp_path/'b', every=2, say=quiet)
    for p,q in zip(whole.parameters(), again.parameters()): assert torch.equal(p, q)
    assert len(read_records(tmp_path/'b/log.jsonl'))==len(log)==3

@pytest.mark.parametrize('kw', [dict(steps=0), dict(steps=-5), dict(n_layers=-1), dict(lr=0), dict(lr=float('nan')),
    dict(d=33), dict(tokens=0), dict(seed=-1), dict(distil=float('nan')), dict(family='t5')], ids=str)
def test_what_no_run_can_have(kw):
    name, = kw
    refused(lambda: PretrainConfig(**kw), name)

def test_prepared_text_that_has_changed_is_prepared_again(lines, tmp_path):
    _,a = prepare_text(lines, tmp_path, 700)
    ids = np.array(a['stream'])
    data = bytearray((tmp_path/'stream.npy').read_bytes())
    data[-3] ^= 1
    del a
    (tmp_path/'stream.npy').write_bytes(data)
    with pytest.warns(UserWarning, match='stream.npy is damaged or missing: the text is prepared again'):
        _,b = prepare_text(lines, tmp_path, 700)
    assert np.array_equal(ids, b['stream'])

def test_a_finished_run_goes_on_as_another(stream, tok, tmp_path):
    "Its weights, a new optimizer and schedule; and the new run resumes like any other"
    a,b = tmp_path/'a',tmp_path/'b'
    old,log = pretrain(stream, tok, replace(CFG, steps=40), a, every=40, say=quiet)
    cfg = replace(CFG, steps=4, seed=1, lr=1e-9, start=str(a))
    new,more = pretrain(stream, tok, cfg, b, every=4, say=quiet)
    for p,q in zip(old.parameters(), new.parameters()): torch.testing.assert_close(p, q, atol=1e-6, rtol=0)
    assert abs(more[0]['held_out_lm']-log[-1]['held_out_lm'])<1e-3 and more[0]['step']==4
    whole,_ = pretrain(stream, tok, cfg:=replace(cfg, lr=1e-3), tmp_path/'c', every=2, say=quiet)
    pretrain(stream, tok, cfg, tmp_path/'d', every=2, stop=2, say=quiet)
    again,_ = pretrain(stream, tok, cfg, tmp_path/'d', every=2, say=quiet)
    for p,q in zip(whole.parameters(), again.parameters()): assert torch.equal(p, q)
    refused(lambda: pretrain(stream, tok, replace(cfg, d=64), say=quiet), 'another shape', "'d': 32", 'd=64')
    refused(lambda: pretrain(stream, tok, replace(cfg, start=str(tmp_path/'none')), say=quiet), 'no checkpoint at',
        'idp_pretrain', error=FileNotFoundError)

def test_a_share_keeps_what_it_has_trained(stream, tok, tmp_path):
    "Where it ends between two looks, too"
    cfg = replace(CFG, steps=6)
    for stop in (2,4):
        pretrain(stream, tok, cfg, tmp_path/'a', every=5, stop=stop, say=quiet)
    again,log = pretrain(stream, tok, cfg, tmp_path/'a', every=5, say=quiet)
    whole,_ = pretrain(stream, tok, cfg, every=5, say=quiet)
    assert [r['step'] for r in log]==[2,4,5,6]
    for p,q in zip(whole.parameters(), again.parameters()): assert torch.equal(p, q)
    _,log = pretrain(stream, tok, cfg, stop=0, say=quiet)
    assert log==[] # none of it

@pytest.mark.parametrize('n_layers,words', [(9,'it has no '), (4,'layer')])
def test_weights_of_another_depth_are_no_start(n_layers, words, stream):
    tok = load_backbone('tiny').tokenizer
    cfg = replace(CFG, d=192, n_layers=n_layers, steps=1, start=str(packaged('tiny')))
    refused(lambda: pretrain(stream, tok, cfg, say=quiet), 'another shape', words, 'n_layers')

@pytest.mark.parametrize('name', ['tiny','tiny-gpt2'])
def test_the_bundled_weights_go_on(name):
    "Their held-out loss on text of their own kind is that of the weights, and not of a new model"
    bb = load_backbone(name)
    stream = encode_stream([r['sentence1'] for r in make_rows('sentiment', 'train', n=300)], bb.tokenizer)
    tok = load_backbone('tiny').tokenizer
    cfg = PretrainConfig(family=bb.family, d=bb.d, n_layers=8, steps=1, tokens=64, lr=1e-9, held_out=500,
        dtype='float32', start=str(packaged(name)))
    model,log = pretrain(stream, tok, cfg, every=1, say=quiet)
    for (n,p),(_,q) in zip(model.named_parameters(), bb.model.named_parameters()):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=0, msg=n)
    assert log[0]['held_out_lm']<6.5
    refused(lambda: pretrain(stream, tok, replace(cfg, d=64), say=quiet), 'a model of another shape', 'd=64')

def test_too_little_text(stream, tok):
    refused(lambda: pretrain(stream[:1200], tok, CFG, say=quiet), '1200 ids', 'held_out=1000', 'more text')
    refused(lambda: pretrain(stream, tok, replace(CFG, held_out=0), say=quiet), 'held_out=0')
    refused(lambda: pretrain(stream, tok, replace(CFG, d=40), say=quiet), 'multiple of 32')
    refused(lambda: pretrain(stream, tok, replace(CFG, family='t5'), say=quiet), "unknown family 't5'", "'gpt2'")
    refused(lambda: PretrainConfig(dtype='float8'), "'bfloat16'")


def test_text_of_any_script_is_held_out():
    assert [*without(['это тест', 'a line'], ['Это тест!'])]==['a line']


def test_a_batch_is_asked_something():
    ids = torch.full((1,4), 300)
    for _,rows,target in (mask_tokens(ids, 4, 400, np.random.default_rng(0), 1e-9),
        next_tokens(ids, np.random.default_rng(0), 1e-9)):
        assert len(rows)==1 and target.tolist()==[300]
    drawn = {int(next_tokens(ids, np.random.default_rng(i), 1e-9)[1]) for i in range(40)}
    assert drawn=={0,1,2} # of those that something follows, by lot
