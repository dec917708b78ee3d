"""Parameter counts of the published configs, compared with printed counts and their sources."""

import pytest
import torch

from idp_tutorial.assembly.build import build_model
from idp_tutorial.assembly.config import RunOptions
from idp_tutorial.backbones.load import BACKBONE_HUB_NAMES, load_backbone
from idp_tutorial.backbones.sizes import ENCODER_CONFIGS, FULL_SCALE_CONFIGS, FULL_SCALE_HUB_NAMES
from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.prompted_model import count_parameters
from idp_tutorial.data.synthetic import make_rows
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.families.family import FAMILIES
from idp_tutorial.testing.parity import library_hidden_states, max_abs_difference

KERAS = "github.com/keras-team/keras-hub, keras_hub/src/models/*/*_presets.py"
README = "github.com/microsoft/DeBERTa, README: backbone parameters, in millions"
SAFE = "the hub's count of the safetensors, as public registries of models quote it"
SHOWN = "T5EncoderModel.from_pretrained('t5-base'), as public code prints it"
COUNTED = "no count was found: counted once, of the config.json of "
# Which parameters are counted: 'all' with the language-model head; 'base' without it and without a
# pooler; 'pooler' with one; 'rest' without the word embeddings; 'rows' without three embeddings of
# RoBERTa that keras-hub leaves out (two positions, one token type).
PUBLISHED = {
    "bert-base": ("pooler", 109_482_240, KERAS),
    "bert-large": ("pooler", 335_141_888, KERAS),
    "roberta-base": ("rows", 124_052_736, KERAS),
    "roberta-large": ("rows", 354_307_072, KERAS),
    "xlm-roberta-base": ("rows", 277_450_752, KERAS),
    "xlm-roberta-large": ("rows", 558_837_760, KERAS),
    "electra-small": ("pooler", 13_548_800, KERAS),
    "electra-base": ("pooler", 109_482_240, KERAS),
    "electra-large": ("pooler", 335_141_888, KERAS),
    "deberta-base": ("rest", 100e6, README),
    "deberta-large": ("rest", 350e6, README),
    "deberta-v3-base": ("base", 183_831_552, KERAS),
    "deberta-v3-large": ("base", 434_012_160, KERAS),
    "distilbert": ("base", 66_362_880, KERAS),
    "mpnet-base": ("base", 108_895_872, COUNTED + "microsoft/mpnet-base"),
    "modernbert-base": ("base", 149_014_272, KERAS),
    "modernbert-large": ("base", 394_781_696, KERAS),
    "t5-base": ("base", 109_628_544, SHOWN),
    "t5-large": ("base", 334_939_648, COUNTED + "google-t5/t5-large"),
    "gpt2": ("all", 124_439_808, KERAS),
    "gpt2-medium": ("all", 354_823_168, KERAS),
    "gpt2-large": ("all", 774_030_080, KERAS),
    "gpt2-xl": ("all", 1_557_611_200, KERAS),
    "smollm2-135m": ("all", 134_515_008, SAFE),
    "smollm2-360m": ("all", 361_821_120, SAFE),
    "smollm2-1.7b": ("all", 1_711_376_384, SAFE),
    "llama-3.2-1b": ("all", 1_235_814_400, SAFE),
    "llama-3.2-3b": ("all", 3_212_749_824, SAFE),
    "mistral-7b": ("all", 7_241_732_096, KERAS),
    "qwen2.5-0.5b": ("all", 494_032_768, KERAS),
    "qwen2.5-1.5b": ("all", 1_543_714_304, SAFE),
    "qwen2.5-7b": ("all", 7_615_616_512, SAFE),
    "qwen3-0.6b": ("all", 596_049_920, KERAS),
    "qwen3-1.7b": ("all", 1_720_574_976, KERAS),
    "qwen3-8b": ("all", 8_190_735_360, KERAS),
    "gemma-2b": ("all", 2_506_172_416, KERAS),
    "gemma-2-2b": ("all", 2_614_341_888, KERAS),
    "gemma-3-1b": ("all", 999_885_952, KERAS),
}


