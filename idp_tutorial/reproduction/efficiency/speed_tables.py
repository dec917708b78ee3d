"""All timings of one backbone for a table of speed, also of `peft` and Transformers.

A ratio is valid only for times measured together. So a table of one backbone is one run of one
process: all methods in turns with frozen weights in float32 and in bfloat16, the methods of
`peft`, predictions a second compared with the library's `pipeline`, and how cost scales. Each
part is written before the next begins. A part that exceeds the time limit is skipped with a
message: the same command continues with it. The lab makes the tables.

`peft` has prompt tuning, prefix tuning, P-tuning and LoRA. Its models cannot be trained with our
`fit`, so both sides run the same plain step on the same weights: forward, backward, gradient
clipping, AdamW. `peft` wraps Hugging Face's classifier, which is built on the meta device and
gets the layers of our backbone; only its head is new.

Texts go in and labels come out: this package's models through `predict`, the library's through
a `pipeline` around a classifier with the same weights.
"""

import logging
import time
import warnings
from collections.abc import Callable, Collection, Iterator
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
from idp_tutorial.core.prompted_model import PromptedModel
from idp_tutorial.data.encoding import collate
from idp_tutorial.data.task import Task
from idp_tutorial.reproduction.efficiency.timing import (
    benchmark_methods,
    list_benchmark_variants,
    make_timing_task,
    restore_backbone_on_exit,
    time_functions,
    time_scaling,
)
from idp_tutorial.training.evaluation import predict
from idp_tutorial.utils.checks import require_packages

__all__ = [
    "time_training_steps",
    "run_speed_benchmarks",
]

logger = logging.getLogger(__name__)


PEFT_CONFIGS: dict[str, tuple[str, dict]] = {  # our method → class of `peft`, and its options
    "prompt-tuning": ("PromptTuningConfig", {}),
    "p-tuning-v2": ("PrefixTuningConfig", {}),
    "p-tuning": ("PromptEncoderConfig", dict(encoder_hidden_size=128)),
}


def _peft_prompt_config(method: str, prompt_length: int) -> Any:
    """Return `peft`'s configuration of a prompt method."""
    import peft

    class_name, options = PEFT_CONFIGS[method]
    config_class = getattr(peft, class_name)
    return config_class(task_type="SEQ_CLS", num_virtual_tokens=prompt_length, **options)


def _peft_lora_config(bb: Backbone) -> Any:
    """Return `peft`'s configuration of LoRA on queries and values."""
    from peft import LoraConfig

    return LoraConfig(
        task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=list(bb.lora_target_modules)
    )


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
    require_packages("peft")
    from peft import get_peft_model

    if method == "lora":
        # LoRA changes the layers, so both sides get the same copy of them
        bb = type(bb)(deepcopy(bb.model), bb.tokenizer, bb.name)
        peft_model = get_peft_model(build_hf_classifier(bb), _peft_lora_config(bb))
        model = PromptedModel(bb, ClassificationHead(bb.d, 2, bb.default_pooling), {})
    else:
        peft_config = _peft_prompt_config(method, prompt_length)
        peft_model = get_peft_model(build_hf_classifier(bb), peft_config)
        options = base.with_options(prompt_length=prompt_length, prompt_dropout=0.0)
        cfg = options.with_method(method)
        model = build_model(cfg, bb, task)
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


def _with_autocast(
    function: Callable[[], object], device: str, precision: str
) -> Callable[[], None]:
    """Wrap a function in autocast, unless `precision` is 'no'."""
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16

    def wrapped() -> None:
        """Call the function under autocast."""
        with torch.autocast(device, dtype, enabled=precision != "no"):
            function()

    return wrapped


def _make_forward_pair(bb: Backbone, batch: dict) -> tuple[Callable[[], None], Callable[[], None]]:
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

    return hugging_face, layer_loop


def _make_peft_functions(
    bb: Backbone,
    base: RunConfig,
    batch: dict,
    task: Task,
    prompt_length: int,
    device: str,
) -> dict[str, Callable[[], None]]:
    """Return the steps of each method and of `peft`'s, without methods that do not run."""
    functions = {}
    for method in (*PEFT_CONFIGS, "lora"):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                steps = _make_step_pair(bb, method, base, batch, task, prompt_length)
                for step in steps:
                    _with_autocast(step, device, base.precision)()
        except Exception as e:  # `peft` raises many kinds of exceptions for unsupported models
            logger.info(
                f"{method} is not compared with peft on {bb.family}: "
                f"{type(e).__name__}: {str(e)[:120]}"
            )
            continue
        functions[method], functions[f"peft {method}"] = steps
    return functions


