"""Pretraining: tokenizer, windows, masks, losses; a resumed run equals an uninterrupted one.

Checkpoints of pretraining: the same state after reading, and refusals of other runs.

AdamW in float32 for a model in half precision, and its schedule.
"""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_model
from small import call_with_messages, refused

from idp_tutorial.backbones.load import find_local_backbone, load_backbone
from idp_tutorial.core.loop import run_layers
from idp_tutorial.data.synthetic import make_rows
from idp_tutorial.utils import tensor_files
from idp_tutorial.utils.digests import read_manifest, write_manifest
from idp_tutorial.utils.records import read_records
from idp_tutorial.utils.tensor_files import write_snapshot
from results.pretraining import language_modelling
from results.pretraining import pretrain as pretraining
from results.pretraining.config import PretrainConfig
from results.pretraining.corpus import encode_stream, train_tokenizer
from results.pretraining.language_modelling import create_language_model
from results.pretraining.pretrain import (
    MasterWeightOptimizer,
    find_weights_file,
    load_initial_weights,
    load_master_weights,
    load_pretraining_checkpoint,
    pretrain,
    save_backbone,
    write_pretraining_checkpoint,
)

CFG = PretrainConfig(
    d=32, n_layers=1, steps=12, tokens_per_step=256, lr=3e-3, warmup=4, held_out_tokens=1000
)


class KilledError(Exception):
    """Stop a run."""


def pretrain_until(last_step, *args, **kwargs):
    """Pretrain, and kill the run after a step."""
    train_step = pretraining._train_step

    def train_step_or_die(model, masters, stream, tok, cfg, step, loss):
        if step == last_step:
            raise KilledError
        return train_step(model, masters, stream, tok, cfg, step, loss)

    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(KilledError):
        monkeypatch.setattr(pretraining, "_train_step", train_step_or_die)
        pretrain(*args, **kwargs)


def without_times(log):
    return [{k: v for k, v in r.items() if k != "tokens_per_s"} for r in log]


@pytest.fixture(scope="module")
def uninterrupted(stream, tok):
    return pretrain(stream, tok, CFG, eval_every=3)


@pytest.mark.parametrize("event,step", [("message", 6), ("write", 6)])
def test_a_resumed_run_equals_an_uninterrupted_one(
    event, step, uninterrupted, stream, tok, tmp_path, monkeypatch, messages
):
    def stop(line):
        if event == "message" and line.startswith(f"step {step}/"):
            raise KilledError  # the message is before the checkpoint

    original = tensor_files.write_atomically

    def write_half(file, data):
        if event == "write" and file.name == f"checkpoint-{step}.safetensors":
            file.with_name(".checkpoint.part").write_bytes(data[:1000])
            raise KilledError
        original(file, data)

    monkeypatch.setattr(tensor_files, "write_atomically", write_half)
    with pytest.raises(KilledError), call_with_messages(stop):
        pretrain(stream, tok, CFG, tmp_path, eval_every=3)
    monkeypatch.setattr(tensor_files, "write_atomically", original)
    torch.rand(9)
    messages.clear()
    model, log = pretrain(stream, tok, CFG, tmp_path, eval_every=3)
    evaluations = [line for line in messages if line.startswith("step ")]
    assert evaluations[0].startswith(f"step {step}/") and len(evaluations) == (12 - step) // 3 + 1
    assert without_times(log) == without_times(uninterrupted[1])
    assert (
        all(torch.equal(a, b) for a, b in zip(model.parameters(), uninterrupted[0].parameters()))
        and not model.training
    )
    assert read_records(tmp_path / "log.jsonl") == log
    messages.clear()
    again, _ = pretrain(stream, tok, CFG, tmp_path, eval_every=3)
    assert not messages and all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters())
    )


def test_a_run_depends_on_its_seed_only(uninterrupted, stream, tok):
    torch.rand(3)
    _, log = pretrain(stream, tok, CFG, eval_every=3)
    assert without_times(log) == without_times(uninterrupted[1])
    _, log = pretrain(stream, tok, replace(CFG, seed=1), eval_every=3)
    assert log[0]["lm"] != uninterrupted[1][0]["lm"]


