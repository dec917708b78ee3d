"""Pretraining: tokenizer, windows, masks, losses; a resumed run equals an uninterrupted one."""

import json
import lzma
from dataclasses import replace

import numpy as np
import pytest
import torch

from idp_tutorial.backbones.load import find_local_backbone, load_backbone
from idp_tutorial.data.synthetic import make_rows
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.reproduction.pretraining import corpus, language_modelling
from idp_tutorial.reproduction.pretraining import pretrain as pretraining
from idp_tutorial.reproduction.pretraining.corpus import (
    LABEL_WORDS,
    draw_batch,
    encode_stream,
    exclude_overlapping_lines,
    prepare_text,
    read_lines,
    train_tokenizer,
)
from idp_tutorial.reproduction.pretraining.language_modelling import (
    create_language_model,
    evaluate_held_out,
    lm_loss,
    mask_tokens,
    sample_next_tokens,
)
from idp_tutorial.reproduction.pretraining.master_weights import MasterWeightOptimizer
from idp_tutorial.reproduction.pretraining.pretrain import PretrainConfig, pretrain
from idp_tutorial.utils import tensor_files
from idp_tutorial.utils.records import read_records
from idp_tutorial.utils.snapshots import write_snapshot


@pytest.fixture(scope="module")
def lines():
    return [
        r["sentence1"] for t in ("sentiment", "questions") for r in make_rows(t, "train", n=400)
    ]


@pytest.fixture(scope="module")
def tok(lines):
    return train_tokenizer(lines, 700)


@pytest.fixture(scope="module")
def stream(lines, tok):
    return encode_stream(lines, tok)


# --- tokenizer


def test_encoded_text_is_framed_and_decodes_to_itself(tok, lines):
    for s in lines[:50]:
        ids = tok(s).input_ids
        assert tok.decode(ids[1:-1]).strip() == s.lower() and (ids[0], ids[-1]) == (
            tok.bos_token_id,
            tok.eos_token_id,
        )
        assert tok.unk_token_id not in ids
    non_ascii = "naïve 北京 🙂 ﬁ"
    # NFKC, bytes
    assert tok.decode(tok(non_ascii).input_ids[1:-1]).strip() == "naïve 北京 🙂 fi"
    assert tok.unk_token_id not in tok(non_ascii).input_ids
    a, b = (tok(s, add_special_tokens=False).input_ids for s in ("a cold beer", "the soup"))
    assert tok("a cold beer", "the soup").input_ids == [0, *a, 2, 2, *b, 2]
    assert [
        tok.bos_token_id,
        tok.pad_token_id,
        tok.eos_token_id,
        tok.unk_token_id,
        tok.mask_token_id,
    ] == [0, 1, 2, 3, 4]
    assert tok.cls_token_id == 0 and tok.sep_token_id == 2


@pytest.mark.parametrize("tokenizer_name", ["new", "tiny"])
def test_label_words_are_single_tokens(tokenizer_name, tok):
    tok = tok if tokenizer_name == "new" else load_backbone("tiny").tokenizer
    for w in LABEL_WORDS:
        assert len(tok(" " + w, add_special_tokens=False).input_ids) == 1, w
    for t in TASKS.values():
        if t.label_words:
            assert len({*t.word_ids(tok)}) == len(t.labels)


@pytest.mark.parametrize("tokenizer_name", ["new", "tiny"])
def test_mask_includes_the_space_before_it(tokenizer_name, tok):
    tok = tok if tokenizer_name == "new" else load_backbone("tiny").tokenizer

    def ids(s):
        return tok(s, add_special_tokens=False).input_ids

    prefix = ids("it was")
    assert ids("it was <mask>") == ids("it was<mask>") == [*prefix, tok.mask_token_id]
    assert ids("it was <mask> .") == [*prefix, tok.mask_token_id, *ids(" .")]


# --- text


