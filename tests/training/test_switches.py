"""Options of the papers' protocols: each has its effect, and its default has none."""

from dataclasses import replace

import pytest
from small import backbone, config, model_of, small_task

from idp_tutorial.core.planned_model import count_parameters
from idp_tutorial.data.few_shot import split_few_shot
from idp_tutorial.training.distributed import create_optimizer
from idp_tutorial.training.fit import fit


@pytest.mark.parametrize("method", ["lpt-npg", "m-idpg-phm"])
def test_the_optimizer_has_the_options_of_the_config(method):
    model = model_of(method, backbone())
    cfg = config(weight_decay=0.1, beta2=0.98, eps=1e-6)
    default, split = [
        create_optimizer(model, replace(cfg, no_decay_on_bias_and_norm=n), 0.01)
        for n in (False, True)
    ]
    assert default.defaults["betas"] == (0.9, 0.98) and default.defaults["eps"] == 1e-6
    decay = {id(p): g["weight_decay"] for g in split.param_groups for p in g["params"]}
    assert decay.keys() == {id(p) for p in model.trained_parameters().values()}
    for n, p in model.trained_parameters().items():
        assert decay[id(p)] == (0.0 if n.endswith(("bias", "b2")) else 0.1), n
    assert all(g["weight_decay"] == 0.1 for g in default.param_groups)


@pytest.mark.parametrize(
    "options",
    [
        dict(parameter_sharing="L"),
        dict(parameter_sharing="S"),
        dict(generator_input="layer0"),
        dict(insertion="replace"),
    ],
)
def test_variants_of_m_idpg_differ(options):
    """Another variant has other parameter counts or other losses."""
    assert train_briefly("m-idpg-phm", **options) != train_briefly("m-idpg-phm")


def test_id_spam_has_an_optional_second_relu():
    model = model_of("id-spam", backbone(), prompt_relu=True)
    assert next(iter(model.plan.values())).source.prompt_relu


def test_an_unknown_option_value_is_refused():
    with pytest.raises(ValueError, match="schedule"):
        config(schedule="cosine")
    with pytest.raises(ValueError, match="head_init"):
        config(head_init="warm")


def train_briefly(method, **options):
    """Return parameter counts and the losses of three steps."""
    family = "gpt2" if method == "lpt-appg" else "roberta"  # its option is for decoders
    model = model_of(method, backbone(family), **options)
    log = fit(model, small_task(), config(method=method, steps=3, eval_every=3, lr=0.01, **options))
    return count_parameters(model), log.losses


@pytest.mark.parametrize(
    "method,options",
    [
        ("s-idpg-phm", dict(sentence_pooling="cls")),
        ("s-idpg-phm", dict(sentence_pooling="noisy")),
        ("m-idpg-phm", dict(sentence_pooling="cls")),
        ("s-idpg-dnn", dict(sentence_dropout=0.6)),
        ("m-idpg-phm", dict(generator_dropout=0.6)),
        ("lpt", dict(init_std=0.3)),
        ("s-idpg-phm", dict(generator="residual")),
        ("s-idpg-phm", dict(generator="both")),
        ("prompt-tuning", dict(init_std=0.3)),
        ("p-tuning-v2", dict(insertion="add")),
        ("p-tuning-v2", dict(insertion="replace")),
        ("id-spam", dict(attention_input="embeddings")),
        ("lpt-appg", dict(exclude_last_token=True)),
    ],
)
def test_an_option_changes_the_method(method, options):
    assert train_briefly(method, **options) != train_briefly(method)


def test_added_p_tuning_v2_prompts_have_half_the_parameters_of_key_value_prompts():
    added, key_value = [
        count_parameters(model_of("p-tuning-v2", backbone(), insertion=insertion))["prompt"]
        for insertion in ("add", "kv")
    ]
    assert 2 * added == key_value


def test_sentence_and_generator_have_separate_dropouts():
    plan = model_of("s-idpg-phm", backbone(), sentence_dropout=0.3, generator_dropout=0.4).plan
    source = next(iter(plan.values())).source
    assert (source.read.dropout.p, source.generator.dropout.p) == (0.3, 0.4)


def test_epochs_are_converted_to_steps():
    """Two epochs of 64 examples in batches of 16 are 8 steps; converting again changes nothing."""
    cfg = config(method="lpt", epochs=2.0, steps=4, eval_every=2)
    log = fit(model_of("lpt", backbone()), small_task(), cfg)
    assert (log.steps, [s for s, _ in log.history]) == (8, [4, 8])
    resolved = cfg.resolve_epochs(64)
    assert (
        (resolved.steps, resolved.eval_every) == (8, 4)
        and resolved.resolve_epochs(64) == resolved
        and cfg.resolve_epochs(64, 2).steps == 4
    )
    assert config().resolve_epochs(64) == config()


def test_an_unstratified_sample_does_not_balance_the_labels():
    rows = [dict(s1=str(i), label=int(i < 10)) for i in range(100)]
    positive_counts = {
        s: {sum(r["label"] for r in split_few_shot(rows, 20, seed, s)[0]) for seed in range(8)}
        for s in (True, False)
    }
    assert positive_counts[True] == {2} and len(positive_counts[False]) > 1