def test_held_out_text_is_not_trained_on(stream, tok, monkeypatch):
    windows = []
    original = language_modelling.gather_windows

    def gather_windows(stream, positions, **kwargs):
        windows.append(positions)
        return original(stream, positions, **kwargs)

    monkeypatch.setattr(language_modelling, "gather_windows", gather_windows)
    pretrain(stream, tok, replace(CFG, steps=3), eval_every=9)
    n = len(stream) - 1000
    assert len(windows) > 3 and all(positions.max() < n for positions in windows[:3])
    assert all(positions.min() >= n for positions in windows[3:])


def test_a_decoder_is_trained(stream, tok):
    model, log = pretrain(stream, tok, replace(CFG, family="gpt2", steps=24), eval_every=12)
    assert model.config.model_type == "gpt2" and log[-1]["held_out_lm"] < log[0][
        "held_out_lm"
    ] < np.log(len(tok))


def test_a_loss_that_is_not_finite_ends_the_run(stream, tok, tmp_path, monkeypatch):
    original = pretraining.compute_losses
    pretrain_until(6, stream, tok, CFG, tmp_path, eval_every=3)
    checkpoint = (tmp_path / "checkpoint-6.safetensors").read_bytes()
    monkeypatch.setattr(
        pretraining,
        "compute_losses",
        lambda *a, **kw: {k: v * float("nan") for k, v in original(*a, **kw).items()},
    )
    refused(
        lambda: pretrain(stream, tok, CFG, tmp_path, eval_every=3),
        "loss is nan at step 9",
        "lower lr",
    )
    assert (tmp_path / "checkpoint-6.safetensors").read_bytes() == checkpoint


def test_checkpoints_of_other_runs_or_versions_are_refused(stream, tok, tmp_path):
    pretrain(stream, tok, replace(CFG, steps=2), tmp_path, eval_every=2)
    ckpt = tmp_path / "checkpoint-2.safetensors"

    def resume(**options):
        return pretrain(stream, tok, replace(CFG, steps=2, **options), tmp_path)

    refused(
        lambda: resume(d=64, seed=3),
        "holds another run",
        "d was 32 and is now 64",
        "seed was 0 and is now 3",
        "Use another folder",
    )
    for damaged in (ckpt.read_bytes()[:900], b""):
        ckpt.write_bytes(damaged)
        refused(resume, f"{ckpt} is damaged", "Delete it")
    ckpt.unlink()
    write_snapshot(tmp_path, 3, {"a": 1})
    refused(resume, "checkpoint-3.safetensors is a checkpoint of another kind of run")


def test_a_damaged_checkpoint_falls_back_to_the_previous_one(stream, tok, tmp_path):
    whole, log = pretrain(stream, tok, replace(CFG, steps=6), tmp_path / "a", eval_every=2)
    pretrain_until(4, stream, tok, replace(CFG, steps=6), tmp_path / "b", eval_every=2)
    (tmp_path / "b/checkpoint-4.safetensors").write_bytes(b"half")
    with pytest.warns(
        UserWarning, match="checkpoint-4.* is damaged: .*; the run continues from checkpoint-2"
    ):
        again, _ = pretrain(stream, tok, replace(CFG, steps=6), tmp_path / "b", eval_every=2)
    for p, q in zip(whole.parameters(), again.parameters()):
        assert torch.equal(p, q)
    assert len(read_records(tmp_path / "b/log.jsonl")) == len(log) == 3


