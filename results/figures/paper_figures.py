"""Measurements for figures of the papers: LPT's Figure 6, and IDPG's Figures 4, 5 and 8.

LPT's Figure 6 plots prompts of Subj in two dimensions and concludes that similar sentences get
similar prompts. A number for this is the correlation between the similarity of sentences and
that of their prompts, over all pairs of examples, compared with an untrained generator. IDPG's
Figures 4 and 8 rank the pairs of STS-B by the cosine of their two sentences, with prompts and
without, and count the similar pairs at the top; its Figure 5 shows how the two sentences of a
pair differ in length.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
import torch.nn.functional as F
from scipy.stats import bootstrap
from torch import Tensor

from idp_tutorial.assembly.build import build_model, load_config_backbone
from idp_tutorial.assembly.config import RunConfig, RunOptions
from idp_tutorial.core.planned_model import PlannedModel
from idp_tutorial.data.task import Task
from idp_tutorial.data.tasks import load_config_task
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.runs.experiment import Experiment
from idp_tutorial.runs.record import RunStore, build_record, make_fingerprint
from idp_tutorial.runs.tables import select_finished
from idp_tutorial.training.evaluation import iterate_batches
from idp_tutorial.training.examples import encode_for_model, encode_rows
from idp_tutorial.utils.checks import DivergenceError, check_name
from idp_tutorial.utils.durable_files import file_lock
from results.claims.prompt_swaps import collect_prompts


def _pairwise_cosines(x: Tensor) -> Tensor:
    """Return the cosines of all pairs of examples after centring `[N(N−1)/2]`."""
    vectors = x.flatten(1).double()
    vectors = F.normalize(vectors - vectors.mean(0), dim=1)
    i, j = torch.triu_indices(len(vectors), len(vectors), 1)
    return (vectors @ vectors.T)[i, j]


@torch.no_grad()
def embed_examples(
    model: PlannedModel,
    examples: Sequence[dict],  # from `task.encode`
) -> Tensor:  # `[N,d]`
    """Return the last layer's hidden states, averaged over words, with the model's prompts."""
    batches = iterate_batches(model.backbone, examples, 64)
    return torch.cat([model.eval().compute_context(b).mean_state().float().cpu() for b in batches])


def prompt_similarity_correlation(
    model: PlannedModel,  # with a generator
    examples: Sequence[dict],  # from `task.encode`
) -> float:  # −1 … 1
    """Return the correlation between sentence and prompt similarities (LPT, Figure 6)."""
    prompts_by_layer, _ = collect_prompts(model, examples)
    prompts = torch.cat([p.flatten(1).float().cpu() for p in prompts_by_layer.values()], 1)
    sentences = embed_examples(PlannedModel(model.backbone, model.head, {}), examples)
    similarities = torch.stack([_pairwise_cosines(sentences), _pairwise_cosines(prompts)])
    return torch.corrcoef(similarities)[0, 1].item()


def pair_cosines(
    model: PlannedModel,
    task: Task,  # of sentence pairs
    rows: Sequence[dict],  # with `sentence1`, `sentence2` and `label`
    cfg: RunConfig,  # its `max_len` is used
) -> Tensor:  # −1 … 1 `[N]`
    """Return the cosine of the embeddings of the two sentences of each pair."""
    single_sentence_task = replace(task, pair=False)
    embeddings = []
    for side in ("sentence1", "sentence2"):
        sentences = [dict(sentence1=row[side], label=row["label"]) for row in rows]
        examples = encode_rows(single_sentence_task, sentences, model.backbone, cfg.max_len)
        embeddings.append(embed_examples(model, examples))
    return F.cosine_similarity(embeddings[0], embeddings[1])


def precision_at_n(
    cosines: Tensor,  # `[N]`
    is_similar: Tensor,  # whether people rated the pair similar; bool `[N]`
    n: int,  # number of pairs at the top
) -> float:  # percent
    """Return how many of the `n` pairs with the largest cosine are similar (IDPG, Figures 4, 8)."""
    top = cosines.argsort(descending=True, stable=True)[:n]
    return 100 * is_similar[top].double().mean().item()


def bootstrap_precision_error(
    a: Tensor,  # cosines of the first model `[N]`
    b: Tensor,  # cosines of the second model on the same pairs `[N]`
    is_similar: Tensor,  # bool `[N]`
    n: int,  # number of pairs at the top
) -> float:  # percentage points
    """Return the bootstrap standard error of the difference between two `precision_at_n` scores."""

    def difference(indices: Any) -> float:
        """Return the difference on a sample of pairs."""
        similar = is_similar[indices]
        return precision_at_n(a[indices], similar, n) - precision_at_n(b[indices], similar, n)

    return float(
        bootstrap(
            [range(len(a))],
            difference,
            n_resamples=1000,
            vectorized=False,
            method="percentile",
            rng=0,
        ).standard_error
    )


def length_differences(
    rows: Sequence[dict],  # with `sentence1` and `sentence2`
    tokenizer: Any,  # a Hugging Face tokenizer
) -> dict:  # `mean`, `median` and `nine_tenths` (the 0.9 quantile), in tokens
    """Measure how much the two sentences of a pair differ in length (IDPG, Figure 5)."""
    pairs = pd.DataFrame(rows)
    first = pairs.sentence1.map(tokenizer.tokenize).str.len()
    second = pairs.sentence2.map(tokenizer.tokenize).str.len()
    differences = (first - second).abs()
    return dict(
        mean=float(differences.mean()),
        median=float(differences.median()),
        nine_tenths=float(differences.quantile(0.9)),
    )


# measure(trained model, the run that trained it, test rows)
MeasureFunction = Callable[[PlannedModel, Experiment, list[dict]], dict]


def _measure_map_correlation(
    model: PlannedModel, run: Experiment, rows: list[dict]
) -> dict[str, Any]:
    """Measure the similarity correlation of a trained and an untrained generator."""
    untrained_model = build_model(run.cfg, load_config_backbone(run.cfg), run.task)
    examples = encode_for_model(model, run.task, run.cfg, rows)
    return dict(
        trained=prompt_similarity_correlation(model, examples),
        untrained=prompt_similarity_correlation(untrained_model, examples),
    )


SIMILARITY_THRESHOLD = 4.0  # similarity label (0 … 5) from which a pair counts as similar
MAX_EXAMPLES = 1500  # test examples of a figure (of `idpg-f5`: training examples)
FIGURE_SEEDS = 5  # seeds of a figure with an experiment of its own


def _measure_ranking(
    model: PlannedModel,
    run: Experiment,
    rows: list[dict],
    top_sizes: Sequence[int],  # values of n of `precision_at_n`
) -> dict[str, Any]:
    """Measure the precision at the top with and without prompts, and its difference's error."""
    without_prompts = PlannedModel(model.backbone, model.head, {})
    similar = torch.tensor([row["label"] >= SIMILARITY_THRESHOLD for row in rows])
    with_prompts = pair_cosines(model, run.task, rows, run.cfg)
    without = pair_cosines(without_prompts, run.task, rows, run.cfg)
    measurements: dict[str, Any] = {}
    errors = {}
    for n in top_sizes:
        measurements[f"prompts_{n}"] = precision_at_n(with_prompts, similar, n)
        measurements[f"none_{n}"] = precision_at_n(without, similar, n)
        error = bootstrap_precision_error(with_prompts, without, similar, n)
        errors[f"measurements.prompts_{n}"] = error
    return {**measurements, "standard_errors": errors}


