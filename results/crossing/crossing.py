"""Train static and generated prompts before several layers of a small model; measure who reads.

    python results/crossing/crossing.py --task questions --workers 2
    python results/crossing/crossing.py --methods lpt --layers 0 --steps 3000 --seeds 3

PLAN.md says what is trained and why. The records of a task are in `TASK-BACKBONE-STEPS.jsonl`, the
measurements of `measure_readers` in `readers-TASK-BACKBONE-STEPS.jsonl`. A second call continues.
"""

import argparse
import json
import math
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.core.planned_model import PlannedModel, copy_state, restore_state, trained_state
from idp_tutorial.data.encoding import collate
from idp_tutorial.data.task import Task
from idp_tutorial.data.tasks import load_task
from idp_tutorial.methods.method_registry import ALL_METHODS
from idp_tutorial.runs.experiment import Experiment
from idp_tutorial.runs.record import RunStore, make_fingerprint, run_digests
from idp_tutorial.training.examples import encode_for_evaluation
from idp_tutorial.utils.durable_files import file_lock

HERE = Path(__file__).parent
METHODS = ("lpt", "lpt-npg", "lpt-mppg")
LAYERS = (7, 4, 0, 6, 2)
STATIC_LEARNING_RATES = (0.03, 0.1, 0.3, 1.0, 3.0)
GENERATOR_LEARNING_RATES = (0.0007, 0.002, 0.007, 0.02, 0.06)
TUNING_SEEDS = 2
PROMPT_LENGTH = 10


def make_config(args: argparse.Namespace, method: str, layer: int, lr: float, seed: int):
    """Return the config of one run."""
    options: dict[str, Any] = dict(prompt_length=PROMPT_LENGTH)
    method_options = ALL_METHODS[method].options
    if "layer" in method_options:
        options["layer"] = layer
    if "standardise" in method_options:  # the states of the bundled models are small
        options["standardise"] = True
    return RunConfig(
        method,
        task=args.task,
        backbone=args.backbone,
        head="verbalizer",
        lr=lr,
        seed=seed,
        steps=args.steps,
        batch_size=16,
        eval_every=args.steps // 6,
        cache="both",
        **options,
    )


