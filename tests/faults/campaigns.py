"""Many faults, counted by what came of them. `python tests/faults/campaigns.py [--only KIND] [--works a,b] [--seed N]
[--cases N] [--counts FILE]` prints a line of JSON a campaign and work, and adds it to a file."""
import argparse
import json
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

if __name__=='__main__':
    sys.path[:0] = [str(Path(__file__).resolve().parents[i]) for i in (2, 1)]

import works
from harness import REFUSALS, Faults, damages, end, operations, pair, start

HOWS = 'kill','half','power','refuse'


@contextmanager
def place():
    "A folder to work in, and how much was trained for it"
    with tempfile.TemporaryDirectory() as tmp:
        done = Path(tmp)/'done'
        works.DONE[:] = [done]
        try:
            yield Path(tmp)/'out',lambda: done.stat().st_size if done.exists() else 0
        finally:
            works.DONE.clear()


def unbroken(work):
    with place() as (folder,trained):
        return work(folder),trained()


def again(work, folder, want):
    "The outcome of another start"
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        try:
            got = work(folder)
        except REFUSALS as e:
            return 'refused',str(e)
        except Exception as e:
            return 'an error that nobody expected',f'{type(e).__name__}: {e}'
    return ('equal','') if got==want else ('silently another result','')


def kills(name, every=1, hows=HOWS, first=1):
    "At every `every`-th file operation; then the work is started again and must end as if nothing had happened"
    seen,bad,work = Counter(),[],works.WORKS[name]
    want,once = unbroken(work)
    with place() as (folder,_):
        n = operations(work, folder)
    for at in range(first, n+1, every):
        for how in hows:
            with place() as (folder,trained):
                code = end(start(work, folder, Faults(folder, at, how)))
                outcome,said = again(work, folder, want)
                if outcome=='equal' and trained()>once+works.AGAIN.get(name, 0):
                    outcome,said = 'finished work done again',f'{trained()} for {once}'
            seen[how, outcome] += 1
            if outcome!='equal' or code not in ((9,) if how!='refuse' else (0,2)):
                bad.append((name, how, at, code, outcome, said[:150]))
    return seen,bad


def finished_again(name):
    "What is trained when a work that is finished is started again"
    with place() as (folder,trained):
        want,once = works.WORKS[name](folder),trained()
        assert works.WORKS[name](folder)==want
        return trained()-once


READERS = dict(works.WORKS, saving=works.reading, bundling=works.loading, together=works.unfolding)


def damaged(name, cases, seed=0):
    "Every file that is read again, spoilt in `cases` ways: the next start is equal, or says what is wrong"
    seen,bad,work,read = Counter(),[],works.WORKS[name],READERS[name]
    want,_ = unbroken(work)
    with place() as (folder,_):
        kept = folder.with_name('kept')
        work(folder)
        shutil.copytree(folder, kept)
        files = [p.relative_to(kept) for p in sorted(kept.rglob('*')) if p.is_file() and '.lock' not in p.name]
        whole = [(kept/f).read_bytes() for f in files]
        for file,data in zip(files, whole):
            others = [w for w in whole if w!=data]
            for kind,spoilt in damages(data, cases, f'{seed}{file}', others) if data else ():
                shutil.rmtree(folder)
                shutil.copytree(kept, folder)
                (folder/file).write_bytes(spoilt)
                outcome,said = again(read, folder, want)
                seen[kind, outcome] += 1
                if outcome not in ('equal','refused'):
                    bad.append((name, str(file), kind, outcome, said[:150]))
    return seen,bad


def pairs(name, each, seed=0):
    "Two processes, the first paused at a random operation: both end, and what they leave is as from one"
    seen,bad,rng,work = Counter(),[],random.Random(f'{seed}{name}'),works.WORKS[name]
    want,_ = unbroken(work)
    with place() as (folder,_):
        n = operations(work, folder)
    for _ in range(each):
        with place() as (folder,_):
            at = rng.randint(1, n)
            codes = pair(work, folder, at)
            outcome,said = again(work, folder, want)
        seen['second '+{0:'waited, or was first', 2:'was refused'}.get(codes[1], 'broke'), outcome] += 1
        if outcome!='equal' or codes[0]!=0 or codes[1] not in (0,2):
            bad.append((name, at, codes, outcome, said[:150]))
    return seen,bad


def random_input(cases, seed):
    "Half of them command lines, half of them files; what fails stops the rest"
    import test_random_input as t
    from small import backbone

    from idp_tutorial.pretraining.bundled_backbone import save_backbone
    t.SEEN.clear()
    bb,bad = backbone(max_position_embeddings=258),[]
    with tempfile.TemporaryDirectory() as tmp:
        where = Path(tmp)/'place'
        where.mkdir()
        save_backbone(bb.model, bb.tokenizer, Path(tmp)/'backbone')
        for f,at in ((t.lines_of, t.furnished(where, Path(tmp)/'backbone')), (t.files_of, Path(tmp))):
            try:
                f(cases//2, at, seed)
            except BaseException as e: # a failure of hypothesis shows the case
                bad.append((f.__name__, ' '.join([str(e), *getattr(e, '__notes__', ())])[:600]))
    return t.SEEN,bad


def say(kind, name, campaign, counts, seed):
    t0 = time.time()
    seen,bad = campaign()
    line = json.dumps(dict(campaign=kind, work=name, seed=seed, cases=sum(seen.values()), seconds=round(time.time()-t0),
        outcomes={': '.join(k): v for k,v in sorted(seen.items())}, bad=len(bad), examples=bad[:5]))
    print(line, flush=True)
    if counts:
        with open(counts, 'a', encoding='utf-8') as f:
            f.write(line+'\n')
    return len(bad)


def main():
    import pytest
    from transformers.utils import logging
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('--only', choices=['pairs','kills','damaged','random'])
    p.add_argument('--works', default=','.join(works.WORKS))
    p.add_argument('--seed', type=int, default=int(time.time()//86400), help='default: the day')
    p.add_argument('--cases', type=int, default=60, help='damages a file')
    p.add_argument('--inputs', type=int, default=2000, help='random command lines and files')
    p.add_argument('--every', type=int, default=1, help='file operations from one kill to the next')
    p.add_argument('--counts', help='file to add the lines to')
    o = p.parse_args()
    logging.disable_progress_bar()
    wrong = 0
    if o.only in (None,'random'): # with real training
        wrong += say('random', 'input', lambda: random_input(o.inputs, o.seed), o.counts, o.seed)
    works.pretend(pytest.MonkeyPatch())
    for name in o.works.split(',') if o.only!='random' else ():
        for kind,f in dict(pairs=lambda: pairs(name, 8, o.seed), kills=lambda: kills(name, o.every),
                damaged=lambda: damaged(name, o.cases, o.seed)).items():
            if o.only in (None,kind):
                wrong += say(kind, name, f, o.counts, o.seed)
    sys.exit(bool(wrong))


if __name__=='__main__':
    main()
