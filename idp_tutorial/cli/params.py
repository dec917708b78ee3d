"""The command `idp_params`: trained parameters of every method, and the published counts.

Models are built without weights, so a count needs no download and little memory. A row is a
method on one backbone, with the trained parameters of prompt, head and backbone and their
percentage of all parameters. With `--published` the table compares every published count with
the module of this package.
"""

import json as _json
from typing import Any

from idp_tutorial.cli.command_line import Inherited, command, split_names
from idp_tutorial.cli.option_values import refuse_unused_options
from idp_tutorial.utils.config import RunConfig

__all__ = ["idp_params"]


def _format_count(count: float) -> str:
    """Return a count with commas; '-' for a missing one."""
    import pandas as pd

    return "-" if pd.isna(count) else f"{count:,.0f}"


def _format_table(df: Any) -> str:
    """Return a table of counts for the terminal."""
    columns = [c for c in df.select_dtypes("number") if c != "percent"]
    formatters = dict.fromkeys(columns, _format_count)
    return df.to_string(index=False, float_format="{:.4f}".format, formatters=formatters)


def _count_methods(backbone: str, base: RunConfig, methods: list[str] | None) -> tuple[Any, list]:
    """Return the counts of methods as a table, and as rows for JSON."""
    import pandas as pd

    from idp_tutorial.reproduction.efficiency.parameter_counts import count_method_parameters

    df = count_method_parameters(backbone, base, methods)
    rows = []
    for row in df.to_dict("records"):
        rows.append({column: None if pd.isna(value) else value for column, value in row.items()})
    return df.drop(columns="refused") if df.refused.isna().all() else df, rows


@command
def idp_params(
    *,
    backbone: str = "roberta-large",  # a published size, without weights, or another backbone
    prompt_length: Inherited,
    # width of a generator's bottleneck (default: the method's own)
    bottleneck: int | None = None,
    head: Inherited,
    methods: str = "all",  # comma-separated
    published: bool = False,  # print the published counts of IDPG, LPT and ID-SPAM instead
    json: bool = False,  # print one JSON object a line
) -> None:
    """Print the trained parameters of every method, or published counts beside this package's."""
    if published:
        unused = "backbone prompt_length bottleneck head methods"
        refuse_unused_options(idp_params, locals(), unused, "with --published")
    import pandas as pd

    from idp_tutorial.reproduction.efficiency.published_counts import published_counts

    if published:
        rows = published_counts()
        columns = ["paper", "table", "backbone", "method", "reported", "exact", "ours", "status"]
        df = pd.DataFrame(rows)[columns]
    else:
        base = RunConfig(prompt_length=prompt_length, bottleneck=bottleneck, head=head)
        selected = None if methods == "all" else split_names(methods)
        df, rows = _count_methods(backbone, base, selected)
    if not json:
        print(_format_table(df))
        return
    for row in rows:  # `default`: numbers of NumPy
        print(_json.dumps(row, ensure_ascii=False, default=lambda number: number.item()))
