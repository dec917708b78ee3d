"Every table expands; a part of one runs, goes on, and stands beside the paper."
import shlex
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small import backbone, batch_of, config, model_of, small_task

from idp_tutorial.analysis import figures
from idp_tutorial.analysis.figures import FIGURES
from idp_tutorial.commands.command_line import parser
from idp_tutorial.commands.reproduce import idp_reproduce
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.experiments import plans as P
from idp_tutorial.experiments import reproduce as R
from idp_tutorial.experiments.conclusions import enough
from idp_tutorial.experiments.protocols import BACKBONES, FIXED_ROWS, paper_rates
from idp_tutorial.experiments.published_scores import published_scores, published_tables
from idp_tutorial.methods.build import build
from idp_tutorial.methods.controls import CONTROLS
from idp_tutorial.methods.registry import METHODS
from idp_tutorial.model.sizes import FULL_SCALE

TABLES = published_tables()


GRIDS = [r.table for r in TABLES.itertuples() if r.command.startswith(f'idp_reproduce --table {r.table} ')
    and r.kind not in ('data','analysis')]


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
    def run(say=list):
        return R.reproduce(table, backbone=str(small_folder), methods=methods, tasks=[task], seeds=1, rates=(1e-3,),
            steps=1, out=tmp_path, say=say).dropna(subset='our mean')
    found,file = run(),tmp_path/f'{table}-small.jsonl'
    assert len(found) and found['our mean'].between(-100, 100).all() and file.is_file()
    before,said = file.read_text(),[]
    run(said.append)
    assert file.read_text()==before and all('minutes left' in s for s in said) # nothing is trained again


SIZES = {*FULL_SCALE, *BACKBONES.values()}


@pytest.mark.parametrize('row', [*TABLES.itertuples()], ids=lambda r: r.table)
def test_a_command_can_be_given_as_it_stands(row):
    "Its options exist, and its tasks, models and methods; what a paper did on a large model names it"
    for one in row.command.split(' && '):
        name,*argv = shlex.split(one)
        f = getattr(import_module(f"idp_tutorial.commands.{name.removeprefix('idp_')}"), name)
        o = vars(parser(f).parse_args(argv))
        assert '--backbone' in argv or o.get('scale')=='full' or o.get('published')
        assert o.get('backbone') is None or o['backbone'] in SIZES
        assert {o.get('task') or 'rte', o.get('source') or 'rte', o.get('target') or 'rte'}<={*TASKS}
        assert o.get('methods') in (None,'all') or {*o['methods'].split(',')}<={*METHODS}
        if name=='idp_sweep':
            assert '--task' in argv and o['task'] in ('trec','rte','mrpc')
        if name=='idp_transfer':
            assert {'--source','--target'}<={*argv} and o['source']!=o['target']
            assert (o['methods']=='lpt-npg')==('--m 256' in one) and o['t']==10
        if name=='idp_reproduce' and o['table'] not in FIGURES:
            part = [o[what] and o[what].split(',') for what in ('methods','tasks')]
            plan = R.plan_of(o['table'], o['scale'], o['backbone'], None, *part)
            assert bool(o['glove'])==('m-idpg-phm-glove' in {c.method for c in plan})
        if name=='idp_bench' and row.table in ('lpt-5','lpt-f1'):
            assert o['length']==256


def test_a_transfer_table_has_a_command_for_each_of_its_pairs():
    for table in ('id-spam-6','id-spam-11'):
        command = TABLES.set_index('table').command[table]
        printed = {tuple(pair.split('->')) for pair in published_scores(table).task}
        pairs = {tuple(P.TASK_NAMES.get(t, t.lower()) for t in pair) for pair in printed}
        said = [shlex.split(one) for one in command.split(' && ')]
        assert {(a[a.index('--source')+1], a[a.index('--target')+1]) for a in said}==pairs and len(said)==2*len(pairs)


@pytest.mark.parametrize('row', [r for r in TABLES.itertuples() if r.table not in [*GRIDS, *R.DRAWN]],
    ids=lambda r: r.table)
