"""Rename options in records, saved models and YAML files that version 0.2 wrote.

Version 0.3 renamed many options (`t` is `prompt_length`, `k` is `shots`). Saved models and records
of 0.2 are converted when they are read; `python -m idp_tutorial.utils.migration PATH ...` converts
files in place. The module will be removed in 0.3.1.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from idp_tutorial.utils.checks import UserError, explain_os_error
from idp_tutorial.utils.durable import dump_record, load_record, write_atomically

RENAMED_OPTIONS = {
    "k": "shots",
    "draw": "split_seed",
    "draws": "split_seeds",
    "readout": "pooling",
    "sentence_pass": "sentence_pooling",
    "t": "prompt_length",
    "m": "bottleneck",
    "no_decay": "no_decay_on_bias_and_norm",
    "head_hidden": "two_layer_head",
    "share": "parameter_sharing",
    "reads": "generator_input",
    "inject": "insertion",
    "way": "insertion",
    "embeds": "attention_input",
    "skip_last": "exclude_last_token",
    "out_relu": "prompt_relu",
    "start": "init_from",
    "looks": "evaluations",
    "rates": "learning_rates",
    "head_first": "tune_head_first",
    "plain_draw": "stratified",
    "lower_dropout": "dropout_below_prompt",
}

RENAMED_RECORD_KEYS = {
    "made": "provenance",
    "tried": "learning_rates_tried",
    "edge": "lr_at_grid_edge",
    "lr_selected": "lr_selection",
    "chosen": "probe",
    "sizes": "split_sizes",
    "selected": "checkpoint_selection",
    "found": "measurements",
    "shots": "target_shots",
    "majority": "majority_score",
    "map": "label_map",
    "samples": "target_train_size",
    "stage_lr": "stage_learning_rate",
    "before": "logits_before",
    "errors": "standard_errors",
    "steps_95": "steps_to_95_percent",
}

RENAMED_TASK_FIELDS = {
    "words": "label_words",
    "text": "is_generation",
    "limits": "label_range",
    "hub": "hub_dataset",
    "held_out": "max_validation_size",
    "grouped": "grouping",
    "unpack": "convert_row",
    "answer_len": "max_answer_len",
    "may_be_empty": "allow_empty_text",
    "templates_from": "template_source",
}

# a mapping with one of these keys was written by version 0.2
_OLD_ONLY = {"k", "draw", "t", "m", "readout", "inject", "way", "plain_draw"}
_INVERSE = {"true": "false", "yes": "no", "on": "off", "false": "true", "no": "yes", "off": "on"}


def migrate_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of version 0.2 under their present names; other keys are unchanged."""
    method = options.get("method", "")
    migrated: dict[str, Any] = {}
    for name, value in options.items():
        if name in ("inject", "way"):
            # only P-tuning v2 used `way`, and only M-IDPG `inject`, whose default was 'add'
            applies = name == "way" if method == "p-tuning-v2" else name == "inject"
            is_default = value is None or (name == "inject" and value == "add")
            if applies and not is_default:
                migrated["insertion"] = value
            else:
                migrated.setdefault("insertion", None)
        elif name == "plain_draw":
            migrated["stratified"] = not value
        else:
            migrated[RENAMED_OPTIONS.get(name, name)] = value
    return migrated


