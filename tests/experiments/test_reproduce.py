"Every table expands; a part of one runs, goes on, and stands beside the paper."
import shlex
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
from small import backbone, config, model_of, small_task

from idp_tutorial.analysis import figures
from idp_tutorial.analysis.figures import FIGURES
from idp_tutorial.commands.command_line import parser
from idp_tutorial.commands.reproduce import idp_reproduce
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.experiments import reproduce as R
from idp_tutorial.experiments.published_scores import published_tables

TABLES = published_tables()


GRIDS = [r.table for r in TABLES.itertuples() if r.command.startswith('idp_reproduce')
    and r.kind not in ('data','analysis') and r.table not in R.DRAWN]


@pytest.fixture
def small_tasks(monkeypatch):
    "Every task has forty rows"
    def load_task(name, *how):
        task = TASKS[name]
        def rows(n):
            labels = [*range(len(task.labels))] or [0., 2.5, 5.]
            return [dict(sentence1=f'a film {i}', sentence2='it was good', label=labels[i%len(labels)])
                for i in range(n)]
        return replace(task, splits=dict(train=rows(24), validation=rows(8), test=rows(8)))
    monkeypatch.setattr(R, 'load_task', load_task)


@pytest.mark.parametrize('table', GRIDS)
def test_a_table_expands(table):
    small,full = R.plan_of(table),R.plan_of(table, 'full')
    assert 0<len(small)<=len(full) and len({c.task for c in small})<=4 and len({c.backbone for c in small})==1
    assert {c.method for c in small}<={c.method for c in full}


@pytest.mark.parametrize('table', ['idpg-7','lpt-10','id-spam-3','id-spam-16'])
def test_a_table_runs_from_end_to_end(table, small_tasks, small_folder, tmp_path):
    "One task, one method in all its variants, one step on the smallest of models"
    small = R.plan_of(table)
    tasks = {c.task for c in small}
    task = next(t for t in ('sst2','rte','mrpc') if t in tasks)
    methods = [*dict.fromkeys(c.method for c in small if c.method not in ('efl','fine-tuning'))][:1]
    found = R.reproduce(table, backbone=str(small_folder), methods=methods, tasks=[task], seeds=1, rates=(1e-3,),
        steps=1, out=tmp_path, say=list).dropna(subset='our mean')
    assert len(found) and found['our mean'].between(-100, 100).all() and (tmp_path/f'{table}-small.jsonl').is_file()


@pytest.mark.parametrize('row', [r for r in TABLES.itertuples() if r.table not in GRIDS], ids=lambda r: r.table)
def test_another_command_can_be_given_as_it_stands(row):
    "Its options exist, and a figure of its own is one that can be measured"
    name,*argv = shlex.split(row.command)
    parser(getattr(import_module(f"idp_tutorial.commands.{name.removeprefix('idp_')}"), name)).parse_args(argv)
    assert name!='idp_reproduce' or row.table in FIGURES or R.DRAWN[row.table]==row.command.split()[2]
    if row.table not in R.DRAWN:
        with pytest.raises(ValueError, match='is no table of scores'):
            R.plan_of(row.table)


@pytest.mark.parametrize('name', FIGURES)
def test_a_figure_is_numbers(name, monkeypatch, small_folder, tmp_path, capsys):
    "On the smallest of models; a second start runs nothing"
    bundled = dict(subj='questions', stsb='similarity', mnli='entailment', mrpc='entailment')
    monkeypatch.setattr(figures, 'load_task', lambda t, *how: small_task(bundled[t]))
    for _ in range(2):
        idp_reproduce(table=name, backbone=str(small_folder), out=str(tmp_path), steps=1, seeds=1)
        monkeypatch.setattr(figures, '_measured', None)
    lines = (tmp_path/f'{name}.jsonl').read_text().splitlines()
    assert len(lines)==len(FIGURES[name][1]) and capsys.readouterr().out.count('seed 0')==2*len(lines)


@pytest.mark.parametrize('kw', [dict(data='no-tasks'), dict(backbone='no-model')], ids=str)
def test_nothing_is_left_of_a_table_that_cannot_run(kw, request, tmp_path):
    if 'data' not in kw:
        request.getfixturevalue('small_tasks')
    kw = {what: str(tmp_path/name) for what,name in kw.items()}
    with pytest.raises((ValueError,OSError), match='no-'):
        R.reproduce('lpt-2', **{'backbone':'tiny', **kw}, out=tmp_path/'runs')
    assert not (tmp_path/'runs').exists()

def test_a_ranking_finds_what_is_alike():
    "Pairs of equal sentences come first"
    task,bb = small_task('similarity'),backbone()
    texts = [r['sentence1'] for r in task.splits['train'][:8]]
    rows = [dict(sentence1=t, sentence2=t, label=5.) for t in texts[:4]]
    rows += [dict(sentence1=t, sentence2='no', label=0.) for t in texts[4:]]
    model = model_of('head-only', bb, task)
    assert figures.similar_on_top(model, task, rows, 4, config())==100.
    assert figures.similar_on_top(model, task, rows, 8, config())==50.


def test_what_the_papers_say_is_in_the_config():
    few = {c.method: c for c in R.plan_of('lpt-2', 'full')}
    assert (few['lpt'].t,few['lpt-npg'].t,few['lpt-mppg'].t,few['lpt'].head,few['lora'].head)==(20, 5, 10,
        'verbalizer','classification')
    assert {c.m for c in R.plan_of('id-spam-2') if c.method=='lpt-npg'}=={256}
    idpg = R.plan_of('idpg-3', 'full')
    assert {c.k for c in idpg}=={100, 500, 1000} and all(c.plain_draw and c.schedule=='constant' for c in idpg)
    assert {c.way for c in idpg if c.method=='p-tuning-v2'}=={'add'}
    layers = {c.layer for c in R.plan_of('lpt-10') if c.method=='lpt-npg'}
    assert layers=={round(n*30/24) for n in (6, 12, 18)} # of smollm2's 30
    sml = {(c.share,c.m,c.reads) for c in R.plan_of('idpg-6')}
    assert ('S',256,'layer0') in sml and ('M',16,'previous') in sml and len(sml)==8


