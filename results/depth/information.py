"""Lower bounds on the information about the label in frozen hidden states."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from idp_tutorial.core.loop import walk_layers
from idp_tutorial.core.planned_model import PlannedModel
from idp_tutorial.core.random_numbers import forked_random_numbers
from idp_tutorial.data.task import Task, require_classes
from idp_tutorial.reproduction.analysis.probes import compute_label_entropy
from idp_tutorial.training.evaluation import iterate_batches
from idp_tutorial.training.examples import encode_rows
from idp_tutorial.utils.checks import DivergenceError, UserError
from results.depth.probe_config import ProbeConfig


class StateProbe(nn.Module):
    """Classifier q(y|h) of LPT's Appendix A: transformer layers and a linear layer on the mean."""

    def __init__(
        self,
        d: int,  # width of the hidden states
        n_classes: int,  # number of classes
        config: ProbeConfig | None = None,  # depth, width and heads; None: the defaults
    ) -> None:
        super().__init__()
        config = config or ProbeConfig()
        self.input_projection = nn.Linear(d, config.width)
        self.classifier = nn.Linear(config.width, n_classes)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                config.width, config.heads, 4 * config.width, dropout=0.0, batch_first=True
            )
            for _ in range(config.depth)
        )

    def forward(
        self,
        h: Tensor,  # hidden states `[B,T,d]`
        attention_mask: Tensor,  # 1 for hidden states, 0 for padding `[B,T]`
    ) -> Tensor:  # `[B,C]`
        """Return the logits of a padded batch of hidden states."""
        x = self.input_projection(h)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=attention_mask == 0)
        weights = attention_mask[..., None].to(x.dtype)
        return self.classifier((x * weights).sum(1) / weights.sum(1))