def migrate_record(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record of version 0.2 with present names; a present record is returned unchanged."""
    if not _OLD_ONLY & set(record) and "made" not in record:
        return record
    if "seed" not in record:
        return _migrate_timing(record)
    renamed = {RENAMED_RECORD_KEYS.get(name, name): value for name, value in record.items()}
    migrated = migrate_options(renamed)
    provenance = migrated.get("provenance")
    if isinstance(provenance, dict):
        names = {"start": "started_at", "clean": "worktree_clean"}
        migrated["provenance"] = {names.get(name, name): v for name, v in provenance.items()}
    errors = migrated.get("standard_errors")
    if isinstance(errors, dict):
        migrated["standard_errors"] = {
            re.sub(r"^found\.", "measurements.", name): value for name, value in errors.items()
        }
    return migrated


def _migrate_timing(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a time measurement, whose other fields are not options."""
    if "method" not in record or "t" not in record:
        return record
    migrated = {"prompt_length" if name == "t" else name: v for name, v in record.items()}
    if migrated.get("grow") == "t":  # the axis of a scaling measurement
        migrated["grow"] = "prompt_length"
    return migrated


def migrate_task(task: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a saved task of version 0.2 under their present names."""
    return {RENAMED_TASK_FIELDS.get(name, name): value for name, value in task.items()}


def migrate_description(description: dict[str, Any]) -> dict[str, Any]:
    """Return the description in a saved model of version 0.2 with present names."""
    migrated = dict(description)
    if isinstance(migrated.get("cfg"), dict) and _OLD_ONLY & set(migrated["cfg"]):
        migrated["cfg"] = migrate_options(migrated["cfg"])
    if isinstance(migrated.get("task"), dict) and "words" in migrated["task"]:
        migrated["task"] = migrate_task(migrated["task"])
    return migrated


def explain_renamed_option(name: str) -> str | None:
    """Return what an option of version 0.2 was renamed to; None if it is not a name of 0.2."""
    if name not in RENAMED_OPTIONS:
        return None
    explanation = f"was renamed to --{RENAMED_OPTIONS[name]} in version 0.3"
    if name == "plain_draw":
        return f"{explanation}, with the opposite meaning: use --no_stratified"
    return explanation


def _migrate_jsonl(text: str) -> str:
    lines = []
    has_changed = False
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = load_record(line)
        except ValueError as e:
            raise UserError(f"line {number} is not a record ({e})") from None
        migrated = migrate_record(record)
        has_changed = has_changed or migrated is not record
        lines.append(line if migrated is record else dump_record(migrated))
    return "".join(f"{line}\n" for line in lines) if has_changed else text


def _rename_yaml_key(match: re.Match) -> str:
    """Return a line `key: value` with the present name of the option; comments are kept."""
    key, value = match[1], match[2]
    name = key.replace("-", "_")
    if name == "plain_draw":
        word = value.partition("#")[0].strip()
        inverse = _INVERSE.get(word.lower(), word)
        return f"stratified:{value.replace(word, inverse, 1)}" if word else "stratified:"
    return f"{RENAMED_OPTIONS.get(name, key)}:{value}"


def _migrate_yaml(text: str) -> str:
    return re.sub(r"^([A-Za-z_][\w-]*):(.*)$", _rename_yaml_key, text, flags=re.MULTILINE)


def _read_and_convert(path: Path) -> tuple[str, str]:
    """Return the text of a file before and after the conversion."""
    converters = {".jsonl": _migrate_jsonl, ".yaml": _migrate_yaml, ".yml": _migrate_yaml}
    if path.suffix not in converters:
        raise UserError(
            f"{path} cannot be converted: give a .jsonl, .yaml or .yml file (saved models need no "
            "conversion, because they are converted when they are loaded)."
        )
    text = path.read_text(encoding="utf-8")
    try:
        return text, converters[path.suffix](text)
    except ValueError as e:
        raise UserError(f"{path}: {e}; nothing was converted.") from None


def migrate_file(path: Path | str) -> bool:
    """Rewrite a `.jsonl` or `.yaml` file of version 0.2; return whether it changed.

    Raises: `UserError` for another kind of file, or a damaged line; nothing is written then.
    """
    text, migrated = _read_and_convert(Path(path))
    if migrated != text:
        write_atomically(path, migrated.encode())
    return migrated != text


def main(arguments: list[str] | None = None) -> int:  # exit status
    """Convert the files given on the command line, and all records below the folders given."""
    parser = argparse.ArgumentParser(
        prog="python -m idp_tutorial.utils.migration",
        description="Convert records and YAML files of version 0.2, in place.",
    )
    parser.add_argument(
        "paths", nargs="+", type=Path, help="files, or folders whose .jsonl files are converted"
    )
    files: list[Path] = []
    for path in parser.parse_args(arguments).paths:
        files += sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    try:
        for file in files:  # nothing is written unless all files can be converted
            _read_and_convert(file)
        for file in files:
            print(f"{file}: {'converted' if migrate_file(file) else 'nothing to convert'}")
    except (OSError, ValueError) as e:
        print(explain_os_error(e) if isinstance(e, OSError) else e, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
