"""Controls without a prompt: the majority class, words, a linear probe, and a side network.

A prompt is useful if it scores higher than four controls, which are trained to convergence in
minutes: the most frequent label (`majority`), a linear model of the words of a text (`words`), a
linear model of frozen hidden states (`probe`), and a network on the sentence vector
(`side-network`).

They have the same examples, scores and records as all methods. They are registered in
`CONTROL_METHODS`.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from idp_tutorial.assembly.probe import (
    fit_best_probe,
    fit_linear_model,
    pool_all_layers,
    score_main_metric,
    training_targets,
)
from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.context import Context
from idp_tutorial.core.heads import ClassificationHead, prediction_loss
from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.planned_model import PlannedModel, copy_state
from idp_tutorial.data.task import Task
from idp_tutorial.methods.idpg import PromptGenerator
from idp_tutorial.methods.method_registry import (
    CONTROL_METHODS,
    BottleneckWidth,
    MethodConfig,
    register,
)
from idp_tutorial.methods.sentence_vectors import (
    RunningStandardiser,
    mean_sentence_vector,
    resolve_sentence_pooling,
    sentence_vector,
)
from idp_tutorial.training.cache import cache_states
from idp_tutorial.training.config import TrainingConfig
from idp_tutorial.training.early_stopping import find_best_evaluation, should_stop_early
from idp_tutorial.training.evaluation import compute_output_loss, predict_logits
from idp_tutorial.training.examples import encode_rows
from idp_tutorial.training.fit import TrainLog
from idp_tutorial.utils.checks import DivergenceError
from idp_tutorial.utils.options import Probability


class ControlModel(PlannedModel):
    """A head on the frozen hidden states after `head.layer` layers."""

    first_trained_layer = -1  # cached states of the layers above are not used

    def compute_context(self, batch: dict) -> Context:
        """Run the layers below the hidden states that the head uses."""
        layer = self.head.layer
        return run_layers(
            self.backbone, batch, stop=None if layer == self.backbone.n_layers else layer
        )


class MajorityHead(nn.Module):
    """A head with the same output for every example."""

    pooling = "mean"
    layer = 0

    def __init__(
        self,
        n_out: int,  # number of classes; 1 for regression
    ) -> None:
        super().__init__()
        self.out: Tensor
        self.register_buffer("out", torch.zeros(n_out))

    def forward(self, ctx: Context) -> Tensor:  # `[B,n_out]`
        """Return the constant output for each example of the batch."""
        return self.out.expand(len(ctx.input_ids), -1)


class WordsHead(nn.Module):
    """A linear model of the TF-IDF weights v of the words of a text, without the backbone.

    y = W v + b
    """

    pooling = "mean"
    layer = 0

    def __init__(
        self,
        n_out: int,  # number of classes; 1 for regression
    ) -> None:
        super().__init__()
        self.vectorizer: Any = None  # scikit-learn's `TfidfVectorizer`, once it is fitted
        self.set_weights(torch.zeros(n_out, 1), torch.zeros(n_out))

    def set_weights(self, W: Tensor, b: Tensor) -> None:  # `[n_out,V]`, `[n_out]`
        """Replace the parameters; the vocabulary has V words."""
        self.W = nn.Parameter(W.T.contiguous())
        self.b = nn.Parameter(b)

    def encode(self, rows: Sequence[dict]) -> list[dict]:
        """Return examples whose tokens are the words of the vocabulary, with their weights."""
        vectors: Any = [None] * len(rows)
        if self.vectorizer is not None:
            vectors = self.vectorizer.transform(map(_join_texts, rows))
        examples = []
        for row, vector in zip(rows, vectors):
            known = vector is not None and vector.nnz > 0  # else a word of weight zero
            words = vector.indices.tolist() if known else [0]
            weights = vector.data if known else np.zeros(1)
            example = dict(input_ids=words, token_type_ids=[0] * len(words))
            example["word_weights"] = weights.astype(np.float32)[:, None]
            examples.append(example | {k: row[k] for k in ("label", "group") if k in row})
        return examples

    def forward(self, batch: dict) -> Tensor:  # `[B,n_out]`
        """Return the outputs for the examples of a batch."""
        return (self.W[batch["input_ids"]] * batch["word_weights"]).sum(1) + self.b


def _join_texts(row: dict) -> str:
    """Return the words of a row; those of a second text are other words than those of the first."""
    second = " ".join(f"2{word}" for word in _WORD.findall(row.get("sentence2", "")))
    return f"{row['sentence1']} {second}"


class WordsModel(ControlModel):
    """A model that reads the words of the texts, not the tokens of the backbone."""

    def encode_texts(self, rows: Sequence[dict]) -> list[dict]:  # type: ignore[override]
        """Return the examples of the head."""
        return self.head.encode(rows)

    def forward(self, batch: dict, return_loss: bool = False) -> Tensor:
        """Return the head's outputs `[B,n_out]`, or the loss."""
        outputs = self.head(batch)
        return prediction_loss(outputs, batch["label"]) if return_loss else outputs