def time_training_steps(
    bb: Backbone,
    base: RunConfig,  # from `make_benchmark_config`
    include_peft: bool = False,  # time the methods of `peft` as well
    prompt_length: int = 20,  # number of prompt vectors on both sides
    repeats: int = 7,  # rounds that are counted
    warmup: int = 2,  # rounds before them
) -> list[dict]:  # of `time_functions`, and `over_ours`: the time over that of our equivalent
    """Time forward passes and plain training steps in turns, fine-tuning first."""
    device = "cuda" if base.device != "cpu" and torch.cuda.is_available() else "cpu"
    task = make_timing_task(base.batch_size, base.max_len)
    bb.model.to(device)
    examples = task.encode(task.splits["train"], bb.tokenizer, base.max_len, causal=bb.causal)
    cpu_batch = collate(examples, bb.pad_id)
    batch = {name: tensor.to(device) for name, tensor in cpu_batch.items()}
    fine_tuned = PromptedModel(bb, ClassificationHead(bb.d, 2, bb.default_pooling), {}).to(device)
    hugging_face, layer_loop = _make_forward_pair(bb, batch)
    functions = {
        "fine-tuning": _make_training_step(fine_tuned, lambda: fine_tuned.loss(dict(batch)), bb),
        "forward, Hugging Face": hugging_face,
        "forward": layer_loop,
    }
    equivalents = {"forward, Hugging Face": "forward"}
    if include_peft:
        peft_functions = _make_peft_functions(bb, base, batch, task, prompt_length, device)
        functions |= peft_functions
        for name in peft_functions:
            if name.startswith("peft "):
                equivalents[name] = name.removeprefix("peft ")
    with restore_backbone_on_exit(bb):
        rows = time_functions(
            {name: _with_autocast(f, device, base.precision) for name, f in functions.items()},
            warmup,
            repeats,
            device,
        )
    ms = {r["name"]: r["ms"] for r in rows}
    for row in rows:
        equivalent = equivalents.get(row["name"])
        row["over_ours"] = row["ms"] / ms[equivalent] if equivalent else None
    return rows


def time_inference(
    bb: Backbone,
    base: RunConfig,  # from `make_benchmark_config`
    n: int = 32,  # number of texts
    repeats: int = 3,  # rounds that are counted
) -> list[dict]:  # of `time_functions`, and `texts_per_s`
    """Time `predict` with three methods and transformers' `pipeline` in turns."""
    from transformers import pipeline

    task = make_timing_task(n, base.max_len - 2)
    rows = [dict(sentence1=r["sentence1"]) for r in task.splits["train"]]
    classifier: Any = build_hf_classifier(bb).eval()
    pipe = pipeline(
        "text-classification",
        model=classifier,
        tokenizer=bb.tokenizer,
        device="cpu",
    )

    def run_pipeline() -> None:
        """Predict with transformers' pipeline."""
        pipe([r["sentence1"] for r in rows], batch_size=8, truncation=True, max_length=base.max_len)

    functions: dict[str, Callable[[], object]] = {"pipeline": run_pipeline}
    for method in ("head-only", "prompt-tuning", "lpt-npg"):
        cfg = base.with_method(method)
        model = build_model(cfg, bb, task).eval()
        functions[f"predict, {method}"] = partial(predict, model, task, cfg, rows, 8)
    return [{**r, "texts_per_s": 1000 * n / r["ms"]} for r in time_functions(functions, 1, repeats)]


# the methods in the tables; fine-tuning, the baseline, is always timed
SPEED_TABLE_METHODS = ("prompt-tuning", "p-tuning-v2", "s-idpg-phm", "lpt-npg", "lora")


def _speed_table_parts(
    bb: Backbone,
    bb_bfloat16: Backbone,
    base: RunConfig,
    repeats: int,
    prompt_length: int,
) -> dict[str, Callable[[], list[dict]]]:
    """Return the parts of the tables: name → function that measures."""
    variants = list_benchmark_variants(SPEED_TABLE_METHODS, bb.n_layers)
    variants += [v._replace(dtype="bfloat16") for v in variants[1:]]
    parts: dict[str, Callable[[], list[dict]]] = {
        "methods": partial(
            benchmark_methods,
            bb,
            variants,
            base,
            repeats=repeats,
            bb_bfloat16=bb_bfloat16,
        )
    }
    for dtype, backbone in (("float32", bb), ("bfloat16", bb_bfloat16)):
        parts[f"beside peft, {dtype}"] = partial(
            time_training_steps, backbone, base, True, prompt_length, repeats, 1
        )
        parts[f"answers, {dtype}"] = partial(time_inference, backbone, base, repeats=repeats)
    L = bb.n_layers
    T = base.max_len
    axes: dict[str, tuple[int, ...]] = {
        "batch": (1, 2, 8),
        "length": (T // 2, 2 * T),
        "depth": (0, L // 4, L // 2, 3 * L // 4),
    }
    for axis, values in axes.items():
        parts[f"growth with {axis}"] = partial(
            time_scaling,
            axis,
            bb,
            base,
            ("prompt-tuning", "lpt-npg"),
            values,
            warmup=0,
            repeats=max(1, repeats - 1),
        )
    return parts


def run_speed_benchmarks(
    bb: Backbone,  # in float32
    bb_bfloat16: Backbone,  # the same backbone in bfloat16
    base: RunConfig,  # from `make_benchmark_config`
    repeats: int = 3,  # rounds that are counted
    max_minutes: float = 6.0,  # time after which no further part is started
    prompt_length: int = 20,  # number of prompt vectors in the comparison with `peft`
    completed_parts: Collection = frozenset(),  # (part, dtype of the weights) to skip
) -> Iterator[list[dict]]:  # records with `part` and `weights_dtype`, one part at a time
    """Run all timings for the speed tables of a backbone, part by part."""
    parts = _speed_table_parts(bb, bb_bfloat16, base, repeats, prompt_length)
    start_time = time.monotonic()
    for name, measure in parts.items():
        seconds = time.monotonic() - start_time
        part, _, dtype = name.partition(", ")
        dtype = dtype or "float32"
        if (part, dtype) in completed_parts:
            continue
        if seconds > 60 * max_minutes:
            logger.info(
                f"{name}: skipped after {seconds:.0f} s. Run the same command again to continue "
                "with it."
            )
            continue
        logger.info(f"{name}: {seconds:.0f} s so far")
        part_fields: dict = dict(part=part)
        if part == "beside peft":
            part_fields["prompt_length"] = prompt_length
        yield [{"weights_dtype": dtype, **record, **part_fields} for record in measure()]
