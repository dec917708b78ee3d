"What idp_predict writes, and what idp_transfer's label map says."
import io
import json
import math
import os

import pytest

from idp_tutorial.checks import writable_file
from idp_tutorial.commands.predict import _kind, idp_predict, writer
from idp_tutorial.commands.transfer import label_pairs


def test_what_json_has_no_number_for():
    to = io.StringIO()
    writer(to, 'jsonl')(dict(size=math.nan, sizes=[1., dict(a=math.nan)], n=3))
    assert json.loads(to.getvalue())==dict(size=None, sizes=[1., dict(a=None)], n=3)
    with pytest.raises(ValueError, match="column 'size' holds infinity"): writer(to, 'jsonl')(dict(size=[math.inf]))


def test_no_column_of_the_table_is_replaced():
    with pytest.raises(ValueError, match="'probability yes' of its own"):
        writer(io.StringIO(), 'csv')({'probability yes':'1', 'probabilities':dict(yes=.5)})


def test_a_file_holds_what_its_name_says():
    assert [_kind(out, None) for out in ('-','a.csv','a.CSV','a.jsonl','a','a.txt')]==['jsonl','csv','csv']+['jsonl']*3
    assert _kind('a.tsv', 'csv')=='csv' and _kind('a.csv', 'jsonl')=='jsonl'
    for out in ('a.tsv','a.Parquet','a.xlsx','a.csv.gz','a.csv.xz'):
        with pytest.raises(ValueError, match=f'--out {out}: answers are written as CSV or JSON lines'): _kind(out, None)


def test_where_nothing_can_be_written_is_said_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path/'file').write_text('x')
    for out,words in (('nope/a.csv','there is no folder nope: make it'), ('.','it is a folder'),
        ('','--out \'\': it is a folder'), ('file/a.csv','there is no folder file')):
        with pytest.raises(SystemExit): idp_predict(model='nowhere', out=out) # before the model is looked for
        err = capsys.readouterr().err
        assert words in err and err.startswith(f'idp_predict: --out {out}') and err.count('\n')==1
    for out in ('file','new','/dev/null'): writable_file(out)
    monkeypatch.setattr(os, 'access', lambda *a: False)
    writable_file('/dev/null')
    with pytest.raises(ValueError, match='a folder that cannot be written'): writable_file('new')


def test_a_label_map_of_an_option():
    assert label_pairs(' a = b,c=b ')==dict(a='b', c='b') and label_pairs(None) is None
    with pytest.raises(ValueError, match="'a' stands there twice"): label_pairs('a = b,a=c')
    with pytest.raises(ValueError, match="'b' is no pair"): label_pairs('a=c,b')
