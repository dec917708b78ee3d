"""Fit the best linear model of frozen hidden states, over layers, poolings and regularisation.

Each pooled representation is standardised, and the regression runs until it has converged.
First every layer and pooling is tried with one regularisation, then the best four with all of
them. The standardisation is folded into `W` and `b`, so the probe is a linear head on the
original hidden states.

`pool_all_layers` computes the pooled representations and caches them on disk. A probe asks which
layer, and which position or mean of it, already determines the label. Nothing below it is trained,
so one pass over the texts computes all its inputs: the mean over the words, the classification
token `<s>`, the last token, and with a template the mask.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.heads import ClassificationHead
from idp_tutorial.core.loop import walk_layers
from idp_tutorial.core.planned_model import PlannedModel
from idp_tutorial.data.task import Task
from idp_tutorial.training.cache import add_missing_states, cache_name, iterate_states
from idp_tutorial.training.config import TrainingConfig
from idp_tutorial.training.examples import encode_rows
from idp_tutorial.training.state_store import StateStore, example_key
from idp_tutorial.utils.checks import UserError
from idp_tutorial.utils.durable_files import cache_folder

_FLOAT16_MAX = 65504


def _pool_batch(batch: dict, bb: Backbone, poolings: Sequence[str]) -> Tensor:
    """Return pooled states before every layer and after the final norm `[B,(n_layers+1)·n·d]`.

    They are clamped to the range of float16.
    """
    by_layer = []
    for ctx in walk_layers(bb, batch):
        if ctx.layer == bb.n_layers:
            ctx.h = bb.norm(ctx.h)
        pooled = [ctx.mean_state() if p == "mean" else ctx.state_at(p) for p in poolings]
        by_layer.append(torch.stack(pooled, 1))
    return torch.stack(by_layer, 1).clamp(-_FLOAT16_MAX, _FLOAT16_MAX).flatten(1)


def _pooled_key(example: dict, poolings: Sequence[str]) -> bytes:
    """Return the key of an example; the vector at the mask depends on the mask's position, too."""
    types = list(example["token_type_ids"])
    if "mask" in poolings:
        types.append(example["mask_position"])
    return example_key({**example, "token_type_ids": types})


def pool_all_layers(
    bb: Backbone,
    examples: Sequence[dict],  # from `encode_rows`; with a template for the pooling 'mask'
    poolings: Sequence[str] = ("mean", "cls", "last"),  # keys of `POOLINGS`, `n` of them
    folder: Path | str | None = None,  # folder of the cache; None: nothing is cached
    batch_size: int = 128,
) -> Tensor:
    """Return the pooled states of each text at every depth, without a prompt.

    The shape is `[N,n_layers+1,n,d]`, in float16: after the embeddings, after each layer, and the
    last one after the final norm.
    """
    shape = len(examples), bb.n_layers + 1, len(poolings), bb.d
    pool_batch = partial(_pool_batch, bb=bb, poolings=poolings)
    if not folder:
        batches = iterate_states(bb, examples, pool_batch, "float16", batch_size)
        return torch.cat([torch.from_numpy(states) for states in batches]).view(shape)
    store_folder = cache_folder(folder) / cache_name(bb)
    store = StateStore(
        store_folder / f"pooled-{'-'.join(poolings)}", shape[1] * shape[2] * bb.d, "float16"
    )
    keys = [_pooled_key(e, poolings) for e in examples]
    add_missing_states(
        store,
        bb,
        dict(zip(keys, examples)),
        dict.fromkeys(keys, 1),
        pool_batch,
        batch_size,
        "pooled representations",
    )
    return torch.stack([torch.from_numpy(store[k][0].copy()) for k in keys]).view(shape)


_MAX_ITERATIONS = 3000
# scikit-learn's C of logistic regression; for ridge regression N/(1000 α), with N examples
INVERSE_REGULARISATION_GRID = (1e-3, 1e-2, 1e-1, 1.0, 10.0)


def fit_linear_model(
    X: Any,  # features `[N,d]`: a tensor, or a sparse matrix of SciPy, which is not standardised
    # class indices, or numbers `[N]`; for several labels of a row indicators `[N,C]`
    y: Tensor | Sequence,
    C: float,  # inverse regularisation; larger values regularise less
    n_classes: int | None = None,  # number of classes; None: ridge regression
) -> tuple[Tensor, Tensor, bool]:  # `W` `[n_out,d]`, `b` `[n_out]`, and whether it converged
    """Fit logistic or ridge regression on standardised features; `W` and `b` are for `X` itself.

    A sparse matrix is used as it is. Raises: `UserError` if all examples have the same class.
    """
    with _small_fits():
        return _fit_linear_model(X, y, C, n_classes)


