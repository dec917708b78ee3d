"Saved models on the hub: what is sent, what is fetched, which version; the card. The hub here is a folder."
import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from small import config, small_task

from idp_tutorial.commands.predict import idp_predict
from idp_tutorial.experiments.run import train
from idp_tutorial.methods import hub_models
from idp_tutorial.methods.build import build
from idp_tutorial.methods.descriptions import read_prompts
from idp_tutorial.methods.hub_models import folder_of, push_to_hub
from idp_tutorial.methods.model_cards import interval, model_card
from idp_tutorial.methods.prompt_files import from_pretrained, save_pretrained
from idp_tutorial.methods.registry import METHODS
from idp_tutorial.model.pretrained import load_backbone
from idp_tutorial.training.evaluation import predict

ROWS = [dict(sentence1=s) for s in ('the soup was cold .','tea')]

@pytest.fixture(scope='module')
def made(small_folder, tmp_path_factory):
    "A trained model with its record"
    folder = tmp_path_factory.mktemp('runs')/'npg'
    return folder,train(config(backbone=str(small_folder), steps=3), folder, small_task(), save_every=0)

@pytest.fixture
def hub(tmp_path, monkeypatch):
    "Repositories in folders, as HfApi and snapshot_download know them"
    calls = []
    class Api:
        def __init__(self, token=None): calls.append(('token', token))
        def create_repo(self, repo_id, private, exist_ok): calls.append(('create', repo_id, private))
        def create_branch(self, repo_id, branch, exist_ok): calls.append(('branch', branch))
        def upload_folder(self, repo_id, folder_path, revision, commit_message, allow_patterns):
            shutil.copytree(folder_path, tmp_path/'hub'/repo_id/(revision or 'main'), dirs_exist_ok=True)
            return f'https://hub/{repo_id}/{revision or "main"}'
    def snapshot(repo, revision, token, local_files_only, allow_patterns):
        calls.append(('fetch', repo, revision, token, local_files_only))
        there = tmp_path/'hub'/repo/(revision or 'main')
        if not there.is_dir():
            raise FileNotFoundError('404')
        return str(there)
    monkeypatch.setattr(hub_models, 'HfApi', Api)
    monkeypatch.setattr(hub_models, 'snapshot_download', snapshot)
    monkeypatch.setattr(hub_models, 'hub_answers', lambda: True)
    return tmp_path/'hub',calls

def test_there_and_back(made, hub, small_folder, capsys, tmp_path):
    folder,record = made
    where,calls = hub
    at = push_to_hub(folder, 'me/tickets', token='hf_x', private=True, licence='cc-by-4.0')
    assert at=='https://hub/me/tickets/main' and calls==[('token','hf_x'), ('create','me/tickets',True)]
    sent = where/'me/tickets/main'
    assert sorted(p.name for p in sent.iterdir())==['README.md','prompts.json','prompts.safetensors']
    for p in sent.iterdir(): assert str(small_folder).encode() not in p.read_bytes(), p
    want = predict(*from_pretrained(folder), ROWS)
    assert predict(*from_pretrained('me/tickets', str(small_folder), token='hf_y'), ROWS)==want
    assert calls[-1]==('fetch','me/tickets',None,'hf_y',False)
    with pytest.raises(FileNotFoundError, match='need their backbone, a folder .*say where it is'):
        from_pretrained('me/tickets')
    (tmp_path/'in').write_text('tea\n')
    idp_predict(model='me/tickets', texts=str(tmp_path/'in'), backbone=str(small_folder))
    assert json.loads(capsys.readouterr().out)['prediction']==want[1]['label']

def test_versions(made, hub, small_folder):
    folder,_ = made
    where,calls = hub
    push_to_hub(folder, 'me/tickets', revision='v2')
    assert ('branch','v2') in calls
    for name,how in (('me/tickets',dict(revision='v2')), ('me/tickets@v2',{})):
        from_pretrained(name, str(small_folder), **how)
        assert calls[-1][:3]==('fetch','me/tickets','v2')
    with pytest.raises(FileNotFoundError, match='there is no such folder, and the hub does not give a repository'):
        from_pretrained('me/tickets')
    with pytest.raises(ValueError, match='only a repository of the hub has revisions'):
        from_pretrained(folder, revision='v2')

