"What every command shares: one parser, both spellings, an error in one line, and a `--help` that imports little."
import ast
import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from idp_tutorial.checks import at_least
from idp_tutorial.commands.command_line import command, config_of, one_spelling, options, parser, says_why
from idp_tutorial.commands.config_file import with_config
from idp_tutorial.config import RunConfig

ROOT = Path(__file__).resolve().parents[2]
ROOM = ROOT/'idp_tutorial/commands'
NO_COMMANDS = ('command_line','config_file','grids') # what several commands need
COMMANDS = ['idp_'+p.stem for p in sorted(ROOM.glob('[a-z]*.py')) if p.stem not in NO_COMMANDS]
HEAVY = 'transformers datasets sklearn scipy pandas matplotlib peft accelerate'.split()


def load(name):
    return getattr(importlib.import_module(f'idp_tutorial.commands.{name[4:]}'), name)


def run(code, *argv):
    "A fresh interpreter with this package"
    code = f'import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}'
    return subprocess.run([sys.executable, '-c', code, *argv], capture_output=True, text=True)


# --- start-up: modules are counted, not seconds

HELP = '''
import importlib, json
from idp_tutorial.commands.command_line import parser
f = getattr(importlib.import_module('idp_tutorial.commands.{short}'), '{name}')
try:
    parser(f.__wrapped__).parse_args(['--help'])
except SystemExit as e:
    assert not e.code
print(json.dumps([m for m in {heavy} if m in sys.modules]))
'''


@pytest.mark.parametrize('name', COMMANDS)
def test_help_imports_neither_torch_nor_what_is_heavier(name):
    res = run(HELP.format(short=name[4:], name=name, heavy=[*HEAVY, 'torch', 'numpy']))
    assert res.returncode==0 and f'usage: {name}' in res.stdout, res.stderr
    assert json.loads(res.stdout.splitlines()[-1])==[]


def test_a_method_imports_torch_and_nothing_heavier():
    res = run(f'import idp_tutorial.methods.lpt, json\nprint(json.dumps([m for m in {HEAVY} if m in sys.modules]))')
    assert res.returncode==0 and json.loads(res.stdout)==[], res.stderr or res.stdout


def test_a_shell_completes_options(tmp_path):
    pytest.importorskip('argcomplete')
    asks = dict(_ARGCOMPLETE='1', _ARGCOMPLETE_IFS=' ', _ARGCOMPLETE_STDOUT_FILENAME=str(tmp_path/'said'))
    for line,follows in (('idp_train a.csv --batch',['--batch_size']),
        ('idp_predict --te',['--texts','--text','--text2'])):
        module = f'idp_tutorial.commands.{line.split()[0][4:]}'
        env = {**os.environ, **asks, 'COMP_LINE':line, 'COMP_POINT':str(len(line)), 'PYTHONPATH':str(ROOT)}
        subprocess.run([sys.executable, '-m', module], env=env, check=True)
        assert sorted((tmp_path/'said').read_text().split())==sorted(follows)


# --- options

@pytest.mark.parametrize('name', COMMANDS)
def test_every_option_has_both_spellings(name):
    f = load(name)
    needed = ['x' for o in options(f.__wrapped__).values() if o.default is inspect.Parameter.empty]
    given = {k: o for k,o in options(f.__wrapped__).items() if '_' in k}
    for k,o in given.items():
        value = [] if o.default is False else ['0.5' if isinstance(o.default, float) else '3']
        said = [vars(parser(f.__wrapped__).parse_args(one_spelling([*needed, f'--{s}', *value])))
            for s in (k, k.replace('_', '-'))]
        assert said[0]==said[1]!=vars(parser(f.__wrapped__).parse_args(needed))


def test_values_keep_their_hyphens():
    argv = ['--batch-size=3', '--methods', 'lpt-npg,id-spam', '--out=a-b/c-d', '-h', '--', 'x-y']
    assert one_spelling(argv)==['--batch_size=3', '--methods', 'lpt-npg,id-spam', '--out=a-b/c-d', '-h', '--', 'x-y']


@pytest.mark.parametrize('name', COMMANDS)
def test_the_signature_says_all(name):
    "A reader of the function sees what the command line offers"
    f = load(name)
    shown = {n: p.default for n,p in inspect.signature(f).parameters.items()}
    assert shown=={n: o.default for n,o in options(f.__wrapped__).items()}
    assert all(o.docment for n,o in options(f.__wrapped__).items() if n!='weight_decay')


@pytest.mark.parametrize('name,place,said', [('idp_train','table','a.csv'), ('idp_serve','models','[a, b]'),
    ('idp_fetch','name','mpnet'), ('idp_pretrain','text','a.txt')])
def test_a_file_of_options_says_what_stands_by_its_place(name, place, said, tmp_path):
    own,file = load(name).__wrapped__,tmp_path/'run.yaml'
    file.write_text(f'{place}: {said}')
    for more,want in (([],said.strip('[]').replace(' ', '')), (['other'],'other')):
        flags,given = with_config(['--config', str(file), *more], options(own))
        assert vars(parser(own, **given).parse_args(flags))[place]==want