class ProbeHead(ClassificationHead):
    """A linear head on the pooled representation h of one layer, which the fit selects.

    y = W h + b
    """

    def __init__(
        self,
        d: int,  # width of the backbone
        n_out: int,  # number of classes; 1 for regression
        layer: int,  # number of layers below the hidden states
    ) -> None:
        super().__init__(d, n_out, "mean")
        self.layer = layer


class SideNetwork(nn.Module):
    """IDPG's bottleneck from the standardised sentence vector z = M(x) directly to the labels.

    y = W₂ Dropout(GELU(W₁ z + b₁)) + b₂
    """

    layer = 0

    def __init__(
        self,
        d: int,  # width of the backbone
        n_out: int,  # number of classes; 1 for regression
        m: int = 256,  # width of the bottleneck, as in S-IDPG
        pooling: str = "mean",  # M(x): the 'mean', or the state at `<s>` (decoders: 'last')
        dropout: float = 0.1,  # dropout on z and after GELU
    ) -> None:
        super().__init__()
        self.pooling = pooling
        self.scale = RunningStandardiser(d)
        self.dropout = nn.Dropout(dropout)
        self.net = PromptGenerator(d, n_out, 1, m, "dnn", dropout=dropout)

    def classify_vectors(self, z: Tensor) -> Tensor:  # `[B,d]` → `[B,n_out]`
        """Return the outputs for sentence vectors."""
        return self.net(self.dropout(self.scale(z)))[:, 0]

    def forward(self, ctx: Context) -> Tensor:  # `[B,n_out]`
        """Return the outputs for the sentence vectors of a batch."""
        z = mean_sentence_vector(ctx) if self.pooling == "mean" else sentence_vector(ctx)
        return self.classify_vectors(z)


SIDE_NETWORK_PATIENCE = 15  # evaluations without improvement after which training stops
_MAX_EVALUATIONS = 400
_MIN_STEPS_BETWEEN_EVALUATIONS = 20


def _encode_sentence_vectors(
    model: ControlModel, task: Task, cfg: TrainingConfig, split: str
) -> Tensor:  # `[N,d]`
    """Compute the sentence vectors M(x) of a split as a generator reads them."""
    bb = model.backbone
    pooling = model.head.pooling
    examples = encode_rows(task, task.splits[split], bb, cfg.max_len)
    batch_size = 4 * cfg.batch_size
    if cfg.cache == "none":
        return pool_all_layers(bb, examples, (pooling,), None, batch_size)[:, -1, 0].float()
    kind = "mean_sentence" if pooling == "mean" else "sentence"
    cached, _ = cache_states(bb, examples, kind, cfg.cache_dir, batch_size=batch_size)
    return torch.tensor(np.stack([example[kind] for example in cached])).float()


def _train_one_epoch(
    head: SideNetwork,
    optimizer: torch.optim.Optimizer,
    Z: Tensor,
    targets: Tensor,
    batch_size: int,
    order: torch.Generator,
) -> Iterator[float]:
    """Train for one epoch, and yield the loss of each step."""
    head.train()
    head.scale.eval()  # its statistics already contain all training vectors
    for i in torch.randperm(len(Z), generator=order).split(batch_size):
        loss = prediction_loss(head.classify_vectors(Z[i]), targets[i])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield loss.item()


_TRAINING_LOOP_OPTIONS = (  # a control is fitted in another way
    *("epochs", "schedule", "beta2", "eps", "no_decay_on_bias_and_norm", "warmup", "head_lr"),
    *("patience", "accumulate", "precision", "compile", "class_weight", "dropout_below_prompt"),
    *("clip", "two_layer_head", "head_init", "gradient_checkpointing"),
)