@contextmanager
def _small_fits() -> Iterator[None]:
    """Fit with one thread of BLAS: with two, a fit of small matrices takes three times as long."""
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings(), threadpool_limits(1, "blas"):
        warnings.simplefilter("ignore", ConvergenceWarning)  # the result says it
        yield


def _fit_linear_model(
    X: Any, y: Tensor | Sequence, C: float, n_classes: int | None
) -> tuple[Tensor, Tensor, bool]:
    """Do what `fit_linear_model` does, in the thread of a caller that has `_small_fits`."""
    from scipy.sparse import issparse
    from sklearn.linear_model import LogisticRegression, Ridge

    if n_classes and torch.as_tensor(y).dim() == 2:
        return _fit_several_labels(X, torch.as_tensor(y), C)
    if n_classes and len({int(label) for label in y}) < 2:
        raise UserError("all training examples have one class: use more, or another split_seed.")
    n, d = X.shape
    mean = torch.zeros(d, dtype=torch.float64)
    std = torch.ones(d, dtype=torch.float64)
    if not issparse(X):
        X = torch.as_tensor(X).double()
        mean = X.mean(0)
        std = X.std(0, correction=0).clamp(min=1e-6)
        X = ((X - mean) / std).numpy()
    if n_classes is None:
        model = Ridge(n / C / 1e3).fit(X, y)
        has_converged = True
    else:
        model = LogisticRegression(C=C, max_iter=_MAX_ITERATIONS).fit(X, y)
        has_converged = bool(model.n_iter_.max() < _MAX_ITERATIONS)
    W = torch.as_tensor(model.coef_).view(-1, d)
    b = torch.as_tensor(model.intercept_).view(-1)
    if n_classes and len(W) == 1:  # scikit-learn has one row for two classes
        W = torch.cat([-W / 2, W / 2])
        b = torch.cat([-b / 2, b / 2])
    if n_classes and len(W) < n_classes:  # a class has no training example
        W, b = _expand_to_all_classes(W, b, model.classes_, n_classes)
    W = W / std
    return W.float(), (b - W @ mean).float(), has_converged


def _fit_several_labels(X: Any, y: Tensor, C: float) -> tuple[Tensor, Tensor, bool]:
    """Fit a logistic regression for each label; a label of all or of no rows is constant."""
    W = torch.zeros(y.shape[1], X.shape[1])
    b = torch.zeros(y.shape[1])
    has_converged = True
    for i, is_true in enumerate(y.long().T):
        if is_true.min() == is_true.max():
            b[i] = 1e4 if is_true[0] else -1e4
            continue
        class_W, class_b, converged = _fit_linear_model(X, is_true, C, 2)
        W[i] = class_W[1] - class_W[0]
        b[i] = class_b[1] - class_b[0]
        has_converged &= converged
    return W, b, has_converged


def _expand_to_all_classes(
    W: Tensor, b: Tensor, present_classes: Any, n_classes: int
) -> tuple[Tensor, Tensor]:
    """Add rows for classes without an example, with a bias so low that they are never predicted."""
    all_W = W.new_zeros(n_classes, W.shape[1])
    all_b = b.new_full((n_classes,), -1e4)
    all_W[present_classes] = W
    all_b[present_classes] = b
    return all_W, all_b


def _probe_poolings(
    bb: Backbone, cfg: TrainingConfig, task: Task
) -> list[tuple[tuple[str, ...], str | None]]:
    """Return the poolings that a probe may use, with the template of each group."""
    # the first position of a decoder is the same for every example
    without_template = ("mean", "last") if bb.causal else ("mean", "cls", "last")
    groups: list[tuple[tuple[str, ...], str | None]] = [(without_template, None)]
    has_mask = bb.causal or bb.tokenizer.mask_token_id is not None
    if task.templates and has_mask:
        groups.append((("mask",), cfg.template))
    return groups


def _iterate_candidates(
    bb: Backbone, cfg: TrainingConfig, task: Task
) -> Iterator[tuple[int, str, Tensor, Tensor]]:
    """Yield each layer and pooling with the representations `[N,d]` of both splits."""
    splits = task.splits["train"], task.splits["validation"]
    folder = None if cfg.cache == "none" else cache_folder(cfg.cache_dir)
    for poolings, template in _probe_poolings(bb, cfg, task):
        encoded = [encode_rows(task, rows, bb, cfg.max_len, template) for rows in splits]
        train, validation = [
            pool_all_layers(bb, examples, poolings, folder, 4 * cfg.batch_size)
            for examples in encoded
        ]
        for layer in range(bb.n_layers + 1):
            for i, pooling in enumerate(poolings):
                yield layer, pooling, train[:, layer, i].float(), validation[:, layer, i].float()