def test_what_is_no_table_of_scores_is_not_planned(row):
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
    cosines,similar = figures.pair_cosines(model, task, rows, config()),torch.arange(8)<4
    assert [figures.similar_on_top(cosines, similar, n) for n in (4,8)]==[100., 50.]


def test_what_other_pairs_would_move():
    "The error of a hundred answers, twice, where two rankings have nothing to do with each other; none for one"
    g = torch.Generator().manual_seed(1)
    a,b = torch.rand(2, 1000, generator=g)
    similar = torch.rand(1000, generator=g)<.4
    assert figures.bootstrap_error(a, a, similar, 100)==0
    assert abs(figures.bootstrap_error(a, b, similar, 100)-100*(2*.4*.6/100)**.5)<1
    assert figures.bootstrap_error(a, b, similar, 100)==figures.bootstrap_error(a, b, similar, 100)


def only(table, method, scale='full', **said):
    "The runs of a method, each once"
    runs = [c for c in R.plan_of(table, scale) if c.method==method]
    return [c for c in runs if all(getattr(c, k)==v for k,v in said.items())]


def values(runs, *names):
    return {tuple(getattr(c, n) for n in names) for c in runs}


def test_idpg_trains_as_its_appendix_and_its_code_say():
    "Table 4 and A.1.1: 10 or 50 epochs, fixed rate; few-shot 313, 1,563, 3,125 steps, from an MNLI model"
    by = {(c.method,c.task): c for c in R.plan_of('idpg-1', 'full')}
    length = {t: (by['m-idpg-phm',t].epochs, by['m-idpg-phm',t].batch_size) for t in P.FULL}
    assert length=={t: (10.,32) if t in ('sst2','qnli','qqp') else (50.,16) for t in P.FULL}
    steps = by['m-idpg-phm','rte'].in_steps(2490)
    assert (steps.steps,steps.eval_every)==(7781,156) # a look after every pass
    for table,scale in (('idpg-1','full'), ('idpg-3','full'), ('idpg-1','small')):
        prompts = [c for c in R.plan_of(table, scale) if c.method not in (*CONTROLS,'fine-tuning','efl')]
        assert values(prompts, 'schedule', 'warmup', 'clip', 'beta2', 'weight_decay')=={
            ('constant', 0., float('inf'), .98, .1)}
    for m in ('fine-tuning','efl'):
        assert values(only('idpg-1', m), 'epochs', 'schedule', 'warmup')=={(10.,'linear',.06)}
    few = only('idpg-3', 'm-idpg-phm')
    assert values(few, 'k', 'steps', 'batch_size')=={(100,313,16), (500,1563,16), (1000,3125,16)}
    assert values(few, 'reads', 'backbone', 'plain_draw')=={('layer0','roberta-large-mnli',True)}
    assert values(only('idpg-1', 'm-idpg-phm'), 'reads', 'backbone')=={('previous','roberta-large')}
    assert values(only('idpg-1', 's-idpg-phm'), 'backbone')=={('roberta-large-mnli',)}
    pairs = {c.task: c.position for c in only('idpg-1', 's-idpg-phm')}
    assert pairs=={t: int(TASKS[t].pair) for t in P.FULL}
    assert values(only('idpg-1', 's-idpg-phm'), 'sentence_pass')=={('noisy',)}=={(c.sentence_pass,) for c in few}
    assert values(only('idpg-1', 's-idpg-phm', 'small'), 'sentence_pass', 'steps')=={(None,200)}
    assert values(only('idpg-3', 'p-tuning-v2'), 'way')=={('add',)}
    assert values(only('idpg-1', 'm-idpg-phm-glove'), 'glove_noise')=={(.6,)}
    assert {c.glove for c in R.plan_of('idpg-1', glove='g')}=={None, 'g'}
    sml = {(c.share,c.m,c.reads) for c in only('idpg-6', 'm-idpg-phm', 'small')}
    assert ('S',256,'layer0') in sml and ('M',16,'previous') in sml and len(sml)==8


