"""Generation with caches equals generation with whole passes, for prompts of every kind."""

import json
from dataclasses import replace

import pytest
import torch
from small import backbone, config, small_task
from small_models import (
    SMALL_CONFIGS,
    attention_implementations,
    small_backbone,
)

from idp_tutorial.assembly.build import build_model
from idp_tutorial.backbones.fetch import find_fetched_backbone
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.cli.predict import predict_command
from idp_tutorial.core.generation import DecodingState, generate_ids
from idp_tutorial.core.heads import GenerationHead
from idp_tutorial.core.planned_model import PlannedModel
from idp_tutorial.core.steps import Insert
from idp_tutorial.data.tasks import load_task
from idp_tutorial.runs.experiment import Experiment
from idp_tutorial.saving.prompt_files import from_pretrained, save_pretrained
from idp_tutorial.training.evaluation import generate, generate_answers
from idp_tutorial.training.fit import fit

CAUSAL = [n for n in SMALL_CONFIGS if small_backbone(n, attention_implementations(n)[0]).causal]
METHODS = (
    "head-only",
    "prompt-tuning",
    "p-tuning",
    "p-tuning-v2",
    "s-idpg-phm",
    "m-idpg-phm",
    "lpt",
    "lpt-npg",
    "lpt-appg",
    "id-spam",
    "smop",
    "dept",
    "lora",
)
TEXTS = [[7, 9, 11, 6, 8], [12], [30, 31, 32]]


class Tokens:
    """The part of a tokenizer that generation uses."""

    eos_token_id = 2
    pad_token_id = 1
    mask_token_id = None


def model_of(name, method, jolt=0.3, **kw):
    bb = small_backbone(name, attention_implementations(name)[0])
    bb.tokenizer = Tokens()
    task = replace(load_task("in-short"), splits={})
    with pytest.raises(
        ValueError,
        match="max_len=12 leaves no room for a sentence, because the answer .max_answer_len. takes",
    ):
        task.encode(
            [dict(sentence1="a", target="b")], load_backbone("tiny-gpt2").tokenizer, max_len=12
        )
    model = build_model(
        config(
            **{
                **dict(
                    method=method,
                    prompt_length=3,
                    layer=1,
                    bottleneck=8,
                    max_len=40,
                    prompt_dropout=0.0,
                ),
                **kw,
            }
        ),
        bb,
        task,
    )
    with torch.no_grad():
        for p in model.trained_parameters().values():
            p.add_(jolt * torch.randn_like(p))
    return model.eval()


def batch_of(texts, answer_start=None):
    T = max(map(len, texts))
    ids = torch.tensor([[*s, *[1] * (T - len(s))] for s in texts])
    keep = torch.tensor([[1] * len(s) + [0] * (T - len(s)) for s in texts])
    return dict(
        input_ids=ids,
        attention_mask=keep,
        token_type_ids=0 * ids,
        **({} if answer_start is None else dict(answer_start=torch.tensor(answer_start))),
    )


@torch.no_grad()
def step_by_step(model, text, n):
    """Generate by definition: one text, a whole pass for every token, until the end token."""
    new = []
    for _ in range(n):
        token = model(batch_of([[*text, *new]], [len(text)])).argmax(-1).item()
        if token == model.backbone.tokenizer.eos_token_id:
            break
        new.append(token)
    return new


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("method", ["prompt-tuning", "p-tuning-v2", "lpt-npg"])
def test_every_decoder_generates_as_with_whole_passes(name, method):
    model = model_of(name, method)
    assert generate_ids(model, TEXTS, 7) == [step_by_step(model, s, 7) for s in TEXTS]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_generates_as_with_whole_passes(name, method):
    model = model_of(name, method)
    texts = [list(s) for s in TEXTS]
    with torch.no_grad():
        state = DecodingState(model, batch_of(texts))
        for _ in range(5):
            want = model(batch_of(texts, [len(s) for s in TEXTS]))
            torch.testing.assert_close(state.logits, want, atol=1e-4, rtol=1e-4)
            token = torch.randint(5, 60, (3,))
            texts = [[*s, t] for s, t in zip(texts, token.tolist())]
            state.step(token)
    assert generate_ids(model, TEXTS, 6) == [step_by_step(model, s, 6) for s in TEXTS]