@dataclass(frozen=True, kw_only=True)
class ControlConfig(MethodConfig):
    """Options of a control, whose head is fitted without a prompt."""

    insertion_point = "nowhere"
    kind = "control"

    model_class: ClassVar[type[ControlModel]] = ControlModel

    def build_head(self, bb: Backbone, cfg: TrainingConfig, n_out: int) -> nn.Module:
        """Return the head of the control, which is not yet fitted."""
        raise NotImplementedError

    def fit(self, model: ControlModel, task: Task, cfg: TrainingConfig) -> TrainLog:
        """Fit the model in place, and return the log of the training."""
        raise NotImplementedError


@register(
    "majority",
    reference="the most frequent label",
    learning_rates=(),
    unused_options=("lr", "weight_decay", *_TRAINING_LOOP_OPTIONS),
)
class MajorityConfig(ControlConfig):
    """The majority class, which has no options."""

    def build_head(self, bb: Backbone, cfg: TrainingConfig, n_out: int) -> nn.Module:
        """Return a head with the same output for every example."""
        return MajorityHead(n_out)

    def fit(self, model: ControlModel, task: Task, cfg: TrainingConfig) -> TrainLog:
        """Set the output to the class frequencies or the mean label of the training split.

        Where a row may have several labels, those of more than half of the rows are predicted.
        """
        targets = torch.tensor(training_targets(task, task.splits["train"]))
        if task.is_regression:
            outputs = targets.double().mean()[None]
        elif task.multi_label:
            outputs = targets.double().mean(0).logit()
        else:
            outputs = torch.bincount(targets, minlength=len(task.labels)).log()
        model.head.out.copy_(outputs.clamp(-1e4, 1e4))
        rows = task.splits["validation"]
        validation_outputs = model.head.out.cpu().expand(len(rows), -1)
        return TrainLog(
            score_main_metric(task, validation_outputs, rows),
            validation_loss=compute_output_loss(task, validation_outputs, rows),
        )


_WORD = re.compile(r"\w+|[^\w\s]")
_WORDS_REGULARISATION_GRID = (1.0, 10.0, 100.0)  # C of logistic regression


@register(
    "words",
    reference="TF-IDF of the words and logistic regression, without a language model",
    learning_rates=(),
    unused_options=("lr", "weight_decay", *_TRAINING_LOOP_OPTIONS),
)
class WordsConfig(ControlConfig):
    """The linear model of words, which has no options."""

    model_class = WordsModel

    def build_head(self, bb: Backbone, cfg: TrainingConfig, n_out: int) -> nn.Module:
        """Return a head without a vocabulary."""
        return WordsHead(n_out)

    def fit(self, model: ControlModel, task: Task, cfg: TrainingConfig) -> TrainLog:
        """Fit the model, with the regularisation that is best on the validation split."""
        from sklearn.feature_extraction.text import TfidfVectorizer

        head = model.head
        rows = task.splits["train"]
        head.vectorizer = TfidfVectorizer(token_pattern=_WORD.pattern, sublinear_tf=True)
        X = head.vectorizer.fit_transform(map(_join_texts, rows))
        targets = training_targets(task, rows)
        validation_rows = task.splits["validation"]
        examples = head.encode(validation_rows)
        best: tuple | None = None
        for C in _WORDS_REGULARISATION_GRID:
            W, b, _ = fit_linear_model(X, targets, C, len(task.labels) or None)
            head.set_weights(W, b)
            outputs = predict_logits(model, examples)
            score = score_main_metric(task, outputs, validation_rows)
            if best is None or score > best[0]:
                best = score, W, b, compute_output_loss(task, outputs, validation_rows)
        assert best is not None
        head.set_weights(*best[1:3])
        model.to(model.backbone.device)
        return TrainLog(best[0], validation_loss=best[3])


