"""Run the experiments behind the records in `results/claims`.

    python -m results.claims.run EXPERIMENT TASKS --out FILE

The experiments are `controls`, `methods`, `fewshot`, `supplemented`, `differences` and `layers`.
The environment variable IDP_DATA names the folder of tasks. `effects` trains nothing: it writes
the results of `differences` into `docs/differences.md`.
"""

import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np

from idp_tutorial.assembly.build import build_model
from idp_tutorial.assembly.config import RunConfig, RunOptions, recorded_option
from idp_tutorial.cli.commands import TrainingRunOptions, command, parse_numbers, split_names
from idp_tutorial.core.planned_model import PlannedModel
from idp_tutorial.data.task import Task
from idp_tutorial.data.tasks import TASKS, load_config_task
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.runs.compare import compare_methods
from idp_tutorial.runs.experiment import Experiment
from idp_tutorial.runs.learning_rate_search import train_at_learning_rate, try_learning_rates
from idp_tutorial.runs.logits import load_logits, write_run_arrays
from idp_tutorial.runs.record import RunStore, make_fingerprint, run_digests
from idp_tutorial.runs.statistics import adjust_p_values_holm, estimate_contrast
from idp_tutorial.utils.checks import Range, check_name
from idp_tutorial.utils.process import handle_messages
from idp_tutorial.utils.records import append_record, read_existing_records, read_records
from results.claims.prompt_swaps import evaluate_prompt_swaps
from results.supplement.supplementary_training import run_supplementary_training

CONTROLS = ["majority", "probe", "side-network"]
# of supplementary training (IDPG, Table 4)
STAGE_1: dict[str, Any] = dict(batch_size=32, weight_decay=0.1, warmup=0.0)
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


def _split(text: str | None) -> list[str]:
    """Return the names in an option, or no names if it was not given."""
    return split_names(text) if text else []


@dataclass(frozen=True, kw_only=True)
class ClaimRunOptions(TrainingRunOptions):
    """Options of this command."""

    option_group: ClassVar[str] = "this command"
    positional_options: ClassVar[tuple[str, ...]] = ("experiment", "tasks")

    experiment: str  # controls, methods, fewshot, supplemented, differences, layers or effects
    tasks: str | None = None  # comma-separated, such as trec,mr-k1000
    methods: str | None = None  # comma-separated (default: for controls and differences, all)
    seeds: Annotated[int, Range(1, 10**6)] = 3  # number of seeds: 0 … seeds-1
    # number of splits, for fewshot (default: 4) and controls (default: 1)
    split_seeds: Annotated[int, Range(1, 10**6)] | None = None
    # learning rate of a classification head; 0: that of the prompt
    head_lr: Annotated[float, Range(0, 10**6)] = 1e-3
    # for differences: only these options, such as generator_input,parameter_sharing
    switches: str | None = None
    layers: str | None = None  # for layers: layers from 0 (the input)
    # for methods and fewshot: options of the run, such as insertion=add,bottleneck=256
    set: str | None = None
    # for supplemented: the task of stage 1, such as sst2-k1000 (default: the same task)
    first: str | None = None
    # learning rate of stage 1 (three epochs with batches of 32)
    first_lr: Annotated[float, Range(0, 10**6, is_low_excluded=True)] = 1.5e-4
    folder: str = "runs/supplemented"  # for supplemented: folder for the backbones of stage 1
    out: str = "runs/claims.jsonl"  # a file of records; its runs are not repeated

    def settings(self, methods: Iterable[str] = ()) -> Iterator[tuple[str, str]]:
        """Yield each task with each method, which are `methods` if none are given."""
        return product(_split(self.tasks), _split(self.methods) or methods)


def make_base_config(
    base: RunOptions,
    task_name: str,  # a task, or a few-shot sample of it such as `mr-k1000`
) -> RunOptions:
    """Return the options that all methods share on a task."""
    task, _, shots = task_name.partition("-k")
    is_bundled = TASKS[check_name(task, TASKS, "task")].hub_dataset == ("bundled",)
    return replace(
        base,
        task=task,
        shots=int(shots) if shots else None,
        data=None if is_bundled else os.environ["IDP_DATA"],
        head_init="random",
    )


