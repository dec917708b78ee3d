"""Count the outcomes of many faults, as a line of JSON for each campaign and work.

`python tests/faults/campaigns.py [--only KIND] [--works a,b] [--seed N] [--cases N]
[--counts FILE]`
"""

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
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[i]) for i in (2, 1)]

import works
from harness import REFUSALS, Faults, damages, end, operations, pair, start

KINDS = "random", "malicious", "commands", "pairs", "kills", "damaged"
FAULT_KINDS = "kill", "half", "power", "refuse"


@contextmanager
def place():
    """Yield a folder to work in, and a function that counts the training steps done for it."""
    with tempfile.TemporaryDirectory() as tmp:
        done = Path(tmp) / "done"
        works.DONE[:] = [done]
        try:
            yield Path(tmp) / "out", lambda: done.stat().st_size if done.exists() else 0
        finally:
            works.DONE.clear()


def unbroken(work):
    with place() as (folder, trained):
        return work(folder), trained()


def again(work, folder, want):
    """Start a work again, and return the outcome and a message."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            got = work(folder)
        except REFUSALS as e:
            return "refused", str(e)
        except Exception as e:
            return "an error that nobody expected", f"{type(e).__name__}: {e}"
    return ("equal", "") if got == want else ("silently another result", "")


def kills(name, every=1, fault_kinds=FAULT_KINDS, first=1):
    """Break a work at every `every`-th file operation, and start it again."""
    seen = Counter()
    bad = []
    work = works.WORKS[name]
    want, once = unbroken(work)
    with place() as (folder, _):
        n = operations(work, folder)
    for operation in range(first, n + 1, every):
        for fault in fault_kinds:
            with place() as (folder, trained):
                code = end(start(work, folder, Faults(folder, operation, fault)))
                outcome, message = again(work, folder, want)
                if outcome == "equal" and trained() > once + works.AGAIN.get(name, 0):
                    outcome = "finished work done again"
                    message = f"{trained()} for {once}"
            seen[fault, outcome] += 1
            if outcome != "equal" or code not in ((9,) if fault != "refuse" else (0, 2)):
                bad.append((name, fault, operation, code, outcome, message[:150]))
    return seen, bad


def finished_again(name):
    """Return the number of steps that are trained when a finished work is started again."""
    with place() as (folder, trained):
        want = works.WORKS[name](folder)
        once = trained()
        assert works.WORKS[name](folder) == want
        return trained() - once


READERS = dict(works.WORKS, saving=works.reading, bundling=works.loading)


def damaged(name, cases, seed=0):
    """Damage every file in `cases` ways, and start the work again."""
    seen = Counter()
    bad = []
    work = works.WORKS[name]
    read = READERS[name]
    want, _ = unbroken(work)
    with place() as (folder, _):
        pristine = folder.with_name("kept")
        work(folder)
        shutil.copytree(folder, pristine)
        files = [
            p.relative_to(pristine)
            for p in sorted(pristine.rglob("*"))
            if p.is_file() and ".lock" not in p.name
        ]
        whole = [(pristine / f).read_bytes() for f in files]
        for file, data in zip(files, whole):
            others = [w for w in whole if w != data]
            for kind, spoilt in damages(data, cases, f"{seed}{file}", others) if data else ():
                shutil.rmtree(folder)
                shutil.copytree(pristine, folder)
                (folder / file).write_bytes(spoilt)
                outcome, message = again(read, folder, want)
                seen[kind, outcome] += 1
                if outcome not in ("equal", "refused"):
                    bad.append((name, str(file), kind, outcome, message[:150]))
    return seen, bad


def pairs(name, each, seed=0):
    """Run two processes, the first one paused at a random operation: the result is that of one."""
    seen = Counter()
    bad = []
    rng = random.Random(f"{seed}{name}")
    work = works.WORKS[name]
    want, _ = unbroken(work)
    with place() as (folder, _):
        n = operations(work, folder)
    for _ in range(each):
        with place() as (folder, _):
            operation = rng.randint(1, n)
            codes = pair(work, folder, operation)
            outcome, message = again(work, folder, want)
        seen[
            "second " + {0: "waited, or was first", 2: "was refused"}.get(codes[1], "broke"),
            outcome,
        ] += 1
        if outcome != "equal" or codes[0] != 0 or codes[1] not in (0, 2):
            bad.append((name, operation, codes, outcome, message[:150]))
    return seen, bad


def random_input(cases, seed):
    """Try random command lines and random files, half of the cases each; a failure stops them."""
    import test_random_input as t
    from small import backbone

    from results.pretraining.pretrain import save_backbone

    t.SEEN.clear()
    bb = backbone(max_position_embeddings=258)
    bad = []
    with tempfile.TemporaryDirectory() as tmp:
        where = Path(tmp) / "place"
        where.mkdir()
        save_backbone(bb.model, bb.tokenizer, Path(tmp) / "backbone")
        for check, arguments in (
            (t.lines_of, t.furnished(where, Path(tmp) / "backbone")),
            (t.files_of, Path(tmp)),
        ):
            try:
                check(cases // 2, arguments, seed)
            except BaseException as e:  # a failure of hypothesis shows the case
                bad.append((check.__name__, " ".join([str(e), *getattr(e, "__notes__", ())])[:600]))
    return t.SEEN, bad


def malicious_campaigns(o):
    """Run the campaigns of malicious descriptions and of malicious folders."""
    import descriptions
    import folders

    n_failures = 0
    for name in descriptions.WORKS:
        campaign = partial(descriptions.malicious, name, o.descriptions, o.seed)
        n_failures += report("malicious", name, campaign, o.counts, o.seed)
    campaign = partial(folders.malicious, 800, o.seed)
    return n_failures + report("malicious", "a backbone folder", campaign, o.counts, o.seed)


def command_campaigns(o):
    """Run two processes of every command that writes, with real training."""
    import commands

    n_failures = 0
    for name in commands.NAMES:
        campaign = partial(commands.at_once, name, 3, o.seed)
        n_failures += report("pairs", f"idp {name}", campaign, o.counts, o.seed)
    return n_failures


def report(kind, name, campaign, counts, seed):
    t0 = time.time()
    seen, bad = campaign()
    line = json.dumps(
        dict(
            campaign=kind,
            work=name,
            seed=seed,
            cases=sum(seen.values()),
            seconds=round(time.time() - t0),
            outcomes={": ".join(k): v for k, v in sorted(seen.items())},
            bad=len(bad),
            examples=bad[:5],
        )
    )
    print(line, flush=True)
    if counts:
        with open(counts, "a", encoding="utf-8") as f:
            f.write(line + "\n")
    return len(bad)


def main():
    import pytest
    from transformers.utils import logging

    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--only", choices=KINDS)
    p.add_argument("--works", default=",".join(works.WORKS))
    p.add_argument(
        "--seed", type=int, default=int(time.time() // 86400), help="seed (default: the day)"
    )
    p.add_argument("--cases", type=int, default=60, help="ways to damage a file")
    p.add_argument("--inputs", type=int, default=2000, help="random command lines and files")
    p.add_argument("--descriptions", type=int, default=600, help="odd descriptions of each file")
    p.add_argument("--every", type=int, default=1, help="file operations from one kill to the next")
    p.add_argument("--counts", help="file to add the lines to")
    o = p.parse_args()
    logging.disable_progress_bar()
    n_failures = 0
    if o.only in (None, "random"):  # with real training
        n_failures += report(
            "random", "input", lambda: random_input(o.inputs, o.seed), o.counts, o.seed
        )
    if o.only in (None, "malicious"):  # also with real training
        n_failures += malicious_campaigns(o)
    if o.only in (None, "commands"):
        n_failures += command_campaigns(o)
    works.pretend(pytest.MonkeyPatch())
    for name in o.works.split(",") if o.only not in KINDS[:3] else ():
        campaigns = dict(
            pairs=partial(pairs, name, 8, o.seed),
            kills=partial(kills, name, o.every),
            damaged=partial(damaged, name, o.cases, o.seed),
        )
        for kind, campaign in campaigns.items():
            if o.only in (None, kind):
                n_failures += report(kind, name, campaign, o.counts, o.seed)
    sys.exit(bool(n_failures))


if __name__ == "__main__":
    main()
