"""`RunConfig`: a frozen dataclass with every setting that can change a result.

Most differences between published prompt methods are smaller than the effect of another
schedule or another prompt length. A run therefore has one input, a frozen dataclass that is
stored in the record next to the score. Two equal configurations give equal results on one
machine.

The comments of the fields are also the help texts of the commands. `None` stands for a value
that is chosen later: `layer` is then half of the layers, `lr` the method's own learning rate,
`bottleneck` the value of the method's paper, `data` the bundled tasks or the hub, and `glove`
the word vectors of the bundled backbone. The papers pool with the classification token `<s>`
(`pooling='cls'`), which small backbones have not trained; the default is therefore the mean
over the words.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

from idp_tutorial.utils.checks import (
    UserError,
    check_at_least,
    check_between,
    check_bool,
    check_choice,
    check_int,
    check_positive,
)

__all__ = ["RunConfig"]


_RANGES: dict[str, tuple[float, float]] = {  # upper limits: larger values do not fit in memory
    **{name: (1, 10**9) for name in ("steps", "eval_every")},
    **{name: (1, 10**6) for name in ("batch_size", "accumulate", "max_len", "bottleneck")},
    "epochs": (1e-6, 10**6),
    "sentence_dropout": (0, 1),
    "generator_dropout": (0, 1),
    "prompt_length": (0, 10**5),
    "layer": (-(10**4), 10**4),
    "position": (-(10**4), 10**4),
    "seed": (0, 2**32 - 1),
    "split_seed": (0, 2**32 - 1),
    "prompt_dropout": (0, 1),
    "glove_noise": (0, 10**6),
    "weight_decay": (0, 10**6),
    "lr": (0, 10**40),
    "head_lr": (0, 10**40),
}

_INTEGER_FIELDS = (
    "steps",
    "eval_every",
    "batch_size",
    "accumulate",
    "max_len",
    "bottleneck",
    "prompt_length",
    "layer",
    "position",
    "seed",
    "split_seed",
    "shots",
    "patience",
)

_CHOICES: dict[str, tuple] = {
    "head": ("classification", "verbalizer"),
    "pooling": ("mean", "cls", "last", "mask"),
    "sentence_pooling": (None, "mean", "cls", "noisy"),
    "loss_vocab": ("full", "labels"),
    "parameter_sharing": ("S", "M", "L"),
    "generator_input": ("previous", "layer0"),
    "insertion": (None, "add", "replace", "insert", "kv"),
    "generator": ("plain", "residual", "layer-norm", "both"),
    "attention_input": ("words", "embeddings"),
    "head_init": ("random", "probe"),
    "schedule": ("linear", "constant"),
    "precision": ("no", "bf16", "fp16"),
    "dtype": ("float32", "bfloat16", "auto"),
    "device": ("auto", "cpu"),
    "cache": ("none", "sentence", "hidden", "both"),
    "cache_dtype": ("float32", "float16"),
}
_HINTS = {"device": "to choose a GPU, set CUDA_VISIBLE_DEVICES"}
_FRACTION_FIELDS = {
    "warmup": "a fraction of the steps",
    "beta2": "AdamW's decay rate of squared gradients, such as .999",
}


def _check_scalars(cfg: "RunConfig") -> None:
    """Check the fields that are integers, Booleans or choices."""
    for name in _INTEGER_FIELDS:
        check_int(getattr(cfg, name), name, allow_none=getattr(RunConfig, name) is None)
    for field in fields(RunConfig):
        if isinstance(field.default, bool):
            check_bool(getattr(cfg, field.name), field.name)
    for name, choices in _CHOICES.items():
        check_choice(getattr(cfg, name), choices, name, _HINTS.get(name, ""))


def _check_numbers(cfg: "RunConfig") -> None:
    """Check that every number is in its range."""
    if not check_at_least(cfg.clip, 0, "clip") > 0:
        raise UserError(
            f"clip, the largest gradient norm, must be positive, such as 1, got {cfg.clip} "
            "(float('inf') switches clipping off)."
        )
    for name, meaning in _FRACTION_FIELDS.items():
        if not check_at_least(getattr(cfg, name), 0, name) < 1:
            raise UserError(
                f"{name}, {meaning}, must be at least 0 and below 1, got {getattr(cfg, name)}."
            )
    check_positive(check_at_least(cfg.eps, 0, "eps"), "eps", "AdamW's epsilon, such as 1e-8")
    for name in ("lr", "head_lr"):
        check_positive(
            getattr(cfg, name), name, "a learning rate, such as 1e-3; None uses the default"
        )
    for name, (low, high) in _RANGES.items():
        if (
            getattr(RunConfig, name) is not None
        ):  # an option whose default is None also accepts None (`check_between` does)
            check_at_least(getattr(cfg, name), low, name)
        check_between(getattr(cfg, name), low, high, name)
    check_between(cfg.patience, 1, 10**9, "patience", "None never stops early")
    check_positive(
        cfg.init_std,
        "init_std",
        "a standard deviation, such as .02; None uses the method's own",
    )


def _check_class_weight(class_weight: Any) -> None:
    if isinstance(class_weight, dict):
        for name, weight in class_weight.items():
            check_positive(weight, f"class_weight[{name!r}]")
    else:
        hint = "or a weight for each class, such as {'rare': 5}"
        check_choice(class_weight, (None, "balanced"), "class_weight", hint)


@dataclass(frozen=True)
class RunConfig:
    """Settings of a run: everything that can change its result."""

    method: str = "prompt-tuning"  # key of `METHODS`
    task: str = "sentiment"  # key of `TASKS`
    backbone: str = "tiny"  # 'tiny', 'minilm', a folder, or a name on the Hugging Face hub
    data: str | None = None  # folder of tasks: DATA/TASK/{train,validation,test}.jsonl
    shots: int | None = None  # few-shot: number of training examples (default: all)
    split_seed: int = 0  # seed of the few-shot sample and of the held-out split
    # few-shot samples keep the proportions of the labels (LPT); False: sample at random (IDPG)
    stratified: bool = True
    head: str = "classification"  # 'classification' or 'verbalizer'
    # pooled representation that the classification head gets: 'mean', 'cls' or 'last'; IDPG's M(x)
    # is the mean with 'mean', else the papers' <s>, unless sentence_pooling is given
    pooling: str = "mean"
    # IDPG's M(x): 'mean' over the words, 'cls' (the papers' <s>), or 'noisy': <s> with dropout,
    # sampled again in every step, as in the released code; None: as pooling
    sentence_pooling: str | None = None
    template: str = "code"  # template of the verbalizer: 'code', 'paper', or your own
    # vocabulary of the verbalizer's loss: 'full', or 'labels' (the label words alone)
    loss_vocab: str = "full"
    prompt_length: int = 10  # number of prompt vectors (t)
    # layers below a late prompt, or without AdapterDrop's adapters (default: half of them)
    layer: int | None = None
    position: int = 0  # position of the prompt among the words: IDPG's insertion positions 0-4
    bottleneck: int | None = None  # width of the generator's bottleneck (default: the method's own)
    prompt_dropout: float = 0.1  # dropout on generated prompts
    sentence_dropout: float | None = None  # IDPG: dropout on M(x); None: as prompt_dropout
    # IDPG: dropout in the generator; None: as prompt_dropout
    generator_dropout: float | None = None
    # standard deviation of the initial values of a static prompt; None: the method's own
    init_std: float | None = None
    # IDPG, NPG: standardise the generator's input to standard deviation 1 (not in the papers)
    standardise: bool = False
    glove: str | None = None  # file or folder of GloVe vectors, for m-idpg-phm-glove
    # standard deviation of GloVe's vector of a text without a known word (IDPG's code: .6)
    glove_noise: float = 0.0
    dropout_below_prompt: bool = False  # dropout below the first prompt, as in the papers
    lr: float | None = None  # peak learning rate of AdamW; None: the method's default
    head_lr: float | None = None  # learning rate of the classification head (default: lr)
    steps: int = 300  # number of optimizer steps
    # passes over the training examples, instead of steps; the number of evaluations stays the same
    epochs: float | None = None
    batch_size: int = 32  # examples in a batch of one process
    # batches in a step: a step has batch_size * accumulate * processes examples
    accumulate: int = 1
    warmup: float = 0.06  # fraction of the steps in which the learning rate rises
    weight_decay: float = 0.01  # weight decay of AdamW
    no_decay_on_bias_and_norm: bool = False  # no weight decay on biases and LayerNorm (LPT)
    beta2: float = 0.999  # beta2 of AdamW (IDPG, ID-SPAM: .98)
    eps: float = 1e-8  # epsilon of AdamW (IDPG, ID-SPAM: 1e-6)
    schedule: str = "linear"  # after the warm-up: 'linear' decay to 0, or 'constant' (IDPG)
    two_layer_head: bool = False  # IDPG's classification head of two layers
    # initial classification head: 'random', or 'probe', a linear probe of the last layer
    head_init: str = "random"
    # M-IDPG, parameters shared by the layers: 'S' all, 'M' all but the bias b2, 'L' none
    parameter_sharing: str = "M"
    # M-IDPG, input of later generators: the 'previous' layer, or that of the first one ('layer0')
    generator_input: str = "previous"
    # how a prompt enters the layers above the first. M-IDPG: 'add' (released code), 'replace',
    # 'insert' or 'kv'; None: 'add'. P-tuning v2: 'kv' (keys and values), 'replace' or 'add';
    # None: 'kv' if the backbone supports it, else 'replace'
    insertion: str | None = None
    generator: str = "plain"  # S-IDPG (Table 7): 'plain', 'residual', 'layer-norm' or 'both'
    # ID-SPAM's E: word vectors ('words'), or 'embeddings', which add positions and LayerNorm
    attention_input: str = "words"
    # LPT on a decoder: pool without the last token, as in the released code
    exclude_last_token: bool = False
    prompt_relu: bool = False  # ID-SPAM: ReLU on the prompt too (Eq. 2)
    clip: float = 1.0  # largest gradient norm; larger gradients are scaled down
    # class weights in the loss: 'balanced', so that rare classes count as much as common ones, or
    # a weight for each class: {"rare": 5} (default: 1)
    class_weight: str | dict | None = None
    # stop after this number of evaluations without improvement on the validation split
    patience: int | None = None
    eval_every: int = 50  # steps between evaluations on the validation split
    max_len: int = 128  # tokens of an example; longer ones are truncated
    precision: str = "no"  # 'no', 'bf16' or 'fp16': autocast in training
    # dtype of frozen weights: 'float32', 'bfloat16', or 'auto', the faster one in a short
    # measurement; trained weights and the loss are float32
    dtype: str = "float32"
    # compile the trained layers with torch.compile, which takes a minute: for long runs on a GPU
    compile: bool = False
    device: str = "auto"  # 'auto' or 'cpu'
    cache: str = "none"  # states of frozen layers to cache: 'sentence', 'hidden' or 'both'
    # dtype of cached hidden states; 'float16' halves their size, and rounds
    cache_dtype: str = "float32"
    cache_dir: str | None = None  # folder of caches; None: $IDP_CACHE, or ~/.cache/idp_tutorial
    # folder of an earlier run whose trained prompts initialise this one (default: no such run)
    init_from: str | None = None
    seed: int = 0  # seed of initialisation, order of examples and dropout

    def __post_init__(self) -> None:
        for field in fields(RunConfig):
            value = getattr(self, field.name)
            # a NumPy scalar, for example from a row of pandas, cannot be written as JSON
            if type(value).__module__ == "numpy" and value.ndim == 0:
                object.__setattr__(self, field.name, value.item())
        _check_scalars(self)
        _check_numbers(self)
        _check_class_weight(self.class_weight)
        if self.cache in ("hidden", "both") and self.dropout_below_prompt:
            raise UserError(
                f"cache={self.cache!r} cannot be used with dropout_below_prompt=True: dropout "
                "below the prompt changes the hidden states in each epoch, so nothing can be kept. "
                "Use dropout_below_prompt=False, or cache='none' or 'sentence'."
            )

    def resolve_epochs(
        self,
        n_examples: int,  # number of examples in the training split
        n_processes: int = 1,  # number of processes that train together
    ) -> "RunConfig":
        """Return the config with `epochs` converted to `steps`, unchanged without `epochs`."""
        if self.epochs is None:
            return self
        examples_per_step = self.batch_size * self.accumulate * n_processes
        steps = max(1, round(self.epochs * n_examples / examples_per_step))
        eval_every = max(1, round(self.eval_every * steps / self.steps))
        return replace(self, steps=steps, eval_every=eval_every)
