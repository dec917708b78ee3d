"""Times of plain training steps beside `peft`. No test depends on a measured time."""

import numpy as np
import pytest
import torch
from small import backbone
from timings import as_it_was, state, tiny_base

from results.speed import other_libraries
from results.speed.other_libraries import (
    PEFT_METHODS,
    time_training_steps,
)


@pytest.mark.parametrize(
    "family,peft",
    [
        ("roberta", PEFT_METHODS),
        ("gpt2", PEFT_METHODS),
        ("bert", ()),  # Hugging Face's classifier needs a pooler, which this BERT has not
        ("deberta", ("prompt-tuning", "p-tuning", "lora")),
    ],
)
def test_beside_peft(family, peft, messages):
    bb = backbone(family, max_position_embeddings=258) if family != "bert" else backbone(family)
    before = state(bb)
    rows = time_training_steps(bb, tiny_base(bb), prompt_length=4, repeats=1)
    names = [r["method"] for r in rows]
    assert names == ["fine-tuning", "forward, Hugging Face", "forward"] + [
        n for m in peft for n in (m, f"peft {m}")
    ], (names, messages)
    assert len(messages) == len(PEFT_METHODS) - len(peft) and all(
        f"is not compared with peft on {family}" in s for s in messages
    )
    ms = {r["method"]: r["ms"] for r in rows}
    assert all(
        (r["over_ours"] is not None) == (r["method"].startswith("peft") or "Hugging" in r["method"])
        for r in rows
    )
    assert np.isclose(rows[1]["over_ours"], ms["forward, Hugging Face"] / ms["forward"]) and (
        not peft or np.isclose(rows[-1]["over_ours"], ms["peft lora"] / ms["lora"])
    )
    assert as_it_was(bb, before)


def test_both_sides_have_the_same_weights(monkeypatch):
    bb = backbone(max_position_embeddings=258)
    training_models = []
    inner = other_libraries._make_training_step
    monkeypatch.setattr(
        other_libraries,
        "_make_training_step",
        lambda model, *a: training_models.append(model) or inner(model, *a),
    )
    time_training_steps(bb, tiny_base(bb), prompt_length=4, repeats=1)
    whole, *pairs = training_models
    backbone_pointers = {p.data_ptr() for p in bb.base.parameters()}
    for ours, peft_model in zip(pairs[::2], pairs[1::2]):
        frozen, trained = [
            {
                p.data_ptr()
                for n, p in peft_model.named_parameters()
                if p.requires_grad == flag and "classifier" not in n
            }
            for flag in (False, True)
        ]
        if any("lora" in n for n, _ in peft_model.named_parameters()):
            mine = {
                p.data_ptr()
                for n, p in ours.named_parameters()
                if p.requires_grad and not n.startswith("head")
            }
            assert trained == mine and len(mine) == 3 * 2 * 2 and not mine & backbone_pointers
        else:
            assert (
                backbone_pointers <= frozen
                and trained
                and backbone_pointers <= {p.data_ptr() for p in ours.parameters()}
            )
    assert backbone_pointers <= {p.data_ptr() for p in whole.parameters()}


def test_the_plain_step_trains_what_it_should():
    bb = backbone()
    before = state(bb)
    rows = []

    class Watch(torch.optim.AdamW):
        def step(self):
            rows.append(sum(p.grad is not None for g in self.param_groups for p in g["params"]))
            super().step()

    with pytest.MonkeyPatch.context() as m:
        m.setattr(torch.optim, "AdamW", Watch)
        m.setattr(other_libraries, "PEFT_METHODS", ())
        time_training_steps(bb, tiny_base(bb), repeats=1)
    # every tensor of the encoder, and the head's two
    assert rows == [len(list(bb.base.parameters())) + 2] * 2 and as_it_was(bb, before)
