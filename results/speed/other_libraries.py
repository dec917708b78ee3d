"""Times of training steps beside `peft`, and of predictions beside Transformers.

`peft` has prompt tuning, prefix tuning, P-tuning and LoRA. Its models cannot be trained with our
`fit`, so both sides run the same plain step on the same weights: forward, backward, gradient
clipping, AdamW. `peft` wraps Hugging Face's classifier, which is built on the meta device and
gets the layers of our backbone; only its head is new.

In predictions, texts go in and labels come out: this package's models through `predict`, the
library's through a `pipeline` around a classifier with the same weights.
"""

import logging
import warnings
from collections.abc import Callable
from copy import copy, deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn

from idp_tutorial.assembly.build import build_model
from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.heads import ClassificationHead
from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.planned_model import PlannedModel
from idp_tutorial.data.encoding import collate
from idp_tutorial.data.task import Task
from idp_tutorial.training.evaluation import predict
from results.speed.timing import (
    make_timing_task,
    restore_backbone_on_exit,
    time_functions,
)

logger = logging.getLogger(f"idp_tutorial.{__name__}")  # whose messages commands print


PEFT_METHODS = ("prompt-tuning", "p-tuning-v2", "p-tuning", "lora")


def _peft_config(method: str, bb: Backbone, prompt_length: int) -> Any:
    """Return `peft`'s configuration of a method; LoRA is on queries and values."""
    import peft

    if method == "lora":
        targets = list(bb.lora_target_modules)
        return peft.LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=targets)
    common: dict[str, Any] = dict(task_type="SEQ_CLS", num_virtual_tokens=prompt_length)
    if method == "p-tuning":
        return peft.PromptEncoderConfig(**common, encoder_hidden_size=128)
    if method == "p-tuning-v2":
        return peft.PrefixTuningConfig(**common)
    return peft.PromptTuningConfig(**common)


def build_hf_classifier(bb: Backbone) -> nn.Module:
    """Build Hugging Face's classifier for two classes around the layers of a backbone."""
    from transformers import AutoModelForSequenceClassification

    config = copy(bb.config)
    config.num_labels = 2
    if config.pad_token_id is None:
        config.pad_token_id = bb.pad_id
    if hasattr(config, "pooler_hidden_size"):
        config.pooler_hidden_size = bb.d
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(
            config, attn_implementation=bb.config._attn_implementation
        )
    weight = bb.word_embeddings.weight
    for name, module in model.named_children():
        if name != model.base_model_prefix:
            module.to_empty(device=weight.device).to(weight.dtype)  # in place
            for p in module.parameters():
                nn.init.normal_(p, std=0.02)
    setattr(model, model.base_model_prefix, bb.base)
    return model


def _make_training_step(
    model: nn.Module,
    loss: Callable[[], torch.Tensor],
    fine_tuned: Backbone | None = None,  # a backbone whose weights are trained as well
) -> Callable[[], None]:
    """Return a function that runs one training step."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if fine_tuned:
        parameters += fine_tuned.base.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=1e-8, fused=True)

    def step() -> None:
        """Run one training step, during which the weights of `fine_tuned` are trainable."""
        if fine_tuned:
            fine_tuned.base.requires_grad_(True)
        model.train()
        loss().backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if fine_tuned:
            fine_tuned.base.requires_grad_(False)

    return step


def _make_step_pair(
    bb: Backbone, method: str, base: RunConfig, batch: dict, task: Task, prompt_length: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return a training step of this package and one of `peft` for the same method and batch."""
    from peft import get_peft_model

    if method == "lora":
        # LoRA changes the layers, so both sides get the same copy of them
        bb = type(bb)(deepcopy(bb.model), bb.tokenizer, bb.name)
    peft_model = get_peft_model(build_hf_classifier(bb), _peft_config(method, bb, prompt_length))
    if method == "lora":
        model = PlannedModel(bb, ClassificationHead(bb.d, 2, bb.default_pooling), {})
    else:
        options = base.with_options(prompt_length=prompt_length, prompt_dropout=0.0)
        model = build_model(options.with_method(method), bb, task)
    device = batch["input_ids"].device
    model = model.to(device)
    peft_model = peft_model.to(device)
    peft_inputs = dict(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["label"]
    )
    return (
        _make_training_step(model, lambda: model.loss(dict(batch))),
        _make_training_step(peft_model, lambda: peft_model(**peft_inputs).loss),
    )


