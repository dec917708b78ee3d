"""Checks of arguments, durable files and versions; every package may import them.

Modules:

- `batch`: A batch: tensors by name, and what must be known of them outside of the tensors.
- `checks`: Checks of arguments, files and packages, with error messages that say what fixes the
  problem.
- `digests`: Digests of bytes and files, and the manifest of a folder, with which its files are
  compared.
- `durable_files`: Files that survive kills, power cuts, full disks, damage, and two processes at
  once.
- `hub_access`: Whether the Hugging Face hub can be reached, and offline mode where it cannot.
- `options`: Options: fields of dataclasses, from which checks, commands, help and tables are
  derived.
- `process`: State of the process: its rank, and the handler of progress messages.
- `records`: Records of runs as lines of JSON: how they are written, read and selected, and their
  provenance.
- `schemas`: What a type hint says about a value: the check of options and of what was read from a
  file.
- `tensor_files`: Tensors with their description, or the state of a run, in one file with a digest
  of every byte.
"""