@register(
    "probe",
    reference="a converged linear model of the frozen hidden states",
    learning_rates=(),
    unused_options=("lr", "weight_decay", *_TRAINING_LOOP_OPTIONS),
    cacheable_states=("hidden", "sentence"),
)
class ProbeControlConfig(ControlConfig):
    """The linear probe, which has no options."""

    def build_head(self, bb: Backbone, cfg: TrainingConfig, n_out: int) -> nn.Module:
        """Return a linear head."""
        return ProbeHead(bb.d, n_out, bb.n_layers)

    def fit(self, model: ControlModel, task: Task, cfg: TrainingConfig) -> TrainLog:
        """Select the best probe on the validation split, and make it the head."""
        W, b, selected = fit_best_probe(model.backbone, task, cfg)
        head = model.head
        head.layer = selected["layer"]
        head.pooling = selected["pooling"]
        head.net.load_state_dict(dict(weight=W, bias=b))
        return TrainLog(selected["validation"], probe=selected)


@register(
    "side-network",
    reference="the generator without its prompt",
    learning_rates=(3e-4, 1e-3, 3e-3),
    unused_options=_TRAINING_LOOP_OPTIONS,
    cacheable_states=("hidden", "sentence"),
)
@dataclass(frozen=True, kw_only=True)
class SideNetworkConfig(ControlConfig):
    """Options of the side network."""

    bottleneck: BottleneckWidth = 256  # width of the network
    prompt_dropout: Probability = 0.1  # dropout on M(x) and in the network
    # M(x): 'mean' over the words, or 'cls' (the papers' <s>); 'noisy' is computed as 'cls'; None:
    # as pooling
    sentence_pooling: Literal["mean", "cls", "noisy"] | None = None

    def build_head(self, bb: Backbone, cfg: TrainingConfig, n_out: int) -> nn.Module:
        """Return the network that predicts from M(x)."""
        pooling = resolve_sentence_pooling(self.sentence_pooling, cfg.pooling)
        site = "mean" if pooling == "mean" else bb.default_pooling
        return SideNetwork(bb.d, n_out, self.bottleneck, site, self.prompt_dropout)

    def fit(self, model: ControlModel, task: Task, cfg: TrainingConfig) -> TrainLog:
        """Train a side network with AdamW on sentence vectors that are computed once.

        Training stops after `SIDE_NETWORK_PATIENCE` evaluations without improvement on the
        validation split, and the head gets the parameters of the best evaluation. The validation
        loss decides between equal scores.

        Raises: `DivergenceError` if the loss or an output is not finite.
        """
        head = model.head.cpu()
        validation_rows = task.splits["validation"]
        Z = _encode_sentence_vectors(model, task, cfg, "train")
        validation_Z = _encode_sentence_vectors(model, task, cfg, "validation")
        targets = torch.tensor(training_targets(task, task.splits["train"]))
        lr = cfg.lr or CONTROL_METHODS["side-network"].default_learning_rate
        assert lr is not None
        optimizer = torch.optim.AdamW(head.parameters(), lr, weight_decay=cfg.weight_decay)
        order = torch.Generator().manual_seed(cfg.seed)
        torch.manual_seed(cfg.seed)
        head.scale.train()(Z)
        history: list[tuple[int, float]] = []  # (step, validation score) of each evaluation
        validation_losses: list[float | None] = []
        losses: list[float] = []
        best_state = head.state_dict()
        n_epochs = max(1, -(-_MIN_STEPS_BETWEEN_EVALUATIONS * cfg.batch_size // len(Z)))
        while len(history) < _MAX_EVALUATIONS and not should_stop_early(
            history, validation_losses, SIDE_NETWORK_PATIENCE
        ):
            for _ in range(n_epochs):
                losses += _train_one_epoch(head, optimizer, Z, targets, cfg.batch_size, order)
            with torch.no_grad():
                outputs = head.eval().classify_vectors(validation_Z)
            if not (np.isfinite(losses).all() and outputs.isfinite().all()):
                raise DivergenceError(
                    f"the loss or an output of {cfg.run_name!r} is not finite after step "
                    f"{len(losses)} (learning rate {lr:g}): a lower lr usually fixes it."
                )
            score = score_main_metric(task, outputs, validation_rows)
            history.append((len(losses), score))
            validation_losses.append(compute_output_loss(task, outputs, validation_rows))
            best = find_best_evaluation(history, validation_losses)
            if best == len(history) - 1:
                best_state = copy_state(head.state_dict())
        head.load_state_dict(best_state)
        model.to(model.backbone.device)
        return TrainLog(
            history[best][1],
            history,
            losses,
            steps=len(losses),
            validation_loss=validation_losses[best],
            validation_losses=validation_losses,
        )