def test_a_run_starts_from_the_weights_of_a_finished_run(stream, tok, tmp_path):
    """It gets the weights but not the optimizer, and can be resumed itself."""
    a = tmp_path / "a"
    b = tmp_path / "b"
    old, log = pretrain(stream, tok, replace(CFG, steps=40), a, eval_every=40)
    cfg = replace(CFG, steps=4, seed=1, lr=1e-9, init_from=str(a))
    new, more = pretrain(stream, tok, cfg, b, eval_every=4)
    for p, q in zip(old.parameters(), new.parameters()):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=0)
    assert abs(more[0]["held_out_lm"] - log[-1]["held_out_lm"]) < 1e-3 and more[0]["step"] == 4
    whole, _ = pretrain(stream, tok, cfg := replace(cfg, lr=1e-3), tmp_path / "c", eval_every=2)
    pretrain_until(2, stream, tok, cfg, tmp_path / "d", eval_every=2)
    again, _ = pretrain(stream, tok, cfg, tmp_path / "d", eval_every=2)
    for p, q in zip(whole.parameters(), again.parameters()):
        assert torch.equal(p, q)
    refused(
        lambda: pretrain(stream, tok, replace(cfg, d=64)),
        "another shape",
        "'d': 32",
        "d=64",
    )
    missing = replace(cfg, init_from=str(tmp_path / "none"))
    refused(
        lambda: pretrain(stream, tok, missing),
        "no checkpoint in",
        "results/pretraining/run.py",
        error=FileNotFoundError,
    )


@pytest.mark.parametrize("n_layers,reason", [(9, "Missing key"), (4, "layer")])
def test_weights_of_another_depth_are_refused(n_layers, reason, stream):
    tok = load_backbone("tiny").tokenizer
    cfg = replace(
        CFG, d=192, n_layers=n_layers, steps=1, init_from=str(find_local_backbone("tiny"))
    )
    refused(lambda: pretrain(stream, tok, cfg), "another shape", reason, "n_layers")


@pytest.mark.parametrize("name", ["tiny", "tiny-gpt2"])
def test_a_run_starts_from_a_bundled_backbone(name):
    """The held-out loss on similar text is that of the backbone, not of a random model."""
    bb = load_backbone(name)
    stream = encode_stream(
        [r["sentence1"] for r in make_rows("sentiment", "train", n=300)], bb.tokenizer
    )
    tok = load_backbone("tiny").tokenizer
    cfg = PretrainConfig(
        family=bb.family,
        d=bb.d,
        n_layers=8,
        steps=1,
        tokens_per_step=64,
        lr=1e-9,
        held_out_tokens=500,
        dtype="float32",
        init_from=str(find_local_backbone(name)),
    )
    model, log = pretrain(stream, tok, cfg, eval_every=1)
    for (n, p), (_, q) in zip(model.named_parameters(), bb.model.named_parameters()):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=0, msg=n)
    assert log[0]["held_out_lm"] < 6.5
    refused(
        lambda: pretrain(stream, tok, replace(cfg, d=64)),
        "a model of another shape",
        "d=64",
    )


def test_invalid_texts_and_options_are_refused(stream, tok):
    refused(
        lambda: pretrain(stream[:1200], tok, CFG),
        "1200 ids",
        "held_out_tokens=1000",
        "more text",
    )
    refused(
        lambda: pretrain(stream, tok, replace(CFG, held_out_tokens=0)),
        "held_out_tokens=0",
    )
    refused(lambda: pretrain(stream, tok, replace(CFG, d=40)), "multiple of 32")
    refused(
        lambda: pretrain(stream, tok, replace(CFG, family="t5")),
        "family must be 'roberta' or 'gpt2', got 't5'",
    )
    refused(lambda: PretrainConfig(dtype="float8"), "'bfloat16'")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the run would use the GPU")
@pytest.mark.parametrize(
    ("instructions", "dtype", "warns"),
    [("AVX2", "bfloat16", True), ("AVX2", "float32", False), ("AVX512", "bfloat16", False)],
)
def test_emulated_bfloat16_is_slow_and_warned_about(
    instructions, dtype, warns, stream, tok, monkeypatch, messages
):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
    pretrain(stream, tok, replace(CFG, steps=1, tokens_per_step=64, dtype=dtype))
    assert any("dtype='float32' is many times faster" in line for line in messages) == warns