@pytest.mark.parametrize("method", METHODS)
def test_no_prompt_depends_on_the_answer(method):
    """The state that predicts the first token is the same for all answers, as in generation."""
    model = model_of("llama", method)
    question = [7, 9, 11]
    answers = ([12, 13], [40, 41, 42, 43])
    head = model.head
    seen = []
    head.forward = lambda ctx: seen.append(ctx.h[:, ctx.tracked_positions["last"]].detach())
    for a in answers:
        model(batch_of([question + a], [3]))
    torch.testing.assert_close(*seen, atol=1e-5, rtol=1e-5)


def test_the_loss_is_over_the_targets_tokens():
    model = model_of("llama", "lpt-npg")
    b = batch_of([[7, 9, 11, 6, 2], [12, 8, 9, 10, 11, 13, 2]], [3, 2])
    want = []
    for i, (n, a) in enumerate([(5, 3), (7, 2)]):
        for j in range(a, n):
            logits = model(batch_of([b["input_ids"][i, :j].tolist()], [a]))
            want.append(torch.nn.functional.cross_entropy(logits, b["input_ids"][i, j : j + 1]))
    torch.testing.assert_close(model.loss(b), torch.stack(want).mean(), atol=1e-5, rtol=1e-5)
    model.train().loss(b).backward()
    assert all(p.grad.abs().sum() > 0 for p in model.sources.parameters())
    assert all(p.grad is None for p in model.lm.parameters())
    with pytest.raises(ValueError, match="the loss needs a target text"):
        model.loss(batch_of([[7, 9, 11]], [3]))


def test_draws_end_tokens_and_several_sequences():
    model = model_of("llama", "lpt-npg")

    def draw(seed, **kw):
        return generate_ids(
            model, TEXTS, 8, do_sample=True, temperature=1.3, top_p=0.9, seed=seed, **kw
        )

    before = torch.get_rng_state()
    assert draw(1) == draw(1) != draw(2) and torch.equal(torch.get_rng_state(), before)
    assert len(draw(1, num_return_sequences=2)) == 6
    new_ids = generate_ids(model, TEXTS, 8)
    Tokens.eos_token_id = new_ids[0][2]
    try:
        assert generate_ids(model, TEXTS, 8)[0] == new_ids[0][: new_ids[0].index(new_ids[0][2])]
    finally:
        Tokens.eos_token_id = 2
    for bad in ([], [[]]):
        with pytest.raises(ValueError, match="at least one token"):
            generate_ids(model, bad)
    with pytest.raises(ValueError, match="max_new_tokens.* must be greater than 0"):
        generate_ids(model, TEXTS, 0)
    with pytest.raises(ValueError, match="max_new_tokens=9000 after . tokens exceeds"):
        generate_ids(model, TEXTS, 9000)
    with pytest.raises(ValueError, match="without beam search do not support"):
        generate_ids(model.train(), TEXTS, 8, num_return_sequences=2)
    assert model.training  # whatever the library says


def test_steps_that_would_not_apply_to_new_tokens_are_refused():
    model = model_of("llama", "lpt-npg")
    ((layer, step),) = model.plan.items()

    class OwnInsert(Insert):
        pass

    for other, kind in (
        (replace(step, update=lambda ctx: 2 * ctx.h), "a step with an update"),
        (OwnInsert(step.source), "a OwnInsert"),
    ):
        model.plan = {layer: other}
        with pytest.raises(ValueError, match=f"the plan has {kind} at layer {layer}"):
            generate_ids(model, TEXTS, 2)