def test_lines_are_read_and_encoded_as_a_stream(tok, tmp_path):
    (tmp_path / "a.txt").write_text("one beer\n\n  two beers \n")
    (tmp_path / "b.txt.xz").write_bytes(lzma.compress(b"a third\n"))
    assert list(read_lines(tmp_path / "a.txt", tmp_path / "b.txt.xz")) == [
        "one beer",
        "two beers",
        "a third",
    ]
    with pytest.raises(FileNotFoundError, match="no text file at .*one document a line"):
        list(read_lines(tmp_path / "c.txt"))
    s = encode_stream(["one beer", "two beers"] * 600, tok)  # more than one chunk
    assert (
        s.dtype == np.uint16
        and (s == tok.eos_token_id).sum() == 1200
        and s[:8].tolist() == s[len(s) // 2 :][:8].tolist()
    )
    assert (
        tok.decode(s[: len(s) // 600]).split() == ["one", "beer</s>", "two", "beers</s>"]
        and len(encode_stream([], tok)) == 0
    )


def test_windows_are_random_parts_of_the_stream(stream):
    def draw(seed, **kw):
        return draw_batch(stream, 2048, np.random.default_rng(seed), **kw)

    x = draw(0, lengths=(64,), p=(1.0,))
    assert x.shape == (32, 64) and (x[:, 0] == 0).all() and x.dtype == torch.int64
    assert torch.equal(x, draw(0, lengths=(64,), p=(1.0,)))
    assert {draw(i).shape[1] for i in range(60)} == {32, 64, 128, 256}
    assert all(2048 - 256 < draw(i).numel() <= 2048 for i in range(20))
    text = stream.tolist()
    row = x[3, 1:].tolist()
    assert any(text[i : i + 63] == row for i in range(len(text)))
    assert (
        draw_batch(stream[:20], 2048, np.random.default_rng(0)).shape[1] == 20
    )  # a short stream is one window


def test_task_rows_are_read_as_sentences(tmp_path):
    rows = [
        dict(sentence1=" a pair ", sentence2="of texts", label=0),
        dict(sentence1="alone", label=1),
    ]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "r.jsonl.xz").write_bytes(lzma.compress((tmp_path / "r.jsonl").read_bytes()))
    for name in ("r.jsonl", "r.jsonl.xz"):
        assert list(read_lines(tmp_path / name)) == ["a pair", "of texts", "alone"]


def test_lines_that_overlap_with_held_out_texts_are_excluded():
    held_out = "one two three four five six seven eight nine ten eleven twelve thirteen"
    cut = " ".join(held_out.split()[1:])
    # eleven consecutive words may be chance
    assert list(
        exclude_overlapping_lines(
            [
                held_out.upper() + "!",
                "so: " + cut + " and on",
                " ".join(held_out.split()[:11]),
                "other",
            ],
            [held_out],
        )
    ) == [" ".join(held_out.split()[:11]), "other"]
    # shorter than twelve words: the whole text
    assert list(
        exclude_overlapping_lines(["It is fine.", "it is fine too", ""], ["it is, fine"])
    ) == ["it is fine too", ""]


def test_text_is_prepared_once(lines, tmp_path):
    tok, a = prepare_text(lines, tmp_path, 700)
    tok2, b = prepare_text(lines, tmp_path, 700)  # loaded
    assert np.array_equal(a["stream"], b["stream"]) and tok.get_vocab() == tok2.get_vocab()
    assert (a["stream"] == 2).sum() == len(lines) and not (tmp_path / "text.tmp").exists()
    _, c = prepare_text(["only once", *lines[:50] * 2], tmp_path / "more", 700)
    # the end of the stream, which is held out, has texts that occur only once
    assert "only once" in prepare_text(["only once", *lines[:50] * 2], tmp_path / "more", 700)[
        0
    ].decode(c["stream"][-12:])
    for changes in (dict(lines=lines[1:]), dict(vocab_size=600), dict(seed=1)):
        with pytest.raises(ValueError, match="holds other text.*Use another folder"):
            prepare_text(**{**dict(lines=lines, out=tmp_path, vocab_size=700), **changes})


def test_the_tokenizer_is_trained_on_a_random_sample(tmp_path, monkeypatch):
    """Repeated texts come first in the stream, but not in the training texts of the tokenizer."""
    training_texts = []
    original = corpus.train_tokenizer

    def train_tokenizer(lines, vocab_size):
        training_texts.extend(lines)
        return original(lines, vocab_size)

    monkeypatch.setattr(corpus, "train_tokenizer", train_tokenizer)
    prepare_text([f"only once {i}" for i in range(200)] + ["repeated"] * 200, tmp_path, 400)
    assert len(training_texts) == 400 and 60 < training_texts[:200].count("repeated") < 140


# --- masks and loss


def test_masks_follow_the_80_10_10_rule():
    V = 700
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(rng.integers(0, V, (400, 500)))
    original_ids = ids.clone()
    masked, positions, targets = mask_tokens(ids, 4, V, rng)
    assert torch.equal(ids, original_ids) and torch.equal(targets, ids.flatten()[positions])
    assert targets.min() >= 5  # special tokens are never predicted
    x = masked.flatten()[positions]
    changed = (masked != ids).flatten()
    changed[positions] = False
    assert not changed.any()
    n = (ids >= 5).sum().item()
    assert len(positions) / n == pytest.approx(0.15, abs=0.005)
    masked_fraction = (x == 4).float().mean().item()
    unchanged_fraction = (x == targets).float().mean().item()
    assert (
        masked_fraction == pytest.approx(0.8, abs=0.01)
        and unchanged_fraction == pytest.approx(0.1, abs=0.01)
        and x[x != 4].min() >= 5
    )
    assert len(mask_tokens(ids[:2], 4, V, rng, p=0.0)[1]) == 0


def test_next_tokens_are_of_the_same_window():
    ids = torch.arange(60).view(3, 20)
    inputs, positions, targets = sample_next_tokens(ids, np.random.default_rng(0), p=0.5)
    assert (
        torch.equal(inputs, ids)
        and torch.equal(targets, positions + 1)
        and (positions % 20 != 19).all()
        and 15 < len(positions) < 45
    )


@pytest.mark.parametrize("family", ["roberta", "gpt2"])
def test_the_loss_equals_that_of_transformers(family, stream, tok):
    torch.manual_seed(0)
    model = create_language_model(len(tok), 32, 2, family=family).eval()
    rng = np.random.default_rng(0)
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.2)
    ids = draw_batch(stream, 1024, rng)
    inputs, positions, targets = (
        mask_tokens(ids, 4, len(tok), rng)
        if family == "roberta"
        else sample_next_tokens(ids, rng, 1.0)
    )
    labels = torch.full_like(ids.flatten(), -100)
    labels[positions] = targets
    outputs = model(input_ids=inputs, labels=labels.view_as(ids) if family == "roberta" else ids)
    loss, acc = lm_loss(model, model.base_model(inputs).last_hidden_state, positions, targets)
    torch.testing.assert_close(loss, outputs.loss)
    predictions = outputs.logits.flatten(0, 1)[positions].argmax(-1)
    assert acc == (predictions == targets).float().mean()


def test_held_out_evaluations_are_repeatable_and_change_nothing(stream, tok):
    model = create_language_model(len(tok), 32, 1).train()
    before = evaluate_held_out(model, stream, tok, 2000, max_batches=2)
    state = torch.get_rng_state()
    assert evaluate_held_out(model, stream, tok, 2000, max_batches=2) == before and model.training
    assert torch.equal(state, torch.get_rng_state())
    # the model is not trained yet
    assert before["lm"] == pytest.approx(np.log(len(tok)), abs=0.1) and before.keys() == {
        "lm",
        "top1",
    }


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


# --- the run

CFG = PretrainConfig(
    d=32, n_layers=1, steps=12, tokens_per_step=256, lr=3e-3, warmup=4, held_out_tokens=1000
)


class KilledError(Exception):
    """Stop a run."""


def ignore(line):
    """Report nothing."""


def without_times(log):
    return [{k: v for k, v in r.items() if k != "tokens_per_s"} for r in log]


@pytest.fixture(scope="module")
def uninterrupted(stream, tok):
    return pretrain(stream, tok, CFG, eval_every=3, report=ignore)


@pytest.mark.parametrize("event,step", [("report", 6), ("report", 12), ("write", 6)])
def test_a_resumed_run_equals_an_uninterrupted_one(
    event, step, uninterrupted, stream, tok, tmp_path, monkeypatch
):
    def stop(line):
        if event == "report" and line.startswith(f"step {step}/"):
            raise KilledError  # the report is before the checkpoint

    original = tensor_files.write_atomically

    def write_half(file, data):
        if event == "write" and file.name == f"checkpoint-{step}.safetensors":
            file.with_name(".checkpoint.part").write_bytes(data[:1000])
            raise KilledError
        original(file, data)

    monkeypatch.setattr(tensor_files, "write_atomically", write_half)
    with pytest.raises(KilledError):
        pretrain(stream, tok, CFG, tmp_path, eval_every=3, report=stop)
    monkeypatch.setattr(tensor_files, "write_atomically", original)
    torch.rand(9)
    reports = []
    model, log = pretrain(stream, tok, CFG, tmp_path, eval_every=3, report=reports.append)
    assert reports[0].startswith(f"step {step}/") and len(reports) == (12 - step) // 3 + 1
    assert without_times(log) == without_times(uninterrupted[1])
    assert (
        all(torch.equal(a, b) for a, b in zip(model.parameters(), uninterrupted[0].parameters()))
        and not model.training
    )
    assert read_records(tmp_path / "log.jsonl") == log
    reports.clear()
    again, _ = pretrain(stream, tok, CFG, tmp_path, eval_every=3, report=reports.append)
    assert not reports and all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters())
    )