def test_a_saved_folder_is_loaded_as_a_backbone(tmp_path):
    tok = train_tokenizer([r["sentence1"] for r in make_rows("sentiment", "train", n=200)], 500)
    model = create_language_model(len(tok), 32, 1).eval()
    before = [p.clone() for p in model.parameters()]
    save_backbone(model, tok, tmp_path / "b")
    # saving does not round the model itself
    assert all(
        torch.equal(a, b) and b.dtype == torch.float32 for a, b in zip(before, model.parameters())
    )
    bb = load_backbone(str(tmp_path / "b"))
    for (n, a), (m, b) in zip(model.named_parameters(), bb.model.named_parameters()):
        assert n == m and b.dtype == torch.float32 and torch.equal(a.half().float(), b)
    ids = torch.tensor([tok("a cold beer").input_ids])
    batch = dict(
        input_ids=ids, attention_mask=torch.ones_like(ids), token_type_ids=torch.zeros_like(ids)
    )
    torch.testing.assert_close(
        bb.lm_logits(run_layers(bb, batch).h), model(ids).logits, atol=1e-2, rtol=0
    )
    assert (
        bb.tokenizer("a cold beer", "the soup").input_ids
        == tok("a cold beer", "the soup").input_ids
    )
    assert bb.has_lm_head and bb.max_tokens == 256
    manifest = read_manifest(tmp_path / "b")
    assert {*manifest} == {p.name for p in (tmp_path / "b").iterdir()} - {"SHA256SUMS"}
    assert all(
        sha256 == hashlib.sha256((tmp_path / "b" / name).read_bytes()).hexdigest()
        for name, sha256 in manifest.items()
    )
    assert not list(tmp_path.rglob("*.bin"))
    assert not create_language_model(len(tok), 32, 1).training


def test_a_damaged_file_of_a_saved_backbone_is_named(tmp_path):
    tok = train_tokenizer([r["sentence1"] for r in make_rows("sentiment", "train", n=200)], 500)
    save_backbone(create_language_model(len(tok), 32, 1), tok, tmp_path / "b")
    for file in read_manifest(tmp_path / "b"):
        original = (tmp_path / "b" / file).read_bytes()
        (tmp_path / "b" / file).write_bytes(
            original[:-3] + bytes([original[-3] ^ 1]) + original[-2:]
        )
        with pytest.raises(ValueError, match=f"{file} is damaged or missing: .*SHA256SUMS"):
            load_backbone(str(tmp_path / "b"))
        (tmp_path / "b" / file).write_bytes(original)
    load_backbone(str(tmp_path / "b"))


CHECKPOINT_CONFIG = PretrainConfig(d=32, n_layers=1, steps=4, dtype="float32")
LOG = [dict(step=2, lm=3.5)]


def masters(seed, width=3):
    torch.manual_seed(seed)
    optimizer = MasterWeightOptimizer([torch.nn.Linear(width, width)], CHECKPOINT_CONFIG)
    optimizer.model_parameters[0].sum().backward()
    optimizer.step()
    return optimizer


def test_a_checkpoint_restores_weights_moments_schedule_and_log(tmp_path):
    saved = masters(0)
    assert load_pretraining_checkpoint(tmp_path, CHECKPOINT_CONFIG, masters(1)) == (0, [])
    write_pretraining_checkpoint(tmp_path, CHECKPOINT_CONFIG, saved, 2, LOG)
    (tmp_path / "log.jsonl").unlink()  # the run was killed before it wrote this file
    loaded = masters(1)
    assert load_pretraining_checkpoint(tmp_path, CHECKPOINT_CONFIG, loaded) == (2, LOG)
    assert str(loaded.state_dict()) == str(saved.state_dict())
    assert torch.equal(loaded.model_parameters[0], saved.master_parameters[0])
    assert read_records(tmp_path / "log.jsonl")[0]["lm"] == 3.5
    with pytest.raises(ValueError, match="holds another run .lr was .* and is now 0.5.*"):
        load_pretraining_checkpoint(tmp_path, replace(CHECKPOINT_CONFIG, lr=0.5), loaded)


