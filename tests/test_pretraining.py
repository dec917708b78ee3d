"From text to a backbone: the tokenizer's framing, windows, masks, the loss against Hugging Face's, a killed run against an unbroken one, and the folder that comes out."
import json, lzma
from dataclasses import asdict, replace
import numpy as np, pytest, torch
from idp_tutorial import pretraining
from idp_tutorial.backbone import load_backbone
from idp_tutorial.injection import run_layers
from idp_tutorial.pretraining import PretrainConfig, held_out_loss, mask_tokens, mlm_loss, new_model, pretrain_mlm, save_backbone, teacher_embeddings
from idp_tutorial.synthetic import make_rows
from idp_tutorial.tasks import TASKS
from idp_tutorial.text import LABEL_WORDS, draw_batch, encode_stream, prepare_text, read_lines, train_tokenizer

@pytest.fixture(autouse=True, scope='module')
def one_thread():
    n = torch.get_num_threads(); torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)

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
        assert tok.decode(ids[1:-1]).strip()==s.lower() and (ids[0],ids[-1])==(tok.bos_token_id,tok.eos_token_id) and tok.unk_token_id not in ids
    odd = 'naïve 北京 🙂 ﬁ'; assert tok.decode(tok(odd).input_ids[1:-1]).strip()=='naïve 北京 🙂 fi' and tok.unk_token_id not in tok(odd).input_ids # NFKC, bytes
    a,b = (tok(s, add_special_tokens=False).input_ids for s in ('a cold beer','the soup'))
    assert tok('a cold beer', 'the soup').input_ids==[0,*a,2,2,*b,2]
    assert [tok.bos_token_id,tok.pad_token_id,tok.eos_token_id,tok.unk_token_id,tok.mask_token_id]==[0,1,2,3,4] and tok.cls_token_id==0 and tok.sep_token_id==2

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
    was = ids('it was'); assert ids('it was <mask>')==ids('it was<mask>')==[*was, tok.mask_token_id]
    assert ids('it was <mask> .')==[*was, tok.mask_token_id, *ids(' .')]

# --- text