def test_lpt_and_id_spam_train_as_they_say():
    "Ten epochs or 1,000 steps with ten looks; up to 30 epochs; dropout below the prompt"
    assert values(only('lpt-1', 'lpt-npg'), 'epochs', 'lower_dropout', 'cache')=={(10.,True,'none')}
    assert values(only('lpt-2', 'lpt-npg'), 'steps', 'eval_every', 'epochs', 't')=={(1000,100,None,5)}
    few = {c.method: c for c in R.plan_of('lpt-2', 'full')}
    assert (few['lpt-mppg'].t,few['s-idpg-phm'].t,few['lpt-npg'].head,few['lora'].head)==(
        10, 5, 'verbalizer','classification')
    assert values(only('lpt-2', 'lpt-npg', 'small'), 'lower_dropout', 'steps')=={(False,200)}
    assert values(only('lpt-1', 'lpt'), 'layer', 't')=={(0,20), (0,256), (None,20)} # two baselines, and w/o PG
    assert 'prompt-tuning' not in few
    spam = {c.method: c for c in R.plan_of('id-spam-2', 'full')}
    assert {(c.epochs,c.t) for m,c in spam.items() if m in ('id-spam','lpt-npg','prompt-tuning')}=={(30.,10)}
    assert (spam['lpt-npg'].m,spam['id-spam'].m)==(256,None) and 'lora-all' in spam and 'lora' not in spam
    layers = {c.layer for c in R.plan_of('lpt-10') if c.method=='lpt-npg'}
    assert layers=={round(n*30/24) for n in (6, 12, 18)} # of smollm2's 30
    assert values(R.plan_of('id-spam-16'), 'epochs')=={(30.,)} # its losses are by epoch
    curve = R.plan_of('id-spam-16', 'full')
    assert values(curve, 'method', 'backbone', 'epochs')=={('lora-all','roberta-base',30.)} and len(curve)==2


def test_full_tries_the_papers_rates(monkeypatch, tmp_path):
    tried = {}
    def with_seeds(cfg, task, how, seeds, old, out, say, rates=()):
        tried[cfg.method] = rates
        return []
    monkeypatch.setattr(R, 'with_seeds', with_seeds)
    monkeypatch.setattr(R, 'backbone_for', lambda c: None)
    monkeypatch.setattr(R, 'load_task', lambda *a: SimpleNamespace(splits=dict(train=[0]*100)))
    def run(table, **kw):
        tried.clear()
        R.reproduce(table, out=tmp_path, say=list, **kw)
        return dict(tried)
    with pytest.raises(ValueError, match='glove.6B.300d'):
        run('idpg-3', scale='full', tasks=['rte'])
    full = run('idpg-3', scale='full', tasks=['rte'], glove='glove')
    assert full['m-idpg-phm']==(5e-4,1e-4,5e-5,1e-5) and full['efl']==(1e-5,2e-5,3e-5) and full['probe']==()
    assert run('idpg-1', scale='full', tasks=['rte'], glove='glove')['compacter']==(5e-3,1e-3,5e-4,1e-4)
    assert run('lpt-2', scale='full', tasks=['rte'])['lpt']==(5e-4,1e-3,5e-3,1e-2)
    assert len(run('idpg-6', scale='full', tasks=['rte'])['m-idpg-phm'])==9
    assert run('id-spam-3', scale='full', tasks=['rte','mrpc'])['id-spam']==(1e-3,5e-4,1e-4,5e-5,1e-5)
    small = run('lpt-2', tasks=['rte'])
    assert small.pop('lpt')==FIXED_ROWS and small['probe']==()
    assert all(tried==METHODS[m].rates for m,tried in small.items() if m not in CONTROLS)
    given = run('lpt-2', scale='full', tasks=['rte'], rates=(1e-3,2e-3))
    assert given['lpt']==(1e-3,2e-3) and given['side-network']==()
    assert paper_rates('lpt-1', 'fine-tuning')!=paper_rates('lpt-1', 'lpt')


