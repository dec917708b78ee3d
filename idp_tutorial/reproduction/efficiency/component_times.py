"""Times of training steps with and without caches, and of six implementations of PHM layers.

A step of prompt tuning runs all layers forward and backward. IDPG adds a forward pass for M(x);
LPT needs no backward pass below its prompt. A cache removes the pass for M(x), or the layers
below the prompt altogether. Reading a batch from disk is part of a step; filling the cache is
not, since it happens once.

A PHM layer is a sum of n Kronecker products. The released code of IDPG multiplies the input by
each of them in turn, so both passes cost as much as n full matrices. Compacter's builds all n
products at once and adds them up, with n times the memory of W. In this implementation `weight`
is one multiplication `[n²,n]×[n,·]`, and `factored` builds no matrix. Peak memory counts all
tensors that exist at the same time, gradients included, parameters excluded.
"""

import json
import random
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.heads import ClassificationHead
from idp_tutorial.core.prompted_model import PromptedModel
from idp_tutorial.data.encoding import make_dataloader
from idp_tutorial.methods.phm import PHMLinear
from idp_tutorial.training.cache import attach_cached_states

__all__ = ["PHM_IMPLEMENTATIONS", "time_cached_training", "measure_phm"]


_CACHE_NAMES = {  # key of an example → name of the cache it was read from
    "sentence": "sentence",
    "mean_sentence": "mean_sentence",
    "hidden_states": "hidden",
}


def _iterate_training_steps(
    model: PromptedModel, examples: Sequence[dict], batch_size: int, trains_backbone: bool
) -> Iterator[None]:
    """Run training steps, and yield after each of them."""
    bb = model.backbone
    device = bb.word_embeddings.weight.device
    parameters = list(model.trained_parameters().values())
    if trains_backbone:
        parameters += bb.base.parameters()
    # a learning rate of 0: the work of a step, and the same weights after it
    optimizer = torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0, fused=True)
    while True:
        for batch in make_dataloader(
            examples, batch_size, bb.tokenizer.pad_token_id or 0, shuffle=True
        ):
            bb.base.requires_grad_(trains_backbone)
            model.train().loss({name: x.to(device) for name, x in batch.items()}).backward()
            optimizer.step()
            optimizer.zero_grad()
            bb.base.requires_grad_(False)
            if device.type == "cuda":
                torch.cuda.synchronize()
            yield


def _make_cache_variants(
    bb: Backbone,
    plans: dict[str, Callable | None],
    examples: list[dict],
    cfg: RunConfig,
    n_classes: int,
) -> tuple[list[dict], list[Iterator[None]]]:
    """Return the record and the training steps of each plan with and without its caches."""
    records = []
    runs = []
    for name, make_plan in plans.items():
        for cache in ("none",) if make_plan is None else ("none", "both"):
            plan = make_plan(bb) if make_plan else {}
            head = ClassificationHead(bb.d, n_classes, "mean")
            model = PromptedModel(bb, head, plan).to(bb.word_embeddings.weight.device)
            inputs: Sequence[dict] = examples
            mb = 0.0
            if cache == "both":
                cached_cfg = cfg.with_options(cache=cache)
                (inputs,), log = attach_cached_states(model, [examples], cached_cfg)
                mb = log["mb"]
            used_caches = "+".join(_CACHE_NAMES[key] for key in inputs[0] if key in _CACHE_NAMES)
            if cache == "none" or used_caches:
                records.append(dict(plan=name, cache=used_caches or "none", mb=round(mb, 1), ms=[]))
                runs.append(
                    _iterate_training_steps(model, inputs, cfg.batch_size, make_plan is None)
                )
    return records, runs


