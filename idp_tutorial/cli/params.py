"""The command `idp params`: trained parameters of every method, and the published counts.

Models are built without weights, so a count needs no download and little memory. A row is a
method on one backbone, with the trained parameters of prompt, head and backbone and their
percentage of all parameters. With `--published` the table compares every published count with
the module of this package.
"""

import json
from dataclasses import dataclass
from typing import Any

from idp_tutorial.cli.commands import CommandOptions, command, refuse_given, split_names
from idp_tutorial.utils.checks import UserError

__all__ = ["ParamsOptions", "params_command"]


def _format_count(count: float) -> str:
    """Return a count with commas; '-' for a missing one."""
    import pandas as pd

    return "-" if pd.isna(count) else f"{count:,.0f}"


def _format_table(df: Any) -> str:
    """Return a table of counts for the terminal."""
    columns = [c for c in df.select_dtypes("number") if c != "percent"]
    formatters = dict.fromkeys(columns, _format_count)
    return df.to_string(index=False, float_format="{:.4f}".format, formatters=formatters)


def _count_methods(backbone: str, base: Any, methods: list[str] | None) -> tuple[Any, list]:
    """Return the counts of methods as a table, and as rows for JSON."""
    import pandas as pd

    from idp_tutorial.reproduction.efficiency.parameter_counts import count_method_parameters
    from idp_tutorial.reproduction.papers.protocols import own_prompt_lengths

    df = count_method_parameters(backbone, base, methods, own_prompt_lengths())
    rows = []
    for row in df.to_dict("records"):
        rows.append({column: None if pd.isna(value) else value for column, value in row.items()})
    return df.drop(columns="refused") if df.refused.isna().all() else df, rows


@dataclass(frozen=True, kw_only=True)
class ParamsOptions(CommandOptions):
    """Options of `idp params`."""

    # a published size, without weights, or another backbone
    backbone: str = "roberta-large"
    methods: str = "all"  # comma-separated
    published: bool = False  # print the published counts of IDPG, LPT and ID-SPAM instead
    json: bool = False  # print one JSON object a line


@command(ParamsOptions, run_options=("head", "two_layer_head", "prompt_length", "bottleneck"))
def params_command(options: ParamsOptions, base: Any) -> None:
    """Print the trained parameters of every method, or published counts beside this package's.

    Without prompt_length each method has that of its own paper. A smaller table:

    idp params --backbone roberta-base --methods lpt-npg,lora
    """
    import pandas as pd

    from idp_tutorial.assembly.config import RunOptions
    from idp_tutorial.reproduction.efficiency.published_counts import published_counts

    if options.published:
        refuse_given(options, "backbone methods", "with published")
        if base != RunOptions():
            raise UserError("options of methods and of the head are not used with published.")
        rows = published_counts()
        columns = ["paper", "table", "backbone", "method", "reported", "exact", "ours", "status"]
        df = pd.DataFrame(rows)[columns]
    else:
        selected = None if options.methods == "all" else split_names(options.methods)
        df, rows = _count_methods(options.backbone, base, selected)
    if not options.json:
        print(_format_table(df))
        return
    for row in rows:  # `default`: numbers of NumPy
        print(json.dumps(row, ensure_ascii=False, default=lambda number: number.item()))
