"A saved model: one file, every byte checked; nothing is opened that the user did not name; other versions."
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small import backbone, config, small_task

from idp_tutorial import records
from idp_tutorial.methods import glove
from idp_tutorial.methods.build import build, carry
from idp_tutorial.methods.descriptions import check_backbone, describe_backbone, read_prompts
from idp_tutorial.methods.prompt_files import from_pretrained, save_pretrained
from idp_tutorial.model.backbone import fingerprint, identity
from idp_tutorial.model.pretrained import cast_weights, load_backbone
from idp_tutorial.tensor_files import pack, save_tensors, unpack
from idp_tutorial.training.evaluation import predict

OLD = Path(__file__).parents[1]/'golden/saved-0.1.0'
ROWS = [dict(sentence1=s) for s in ('the soup was cold .','tea')]

@pytest.fixture
def saved(small_folder, tmp_path):
    "Folder, answers, config"
    cfg,task = config(backbone=str(small_folder), t=2, m=4),small_task()
    model = build(cfg, load_backbone(cfg.backbone), task)
    save_pretrained(model, tmp_path/'m', task, cfg)
    return tmp_path/'m',predict(model, task, cfg, ROWS),cfg

def rewrite(folder, **new):
    "Another description with a digest that is right: what an attacker, or a newer version, writes"
    about,tensors = unpack((folder/'prompts.safetensors').read_bytes())
    for k,v in new.items(): about[k] = {**about[k], **v} if isinstance(v, dict) else v
    save_tensors(folder/'prompts.safetensors', tensors, about)

def test_every_byte_is_checked(saved, monkeypatch):
    folder,*_ = saved
    monkeypatch.setattr('idp_tutorial.methods.prompt_files.build', lambda *a: pytest.fail('it was used'))
    file = folder/'prompts.safetensors'
    good = file.read_bytes()
    places = [*range(0, 4000, 7), *range(4000, len(good), 211), len(good)-1]
    flipped = [good[:at]+bytes([good[at]^(1<<at%8)])+good[at+1:] for at in places]
    for data in [*flipped, good[:-4], good[:9], b'', good+b'0']:
        file.write_bytes(data)
        with pytest.raises(ValueError, match='is damaged') as e: from_pretrained(folder)
        assert str(e.value).count('\n')==0

def test_the_view_is_neither_needed_nor_trusted(saved):
    folder,want,cfg = saved
    assert json.loads((folder/'prompts.json').read_text())['cfg']['method']=='lpt-npg'
    for text in ('{"cfg":{"method":"lora"}}', '', None):
        (folder/'prompts.json').unlink() if text is None else (folder/'prompts.json').write_text(text)
        model,task,c = from_pretrained(folder)
        assert predict(model, task, c, ROWS)==want

def test_overwriting_leaves_the_old_or_the_new_one(saved, monkeypatch):
    "Killed before any of its file operations"
    folder,want,cfg = saved
    other = replace(cfg, method='lpt', seed=3)
    model = build(other, load_backbone(cfg.backbone), small_task())
    new = predict(model, small_task(), other, ROWS)
    seen = set()
    for kill_at in (0, 1, 2, 3, 9):
        done,plain = [],dict(replace=os.replace, write_bytes=Path.write_bytes, fsync=os.fsync)
        def killed(name):
            def f(*a, **k):
                done.append(name)
                if len(done)>kill_at: raise KeyboardInterrupt
                return plain[name](*a, **k)
            return f
        with monkeypatch.context() as m:
            m.setattr(os, 'replace', killed('replace'))
            m.setattr(os, 'fsync', killed('fsync'))
            m.setattr(Path, 'write_bytes', killed('write_bytes'))
            try: save_pretrained(model, folder, small_task(), other)
            except KeyboardInterrupt: pass
        trained,task,c = from_pretrained(folder)
        said = predict(trained, task, c, ROWS)
        assert said in (want, new)
        seen.add(said==new)
    assert seen=={False, True}

def test_the_noise_of_unknown_texts_goes_along(small_folder, tmp_path):
    cfg,task = config(backbone=str(small_folder), method='m-idpg-phm-glove', glove_noise=.6, t=2, m=4),small_task()
    unknown = [dict(sentence1='!?'), *ROWS]
    def said(**kw):
        model = build(c := replace(cfg, **kw), load_backbone(cfg.backbone), task)
        save_pretrained(model, folder := tmp_path/str(kw), task, c)
        return predict(model, task, c, unknown),predict(*from_pretrained(folder), unknown)
    (noise,again),(zero,without) = said(),said(glove_noise=0.)
    assert noise==again and zero==without and noise[0]!=zero[0] and noise[1:]==zero[1:]

