"""The runs of `results/claims`: measure.py controls|methods|fewshot|supplemented|differences|layers TASK … --out FILE
(IDP_DATA is set). `effects` reads what `differences` wrote into the page of differences; it trains nothing."""
import argparse
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from idp_tutorial.analysis.prompt_swaps import prompt_swaps
from idp_tutorial.config import RunConfig
from idp_tutorial.data.tasks import TASKS, load_task
from idp_tutorial.experiments.comparison import compare, made_by
from idp_tutorial.experiments.contrasts import contrast, holm
from idp_tutorial.experiments.evidence import made_since
from idp_tutorial.experiments.rates import beyond
from idp_tutorial.experiments.run import failed, record_of, trained
from idp_tutorial.experiments.supplementary import supplement
from idp_tutorial.methods.build import build
from idp_tutorial.methods.registry import METHODS
from idp_tutorial.records import append, read_records, stored

CONTROLS = ['majority','probe','side-network']
FIVE = {1e-2: (3e-3,1e-2,3e-2,1e-1,3e-1), 1.5e-3: (5e-4,1.5e-3,5e-3,1.5e-2,5e-2), 3e-3: (1e-3,3e-3,1e-2,3e-2,1e-1),
    1e-3: (3e-4,1e-3,3e-3,1e-2,3e-2), 5e-4: (1.5e-4,5e-4,1.5e-3,5e-3,1.5e-2),
    5e-5: (2e-5,5e-5,1.5e-4,5e-4,1.5e-3)} # rates, by the first of a method's three

DIFFERENCES = { # of `docs/differences.md`: what one switch changes, all else as in the method's default
    's-idpg-phm':[dict(sentence_pass='noisy'), dict(sentence_pass='cls'), dict(readout='cls'), dict(standardise=False),
        dict(sentence_dropout=0., generator_dropout=0.),
        dict(schedule='constant', beta2=.98, eps=1e-6, weight_decay=.1),
        dict(generator='residual'), dict(generator='layer-norm'), dict(generator='both')],
    'm-idpg-phm':[dict(inject='replace'), dict(inject='insert'), dict(inject='kv'), dict(reads='layer0'),
        dict(share='S'), dict(share='L'), dict(m=256), dict(t=20)],
    'prompt-tuning':[dict(position=1)],
    'p-tuning-v2':[dict(way='add'), dict(way='replace')],
    'lpt-npg':[dict(standardise=False), dict(prompt_dropout=0.), dict(lower_dropout=True), dict(m=256, t=10),
        dict(weight_decay=.1), dict(weight_decay=.1, no_decay=True)],
    'id-spam':[dict(out_relu=True), dict(embeds='embeddings')]}