def test_another_run_starts_from_the_weights_only(tmp_path):
    saved = masters(0)
    cfg = replace(CHECKPOINT_CONFIG, init_from=str(tmp_path))
    with pytest.raises(FileNotFoundError, match="there is no checkpoint in init_from="):
        load_master_weights(masters(1), cfg)
    write_pretraining_checkpoint(tmp_path, CHECKPOINT_CONFIG, saved, 2, LOG)
    other = masters(1)
    moments = str(other.state_dict()["optimizer"])
    load_master_weights(other, cfg)
    assert torch.equal(other.master_parameters[0], saved.master_parameters[0])
    assert str(other.state_dict()["optimizer"]) == moments
    with pytest.raises(ValueError, match="is a run of another shape"):
        load_master_weights(masters(1, width=4), cfg)


def test_weights_of_a_backbone_are_used_if_intact_and_of_the_same_shape(tmp_path):
    cfg = replace(CHECKPOINT_CONFIG, init_from=str(tmp_path))
    model = create_language_model(20, 32, 1)
    assert find_weights_file(str(tmp_path)) is None
    save_model(model, tmp_path / "model.safetensors")
    file = find_weights_file(str(tmp_path))
    other = create_language_model(20, 32, 1)
    load_initial_weights(other, file, cfg)
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
    with pytest.raises(ValueError, match="is a model of another shape"):
        load_initial_weights(create_language_model(20, 32, 2), file, cfg)
    write_manifest(tmp_path)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="model.safetensors is damaged or missing: .* Download or"):
        load_initial_weights(other, file, cfg)
    (tmp_path / "SHA256SUMS").unlink()
    with pytest.raises(ValueError, match="model.safetensors is damaged .*Download or save"):
        load_initial_weights(other, file, cfg)
    write_pretraining_checkpoint(tmp_path, CHECKPOINT_CONFIG, masters(0), 2, LOG)
    assert find_weights_file(str(tmp_path)) is None  # the folder of a pretraining run


def test_the_optimizer_is_adamw_in_float32():
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 8)
    twin = torch.nn.Linear(8, 8)
    twin.load_state_dict(net.state_dict())
    cfg = PretrainConfig(lr=1e-2, warmup=2, steps=10, dtype="float32")
    m = MasterWeightOptimizer([net], cfg)
    opt = torch.optim.AdamW(
        [dict(params=[twin.weight], weight_decay=0.01), dict(params=[twin.bias], weight_decay=0.0)],
        betas=(0.9, 0.98),
        eps=1e-6,
    )
    for s in range(4):
        x = torch.randn(4, 8)
        for o in opt.param_groups:
            o["lr"] = 1e-2 * min((s + 1) / 2, 1.0, (10 - s) / 6)
        for n, step in (
            (net, m.step),
            (
                twin,
                lambda: (
                    torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0),
                    opt.step(),
                    opt.zero_grad(),
                ),
            ),
        ):
            n(x).square().sum().backward()
            step()
    torch.testing.assert_close(net.weight, twin.weight)
    torch.testing.assert_close(net.bias, twin.bias)


def test_master_weights_take_steps_that_half_precision_would_round_away():
    net = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.ones_(net.weight)
    m = MasterWeightOptimizer([net], PretrainConfig(lr=1e-4, warmup=1, steps=100))
    for _ in range(60):
        net(torch.ones(1, 4, dtype=torch.bfloat16)).float().sum().backward()
        m.step()
    # 60 steps of 1e-4; one alone rounds away
    assert (
        net.weight.dtype == torch.bfloat16
        and m.master_parameters[0].dtype == torch.float32
        and (m.master_parameters[0] < 0.996).all()
    )
    assert (net.weight < 1).all()


def test_the_learning_rate_warms_up_and_decays():
    cfg = PretrainConfig(lr=3e-3, warmup=4, steps=12)
    m = MasterWeightOptimizer([create_language_model(20, 32, 1)], cfg)
    lrs = []
    for _ in range(12):
        lrs.append(m.optimizer.param_groups[0]["lr"])
        m.optimizer.step()
        m.lr_scheduler.step()
    assert lrs == pytest.approx([cfg.lr * min((s + 1) / 4, 1, (12 - s) / 7.2) for s in range(12)])
    assert [g["weight_decay"] for g in m.optimizer.param_groups] == [0.01, 0.0]
