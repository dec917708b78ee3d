"""A saved model: one file, every byte checked; nothing is opened that the user did not name.

Other versions.
"""

import json
import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small import backbone, config, model_of, small_task

from idp_tutorial.assembly.build import build_model
from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.backbones.load import cast_weights, load_backbone
from idp_tutorial.core.backbone import backbone_id
from idp_tutorial.core.planned_model import trained_state
from idp_tutorial.methods import glove
from idp_tutorial.saving.descriptions import (
    check_backbone_matches,
    describe_backbone,
    read_fingerprint,
    read_prompts,
)
from idp_tutorial.saving.prompt_files import from_pretrained, load_first_stage, save_pretrained
from idp_tutorial.training.evaluation import predict, predict_logits
from idp_tutorial.training.examples import encode_for_model
from idp_tutorial.utils.checks import UserError
from idp_tutorial.utils.tensor_files import deserialise_tensors, save_tensors, serialise_tensors

ROWS = [dict(sentence1=s) for s in ("the soup was cold .", "tea")]


@pytest.fixture
def saved(small_folder, tmp_path):
    """Folder, answers, config."""
    cfg = config(backbone=str(small_folder), prompt_length=2, bottleneck=4)
    task = small_task()
    model = build_model(cfg, load_backbone(cfg.backbone), task)
    save_pretrained(model, tmp_path / "bottleneck", task, cfg)
    return tmp_path / "bottleneck", predict(model, task, cfg, ROWS), cfg


def rewrite(folder, **new):
    """Another description with a digest that is right.

    What an attacker, or a newer version, writes.
    """
    about, tensors = deserialise_tensors((folder / "prompts.safetensors").read_bytes())
    for k, v in new.items():
        about[k] = {**(about[k] or {}), **v} if isinstance(v, dict) else v
    save_tensors(folder / "prompts.safetensors", tensors, about)


def test_every_byte_is_checked(saved, monkeypatch):
    folder, *_ = saved
    monkeypatch.setattr(
        "idp_tutorial.saving.prompt_files.build_model", lambda *a: pytest.fail("it was used")
    )
    file = folder / "prompts.safetensors"
    good = file.read_bytes()
    places = [*range(0, 4000, 7), *range(4000, len(good), 211), len(good) - 1]
    flipped = [
        good[:position] + bytes([good[position] ^ (1 << position % 8)]) + good[position + 1 :]
        for position in places
    ]
    for data in [*flipped, good[:-4], good[:9], b"", good + b"0"]:
        file.write_bytes(data)
        with pytest.raises(ValueError, match="is damaged") as e:
            from_pretrained(folder)
        assert str(e.value).count("\n") == 0


def test_the_view_is_neither_needed_nor_trusted(saved):
    folder, want, _ = saved
    assert json.loads((folder / "prompts.json").read_text())["cfg"]["method"] == "lpt-npg"
    for text in ('{"cfg":{"method":"lora"}}', "", None):
        (folder / "prompts.json").unlink() if text is None else (
            folder / "prompts.json"
        ).write_text(text)
        model, task, c = from_pretrained(folder)
        assert predict(model, task, c, ROWS) == want


def test_overwriting_leaves_the_old_or_the_new_one(saved, monkeypatch):
    """The process is interrupted before each of its file operations."""
    folder, want, cfg = saved
    other = replace(cfg, method="lpt", seed=3)
    model = build_model(other, load_backbone(cfg.backbone), small_task())
    new = predict(model, small_task(), other, ROWS)
    seen = set()
    for kill_at in (0, 1, 2, 3, 9):
        done = []
        plain = dict(replace=os.replace, write_bytes=Path.write_bytes, fsync=os.fsync)

        def killed(name, plain=plain, done=done, kill_at=kill_at):
            def f(*a, **k):
                done.append(name)
                if len(done) > kill_at:
                    raise KeyboardInterrupt
                return plain[name](*a, **k)

            return f

        with monkeypatch.context() as m:
            m.setattr(os, "replace", killed("replace"))
            m.setattr(os, "fsync", killed("fsync"))
            m.setattr(Path, "write_bytes", killed("write_bytes"))
            with suppress(KeyboardInterrupt):
                save_pretrained(model, folder, small_task(), other)
        trained, task, c = from_pretrained(folder)
        predictions = predict(trained, task, c, ROWS)
        assert predictions in (want, new)
        seen.add(predictions == new)
    assert seen == {False, True}