def score_main_metric(
    task: Task,  # task that the outputs are for
    outputs: Tensor,  # logits, or predicted numbers `[N,n_out]`
    rows: list[dict],  # the N examples with their labels
) -> float:
    """Return the score of a model's outputs in the main metric of the task."""
    return task.score_outputs(outputs, rows)[0][task.metric]


def training_targets(
    task: Task,  # task of the rows
    rows: list[dict],  # examples with their labels
) -> list:  # class indices, numbers scaled to the range from 0 to 1, or indicators of labels
    """Return the labels on which a model is trained."""
    labels = [row["label"] for row in rows]
    if task.multi_label:
        return [[*map(float, indicators)] for indicators in labels]
    low, high = task.label_range
    return [(label - low) / (high - low) for label in labels] if task.is_regression else labels


def fit_best_probe(
    bb: Backbone,  # frozen backbone
    task: Task,  # task with its training and validation splits
    # its `cache`, `cache_dir`, `max_len`, `batch_size` and `template` are used
    cfg: TrainingConfig,
    # function of layer and pooling that returns whether to try them
    accept_layer_and_pooling: Callable[[int, str], bool] = lambda layer, pooling: True,
) -> tuple[Tensor, Tensor, dict[str, Any]]:  # `W`, `b`, and a description with all candidates
    """Fit linear probes on the training split, and select the best one on the validation split."""
    targets = training_targets(task, task.splits["train"])
    n_classes = len(task.labels) or None

    def fit(
        C: float, layer: int, pooling: str, train: Tensor, validation: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Fit a probe with the regularisation `C`, and score it on the validation split."""
        W, b, converged = _fit_linear_model(train, targets, C, n_classes)
        score = score_main_metric(task, validation @ W.T + b, task.splits["validation"])
        return W, b, dict(layer=layer, pooling=pooling, C=C, converged=converged, validation=score)

    def validation_score(probe: tuple[Tensor, Tensor, dict[str, Any]]) -> float:
        """Return the validation score in the description of a probe."""
        return probe[2]["validation"]

    candidates = [c for c in _iterate_candidates(bb, cfg, task) if accept_layer_and_pooling(*c[:2])]
    if not candidates:
        raise UserError(
            f"no probe fits task {task.name!r} on {bb.name!r}, which have no template or no mask "
            "token: use head_init='random' or another pooling."
        )
    first_C = INVERSE_REGULARISATION_GRID[1]
    with _small_fits(), ThreadPoolExecutor(torch.get_num_threads()) as pool:
        first_fits = [pool.submit(fit, first_C, *candidate) for candidate in candidates]
        fitted = [(run.result(), candidate) for run, candidate in zip(first_fits, candidates)]
        # stable: of equal scores the lower layer first
        fitted.sort(key=lambda pair: -validation_score(pair[0]))
        further_fits = [
            pool.submit(fit, C, *candidate)
            for _, candidate in fitted[:4]
            for C in INVERSE_REGULARISATION_GRID
            if first_C != C
        ]
        probes = [probe for probe, _ in fitted] + [run.result() for run in further_fits]
    W, b, best = max(probes, key=validation_score)
    return W, b, {**best, "candidates": [description for _, _, description in probes]}


@torch.no_grad()
def initialise_head_from_probe(
    model: PlannedModel,  # model with a linear head, which is changed in place
    task: Task,  # task with its training and validation splits
    cfg: TrainingConfig,  # config with the options of `fit_best_probe`
) -> dict[str, Any]:  # description of the probe
    """Initialise the head with the converged probe of the last layer, with the pooling of the head.

    Raises: `UserError` if the head is not linear.
    """
    head = model.head
    if not (isinstance(head, ClassificationHead) and isinstance(head.net, torch.nn.Linear)):
        raise UserError(
            "head_init='probe' needs a linear head: use head='classification' and "
            "two_layer_head=False, or head_init='random'."
        )
    bb = model.backbone
    site = (bb.n_layers, head.pooling)
    W, b, description = fit_best_probe(
        bb, task, cfg, accept_layer_and_pooling=lambda layer, pooling: (layer, pooling) == site
    )
    head.net.load_state_dict(dict(weight=W, bias=b))
    return description
