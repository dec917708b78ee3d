"""Whether the Hugging Face hub can be reached, and offline mode where it cannot.

Models and data sets are loaded from the Hugging Face hub. Without a network, the hub's clients
would wait for minutes, because the lookup of a host name has no time limit. So one request is
sent in a thread; without an answer in three seconds everything is loaded from the local caches
with `local_files_only`. `datasets` has no such argument: for it alone the hub's offline switch
is set for a while.

A name may include a version, as in `roberta-base@e2da8e2`: a commit, a tag or a branch.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from huggingface_hub import constants, get_session


def is_hub_reachable() -> bool:
    """Return whether the hub answers within 3 s (or `HF_HUB_ETAG_TIMEOUT`); False if offline."""
    timeout = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or 3)
    responses = []

    def send_request() -> None:
        """Ask the hub for an answer."""
        with suppress(Exception):  # no name server, no route, a proxy that refuses, offline mode
            responses.append(get_session().head(constants.ENDPOINT, timeout=timeout))

    # in a thread: the lookup of a host name has no time limit of its own
    thread = threading.Thread(target=send_request, daemon=True)
    thread.start()
    thread.join(timeout)
    return bool(responses)


@contextmanager
def offline_if_unreachable() -> Iterator[bool]:  # whether the hub can be reached
    """Switch the hub's clients to offline mode inside the block if the hub cannot be reached."""
    before = constants.HF_HUB_OFFLINE
    online = is_hub_reachable()
    constants.HF_HUB_OFFLINE = not online
    try:
        yield online
    finally:
        constants.HF_HUB_OFFLINE = before


def split_revision(
    name: str,  # such as 'roberta-base' or 'roberta-base@e2da8e2'
) -> tuple[str, str | None]:  # the name, and the revision or None
    """Split a name on the hub into the name and its revision."""
    name, _, revision = str(name).partition("@")
    return name, revision or None