def test_a_run_depends_on_its_seed_only(uninterrupted, stream, tok):
    torch.rand(3)
    _, log = pretrain(stream, tok, CFG, eval_every=3, report=ignore)
    assert without_times(log) == without_times(uninterrupted[1])
    _, log = pretrain(stream, tok, replace(CFG, seed=1), eval_every=3, report=ignore)
    assert log[0]["lm"] != uninterrupted[1][0]["lm"]


def test_held_out_text_is_not_trained_on(stream, tok, monkeypatch):
    windows = []
    original = language_modelling.gather_windows

    def gather_windows(stream, positions, **kwargs):
        windows.append(positions)
        return original(stream, positions, **kwargs)

    monkeypatch.setattr(language_modelling, "gather_windows", gather_windows)
    pretrain(stream, tok, replace(CFG, steps=3), eval_every=9, report=ignore)
    n = len(stream) - 1000
    assert len(windows) > 3 and all(positions.max() < n for positions in windows[:3])
    assert all(positions.min() >= n for positions in windows[3:])


def test_the_learning_rate_warms_up_and_decays():
    m = MasterWeightOptimizer([create_language_model(20, 32, 1)], CFG)
    lrs = []
    for _ in range(12):
        lrs.append(m.optimizer.param_groups[0]["lr"])
        m.optimizer.step()
        m.lr_scheduler.step()
    assert lrs == pytest.approx([CFG.lr * min((s + 1) / 4, 1, (12 - s) / 7.2) for s in range(12)])
    assert [g["weight_decay"] for g in m.optimizer.param_groups] == [0.01, 0.0]