def test_greedy_is_the_librarys_own_without_a_prompt():
    bb = small_backbone("llama")
    bb.tokenizer = Tokens()
    model = PlannedModel(bb, GenerationHead(bb), {}).eval()
    output = bb.model.generate(
        torch.tensor([TEXTS[0]]), max_new_tokens=6, do_sample=False, eos_token_id=2, pad_token_id=1
    )
    want = output[0, 5:].tolist()
    assert generate_ids(model, TEXTS[:1], 6) == [want[: want.index(2)] if 2 in want else want]


@pytest.mark.parametrize("name", CAUSAL)
def test_beam_search_is_the_librarys_own_without_a_prompt(name):
    bb = small_backbone(name, attention_implementations(name)[0])
    bb.tokenizer = Tokens()
    model = PlannedModel(bb, GenerationHead(bb), {}).eval()
    for text in TEXTS:
        output = bb.model.generate(
            torch.tensor([text]),
            attention_mask=torch.ones(1, len(text), dtype=torch.long),
            max_new_tokens=6,
            num_beams=3,
            do_sample=False,
            eos_token_id=2,
            pad_token_id=1,
        )
        want = output[0, len(text) :].tolist()
        want = want[: want.index(2)] if 2 in want else want
        assert generate_ids(model, [text], 6, num_beams=3) == [want]
    assert generate_ids(model, TEXTS, 6, num_beams=3) == [
        ids for text in TEXTS for ids in generate_ids(model, [text], 6, num_beams=3)
    ]


@torch.no_grad()
def beam_search(model, text, n, num_beams):
    """Search by definition: a whole pass for every beam and every token; no end token is found."""
    beams = [([], 0.0)]
    for _ in range(n):
        logits = model(batch_of([[*text, *new] for new, _ in beams], [len(text)] * len(beams)))
        log_probs = logits.log_softmax(-1)
        candidates = []
        for (new, score), row in zip(beams, log_probs, strict=True):
            best = row.topk(num_beams)
            for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                candidates.append(([*new, token], score + value))
        beams = sorted(candidates, key=lambda beam: -beam[1])[:num_beams]
    return beams[0][0]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("method", METHODS)
def test_beam_search_of_every_method_is_that_of_whole_passes(name, method, monkeypatch):
    monkeypatch.setattr(Tokens, "eos_token_id", 98)  # in none of the answers
    model = model_of(name, method)
    want = [beam_search(model, text, 4, 3) for text in TEXTS]
    assert not any(98 in ids for ids in want)
    assert generate_ids(model, TEXTS, 4, num_beams=3) == want


def test_generation_with_weights_in_bfloat16():
    from idp_tutorial.core.dtypes import cast_weights

    model = model_of("llama", "lpt-npg")
    cast_weights(model.lm, torch.bfloat16)
    assert all(len(s) <= 5 for s in generate_ids(model, TEXTS, 5))


def test_models_that_cannot_generate_raise_an_error():
    task = load_task("in-short")
    with pytest.raises(ValueError, match="is an encoder and cannot generate text. Use a decoder"):
        build_model(config(method="lpt-npg"), backbone(), task)
    for method in ("efl", "probe", "side-network"):
        with pytest.raises(ValueError, match=f"'{method}' predicts labels, and"):
            build_model(config(method=method), load_backbone("tiny-gpt2"), task)
    with pytest.raises(ValueError, match="is not answered with a text"):
        model = build_model(config(method="lpt-npg"), backbone(), small_task())
        generate(model, ["A text."], small_task(), config(method="lpt-npg"))
    with pytest.raises(ValueError, match="needs a model that generates text: use a decoder"):
        task.encode(task.splits["test"][:1], backbone().tokenizer, 64)


