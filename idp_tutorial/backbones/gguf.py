"""The conversion of a quantised GGUF file into a float32 model with its tokenizer.

A GGUF file holds a language model for `llama.cpp`: tensors, settings and the tokenizer in one
file. Its weights are quantised: in `Q4_1`, 32 weights share a scale and an offset, and each has
4 bits. `transformers` reads the format slowly, so the file is converted once and saved as
safetensors. The converted weights are float32, but only as exact as the 4 bits: a dequantised
model is not the original model, and a record has to say which one was used.

How large is the error of 4 bits? Each of the 32 weights of a block is rounded to one of 16
values between the smallest and the largest of the block.
"""

from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from idp_tutorial.utils.checks import UserError

__all__ = ["convert_gguf"]


def _make_pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """Return the pre-tokenizer that a GGUF file names."""
    if name != "smollm":
        raise UserError(
            f"the GGUF file has the pre-tokenizer {name!r}, but only 'smollm' is supported. Use "
            "SmolLM2, or a model in the safetensors format."
        )
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def convert_gguf(
    file: str | Path,  # a GGUF file of a causal language model
    out: str | Path,  # folder to write
) -> None:
    """Dequantise a GGUF model and save it with its tokenizer for `from_pretrained`."""
    from gguf import GGUFReader

    file = Path(file)
    quantised = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, trust_remote_code=False
    )
    del quantised.config.quantization_config
    # `save_pretrained` refuses a model that was quantised, so the weights are copied to a new one
    model = type(quantised)(quantised.config)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(
        file.parent, gguf_file=file.name, trust_remote_code=False
    )
    pre_tokenizer_field = GGUFReader(file).fields["tokenizer.ggml.pre"]
    name = bytes(pre_tokenizer_field.parts[pre_tokenizer_field.data[0]]).decode()
    tokenizer.backend_tokenizer.pre_tokenizer = _make_pre_tokenizer(name)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.init_kwargs.pop("local_files_only", None)  # true for this process only
    tokenizer.save_pretrained(out)