def base(a, name): # of a task, perhaps `mr-k1000`
    task,_,k = name.partition('-k')
    bundled = TASKS[task].hub==('bundled',)
    return RunConfig(task=task, k=int(k) if k else None, data=None if bundled else os.environ['IDP_DATA'],
        backbone=a.backbone, dtype=a.dtype, head=a.head, t=5, standardise=True, steps=a.steps, batch_size=a.batch_size,
        eval_every=max(1, a.steps//a.looks), cache='both', cache_dir=a.cache, precision=a.precision, device='cpu')


def said(options): # of one method, as words
    pairs = dict(o.split('=') for o in options.split(','))
    return {name: int(v) if v.isdigit() else v for name,v in pairs.items()}


def controls(a):
    for name in a.tasks:
        for draw in range(a.draws or 1):
            compare(a.methods or CONTROLS, replace(base(a, name), draw=draw), a.seeds, out=a.out)


def swapped(model, task, cfg, record, out): # scores of the exchanges; their logits join those of the run
    scores,said = prompt_swaps(model, task, cfg)
    file = out.parent/record['logits']
    kept = dict(np.load(file))
    new = {f'swap_{w}': o.numpy().astype(np.float16 if o.is_floating_point() else np.int16) for w,o in said.items()}
    np.savez_compressed(file, **kept, **new)
    return scores


def methods(a):
    "Five rates on validation with seed 0, two more at an edge, whose best run is that of seed 0; then the other seeds"
    for name in a.tasks:
        for method in a.methods:
            cfg = replace(base(a, name), method=method, head_init=a.head_init, head_lr=a.head_lr or None, **a.set)
            if method=='head-only':
                cfg = replace(cfg, head_lr=None)
            runs(a, cfg, load_task(cfg.task, cfg.data, cfg.k))


def fewshot(a):
    "Four draws of K examples, two seeds of each; rates chosen on draw 0 with seed 0. As LPT, no head: the label words"
    for name in a.tasks:
        for method in a.methods:
            cfg = replace(base(a, name), method=method, head='verbalizer', t=5 if method=='lpt-npg' else 20)
            if a.set.get('head')=='classification': # as IDPG
                cfg = replace(cfg, head_init=a.head_init, head_lr=a.head_lr or None)
            cfg = replace(cfg, **a.set)
            same = ('method','task','k','t','backbone','steps','head')
            before = [r for r in stored(a.out) if not r['draw'] and all(r[f]==getattr(cfg, f) for f in same)]
            if a.only and not before:
                raise SystemExit(f'--only {a.only}: run draw 0 of {method} on {name} first, which chooses the rate')
            chosen = before[0]['lr'] if a.only else None
            for draw in a.only or range(a.draws or 4):
                c = replace(cfg, draw=draw)
                chosen = runs(a, c, load_task(c.task, c.data, c.k, draw), swaps=False, lr=chosen)


def supplemented(a):
    "`methods` on the backbone as it is, and as stage 1 tunes it (IDPG §A.4); gains go into `gains-…` beside `out`"
    for name in a.tasks:
        for method in a.methods:
            plain = replace(base(a, name), method=method, head_init=a.head_init, head_lr=a.head_lr or None)
            first = base(a, a.first)
            folder = a.folder/f'{Path(a.backbone).name}-{first.task}-{method}'
            task = load_task(first.task, first.data, first.k)
            made = supplement(replace(plain, eval_every=50), build, task, folder, a.first_lr, 3, swap=task.pair)
            print(f"stage 1 {method}: validation {made['validation']:.1f} after {made['steps']} steps", flush=True)
            tuned = replace(plain, backbone=str(folder), start=str(folder))
            for cfg in (plain, tuned):
                runs(a, cfg, load_task(cfg.task, cfg.data, cfg.k), swaps=False)
    file = a.out.with_name(f'gains-{a.out.name}')
    file.unlink(missing_ok=True)
    for r in gains(stored(a.out), a.backbone):
        append(r, file)


def gains(records, backbone): # a record for each seed that has both: the answers of `before` are taken off its own
    found,key = [],('method','task','k','draw','head','seed')
    for r in (r for r in records if r['status']=='done' and r['start']):
        for o in (o for o in records if o['status']=='done' and not o['start'] and all(o[f]==r[f] for f in key)):
            found.append({f: r[f] for f in ('schema','status',*key,'metric','logits','start','made')} | dict(
                backbone=backbone, setting='supplementary', before=o['logits'], score=r['score']-o['score'],
                scores=dict(before=o['score'], after=r['score'])))
    return found


def differences(a):
    "Every method as it is and with each switch, at its own middle rate"
    for name in a.tasks:
        for method in a.methods or DIFFERENCES:
            for changed in ({}, *(v for v in DIFFERENCES[method] if not a.switches or {*v} & {*a.switches})):
                how = dict(cache='none') if changed.get('lower_dropout') else {} # nothing below stays as it is
                cfg = replace(base(a, name), **how, head_init=a.head_init, head_lr=a.head_lr or None)
                cfg = replace(cfg, method=method, **changed)
                a.lr = METHODS[method].rate
                runs(a, cfg, load_task(cfg.task, cfg.data, cfg.k), swaps=False)


def layers(a):
    "As `methods`, the prompt at each of these layers"
    for name in a.tasks:
        for method in a.methods:
            for layer in a.layers:
                cfg = replace(base(a, name), head_init=a.head_init, head_lr=a.head_lr or None)
                cfg = replace(cfg, method=method, layer=layer)
                runs(a, cfg, load_task(cfg.task, cfg.data, cfg.k), swaps=False)


def effects(a):
    "A table of the page, from the files that `out` names, with a * if several: switch, effect, interval, visible from"
    records,found = read_records(*sorted(a.out.parent.glob(a.out.name))),{}
    names = {'method', *(f for variants in DIFFERENCES.values() for v in variants for f in v)}
    plain = {f: getattr(RunConfig(t=5, standardise=True), f) for f in names}
    for method,variants in DIFFERENCES.items():
        for v in variants:
            a_,b_ = [[r for r in records if all(r[f]==want for f,want in (plain|dict(method=method)|c).items())]
                for c in (v, {})]
            f = contrast([{**r, 'method':side} for side,rs in (('a', a_), ('b', b_)) for r in rs], 'a', 'b',
                folder=a.out.parent)
            if f and f['runs']>=a.seeds:
                found[method, ', '.join(f'{k}={x!r}' for k,x in v.items())] = f
    p = holm([f['p'] for f in found.values()])
    rows = [f"| {m} | `{v}` | {', '.join(sorted({s[0] for s in f['settings']}))} | "
        f"{f['effect']:+.1f} ({f['low']:+.1f} … {f['high']:+.1f}) | "
        f"{f['detectable']:.1f} | {f['runs']} | {'yes' if h<.05 else 'no'} |"
        for ((m,v),f),h in zip(found.items(), p)]
    table = '\n'.join(['| method | switch | tasks | points on the default | visible from | seeds | decided |',
        '|---|---|---|--:|--:|--:|---|', *rows])
    page = Path(__file__).parents[1]/'docs'/'differences.md'
    between = re.compile('(<!-- effects -->\n).*?(<!-- end of effects -->)', re.S)
    page.write_text(between.sub(lambda m: f'{m[1]}{table}\n{m[2]}', page.read_text()))
    print(table)


def steps_to(history, share): # the first look at which validation reaches this share of the best one
    best = max(score for _,score in history)
    return next(step for step,score in history if score>=share*best)


def tried(a, cfg, task, rates): # model, log and config of the best, or None; all rates
    "Rates grow where the best is at an edge"
    began,said,best,todo = time.time(),[],None,[*rates]
    for rate in todo:
        c = replace(cfg, lr=rate)
        try:
            model,log = trained(c, task)
        except FloatingPointError:
            said.append((rate, 'diverged'))
        else:
            said.append((rate, round(log['validation'], 2)))
            print(f"{c.task} {c.method} seed {c.seed} lr {rate:g} validation {log['validation']:.1f} "
                f"{time.time()-began:.0f} s", flush=True)
            if best is None or log['validation']>best[1]['validation']:
                best = model,log,c
        if best and len(said)==len(todo)<len(rates)+2:
            todo += beyond(best[-1].lr, todo)
    return best,said


def runs(a, cfg, task, swaps=True, lr=None): # the rate; `lr`: one that an earlier draw has chosen
    rates = a.rates or FIVE[METHODS[cfg.method].rates[0]]
    first = 'draw 0, seed 0' if cfg.head=='verbalizer' or a.what=='fewshot' else 'seed 0'
    rates,how = ((a.lr,),'given') if a.lr else (rates,f'best of {len(rates)} on validation, {first}')
    cfg = replace(cfg, lr=a.lr)
    old = {r['seed']: r for r in stored(a.out) if made_by(r, replace(cfg, seed=r['seed']), how)}
    asked = old.get(0, {}).get('tried')
    if asked and [rate for rate,_ in asked][:len(rates)]!=[*rates]:
        raise SystemExit(f'{a.out} has {cfg.method} with other rates than {rates}: give these, or another --out')
    for seed in range(a.seeds):
        chosen = lr or old.get(0, {}).get('lr')
        if seed in old or old and not chosen: # every rate diverged with seed 0
            continue
        began = time.time()
        best,said = tried(a, replace(cfg, seed=seed), task, [chosen] if chosen else rates)
        if best:
            r = record_of(best[0], best[1], task, best[2], beside=a.out)
            r |= dict(steps_95=steps_to(r['history'], .95)) | made_since(began)
            if swaps and METHODS[cfg.method].kind in ('generated','second pass'):
                r['swap'] = swapped(best[0], task, best[2], r, a.out)
        else:
            r = failed(replace(cfg, seed=seed, lr=chosen), task, f'diverged with every rate of {said}', began)
        if not chosen and not a.lr:
            r |= dict(tried=said, edge=r['lr'] in (min(said)[0], max(said)[0]))
        old[seed] = r | dict(lr_selected=how)
        append(old[seed], a.out)
        print(f"{cfg.task} {cfg.method} seed {seed}: {r.get('score', r['status'])} {r.get('swap', '')}", flush=True)
    return old[0]['lr']


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('what', choices=('controls','methods','fewshot','supplemented','differences','layers','effects'))
    p.add_argument('tasks', nargs='*', help='such as trec, mr-k1000, two-domains')
    p.add_argument('--out', type=Path, required=True, help='a file of records; what it has is not run again')
    p.add_argument('--methods', type=lambda s: s.split(','))
    p.add_argument('--backbone', default='tiny')
    p.add_argument('--dtype', default='float32')
    p.add_argument('--precision', default='bf16', help='no: where the processor has no bfloat16 of its own')
    p.add_argument('--seeds', type=int, default=3)
    p.add_argument('--draws', type=int, help='of `fewshot` (four, whose seeds are two) and of `controls` (one)')
    p.add_argument('--only', type=lambda s: [int(n) for n in s.split(',')],
        help='of `fewshot`: these draws, at the rate that draw 0 has chosen (for a second process)')
    p.add_argument('--steps', type=int, default=620)
    p.add_argument('--batch_size', type=int, default=16)
    p.add_argument('--looks', type=int, default=10)
    p.add_argument('--head', default='classification', help='or verbalizer, with --head_init random --head_lr 0')
    p.add_argument('--head_init', default='probe')
    p.add_argument('--head_lr', type=float, default=1e-3, help='0: that of the prompt')
    p.add_argument('--lr', type=float, help='one rate; by default the best of five')
    p.add_argument('--rates', type=lambda s: [float(r) for r in s.split(',')], help='to choose among, in place of five')
    p.add_argument('--switches', type=lambda s: s.split(','), help='of `differences`: only these, such as reads,share')
    p.add_argument('--layers', type=lambda s: [int(n) for n in s.split(',')], help='of `layers`, from 0 (the input)')
    p.add_argument('--set', type=said, default={},
        help='of RunConfig, in `methods` and `fewshot`: such as way=add, m=256,t=10 or head=classification')
    p.add_argument('--first', help='of `supplemented`: the task of stage 1, such as sst2-k1000')
    p.add_argument('--first_lr', type=float, default=1.5e-4, help='of stage 1: three epochs of 32')
    p.add_argument('--folder', type=Path, help='of `supplemented`: for the backbones that stage 1 has tuned')
    p.add_argument('--cache')
    a = p.parse_args()
    dict(controls=controls, methods=methods, fewshot=fewshot, supplemented=supplemented, differences=differences,
        layers=layers, effects=effects)[a.what](a)


if __name__=='__main__':
    main()
