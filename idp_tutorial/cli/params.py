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
    from idp_tutorial.reproduction.efficiency.parameter_counts import count_method_parameters
    from idp_tutorial.reproduction.efficiency.published_counts import published_counts
    from idp_tutorial.reproduction.papers.protocols import own_prompt_lengths

    if options.published:
        refuse_given(options, "backbone methods", "with published")
        if base != RunOptions():
            raise UserError("options of methods and of the head are not used with published.")
        rows = published_counts()
        columns = ["paper", "table", "backbone", "method", "reported", "exact", "ours", "status"]
        df = pd.DataFrame(rows)[columns]
    else:
        selected = None if options.methods == "all" else split_names(options.methods)
        df = count_method_parameters(options.backbone, base, selected, own_prompt_lengths())
        rows = df.astype(object).where(df.notna(), None).to_dict("records")
        if df.refused.isna().all():
            df = df.drop(columns="refused")
    if options.json:
        for row in rows:  # `default`: numbers of NumPy
            print(json.dumps(row, ensure_ascii=False, default=lambda number: number.item()))
        return
    counts = [column for column in df.select_dtypes("number") if column != "percent"]
    df[counts] = df[counts].map(lambda n: "-" if pd.isna(n) else f"{n:,.0f}")
    print(df.to_string(index=False, float_format="{:.4f}".format))
