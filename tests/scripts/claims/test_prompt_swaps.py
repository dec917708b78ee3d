"""Swapped prompts: their donors and the predictions."""

from dataclasses import replace

import pytest
import torch
from small import cached_backbone, config, model_of, same, small_task

from idp_tutorial.core.planned_model import PlannedModel
from idp_tutorial.training.evaluation import predict_logits
from idp_tutorial.training.examples import encode_for_evaluation
from results.claims.prompt_swaps import (
    collect_prompts,
    evaluate_prompt_swaps,
    predict_with_prompts,
)


@pytest.mark.parametrize("method", ["s-idpg-phm", "m-idpg-phm", "lpt-npg", "id-spam"])
def test_own_prompts_reproduce_the_predictions(method):
    """Prompts keep the order of examples for any batch size; rolled ones equal a plan with them."""
    bb = cached_backbone("roberta")
    task = small_task()
    cfg = config(method=method)
    model = model_of(method, bb, task)
    examples = encode_for_evaluation(model, task, cfg, task.splits["test"])
    prompts, logits = collect_prompts(model, examples, 7)
    assert set(prompts) == set(model.plan) and {p.shape[:2] for p in prompts.values()} == {(24, 4)}
    same(logits, predict_logits(model, examples), 1e-4, 1e-4)
    same(predict_with_prompts(model, prompts, examples, 9), logits, 1e-4, 1e-4)
    rolled = {layer: p.roll(1, 0) for layer, p in prompts.items()}
    moved = predict_with_prompts(model, rolled, examples)
    assert (moved - logits).abs().max() > 1e-3
    if len(prompts) == 1:
        ((layer, p),) = rolled.items()
        step = replace(model.plan[layer], source=lambda ctx: p[3:4])
        same(
            predict_logits(PlannedModel(bb, model.head, {layer: step}), examples[3:4]),
            moved[3:4],
            1e-4,
            1e-4,
        )


def test_donors_and_scores():
    """No example is its own donor, and every score is that of its logits."""
    bb = cached_backbone("roberta")
    task = small_task()
    cfg = config()
    scores, logits = evaluate_prompt_swaps(model_of("lpt-npg", bb, task), task, cfg)
    y = torch.tensor([r["label"] for r in task.splits["test"]])
    same_donors = logits["same_donor"]
    other_donors = logits["other_donor"]
    assert (
        bool((y[same_donors] == y).all())
        and bool((same_donors != torch.arange(24)).all())
        and bool((y[other_donors] != y).all())
    )
    for name in ("own", "mean", "same", "other"):
        assert scores[name] == pytest.approx(
            100 * (logits[name].argmax(1) == y).double().mean().item()
        )
    assert scores["follows"] == pytest.approx(
        100 * (logits["other"].argmax(1) == y[other_donors]).double().mean().item()
    )
    task.splits["test"] = [r for r in task.splits["test"] if r["label"]]
    with pytest.raises(ValueError, match="only if there are two labels"):
        evaluate_prompt_swaps(model_of("lpt-npg", bb, task), task, cfg)
    with pytest.raises(ValueError, match="swapping prompts needs one class for each row, but task"):
        evaluate_prompt_swaps(model_of("lpt-npg", bb, task), small_task("in-short"), cfg)
