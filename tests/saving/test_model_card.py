"""The model card: scores with their intervals, controls, licence, and somebody else's file."""

from dataclasses import MISSING, fields

import pytest
from huggingface_hub import ModelCard
from small import EACH_METHOD, config, small_task

from idp_tutorial.assembly.build import build_model
from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.data.task import Task
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.saving.descriptions import SavedBackbone, read_prompts
from idp_tutorial.saving.hub import (
    RECORD_FILE,
    read_run_record,
)
from idp_tutorial.saving.model_card import build_model_card, wilson_interval
from idp_tutorial.saving.prompt_files import save_pretrained
from idp_tutorial.utils.records import dump_record


def test_a_card_says_what_the_record_says(saved_model):
    folder, record = saved_model
    card = ModelCard.load(folder / "README.md")
    (result,) = card.data.eval_results
    assert (result.metric_value, result.metric_type, result.dataset_split) == (
        round(record["score"], 2),
        "accuracy",
        "test",
    )
    assert (
        card.data.library_name == "idp_tutorial"
        and not card.data.get("license")
        and card.data.base_model is None
    )
    low, high = wilson_interval(record["score"], record["split_sizes"]["test"])
    for words in (
        f"accuracy {record['score']:.1f} | {low:.1f} to {high:.1f}",
        "`negative`, `positive`",
        f"24 validation | accuracy {record['validation']:.1f} |",
        "No controls were recorded",
        "has not chosen a licence",
        "W₂",
        METHODS["lpt-npg"].reference,
        "from_pretrained(",
        read_prompts(folder)[0]["backbone"]["digests"]["float32"],
        f"{sum(record['params'].values()):,} trained",
    ):
        assert words in card.text, words


def test_controls_a_licence_and_a_backbone_of_the_hub(saved_model):
    folder, record = saved_model
    about, _ = read_prompts(folder)
    about["backbone"] |= dict(name="minilm", local=False, revision="c0ffee")
    bare = {**record, "method": "head-only", "score": 51.0}
    card = build_model_card(about, record, [bare], "me/x", "apache-2.0")
    assert (
        card.data.base_model == "sentence-transformers/all-MiniLM-L6-v2"
        and card.data.license == "apache-2.0"
    )
    assert "| head-only | 24 test | accuracy 51.0 |" in card.text and "No controls" not in card.text
    assert "revision `c0ffee`" in card.text
    assert "from_pretrained('me/x')" in card.text


@pytest.mark.parametrize("method", EACH_METHOD)
def test_every_method_and_kind_of_task_has_a_card(method, small_folder, tmp_path):
    name = "similarity" if len(method) % 2 and method != "efl" else "sentiment"
    cfg = config(backbone=str(small_folder), method=method, task=name)
    task = small_task(name)
    save_pretrained(build_model(cfg, load_backbone(cfg.backbone), task), tmp_path, task, cfg)
    text = (tmp_path / "README.md").read_text()
    assert (
        "its quality is unknown" in text
        and METHODS[method].reference in text
        and str(small_folder) not in text
    )


def test_fields_with_a_default_may_be_missing(saved_model):
    folder, record = saved_model
    description = read_prompts(folder)[0]
    card = str(build_model_card(description, record))
    for part, schema in dict(task=Task, backbone=SavedBackbone, cfg=RunConfig).items():
        for field in fields(schema):
            has_default = field.default is not MISSING or field.default_factory is not MISSING
            value = description[part].get(field.name)
            if has_default and value == field.default and field.name in description[part]:
                shorter = {k: v for k, v in description[part].items() if k != field.name}
                assert str(build_model_card({**description, part: shorter}, record)) == card


def test_a_readme_of_somebody_else_stays(small_folder, tmp_path):
    (tmp_path / "README.md").write_text("# My project\n")
    cfg = config(backbone=str(small_folder))
    task = small_task()
    model = build_model(cfg, load_backbone(cfg.backbone), task)
    save_pretrained(model, tmp_path, task, cfg)
    assert (tmp_path / "README.md").read_text() == "# My project\n"
    (tmp_path / "README.md").unlink()
    for seed in (0, 1):
        save_pretrained(model, tmp_path, task, config(backbone=str(small_folder), seed=seed))
    assert "seed 1" in (tmp_path / "README.md").read_text()


def test_an_empty_record_is_none(tmp_path):
    (tmp_path / RECORD_FILE).write_text("")
    cfg = dict.fromkeys(("method", "task", "backbone", "lr", "steps", "seed"), 1)
    assert read_run_record(tmp_path, cfg) is read_run_record(tmp_path / "nowhere", cfg) is None


@pytest.mark.parametrize(
    "change", [dict(lr=None), dict(steps=None), dict(split_sizes=dict(test={}))]
)
def test_a_record_without_a_number_that_the_card_prints_is_none(change, saved_model, tmp_path):
    _, record = saved_model
    cfg = dict(method=record["method"], seed=record["seed"])
    for fields_of_record, is_read in ((record, True), (record | change, False)):
        (tmp_path / RECORD_FILE).write_text(dump_record(fields_of_record) + "\n")
        assert (read_run_record(tmp_path, cfg) is not None) == is_read