def count_part(bb, part_name):
    part = bb.model if part_name in ("all", "rest") else bb.base
    n = sum(p.numel() for k, p in part.named_parameters() if "pooler" not in k)
    return n + dict(
        rest=-bb.word_embeddings.weight.numel(), pooler=bb.d * (bb.d + 1), rows=-3 * bb.d
    ).get(part_name, 0)


@pytest.mark.parametrize("name", FULL_SCALE_CONFIGS)
def test_a_config_has_the_published_number_of_parameters(name):
    bb = load_backbone(name, "meta")
    part_name, printed, source = PUBLISHED[name]
    n = count_part(bb, part_name)
    tolerance = {100e6: 1e6, 350e6: 5e6}.get(
        printed, 0
    )  # two digits; all others are printed to the last one
    assert abs(n - printed) <= tolerance, (n, printed, source)
    assert bb.max_tokens >= 512 and bb.causal == (name not in ENCODER_CONFIGS)


def test_every_family_has_a_published_size_but_camembert():
    assert {FULL_SCALE_CONFIGS[n]().model_type for n in FULL_SCALE_CONFIGS} == set(FAMILIES) - {
        "camembert"
    }
    assert (
        set(PUBLISHED) == set(FULL_SCALE_CONFIGS)
        and set(FULL_SCALE_HUB_NAMES) <= set(FULL_SCALE_CONFIGS)
        and set(FULL_SCALE_HUB_NAMES) < set(BACKBONE_HUB_NAMES)
    )


SMALLER = dict(num_hidden_layers=3, vocab_size=8192)
ONE_EACH = [
    "bert-base",
    "xlm-roberta-base",
    "electra-small",
    "deberta-base",
    "deberta-v3-base",
    "distilbert",
    "mpnet-base",
    "modernbert-base",
    "t5-base",
    "gpt2",
    "smollm2-135m",
    "llama-3.2-1b",
    "mistral-7b",
    "qwen2.5-0.5b",
    "qwen3-0.6b",
    "gemma-2b",
    "gemma-2-2b",
    "gemma-3-1b",
]
METHODS = [
    "prompt-tuning",
    "p-tuning",
    "p-tuning-v2",
    "s-idpg-phm",
    "m-idpg-phm",
    "lpt-npg",
    "lpt-appg",
    "id-spam",
    "smop",
    "dept",
    "lora",
    "adapter",
    "compacter",
]


@pytest.mark.parametrize("name", ONE_EACH)
def test_every_method_is_counted_on_every_family(name):
    """Parameters are counted on the meta device, as idp params does."""
    options = RunOptions(backbone=name).with_options(prompt_length=5, bottleneck=16)
    for method in METHODS:
        bb = load_backbone(name, "meta", **SMALLER)
        cfg = options.with_method(method)
        if name == "electra-small" and method in (
            "m-idpg-phm",
            "id-spam",
        ):  # its words are narrower than its layers
            with pytest.raises(ValueError, match="width 128 and hidden states of width 256"):
                build_model(cfg, bb, TASKS["sentiment"])
            continue
        with torch.device("meta"):
            n = count_parameters(build_model(cfg, bb, TASKS["sentiment"]))
        assert n["head"] == 2 * bb.d + 2 and n["prompt"] + n["backbone"] > 0, (method, n)
        if method == "prompt-tuning":
            assert n["prompt"] == 5 * bb.d_embedding
        if method == "p-tuning-v2":
            assert n["prompt"] == 3 * 5 * (bb.d_kv_prompt if bb.supports_kv_prompt else bb.d)
        if method == "lora":
            assert n["backbone"] > 0


@pytest.mark.parametrize("name", ["distilbert", "smollm2-135m", "deberta-v3-base", "t5-base"])
def test_random_weights_run(name):
    bb = load_backbone(name, "random", num_hidden_layers=2, vocab_size=8192)
    task = TASKS["sentiment"]
    rows = task.encode(make_rows("sentiment", "train", n=3), bb.tokenizer, 40, causal=bb.causal)
    ids = torch.tensor([e["input_ids"][:9] for e in rows])
    batch = dict(
        input_ids=ids, attention_mask=torch.ones_like(ids), token_type_ids=torch.zeros_like(ids)
    )
    with torch.no_grad():
        assert max_abs_difference(run_layers(bb, batch).h, library_hidden_states(bb, batch)) < 1e-5
