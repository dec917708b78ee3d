"""Command lines and files that hypothesis thinks of, in this process: each is run, or refused in a sentence. A
traceback is a failure of the test."""
import io
import json
import math
import shutil
import string
import sys
import warnings
from collections import Counter
from inspect import Parameter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from idp_tutorial.commands.command_line import one_spelling, options, parser
from idp_tutorial.commands.compare import idp_compare
from idp_tutorial.commands.params import idp_params
from idp_tutorial.commands.predict import idp_predict
from idp_tutorial.commands.pretrain import idp_pretrain
from idp_tutorial.commands.sweep import idp_sweep
from idp_tutorial.commands.train import idp_train
from idp_tutorial.commands.transfer import idp_transfer
from idp_tutorial.data.tasks import load_task
from idp_tutorial.files import opened, sealed
from idp_tutorial.pretraining.text import read_lines
from idp_tutorial.records import read_records, stored
from idp_tutorial.snapshots import last_step

MANY = pytest.mark.slow
SEEN = Counter() # what came of each case
COMMANDS = [idp_train, idp_compare, idp_sweep, idp_transfer, idp_params, idp_predict, idp_pretrain]
ODD = ['', ' ', '0', '-1', '1', '2', '3', 'nan', 'inf', '-inf', '1e-3', '1e400', '9'*23, '0.5', 'x', 'é', '\udc80',
    'a\0b', '..', '/', '/dev/null', 'all', 'lpt', 'lpt,head-only', ',', 'no', 'bf16', 'fp16', 'cpu', 'auto', 'cls',
    'verbalizer', 'mean', 'last', 'paper', '{s1} {mask}', '{', 'sentence', 'hidden', 'both', 'none', 'x'*300, '=']


def few(n):
    return settings(max_examples=n, deadline=None, suppress_health_check=[*HealthCheck], derandomize=n<500)


@pytest.fixture(scope='module')
def place(small_folder, tmp_path_factory):
    return furnished(tmp_path_factory.mktemp('place'), small_folder)


def furnished(where, small_folder):
    "A small model, a task of 40 rows, and a text to pretrain on"
    for task in ('sst2','mr'):
        (where/task).mkdir()
        for split,n in (('train',24), ('validation',8), ('test',8)):
            rows = [dict(sentence1=f'{"good" if i%2 else "bad"} film {i}', label=i%2) for i in range(n)]
            (where/task/f'{split}.jsonl').write_text(''.join(json.dumps(r)+'\n' for r in rows))
    (where/'text.txt').write_text('\n'.join(f'a line of text number {i}' for i in range(50)))
    return where,small_folder


def start_of(f, where, model):
    "Options that make a run small"
    has = options(f.__wrapped__)
    small = dict(task='sst2', source='sst2', target='mr', data=where, backbone=model, steps=1, looks=1, seeds=1,
        batch_size=4, device='cpu', methods='head-only,lpt', out=where/'out', layers='0', max_len=16, shots=4,
        test_rows=4, model=where, corpus_dir=where/'corpus', n_layers=1, d=32, teacher='')
    skip = {'methods':f is idp_params, 'layers':f is not idp_sweep}
    return {k: str(v) for k,v in small.items() if k in has and not skip.get(k)}


def argv_of(f, chosen, where, model):
    given = start_of(f, where, model) | chosen
    has = options(f.__wrapped__)
    argv = [given.pop(k, str(where/'text.txt')) for k,o in has.items() if o.default is Parameter.empty]
    for k,v in given.items():
        argv += [f'--{k}'] if has[k].default is False else [f'--{k}={v}']
    return argv


def runs_or_says_why(f, argv):
    "Exit status 0 or 2; with 2, a sentence"
    said,kept = io.StringIO(),(sys.stdout, sys.stderr, sys.stdin)
    sys.stdout,sys.stderr,sys.stdin = io.StringIO(),said,io.StringIO('a text\n')
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            f(**vars(parser(f.__wrapped__).parse_args(one_spelling(argv))))
        SEEN['command line', 'ran'] += 1
    except SystemExit as e:
        SEEN['command line', 'was refused' if e.code else 'ran'] += 1
        assert e.code in (0, 2, None), (argv, e.code)
        assert not e.code or said.getvalue().strip(), argv
    finally:
        sys.stdout,sys.stderr,sys.stdin = kept