def test_a_decoder_is_trained(stream, tok):
    model, log = pretrain(
        stream, tok, replace(CFG, family="gpt2", steps=24), eval_every=12, report=ignore
    )
    assert model.config.model_type == "gpt2" and log[-1]["held_out_lm"] < log[0][
        "held_out_lm"
    ] < np.log(len(tok))


def test_a_loss_that_is_not_finite_ends_the_run(stream, tok, tmp_path, monkeypatch):
    original = pretraining.compute_losses
    pretrain(stream, tok, CFG, tmp_path, eval_every=3, report=ignore, stop_at_step=6)
    checkpoint = (tmp_path / "checkpoint-6.safetensors").read_bytes()
    monkeypatch.setattr(
        pretraining,
        "compute_losses",
        lambda *a, **kw: {k: v * float("nan") for k, v in original(*a, **kw).items()},
    )
    assert_refused(
        lambda: pretrain(stream, tok, CFG, tmp_path, eval_every=3, report=ignore),
        "loss is nan at step 9",
        "lower lr",
    )
    assert (tmp_path / "checkpoint-6.safetensors").read_bytes() == checkpoint


def assert_refused(function, *words, error=ValueError):
    with pytest.raises(error) as e:
        function()
    assert all(word in str(e.value) for word in words), str(e.value)


