"""Parity checks: an error in a family is found, and a new family is measured in three lines."""

from types import SimpleNamespace

from parity import measure_parity
from small_models import attention_implementations, small_backbone
from transformers import BertConfig

from idp_tutorial.families.family import build_hf_model, get_family, wrap_hf_model


def test_an_error_in_a_family_is_detected(monkeypatch):
    def worst(name):
        got = measure_parity(small_backbone(name, attention_implementations(name)[0]))
        return {k for k in got if (got[k] or 0.0) > 1e-5}

    for name, attribute, faulty in (
        ("mistral", "in_attention_window", lambda self, distance: distance <= self.sliding_window),
        (
            "modernbert",
            "in_attention_window",
            lambda self, distance: distance.abs() < self.sliding_window,
        ),
        ("roberta", "position_ids", lambda self, mask: mask.cumsum(1) * mask),
        ("gemma3_text", "softcap_logits", lambda self, logits: logits),
        ("llama", "embed", lambda self, e, mask, types: 1.01 * e),
    ):
        cls = get_family(SimpleNamespace(model_type=name)).backbone_class
        assert not worst(name)
        with monkeypatch.context() as m:
            m.setattr(cls, attribute, faulty)
            assert worst(name), (name, attribute)


def test_three_lines_measure_a_model_that_is_not_in_the_table():
    """The lines of the docstring of `parity`, with BERT."""
    config = BertConfig(vocab_size=60, hidden_size=32, num_hidden_layers=3, num_attention_heads=4)
    backbone = wrap_hf_model(build_hf_model(config))
    differences = measure_parity(backbone)
    assert all((difference or 0.0) <= 2e-6 for difference in differences.values())