def make_method_config(
    options: ClaimRunOptions, base: RunOptions, task_name: str, method: str
) -> RunConfig:
    """Return the config of a method on a task, with the options of the head."""
    return make_base_config(base, task_name).with_method(
        method, head_init=base.head_init, head_lr=options.head_lr or None
    )


def parse_options(text: str | None) -> dict:
    """Return the options in a string such as 'insertion=add,bottleneck=256'."""
    pairs = dict(o.split("=") for o in _split(text))
    return {name: int(value) if value.isdigit() else value for name, value in pairs.items()}


def run_controls(options: ClaimRunOptions, base: RunOptions) -> None:
    """Run the controls on every task and split."""
    methods = _split(options.methods) or CONTROLS
    for task_name, split_seed in product(_split(options.tasks), range(options.split_seeds or 1)):
        cfg = replace(make_base_config(base, task_name), split_seed=split_seed)
        compare_methods(methods, cfg, options.seeds, out=Path(options.out))


def score_prompt_swaps(
    model: PlannedModel,
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


def run_methods(options: ClaimRunOptions, base: RunOptions) -> None:
    """Run every method on every task, with the best of five learning rates."""
    for task_name, method in options.settings():
        cfg = make_method_config(options, base, task_name, method)
        cfg = cfg.with_options(**parse_options(options.set))
        run_all_seeds(options, replace(cfg, head_lr=None) if method == "head-only" else cfg)


def run_few_shot(options: ClaimRunOptions, base: RunOptions) -> None:
    """Run four few-shot splits of every task; the learning rate is chosen on split 0 with seed 0.

    As in LPT there is no classification head but a verbalizer, unless `--set` gives a head.
    """
    changes = parse_options(options.set)
    for task_name, method in options.settings():
        prompt_length = 5 if method == "lpt-npg" else 20
        cfg = make_base_config(base, task_name).with_options(prompt_length=prompt_length)
        cfg = cfg.with_method(method, head="verbalizer")
        if changes.get("head") == "classification":  # as in IDPG
            cfg = replace(cfg, head_init=base.head_init, head_lr=options.head_lr or None)
        cfg = cfg.with_options(**changes)
        lr = None
        for split_seed in range(options.split_seeds or 4):
            lr = run_all_seeds(options, replace(cfg, split_seed=split_seed), lr)


def run_supplemented(options: ClaimRunOptions, base: RunOptions) -> None:
    """Run methods on the backbone as it is and after supplementary training (IDPG §A.4).

    The gains are written to the file `gains-...` beside `out`.
    """
    for task_name, method in options.settings():
        plain = make_method_config(options, base, task_name, method)
        first = make_base_config(base, options.first or task_name)
        folder = Path(options.folder) / f"{Path(base.backbone).name}-{first.task}-{method}"
        task = load_config_task(first)
        n_rows = len(task.splits["train"]) * (2 if task.pair else 1)  # pairs in both orders
        n_steps = 3 * -(-n_rows // STAGE_1["batch_size"])  # three epochs
        stage1 = run_supplementary_training(
            replace(plain, steps=n_steps, eval_every=50, lr=options.first_lr, **STAGE_1),
            build_model,
            task,
            folder,
            with_swapped_pairs=task.pair,
        )
        score, steps = stage1["validation"], stage1["steps"]
        print(f"stage 1 {method}: validation {score:.1f} after {steps} steps", flush=True)
        for cfg in (plain, replace(plain, backbone=str(folder), init_from=str(folder))):
            run_all_seeds(options, cfg)
    out = Path(options.out)
    file = out.with_name(f"gains-{out.name}")
    file.unlink(missing_ok=True)
    for record in compute_gains(read_existing_records(out), base.backbone):
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


def run_differences(options: ClaimRunOptions, base: RunOptions) -> None:
    """Run every method with its default options and with each change, at its default lr."""
    switches = {*_split(options.switches)}
    for task_name, method in options.settings(DIFFERENCES):
        changes = [c for c in DIFFERENCES[method] if not switches or switches & {*c}]
        for change in ({}, *changes):
            cfg = make_method_config(options, base, task_name, method)
            cfg = replace(cfg, lr=METHODS[method].default_learning_rate)
            if change.get("dropout_below_prompt"):  # no state is the same twice
                cfg = replace(cfg, cache="none")
            run_all_seeds(options, cfg.with_options(**change))


def run_prompt_layers(options: ClaimRunOptions, base: RunOptions) -> None:
    """Run every method with its prompt at each of the given layers."""
    layers = parse_numbers(options.layers, "layers")
    for (task_name, method), layer in product(options.settings(), layers):
        cfg = make_method_config(options, base, task_name, method)
        run_all_seeds(options, cfg.with_options(layer=layer))


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


def write_effects(options: ClaimRunOptions, base: RunOptions) -> None:
    """Write the table of `docs/differences.md` from the files that match the pattern `out`."""
    out = Path(options.out)
    records = read_records(*sorted(out.parent.glob(out.name)))
    names = {name for changes in DIFFERENCES.values() for change in changes for name in change}
    effects = {}
    for method, changes in DIFFERENCES.items():
        values = base.with_method(method).to_dict()
        defaults = {name: value for name, value in values.items() if name in names}
        for change in changes:
            effect = estimate_effect(records, method, change, defaults, out.parent)
            if effect and effect["runs"] >= options.seeds:
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
    options: ClaimRunOptions,
    cfg: RunConfig,  # with the seed; without `lr`, the best learning rate is chosen
    task: Task,
    learning_rates: Sequence[float],
) -> dict:
    """Train one seed with its learning rate or the best one; return its record."""
    start_time = time.perf_counter()
    out = Path(options.out)
    trials = try_learning_rates(
        partial(train_at_learning_rate, cfg, task),
        [cfg.lr] if cfg.lr else learning_rates,
        2,  # more learning rates while the best one is at an edge
        f"{cfg.task} {cfg.method} seed {cfg.seed}",
    )
    if trials.trained:
        experiment, model = trials.trained
        experiment.start_time = start_time
        record = experiment.score(model, trials.log, records_file=out)
        record["steps_to_95_percent"] = steps_to_95_percent(record["history"])
        has_own_prompts = METHODS[cfg.method].kind in ("generated", "second pass")
        if options.experiment == "methods" and has_own_prompts:
            record["swap"] = score_prompt_swaps(model, task, experiment.cfg, record, out)
    else:
        error = f"diverged with every learning rate of {trials.tried}"
        record = Experiment(cfg, task).record_divergence(error, lr=cfg.lr)
    if not cfg.lr:
        record |= dict(learning_rates_tried=trials.tried, lr_at_grid_edge=trials.is_best_at_edge)
    return record


def run_all_seeds(
    options: ClaimRunOptions,
    cfg: RunConfig,  # without `lr`, seed 0 chooses the learning rate of all
    chosen_lr: float | None = None,  # a learning rate that an earlier split has chosen
) -> float | None:  # the learning rate
    """Run the seeds that the file lacks."""
    task = load_config_task(cfg)
    grid = options.learning_rate_grid(cfg.lr)
    grid = grid or LEARNING_RATE_GRIDS[METHODS[cfg.method].learning_rates[0]]
    is_few_shot = cfg.head == "verbalizer" or options.experiment == "fewshot"
    chosen_on = "draw 0, seed 0" if is_few_shot else "seed 0"  # as in older records
    lr_selection = f"best of {len(grid)} on validation, {chosen_on}"
    if cfg.lr:
        lr_selection = "given"
    store = RunStore(Path(options.out))
    digests = run_digests(cfg, task)
    lr = chosen_lr or cfg.lr
    for seed in range(options.seeds):
        if seed and not lr:  # every learning rate diverged with seed 0
            break
        cfg = replace(cfg, lr=lr, seed=seed)
        fingerprint = make_fingerprint(cfg, digests, lr_selection=lr_selection)
        record = store.get_or_run(fingerprint, partial(run_seed, options, cfg, task, grid))
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


@command(
    ClaimRunOptions,
    run_options=(
        *("backbone", "dtype", "precision", "head", "head_init"),
        *("lr", "steps", "batch_size", "cache_dir"),
    ),
    prompt_length=5,
    standardise=True,
    head_init="probe",
    steps=620,
    batch_size=16,
    cache="both",
    precision="bf16",
    device="cpu",
)
def run_claim_experiment(options: ClaimRunOptions, base: RunOptions) -> None:
    """Run an experiment behind the records in `results/claims`."""
    run = EXPERIMENTS[check_name(options.experiment, EXPERIMENTS, "experiment")]
    with handle_messages():
        run(options, base)


if __name__ == "__main__":
    run_claim_experiment.main(sys.argv[1:])