def test_a_task_of_texts_is_trained_saved_and_loaded(tmp_path):
    task = load_task("in-short")
    task = replace(task, splits={s: rows[:48] for s, rows in task.splits.items()})
    bb = load_backbone("tiny-gpt2")
    cfg = config(
        method="lpt-npg",
        backbone="tiny-gpt2",
        task="in-short",
        steps=6,
        eval_every=6,
        max_len=48,
        bottleneck=64,
    )
    model = build_model(cfg, bb, task)
    log = fit(model, task, cfg)
    assert log.losses[-1] < log.losses[0]
    record = Experiment(cfg, task).score(model, log)
    assert record["metric"] == "exact_match" and 0 <= record["score"] <= 100
    save_pretrained(model, tmp_path, task, cfg)
    again, task2, cfg2 = from_pretrained(tmp_path)
    texts = [r["sentence1"] for r in task.splits["test"][:3]]
    answers = generate(model, texts, task, cfg)
    assert (
        task2.is_generation and answers == generate(again, texts, task2, cfg2) and len(answers) == 3
    )
    with pytest.raises(
        ValueError, match="6 answers to 3 texts: one each"
    ):  # the second text got the first one's
        generate(model, texts, task, cfg, do_sample=True, num_return_sequences=2)
    examples = task.encode(task.splits["test"][:3], bb.tokenizer, 48)
    assert (
        generate_answers(model, examples, task) == answers
    )  # the targets that are there are not read
    assert task.score_outputs([e["target"] for e in examples], examples)[0] == {
        "exact_match": 100.0
    }


@pytest.mark.slow
def test_the_command_generates_as_with_whole_passes_with_a_real_model(tmp_path):
    if not find_fetched_backbone("smollm2"):
        pytest.skip("smollm2 is not on this machine: `make backbones` brings it (93 MB, once)")
    task = replace(load_task("in-short"), splits={}, max_answer_len=6)
    tok = load_backbone("smollm2").tokenizer
    cfg = config(method="lpt-npg", backbone="smollm2", task="in-short", max_len=48)
    model = build_model(cfg, load_backbone("smollm2"), task).eval()
    save_pretrained(model, tmp_path / "model", task, cfg)
    texts = ["The soup is cold.", "My neighbour says that the beer was quite warm after lunch."]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    predict_command(
        model=str(tmp_path / "model"),
        texts=str(tmp_path / "texts.txt"),
        out=str(tmp_path / "out.jsonl"),
        device="cpu",
    )
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for text, answer in zip(texts, answers, strict=True):
        (e,) = task.encode([dict(sentence1=text)], tok, 48, causal=True)
        want = tok.decode(
            step_by_step(model, e["input_ids"][: e["answer_start"]], 6), skip_special_tokens=True
        )
        assert answer["generated"] == " ".join(want.split())


@pytest.mark.parametrize("method", ["prompt-tuning", "p-tuning-v2", "s-idpg-phm", "lpt-npg"])
def test_the_length_is_checked_with_the_prompt_and_before_the_first_token(method, monkeypatch):
    bb = small_backbone("gpt2")
    bb.tokenizer = Tokens()
    cfg = config(method, prompt_length=4)
    model = PlannedModel(bb, GenerationHead(bb), cfg.method_config.plan(bb, cfg)).eval()
    prompt = 0 if method == "lpt-npg" else 4  # positions that the prompt takes
    bb.max_tokens = 20
    new = bb.max_tokens - 5 - prompt  # the longest of `TEXTS` has 5 tokens
    steps = []
    step = DecodingState.step
    monkeypatch.setattr(DecodingState, "step", lambda *a: (steps.append(1), step(*a))[1])
    assert len(generate_ids(model, TEXTS[:1], new)[0]) <= new and steps
    steps.clear()
    too_many = new + 2 if prompt else new + 1
    with pytest.raises(ValueError, match="positions of .*: reduce max_new_tokens"):
        generate_ids(model, TEXTS[:1], too_many)
    assert not steps