class Readings:
    """Final states and prompts of a model for some texts, in their order."""

    def __init__(self, model: PlannedModel, examples: Sequence[dict]) -> None:
        self.model = model.eval()
        self.batches = [
            collate(examples[i : i + 100], model.backbone.pad_id)
            for i in range(0, len(examples), 100)
        ]

    @torch.inference_mode()
    def final_states(self, prompts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the final states `[N,d]` at the predicted word, and the logits `[N,C]`.

        With `prompts` `[N,t,d]`, each text gets the given one in place of its own.
        """
        states, logits = [], []
        first = 0
        for batch in self.batches:
            n = len(batch["input_ids"])
            hooks = []
            if prompts is not None:
                given = prompts[first : first + n]
                hooks = [self.model.sources[0].register_forward_hook(lambda *_, given=given: given)]
            ctx = self.model.compute_context(batch)
            states.append(ctx.state_at("mask"))
            logits.append(self.model.head(ctx))
            for hook in hooks:
                hook.remove()
            first += n
        return torch.cat(states), torch.cat(logits)

    @torch.inference_mode()
    def prompts(self) -> Tensor:  # `[N,t,d]`
        """Return the prompt of each text."""
        prompts: list[Tensor] = []
        with self.model.sources[0].register_forward_hook(
            lambda _module, _inputs, prompt: prompts.append(prompt)
        ):
            self.final_states()
        return torch.cat(prompts)


def select_evenly(rows: list[dict], n: int) -> list[dict]:
    """Return at most `n` rows at equal distances, since a split may be sorted by label."""
    return rows[:: math.ceil(len(rows) / n)]


def measure_readers(model: PlannedModel, task: Task, cfg: RunConfig) -> dict[str, float]:
    """Measure what a prompt changes in the final state, and what the prompt itself says."""
    rows = {
        "train": task.splits["train"][:1000],
        "test": select_evenly(task.splits["test"], 1000),
    }
    examples = {split: encode_for_evaluation(model, task, cfg, rows[split]) for split in rows}
    labels = {split: np.array([e["label"] for e in rows]) for split, rows in examples.items()}
    of_test, of_train = (Readings(model, examples[split]) for split in ("test", "train"))
    without = Readings(PlannedModel(model.backbone, model.head), examples["test"])
    with_prompt, logits = of_test.final_states()
    change = (with_prompt - without.final_states()[0]).double()
    common = change.mean(0)
    spread = torch.linalg.svdvals(change - common) ** 2  # of the covariance, up to a factor
    prompts = of_test.prompts()
    accuracy = (logits.argmax(-1).numpy() == labels["test"]).mean()
    vectors = {"train": of_train.prompts().flatten(1).numpy(), "test": prompts.flatten(1).numpy()}
    scale = vectors["train"].std() or 1.0
    center = vectors["train"].mean(0)
    probe = LogisticRegression(max_iter=300).fit(
        (vectors["train"] - center) / scale, labels["train"]
    )
    readable = probe.score((vectors["test"] - center) / scale, labels["test"])
    rng = np.random.default_rng(0)
    givers = np.array([rng.choice(np.flatnonzero(labels["test"] != y)) for y in labels["test"]])
    swapped = of_test.final_states(prompts[givers])[1].argmax(-1).numpy()
    return dict(
        accuracy=100 * float(accuracy),
        common_share=float(common.pow(2).sum() / change.pow(2).sum(1).mean()),
        effective_dimension=float(spread.sum() ** 2 / spread.pow(2).sum()) if spread.sum() else 0.0,
        prompt_probe=100 * float(readable),
        follows_prompt=100 * float((swapped == labels["test"][givers]).mean()),
        follows_text=100 * float((swapped == labels["test"]).mean()),
    )


def files(args: argparse.Namespace) -> tuple[Path, Path]:
    """Return the file of the records and that of the measurements."""
    name = f"{args.task}-{args.backbone}-{args.steps}.jsonl"
    return args.out / name, args.out / f"readers-{name}"


def run(
    args: argparse.Namespace, method: str, layer: int, lr: float, seed: int, verbose: bool = True
) -> dict:
    """Train, score and measure one run, or return the stored one."""
    torch.set_num_threads(1)
    task = load_task(args.task)
    cfg = make_config(args, method, layer, lr, seed)
    selection = "best of 5 (equal for all methods) on validation, seeds 0 and 1"
    digests = run_digests(cfg, task)
    fingerprint = make_fingerprint(cfg, digests, lr_selection=selection)
    records_file, _ = files(args)
    lock = records_file.with_suffix("")  # the store and its logits have locks of their own
    with file_lock(lock, wait=True):
        stored = RunStore(records_file).find(fingerprint)
    if stored:
        return stored
    experiment = Experiment(cfg, task)
    try:
        model, log = experiment.fit()
    except FloatingPointError as error:
        record = experiment.record_divergence(error)
    else:
        if args.measure:
            torch.save(copy_state(trained_state(model)), state_file(args, method, layer, lr, seed))
        with file_lock(lock, wait=True):
            record = experiment.score(model, log, records_file=records_file)
    record |= dict(lr_selection=selection) | fingerprint
    with file_lock(lock, wait=True):
        record = RunStore(records_file).add(record)
    if verbose:
        print(method, layer, lr, seed, record.get("score"), flush=True)
    return record


def state_file(args: argparse.Namespace, *key: Any) -> Path:
    """Return the file of a run's trained tensors, which are kept until they are measured."""
    folder = args.out / "states"
    folder.mkdir(exist_ok=True)
    return folder / f"{args.task}-{args.backbone}-{args.steps}-{'-'.join(map(str, key))}.pt"


def measure(args: argparse.Namespace, method: str, layer: int, lr: float, seed: int) -> None:
    """Measure a stored run, if its trained tensors are there and nobody has."""
    torch.set_num_threads(1)
    run(args, method, layer, lr, seed)
    state = state_file(args, method, layer, lr, seed)
    if not state.exists():
        return
    experiment = Experiment(make_config(args, method, layer, lr, seed), load_task(args.task))
    model = experiment.build_model()
    restore_state(trained_state(model), torch.load(state, weights_only=True))
    measured = measure_readers(model, experiment.task, experiment.cfg)
    key = dict(method=method, layer=experiment.cfg.get("layer"), lr=lr, seed=seed)
    records_file, readers_file = files(args)
    line = json.dumps(key | measured) + "\n"
    lock = file_lock(records_file.with_suffix(""), wait=True)
    with lock, readers_file.open("a", encoding="utf-8") as file:
        file.write(line)
    state.unlink()
    print(key, measured, flush=True)


def learning_rates(method: str) -> tuple[float, ...]:
    """Return the five learning rates of a method."""
    static = ALL_METHODS[method].kind == "static"
    return STATIC_LEARNING_RATES if static else GENERATOR_LEARNING_RATES


def choose_learning_rate(records: list[dict]) -> float:
    """Return the learning rate with the best mean validation score of two finished seeds."""
    scores: dict[float, list[float]] = {}
    for record in records:
        if record["status"] == "done":
            scores.setdefault(record["lr"], []).append(record["validation"])
    complete = {lr: mean(v) for lr, v in scores.items() if len(v) == TUNING_SEEDS}
    return max(complete, key=lambda lr: complete[lr])


def cells(args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Yield each method with each layer."""
    for layer in args.layers:
        for method in args.methods:
            yield method, layer


def main() -> None:
    """Train every cell at every learning rate with two seeds, then at the best with all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--task", default="questions")
    parser.add_argument("--backbone", default="tiny")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--learning-rates", type=float, nargs="+", help="default: the five")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the records")
    args = parser.parse_args()
    args.measure = True
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, mp_context=context) as pool:
        tuning = {
            cell: [
                pool.submit(run, args, *cell, lr, seed)
                for lr in args.learning_rates or learning_rates(cell[0])
                for seed in range(TUNING_SEEDS)
            ]
            for cell in cells(args)
        }
        final = []
        for cell, runs in tuning.items():
            lr = choose_learning_rate([r.result() for r in runs])
            final += [pool.submit(measure, args, *cell, lr, seed) for seed in range(args.seeds)]
        for r in final:
            r.result()


if __name__ == "__main__":
    main()