def _make_forward_passes(bb: Backbone, batch: dict) -> dict[str, Callable[[], None]]:
    """Return the forward pass of Hugging Face and that of the layer loop."""

    @torch.inference_mode()
    def hugging_face() -> None:
        """Run Hugging Face's forward pass."""
        bb.base.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])

    @torch.inference_mode()
    def layer_loop() -> None:
        """Run the layer loop."""
        bb.base.eval()
        run_layers(bb, batch)

    return {"forward, Hugging Face": hugging_face, "forward": layer_loop}


def _make_peft_steps(
    bb: Backbone, base: RunConfig, batch: dict, task: Task, prompt_length: int
) -> dict[str, Callable[[], None]]:
    """Return the steps of each method and of `peft`'s, without methods that do not run."""
    functions = {}
    for method in PEFT_METHODS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                steps = _make_step_pair(bb, method, base, batch, task, prompt_length)
                for step in steps:
                    step()
        except Exception as e:  # `peft` raises many kinds of exceptions for unsupported models
            logger.info(
                f"{method} is not compared with peft on {bb.family}: "
                f"{type(e).__name__}: {str(e)[:120]}"
            )
            continue
        functions[method], functions[f"peft {method}"] = steps
    return functions


def _time_plain(functions: dict[str, Callable[[], object]], repeats: int) -> list[dict]:
    """Return the records of `time_functions`, with the name as `method`, and `plain`."""
    records = []
    for record in time_functions(functions, repeats=repeats):
        records.append(dict(method=record.pop("name"), plain=True, **record))
    return records


def time_training_steps(
    bb: Backbone,
    base: RunConfig,  # from `make_benchmark_config`
    prompt_length: int = 20,  # number of prompt vectors on both sides
    repeats: int = 7,  # rounds that are counted
) -> list[dict]:  # of `_time_plain`, and `over_ours`: the time over that of our equivalent
    """Time forward passes and plain training steps in turns, fine-tuning first."""
    device = "cuda" if base.device != "cpu" and torch.cuda.is_available() else "cpu"
    task = make_timing_task(base.batch_size, base.max_len)
    bb.model.to(device)
    examples = task.encode(task.splits["train"], bb.tokenizer, base.max_len, causal=bb.causal)
    cpu_batch = collate(examples, bb.pad_id)
    batch = {name: tensor.to(device) for name, tensor in cpu_batch.items()}
    fine_tuned = PlannedModel(bb, ClassificationHead(bb.d, 2, bb.default_pooling), {}).to(device)
    functions: dict[str, Callable[[], object]] = {
        "fine-tuning": _make_training_step(fine_tuned, lambda: fine_tuned.loss(dict(batch)), bb),
        **_make_forward_passes(bb, batch),
        **_make_peft_steps(bb, base, batch, task, prompt_length),
    }
    with restore_backbone_on_exit(bb):
        records = _time_plain(functions, repeats)
    equivalents = {f"peft {method}": method for method in PEFT_METHODS}
    equivalents["forward, Hugging Face"] = "forward"
    ms = {r["method"]: r["ms"] for r in records}
    for record in records:
        equivalent = equivalents.get(record["method"])
        record["over_ours"] = record["ms"] / ms[equivalent] if equivalent else None
    return records


def time_inference(
    bb: Backbone,
    base: RunConfig,  # from `make_benchmark_config`
    n: int = 32,  # number of texts
    repeats: int = 3,  # rounds that are counted
) -> list[dict]:  # of `_time_plain`, and `texts_per_s`
    """Time `predict` with three methods and transformers' `pipeline` in turns, on the CPU."""
    from transformers import pipeline

    task = make_timing_task(n, base.max_len - 2)
    rows = [dict(sentence1=r["sentence1"]) for r in task.splits["train"]]
    classifier: Any = build_hf_classifier(bb).eval()
    pipe = pipeline("text-classification", classifier, tokenizer=bb.tokenizer, device="cpu")

    def run_pipeline() -> None:
        """Predict with transformers' pipeline."""
        pipe([r["sentence1"] for r in rows], batch_size=8, truncation=True, max_length=base.max_len)

    functions: dict[str, Callable[[], object]] = {"pipeline": run_pipeline}
    for method in ("head-only", "prompt-tuning", "lpt-npg"):
        cfg = base.with_method(method)
        model = build_model(cfg, bb, task).eval()
        functions[f"predict, {method}"] = partial(predict, model, task, cfg, rows, 8)
    records = _time_plain(functions, repeats)
    return [{**r, "texts_per_s": 1000 * n / r["ms"]} for r in records]