def test_the_noise_of_unknown_texts_goes_along(small_folder, tmp_path):
    cfg = config(
        backbone=str(small_folder),
        method="m-idpg-phm-glove",
        glove_noise=0.6,
        prompt_length=2,
        bottleneck=4,
    )
    task = small_task()
    unknown = [dict(sentence1="!?"), *ROWS]

    def predictions(**kw):
        model = build_model(c := replace(cfg, **kw), load_backbone(cfg.backbone), task)
        save_pretrained(model, folder := tmp_path / str(kw), task, c)
        return predict(model, task, c, unknown), predict(*from_pretrained(folder), unknown)

    (noise, again), (zero, without) = predictions(), predictions(glove_noise=0.0)
    assert noise == again and zero == without and noise[0] != zero[0] and noise[1:] == zero[1:]


def test_a_file_opens_no_path_that_it_names(saved, monkeypatch, tmp_path):
    folder, want, _ = saved
    monkeypatch.setattr(glove, "load_glove_encoder", lambda path, *a: pytest.fail(f"opened {path}"))
    (tmp_path / "secret").write_text("password 1 2 3")
    rewrite(
        folder,
        cfg=dict(
            init_from=str(tmp_path),
            data=str(tmp_path),
            cache_dir=str(tmp_path),
        ),
    )
    model, task, c = from_pretrained(folder)
    assert predict(model, task, c, ROWS) == want and (
        c.init_from,
        c.data,
        c.cache_dir,
    ) == (None, None, None)
    opened = []
    monkeypatch.setattr(
        "idp_tutorial.methods.glove.load_glove_encoder",
        lambda path, tok, **kw: opened.append(path) or 1 / 0,
    )
    options = RunConfig("m-idpg-phm-glove", glove=str(tmp_path / "secret")).to_dict()
    rewrite(folder, cfg=None)
    rewrite(folder, cfg=options)
    with pytest.raises(ZeroDivisionError):
        from_pretrained(folder)
    assert opened == [None]  # the bundled ones


def test_custom_code_of_a_backbone_is_not_run_and_nobody_is_asked(
    saved, small_folder, tmp_path, monkeypatch
):
    folder, *_ = saved
    shutil.copytree(small_folder, tmp_path / "evil")
    about = json.loads((tmp_path / "evil/config.json").read_text())
    (tmp_path / "evil/code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (tmp_path / "evil/config.json").write_text(
        json.dumps(
            {
                **about,
                "model_type": "own",
                "auto_map": {
                    "AutoConfig": "code.C",
                    "AutoModel": "code.M",
                    "AutoModelForMaskedLM": "code.M",
                },
            }
        )
    )
    rewrite(folder, cfg=dict(backbone=str(tmp_path / "evil")))
    monkeypatch.setattr("builtins.input", lambda *a: pytest.fail("it asked"))
    with pytest.raises(ValueError):
        from_pretrained(folder, tmp_path / "evil")
    from_pretrained(folder)  # the weights that the digest knows, whatever path the file says
    assert not (tmp_path / "ran").exists()


def test_a_field_of_another_type_is_named(saved):
    folder, *_ = saved
    good = (folder / "prompts.safetensors").read_bytes()
    bad_values = dict(
        prompt_length="ten",
        bottleneck=1.5,
        prompt_dropout="none",
        layer="x",
        method=["lpt"],
        standardise="yes",
        seed=True,
    )
    for field, value in bad_values.items():
        (folder / "prompts.safetensors").write_bytes(good)
        rewrite(folder, cfg={field: value})
        with pytest.raises(ValueError, match=rf"{field}.*"):
            from_pretrained(folder)


def test_a_description_of_no_task_or_no_weights_is_named(saved):
    folder, *_ = saved
    good = (folder / "prompts.safetensors").read_bytes()
    for new, words in (
        (dict(task=dict(columns=[])), "task.columns must be 3 values, got .."),
        (
            dict(task=dict(columns=[1, None, "y"])),
            r"task.columns\[0\] must be a text, got 1",
        ),
        (dict(backbone=None), "backbone must be an object, got None"),
        (dict(backbone=dict(dtype="x")), "need their backbone, a folder"),
    ):
        (folder / "prompts.safetensors").write_bytes(good)
        rewrite(folder, **new)
        with pytest.raises(ValueError, match=words):
            from_pretrained(folder)