def _pad_batch(
    states: Sequence[Tensor], y: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the padded hidden states of some examples, their attention mask and their labels."""
    selected = [states[i] for i in indices]
    masks = [torch.ones(len(h), device=h.device) for h in selected]
    return pad_sequence(selected, True), pad_sequence(masks, True), y[indices]


@torch.no_grad()
def _evaluate_probe(
    probe: StateProbe, states: Sequence[Tensor], y: Tensor
) -> tuple[float, float]:  # bits, 0 … 1
    """Return the cross-entropy of a probe in bits, and its accuracy."""
    logits = []
    for indices in torch.arange(len(y)).split(256):
        h, attention_mask, _ = _pad_batch(states, y, indices)
        logits.append(probe(h, attention_mask))
    outputs = torch.cat(logits)
    accuracy = (outputs.argmax(1) == y).float().mean().item()
    return F.cross_entropy(outputs, y).item() / math.log(2), accuracy


def _train_probe(
    x: Mapping[str, Sequence[Tensor]], y: dict[str, Tensor], cfg: ProbeConfig
) -> tuple[float, float, float]:
    """Return validation cross-entropy, test cross-entropy and test accuracy of the best evaluation.

    The best evaluation is the first with the lowest validation cross-entropy, which is infinite
    if the probe diverged.
    """
    d = x["train"][0].shape[1]
    n_classes = 1 + max(int(labels.max()) for labels in y.values())
    probe = StateProbe(d, n_classes, cfg).to(y["train"].device)
    optimizer = torch.optim.AdamW(probe.parameters(), lr=cfg.lr, weight_decay=0.01)
    best = (math.inf, math.inf, math.nan)
    steps_between_evaluations = max(1, cfg.steps // cfg.evaluations)
    for step in range(1, cfg.steps + 1):
        indices = torch.randint(len(y["train"]), (cfg.batch_size,))
        h, attention_mask, target = _pad_batch(x["train"], y["train"], indices)
        F.cross_entropy(probe(h, attention_mask), target).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % steps_between_evaluations == 0 or step == cfg.steps:
            validation, _ = _evaluate_probe(probe, x["validation"], y["validation"])
            test, accuracy = _evaluate_probe(probe, x["test"], y["test"])
            # `min` returns its first argument for ties and for a NaN loss, so `best` is kept
            best = min(best, (validation, test, accuracy), key=lambda result: result[0])
    return best


def mutual_information(
    states: Mapping[str, Sequence[Tensor]],  # split → hidden states of each example `[n,d]`
    # split → class of each example; the splits are train, validation, test
    labels: Mapping[str, Any],
    **probe: Any,  # fields of `ProbeConfig`: depth, width, steps, …
) -> dict:  # `bits` of I(h;y) at least, `entropy` of y in bits, `accuracy` in % (as in the paper)
    """Return `H(y) − CE`, a lower bound on the information about the label (LPT, App. A).

    The probe is trained on the device of the hidden states, selected on validation, and scored on
    test.

    Raises: `DivergenceError` if the training of the probe diverges.
    """
    cfg = ProbeConfig(**probe)
    y = {split: torch.as_tensor(labels[split]) for split in ("train", "validation", "test")}
    positions = torch.cat(list(states["train"]))
    mean = positions.mean(0)
    std = positions.std(0, correction=0).clamp(min=1e-6)
    x = {}
    for split in y:
        x[split] = [(h - mean) / std for h in states[split]]
    y = {split: classes.to(positions.device) for split, classes in y.items()}
    gpu = positions.device.index  # None on a CPU
    with forked_random_numbers(cfg.seed, [] if gpu is None else [gpu]):
        validation, test, accuracy = _train_probe(x, y, cfg)
    if math.isinf(validation):
        raise DivergenceError(
            f"the training of the probe diverged at lr={cfg.lr:g}. A lower lr usually fixes it."
        )
    H = compute_label_entropy(y["test"])
    return dict(bits=H - test, entropy=H, accuracy=100 * accuracy)


@torch.no_grad()
def states_by_layer(
    model: PlannedModel,
    examples: Sequence[dict],  # from `task.encode`
    batch_size: int = 64,  # examples in a batch
) -> Iterator[list[Tensor]]:  # hidden states of each example `[n,d]`, after 0, 1, … n_layers layers
    """Yield the hidden states of the words of all examples, layer by layer.

    The model's prompts are in the sequence, but not among the states.
    """
    model.eval()
    bb = model.backbone
    walks = [walk_layers(bb, b, model.plan) for b in iterate_batches(bb, examples, batch_size)]
    for contexts in zip(*walks):
        states = []
        for ctx in contexts:
            states += [h[mask == 1] for h, mask in zip(ctx.h, ctx.word_mask)]
        yield states


def probe_layers(
    model: PlannedModel,
    task: Task,  # with its splits
    layers: Sequence[int] | None = None,  # layers applied, 0 … n_layers; None: 1 … n_layers
    max_examples: int = 1000,  # maximum number of examples from each split
    max_len: int = 128,  # maximum number of tokens
    template: str | None = None,  # 'code' for a model with a verbalizer
    **probe: Any,  # fields of `ProbeConfig`: depth, width, steps, …
) -> list[dict]:  # for each layer: `layer`, `bits`, `entropy`, `accuracy`
    """Measure the information about the label in each layer (LPT §4, Figure 2 right; App. A)."""
    bb = model.backbone
    require_classes(task, "information about a label")
    layers = list(range(1, bb.n_layers + 1) if layers is None else layers)
    for layer in layers:
        if layer not in range(bb.n_layers + 1):
            raise UserError(
                f"layers must be between 0 and {bb.n_layers} for backbone {bb.name!r}, got {layer}."
            )
    data = {
        split: encode_rows(task, rows[:max_examples], bb, max_len, template)
        for split, rows in task.splits.items()
    }
    labels = {}
    for split, examples in data.items():
        labels[split] = [e["label"] for e in examples]
    walks = [states_by_layer(model, examples) for examples in data.values()]
    results = {}
    for layer, *states in zip(range(max(layers, default=-1) + 1), *walks):
        if layer in layers:
            information = mutual_information(dict(zip(data, states)), labels, **probe)
            results[layer] = dict(layer=layer, **information)
    return [results[layer] for layer in layers]
