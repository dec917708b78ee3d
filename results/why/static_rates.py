"""Train a static prompt of a language model at two layers with six learning rates (question C).

    python results/why/static_rates.py --data FOLDER --task trec
    python results/why/static_rates.py --data FOLDER --task trec --clip --workers 4

SmolLM2 predicts a label word; 20 vectors stand in front of the text, before layer 0 or layer 15,
with LPT's initialisation. With `--clip`, no vector may become longer than the mean word in the
layer where the prompt is inserted. Each record has the lengths of the prompt's hidden states and
their cosines with the inserted vectors, layer by layer. Records are appended to
`results/why/rates-TASK.jsonl` (or `rates-clipped-TASK.jsonl`); a second call continues.
"""

import argparse
import logging
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cosine_similarity

from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.core.loop import run_layers, walk_layers
from idp_tutorial.core.planned_model import PlannedModel
from idp_tutorial.data.encoding import collate
from idp_tutorial.data.task import Task
from idp_tutorial.data.tasks import load_task
from idp_tutorial.runs.experiment import Experiment
from idp_tutorial.runs.record import RunStore, make_fingerprint
from idp_tutorial.training.examples import encode_rows

HERE = Path(__file__).parent
LAYERS = (0, 15)
LEARNING_RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
PROMPT_LENGTH = 20
N_MEASURED = 32  # validation examples on which hidden states are measured


def measured_batch(model: PlannedModel, task: Task, cfg: RunConfig) -> dict[str, Any]:
    """Return the first validation examples as a batch."""
    bb = model.backbone
    rows = task.splits["validation"][:N_MEASURED]
    examples = encode_rows(task, rows, bb, cfg.max_len, cfg.template)
    device = next(bb.model.parameters()).device
    batch = collate(list(examples), bb.tokenizer.pad_token_id or 0)
    return {k: v.to(device) if hasattr(v, "to") else v for k, v in batch.items()}


@torch.no_grad()
def mean_word_length(model: PlannedModel, task: Task, cfg: RunConfig) -> float:
    """Return the mean length of a word's hidden state where the prompt is inserted."""
    (layer,) = model.plan
    ctx = run_layers(model.backbone, measured_batch(model, task, cfg), stop=layer)
    words = ctx.float32_states[ctx.word_mask.bool()]
    return words.norm(dim=-1).mean().item()


@torch.no_grad()
def measure_prompt_states(model: PlannedModel, task: Task, cfg: RunConfig) -> dict[str, list]:
    """Return the mean length of the prompt's states before each layer, and their mean cosine.

    The cosine is that with the inserted vector. The first entry belongs to the layer above the
    insertion, and the last one to the output of the last layer.
    """
    (first,) = model.plan
    lengths: list[float] = []
    cosines: list[float] = []
    word_lengths: list[float] = []
    inserted: torch.Tensor | None = None
    for ctx in walk_layers(model.backbone, measured_batch(model, task, cfg), model.plan):
        if ctx.layer <= first:
            continue
        if inserted is None:
            inserted = model.plan[first].compute_prompt(ctx).float()
        states = ctx.float32_states[:, :PROMPT_LENGTH]
        lengths.append(states.norm(dim=-1).mean().item())
        cosines.append(cosine_similarity(states, inserted, dim=-1).mean().item())
        words = ctx.float32_states[ctx.word_mask.bool()]
        word_lengths.append(words.norm(dim=-1).mean().item())
    assert inserted is not None
    return dict(
        inserted_norm=round(inserted.norm(dim=-1).mean().item(), 2),
        prompt_norms=[round(v, 2) for v in lengths],
        prompt_cosines=[round(v, 4) for v in cosines],
        word_norms=[round(v, 2) for v in word_lengths],
    )


class ClipVectors:
    """Callback that keeps every prompt vector at most as long as a word."""

    def __init__(self, max_length: float) -> None:
        self.max_length = max_length

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        """Shorten the vectors that are too long."""
        for p in model.sources.parameters():
            lengths = p.norm(dim=-1, keepdim=True).clamp(min=1e-6)
            p.mul_((self.max_length / lengths).clamp(max=1.0))


def run_one(args: argparse.Namespace, layer: int, lr: float, seed: int, file: Path) -> None:
    """Train one prompt, unless its record is in the file."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    shots = None if args.task == "trec" else 1000
    task = load_task(args.task, args.data, shots)
    cfg = RunConfig(
        "lpt",
        backbone=args.backbone,
        task=args.task,
        data=args.data,
        shots=shots,
        head="verbalizer",
        layer=layer,
        prompt_length=PROMPT_LENGTH,
        lr=lr,
        seed=seed,
        steps=args.steps,
        batch_size=16,
        eval_every=args.steps // 5,
        precision="bf16",
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    store = RunStore(file)
    experiment = Experiment(cfg, task)
    selection = "all learning rates are reported"
    conditions = dict(lr_selection=selection, clipped=args.clip)
    fingerprint = make_fingerprint(experiment.cfg, experiment.digests(), **conditions)

    def train() -> dict:
        """Train the prompt and return its record, with the lengths of its states."""
        details: dict[str, Any] = dict(conditions)
        callbacks = []
        if args.clip:
            model = experiment.build_model()
            details["max_length"] = round(mean_word_length(model, task, cfg), 3)
            callbacks = [ClipVectors(details["max_length"])]
        try:
            model, log = experiment.fit(callbacks=callbacks, progress=False)
        except FloatingPointError as e:
            return experiment.record_divergence(e, **details)
        details |= measure_prompt_states(model.eval(), task, cfg)
        return experiment.score(model, log, records_file=file, **details)

    record = store.get_or_run(fingerprint, train)
    logging.info(f"layer {layer:2}  lr {lr:5}  seed {seed}  {record.get('score', 0):.1f}")


def list_runs(
    seeds: Sequence[int], learning_rates: Sequence[float] = LEARNING_RATES
) -> list[tuple[int, float, int]]:
    """Return layer, learning rate and seed of each run."""
    return [(layer, lr, seed) for seed in seeds for layer in LAYERS for lr in learning_rates]


def main() -> None:
    """Run all layers, learning rates and seeds on one task."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True, help="folder of tasks: DATA/TASK/train.jsonl …")
    parser.add_argument("--task", default="trec")
    parser.add_argument("--backbone", default="smollm2")
    parser.add_argument("--steps", type=int, default=310)
    parser.add_argument("--seeds", type=int, nargs="+", default=range(5))
    parser.add_argument("--learning-rates", type=float, nargs="+", default=LEARNING_RATES)
    parser.add_argument("--clip", action="store_true", help="keep the vectors as long as words")
    parser.add_argument("--workers", type=int, default=1, help="number of processes")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the records")
    args = parser.parse_args()
    file = args.out / f"rates-{'clipped-' * args.clip}{args.task}.jsonl"
    cells = list_runs(args.seeds, args.learning_rates)
    if args.workers == 1:
        for cell in cells:
            run_one(args, *cell, file)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, mp_context=context) as pool:
        runs = [pool.submit(run_one, args, *cell, file) for cell in cells]
        for run in runs:
            run.result()


if __name__ == "__main__":
    main()
