"""A cartridge gives the layers the keys and values that peft's prompt encoder holds."""

import pytest
import torch
from small_models import random_batch, small_backbone

from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.core.heads import ClassificationHead
from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.planned_model import PlannedModel, count_parameters, trained_state
from idp_tutorial.methods.cartridge import CartridgeKeyValues
from idp_tutorial.utils.checks import UserError

peft = pytest.importorskip("peft")


def build_plan(bb, **options):
    """Return the plan of a cartridge."""
    cfg = RunConfig("cartridge", **options)
    return cfg.method_config.plan(bb, cfg)


class OneTextTokenizer:
    """Tokenizer of one text, as peft and as `init='text'` call it."""

    ids = (7, 9, 11, 8, 12, 20)

    def __call__(self, text, add_special_tokens=True, return_tensors=None, **kwargs):
        ids = list(self.ids)
        return {"input_ids": torch.tensor([ids]) if return_tensors else ids}


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "roberta"])
def test_states_equal_those_of_peft(family):
    bb = small_backbone(family)
    plan = build_plan(bb, prompt_length=5)
    batch = random_batch()
    with torch.no_grad():
        h = run_layers(bb, batch, plan).h
    config = peft.CartridgeConfig(num_virtual_tokens=5, task_type="FEATURE_EXTRACTION")
    model = peft.get_peft_model(bb.base, config).eval()
    model.prompt_encoder["default"].load_prompt_embeddings(plan[0].source.encoder.weight.detach())
    with torch.no_grad():
        expected = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).last_hidden_state
    is_real = batch["attention_mask"] == 1
    torch.testing.assert_close(h[is_real], expected[is_real], rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_cache_of_a_text_equals_that_of_peft(family):
    bb = small_backbone(family)
    bb.tokenizer = OneTextTokenizer()
    plan = build_plan(bb, prompt_length=5, init="text", init_text="a text of six tokens")
    config = peft.CartridgeConfig(num_virtual_tokens=5, task_type="CAUSAL_LM")
    model = peft.get_peft_model(bb.model, config).eval()
    expected = peft.initialize_kv_prefix_from_text(
        model, bb.tokenizer, text="a text of six tokens", use_chat_template=False
    )
    torch.testing.assert_close(plan[0].source.encoder.weight.data, expected, rtol=0, atol=1e-6)


def test_the_first_token_is_frozen_and_saved():
    bb = small_backbone("gpt2")
    plan = build_plan(bb, prompt_length=5)
    model = PlannedModel(bb, ClassificationHead(bb.d, 2, "last"), plan)
    assert count_parameters(model)["prompt"] == 4 * 2 * bb.d * bb.n_layers
    frozen = model.sources[0].encoder.frozen_embedding
    assert any(tensor is frozen for tensor in trained_state(model).values())
    model.loss({**random_batch(), "label": torch.tensor([0, 1, 1])}).backward()
    assert model.sources[0].encoder.trainable_embedding.grad.any()
    assert frozen.grad is None


def test_what_cannot_be_built_is_refused():
    with pytest.raises(UserError, match="takes none"):
        build_plan(small_backbone("deberta"))
    with pytest.raises(UserError, match="must be at least 2"):
        CartridgeKeyValues(small_backbone("gpt2"), 1)
