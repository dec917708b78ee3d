"The text that bundled backbones are made from, and the folder that comes out."
import hashlib
import json

import pytest
import torch

from idp_tutorial.data.synthetic import make_rows
from idp_tutorial.files import manifest
from idp_tutorial.model.layer_loop import run_layers
from idp_tutorial.model.pretrained import load_backbone
from idp_tutorial.pretraining.bundled_backbone import corpus, save_backbone
from idp_tutorial.pretraining.language_modelling import new_model
from idp_tutorial.pretraining.text import train_tokenizer


def rows(p, *texts):
    p.parent.mkdir(parents=True, exist_ok=True)
    p.write_text('\n'.join(json.dumps(dict(sentence1=t, label=0)) for t in texts))

def test_corpus(tmp_path):
    T = tmp_path/'tasks'
    (tmp_path/'t.txt').write_text('Kept out.\nplain\nalso held\nx')
    rows(T/'a/train.jsonl', 'short one', 'long '*70, 'kept out')
    rows(T/'a/test.jsonl', 'kept out!')
    rows(T/'b/validation.jsonl', 'also held')
    rows(T/'a/k100/train.jsonl', 'short one')
    rows(T/'a/k100/validation.jsonl', 'a training row')
    rows(T/'sst2/train.jsonl', 'cut from a sentence')
    rows(T/'sst2/validation.jsonl', 'x')
    got = corpus([tmp_path/'t.txt'], T)
    assert {l: got.count(l) for l in got}=={'plain':1, 'short one':4, ('long '*70).strip():1, 'a training row':4}
    assert corpus([tmp_path/'t.txt'])==['Kept out.','plain','also held','x']
    with pytest.raises(FileNotFoundError, match='no folder of tasks'): corpus([tmp_path/'t.txt'], tmp_path/'nowhere')

def test_saved_folder_is_a_backbone(tmp_path):
    tok = train_tokenizer([r['sentence1'] for r in make_rows('sentiment', 'train', n=200)], 500)
    model = new_model(len(tok), 32, 1).eval()
    before = [p.clone() for p in model.parameters()]
    save_backbone(model, tok, tmp_path/'b')
    # saving does not round the model itself
    assert all(torch.equal(a, b) and b.dtype==torch.float32 for a,b in zip(before, model.parameters()))
    bb = load_backbone(str(tmp_path/'b'))
    for (n,a),(m,b) in zip(model.named_parameters(), bb.model.named_parameters()):
        assert n==m and b.dtype==torch.float32 and torch.equal(a.half().float(), b)
    ids = torch.tensor([tok('a cold beer').input_ids])
    batch = dict(ids=ids, keep=torch.ones_like(ids), types=torch.zeros_like(ids))
    torch.testing.assert_close(bb.lm_logits(run_layers(bb, batch).h), model(ids).logits, atol=1e-2, rtol=0)
    assert bb.tokenizer('a cold beer', 'the soup').input_ids==tok('a cold beer', 'the soup').input_ids
    assert bb.has_lm_head and bb.max_tokens==256
    known = manifest(tmp_path/'b')
    assert {*known}=={p.name for p in (tmp_path/'b').iterdir()}-{'SHA256SUMS'}
    assert all(sha256==hashlib.sha256((tmp_path/'b'/name).read_bytes()).hexdigest() for name,sha256 in known.items())
    assert not list(tmp_path.rglob('*.bin')) and bb.model.config.hidden_dropout_prob==.1

def test_a_saved_folder_says_which_file_has_changed(tmp_path):
    tok = train_tokenizer([r['sentence1'] for r in make_rows('sentiment', 'train', n=200)], 500)
    save_backbone(new_model(len(tok), 32, 1), tok, tmp_path/'b')
    for file in manifest(tmp_path/'b'):
        good = (tmp_path/'b'/file).read_bytes()
        (tmp_path/'b'/file).write_bytes(good[:-3]+bytes([good[-3]^1])+good[-2:])
        with pytest.raises(ValueError, match=f'{file} is damaged: it is not what SHA256SUMS beside it says'):
            load_backbone(str(tmp_path/'b'))
        (tmp_path/'b'/file).write_bytes(good)
    load_backbone(str(tmp_path/'b'))