@pytest.mark.parametrize('scale', ['small','full'])
@pytest.mark.parametrize('table', ['idpg-1','idpg-3','lpt-1','lpt-2','id-spam-2'])
def test_the_defaults_carry_a_verdict(table, scale):
    "Five seeds, or two of each of four draws; and every draw has its controls"
    plan = R.plan_of(table, scale)
    for m in {c.method for c in plan}:
        for t in {c.task for c in plan if c.method==m}:
            runs = [c for c in plan if (c.method,c.task)==(m,t)]
            draws = {c.draw for c in runs}
            n = {R.seeds_for(c, plan) for c in runs}
            assert len(n)==1 and enough(dict(runs=n.pop()*len(draws), draws=len(draws)))
    def where(*methods):
        return values([c for c in plan if c.method in methods], 'task', 'backbone', 'k', 'draw')
    assert where('majority')==where('side-network')==where(*METHODS)
    large = {w for w in where(*METHODS) if w[0] in ('qqp','mnli') and w[2] is None}
    assert where('probe')==where(*METHODS)-large
    one = 'efl' if 'idpg' in table else 'lpt-npg'
    assert {c.method for c in R.plan_of(table, scale, methods=[one])}=={one}


@pytest.mark.parametrize('table', ['idpg-f7','idpg-f9','lpt-1','id-spam-2'])
def test_every_run_of_a_plan_can_read_a_batch(table):
    "Positions 2 and 3 are those of pairs"
    bb,tasks = backbone(),dict(pair=small_task('entailment'), one=small_task('sentiment'))
    for c in R.plan_of(table):
        task = tasks['pair' if TASKS[c.task].pair else 'one']
        c = replace(c, t=min(c.t, 20), layer=c.layer and min(c.layer, 2))
        changes = c.method in METHODS and METHODS[c.method].enters in ('weights','upper weights')
        batch = batch_of(bb, task, 4, 'code' if c.head=='verbalizer' else None)
        assert build(c, backbone() if changes else bb, task)(batch).isfinite().all()
    if table=='idpg-f7':
        assert values([c for c in R.plan_of(table) if not TASKS[c.task].pair], 'method', 'position')>={
            ('prompt-tuning',0), ('prompt-tuning',1), ('prompt-tuning',4)}
        assert {c.position for c in R.plan_of(table) if TASKS[c.task].pair}=={*range(5)}
        assert {c.position for c in R.plan_of(table) if not TASKS[c.task].pair}=={0,1,4}


def test_a_cell_stands_beside_its_own_variant():
    "A record of 16 numbers is none of 256, and K = 100 none of K = 500"
    line = dict(method='m-idpg-phm', task='sst2', k=1000, score=50., backbone='minilm', share='M', m=16, t=5,
        reads='previous')
    ours = R.side_by_side([line], 'idpg-6').dropna(subset='our mean')
    assert [*ours.method]==['M-IDPG-PHM M version m=16'] and 'previous' in ours.setting.iloc[0]
    few = R.side_by_side([dict(line, k=500, reads='layer0')], 'idpg-3').dropna(subset='our mean')
    assert [*few.setting]==['K=500'] and R.side_by_side([dict(line, k=500)], 'idpg-3')['our mean'].isna().all()


def test_a_decoders_prompt_stands_in_front_and_in_its_row():
    plan = R.plan_of('idpg-1', 'small', 'smollm2', methods=['prompt-tuning'], tasks=['mrpc'])
    cells = [c for c in P.cells_of('idpg-1').itertuples() if (c.ours,c.name)==('prompt-tuning','mrpc')]
    assert plan[0].position==0 and all(c.fields['position']==1 for c in cells)
    assert any(R._is({**vars(plan[0]), 'score':70.}, c) for c in cells)


def beside(table, **r):
    "Methods of the table that a record of RTE stands beside"
    r = dict(task='rte', backbone='bb', n_layers=12, score=50., k=None)|r
    return [*R.side_by_side([r], table).dropna(subset='our mean').method]


