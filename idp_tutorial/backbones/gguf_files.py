"""Conversion of a GGUF file, whose weights are quantised, to a folder for `from_pretrained`."""

import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

from tokenizers import pre_tokenizers

from idp_tutorial.utils.checks import UserError


def convert_gguf(
    file: str | Path,  # a GGUF file of a causal language model
    out: str | Path,  # folder to write
) -> None:
    """Dequantise a GGUF model and save it with its tokenizer for `from_pretrained`.

    In the quantisation `Q4_1`, 32 weights share a scale and an offset, and each has 4 bits: it is
    rounded to one of 16 values between the smallest and the largest of its block. The result is
    float32, but only as exact as these values. Transformers reads GGUF slowly, so it is done once.
    """
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = Path(file)
    quantised = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype="float32", trust_remote_code=False
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
    if name != "smollm":
        raise UserError(
            f"the GGUF file has the pre-tokenizer {name!r}, but only 'smollm' is supported. Use "
            "SmolLM2, or a model in the safetensors format."
        )
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.init_kwargs.pop("local_files_only", None)  # true for this process only
    tokenizer.save_pretrained(out)


_CONVERT_COMMAND = (
    "import sys; from idp_tutorial.backbones.gguf_files import convert_gguf; "
    "convert_gguf(*sys.argv[1:])"
)


def convert_gguf_in_subprocess(
    gguf_file: Path,  # as for `convert_gguf`
    model_folder: Path,  # folder to write
) -> None:
    """Run `convert_gguf` in a process of its own, so that its memory is freed.

    Raises: `UserError` with the last line of the process if it fails.
    """
    package_parent = str(Path(str(files("idp_tutorial"))).parent)
    python_path = [package_parent, os.environ.get("PYTHONPATH", "")]
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, python_path)),
    }
    command = [sys.executable, "-c", _CONVERT_COMMAND, str(gguf_file), str(model_folder)]
    process = subprocess.run(command, capture_output=True, text=True, env=env)
    if process.returncode:
        lines = process.stderr.strip().splitlines() or ["no message; is there enough memory?"]
        raise UserError(
            f"{gguf_file.name} cannot be converted (exit status {process.returncode}: "
            f"{lines[-1][:200]})."
        )
