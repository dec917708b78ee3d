"""Conversion to peft: peft's model gives the same logits.

What means something else there is refused.
"""

import os

import pytest
import torch
from small import backbone, config, model_of

pytest.importorskip("peft")
from peft import PeftModel
from small_models import small_backbone

from idp_tutorial.core.loop import run_layers
from idp_tutorial.saving.peft import to_peft

IDS = torch.tensor([[5, 17, 39, 3, 8], [7, 11, 20, 4, 9]])
DECODERS = ("gpt2", "llama", "qwen2")


def logits_of_model(model):
    bb = model.backbone
    with torch.no_grad():
        ctx = run_layers(
            bb,
            dict(
                input_ids=IDS,
                attention_mask=torch.ones_like(IDS),
                token_type_ids=torch.zeros_like(IDS),
            ),
            model.plan,
        )
        return bb.lm_logits(ctx.h)[:, -IDS.shape[1] :]


def logits_of(peft_model):
    with torch.no_grad():
        return peft_model.eval()(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits[
            :, -IDS.shape[1] :
        ]


def fresh(family):
    return backbone("roberta") if family == "roberta" else small_backbone(family)


@pytest.mark.parametrize(
    "family,method",
    [
        *((f, m) for f in DECODERS for m in ("prompt-tuning", "p-tuning-v2", "lora")),
        ("gpt2", "lora-all"),
        ("roberta", "lora"),
        ("roberta", "lora-all"),
    ],
)
def test_pefts_model_says_the_same(family, method, tmp_path):
    kw = dict(method=method, prompt_length=3, **({"bottleneck": 4} if "lora" in method else {}))
    model = model_of(bb=fresh(family), **kw)
    cfg = config(**kw)
    want = logits_of_model(model)
    peft_model = PeftModel.from_pretrained(fresh(family).model, to_peft(model, cfg, tmp_path / "p"))
    torch.testing.assert_close(logits_of(peft_model), want, atol=2e-5, rtol=1e-4)
    bare = model_of("head-only", fresh(family))
    assert (logits_of_model(bare) - want).abs().max() > 1e-3


def test_only_keys_and_values_are_a_prefix(tmp_path):
    bb = backbone("gpt2")
    with pytest.raises(ValueError, match="insertion='kv'"):
        to_peft(
            model_of("p-tuning-v2", bb, insertion="replace"),
            config(method="p-tuning-v2", insertion="replace"),
            tmp_path / "x",
        )


def test_what_means_something_else_is_refused(tmp_path):
    bb = fresh("roberta")
    for method, words in (
        ("prompt-tuning", "in front of <s>"),
        ("p-tuning-v2", "has no prefix of keys and values"),
        ("lpt-npg", "cannot be converted to peft"),
    ):
        with pytest.raises(ValueError, match=words):
            to_peft(model_of(method, bb), config(method=method), tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_an_interrupted_conversion_leaves_the_earlier_files(tmp_path, monkeypatch):
    cfg = config(method="prompt-tuning", prompt_length=3)
    model = model_of("prompt-tuning", fresh("gpt2"), prompt_length=3)
    to_peft(model, cfg, tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def fail(source, destination):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", fail)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        next(iter(model.trained_parameters().values())).add_(1)
        to_peft(model, cfg, tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