def time_cached_training(
    bb: Backbone,
    plans: dict[str, Callable | None],  # name → function from `bb` to a plan; None: fine-tuning
    examples: list[dict],  # with labels, from `task.encode`
    cfg: RunConfig,  # its `cache_dir`, `cache_dtype` and `batch_size` are used
    repeats: int = 30,  # number of steps of each variant
    n_classes: int = 2,  # number of classes of the head
) -> list[
    dict
]:  # `plan`, `cache`, `mb` on disk, median `ms` of a step, `ratio` to the first variant
    """Time training steps of every plan with and without its caches, in turns.

    `ms` and `ratio` are medians over rounds.
    """
    records, runs = _make_cache_variants(bb, plans, examples, cfg, n_classes)
    n_warmup = 2
    for i in range(n_warmup + repeats):
        for record, run in zip(records, runs):
            start_time = time.perf_counter()
            next(run)
            if i >= n_warmup:
                record["ms"].append(1000 * (time.perf_counter() - start_time))
    ms = np.array([record["ms"] for record in records])  # `[variants,rounds]`
    medians = np.median(ms, 1).tolist()
    ratios = np.median(ms / ms[0], 1).tolist()
    return [
        {**record, "ms": round(median, 2), "ratio": round(ratio, 3)}
        for record, median, ratio in zip(records, medians, ratios)
    ]


class _LiveTensorMemory(TorchDispatchMode):
    """Context that counts the bytes of the live tensors that were created in it, and the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.storage_bytes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        for storage in self._find_storages(args):
            self.storage_bytes.setdefault(storage._cdata, 0)  # inputs are not new memory
        result = func(*args, **(kwargs or {}))
        for storage in self._find_storages(result):
            if storage._cdata in self.storage_bytes:
                continue  # the result shares storage with an input
            self.storage_bytes[storage._cdata] = storage.nbytes()
            self.live_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            weakref.finalize(storage, self._on_storage_freed, storage._cdata)
        return result

    def _find_storages(self, tree: Any) -> list[torch.UntypedStorage]:
        """Return the storages of all tensors in nested containers."""
        return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]

    def _on_storage_freed(self, key: int) -> None:
        """Subtract the bytes of a storage."""
        self.live_bytes -= self.storage_bytes.pop(key, 0)


ApplyLayer = Callable[[Any, Tensor], Tensor]  # (layer, input) → output


def _apply_layer(layer: nn.Module, x: Tensor) -> Tensor:
    """Call the layer."""
    return layer(x)


def _apply_idpg(layer: Any, x: Tensor) -> Tensor:
    """Apply a PHM layer as IDPG's released code does: one multiplication for each term."""
    return sum(x @ torch.kron(a, b) for a, b in zip(layer.A, layer.B)) + layer.bias


def _apply_compacter(layer: Any, x: Tensor) -> Tensor:
    """Apply a PHM layer as Compacter's released code does: build all terms, then their sum."""
    products = layer.A[:, :, None, :, None] * layer.B[:, None, :, None, :]
    weight = products.reshape(layer.n, layer.d_in, layer.d_out).sum(0)
    return x @ weight + layer.bias


def _apply_with_algorithm(algorithm: str) -> ApplyLayer:
    """Return a function that applies a PHM layer with one of its algorithms."""

    def apply(layer: PHMLinear, x: Tensor) -> Tensor:
        """Set the algorithm and call the layer."""
        layer.algorithm = algorithm
        return layer(x)

    return apply


PHM_IMPLEMENTATIONS: dict[str, ApplyLayer] = {  # 'linear' is applied to `nn.Linear` layers
    "linear": _apply_layer,
    "auto": _apply_with_algorithm("auto"),
    "factored": _apply_with_algorithm("factored"),
    "materialised": _apply_with_algorithm("materialised"),
    "idpg": _apply_idpg,
    "compacter": _apply_compacter,
}


def _time_forward_backward(
    apply: ApplyLayer, layers: nn.ModuleList, x: Tensor
) -> tuple[float, float, int]:
    """Return ms of the forward and of the backward pass, and the bytes that autograd saves."""

    def synchronized_ms() -> float:
        """Return the time when all work is done."""
        if x.is_cuda:
            torch.cuda.synchronize()
        return 1000 * time.perf_counter()

    saved_bytes = {}
    parameter_pointers = {p.untyped_storage().data_ptr() for p in layers.parameters()}

    def record_saved(tensor: Tensor) -> Tensor:
        """Record the storage of a tensor that autograd saves."""
        storage = tensor.untyped_storage()
        saved_bytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    for p in [x, *layers.parameters()]:
        p.grad = None
    start = synchronized_ms()
    with torch.autograd.graph.saved_tensors_hooks(record_saved, lambda tensor: tensor):
        y = apply(layers[1], F.gelu(apply(layers[0], x)))
    middle = synchronized_ms()
    y.backward(torch.ones_like(y))
    end = synchronized_ms()
    activation_bytes = sum(
        n_bytes for pointer, n_bytes in saved_bytes.items() if pointer not in parameter_pointers
    )
    return middle - start, end - middle, activation_bytes


