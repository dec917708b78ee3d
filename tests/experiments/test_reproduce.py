"Every table expands; a part of one runs, goes on, and stands beside the paper."
import pytest

from idp_tutorial.experiments import reproduce as R
from idp_tutorial.experiments.published_scores import published_tables

TABLES = published_tables()


@pytest.mark.parametrize('row', [*TABLES[TABLES.command.str.startswith('idp_reproduce')].itertuples()],
    ids=lambda r: r.table)
def test_a_command_runs_or_says_what_would_decide(row):
    named = row.command.split('--table ')[1].split()[0]
    if TABLES.set_index('table').kind[named]=='scores' and named in set(R.published_scores().table): # a grid
        small,full = R.plan_of(named),R.plan_of(named, 'full')
        assert 0<len(small)<=len(full) and len({c.task for c in small})<=4 and len({c.backbone for c in small})==1
        assert {c.method for c in small}<={c.method for c in full}
    else:
        with pytest.raises(ValueError, match='what would decide it'):
            R.plan_of(named)


def test_what_the_papers_say_is_in_the_config():
    few = {c.method: c for c in R.plan_of('lpt-2', 'full')}
    assert (few['lpt'].t,few['lpt-npg'].t,few['lpt-mppg'].t,few['lpt'].head,few['lora'].head)==(20, 5, 10,
        'verbalizer','classification')
    assert {c.m for c in R.plan_of('id-spam-2') if c.method=='lpt-npg'}=={256}
    assert {c.k for c in R.plan_of('idpg-3', 'full')}=={100, 500, 1000}


def test_a_part_goes_on_where_it_stopped(monkeypatch, tmp_path):
    from dataclasses import replace
    ran = []
    def with_seeds(cfg, task, how, seeds, old, out, say, rates=()):
        ran.append(cfg)
        return [dict(method=cfg.method, task=cfg.task, seed=s, score=60., backbone=cfg.backbone) for s in range(seeds)]
    monkeypatch.setattr(R, 'with_seeds', with_seeds)
    monkeypatch.setattr(R, 'load_task', lambda *a: None)
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
    from idp_tutorial.commands.reproduce import floats
    from idp_tutorial.config import RunConfig
    from idp_tutorial.experiments import comparison
    best = {}
    monkeypatch.setattr(comparison, 'trained', lambda c, task: (c, dict(validation=-abs(c.lr-best['lr']))))
    monkeypatch.setattr(comparison, 'record_of', lambda c, log, task, cfg, test: dict(lr=cfg.lr))
    grid = floats('1e-3,3e-3,1e-2', 'rates')
    for best['lr'],edge in ((1e-2, True), (3e-3, False)):
        r = comparison.tune(RunConfig('lpt'), None, grid)
        assert (r['lr'],r['edge'],[lr for lr,_ in r['tried']])==(best['lr'], edge, grid)
    with pytest.raises(ValueError, match='such as 1e-3,3e-3'):
        floats('1e-3;3e-3', 'rates')


def test_a_frozen_set_is_not_drawn_twice(tmp_path):
    (tmp_path/'sst2/k100').mkdir(parents=True)
    draws = {t: {c.draw for c in R.plan_of('lpt-2', data=str(tmp_path)) if c.task==t} for t in ('sst2','trec')}
    assert draws==dict(sst2={0}, trec={0, 1})
