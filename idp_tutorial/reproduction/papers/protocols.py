"""Training settings and initial models of IDPG, LPT and ID-SPAM.

A table can be run at two scales: `full` is what its paper says about training, and its released
code where the paper says nothing; `small` is 200 steps, which two cores can run. Both use the
paper's optimiser. A value that a paper searches (batch size 16 or 32, warm-up 0 or .06) is
fixed here; the learning rate, which a paper searches for each task, is searched over its grid
in `full`.

The initial model of a row. IDPG's few-shot scripts load a RoBERTa-large that was fine-tuned on
MNLI, for every method. We assume the same for the single-layer rows of its Table 1: with the
plain model, a prompt among the words does not reach the 87 to 89 points of those rows on RTE
(LPT's Table 1 has 61 and 63).
"""

import re
from pathlib import Path
from typing import Any

from idp_tutorial.assembly.controls import ALL_METHODS, CONTROL_METHODS
from idp_tutorial.backbones.sizes import DECODER_CONFIGS
from idp_tutorial.utils.config import RunConfig

__all__ = [
    "BACKBONE_NAMES",
    "SINGLE_PROMPT_METHODS",
    "TRAINED_HEAD_METHODS",
    "FULL_TUNING_METHODS",
    "PAPER_OPTIMISER_FIELDS",
    "LARGE_TASKS",
    "PAPER_LEARNING_RATES",
    "FULL_TUNING_LEARNING_RATES",
    "STATIC_PROMPT_LEARNING_RATES",
    "parse_paper_name",
    "paper_backbone",
    "is_decoder_name",
    "paper_optimiser_fields",
    "paper_training_budget",
    "select_paper_learning_rates",
    "small_scale_learning_rates",
    "build_paper_config",
]


BACKBONE_NAMES = {  # published name: name on the Hugging Face hub
    "RoBERTa-large": "roberta-large",
    "RoBERTa-base": "roberta-base",
    "GPT2": "gpt2",
    "GPT2-large": "gpt2-large",
    "DeBERTa-large": "microsoft/deberta-large",
}
SINGLE_PROMPT_METHODS = (  # methods with one prompt, among the words
    "prompt-tuning",
    "prompt-tuning-134",
    "s-idpg-phm",
    "s-idpg-dnn",
)


def parse_paper_name(
    table: str,  # name of a table or figure, such as 'idpg-3' or 'lpt-f2'
) -> str:  # 'idpg', 'lpt' or 'id-spam'
    """Return the name of the paper that a table or figure belongs to."""
    return re.sub(r"-f?\d+$", "", table)


def paper_backbone(
    table: str,  # such as 'idpg-3'
    method: str,  # key of `ALL_METHODS`
    published_backbone: str,  # key of `BACKBONE_NAMES`
) -> str:  # name on the Hugging Face hub
    """Return the pretrained model that the paper uses for a method in a table."""
    uses_mnli_model = parse_paper_name(table) == "idpg" and (
        method in SINGLE_PROMPT_METHODS or table == "idpg-3"
    )
    return "roberta-large-mnli" if uses_mnli_model else BACKBONE_NAMES[published_backbone]


def is_decoder_name(
    backbone: str,  # name or folder of a backbone
) -> bool:
    """Return whether the name of a backbone is that of a known decoder (causal attention)."""
    return Path(backbone).name in (*DECODER_CONFIGS, "smollm2", "tiny-gpt2")


TRAINED_HEAD_METHODS = (  # methods with a classification head in LPT's tables
    "fine-tuning",
    "lora",
    "bitfit",
    "adapter",
    "adapterdrop",
    "p-tuning-v2",
)
FULL_TUNING_METHODS = ("fine-tuning", "efl")  # methods that train all weights
_ADAM_FIELDS: dict[str, Any] = dict(beta2=0.98, eps=1e-6)
# paper: fields of `RunConfig` that differ from its defaults (linear decay, 6 % warm-up, clip 1)
PAPER_OPTIMISER_FIELDS: dict[str, dict[str, Any]] = {
    "idpg": dict(
        **_ADAM_FIELDS,
        weight_decay=0.1,
        clip=float("inf"),
        schedule="constant",
        warmup=0.0,
        two_layer_head=True,
    ),
    "lpt": dict(weight_decay=0.1, no_decay_on_bias_and_norm=True),
    "id-spam": _ADAM_FIELDS,
}


def paper_optimiser_fields(
    paper: str,  # 'idpg', 'lpt' or 'id-spam'
    method: str,  # key of `ALL_METHODS`
) -> dict:  # fields of `RunConfig`
    """Return the settings of AdamW, schedule, clipping and head that a paper uses for a method."""
    if method in CONTROL_METHODS:
        return {}
    fields = dict(PAPER_OPTIMISER_FIELDS[paper])
    if paper == "idpg" and method in FULL_TUNING_METHODS:
        fields |= dict(schedule="linear", warmup=0.06)
    if method == "efl":  # it is built with its own entailment head
        del fields["two_layer_head"]
    return fields


LARGE_TASKS = ("sst2", "qnli", "qqp", "mnli")  # the first three are tasks of IDPG


def _epoch_budget(n: int, batch_size: int) -> dict:
    """Return fields for `n` epochs; `resolve_epochs` keeps the ratio of steps to `eval_every`."""
    return dict(epochs=float(n), steps=n, eval_every=1, batch_size=batch_size)