def test_a_file_opens_no_path_that_it_names(saved, monkeypatch, tmp_path):
    folder,want,_ = saved
    monkeypatch.setattr(glove, 'load_glove', lambda path, *a: pytest.fail(f'opened {path}'))
    (tmp_path/'secret').write_text('password 1 2 3')
    rewrite(folder, cfg=dict(glove=str(tmp_path/'secret'), start=str(tmp_path), data=str(tmp_path),
        cache_dir=str(tmp_path)))
    model,task,c = from_pretrained(folder)
    assert predict(model, task, c, ROWS)==want and (c.start, c.data, c.cache_dir, c.glove)==(None, None, None, 'secret')
    opened = []
    monkeypatch.setattr('idp_tutorial.methods.registry.load_glove', lambda path, tok, **kw: opened.append(path) or 1/0)
    rewrite(folder, cfg=dict(method='m-idpg-phm-glove'))
    with pytest.raises(ZeroDivisionError): from_pretrained(folder)
    assert opened==[None] # the bundled ones

def test_custom_code_of_a_backbone_is_not_run_and_nobody_is_asked(saved, small_folder, tmp_path, monkeypatch):
    folder,*_ = saved
    shutil.copytree(small_folder, tmp_path/'evil')
    about = json.loads((tmp_path/'evil/config.json').read_text())
    (tmp_path/'evil/code.py').write_text(f"open({str(tmp_path/'ran')!r}, 'w')\n")
    (tmp_path/'evil/config.json').write_text(json.dumps({**about, 'model_type':'own',
        'auto_map':{'AutoConfig':'code.C', 'AutoModel':'code.M', 'AutoModelForMaskedLM':'code.M'}}))
    rewrite(folder, cfg=dict(backbone=str(tmp_path/'evil')))
    monkeypatch.setattr('builtins.input', lambda *a: pytest.fail('it asked'))
    with pytest.raises(ValueError): from_pretrained(folder, tmp_path/'evil')
    from_pretrained(folder) # the weights that the digest knows, whatever path the file says
    assert not (tmp_path/'ran').exists()

def test_a_field_of_another_type_is_named(saved):
    folder,*_ = saved
    good = (folder/'prompts.safetensors').read_bytes()
    wrong = dict(t=None, m=1.5, prompt_dropout=None, glove=8, method=['lpt'], standardise='yes', seed=True)
    for field,value in wrong.items():
        (folder/'prompts.safetensors').write_bytes(good)
        rewrite(folder, cfg={field:value})
        with pytest.raises(ValueError, match=rf' says {field}=.*, where RunConfig takes .*save'):
            from_pretrained(folder)

def test_a_description_of_no_task_or_no_weights_is_named(saved):
    folder,*_ = saved
    good = (folder/'prompts.safetensors').read_bytes()
    for new,words in ((dict(task=dict(columns=[])), 'says columns='), (dict(task=dict(columns=[1,2])), 'says columns='),
            (dict(backbone=None), 'which weights'), (dict(backbone=dict(digests={})), 'which weights')):
        (folder/'prompts.safetensors').write_bytes(good)
        rewrite(folder, **new)
        with pytest.raises(ValueError, match=words):
            from_pretrained(folder)

def test_newer_versions_are_named(saved):
    folder,*_ = saved
    rewrite(folder, version='7.1', cfg=dict(telepathy=3))
    with pytest.raises(ValueError, match=r'idp_tutorial 7.1, and says telepathy=3, which version .* does not know'):
        from_pretrained(folder)
    rewrite(folder, format=8)
    with pytest.raises(ValueError, match='has format 8 of idp_tutorial 7.1, and version .* reads 1 and 2'):
        from_pretrained(folder)

@pytest.mark.parametrize('wrong', [dict(cfg=None), dict(task=[]), dict(task={'labels':3, 'x':1})], ids=str)
def test_nonsense_with_a_right_digest(saved, wrong):
    folder,*_ = saved
    about,tensors = unpack((folder/'prompts.safetensors').read_bytes())
    save_tensors(folder/'prompts.safetensors', tensors, {**about, **wrong})
    with pytest.raises(ValueError): from_pretrained(folder)

def test_a_header_that_lies():
    data = pack({'p':torch.ones(2)}, {})
    with pytest.raises(ValueError, match='is damaged'): unpack(b'\xff'*8+data[8:])

# --- which backbone

def test_no_path_of_this_machine_is_saved_and_its_cache_knows_it(saved, small_folder, tmp_path, monkeypatch, places):
    folder,want,cfg = saved
    monkeypatch.chdir(small_folder.parent)
    relative = replace(cfg, backbone=small_folder.name)
    save_pretrained(build(relative, load_backbone(relative.backbone), small_task()), folder, small_task(), relative)
    for p in folder.iterdir():
        assert str(small_folder.parent).encode() not in p.read_bytes(), p
    assert read_prompts(folder)[0]['cfg']['backbone']==small_folder.name
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, tmp_path/'copied')
    model,task,c = from_pretrained(tmp_path/'copied')
    assert predict(model, task, c, ROWS)==want and c.backbone==str(small_folder)
    shutil.copytree(small_folder, tmp_path/'moved')
    for note in places.iterdir():
        note.unlink()
    with pytest.raises(FileNotFoundError, match=f"backbone, a folder '{small_folder.name}' .*--backbone"):
        from_pretrained(folder)
    rewrite(folder, cfg=dict(backbone=str(small_folder))) # as earlier models have it
    assert predict(*from_pretrained(folder), ROWS)==want
    model,task,c = from_pretrained(folder, 'moved')
    assert predict(model, task, c, ROWS)==want
    with pytest.raises(ValueError, match='belong to another backbone'): from_pretrained(folder, 'tiny')
    rewrite(folder, backbone=dict(local=False), cfg=dict(backbone='nobody/has-this'))
    with pytest.raises(ValueError, match="no backbone 'nobody/has-this'.*say where it is"): from_pretrained(folder)

