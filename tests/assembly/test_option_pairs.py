"""Every option that is given has an effect: all pairs of options of all methods are searched.

Two models with the same seed are compared: their loss in training mode, its gradients, their
logits and their learning rates. An option whose value changes them alone, and does not beside
another option, must be refused beside it. Daily a sample of the pairs is searched, weekly all.
"""

import warnings

import pytest
import torch
from small import backbone, batch_of, cached_backbone, config, small_task

from idp_tutorial.assembly.build import build_model
from idp_tutorial.assembly.config import RunOptions, refuse_unread_options
from idp_tutorial.cli.train import train_command
from idp_tutorial.core.backbone import Backbone
from idp_tutorial.huggingface.prompt_model import get_prompt_model
from idp_tutorial.methods.backbone_edits import revert_backbone
from idp_tutorial.methods.method_registry import METHODS
from idp_tutorial.runs.experiment import run_experiment
from idp_tutorial.training.distributed import create_optimizer
from idp_tutorial.utils.checks import UserError

TEXT = dict(init="text", init_text="a fine film")
OTHER_VALUES = dict(  # of each option; not the defaults of any method
    prompt_length=[3],
    position=[1],
    layer=[2],
    bottleneck=[4],
    prompt_dropout=[0.5],
    sentence_dropout=[0.3],
    generator_dropout=[0.2],
    standardise=[True],
    init_std=[0.7],
    exclude_last_token=[True],
    attention_input=["embeddings"],
    prompt_relu=[True],
    bias=[True],
    parameter_sharing=["L"],
    generator_input=["layer0"],
    insertion=["replace", "add", "insert", "kv"],
    generator=["residual", "layer-norm", "both"],
    shared_rule=[True],
    n_prompts=[3],
    top_k=[2],
    routing_noise=[0.1],
    update_rank=[3],
    update_scale=[2.0],
    update_lr_scale=[0.5],
    pooling=["cls"],
    two_layer_head=[True],
    head=["verbalizer"],
    loss_vocab=["labels"],
    template=["paper"],
    dropout_below_prompt=[True],
    head_lr=[0.5],
)
HEAD = ("pooling", "two_layer_head", "head", "loss_vocab", "template", "head_lr")
GENERAL = (*HEAD, "dropout_below_prompt")


def list_values(method):
    """Return the values of the options of a method, each a dictionary."""
    names = [n for n in OTHER_VALUES if n in GENERAL or n in METHODS[method].options]
    values = [{name: value} for name in names for value in OTHER_VALUES[name]]
    return values + [TEXT] * ("init" in METHODS[method].options)


def describe_model(bb, method, options):
    """Return all that the options can change in a model, or None if they are refused."""
    revert_backbone(bb)
    try:
        sizes = dict(prompt_length=4, bottleneck=8)
        sizes = {name: n for name, n in sizes.items() if name in METHODS[method].options}
        options = RunOptions(**{**sizes, "lr": 0.01, **options})
        refuse_unread_options([method], options)
        cfg = options.with_method(method)
        model = build_model(cfg, bb, small_task())
    except UserError:
        return None
    template = cfg.template if cfg.head == "verbalizer" else None
    batch = batch_of(bb, template=template)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.sources.parameters():
            p.add_(0.1 * torch.randn_like(p))
    parameters = [*model.trained_parameters().values()]
    model.train()
    torch.manual_seed(1)
    loss = model(dict(batch), return_loss=True)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True) if parameters else []
    groups = create_optimizer(model, cfg, 0.01).param_groups if parameters else []
    return (
        loss.item(),
        model.eval()(dict(batch)).tolist(),
        [(g["lr"], len(g["params"])) for g in groups],
        [g is not None and g.abs().sum().item() for g in gradients],
    )


def compare_pairs(bb, method, values):
    """Yield pairs of options, and whether the first has no effect beside the second."""
    described = {}

    def describe(options):
        key = str(sorted(options.items()))
        if key not in described:
            described[key] = describe_model(bb, method, options)
        return described[key]

    plain = describe({})
    for first in values:
        if describe(first) in (None, plain):  # refused alone, or the default of this method
            continue
        for second in values:
            if first.keys() & second.keys() or describe(second) is None:
                continue
            both = describe({**first, **second})
            yield first, second, both is not None and both == describe(second)


# a default that is written out changes nothing: M(x) is pooled as the head pools
EXPECTED = [({"sentence_pooling": "cls"}, {"pooling": "cls"})]