def test_saved_and_sent_in_one_call(hub, small_folder, tmp_path):
    cfg,task = config(backbone=str(small_folder), method='prompt-tuning'),small_task()
    save_pretrained(build(cfg, load_backbone(cfg.backbone), task), tmp_path/'m', task, cfg,
        push_to_hub='me/it', token='t')
    assert ('token','t') in hub[1] and (hub[0]/'me/it/main/prompts.safetensors').is_file()

def test_without_the_hub_its_cache_is_asked(made, hub, monkeypatch, small_folder):
    push_to_hub(made[0], 'me/tickets')
    monkeypatch.setattr(hub_models, 'hub_answers', lambda: False)
    assert folder_of('me/tickets') and hub[1][-1][-1] is True
    with pytest.raises(FileNotFoundError, match='no prompts.safetensors in me/other: .*cannot be reached'):
        folder_of('me/other')
    for name in ('nowhere','a/b/c','/gone/away','..'): assert folder_of(name)==Path(name) # never asked

def test_a_damaged_model_is_not_sent(made, hub, tmp_path):
    shutil.copytree(made[0], tmp_path/'bad')
    data = bytearray((tmp_path/'bad/prompts.safetensors').read_bytes())
    data[-3] ^= 1
    (tmp_path/'bad/prompts.safetensors').write_bytes(data)
    with pytest.raises(ValueError, match='is damaged'): push_to_hub(tmp_path/'bad', 'me/bad')
    shutil.copytree(Path(__file__).parents[1]/'golden/saved-0.1.0', tmp_path/'old')
    with pytest.raises(ValueError, match='saved by version 0.1.0: load it and save it again'):
        push_to_hub(tmp_path/'old', 'me/old')
    assert not hub[1]

# --- the card

def test_a_card_says_what_the_record_says(made):
    folder,record = made
    card = ModelCard.load(folder/'README.md')
    (result,) = card.data.eval_results
    assert result.metric_value==round(record['score'], 2) and result.metric_type==record['metric']
    assert card.data.library_name=='idp_tutorial' and not card.data.get('license') and card.data.base_model is None
    low,high = interval(record['score'], record['sizes']['test'])
    for words in (f"accuracy {record['score']:.1f} | {low:.1f} to {high:.1f}", '`negative`, `positive`',
        'No controls were recorded', 'has chosen none', 'W₂', METHODS['lpt-npg'].paper, 'from_pretrained(',
        read_prompts(folder)[0]['backbone']['digests']['float32'], f"{sum(record['params'].values()):,} trained"):
        assert words in card.text, words

def test_controls_a_licence_and_a_backbone_of_the_hub(made):
    folder,record = made
    about,_ = read_prompts(folder)
    about['backbone'] |= dict(name='minilm', local=False, revision='c0ffee')
    bare = {**record, 'method':'head-only', 'score':51.}
    card = model_card(about, record, [bare], 'me/x', 'apache-2.0')
    assert card.data.base_model=='sentence-transformers/all-MiniLM-L6-v2' and card.data.license=='apache-2.0'
    assert '| head-only | accuracy 51.0 |' in card.text and 'No controls' not in card.text
    assert 'revision `c0ffee`' in card.text
    assert "from_pretrained('me/x')" in card.text

@pytest.mark.parametrize('method', METHODS)
def test_every_method_and_kind_of_task_has_a_card(method, small_folder, tmp_path):
    name = 'similarity' if len(method)%2 and method!='efl' else 'sentiment'
    cfg,task = config(backbone=str(small_folder), method=method, task=name),small_task(name)
    save_pretrained(build(cfg, load_backbone(cfg.backbone), task), tmp_path, task, cfg)
    text = (tmp_path/'README.md').read_text()
    assert 'nothing is known of its quality' in text and METHODS[method].paper in text and str(small_folder) not in text

def test_a_readme_of_somebody_else_stays(small_folder, tmp_path):
    (tmp_path/'README.md').write_text('# My project\n')
    cfg,task = config(backbone=str(small_folder)),small_task()
    model = build(cfg, load_backbone(cfg.backbone), task)
    save_pretrained(model, tmp_path, task, cfg)
    assert (tmp_path/'README.md').read_text()=='# My project\n'
    (tmp_path/'README.md').unlink()
    for seed in (0,1): save_pretrained(model, tmp_path, task, config(backbone=str(small_folder), seed=seed))
    assert 'seed 1' in (tmp_path/'README.md').read_text()