def test_newer_versions_are_named(saved):
    folder, *_ = saved
    rewrite(folder, version="7.1", cfg=dict(telepathy=3))
    with pytest.raises(
        ValueError,
        match="refused .*telepathy.*: install idp_tutorial '7.1'",
    ):
        from_pretrained(folder)
    rewrite(folder, format=8)
    with pytest.raises(ValueError, match="has format 8, not 2: install idp_tutorial 7.1"):
        from_pretrained(folder)


@pytest.mark.parametrize(
    "bad_values", [dict(cfg=None), dict(task=[]), dict(task={"labels": 3, "x": 1})], ids=str
)
def test_nonsense_with_a_right_digest(saved, bad_values):
    folder, *_ = saved
    about, tensors = deserialise_tensors((folder / "prompts.safetensors").read_bytes())
    save_tensors(folder / "prompts.safetensors", tensors, {**about, **bad_values})
    with pytest.raises(ValueError):
        from_pretrained(folder)


def test_a_header_that_lies():
    data = serialise_tensors({"p": torch.ones(2)}, {})
    with pytest.raises(ValueError, match="is damaged"):
        deserialise_tensors(b"\xff" * 8 + data[8:])


# --- which backbone


def test_no_path_of_this_machine_is_saved_and_its_cache_knows_it(
    saved, small_folder, tmp_path, monkeypatch, path_notes_dir
):
    folder, want, cfg = saved
    monkeypatch.chdir(small_folder.parent)
    relative = replace(cfg, backbone=small_folder.name)
    save_pretrained(
        build_model(relative, load_backbone(relative.backbone), small_task()),
        folder,
        small_task(),
        relative,
    )
    for p in folder.iterdir():
        assert str(small_folder.parent).encode() not in p.read_bytes(), p
    assert read_prompts(folder)[0]["cfg"]["backbone"] == small_folder.name
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, tmp_path / "copied")
    model, task, c = from_pretrained(tmp_path / "copied")
    assert predict(model, task, c, ROWS) == want and c.backbone == str(small_folder)
    shutil.copytree(small_folder, tmp_path / "moved")
    for note in path_notes_dir.iterdir():
        note.unlink()
    with pytest.raises(FileNotFoundError, match=f"backbone, a folder '{small_folder.name}' .*bb="):
        from_pretrained(folder)
    rewrite(folder, cfg=dict(backbone=str(small_folder)))  # as earlier models have it
    assert predict(*from_pretrained(folder), ROWS) == want
    model, task, c = from_pretrained(folder, "moved")
    assert predict(model, task, c, ROWS) == want
    with pytest.raises(ValueError, match="belong to another backbone"):
        from_pretrained(folder, "tiny")
    rewrite(folder, backbone=dict(local=False), cfg=dict(backbone="nobody/has-this"))
    with pytest.raises(ValueError, match="no backbone 'nobody/has-this'.*give its folder or name"):
        from_pretrained(folder)


def in_dtype(dtype):
    bb = backbone()
    cast_weights(bb.model, dtype)
    return bb


def test_weights_are_the_same_in_any_attention_and_dtype():
    a = backbone()
    saved = describe_backbone(a, "a")
    for other in (backbone(attn="eager"), in_dtype(torch.bfloat16), in_dtype(torch.float16)):
        check_backbone_matches(saved, other, "these", "a")
    half = describe_backbone(in_dtype(torch.bfloat16), "a")  # and the other way round
    check_backbone_matches(half, a, "these", "a")
    assert backbone_id(a) == backbone_id(backbone(attn="eager")) != backbone_id(backbone("bert"))
    with torch.no_grad():
        a.word_embeddings.weight[5, 5] += 1e-6
    for description in (saved, half):  # bfloat16 does not see so little
        if description is half:
            check_backbone_matches(description, a, "these", "a")
        else:
            with pytest.raises(ValueError, match="another backbone"):
                check_backbone_matches(description, a, "these", "a")


