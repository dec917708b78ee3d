"""The command `idp serve`: predictions for many tasks with one backbone, in mixed batches.

A fine-tuned model for each task needs a process for each task. A frozen backbone needs one
process for all of them: requests that arrive at the same time share a forward pass, whatever
their tasks are. The LPT paper names this advantage. The server has limits (`serving.server`) but no
accounts and no encryption, and by default it accepts connections from this machine only: for
others, put a reverse proxy before it. It answers requests to an IP address, to localhost, and to
the names that `host` and `host_names` give. FastAPI is installed with the extra `serve`.
"""

import socket
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from idp_tutorial.cli.commands import CommandOptions, command, split_names
from idp_tutorial.serving.limits import ServerLimits
from idp_tutorial.utils.checks import Range, UserError, require_packages


def _bind_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address."""
    try:
        family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        server_socket = socket.create_server((host, port), family=family)
        # connections inherit this: otherwise a small answer waits 40 ms for an acknowledgement
        server_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return server_socket
    except (OSError, ValueError) as e:  # a host name that is too long is a UnicodeError
        address = f"host={host[:60]!r} and port={port}"
        raise UserError(f"{address} cannot be served ({e}): give others.") from None


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ServerLimits, CommandOptions):
    """Options of `idp serve`."""

    option_group: ClassVar[str] = "this command"

    # saved models, comma-separated: folders, or names on the hub; a request names one by its task
    models: str
    backbone: str | None = None  # folder of the backbone, if it has moved since training
    host: str = "127.0.0.1"  # address to listen on; the default accepts this machine only
    # names by which clients may call the server beside localhost, host and any IP address,
    # comma-separated; behind a reverse proxy its name, such as models.example.org
    host_names: str | None = None
    port: Annotated[int, Range(0, 65_535)] = 8000  # port to listen on


@command(ServeOptions)
def serve_command(options: ServeOptions, base: Any) -> None:
    """Serve saved models with one backbone: POST /answer {"text": …}, with "task" if several.

    idp serve tickets,mood --port 8000
    """
    require_packages("fastapi", "uvicorn")
    from idp_tutorial.serving.multitask import MultiTaskModel
    from idp_tutorial.serving.server import create_app, run_app

    with _bind_socket(options.host, options.port) as server_socket:  # before models are loaded
        model = MultiTaskModel.from_pretrained(split_names(options.models), options.backbone)
        names = split_names(options.host_names or "")
        app = create_app(
            model, options, {"localhost", *(n.lower() for n in (options.host, *names))}
        )
        bound_port = server_socket.getsockname()[1]
        print(
            f"http://{options.host}:{bound_port}/answer (tasks: {', '.join(model.task_names)}; "
            "Ctrl-C stops the server)",
            flush=True,
        )
        run_app(app, server_socket)