def lines_of(n, place, seed=0):
    where,model = place
    @seeded(seed)
    @few(n)
    @given(st.data())
    def check(data):
        f = data.draw(st.sampled_from(COMMANDS))
        names = st.sampled_from([k for k in options(f.__wrapped__) if k not in ('backbone','data','corpus_dir')])
        big = st.one_of(st.sampled_from(ODD), st.integers().map(str), st.floats().map(str))
        chosen = data.draw(st.dictionaries(names, big, min_size=1, max_size=3))
        if 'out' in chosen:
            chosen['out'] = f"{where}/{chosen['out']}" # below the test's own folder
        if chosen.get('steps','1').lstrip('-').isdigit() and int(chosen.get('steps','1') or 1)>3:
            chosen['steps'] = '2' # it would be right, and take hours
        for k in ('seeds','repeats','probe_steps','n_layers','d','tokens'):
            if chosen.get(k,'').isdigit() and 3<int(chosen[k])<10**7:
                chosen[k] = '2'
        shutil.rmtree(where/'out', ignore_errors=True)
        runs_or_says_why(f, argv_of(f, chosen, where, model))
    check()


def test_command_lines(place):
    lines_of(15, place)


@MANY
def test_many_command_lines(place):
    lines_of(1000, place)


# --- data

KEYS = st.sampled_from(['sentence1','sentence2','label','a'])
VALUES = st.recursive(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9)),
    lambda x: st.one_of(st.lists(x, max_size=3), st.dictionaries(KEYS, x, max_size=3)), max_leaves=6)
BITS = st.one_of(st.binary(max_size=80), st.text(max_size=40).map(lambda s: s.encode('utf-8', 'surrogatepass')),
    VALUES.map(lambda v: json.dumps(v).encode()))


def says_or_reads(f):
    try:
        f()
        return 'was read'
    except (ValueError,OSError,EOFError) as e:
        assert str(e)
        return 'was refused'


def files_of(n, tmp_path, seed=0):
    @seeded(seed)
    @few(n)
    @given(st.lists(BITS, max_size=4), st.sampled_from([b'\n', b'\r\n', b'\0', b'\xef\xbb\xbf']))
    def check(rows, between):
        data = between.join(rows)
        folder = tmp_path/'mr'
        folder.mkdir(exist_ok=True)
        for split in ('train','validation','test'):
            (folder/f'{split}.jsonl').write_bytes(data)
        SEEN['file of rows', says_or_reads(lambda: load_task('mr', str(tmp_path)))] += 1
        for name in ('records.jsonl','text.txt','text.txt.xz','rows.jsonl','checkpoint-3.safetensors'):
            (tmp_path/name).write_bytes(data)
        says_or_reads(lambda: read_records(tmp_path/'records.jsonl'))
        says_or_reads(lambda: stored(tmp_path/'records.jsonl'))
        says_or_reads(lambda: last_step(tmp_path))
        for name in ('text.txt','rows.jsonl'):
            says_or_reads(lambda name=name: list(read_lines(tmp_path/name)))
    check()


def test_files_of_anything(tmp_path):
    files_of(60, tmp_path)


@MANY
def test_many_files_of_anything(tmp_path):
    files_of(1000, tmp_path)


@few(100)
@given(st.dictionaries(st.text(string.ascii_letters, min_size=1, max_size=6).filter(lambda k: k!='digest'),
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=9)), max_size=4),
    st.randoms())
def test_a_record_is_read_as_it_was_written_or_not_at_all(record, rng):
    line = sealed(record)
    assert opened(line)==record
    data = bytearray(line.encode())
    data[rng.randrange(len(data))] ^= 1<<rng.randrange(8)
    try:
        got = opened(data.decode())
    except ValueError:
        return
    assert got==record or any(isinstance(v, float) and math.isclose(v, got.get(k, 0)) for k,v in record.items())
