"""Tasks and their data.

The package defines the tasks of the three papers and eight bundled synthetic ones, reads rows from
files and from the Hugging Face hub, checks and samples them, converts them to padded batches of
tokens, and computes the metrics.

Modules:

- `config`: The options of a table of texts, which the commands and `load_table_task` read.
- `encoding`: Turn rows into token ids and examples into padded batches of tensors.
- `few_shot`: Sample a few-shot training set and a validation set from many rows.
- `file_readers`: Read rows from CSV, TSV, JSON, Parquet, Excel and plain-text files.
- `grammars`: Sentence patterns and word lists that generate the rows of four small text tasks.
- `long_texts`: Cut long texts before they are tokenized, since a model reads their first tokens
  only.
- `metrics`: Metrics of the papers and of everyday use, in percent, computed from predictions and
  labels.
- `rows`: Check rows, convert records of benchmarks to rows, and group the rows of a question.
- `splits`: Load the splits of a task from a folder or from the Hugging Face hub, and divide them.
- `synthetic`: Eight small English text tasks that need no download, four of which a bag-of-words
  model cannot solve.
- `table_checks`: Problems of a table of texts: all of them in one run, each with a count and two
  examples.
- `task`: The definition of a task: its labels, splits, templates, encoding and metrics.
- `tasks`: The registry of the papers' tasks and of the bundled ones, and the function that loads a
  task.
- `templates`: Encode rows with LPT's templates and truncate the sentences, not the template.
- `user_data`: Define a task from the user's own rows: a table, a folder of splits, a dataset.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
