"""Tests of IDPG's insertion positions.

Also for a tokenizer that ends sentences with `</s>` and has no separator (T5's).
"""

import copy

import pytest
import torch

from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.loop import run_layers
from idp_tutorial.data.encoding import collate, tokenize_rows
from idp_tutorial.methods.prompt_tuning import prompt_plan
from idp_tutorial.methods.soft_prompt import SoftPrompt
from idp_tutorial.utils.checks import UserError


def test_a_sentence_ends_where_the_tokenizer_says():
    bb = load_backbone("tiny")
    rows = [dict(sentence1="the soup was warm", sentence2=b) for b in ("so it was", "no")]
    batch = collate(tokenize_rows(rows, bb.tokenizer, 32), bb.tokenizer.pad_token_id)
    prompt = SoftPrompt(3, bb.d, 0.2)
    states = {}
    with torch.no_grad():
        for name in ("sep", "eos"):
            states[name] = [
                run_layers(bb, batch, prompt_plan(bb, prompt, position)).state_at("cls")
                for position in range(5)
            ]
            bb.tokenizer = copy.deepcopy(bb.tokenizer)
            bb.tokenizer.sep_token = None
    assert bb.tokenizer.sep_token_id is None
    for a, b in zip(states["sep"], states["eos"]):
        assert torch.equal(a, b)
    assert all(not torch.equal(states["eos"][0], h) for h in states["eos"][1:])


@pytest.mark.parametrize("position", [1, 2, 3, 4])
def test_a_position_behind_a_separator_needs_one(position):
    bb = load_backbone("tiny")
    rows = [dict(sentence1="the soup was warm", sentence2="so it was")]
    batch = collate(tokenize_rows(rows, bb.tokenizer, 32), bb.tokenizer.pad_token_id)
    words = batch["input_ids"][0, 1:4]
    batch["input_ids"] = torch.where(
        batch["input_ids"] == bb.tokenizer.sep_token_id, words[0], batch["input_ids"]
    )
    prompt = SoftPrompt(3, bb.d, 0.2)
    with pytest.raises(UserError, match=rf"position {position} .*separator"):
        run_layers(bb, batch, prompt_plan(bb, prompt, position))
    run_layers(bb, batch, prompt_plan(bb, prompt, 0))
