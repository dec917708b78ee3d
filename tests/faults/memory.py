"""Memory while texts are encoded and answered, and texts a processor second: `python tests/faults/memory.py [--rows N]`
prints them, for docs/promises.md. It takes minutes and one thread."""
import argparse
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

WORDS = 'the soup was cold and nobody came to take it away before the beer arrived at our table again today'.split()
ENV = os.environ | dict(HF_HUB_OFFLINE='1', OMP_NUM_THREADS='1', PYTHONPATH=str(Path(__file__).resolve().parents[2]))


def texts(n, words):
    draw = random.Random(0)
    return (' '.join(draw.choices(WORDS, k=words)) for _ in range(n))


def resident(pid='self'):
    "MB of memory that a process has now"
    return int(Path(f'/proc/{pid}/statm').read_text().split()[1])*os.sysconf('SC_PAGESIZE')/1e6


def encoding(n):
    "MB a 1,000 rows of 20 tokens that are kept, and at the worst moment"
    import gc
    import resource

    from idp_tutorial.data.tasks import load_task
    from idp_tutorial.model.pretrained import load_backbone
    from idp_tutorial.training.examples import encode_rows
    bb,task = load_backbone('tiny'),load_task('sentiment')
    rows = [dict(sentence1=t, label=i%2) for i,t in enumerate(texts(n, 18))]
    encode_rows(task, rows[:3000], bb, 128)
    gc.collect()
    before,peak = resident(),resource.getrusage(resource.RUSAGE_SELF).ru_maxrss/1e3
    examples = encode_rows(task, rows, bb, 128)
    gc.collect()
    tokens = sum(len(e['ids']) for e in examples[:1000])/1000
    worst = max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss/1e3-max(before, peak))
    print(f'encoding {n:,} rows of {tokens:.0f} tokens: {(resident()-before)/n*1000:.2f} MB a 1,000 rows are kept, '
        f'{worst/n*1000:.2f} at the worst moment')


def answering(model, n, words, looks=5):
    "Rows come through a pipe: MB on the way, and seconds of the processor"
    p = subprocess.Popen([sys.executable, '-m', 'idp_tutorial.commands.predict', '--model', model, '--texts', '-',
        '--format', 'lines', '--device', 'cpu'], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=ENV)
    seen = []
    for i,text in enumerate(texts(n, words), 1):
        p.stdin.write(text+'\n')
        if not i%(max(1, n//looks)):
            p.stdin.flush()
            seen.append(f'{resident(p.pid):,.0f} MB after {i:,}')
    p.stdin.close()
    _,status,used = os.wait4(p.pid, 0)
    assert status==0
    return used.ru_utime+used.ru_stime,used.ru_maxrss/1e3,', '.join(seen)


def main(n):
    subprocess.run([sys.executable, __file__, '--encode', str(n)], env=ENV, check=True)
    with tempfile.TemporaryDirectory() as folder:
        train = '-m idp_tutorial.commands.train --task sentiment --method lpt-npg --steps 4 --looks 1 --out'
        subprocess.run([sys.executable, *train.split(), folder], env=ENV, check=True, stdout=subprocess.DEVNULL)
        start,_,_ = answering(folder, 1, 18, 1)
        seconds,_,_ = answering(folder, n//10, 18)
        print(f'answering {n//10:,} rows of 20 tokens: {n/10/(seconds-start):,.0f} texts a processor second')
        _,peak,seen = answering(folder, n, 4, 10)
        print(f'answering {n:,} rows of 6 tokens: {seen}; at most {peak:,.0f} MB')


if __name__=='__main__':
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('--rows', type=int, default=100_000)
    p.add_argument('--encode', type=int, help='only this, in this process')
    o = p.parse_args()
    encoding(o.encode) if o.encode else main(o.rows)
