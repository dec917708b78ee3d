"""Limits of what a client of `idp serve` may use, and of its batches.

They are options of the command too, which reads them without importing the server.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from idp_tutorial.utils.checks import Range, UserError
from idp_tutorial.utils.options import check_options


@dataclass(frozen=True)
class ServerLimits:
    """Limits of what a client may use, and of a batch."""

    option_group: ClassVar[str] = "limits"

    batch_size: Annotated[int, Range(1, 10**6)] = 32  # largest number of texts in a batch
    # milliseconds that the first text of a batch waits for others
    wait_ms: Annotated[float, Range(0, 60_000)] = 5.0
    max_body: Annotated[int, Range(1, 10**9)] = 2**20  # bytes of a request
    max_texts: Annotated[int, Range(1, 10**6)] = 256  # texts of a request
    # texts that may wait for their predictions; a request beyond it gets status 503
    max_waiting: Annotated[int, Range(1, 10**9)] = 1024
    # seconds in which a request must arrive, and then those in which it is answered
    timeout: Annotated[float, Range(0, 86_400, is_low_excluded=True)] = 30.0

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_texts > self.max_waiting:
            raise UserError(
                f"max_texts={self.max_texts} texts of a request could never wait with "
                f"max_waiting={self.max_waiting}: use a larger max_waiting."
            )