def _time_in_turns(
    runs: dict[str, tuple[ApplyLayer, nn.ModuleList]],
    x: Tensor,
    repeats: int,
    time_budget_ms: float,
) -> dict[str, list[tuple[float, float]]]:  # name → ms of each forward and backward pass
    """Time implementations in random order, round after round, after one call to warm up.

    An implementation that has used up the time budget has at least 3 turns.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for apply, layers in runs.values():
        _time_forward_backward(apply, layers, x)
    for turn in range(repeats):
        # a random order, because the previous call decides what the processor has cached
        for name in random.Random(turn).sample(list(runs), len(runs)):
            if len(times[name]) < 3 or sum(map(sum, times[name])) < time_budget_ms:
                forward_ms, backward_ms, _ = _time_forward_backward(*runs[name], x)
                times[name].append((forward_ms, backward_ms))
    return times


def measure_phm(
    out: Path | str | None = None,  # JSONL file to write
    d: int = 1024,  # width
    t: int = 5,  # prompt length
    bottlenecks: Sequence[int] = (16, 256),  # values of m
    kronecker_terms: Sequence[int] = (
        2,
        4,
        8,
        16,
        32,
    ),  # values of n; only divisors of m and d count
    batch_sizes: Sequence[int] = (1, 4, 16, 64, 256),  # inputs in a batch
    repeats: int = 15,  # number of turns, of which the medians count
    time_budget_ms: float = 500.0,  # time after which an implementation takes no more than 3 turns
    device: str = "cpu",  # 'cpu' or 'cuda'
) -> list[dict]:  # ms of each pass, peak MB, and MB that autograd saves, for each implementation
    """Time a prompt generator `d → m → t·d` with GELU in the `PHM_IMPLEMENTATIONS`, in turns.

    The gradient with respect to the input is computed too, as M-IDPG needs it.
    """
    records = []
    for m, n, batch_size in product(bottlenecks, kronecker_terms, batch_sizes):
        if m % n or d % n:
            continue
        torch.manual_seed(0)
        phm = nn.ModuleList([PHMLinear(d, m, n), PHMLinear(m, t * d, n)]).to(device)
        linear = nn.ModuleList([nn.Linear(d, m), nn.Linear(m, t * d)]).to(device)
        x = torch.randn(batch_size, d, device=device, requires_grad=True)
        runs = {
            name: (apply, linear if name == "linear" else phm)
            for name, apply in PHM_IMPLEMENTATIONS.items()
        }
        times = _time_in_turns(runs, x, repeats, time_budget_ms)
        for name, (apply, layers) in runs.items():
            with _LiveTensorMemory() as memory:
                _, _, saved_bytes = _time_forward_backward(apply, layers, x)
            forward_ms, backward_ms = (
                sorted(passes)[len(passes) // 2] for passes in zip(*times[name])
            )
            records.append(
                dict(
                    d=d,
                    m=m,
                    t=t,
                    n=n,
                    batch=batch_size,
                    way=name,
                    forward_ms=round(forward_ms, 3),
                    backward_ms=round(backward_ms, 3),
                    peak_mb=round(memory.peak_bytes / 1e6, 3),
                    kept_mb=round(saved_bytes / 1e6, 3),
                    turns=len(times[name]),
                    device=device,
                    threads=torch.get_num_threads(),
                    torch=torch.__version__,
                )
            )
    if out:
        Path(out).write_text("".join(json.dumps(r) + "\n" for r in records))
    return records