def test_checkpoints_of_other_runs_or_versions_are_refused(stream, tok, tmp_path):
    pretrain(stream, tok, replace(CFG, steps=2), tmp_path, eval_every=2, report=ignore)
    ckpt = tmp_path / "checkpoint-2.safetensors"

    def resume(**options):
        return pretrain(stream, tok, replace(CFG, steps=2, **options), tmp_path, report=ignore)

    assert_refused(
        lambda: resume(d=64, seed=3),
        "holds another run",
        "d was 32 and is now 64",
        "seed was 0 and is now 3",
        "Use another folder",
    )
    for damaged in (ckpt.read_bytes()[:900], b""):
        ckpt.write_bytes(damaged)
        assert_refused(resume, f"{ckpt} is damaged", "Delete it")
    ckpt.unlink()
    write_snapshot(tmp_path, 3, {"a": 1})
    assert_refused(resume, "are not checkpoints of a pretraining run")


def test_a_damaged_checkpoint_falls_back_to_the_previous_one(stream, tok, tmp_path):
    whole, log = pretrain(
        stream, tok, replace(CFG, steps=6), tmp_path / "a", eval_every=2, report=ignore
    )
    pretrain(
        stream,
        tok,
        replace(CFG, steps=6),
        tmp_path / "b",
        eval_every=2,
        report=ignore,
        stop_at_step=4,
    )
    (tmp_path / "b/checkpoint-4.safetensors").write_bytes(b"half")
    with pytest.warns(
        UserWarning, match="checkpoint-4.* is damaged: .*; the run continues from checkpoint-2"
    ):
        again, _ = pretrain(
            stream, tok, replace(CFG, steps=6), tmp_path / "b", eval_every=2, report=ignore
        )
    for p, q in zip(whole.parameters(), again.parameters()):
        assert torch.equal(p, q)
    assert len(read_records(tmp_path / "b/log.jsonl")) == len(log) == 3


@pytest.mark.parametrize(
    "options",
    [
        dict(steps=0),
        dict(steps=-5),
        dict(n_layers=-1),
        dict(lr=0),
        dict(lr=float("nan")),
        dict(d=33),
        dict(tokens_per_step=0),
        dict(seed=-1),
        dict(distillation_weight=float("nan")),
        dict(family="t5"),
    ],
    ids=str,
)
def test_invalid_options_are_refused(options):
    (name,) = options
    assert_refused(lambda: PretrainConfig(**options), name)


def test_prepared_text_that_has_changed_is_prepared_again(lines, tmp_path):
    _, a = prepare_text(lines, tmp_path, 700)
    ids = np.array(a["stream"])
    data = bytearray((tmp_path / "stream.npy").read_bytes())
    data[-3] ^= 1
    del a
    (tmp_path / "stream.npy").write_bytes(data)
    with pytest.warns(
        UserWarning, match="stream.npy is damaged or missing: the text is prepared again"
    ):
        _, b = prepare_text(lines, tmp_path, 700)
    assert np.array_equal(ids, b["stream"])


