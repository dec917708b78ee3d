"Many faults, counted by what came of them: `python tests/faults/campaigns.py` runs all of them and prints the table."
import json
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

if __name__=='__main__':
    sys.path[:0] = [str(Path(__file__).resolve().parents[i]) for i in (2, 1)]

import works
from harness import REFUSALS, Faults, damages, end, operations, pair, start


def unbroken(work):
    with tempfile.TemporaryDirectory() as tmp:
        return work(Path(tmp)/'out')


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


def kills(names, every=1, hows=('kill','half','refuse')):
    "At every `every`-th file operation; then the work is started again and must end as if nothing had happened"
    seen,bad = Counter(),[]
    for name in names:
        work = works.WORKS[name]
        want = unbroken(work)
        with tempfile.TemporaryDirectory() as tmp:
            folder = Path(tmp)/'out'
            n = operations(work, folder)
        for at in range(1, n+1, every):
            for how in hows:
                with tempfile.TemporaryDirectory() as tmp:
                    folder = Path(tmp)/'out'
                    code = end(start(work, folder, Faults(folder, at, how)))
                    outcome,said = again(work, folder, want)
                    seen[how, outcome] += 1
                    if outcome!='equal' or code not in ((9,) if how!='refuse' else (0,2)):
                        bad.append((name, how, at, code, outcome, said[:150]))
    return seen,bad


def finished_again(names):
    "Work that is finished and started again: what is trained anew, and what changes on the disk"
    anew = {}
    for name in names:
        with tempfile.TemporaryDirectory() as tmp:
            folder = Path(tmp)/'out'
            want = works.WORKS[name](folder)
            works.TRAINED.clear()
            assert works.WORKS[name](folder)==want
            anew[name] = len(works.TRAINED)
    return anew


READERS = dict(works.WORKS, saving=works.reading, bundling=works.loading)


def damaged(names, cases, seed=0):
    "Every file that is read again, spoilt in `cases` ways: the next start is equal, or says what is wrong"
    seen,bad = Counter(),[]
    for name in names:
        work,read = works.WORKS[name],READERS[name]
        want = unbroken(work)
        with tempfile.TemporaryDirectory() as tmp:
            folder,kept = Path(tmp)/'out',Path(tmp)/'kept'
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


def pairs(names, each, seed=0):
    "Two processes, the first paused at a random operation: both end, and what they leave is as from one"
    seen,bad,rng = Counter(),[],random.Random(seed)
    for name in names:
        work = works.WORKS[name]
        want = unbroken(work)
        with tempfile.TemporaryDirectory() as tmp:
            n = operations(work, Path(tmp)/'out')
        for _ in range(each):
            with tempfile.TemporaryDirectory() as tmp:
                folder,at = Path(tmp)/'out',rng.randint(1, n)
                codes = pair(work, folder, at)
                outcome,said = again(work, folder, want)
                seen['second '+{0:'waited, or was first', 2:'was refused'}.get(codes[1], 'broke'), outcome] += 1
                if outcome!='equal' or codes[0]!=0 or codes[1] not in (0,2):
                    bad.append((name, at, codes, outcome, said[:150]))
    return seen,bad


def say(what, campaign):
    t0 = time.time()
    seen,bad = campaign()
    print(json.dumps(dict(campaign=what, cases=sum(seen.values()), seconds=round(time.time()-t0),
        outcomes={', '.join(k): v for k,v in sorted(seen.items())}, bad=len(bad), examples=bad[:5])), flush=True)
    return len(bad)


def main():
    import pytest
    from transformers.utils import logging
    logging.disable_progress_bar()
    works.pretend(pytest.MonkeyPatch())
    names,wrong = [*works.WORKS],0
    for what,f in (('two at once, one paused', lambda: pairs(names, 8)), ('kills and full disks', lambda: kills(names)),
            ('damaged files', lambda: damaged(names, 60))):
        wrong += say(what, f)
    print(json.dumps(dict(trained_anew=finished_again(['comparing','sweeping']))))
    sys.exit(bool(wrong))


if __name__=='__main__':
    main()