def test_one_method_at_the_input_and_half_way_are_two_rows():
    assert beside('lpt-1', method='lpt', layer=0, t=20)==['Prompt Tuning']
    assert beside('lpt-1', method='lpt', layer=0, t=256)==['Prompt Tuning-256']
    assert beside('lpt-1', method='lpt', layer=None, t=20)==beside('lpt-1', method='lpt', layer=6, t=20)==['LPT w/o PG']
    assert beside('lpt-1', method='lpt', layer=3, t=20)==beside('lpt-1', method='prompt-tuning', t=20)==[]
    assert beside('lpt-1', method='s-idpg-phm', t=5)==['S-IDPG-PHM'] and not beside('lpt-1', method='s-idpg-phm', t=20)
    assert beside('id-spam-2', method='lora-all')==['LoRA']*2 and not beside('id-spam-2', method='lora')
    assert beside('id-spam-2', method='lpt-npg', m=256, t=10)==['LPT']*2
    assert not beside('id-spam-2', method='lpt-npg', t=10) and not beside('id-spam-2', method='lpt-npg', m=256, t=5)
    assert beside('idpg-1', method='probe')==['probe']


def test_a_number_is_of_the_metric_and_of_the_model_of_its_cell():
    r = dict(method='id-spam', task='mrpc', t=10, k=None, score=90., backbone='roberta-base',
        scores={'accuracy+f1':90., 'accuracy+macro_f1':70.})
    table = R.side_by_side([r, dict(r, backbone='roberta-large', scores={'accuracy+macro_f1':71.})], 'id-spam-2')
    found = table.dropna(subset='our mean').set_index('backbone')['our mean']
    assert dict(found)=={'RoBERTa-base':70., 'RoBERTa-large':71.}
    assert R.side_by_side([r], 'id-spam-2')['our mean'].notna().sum()==1
    s = dict(method='lpt-npg', task='mrpc', t=5, k=None, score=90., backbone='bb', scores={'accuracy+macro_f1':70.})
    assert R.side_by_side([s], 'lpt-1')['our mean'].dropna().tolist()==[90.]
    curve = R.side_by_side([dict(r, method='lora-all', losses=[float(n) for n in range(50)])], 'id-spam-16')
    assert curve.dropna(subset='our mean')['our mean'].tolist()==[8., 16., 24., 33., 41., 49.]
    assert curve.dropna(subset='our mean')['mean'].tolist()==[.21, .12, .05, .02, .02, .0001]


def test_five_runs_vote_where_table_7_votes(tmp_path):
    "IDPG's Table 7 has a mean of five runs and their vote; ours is made of the kept answers"
    right = np.array([0,1,0,1])
    def run(seed, wrong): # which text it answers wrongly
        answers = np.eye(2, dtype=np.float16)[np.where(np.arange(4)==wrong, 1-right, right)]
        np.savez(tmp_path/f'{seed}.npz', test=answers, test_label=right)
        return dict(method='s-idpg-phm', task='mr', k=1000, score=75., metric='accuracy', backbone='minilm', t=5,
            seed=seed, logits=f'{seed}.npz', folder=tmp_path)
    runs = [run(s, s%4) for s in range(5)]
    table = R.side_by_side(runs, 'idpg-7').query("task=='mr' and method=='PHM'").set_index('metric')['our mean']
    assert dict(table)=={'average over 5 runs':75., 'voting over 5 runs':100.}
    alone = R.side_by_side([dict(r, folder=tmp_path/'elsewhere') for r in runs], 'idpg-7')
    assert alone[alone.metric.eq('voting over 5 runs')]['our mean'].isna().all()