def test_a_run_starts_from_the_weights_of_a_finished_run(stream, tok, tmp_path):
    """It gets the weights but not the optimizer, and can be resumed itself."""
    a = tmp_path / "a"
    b = tmp_path / "b"
    old, log = pretrain(stream, tok, replace(CFG, steps=40), a, eval_every=40, report=ignore)
    cfg = replace(CFG, steps=4, seed=1, lr=1e-9, init_from=str(a))
    new, more = pretrain(stream, tok, cfg, b, eval_every=4, report=ignore)
    for p, q in zip(old.parameters(), new.parameters()):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=0)
    assert abs(more[0]["held_out_lm"] - log[-1]["held_out_lm"]) < 1e-3 and more[0]["step"] == 4
    whole, _ = pretrain(
        stream, tok, cfg := replace(cfg, lr=1e-3), tmp_path / "c", eval_every=2, report=ignore
    )
    pretrain(stream, tok, cfg, tmp_path / "d", eval_every=2, stop_at_step=2, report=ignore)
    again, _ = pretrain(stream, tok, cfg, tmp_path / "d", eval_every=2, report=ignore)
    for p, q in zip(whole.parameters(), again.parameters()):
        assert torch.equal(p, q)
    assert_refused(
        lambda: pretrain(stream, tok, replace(cfg, d=64), report=ignore),
        "another shape",
        "'d': 32",
        "d=64",
    )
    missing = replace(cfg, init_from=str(tmp_path / "none"))
    assert_refused(
        lambda: pretrain(stream, tok, missing, report=ignore),
        "no checkpoint in",
        "idp_pretrain",
        error=FileNotFoundError,
    )


def test_a_run_in_several_processes_equals_one_run(stream, tok, tmp_path):
    """A process may end between two evaluations."""
    cfg = replace(CFG, steps=6)
    for stop in (2, 4):
        pretrain(stream, tok, cfg, tmp_path / "a", eval_every=5, stop_at_step=stop, report=ignore)
    again, log = pretrain(stream, tok, cfg, tmp_path / "a", eval_every=5, report=ignore)
    whole, _ = pretrain(stream, tok, cfg, eval_every=5, report=ignore)
    assert [r["step"] for r in log] == [2, 4, 5, 6]
    for p, q in zip(whole.parameters(), again.parameters()):
        assert torch.equal(p, q)
    _, log = pretrain(stream, tok, cfg, stop_at_step=0, report=ignore)
    assert log == []


@pytest.mark.parametrize("n_layers,reason", [(9, "it has no "), (4, "layer")])
def test_weights_of_another_depth_are_refused(n_layers, reason, stream):
    tok = load_backbone("tiny").tokenizer
    cfg = replace(
        CFG, d=192, n_layers=n_layers, steps=1, init_from=str(find_local_backbone("tiny"))
    )
    assert_refused(
        lambda: pretrain(stream, tok, cfg, report=ignore), "another shape", reason, "n_layers"
    )


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
    model, log = pretrain(stream, tok, cfg, eval_every=1, report=ignore)
    for (n, p), (_, q) in zip(model.named_parameters(), bb.model.named_parameters()):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=0, msg=n)
    assert log[0]["held_out_lm"] < 6.5
    assert_refused(
        lambda: pretrain(stream, tok, replace(cfg, d=64), report=ignore),
        "a model of another shape",
        "d=64",
    )


def test_invalid_texts_and_options_are_refused(stream, tok):
    assert_refused(
        lambda: pretrain(stream[:1200], tok, CFG, report=ignore),
        "1200 ids",
        "held_out_tokens=1000",
        "more text",
    )
    assert_refused(
        lambda: pretrain(stream, tok, replace(CFG, held_out_tokens=0), report=ignore),
        "held_out_tokens=0",
    )
    assert_refused(
        lambda: pretrain(stream, tok, replace(CFG, d=40), report=ignore), "multiple of 32"
    )
    assert_refused(
        lambda: pretrain(stream, tok, replace(CFG, family="t5"), report=ignore),
        "family must be 'roberta' or 'gpt2', got 't5'",
    )
    assert_refused(lambda: PretrainConfig(dtype="float8"), "'bfloat16'")


def test_overlaps_are_found_in_any_script():
    assert [*exclude_overlapping_lines(["это тест", "a line"], ["Это тест!"])] == ["a line"]


def test_a_batch_has_at_least_one_prediction():
    ids = torch.full((1, 4), 300)
    for _, positions, targets in (
        mask_tokens(ids, 4, 400, np.random.default_rng(0), 1e-9),
        sample_next_tokens(ids, np.random.default_rng(0), 1e-9),
    ):
        assert len(positions) == 1 and targets.tolist() == [300]
    drawn = {int(sample_next_tokens(ids, np.random.default_rng(i), 1e-9)[1]) for i in range(40)}
    assert drawn == {0, 1, 2}  # all positions but the last