def test_a_cell_stands_beside_its_own_variant():
    "A record of 16 numbers is none of 256, and K = 100 none of K = 500"
    line = dict(method='m-idpg-phm', task='sst2', k=1000, score=50., backbone='minilm', share='M', m=16,
        reads='previous')
    ours = R.side_by_side([line], 'idpg-6').dropna(subset='our mean')
    assert [*ours.method]==['M-IDPG-PHM M version m=16'] and 'previous' in ours.setting.iloc[0]
    few = R.side_by_side([dict(line, k=500)], 'idpg-3').dropna(subset='our mean')
    assert [*few.setting]==['K=500']


def test_a_part_goes_on_where_it_stopped(monkeypatch, tmp_path):
    ran = []
    def with_seeds(cfg, task, how, seeds, old, out, say, rates=()):
        ran.append(cfg)
        same = dict(method=cfg.method, task=cfg.task, k=cfg.k, backbone=cfg.backbone)
        return [dict(same, seed=s, score=60.) for s in range(seeds)]
    monkeypatch.setattr(R, 'with_seeds', with_seeds)
    monkeypatch.setattr(R, 'load_task', lambda *a: SimpleNamespace(splits=dict(train=[])))
    said = []
    t = R.reproduce('lpt-2', methods=['lpt-npg'], tasks=['sst2'], out=tmp_path, say=said.append)
    row = t.dropna(subset='our mean').iloc[0]
    assert (row['mean'],row['our mean'],row.runs)==(92.7, 60., 2) and len(ran)==2 and '0 minutes left' in said[-1]
    assert ran[1]==replace(ran[0], draw=1)
    with pytest.raises(ValueError, match='nothing of lpt-2 is left'):
        R.reproduce('lpt-2', methods=['smop'], out=tmp_path)
    with pytest.raises(ValueError, match="did you mean 'lpt-2'"):
        R.plan_of('lpt2')


def test_a_grid_from_the_command_line_and_its_edge(monkeypatch):
    "Each method tries the same rates; a choice at the edge is recorded as one"
    from idp_tutorial.commands.grids import floats
    from idp_tutorial.config import RunConfig
    from idp_tutorial.experiments import comparison
    best = {}
    monkeypatch.setattr(comparison, 'trained', lambda c, task: (c, dict(validation=-abs(c.lr-best['lr']))))
    monkeypatch.setattr(comparison, 'record_of', lambda c, log, task, cfg, test: dict(lr=cfg.lr))
    grid = floats('1e-3,3e-3,1e-2', 'rates')
    for best['lr'],edge in ((1e-2, True), (3e-3, False)):
        r = comparison.tune(RunConfig('lpt'), None, grid)
        assert (r['lr'],r['edge'],[lr for lr,_ in r['tried']])==(best['lr'], edge, [*grid])
    with pytest.raises(ValueError, match='such as 1e-3,3e-3'):
        floats('1e-3;3e-3', 'rates')


def test_a_frozen_set_is_not_drawn_twice(tmp_path):
    (tmp_path/'sst2/k100').mkdir(parents=True)
    draws = {t: {c.draw for c in R.plan_of('lpt-2', data=str(tmp_path)) if c.task==t} for t in ('sst2','trec')}
    assert draws==dict(sst2={0}, trec={0, 1})


def test_a_layer_is_at_the_same_share_of_any_depth(tmp_path):
    (tmp_path/'config.json').write_text('{"n_layer": 12}')
    assert R._here(dict(layer=12), str(tmp_path))==R._here(dict(layer=12), 'bb', 12)==dict(layer=6)
    assert [R._here(dict(layer=12), name)['layer'] for name in ('tiny-gpt2','roberta-large')]==[4,12]
    cells = R.cells_of('lpt-10')
    c = cells[[f.get('layer') not in (None, 0) for f in cells.fields]].iloc[0]
    for depth,runs in ((12, 1), (6, 0)): # a record says how deep its model was
        r = dict(method=c.ours, task=c['name'], backbone='bb', n_layers=12, score=50., status='done')
        r |= R._here(c.fields, 'bb', depth) | dict(k=R.shots_of(c.setting))
        found = R.side_by_side([r], 'lpt-10').runs
        assert found.notna()[c.name]==bool(runs)


@pytest.mark.parametrize('kw', [dict(seeds=0), dict(steps=-1), dict(methods=['lpt','lpt-ngp'])], ids=str)
def test_no_number_and_no_name_becomes_another(kw, tmp_path):
    with pytest.raises(ValueError, match='at least 1|did you mean'):
        R.reproduce('lpt-2', backbone='tiny', **kw, out=tmp_path/'runs')
    assert not (tmp_path/'runs').exists()


def test_a_figure_is_drawn_from_what_its_config_says(monkeypatch, small_folder):
    asked = []
    monkeypatch.setattr(figures, 'load_task', lambda *how: asked.append(how) or small_task('questions'))
    base = config(backbone=str(small_folder), k=8, draw=3, plain_draw=True, lr=1e-4, steps=1)
    r, = figures.figure('lpt-f6', base, 1)
    assert asked==[('subj', None, 8, 3, False)] and r['lr']==1e-4
