"""Run the experiments behind the records in `results/claims`.

    python -m idp_tutorial.reproduction.papers.claim_runs EXPERIMENT TASK ... --out FILE

The experiments are `controls`, `methods`, `fewshot`, `supplemented`, `differences` and `layers`.
The environment variable IDP_DATA names the folder of tasks. `effects` trains nothing: it writes
the results of `differences` into `docs/differences.md`.
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from idp_tutorial.assembly.build import build_model
from idp_tutorial.assembly.config import RunConfig, RunOptions, recorded_option
from idp_tutorial.core.prompted_model import PromptedModel
from idp_tutorial.data.task import Task
from idp_tutorial.data.tasks import TASKS, load_config_task
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.reproduction.analysis.prompt_swaps import evaluate_prompt_swaps
from idp_tutorial.reproduction.papers.supplementary_training import run_supplementary_training
from idp_tutorial.runs.compare import compare_methods
from idp_tutorial.runs.contrasts import adjust_p_values_holm, estimate_contrast
from idp_tutorial.runs.experiment import Experiment
from idp_tutorial.runs.learning_rate_search import train_at_learning_rate, try_learning_rates
from idp_tutorial.runs.logits import load_logits, write_run_arrays
from idp_tutorial.runs.record import RunStore, make_fingerprint, run_digests
from idp_tutorial.utils.process import MessageHandler, handle_messages
from idp_tutorial.utils.records import append_record, read_existing_records, read_records

__all__ = [
    "run_claim_experiment",
]

CONTROLS = ["majority", "probe", "side-network"]
LEARNING_RATE_GRIDS = {  # the first of a method's three learning rates: the five that are tried
    1e-2: (3e-3, 1e-2, 3e-2, 1e-1, 3e-1),
    1.5e-3: (5e-4, 1.5e-3, 5e-3, 1.5e-2, 5e-2),
    3e-3: (1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
    1e-3: (3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
    5e-4: (1.5e-4, 5e-4, 1.5e-3, 5e-3, 1.5e-2),
    5e-5: (2e-5, 5e-5, 1.5e-4, 5e-4, 1.5e-3),
}

# method: changed options of `docs/differences.md`; all others have the method's default
DIFFERENCES: dict[str, list[dict]] = {
    "s-idpg-phm": [
        dict(sentence_pooling="noisy"),
        dict(sentence_pooling="cls"),
        dict(pooling="cls"),
        dict(standardise=False),
        dict(sentence_dropout=0.0, generator_dropout=0.0),
        dict(schedule="constant", beta2=0.98, eps=1e-6, weight_decay=0.1),
        dict(generator="residual"),
        dict(generator="layer-norm"),
        dict(generator="both"),
    ],
    "m-idpg-phm": [
        dict(insertion="replace"),
        dict(insertion="insert"),
        dict(insertion="kv"),
        dict(generator_input="layer0"),
        dict(parameter_sharing="S"),
        dict(parameter_sharing="L"),
        dict(bottleneck=256),
        dict(prompt_length=20),
    ],
    "prompt-tuning": [dict(position=1)],
    "p-tuning-v2": [dict(insertion="add"), dict(insertion="replace")],
    "lpt-npg": [
        dict(standardise=False),
        dict(prompt_dropout=0.0),
        dict(dropout_below_prompt=True),
        dict(bottleneck=256, prompt_length=10),
        dict(weight_decay=0.1),
        dict(weight_decay=0.1, no_decay_on_bias_and_norm=True),
    ],
    "id-spam": [dict(prompt_relu=True), dict(attention_input="embeddings")],
}


def make_base_config(
    args: argparse.Namespace,
    task_name: str,  # a task, or a few-shot sample of it such as `mr-k1000`
) -> RunOptions:
    """Return the options that all methods share on a task."""
    task, _, shots = task_name.partition("-k")
    is_bundled = TASKS[task].hub_dataset == ("bundled",)
    return RunOptions(
        task=task,
        shots=int(shots) if shots else None,
        data=None if is_bundled else os.environ["IDP_DATA"],
        backbone=args.backbone,
        dtype=args.dtype,
        head=args.head,
        prompt_length=5,
        standardise=True,
        steps=args.steps,
        batch_size=args.batch_size,
        eval_every=max(1, args.steps // args.evaluations),
        cache="both",
        cache_dir=args.cache,
        precision=args.precision,
        device="cpu",
    )


def make_method_config(args: argparse.Namespace, task_name: str, method: str) -> RunConfig:
    """Return the config of a method on a task, with the options of the head."""
    return make_base_config(args, task_name).with_method(
        method, lr=args.lr, head_init=args.head_init, head_lr=args.head_lr or None
    )


def parse_options(options: str) -> dict:
    """Return the options in a string such as 'insertion=add,bottleneck=256'."""
    pairs = dict(o.split("=") for o in options.split(","))
    return {name: int(value) if value.isdigit() else value for name, value in pairs.items()}


def run_controls(args: argparse.Namespace) -> None:
    """Run the controls on every task and split."""
    for task_name in args.tasks:
        for split_seed in range(args.split_seeds or 1):
            base = replace(make_base_config(args, task_name), split_seed=split_seed)
            compare_methods(args.methods or CONTROLS, base, args.seeds, out=args.out)


def score_prompt_swaps(
    model: PromptedModel,
    task: Task,
    cfg: RunConfig,
    record: dict,  # of the run
    out: Path,  # its file
) -> dict:
    """Return the scores with exchanged prompts; add their logits to those of the run."""
    scores, outputs = evaluate_prompt_swaps(model, task, cfg)
    path = out.parent / record["logits"]
    arrays = load_logits(record, out.parent)
    for name, output in outputs.items():
        dtype = np.float16 if output.is_floating_point() else np.int16
        arrays[f"swap_{name}"] = output.numpy().astype(dtype)
    record |= write_run_arrays(path.parent, path.name, arrays)
    return scores


def run_methods(args: argparse.Namespace) -> None:
    """Run every method on every task, with the best of five learning rates."""
    for task_name, method in product(args.tasks, args.methods):
        cfg = make_method_config(args, task_name, method).with_options(**args.set)
        run_all_seeds(args, replace(cfg, head_lr=None) if method == "head-only" else cfg)


def run_few_shot(args: argparse.Namespace) -> None:
    """Run four few-shot splits of every task; the learning rate is chosen on split 0 with seed 0.

    As in LPT there is no classification head but a verbalizer, unless `--set` gives a head.
    """
    for task_name, method in product(args.tasks, args.methods):
        prompt_length = 5 if method == "lpt-npg" else 20
        base = make_base_config(args, task_name).with_options(prompt_length=prompt_length)
        cfg = base.with_method(method, lr=args.lr, head="verbalizer")
        if args.set.get("head") == "classification":  # as in IDPG
            cfg = replace(cfg, head_init=args.head_init, head_lr=args.head_lr or None)
        cfg = cfg.with_options(**args.set)
        lr = None
        for split_seed in range(args.split_seeds or 4):
            lr = run_all_seeds(args, replace(cfg, split_seed=split_seed), lr)


def run_supplemented(args: argparse.Namespace) -> None:
    """Run methods on the backbone as it is and after supplementary training (IDPG §A.4).

    The gains are written to the file `gains-...` beside `out`.
    """
    for task_name, method in product(args.tasks, args.methods):
        plain = make_method_config(args, task_name, method)
        first = make_base_config(args, args.first)
        folder = args.folder / f"{Path(args.backbone).name}-{first.task}-{method}"
        task = load_config_task(first)
        stage1 = run_supplementary_training(
            replace(plain, eval_every=50),
            build_model,
            task,
            folder,
            args.first_lr,
            3,
            with_swapped_pairs=task.pair,
        )
        score, steps = stage1["validation"], stage1["steps"]
        print(f"stage 1 {method}: validation {score:.1f} after {steps} steps", flush=True)
        for cfg in (plain, replace(plain, backbone=str(folder), init_from=str(folder))):
            run_all_seeds(args, cfg)
    file = args.out.with_name(f"gains-{args.out.name}")
    file.unlink(missing_ok=True)
    for record in compute_gains(read_existing_records(args.out), args.backbone):
        append_record(record, file)


def compute_gains(records: list[dict], backbone: str) -> list[dict]:
    """Return a record of the gain for each seed that has a run with and without stage 1."""
    run_fields = ("method", "task", "shots", "split_seed", "head", "seed")
    copied_fields = [*run_fields, "schema", "status", "metric", "logits", "logits_digest"]
    copied_fields += ["init_from", "provenance"]
    finished = [r for r in records if r["status"] == "done"]
    gains = []
    for after in (r for r in finished if r["init_from"]):
        for before in (r for r in finished if not r["init_from"]):
            if any(before[f] != after[f] for f in run_fields):
                continue
            gain = {f: after[f] for f in copied_fields}
            gain |= dict(
                backbone=backbone,
                setting="supplementary",
                logits_before=before["logits"],
                logits_before_digest=before["logits_digest"],
                score=after["score"] - before["score"],
                scores=dict(logits_before=before["score"], after=after["score"]),
            )
            gains.append(gain)
    return gains


def run_differences(args: argparse.Namespace) -> None:
    """Run every method with its default options and with each change, at its default lr."""
    for task_name, method in product(args.tasks, args.methods or DIFFERENCES):
        changes = [c for c in DIFFERENCES[method] if not args.switches or {*c} & {*args.switches}]
        for change in ({}, *changes):
            cfg = make_method_config(args, task_name, method)
            cfg = replace(cfg, lr=METHODS[method].default_learning_rate)
            if change.get("dropout_below_prompt"):  # no state is the same twice
                cfg = replace(cfg, cache="none")
            run_all_seeds(args, cfg.with_options(**change))


def run_prompt_layers(args: argparse.Namespace) -> None:
    """Run every method with its prompt at each of the given layers."""
    for task_name, method, layer in product(args.tasks, args.methods, args.layers):
        cfg = make_method_config(args, task_name, method)
        run_all_seeds(args, cfg.with_options(layer=layer))


def estimate_effect(
    records: list[dict],
    method: str,
    change: dict,  # the changed options
    defaults: dict,  # the method's values of the options of `DIFFERENCES`
    folder: Path,  # of the logits
) -> dict | None:
    """Return the contrast of a changed option with the default, or None without records."""
    sides = []
    for side, options in (("a", change), ("b", {})):
        expected = defaults | options
        sides += [
            {**r, "method": side}
            for r in records
            if r["method"] == method
            and all(recorded_option(r, name) == value for name, value in expected.items())
        ]
    return estimate_contrast(sides, "a", "b", folder=folder)


def write_effects(args: argparse.Namespace) -> None:
    """Write the table of `docs/differences.md` from the files that match the pattern `out`."""
    records = read_records(*sorted(args.out.parent.glob(args.out.name)))
    names = {name for changes in DIFFERENCES.values() for change in changes for name in change}
    base = RunOptions(prompt_length=5, standardise=True)
    effects = {}
    for method, changes in DIFFERENCES.items():
        options = base.with_method(method).to_dict()
        defaults = {name: value for name, value in options.items() if name in names}
        for change in changes:
            effect = estimate_effect(records, method, change, defaults, args.out.parent)
            if effect and effect["runs"] >= args.seeds:
                label = ", ".join(f"{name}={value!r}" for name, value in change.items())
                effects[method, label] = effect
    p_values = adjust_p_values_holm([effect["p"] for effect in effects.values()])
    rows = []
    for ((method, label), effect), p in zip(effects.items(), p_values):
        tasks = sorted({setting["task"] for setting in effect["settings"]})
        rows.append(
            f"| {method} | `{label}` | {', '.join(tasks)} | "
            f"{effect['effect']:+.1f} ({effect['low']:+.1f} … {effect['high']:+.1f}) | "
            f"{effect['detectable']:.1f} | {effect['runs']} | {'yes' if p < 0.05 else 'no'} |"
        )
    table = "\n".join(
        [
            "| method | switch | tasks | difference from the reference | detectable | seeds "
            "| significant |",
            "|---|---|---|--:|--:|--:|---|",
            *rows,
        ]
    )
    page = Path("docs/differences.md")  # a command of the repository's root
    marked = re.compile("(<!-- effects -->\n).*?(<!-- end of effects -->)", re.S)
    page.write_text(marked.sub(lambda m: f"{m[1]}{table}\n{m[2]}", page.read_text()))
    print(table)


def steps_to_95_percent(history: Sequence[tuple[int, float]]) -> int:
    """Return the step of the first evaluation that reaches 95 % of the best score."""
    best = max(score for _, score in history)
    return next(step for step, score in history if score >= 0.95 * best)


def run_seed(
    args: argparse.Namespace,
    cfg: RunConfig,  # with the seed; without `lr`, the best learning rate is chosen
    task: Task,
    learning_rates: Sequence[float],
) -> dict:
    """Train one seed with its learning rate or the best one; return its record."""
    start_time = time.time()
    trials = try_learning_rates(
        partial(train_at_learning_rate, cfg, task),
        [cfg.lr] if cfg.lr else learning_rates,
        2,  # more learning rates while the best one is at an edge
        f"{cfg.task} {cfg.method} seed {cfg.seed}",
    )
    if trials.trained:
        experiment, model = trials.trained
        experiment.start_time = start_time
        record = experiment.score(model, trials.log, records_file=args.out).to_dict()
        record["steps_to_95_percent"] = steps_to_95_percent(record["history"])
        has_own_prompts = METHODS[cfg.method].kind in ("generated", "second pass")
        if args.what == "methods" and has_own_prompts:
            record["swap"] = score_prompt_swaps(model, task, experiment.cfg, record, args.out)
    else:
        error = f"diverged with every learning rate of {trials.tried}"
        record = Experiment(cfg, task).record_divergence(error, lr=cfg.lr).to_dict()
    if not cfg.lr:
        record |= dict(learning_rates_tried=trials.tried, lr_at_grid_edge=trials.is_best_at_edge)
    return record


def run_all_seeds(
    args: argparse.Namespace,
    cfg: RunConfig,  # without `lr`, seed 0 chooses the learning rate of all
    chosen_lr: float | None = None,  # a learning rate that an earlier split has chosen
) -> float | None:  # the learning rate
    """Run the seeds that the file lacks."""
    task = load_config_task(cfg)
    grid = args.learning_rates or LEARNING_RATE_GRIDS[METHODS[cfg.method].learning_rates[0]]
    is_few_shot = cfg.head == "verbalizer" or args.what == "fewshot"
    chosen_on = "draw 0, seed 0" if is_few_shot else "seed 0"  # as in older records
    lr_selection = f"best of {len(grid)} on validation, {chosen_on}"
    if cfg.lr:
        lr_selection = "given"
    store = RunStore(args.out)
    digests = run_digests(cfg, task)
    lr = chosen_lr or cfg.lr
    for seed in range(args.seeds):
        if seed and not lr:  # every learning rate diverged with seed 0
            break
        cfg = replace(cfg, lr=lr, seed=seed)
        fingerprint = make_fingerprint(cfg, digests, lr_selection=lr_selection)
        record = store.get_or_run(fingerprint, partial(run_seed, args, cfg, task, grid))
        lr = lr or record["lr"]
        result = record.get("score", record["status"])
        print(f"{cfg.task} {cfg.method} seed {seed}: {result} {record.get('swap', '')}", flush=True)
    return lr


EXPERIMENTS = {
    "controls": run_controls,
    "methods": run_methods,
    "fewshot": run_few_shot,
    "supplemented": run_supplemented,
    "differences": run_differences,
    "layers": run_prompt_layers,
    "effects": write_effects,
}


def run_claim_experiment() -> None:
    """Run the experiment that the command line names."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("what", choices=tuple(EXPERIMENTS))
    p.add_argument("tasks", nargs="*", help="such as trec, mr-k1000, two-domains")
    p.add_argument(
        "--out", type=Path, required=True, help="a file of records; its runs are not repeated"
    )
    p.add_argument("--methods", type=lambda s: s.split(","))
    p.add_argument("--backbone", default="tiny")
    p.add_argument("--dtype", default="float32")
    p.add_argument(
        "--precision", default="bf16", help="no: for a processor without bfloat16 instructions"
    )
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument(
        "--split_seeds",
        type=int,
        help="number of splits, for `fewshot` (default: 4) and `controls` (default: 1)",
    )
    p.add_argument("--steps", type=int, default=620)
    p.add_argument("--batch_size", type=int, default=16)
    p.add_argument("--evaluations", type=int, default=10)
    p.add_argument(
        "--head",
        default="classification",
        help="or verbalizer, with --head_init random --head_lr 0",
    )
    p.add_argument("--head_init", default="probe")
    p.add_argument(
        "--head_lr",
        type=float,
        default=1e-3,
        help="learning rate of the head; 0: that of the prompt",
    )
    p.add_argument("--lr", type=float, help="one learning rate; by default the best of five")
    p.add_argument(
        "--learning_rates",
        type=lambda s: [float(r) for r in s.split(",")],
        help="learning rates to choose from, in place of five",
    )
    p.add_argument(
        "--switches",
        type=lambda s: s.split(","),
        help="for `differences`: only these options, such as generator_input,parameter_sharing",
    )
    p.add_argument(
        "--layers",
        type=lambda s: [int(n) for n in s.split(",")],
        help="for `layers`: layers from 0 (the input)",
    )
    p.add_argument(
        "--set",
        type=parse_options,
        default={},
        help="for `methods` and `fewshot`: options of RunConfig, such as insertion=add, "
        "bottleneck=256,prompt_length=10 or head=classification",
    )
    p.add_argument("--first", help="for `supplemented`: the task of stage 1, such as sst2-k1000")
    p.add_argument(
        "--first_lr",
        type=float,
        default=1.5e-4,
        help="learning rate of stage 1 (three epochs with batches of 32)",
    )
    p.add_argument(
        "--folder", type=Path, help="for `supplemented`: folder for the backbones of stage 1"
    )
    p.add_argument("--cache", help="folder of cached hidden states")
    args = p.parse_args()
    with handle_messages(MessageHandler(sys.stdout)):
        EXPERIMENTS[args.what](args)


if __name__ == "__main__":
    run_claim_experiment()