def paper_training_budget(
    paper: str,  # 'idpg', 'lpt' or 'id-spam'
    method: str,  # key of `ALL_METHODS`
    task: str,  # key of `TASKS`
    shots: int | None = None,  # few-shot: number of training examples
) -> dict:  # fields of `RunConfig`
    """Return the batch size, number of epochs or steps, and evaluation interval of a paper."""
    if paper == "id-spam":
        return _epoch_budget(30, 32)
    if paper == "lpt":
        return dict(steps=1000, eval_every=100, batch_size=16) if shots else _epoch_budget(10, 16)
    if shots and method not in FULL_TUNING_METHODS:  # fifty epochs, rounded up to whole steps
        return dict(steps=-(-50 * shots // 16), eval_every=-(-shots // 16), batch_size=16)
    is_large = task in LARGE_TASKS and not shots
    n_epochs = 10 if is_large or method in FULL_TUNING_METHODS else 50
    return _epoch_budget(n_epochs, 32 if is_large else 16)


PAPER_LEARNING_RATES = {  # paper or table: learning rates
    "idpg": (5e-3, 1e-3, 5e-4, 1e-4),
    "idpg-3": (5e-4, 1e-4, 5e-5, 1e-5),
    "idpg-6": (1e-2, 7e-3, 5e-3, 3e-3, 1e-3, 7e-4, 5e-4, 3e-4, 1e-4),  # "more carefully" (App. A.3)
    "lpt": (5e-4, 1e-3, 5e-3, 1e-2),
    "id-spam": (1e-3, 5e-4, 1e-4, 5e-5, 1e-5),
}
FULL_TUNING_LEARNING_RATES = (1e-5, 2e-5, 3e-5)  # RoBERTa (Liu et al. 2019), Table 10


def select_paper_learning_rates(
    table: str,  # such as 'idpg-3'
    method: str,  # key of `ALL_METHODS`
) -> tuple:  # (): the method's own learning rates
    """Return the learning rates that the paper of a table tried for a method."""
    paper = parse_paper_name(table)
    if method in CONTROL_METHODS:
        return ()
    if paper != "id-spam" and method in FULL_TUNING_METHODS:
        return FULL_TUNING_LEARNING_RATES
    return PAPER_LEARNING_RATES.get(table, PAPER_LEARNING_RATES[paper])


STATIC_PROMPT_LEARNING_RATES = (0.1, 0.3, 1.0, 3.0, 9.0)  # for static prompts with a verbalizer


def small_scale_learning_rates(cfg: RunConfig) -> tuple:  # (): the learning rates of a control
    """Return the learning rates that a run of scale 'small' tries."""
    if cfg.method in CONTROL_METHODS:
        return ()
    if cfg.head == "verbalizer" and cfg.method in ("prompt-tuning", "lpt"):
        return STATIC_PROMPT_LEARNING_RATES
    return ALL_METHODS[cfg.method].learning_rates


def _max_text_length(paper: str, method: str, backbone: str, fields: dict) -> int:
    """Return the number of tokens at which a paper truncates a text."""
    if paper == "id-spam":
        return 256
    takes_positions = ALL_METHODS[method].insertion_point in ("input", "layers", "keys")
    defaults = getattr(ALL_METHODS[method], "defaults", {})
    prompt_length = defaults.get("prompt_length") or fields.get("prompt_length", 0)
    n_separators = 2 if fields.get("position") == 4 else 0  # position 4 is between two separators
    n_prompt_tokens = prompt_length * takes_positions + n_separators
    limit = 256 if paper == "lpt" and "roberta" not in backbone else 512
    return min(limit, 512 - n_prompt_tokens)


def _paper_head(paper: str, method: str) -> str:
    """Return the kind of head that a paper uses for a method."""
    has_verbalizer = method not in TRAINED_HEAD_METHODS and method not in CONTROL_METHODS
    return "verbalizer" if paper == "lpt" and has_verbalizer else "classification"


def build_paper_config(
    table: str,  # such as 'lpt-2'
    method: str,  # key of `ALL_METHODS`
    task: str,  # key of `TASKS`
    scale: str = "full",  # 'full' or 'small'
    shots: int | None = None,  # few-shot: number of training examples
    backbone: str = "roberta-large",  # name or folder
    **fields: Any,  # further fields of `RunConfig`, from the row of the table
) -> RunConfig:  # `data`, `seed` and `split_seed` keep their defaults
    """Return the config of a run as the paper of a table trained it."""
    paper = parse_paper_name(table)
    is_control = method in CONTROL_METHODS
    options = dict(
        task=task,
        backbone=backbone,
        shots=shots,
        stratified=not (paper == "idpg" and shots is not None),
        **fields,
    )
    options["head"] = _paper_head(paper, method)
    options |= paper_optimiser_fields(paper, method)
    if scale != "full":
        short = dict(steps=200, eval_every=20, batch_size=16)
        if fields.get("epochs"):
            short = _epoch_budget(int(fields["epochs"]), 16)
        return RunConfig(method, **options | short, max_len=128)
    options |= paper_training_budget(paper, method, task, shots)
    if ALL_METHODS[method].kind == "second pass":
        options["sentence_pooling"] = "noisy"
    if method == "m-idpg-phm-glove":
        options["glove_noise"] = 0.6
    return RunConfig(
        method,
        **options,
        pooling="cls",
        dropout_below_prompt=paper == "lpt" and not is_control,
        max_len=_max_text_length(paper, method, backbone, fields),
    )