class FigureExperiment(NamedTuple):
    """Method, tasks and measure of a figure."""

    method: str | None  # key of `METHODS`; None: nothing is trained
    tasks: tuple[str, ...]
    measure: MeasureFunction | None  # None: `length_differences`


_top_200 = partial(_measure_ranking, top_sizes=(200,))
_top_100_and_300 = partial(_measure_ranking, top_sizes=(100, 300))
FIGURE_EXPERIMENTS = {
    "lpt-f6": FigureExperiment("lpt-npg", ("subj",), _measure_map_correlation),
    "idpg-f4": FigureExperiment("m-idpg-phm", ("stsb",), _top_200),
    "idpg-f8": FigureExperiment("m-idpg-phm", ("stsb",), _top_100_and_300),
    "idpg-f5": FigureExperiment(None, ("mnli", "mrpc"), None),
}


def reproduce_figure(
    name: str,  # key of `FIGURE_EXPERIMENTS`
    base_config: RunOptions,  # all settings but method, task and seed
    seeds: int = FIGURE_SEEDS,  # number of seeds: 0 … seeds−1
    out: Path | None = None,  # JSONL file; what it contains is not run again
) -> list[dict]:  # records of the runs that did not diverge
    """Train models and measure what a figure shows.

    Raises: `DivergenceError` if all runs diverge.
    """
    plan = plan_figure_runs(name, base_config, seeds)
    measure = FIGURE_EXPERIMENTS[name].measure
    records = []
    with file_lock(out):
        store = RunStore(out)
        for cfg in plan:
            task = load_config_task(cfg)
            cfg = cfg.resolve_epochs(len(task.splits["train"]))
            run = Experiment(cfg, task)
            fingerprint = make_fingerprint(cfg, run.digests(), figure=name, texts=MAX_EXAMPLES)
            records.append(store.get_or_run(fingerprint, partial(_run_and_record, run, measure)))
    finished = select_finished(records)
    if not finished:
        raise DivergenceError(records[0]["message"])
    return finished


def plan_figure_runs(
    name: str,  # key of `FIGURE_EXPERIMENTS`
    base_config: RunOptions,  # all settings but method, task and seed
    seeds: int = FIGURE_SEEDS,  # number of seeds: 0 … seeds−1
) -> list[RunConfig]:
    """Return the configs of the runs of a figure; no task is loaded."""
    experiment = FIGURE_EXPERIMENTS[check_name(name, FIGURE_EXPERIMENTS, "figure")]
    method = experiment.method
    lr = (base_config.lr or METHODS[method].default_learning_rate) if method else None
    return [
        base_config.with_method(method or "head-only", task=task, seed=seed, lr=lr)
        for task in experiment.tasks
        for seed in range(seeds if method else 1)
    ]


def _run_and_record(experiment: Experiment, measure: MeasureFunction | None) -> dict:
    """Train and measure; return the record, whose `status` is 'done' or 'diverged'."""
    cfg = experiment.cfg
    task = experiment.task
    model = log = None
    try:
        if measure is None:
            tokenizer = load_config_backbone(cfg).tokenizer
            measurements = length_differences(task.splits["train"][:MAX_EXAMPLES], tokenizer)
        else:
            model, log = experiment.fit()
            measurements = measure(model, experiment, task.splits["test"][:MAX_EXAMPLES])
            measurements["validation"] = log.validation
    except FloatingPointError as e:
        return experiment.record_divergence(e)
    values = dict(measurements=measurements)
    if "standard_errors" in measurements:
        values["standard_errors"] = measurements.pop("standard_errors")
    return build_record(
        cfg, experiment.digests(), task.split_sizes(), experiment.start_time, model, log, **values
    )