def test_a_damaged_first_stage_is_no_start(saved):
    folder, _, cfg = saved
    model = build_model(cfg, load_backbone(cfg.backbone), small_task())
    assert load_first_stage(model, folder)
    data = bytearray((folder / "prompts.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "prompts.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match="is damaged"):
        load_first_stage(model, folder)


@pytest.mark.parametrize("method", ["lora", "adapter", "bitfit", "fine-tuning", "prompt-tuning"])
def test_a_first_stage_initialises_all_that_its_method_trains(method, small_folder, tmp_path):
    cfg = config(method, backbone=str(small_folder))
    first = model_of(method, load_backbone(cfg.backbone), backbone=cfg.backbone)
    save_pretrained(first, tmp_path, small_task(), cfg)
    model = build_model(cfg, load_backbone(cfg.backbone), small_task())
    assert {*load_first_stage(model, tmp_path)} == {*trained_state(model)}
    for name, tensor in trained_state(model).items():
        assert torch.equal(tensor, trained_state(first)[name]), name


@pytest.mark.parametrize("method", ["probe", "majority", "side-network"])
def test_a_control_is_not_saved_over_a_model(method, saved):
    folder, _, cfg = saved
    before = (folder / "prompts.safetensors").read_bytes()
    control = replace(cfg, method=method)
    task = small_task()
    with pytest.raises(ValueError, match=f"'{method}' is a control and has no prompt to save"):
        save_pretrained(
            build_model(control, load_backbone(cfg.backbone), task), folder, task, control
        )
    assert (folder / "prompts.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    "method,says",
    [
        ("prompt-tuning-134", ", prompt_length=134,"),
        ("lora", "), seed"),
        ("lpt-npg", ", prompt_length=2,"),
    ],
)
def test_the_card_says_how_many_vectors_are_written(method, says, saved, tmp_path):
    *_, cfg = saved
    cfg = cfg.with_method(method)
    task = small_task()
    save_pretrained(
        build_model(cfg, load_backbone(cfg.backbone), task), tmp_path / method, task, cfg
    )
    assert says in (tmp_path / method / "README.md").read_text()


@pytest.mark.parametrize("method", ["lpt-npg", "p-tuning-v2", "lora", "fine-tuning", "efl"])
def test_a_model_can_be_loaded_in_another_dtype(method, small_folder, tmp_path):
    """The logits in bfloat16 point where those in float32 do, whatever the method trains."""
    cfg = config(method, backbone=str(small_folder), prompt_length=2, bottleneck=4)
    task = small_task()
    model = build_model(cfg, load_backbone(cfg.backbone), task)
    save_pretrained(model, tmp_path, task, cfg)
    logits = {}
    for dtype in (None, "float32", "bfloat16"):
        model, task, loaded_cfg = from_pretrained(tmp_path, dtype=dtype)
        weights = model.backbone.word_embeddings.weight.dtype
        assert weights == (torch.bfloat16 if dtype == "bfloat16" else torch.float32)
        assert loaded_cfg.dtype == (dtype or "float32")
        examples = encode_for_model(model, task, loaded_cfg, small_task().splits["test"])
        logits[dtype] = predict_logits(model, examples)
    assert torch.equal(logits["float32"], logits[None])
    assert not torch.equal(logits["bfloat16"], logits[None])
    cosine = torch.cosine_similarity(logits["bfloat16"].flatten(), logits[None].flatten(), dim=0)
    assert cosine > 0.98


def test_the_dtype_of_a_loaded_backbone_is_not_changed(saved):
    folder, _, cfg = saved
    with pytest.raises(ValueError, match="cannot be used with a backbone that is loaded already"):
        from_pretrained(folder, load_backbone(cfg.backbone), dtype="bfloat16")
    with pytest.raises(ValueError, match="dtype must be 'float32', 'bfloat16' or 'int8'"):
        from_pretrained(folder, dtype="float16")


def test_a_digest_of_an_earlier_version_is_accepted_with_a_warning(saved, small_folder):
    folder, want, _ = saved
    rewrite(folder, backbone=dict(digests=dict(float32="a" * 16)))
    with pytest.warns(UserWarning) as warnings:
        model, task, cfg = from_pretrained(folder, small_folder)
    (message,) = [str(w.message) for w in warnings if "earlier version" in str(w.message)]
    assert "make sure that it is the same model" in message
    assert predict(model, task, cfg, ROWS) == want
    rewrite(folder, backbone=dict(digests=dict(float32="a" * 32)))
    with pytest.raises(UserError, match="belong to another backbone"):
        from_pretrained(folder, small_folder)


def test_a_folder_of_an_earlier_version_is_the_same_run(saved):
    folder, *_ = saved
    rewrite(folder, digests=dict(weights="2ef68a2e3294e2e3", data="0" * 16))
    assert read_fingerprint(folder)["digests"]["weights"] == backbone_id(load_backbone("tiny"))