def test_an_option_is_written_out(capsys):
    with pytest.raises(SystemExit): parser(load('idp_predict').__wrapped__).parse_args(['--conf', 'x.yaml'])
    assert 'unrecognized arguments: --conf' in capsys.readouterr().err


def test_an_option_that_nothing_declares():
    def idp_odd(*, backbone, colour): pass
    with pytest.raises(KeyError, match='colour'):
        command(idp_odd)


def test_the_config_of_a_command():
    given = dict(task='trec', steps=10, looks=4, seeds=3, out='x')
    assert config_of(given)==RunConfig(task='trec', steps=10, eval_every=2)
    assert config_of({**given, 'looks':0}, k=5)==RunConfig(task='trec', steps=10, eval_every=10, k=5)
    with pytest.raises(ValueError, match='steps=0'):
        config_of({**given, 'steps':0})


def test_what_accelerate_starts():
    res = subprocess.run([sys.executable, ROOT/'configs/train.py', '--help'], capture_output=True, text=True,
        env={**os.environ, 'PYTHONPATH':str(ROOT)})
    assert res.returncode==0 and 'usage: idp_train' in res.stdout, res.stderr


# --- errors

SCRIPT = '''
import sys
sys.path.insert(0, {root!r})
from idp_tutorial.checks import at_least
from idp_tutorial.commands.command_line import command

def twice(n):
    return print(2*at_least(n, 1, 'n'))

@command
def idp_twice(*,
    n:int=1, # a number
    batch_size, # inherited
):
    "Twice a number"
    twice(n)
    print(batch_size)
{call}
'''


@pytest.mark.parametrize('call', ['', 'if __name__=="__main__": idp_twice()', 'sys.exit(idp_twice())'])
def test_a_script_reads_the_command_line_once(call, tmp_path):
    (tmp_path/'twice.py').write_text(SCRIPT.format(root=str(ROOT), call=call))
    def said(*argv):
        res = subprocess.run([sys.executable, tmp_path/'twice.py', *argv], capture_output=True, text=True)
        return res.returncode,res.stdout,res.stderr
    assert said('--n', '3', '--batch-size', '7')==(0, '6\n7\n', '')
    assert said()==(0, '2\n32\n', '')
    assert said('--n', '0')==(2, '', 'idp_twice: n=0: it must be at least 1\n')
    code,out,err = said('--help')
    assert code==0 and 'Twice a number' in out and '--batch_size' in out and not err
    for more,words in ((('--m','3'),'--m 3\n'), (('mine.csv',),'mine.csv; a table of your own goes to idp_train')):
        code,out,err = said(*more)
        assert code==2 and not out and f'unrecognized arguments: {words}' in err


def test_from_python_an_ordinary_function():
    @command
    def idp_twice(n:int=1, *, batch_size):
        return 2*at_least(n, 1, 'n'),batch_size
    assert idp_twice(4)==(8,32) and idp_twice(batch_size=2)==(2,2) and idp_twice()==(2,32)


def test_a_reader_who_has_read_enough_is_no_error():
    code = f'import sys; sys.path.insert(0, {str(ROOT)!r})\n'
    code += 'from idp_tutorial.commands.command_line import says_why\n'
    code += '@says_why\ndef f():\n    for i in range(100_000): print(i)\nf()'
    p = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert p.stdout.readline()=='0\n'
    p.stdout.close()
    assert p.stderr.read()=='' and p.wait()==141


def test_the_top_of_the_room_is_light():
    "Modules of commands import the standard library, fastcore, config and checks; the rest waits for a call"
    for path in ROOM.glob('[a-z]*.py'):
        for n in ast.parse(path.read_text(encoding='utf-8')).body:
            if isinstance(n, ast.ImportFrom) and n.level:
                light = {*((1,name) for name in NO_COMMANDS), (2,'config'), (2,'checks'), (2,'files')}
                assert (n.level,n.module) in light, (path.name, n.module)
            elif isinstance(n, (ast.Import, ast.ImportFrom)):
                tops = [n.module] if isinstance(n, ast.ImportFrom) else [a.name for a in n.names]
                assert {t.split('.')[0] for t in tops}<=set(sys.stdlib_module_names)|{'fastcore'}, (path.name, tops)


FULL = [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 80040 bytes"),
    torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')]

@pytest.mark.parametrize('error', FULL, ids=lambda e: type(e).__name__)
def test_memory_that_is_not_there(error, capsys):
    @says_why
    def idp_large():
        raise error
    with pytest.raises(SystemExit) as e:
        idp_large()
    assert e.value.code==2 and 'not enough memory: use a smaller batch_size' in capsys.readouterr().err

def test_another_error_of_pytorch_keeps_its_traceback():
    @says_why
    def idp_wrong():
        raise RuntimeError('mat1 and mat2 shapes cannot be multiplied')
    with pytest.raises(RuntimeError, match='mat1'):
        idp_wrong()
