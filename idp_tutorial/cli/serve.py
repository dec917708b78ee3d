"""The command `idp serve`: predictions for many tasks with one backbone, in mixed batches.

A fine-tuned model for each task needs a process for each task. A frozen backbone needs one
process for all of them: requests that arrive at the same time share a forward pass, whatever
their tasks are. The LPT paper names this advantage. The server is a short example without
accounts or limits, and by default it accepts connections from this machine only. FastAPI is
installed with the extra `serve`.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from idp_tutorial.cli.commands import CommandOptions, command, split_names
from idp_tutorial.utils.checks import UserError, check_at_least, require_packages
from idp_tutorial.utils.options import Range

__all__ = ["Batcher", "create_app", "ServeOptions", "serve_command"]


class Batcher:
    """A queue whose waiting requests are predicted together."""

    def __init__(
        self,
        predict_rows: Callable[[list[dict]], list],  # rows → predictions
        batch_size: int = 32,  # largest number of rows in a batch
        max_wait: float = 0.005,  # seconds that the first row waits for others
    ) -> None:
        self.predict_rows = predict_rows
        self.batch_size = check_at_least(batch_size, 1, "batch_size")
        self.max_wait = max_wait
        self.queue: asyncio.Queue = asyncio.Queue()

    async def submit(self, row: dict) -> Any:
        """Wait for the prediction for a row, and return it."""
        future = asyncio.get_running_loop().create_future()
        await self.queue.put((row, future))
        return await future

    async def _predict_each(self, rows: list[dict]) -> list:
        """Return a prediction or an exception for each row."""
        try:
            return await asyncio.to_thread(self.predict_rows, rows)
        except Exception as e:
            if len(rows) == 1:
                return [e]
            outcomes = []
            for row in rows:  # one by one, so that an error reaches its own request only
                outcomes += await self._predict_each([row])
            return outcomes

    async def run(self) -> None:
        """Predict for the requests in the queue until the task is cancelled."""
        while True:
            batch = [await self.queue.get()]
            await asyncio.sleep(self.max_wait)
            while len(batch) < self.batch_size and not self.queue.empty():
                batch.append(self.queue.get_nowait())
            outcomes = await self._predict_each([row for row, _ in batch])
            for (_, future), outcome in zip(batch, outcomes):
                if future.cancelled():
                    continue
                if isinstance(outcome, Exception):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)


def create_app(
    model: Any,  # a `MultiTaskModel`
    batch_size: int = 32,  # largest number of rows in a batch
    max_wait: float = 0.005,  # seconds that the first row of a batch waits for others
) -> Any:
    """Return a FastAPI application: POST /answer {"task": …, "sentence1": …}, and GET /tasks.

    Raises: `UserError` for a task that chooses among several rows.
    """
    require_packages("fastapi")
    from fastapi import Body, FastAPI, HTTPException

    for name, task_model in model.task_models.items():
        if task_model.task.grouping == "choose":
            raise UserError(
                f"{name!r} cannot be served, because its task compares all rows of a question and "
                "a request has one row: leave it out, or use idp predict."
            )
    batcher = Batcher(lambda rows: model.predict(rows, probabilities=True), batch_size, max_wait)

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        worker = asyncio.create_task(batcher.run())
        yield
        worker.cancel()

    app = FastAPI(title="idp_tutorial", lifespan=lifespan)

    @app.get("/tasks")
    def tasks() -> dict:
        return {
            name: dict(labels=m.task.labels, pair=m.task.pair, method=m.cfg.method)
            for name, m in model.task_models.items()
        }

    async def answer(row: Any = Body()) -> Any:  # noqa: B008 (FastAPI reads the default)
        try:
            model.validate_task_row(row)
        except ValueError as e:
            detail = str(e).encode(errors="backslashreplace").decode()
            raise HTTPException(422, detail) from None
        return await batcher.submit(row)

    app.post("/answer")(answer)
    return app


def _bind_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address."""
    try:
        family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((host, port), family=family)
    except (OSError, ValueError) as e:  # a host name that is too long is a UnicodeError
        raise UserError(
            f"host={host[:60]!r} and port={port} cannot be served ({e}): give an address of this "
            "machine, such as 127.0.0.1, and a port that is not in use."
        ) from None


@dataclass(frozen=True, kw_only=True)
class ServeOptions(CommandOptions):
    """Options of `idp serve`."""

    models: str  # saved models, comma-separated: folders, or names on the hub
    backbone: str | None = None  # folder of the backbone, if it has moved since training
    batch_size: int = 32  # largest number of requests in a batch
    # milliseconds that a request waits for others
    wait_ms: Annotated[float, Range(0, 60_000)] = 5.0
    host: str = "127.0.0.1"  # address to listen on; the default accepts this machine only
    port: Annotated[int, Range(0, 65_535)] = 8000  # port to listen on


@command(ServeOptions)
def serve_command(options: ServeOptions, base: Any) -> None:
    """Serve saved models with one backbone: POST /answer {"task": …, "sentence1": …}."""
    require_packages("fastapi", "uvicorn")
    from idp_tutorial.serving.multitask import MultiTaskModel

    with _bind_socket(options.host, options.port) as server_socket:  # before models are loaded
        model = MultiTaskModel.from_pretrained(split_names(options.models), options.backbone)
        app = create_app(model, options.batch_size, options.wait_ms / 1000)
        import uvicorn

        bound_port = server_socket.getsockname()[1]
        print(f"http://{options.host}:{bound_port}/answer (Ctrl-C stops the server)", flush=True)
        uvicorn.Server(uvicorn.Config(app)).run(sockets=[server_socket])
