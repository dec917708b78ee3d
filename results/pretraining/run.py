"""Train a small language model on lines of text.

The bundled backbones were trained with these commands, where TEXTS are the files
`imdb_unsup.txt.xz,general.txt.xz` and TASKS is a folder of tasks:

    python -m results.pretraining.run TEXTS --tasks TASKS --out runs/first
    python -m results.pretraining.run TEXTS --tasks TASKS --out runs/second --corpus_dir runs/first
        --init_from runs/first --lr 1e-3 --steps 4000 --seed 1
    python -m results.pretraining.run TEXTS --tasks TASKS --out runs/gpt2 --corpus_dir runs/first
        --family gpt2 --d 128 --steps 2000
    python -m results.pretraining.run TEXTS --tasks TASKS --out runs/gpt2b --corpus_dir runs/first
        --init_from runs/gpt2 --family gpt2 --d 128 --steps 3000 --seed 1

The first two commands trained `tiny`: the second starts from the weights of the first, with a
learning rate schedule of its own. The others trained the decoder `tiny-gpt2` on the same text.
`init_from` also takes a folder of weights, such as the bundled ones in `idp_tutorial/assets`,
so that these can be trained further. The command creates the tokenizer, the token ids and the
model, resumes after a kill, and writes `backbone/` below `out`. On a GPU the model is
compiled; on a CPU it uses as many cores as `OMP_NUM_THREADS` allows.
"""

import sys
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from idp_tutorial.cli.commands import CommandOptions, command, refuse_given
from idp_tutorial.utils.process import handle_messages
from results.pretraining.config import AllowEmpty, PretrainConfig


@dataclass(frozen=True, kw_only=True)
class PretrainOptions(PretrainConfig, CommandOptions):
    """Options of this script: those of the run, its text, its folders and its teacher."""

    text: str  # text files with one document a line, comma-separated; .xz files are read too
    # a folder of tasks: their training texts are added, their held-out texts are left out
    tasks: str | None = None
    out: str = "runs/tiny"  # folder for checkpoint, log and, at the end, `backbone/`
    corpus_dir: str | None = None  # folder for tokenizer and token ids (default: as --out)
    every: int = 250  # steps between checkpoints
    # backbone that initialises the embeddings and whose layers are imitated; '': no teacher
    teacher: Annotated[str, AllowEmpty] = "minilm"


@command(PretrainOptions)
def pretrain_command(options: PretrainOptions, base: Any) -> None:
    """Pretrain a small RoBERTa or GPT-2; run the same command again to resume."""
    if not options.teacher:
        refuse_given(options, "distillation_weight", "without a teacher")
    from idp_tutorial.backbones.load import load_backbone
    from idp_tutorial.core.dtypes import DTYPES
    from results.pretraining.corpus import prepare_text, read_corpus
    from results.pretraining.distillation import (
        DistillationLoss,
        encode_aligned_streams,
        project_teacher_embeddings,
    )
    from results.pretraining.pretrain import (
        check_stream_length,
        pretrain,
        save_backbone,
    )

    cfg = PretrainConfig(**{f.name: getattr(options, f.name) for f in fields(PretrainConfig)})
    encode = embeddings = loss = None
    if options.teacher:
        teacher_bb = load_backbone(options.teacher, attn="eager")
        encode = partial(encode_aligned_streams, teacher_tokenizer=teacher_bb.tokenizer)
    lines = read_corpus(options.text.split(","), options.tasks)
    tokenizer, arrays = prepare_text(
        lines, Path(options.corpus_dir or options.out), cfg.vocab_size, 0, encode
    )
    check_stream_length(len(arrays["stream"]), cfg)  # before the teacher reads it
    if options.teacher:
        embeddings = project_teacher_embeddings(tokenizer, teacher_bb, options.d)
    if options.teacher and options.distillation_weight:
        is_causal = options.family == "gpt2"
        loss = DistillationLoss(
            teacher_bb,
            arrays,
            options.d,
            options.n_layers,
            causal=is_causal,
            seed=options.seed,
            dtype=DTYPES[cfg.dtype],
        )
    with handle_messages():
        model, _ = pretrain(
            arrays["stream"], tokenizer, cfg, Path(options.out), embeddings, loss, options.every
        )
    if options.family == "gpt2":
        tokenizer.mask_token = None  # a decoder has no masks
    save_backbone(model, tokenizer, Path(options.out) / "backbone")


if __name__ == "__main__":
    pretrain_command.main(sys.argv[1:])
