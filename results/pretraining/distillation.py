"""Initial word embeddings from a teacher model, and a loss that imitates its layers."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.random_numbers import forked_random_numbers
from idp_tutorial.utils.checks import UserError
from results.pretraining.corpus import draw_windows


@torch.no_grad()
def project_teacher_embeddings(
    tokenizer: Any,  # tokenizer of the student
    teacher: Backbone,  # its word embeddings are `[V',d']`, with d' >= d
    d: int,  # hidden size of the student
) -> Tensor:
    """Return initial word embeddings of the student `[V,d]`.

    They are the principal components of the teacher's word embeddings, averaged over the teacher's
    tokens in each token of the student.
    """
    table = teacher.word_embeddings.weight.float()
    if d > table.shape[1]:
        raise UserError(
            f"d={d} is larger than the word embeddings of the teacher {teacher.name!r}, which have "
            f"{table.shape[1]} dimensions. Use at most as many."
        )
    words = [tokenizer.decode([i]).strip() for i in range(len(tokenizer))]
    pieces = teacher.tokenizer(words, add_special_tokens=False)["input_ids"]
    E = torch.stack([table[ids].mean(0) if ids else table.mean(0) for ids in pieces])
    E = E - E.mean(0)
    _, _, Vt = torch.linalg.svd(E, full_matrices=False)
    E = E @ Vt[:d].T
    # with a standard deviation of 0.02 or 0.04 the loss stayed near that of the unigram model for
    # hundreds of steps
    return E * (0.15 / E.std())


def align_tokens(
    student_spans: Sequence,  # characters (begin, end) of each token of the student `[n,2]`
    teacher_spans: Sequence,  # the same for the teacher's tokens `[m,2]`
) -> tuple[np.ndarray, np.ndarray]:
    """Return the first teacher token that shares characters with each student token, and the end.

    Both are `[n]`; student token i covers teacher tokens `first[i]` to `end[i] - 1`, at least one.
    """
    student = np.array(student_spans)
    teacher = np.array(teacher_spans)
    # the first teacher token that ends after the student token begins
    first = np.searchsorted(teacher[:, 1], student[:, 0], side="right")
    # the first teacher token that begins at or after the end of the student token
    end = np.searchsorted(teacher[:, 0], student[:, 1], side="left")
    first = np.minimum(first, len(teacher) - 1)
    return first, np.clip(end, first + 1, len(teacher))


def encode_aligned_streams(
    lines: Sequence[str],
    tokenizer: Any,  # fast tokenizer of the student
    teacher_tokenizer: Any,  # fast tokenizer of the teacher
) -> dict[str, np.ndarray]:
    """Return the token ids of all documents by both tokenizers, and their alignment.

    `stream` `[N]` and `teacher` `[M]` are ids (uint16), with an end token after each document;
    student token i covers the teacher tokens `start[i]` to `stop[i] - 1` `[N]` (int32).
    """
    arrays: dict[str, list] = dict(stream=[], teacher=[], start=[], stop=[])
    n_teacher_tokens = 0
    options = dict(add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    for i in range(0, len(lines), 1000):
        student = tokenizer(lines[i : i + 1000], **options)
        teacher = teacher_tokenizer(lines[i : i + 1000], **options)
        for ids, spans, teacher_ids, teacher_spans in zip(
            student["input_ids"],
            student["offset_mapping"],
            teacher["input_ids"],
            teacher["offset_mapping"],
        ):
            if not ids or not teacher_ids:
                continue
            n = len(teacher_ids)
            first, end = align_tokens(spans, teacher_spans)
            # the end tokens are aligned with each other
            start = np.append(first, n).astype(np.int32) + n_teacher_tokens
            stop = np.append(end, n + 1).astype(np.int32) + n_teacher_tokens
            arrays["stream"].append(np.array([*ids, tokenizer.eos_token_id], np.uint16))
            arrays["teacher"].append(
                np.array([*teacher_ids, teacher_tokenizer.sep_token_id], np.uint16)
            )
            arrays["start"].append(start)
            arrays["stop"].append(stop)
            n_teacher_tokens += n + 1
    return {name: np.concatenate(chunks) for name, chunks in arrays.items()}


def average_spans(
    h: Tensor,  # hidden states `[B,S,d]`
    begins: Tensor,  # first position of each span `[B,T]`
    ends: Tensor,  # position after the last one of each span `[B,T]`
) -> Tensor:
    """Return the mean hidden state of each span `[B,T,d]`, in float32."""
    sums = F.pad(h.float().cumsum(1), (0, 0, 1, 0))  # at i: the sum over the positions before i
    begins = begins[..., None]
    ends = ends[..., None]

    def sum_before(positions: Tensor) -> Tensor:
        """Return the sum of the states before each position."""
        return sums.gather(1, positions.expand(-1, -1, h.shape[-1]))

    return (sum_before(ends) - sum_before(begins)) / (ends - begins)


class DistillationLoss(nn.Module):
    """Squared error between linear maps of a student's layers and a teacher's aligned states."""

    def __init__(
        self,
        teacher: Backbone,  # a BERT, which stays frozen
        streams: dict[str, np.ndarray],  # from `encode_aligned_streams`
        d: int,  # hidden size of the student
        n_layers: int,  # number of layers of the student
        # layers of the teacher; they are paired with layers of the student at equal depths
        teacher_layers: Sequence[int] = (2, 4, 6),
        causal: bool = False,  # True for a decoder, whose summary is at the last position
        seed: int = 0,  # of the maps and of the windows that standardise the targets
        dtype: torch.dtype = torch.bfloat16,  # of the teacher's pass
    ) -> None:
        super().__init__()
        self.streams = streams
        self.teacher_layers = teacher_layers
        self.summary_position = -1 if causal else 0
        self.student_layers = [
            round(n_layers * (i + 1) / len(teacher_layers)) for i in range(len(teacher_layers))
        ]
        copied = deepcopy(teacher.model.base_model)  # the original keeps its dtype
        # in a list, so that the teacher is not a submodule, and is neither trained nor saved
        self.unregistered_teacher = [copied.to(dtype)]
        self.cls_id = teacher.tokenizer.cls_token_id
        self.sep_id = teacher.tokenizer.sep_token_id
        with forked_random_numbers(seed, []):
            self.projections = nn.ModuleList(nn.Linear(d, teacher.d) for _ in teacher_layers)
        n = len(streams["stream"])
        positions = draw_windows(
            n, min(4096, n), np.random.default_rng(seed), lengths=(64,), p=(1.0,)
        )
        sample = self.targets(positions).flatten(1, 2)
        self.target_mean = sample.mean(1)[:, None, None]
        self.target_std = sample.std(1)[:, None, None]

    def _teacher_windows(
        self,
        first: np.ndarray,  # first position of each window in the teacher's stream `[B,1]`
        end: np.ndarray,  # position after the last one `[B,1]`
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the teacher's ids between [CLS] and [SEP], padded, and the attention mask."""
        n = end - first
        columns = np.arange(n.max() + 2)[None]
        stream_positions = np.minimum(first + columns - 1, end - 1).clip(0)
        ids = self.streams["teacher"][stream_positions].astype(np.int64)
        ids = np.where(columns == n + 1, self.sep_id, ids)
        ids = np.where(columns == 0, self.cls_id, ids)
        return ids, (columns <= n + 1).astype(np.int64)

    @torch.no_grad()
    def targets(
        self,
        positions: np.ndarray,  # positions of windows in the student's stream `[B,T]`
    ) -> Tensor:
        """Return the teacher's mean states over the pieces of each token `[layers,B,T,d']`.

        At `<s>` (of a decoder: at the last position) it is the mean over the whole window.
        """
        device = next(self.projections.parameters()).device

        def to_tensor(array: np.ndarray) -> Tensor:
            """Return an array of token ids as a tensor."""
            return torch.from_numpy(array.astype(np.int64)).to(device)

        start = self.streams["start"][positions]
        stop = self.streams["stop"][positions]
        first = start[:, :1]
        end = stop[:, -1:]
        ids, attention_mask = self._teacher_windows(first, end)
        outputs = self.unregistered_teacher[0].to(device)(
            input_ids=to_tensor(ids),
            attention_mask=to_tensor(attention_mask),
            output_hidden_states=True,
        )
        begins = start - first + 1  # position 0 is [CLS]
        ends = stop - first + 1
        begins[:, self.summary_position] = 1
        ends[:, self.summary_position] = (end - first + 1)[:, 0]
        targets = []
        for layer in self.teacher_layers:
            h = outputs.hidden_states[layer]
            targets.append(average_spans(h, to_tensor(begins), to_tensor(ends)))
        return torch.stack(targets)

    def forward(
        self,
        hidden_states: Sequence[Tensor],  # of the student, embeddings first, each `[B,T,d]`
        positions: np.ndarray,  # positions of the windows in the student's stream `[B,T]`
    ) -> Tensor:
        """Return the mean squared error over all layers, in units of the targets' variance."""
        device = next(self.projections.parameters()).device
        targets = self.targets(positions) - self.target_mean.to(device)
        targets = targets / self.target_std.to(device)
        losses = []
        for projection, layer, target in zip(self.projections, self.student_layers, targets):
            losses.append(F.mse_loss(projection(hidden_states[layer]).float(), target))
        return torch.stack(losses).mean()