def search(family, method, values):
    pairs = [*compare_pairs(cached_backbone(family), method, values)]
    without_effect = [(first, second) for first, second, has_none in pairs if has_none]
    assert [pair for pair in without_effect if pair not in EXPECTED] == []
    return len(pairs)


DAILY = {
    "p-tuning-v2": ("prompt_dropout", "insertion", "init_std", "init", "dropout_below_prompt"),
    "lpt-npg": ("pooling", "head", "standardise", "prompt_dropout"),
}


@pytest.mark.parametrize("method", DAILY)
def test_an_option_that_another_leaves_without_effect_is_refused(method):
    values = [v for v in list_values(method) if {*v} & {*DAILY[method]}]
    assert search("bert", method, values) >= 12


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("method", METHODS)
def test_every_pair_of_options_of_a_method_has_an_effect(method, family):
    search(family, method, list_values(method))


BESIDE = [  # method, option without effect, and what takes its effect away, which is named too
    ("prompt-tuning", dict(init_std=0.5), TEXT, "init='text'"),
    ("p-tuning-v2", dict(init_std=0.5), TEXT, "init='text'"),
    ("p-tuning-v2", dict(prompt_dropout=0.5), dict(insertion="replace"), "insertion='replace'"),
    ("p-tuning-v2", dict(prompt_dropout=0.5), dict(insertion="add"), "insertion='add'"),
    ("p-tuning-v2", dict(dropout_below_prompt=True), dict(insertion="add"), "insertion='add'"),
    (
        "s-idpg-phm",
        dict(prompt_dropout=0.5),
        dict(sentence_dropout=0.1, generator_dropout=0.2),
        "sentence_dropout and generator_dropout",
    ),
    ("s-idpg-phm", dict(dropout_below_prompt=True), {}, "a prompt among the words"),
    ("m-idpg-phm", dict(dropout_below_prompt=True), {}, "a prompt among the words"),
    ("smop", dict(routing_noise=0.5), dict(n_prompts=1), "n_prompts=1"),
    ("dept", dict(update_rank=3), dict(update_scale=0.0), "update_scale=0"),
    ("dept", dict(update_lr_scale=0.5), dict(update_scale=0.0), "update_scale=0"),
    ("lpt-npg", dict(cache_dtype="float16"), {}, "cache='none'"),
    ("lpt-npg", dict(no_decay_on_bias_and_norm=True), dict(weight_decay=0.0), "weight_decay=0"),
    ("lpt", dict(init_std=0.5), dict(init_from="folder"), "init_from"),
    ("prompt-tuning", TEXT, dict(init_from="folder"), "init_from"),
]


@pytest.mark.parametrize("method,unused,beside,named", BESIDE, ids=str)
def test_the_message_names_both_options(method, unused, beside, named):
    refuse_unread_options([method], RunOptions(**beside))
    name = next(iter(unused))
    with pytest.raises(UserError, match=f"^{name}=.* has no effect with {named}.*: leave one"):
        refuse_unread_options([method], RunOptions(**unused, **beside))


def test_an_option_with_an_effect_on_one_method_of_a_comparison_is_used():
    options = RunOptions(init_std=0.5, **TEXT)
    refuse_unread_options(["prompt-tuning", "lpt"], options)
    with pytest.raises(UserError, match="init_std=0.5 has no effect"):
        refuse_unread_options(["prompt-tuning", "p-tuning-v2"], options)


def test_a_backbone_can_leave_an_option_without_effect(monkeypatch, small_folder):
    options = dict(prompt_length=2, prompt_dropout=0.5)
    bb = backbone("deberta")
    with pytest.raises(
        UserError, match="prompt_dropout=0.5 has no effect with insertion='replace'"
    ):
        get_prompt_model(bb.model, "p-tuning-v2", num_labels=2, **options)
    cfg = config("p-tuning-v2", backbone=str(small_folder), prompt_dropout=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_experiment(cfg, small_task())
    monkeypatch.setattr(Backbone, "supports_kv_prompt", False)
    with pytest.warns(UserWarning, match="prompt_dropout=0.5 has no effect with insertion="):
        run_experiment(cfg, small_task())


def test_steps_beside_epochs_are_refused(capsys):
    with pytest.raises(SystemExit):
        train_command(method="lpt", task="sentiment", epochs=2.0, steps=50, out="unused")
    assert "steps=50 has no effect with epochs=2.0" in capsys.readouterr().err
