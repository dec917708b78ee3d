"The script of the records runs with the library as it is"
import runpy
import sys
from pathlib import Path

import pytest

from idp_tutorial.experiments.contrasts import has_texts, right
from idp_tutorial.records import read_records

SCRIPT = Path(__file__).resolve().parents[2]/'results/measure.py'


@pytest.mark.parametrize('what,task,more,runs', [
    ('methods', 'sentiment', ['--lr', '1e-3'], 1),
    ('fewshot', 'sentiment-k8', ['--rates', '1e-3', '--draws', '2', '--set', 'head=classification,t=2'], 2),
    ('layers', 'sentiment', ['--lr', '1e-3', '--layers', '1,2'], 2),
    ('controls', 'sentiment-k8', ['--draws', '2'], 2)])
def test_measure(what, task, more, runs, small_folder, tmp_path, monkeypatch):
    out = tmp_path/'r.jsonl'
    methods = 'majority' if what=='controls' else 'lpt-npg'
    monkeypatch.setattr(sys, 'argv', ['measure.py', what, task, '--methods', methods, '--backbone', str(small_folder),
        '--steps', '2', '--looks', '1', '--seeds', '1', '--precision', 'no', '--out', str(out), *more])
    runpy.run_path(str(SCRIPT), run_name='__main__')
    records = read_records(out)
    assert [r['status'] for r in records]==['done']*runs and all(has_texts(r, tmp_path, True) for r in records)
    runpy.run_path(str(SCRIPT), run_name='__main__') # goes on: nothing is left to do
    assert len(read_records(out))==runs


def test_what_stage_1_gains(small_folder, tmp_path, monkeypatch):
    out = tmp_path/'r.jsonl'
    monkeypatch.setattr(sys, 'argv', ['measure.py', 'supplemented', 'questions-k8', '--methods', 's-idpg-phm',
        '--lr', '1e-3', '--first', 'sentiment-k8', '--folder', str(tmp_path/'tuned'), '--backbone', str(small_folder),
        '--steps', '2', '--looks', '1', '--seeds', '2', '--precision', 'no', '--out', str(out)])
    for _ in range(2): # again: the same
        runpy.run_path(str(SCRIPT), run_name='__main__')
        records,found = read_records(out),read_records(tmp_path/'gains-r.jsonl')
        assert [bool(r['start']) for r in records]==[False,False,True,True] and [r['seed'] for r in found]==[0,1]
    for r,before,after in zip(found, records[:2], records[2:], strict=True):
        assert r['score']==pytest.approx(after['score']-before['score']) and r['backbone']==str(small_folder)
        assert right(r, tmp_path).mean()==pytest.approx(r['score'], abs=1e-4)
        assert (right(r, tmp_path)==right(after, tmp_path)-right(before, tmp_path)).all()