def test_reading_and_streaming(tok, tmp_path):
    (tmp_path/'a.txt').write_text('one beer\n\n  two beers \n'); (tmp_path/'b.txt.xz').write_bytes(lzma.compress(b'a third\n'))
    assert list(read_lines(tmp_path/'a.txt', tmp_path/'b.txt.xz'))==['one beer','two beers','a third']
    with pytest.raises(FileNotFoundError, match='no text file at .*one document a line'): list(read_lines(tmp_path/'c.txt'))
    s = encode_stream(['one beer','two beers']*600, tok) # more than one chunk
    assert s.dtype==np.uint16 and (s==tok.eos_token_id).sum()==1200 and s[:8].tolist()==s[len(s)//2:][:8].tolist()
    assert tok.decode(s[:len(s)//600]).split()=='one beer</s> two beers</s>'.split() and len(encode_stream([], tok))==0

def test_windows(stream):
    def draw(seed, **kw): return draw_batch(stream, 2048, np.random.default_rng(seed), **kw)
    x = draw(0, lengths=(64,), p=(1.,))
    assert x.shape==(32,64) and (x[:,0]==0).all() and x.dtype==torch.int64 and torch.equal(x, draw(0, lengths=(64,), p=(1.,)))
    assert {draw(i).shape[1] for i in range(60)}=={32,64,128,256} and all(2048-256<draw(i).numel()<=2048 for i in range(20))
    text = stream.tolist(); row = x[3,1:].tolist()
    assert any(text[i:i+63]==row for i in range(len(text)))
    assert draw_batch(stream[:20], 2048, np.random.default_rng(0)).shape[1]==20 # a short stream is one window

def test_prepared_once(lines, tmp_path):
    (tmp_path/'t.txt').write_text('\n'.join(lines))
    tok,s = prepare_text([tmp_path/'t.txt'], tmp_path/'out', 700); (tmp_path/'t.txt').unlink()
    tok2,s2 = prepare_text([tmp_path/'t.txt'], tmp_path/'out', 700) # found there
    assert np.array_equal(s, s2) and tok.get_vocab()==tok2.get_vocab() and (s==2).sum()==len(lines) and not (tmp_path/'out/stream.tmp').exists()

# --- masks and loss

def test_eighty_ten_ten():
    V,rng = 700,np.random.default_rng(0)
    ids = torch.from_numpy(rng.integers(0, V, (400,500))); keep = ids.clone()
    seen,rows,target = mask_tokens(ids, 4, V, rng)
    assert torch.equal(ids, keep) and torch.equal(target, ids.flatten()[rows]) and target.min()>=5 # special tokens are never asked for
    x = seen.flatten()[rows]; changed = (seen!=ids).flatten()
    changed[rows] = False; assert not changed.any()
    n = (ids>=5).sum().item(); assert len(rows)/n==pytest.approx(.15, abs=.005)
    masked,kept = (x==4).float().mean().item(),(x==target).float().mean().item()
    assert masked==pytest.approx(.8, abs=.01) and kept==pytest.approx(.1, abs=.01) and x[x!=4].min()>=5
    assert len(mask_tokens(ids[:2], 4, V, rng, p=0.)[1])==0

def test_loss_is_hugging_faces(stream, tok):
    torch.manual_seed(0); model = new_model(len(tok), 32, 2); rng = np.random.default_rng(0)
    for p in model.parameters():
        if p.dim()>1: torch.nn.init.normal_(p, std=.2)
    ids = draw_batch(stream, 1024, rng); seen,rows,target = mask_tokens(ids, 4, len(tok), rng)
    labels = torch.full_like(ids.flatten(), -100); labels[rows] = target
    theirs = model(input_ids=seen, labels=labels.view_as(ids))
    loss,acc = mlm_loss(model, seen, rows, target)
    torch.testing.assert_close(loss, theirs.loss)
    assert acc==(theirs.logits.flatten(0, 1)[rows].argmax(-1)==target).float().mean()

def test_held_out_loss_repeats_and_changes_nothing(stream, tok):
    model = new_model(len(tok), 32, 1).train(); before,state = held_out_loss(model, stream[-2000:], 4, 2),torch.get_rng_state()
    assert held_out_loss(model, stream[-2000:], 4, 2)==before and model.training and torch.equal(state, torch.get_rng_state())
    assert before[0]==pytest.approx(np.log(len(tok)), abs=.1) # nothing is learnt yet

# --- the run

CFG = PretrainConfig(d=32, n_layers=1, steps=12, tokens=256, lr=3e-3, warmup=4, held_out=1000)
class Kill(Exception): pass
def quiet(line): pass
def timeless(log): return [{k:v for k,v in r.items() if k!='tokens_per_s'} for r in log]

@pytest.fixture(scope='module')
def whole(stream, tok): return pretrain_mlm(stream, tok, CFG, every=3, say=quiet)

@pytest.mark.parametrize('when,step', [('said',6), ('said',12), ('writing',6)])
def test_a_killed_run_goes_on_as_if_nothing_had_been(when, step, whole, stream, tok, tmp_path, monkeypatch):
    def stop(line):
        if when=='said' and line.startswith(f'step {step}/'): raise Kill # what is said comes before what is kept
    real = torch.save
    def half(o, f):
        real(o, f)
        if when=='writing' and o['step']==step: f.write_bytes(f.read_bytes()[:1000]); raise Kill
    monkeypatch.setattr(torch, 'save', half)
    with pytest.raises(Kill): pretrain_mlm(stream, tok, CFG, tmp_path, every=3, say=stop)
    monkeypatch.setattr(torch, 'save', real); torch.rand(9); said = []
    model,log = pretrain_mlm(stream, tok, CFG, tmp_path, every=3, say=said.append)
    assert said[0].startswith(f'step {step}/') and len(said)==(12-step)//3+1
    assert timeless(log)==timeless(whole[1]) and all(torch.equal(a, b) for a,b in zip(model.parameters(), whole[0].parameters())) and not model.training
    assert [json.loads(l) for l in (tmp_path/'log.jsonl').read_text().splitlines()]==log
    said.clear(); again,log = pretrain_mlm(stream, tok, CFG, tmp_path, every=3, say=said.append) # finished: nothing left to do
    assert not said and all(torch.equal(a, b) for a,b in zip(model.parameters(), again.parameters()))

def test_a_seed_decides_everything(whole, stream, tok):
    torch.rand(3); _,log = pretrain_mlm(stream, tok, CFG, every=3, say=quiet); assert timeless(log)==timeless(whole[1])
    _,log = pretrain_mlm(stream, tok, replace(CFG, seed=1), every=3, say=quiet); assert log[0]['loss']!=whole[1][0]['loss']

def test_held_out_text_is_not_trained_on(stream, tok, monkeypatch):
    sizes,real = [],pretraining.draw_batch
    monkeypatch.setattr(pretraining, 'draw_batch', lambda s, *a, **kw: sizes.append(len(s)) or real(s, *a, **kw))
    pretrain_mlm(stream, tok, replace(CFG, steps=2), every=9, say=quiet)
    assert sizes[:2]==[len(stream)-1000]*2 and {*sizes[2:]}=={1000}

def test_schedule():
    opt,sched = pretraining._optimizer(new_model(20, 32, 1), CFG); lrs = []
    for _ in range(12): lrs.append(opt.param_groups[0]['lr']); opt.step(); sched.step()
    assert lrs==pytest.approx([CFG.lr*min((s+1)/4, (12-s)/8) for s in range(12)]) and [g['weight_decay'] for g in opt.param_groups]==[.01,0.]

def refused(f, *words, error=ValueError):
    with pytest.raises(error) as e: f()
    assert all(w in str(e.value) for w in words), str(e.value)

def test_what_cannot_be_resumed(stream, tok, tmp_path):
    pretrain_mlm(stream, tok, replace(CFG, steps=2), tmp_path, every=2, say=quiet); ckpt = tmp_path/'checkpoint.pt'
    def go(**kw): return pretrain_mlm(stream, tok, replace(CFG, steps=2, **kw), tmp_path, say=quiet)
    refused(lambda: go(d=64, seed=3), 'is of another run', "'d': (32, 64)", "'seed': (0, 3)", 'another --out')
    whole = ckpt.read_bytes(); ckpt.write_bytes(whole[:len(whole)//2]); refused(go, f'the checkpoint {ckpt} is damaged', 'delete it')
    ckpt.write_bytes(b''); refused(go, 'is damaged')
    torch.save({'weights':torch.zeros(2)}, ckpt); refused(go, 'is damaged', 'delete it') # a file of something else
    assert asdict(CFG).keys()==torch.load((ckpt.write_bytes(whole), ckpt)[1], weights_only=True)['cfg'].keys()

def test_too_little_text(stream, tok):
    refused(lambda: pretrain_mlm(stream[:1200], tok, CFG, say=quiet), '1200 ids', 'held_out=1000', 'more text')
    refused(lambda: pretrain_mlm(stream, tok, replace(CFG, held_out=0), say=quiet), 'held_out=0')

# --- what comes out

def test_saved_folder_is_a_backbone(whole, tok, tmp_path):
    model = whole[0]; before = [p.clone() for p in model.parameters()]; save_backbone(model, tok, tmp_path/'b')
    assert all(torch.equal(a, b) and b.dtype==torch.float32 for a,b in zip(before, model.parameters())) # saving does not round the model itself
    bb = load_backbone(str(tmp_path/'b'))
    for (n,a),(m,b) in zip(model.named_parameters(), bb.model.named_parameters()): assert n==m and b.dtype==torch.float32 and torch.equal(a.half().float(), b)
    ids = torch.tensor([tok('a cold beer').input_ids]); batch = dict(ids=ids, keep=torch.ones_like(ids), types=torch.zeros_like(ids))
    torch.testing.assert_close(bb.lm_logits(run_layers(bb, batch).h), model(ids).logits, atol=1e-2, rtol=0)
    assert bb.tokenizer('a cold beer', 'the soup').input_ids==tok('a cold beer', 'the soup').input_ids and bb.has_lm_head and bb.max_tokens==256
    import hashlib
    digest,name = (tmp_path/'b/SHA256SUMS').read_text().split(); assert name=='model.safetensors' and digest==hashlib.sha256((tmp_path/'b'/name).read_bytes()).hexdigest()
    assert not list(tmp_path.rglob('*.bin'))

def test_teacher_embeddings(tok):
    teacher = load_backbone('tiny'); E = teacher_embeddings(tok, teacher, 32)
    assert E.shape==(len(tok),32) and E.isfinite().all() and E.std().item()==pytest.approx(.15, rel=1e-4) and E.mean(0).abs().max()<1e-4 and not E.requires_grad
    C = E.T@E; off = C-C.diag().diag()
    assert off.abs().max()<1e-3*C.diag().max() and (C.diag()[:-1]>=C.diag()[1:]-1e-3).all() # principal components, the largest first
    both = [i for i in range(5, len(tok)) if len(teacher.tokenizer(tok.decode([i]).strip(), add_special_tokens=False).input_ids)==1][:100]
    T = teacher.words.weight[[teacher.tokenizer(tok.decode([i]).strip(), add_special_tokens=False).input_ids[0] for i in both]]
    full = teacher_embeddings(tok, teacher, 128)[both] # distances survive where no component is dropped
    a,b = torch.pdist(full),torch.pdist(T); assert torch.corrcoef(torch.stack([a, b]))[0,1]>.999
