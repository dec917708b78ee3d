"""Pooled representations of texts at every layer of a frozen model, cached on disk.

A probe asks which layer, and which position or mean of it, already determines the label.
Nothing below it is trained, so one pass over the texts computes all its inputs: the mean over
the words, the classification token `<s>`, the last token, and with a template the mask.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from idp_tutorial.core.backbone import Backbone, backbone_fingerprint, in_eval_mode
from idp_tutorial.core.loop import walk_layers
from idp_tutorial.training.evaluation import iterate_batches
from idp_tutorial.training.state_store import StateStore, example_key
from idp_tutorial.utils.durable import cache_folder

__all__ = ["pool_all_layers"]


def _pool_batch(bb: Backbone, batch: dict, poolings: Sequence[str]) -> Tensor:
    """Return pooled states before every layer and after the final norm `[B,n_layers+1,n,d]`."""
    by_layer = []
    for ctx in walk_layers(bb, batch):
        if ctx.layer == bb.n_layers:
            ctx.h = bb.norm(ctx.h)
        pooled = [ctx.mean_state() if p == "mean" else ctx.state_at(p) for p in poolings]
        by_layer.append(torch.stack(pooled, 1))
    return torch.stack(by_layer, 1)


@torch.no_grad()
def _iterate_pooled_batches(
    bb: Backbone, examples: Sequence[dict], poolings: Sequence[str], batch_size: int
) -> Iterator[np.ndarray]:
    float16_max = 65504
    with in_eval_mode(bb):
        for batch in iterate_batches(bb, examples, batch_size):
            pooled = _pool_batch(bb, batch, poolings).clamp(-float16_max, float16_max)
            yield pooled.half().flatten(1).cpu().numpy()


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
    if not folder:
        batches = _iterate_pooled_batches(bb, examples, poolings, batch_size)
        return torch.cat([torch.from_numpy(states) for states in batches]).view(shape)
    store_folder = cache_folder(folder) / backbone_fingerprint(bb)
    store = StateStore(
        store_folder / f"pooled-{'-'.join(poolings)}", shape[1] * shape[2] * bb.d, "float16"
    )
    keys = [_pooled_key(e, poolings) for e in examples]
    missing = {k: e for k, e in zip(keys, examples) if k not in store}
    if missing:
        order = sorted(missing, key=lambda k: -len(missing[k]["input_ids"]))
        batches = _iterate_pooled_batches(bb, [missing[k] for k in order], poolings, batch_size)
        store.add(
            order,
            [1] * len(order),
            batches,
            f"the cache of pooled representations of {len(order):,} texts",
        )
    return torch.stack([torch.from_numpy(store[k][0].copy()) for k in keys]).view(shape)
