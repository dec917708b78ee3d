"""The losses of masked and causal language modelling, and n-gram models as baselines."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from idp_tutorial.families.family import build_hf_model
from results.pretraining.corpus import (
    SPECIAL_TOKENS,
    draw_windows,
    gather_windows,
)


def mask_tokens(
    ids: Tensor,  # token ids `[B,T]`
    mask_id: int,  # id of `<mask>`
    vocab_size: int,
    rng: np.random.Generator,
    p: float = 0.15,  # probability that a token is to be predicted
) -> tuple[Tensor, Tensor, Tensor]:
    """Return masked ids `[B,T]`, positions to predict `[M]` and their tokens `[M]`.

    80 % of the positions are masked, 10 % get a random token, 10 % are unchanged. A position is an
    index into the flattened batch. At least one position is predicted if `p` > 0.
    """
    n_special = len(SPECIAL_TOKENS)  # smaller ids are neither masked nor drawn
    flat = ids.flatten().numpy()
    positions = np.flatnonzero((rng.random(flat.size) < p) & (flat >= n_special))
    if p and not len(positions):  # the mean over no position would not be finite
        candidates = np.flatnonzero(flat >= n_special)
        if candidates.size:
            positions = rng.choice(candidates, 1)
    masked = flat.copy()
    random_numbers = rng.random(len(positions))
    is_replaced = random_numbers >= 0.9
    masked[positions[random_numbers < 0.8]] = mask_id
    masked[positions[is_replaced]] = rng.integers(n_special, vocab_size, is_replaced.sum())
    return (
        torch.from_numpy(masked).view_as(ids),
        torch.from_numpy(positions),
        torch.from_numpy(flat[positions]),
    )


def sample_next_tokens(
    ids: Tensor,  # token ids `[B,T]`
    rng: np.random.Generator,
    p: float = 0.25,  # probability that the token after a position is to be predicted
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ids `[B,T]`, random positions `[M]` and the token after each `[M]`.

    A position is an index into the flattened batch. At least one position is predicted if `p` > 0.
    """
    is_predicted = rng.random(tuple(ids.shape)) < p
    is_predicted[:, -1] = False  # the window does not contain the token after its last position
    if p and not is_predicted.any():  # the mean over no position would not be finite
        window = rng.integers(len(is_predicted))
        is_predicted[window, rng.integers(is_predicted.shape[1] - 1)] = True
    positions = torch.from_numpy(np.flatnonzero(is_predicted.flatten()))
    return ids, positions, ids.flatten()[positions + 1]


def lm_loss(
    model: Any,  # a `RobertaForMaskedLM` or `GPT2LMHeadModel`
    h: Tensor,  # last hidden states `[B,T,d]`
    positions: Tensor,  # positions to predict, as indices into the flattened batch `[M]`
    targets: Tensor,  # token ids to predict `[M]`
) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy in nats and the top-1 accuracy at the given positions.

    Logits of other positions are not computed.
    """
    logits = model.lm_head(h.flatten(0, 1)[positions]).float()
    return F.cross_entropy(logits, targets), (logits.argmax(-1) == targets).float().mean()


def create_language_model(
    vocab_size: int,
    d: int = 192,  # hidden size, a multiple of 32
    n_layers: int = 8,
    family: str = "roberta",  # or 'gpt2'
) -> Any:
    """Return a RoBERTa or GPT-2 of Transformers with random weights.

    Its attention heads have 32 dimensions, its feed-forward layers four times the hidden size. It
    has 256 positions, and is in eval mode: `train()` would switch its dropout of 0.1 on.
    """
    from transformers import GPT2Config, RobertaConfig

    sizes: dict[str, Any] = dict(
        vocab_size=vocab_size,
        hidden_size=d,
        num_hidden_layers=n_layers,
        num_attention_heads=d // 32,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
    )
    if family == "gpt2":
        return build_hf_model(GPT2Config(**sizes, n_positions=256), "eager").eval()
    roberta_config = RobertaConfig(  # RoBERTa's positions begin at 2
        **sizes, intermediate_size=4 * d, max_position_embeddings=258, type_vocab_size=1
    )
    return build_hf_model(roberta_config, "eager").eval()


def compute_losses(
    model: Any,  # from `create_language_model`
    stream: np.ndarray,  # token ids `[N]`
    positions: np.ndarray,  # positions of the windows in the stream `[B,T]`
    rng: np.random.Generator,  # for the positions that are predicted
    tokenizer: Any,
    distillation_loss: Callable | None = None,  # function (hidden states, positions) -> loss
) -> dict[str, Tensor]:
    """Return loss `lm` and accuracy `top1` of a batch of windows and, with a teacher, `distil`."""
    ids = gather_windows(stream, positions)
    if model.config.model_type == "gpt2":
        batch = sample_next_tokens(ids, rng)
    else:
        batch = mask_tokens(ids, tokenizer.mask_token_id, len(tokenizer), rng)
    inputs, predicted_positions, targets = (x.to(model.device) for x in batch)
    outputs = model.base_model(input_ids=inputs, output_hidden_states=distillation_loss is not None)
    lm, top1 = lm_loss(model, outputs.last_hidden_state, predicted_positions, targets)
    losses = dict(lm=lm, top1=top1)
    if distillation_loss is not None:
        losses["distil"] = distillation_loss(outputs.hidden_states, positions)
    return losses


@torch.no_grad()
def evaluate_held_out(
    model: Any,  # from `create_language_model`
    stream: np.ndarray,  # token ids `[N]`
    tokenizer: Any,
    n: int = 200_000,  # number of ids at the end of the stream that are held out
    distillation_loss: Callable | None = None,  # as in `compute_losses`
    max_batches: int = 30,  # batches of 2,048 ids; fewer if the held-out text is shorter
) -> dict[str, float]:
    """Return the mean of each of `compute_losses` on fixed windows and masks of held-out text."""
    was_training = model.training
    batch_losses = []
    model.eval()
    for i in range(min(max_batches, -(-n // 2048))):
        rng = np.random.default_rng((1, i))
        positions = len(stream) - n + draw_windows(n, 2048, rng, lengths=(64,), p=(1.0,))
        losses = compute_losses(model, stream, positions, rng, tokenizer, distillation_loss)
        batch_losses.append({name: value.item() for name, value in losses.items()})
    model.train(was_training)
    means = {}
    for name in batch_losses[0]:
        means[name] = float(np.mean([losses[name] for losses in batch_losses]))
    return means