def in_dtype(dtype):
    bb = backbone()
    cast_weights(bb.model, dtype)
    return bb

def test_weights_are_the_same_in_any_attention_and_dtype():
    a = backbone()
    saved = describe_backbone(a, 'a')
    for other in (backbone(attn='eager'), in_dtype(torch.bfloat16), in_dtype(torch.float16)):
        check_backbone(saved, other, 'these', 'a')
    half = describe_backbone(in_dtype(torch.bfloat16), 'a') # and the other way round
    check_backbone(half, a, 'these', 'a')
    assert identity(a)==identity(backbone(attn='eager'))!=identity(backbone('bert'))
    with torch.no_grad(): a.words.weight[5,5] += 1e-6
    for there in (saved, half): # bfloat16 does not see so little
        if there is half: check_backbone(there, a, 'these', 'a')
        else:
            with pytest.raises(ValueError, match='another backbone'): check_backbone(there, a, 'these', 'a')

def test_fingerprints_of_version_0_1_0_in_any_attention():
    a = backbone()
    for old in (fingerprint(a), fingerprint(backbone(attn='eager'))):
        for bb in (a, backbone(attn='eager')): check_backbone(old, bb, 'these', 'a')

# --- version 0.1.0

def test_both_files_of_version_0_1_0_are_checked(tmp_path):
    folder = tmp_path/'old'
    shutil.copytree(OLD, folder)
    assert {**read_prompts(folder)[0]}['version']=='0.1.0'
    from_pretrained(folder)
    good = {n: (folder/n).read_bytes() for n in ('prompts.json','prompts.safetensors')}
    places = [('prompts.safetensors',-1,'is damaged'), ('prompts.safetensors',30,'is damaged'),
        ('prompts.json',-9,'is damaged'), ('prompts.json',5,'no RunConfig to build')] # its description has no checksum
    for name,at,words in places:
        data = bytearray(good[name])
        data[at] ^= 1
        (folder/name).write_bytes(data)
        with pytest.raises(ValueError, match=words): from_pretrained(folder)
        (folder/name).write_bytes(good[name])
    (folder/'prompts.json').unlink()
    with pytest.raises(ValueError, match='prompts.json is none of version 0.1.0'): from_pretrained(folder)

def test_an_old_model_is_saved_in_the_new_way(tmp_path):
    shutil.copytree(OLD, tmp_path/'old')
    model,task,cfg = from_pretrained(tmp_path/'old')
    want = predict(model, task, cfg, ROWS)
    save_pretrained(model, tmp_path/'old', task, cfg)
    about,_ = read_prompts(tmp_path/'old')
    assert about['format']==2 and about['version']==records.versions()['idp_tutorial']
    assert predict(*from_pretrained(tmp_path/'old'), ROWS)==want

def test_a_damaged_first_stage_is_no_start(saved):
    folder,_,cfg = saved
    model = build(cfg, load_backbone(cfg.backbone), small_task())
    assert carry(model, folder)
    data = bytearray((folder/'prompts.safetensors').read_bytes())
    data[-1] ^= 1
    (folder/'prompts.safetensors').write_bytes(data)
    with pytest.raises(ValueError, match='is damaged'): carry(model, folder)

@pytest.mark.parametrize('method', ['probe','majority','side-network'])
def test_a_control_is_not_saved_over_a_model(method, saved):
    folder,_,cfg = saved
    before = (folder/'prompts.safetensors').read_bytes()
    control,task = replace(cfg, method=method),small_task()
    with pytest.raises(ValueError, match=f"'{method}' is a control, with no prompt to keep"):
        save_pretrained(build(control, load_backbone(cfg.backbone), task), folder, task, control)
    assert (folder/'prompts.safetensors').read_bytes()==before

@pytest.mark.parametrize('method,says', [('prompt-tuning-134',', t=134,'), ('lora','), seed'), ('lpt-npg',', t=2,')])
def test_the_card_says_how_many_vectors_are_written(method, says, saved, tmp_path):
    *_,cfg = saved
    cfg,task = replace(cfg, method=method, m=None),small_task()
    save_pretrained(build(cfg, load_backbone(cfg.backbone), task), tmp_path/method, task, cfg)
    assert says in (tmp_path/method/'README.md').read_text()