def test_a_part_goes_on_where_it_stopped(monkeypatch, tmp_path):
    ran = []
    def with_seeds(cfg, task, how, seeds, old, out, say, rates=()):
        ran.append(cfg)
        same = dict(method=cfg.method, task=cfg.task, k=cfg.k, backbone=cfg.backbone, t=cfg.t, m=cfg.m, layer=cfg.layer)
        return [dict(same, seed=s, score=60.) for s in range(seeds)]
    monkeypatch.setattr(R, 'with_seeds', with_seeds)
    monkeypatch.setattr(R, 'load_task', lambda *a: SimpleNamespace(splits=dict(train=[])))
    said = []
    t = R.reproduce('lpt-2', methods=['lpt-npg'], tasks=['sst2'], out=tmp_path, say=said.append)
    row = t.dropna(subset='our mean').iloc[0]
    assert (row['mean'],row['our mean'],row.runs)==(92.7, 60., 8) and len(ran)==4 and '0 minutes left' in said[-1]
    assert ran[1]==replace(ran[0], draw=1)
    with pytest.raises(ValueError, match='nothing of lpt-2 is left'):
        R.reproduce('lpt-2', methods=['smop'], out=tmp_path)
    with pytest.raises(ValueError, match="did you mean 'lpt-2'"):
        R.plan_of('lpt2')


def test_a_grid_from_the_command_line_and_its_edge(monkeypatch):
    "Each method tries the same rates; a choice at the edge is recorded as one"
    from idp_tutorial.commands.grids import floats
    from idp_tutorial.config import RunConfig
    from idp_tutorial.experiments import rates
    best = {}
    monkeypatch.setattr(rates, 'trained', lambda c, task: (c, dict(validation=-abs(c.lr-best['lr']))))
    monkeypatch.setattr(rates, 'record_of', lambda c, log, task, cfg, *a: dict(lr=cfg.lr))
    grid = floats('1e-3,3e-3,1e-2', 'rates')
    for best['lr'],edge in ((1e-2, True), (3e-3, False)):
        r = rates.tune(RunConfig('lpt'), SimpleNamespace(name='subj'), grid)
        assert (r['lr'],r['edge'],[lr for lr,_ in r['tried']])==(best['lr'], edge, [*grid])
    with pytest.raises(ValueError, match='such as 1e-3,3e-3'):
        floats('1e-3;3e-3', 'rates')


def test_a_frozen_set_is_not_drawn_twice(tmp_path):
    (tmp_path/'sst2/k100').mkdir(parents=True)
    draws = {t: {c.draw for c in R.plan_of('lpt-2', data=str(tmp_path)) if c.task==t} for t in ('sst2','trec')}
    assert draws==dict(sst2={0}, trec={0, 1, 2, 3})


def test_a_layer_is_at_the_same_share_of_any_depth(tmp_path):
    (tmp_path/'config.json').write_text('{"n_layer": 12}')
    assert R.here(dict(layer=12), str(tmp_path))==R.here(dict(layer=12), 'bb', 12)==dict(layer=6)
    assert [R.here(dict(layer=12), name)['layer'] for name in ('tiny-gpt2','roberta-large')]==[4,12]
    cells = R.cells_of('lpt-10')
    c = cells[[f.get('layer') not in (None, 0) for f in cells.fields]].iloc[0]
    for depth,runs in ((12, 1), (6, 0)): # a record says how deep its model was
        r = dict(method=c.ours, task=c['name'], backbone='bb', n_layers=12, score=50., status='done')
        r |= c.fields | R.here(c.fields, 'bb', depth) | dict(k=R.shots_of(c.setting))
        found = R.side_by_side([r], 'lpt-10').runs
        assert found.notna()[c.name]==bool(runs)


def test_every_layer_of_a_paper_is_one_of_ours():
    "The last of 24 is the last one here: after it a prompt would do nothing"
    for depth in (1, 3, 6, 8, 12, 24, 30, 36):
        ours = [R.here(dict(layer=l), 'bb', depth)['layer'] for l in range(24)]
        assert ours==sorted(ours) and {*ours}<={*range(depth)} and ours[0]==0
        assert ours[-1]==depth-1 or depth>24
    assert R.here(dict(layer=None, t=3), 'tiny')==dict(layer=None, t=3)


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


def test_a_figure_has_the_seeds_of_a_verdict(monkeypatch, small_folder, tmp_path):
    asked = []
    monkeypatch.setattr(figures, 'figure', lambda name, base, seeds, file: asked.append(seeds) or [])
    idp_reproduce(table='lpt-f6', backbone=str(small_folder), out=str(tmp_path))
    assert asked==[5] and enough(dict(runs=5))
