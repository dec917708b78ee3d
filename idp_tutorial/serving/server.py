"""The HTTP application of `idp serve`: requests, limits, a queue of texts, and errors.

A request names a text, or several, and the server answers with predictions. Requests that arrive at
the same time share a forward pass. Every resource that a client can use has a limit: the size of a
body, the number of texts in a request, the number of texts that wait, the time of a request, and
the time in which the head of a request must arrive. A text whose client has gone is not predicted.
Errors are a sentence of limited length.

A page of a browser can make the name of its own server point to this machine, and send requests
here. The browser then names that server in the header Host, so `idp serve` refuses names that it
does not know.
"""

import asyncio
import ipaddress
import logging
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from typing import Any

from idp_tutorial.data.file_readers import parse_json_object
from idp_tutorial.data.rows import require_text
from idp_tutorial.serving.limits import ServerLimits
from idp_tutorial.serving.multitask import MultiTaskModel
from idp_tutorial.utils.checks import UserError, check_name, is_panic, require_packages

logger = logging.getLogger(__name__)

_REQUEST_HINT = (
    'send an object such as {"text": "…"} or {"text": ["…", "…"]}, with "text2" for pairs, and '
    '"task" if the server has several'
)
# column of a row: names of the field with its texts
_TEXT_FIELDS = {"sentence1": ("text", "sentence1"), "sentence2": ("text2", "sentence2")}
_MAX_ERROR_LENGTH = 500  # characters of an error


class _RequestError(Exception):
    """An error that a client receives, with its HTTP status."""

    def __init__(self, status: int, detail: str, **headers: str) -> None:
        super().__init__(detail)
        self.status = status
        self.headers = headers


# ---- requests


def _get_texts(request: dict, names: tuple[str, str], task: str) -> Any:
    """Return the text or the texts of a field, which has two names."""
    given = [request[name] for name in names if request.get(name) is not None]
    if len(given) != 1 or not isinstance(given[0], (str, list)):
        raise UserError(
            f"task {task!r} needs one field {names[0]!r} with a text or a list of texts: "
            f"{_REQUEST_HINT}."
        )
    return given[0]


def parse_request(
    body: bytes,  # JSON
    model: MultiTaskModel,
    max_texts: int,  # largest number of texts
) -> tuple[list[dict], bool]:  # rows of `MultiTaskModel`, and whether the texts were a list
    """Return the rows of a request.

    Raises: `UserError` for a request that has another form, `_RequestError` for too many texts.
    """
    request = parse_json_object(body.decode(errors="surrogateescape"), "the request", _REQUEST_HINT)
    only_task = model.task_names[0] if len(model.task_names) == 1 else None
    given_task = request.get("task", only_task)
    if given_task is None:
        raise UserError(
            f"the request needs the field 'task', one of {', '.join(model.task_names)}."
        )
    name = check_name(str(given_task), model.task_names, "task")
    task = model.task_models[name].task
    given = {c: _get_texts(request, _TEXT_FIELDS[c], name) for c in task.text_columns}
    if not task.pair and request.get("text2", request.get("sentence2")) is not None:
        raise UserError(f"task {name!r} has one text, but the request has two: leave one out.")
    is_list = isinstance(given["sentence1"], list)
    columns = [texts if isinstance(texts, list) else [texts] for texts in given.values()]
    lengths = {len(column) for column in columns}
    has_one_form = len({type(texts) for texts in given.values()}) == 1
    if len(lengths) > 1 or 0 in lengths or not has_one_form:
        raise UserError(
            "a request needs one text or a non-empty list, and for pairs as many second texts in "
            f"the same form, got {', '.join(str(len(column)) for column in columns)} texts."
        )
    rows: list[dict] = []
    for i, texts in enumerate(zip(*columns)):
        row = {"task": name}
        for column, text in zip(given, texts):
            where = f"text {i}: {_TEXT_FIELDS[column][0]}"
            row[column] = require_text(text, where, task.allow_empty_text)
        rows.append(row)
    if len(rows) > max_texts:
        raise _RequestError(
            413,
            f"the request has {len(rows)} texts, and this server takes {max_texts} at once: "
            "send fewer.",
        )
    return rows, is_list


_MAX_DISCARDED = 2**26  # bytes of a request that is too large, which are read and forgotten
_DISCARD_SECONDS = 0.5  # in which the client must send the next of them


async def _discard_body(request: Any) -> None:
    """Read the rest of a request, since a client that still sends would not see the answer."""
    if "expect" in request.headers:  # the client waits for permission to send
        return
    n_bytes = 0
    with suppress(asyncio.TimeoutError):
        while n_bytes < _MAX_DISCARDED:
            message = await asyncio.wait_for(request.receive(), _DISCARD_SECONDS)
            n_bytes += len(message.get("body", b""))
            if not message.get("more_body"):
                return


async def _read_body(request: Any, limits: ServerLimits) -> bytes:
    """Return the body of a request, and raise `_RequestError` for one that is too large or slow."""
    declared = request.headers.get("content-length", "")
    is_too_large = len(declared) > 18 or (declared.isdecimal() and int(declared) > limits.max_body)
    body = bytearray()

    async def read() -> None:
        nonlocal is_too_large
        async for chunk in request.stream():
            body.extend(chunk)
            if len(body) > limits.max_body:
                is_too_large = True
                return

    try:
        if not is_too_large:
            await asyncio.wait_for(read(), limits.timeout)
    except asyncio.TimeoutError:
        raise _RequestError(
            408,
            f"the request did not arrive within {limits.timeout:g} seconds.",
            Connection="close",
        ) from None
    if is_too_large:
        await _discard_body(request)
        raise _RequestError(
            413,
            f"the request has more than {limits.max_body:,} bytes: send less at once.",
            Connection="close",
        )
    return bytes(body)


def _check_content_type(request: Any) -> None:
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != "application/json" and not given.endswith("+json"):
        raise _RequestError(
            415,
            f"the content type is {given[:60]!r}: send JSON, with Content-Type: application/json.",
        )


# ---- the queue


class Batcher:
    """A queue whose waiting rows are predicted together."""

    def __init__(
        self,
        predict_rows: Callable[[list[dict]], list],  # rows → predictions
        batch_size: int,  # largest number of rows in a batch
        max_wait: float,  # seconds that the first row waits for others
    ) -> None:
        self.predict_rows = predict_rows
        self.batch_size = batch_size
        self.max_wait = max_wait
        self.n_waiting = 0  # rows without a prediction
        self.queue: asyncio.Queue = asyncio.Queue()

    async def submit(self, row: dict) -> Any:
        """Wait for the prediction for a row, and return it."""
        future = asyncio.get_running_loop().create_future()
        self.n_waiting += 1
        try:
            await self.queue.put((row, future))
            return await future
        finally:
            self.n_waiting -= 1

    async def _predict_each(self, rows: list[dict]) -> list:
        """Return a prediction or an exception for each row."""
        try:
            return await asyncio.to_thread(self.predict_rows, rows)
        except BaseException as e:
            if is_panic(e):  # a future takes only an `Exception`
                e = RuntimeError(f"a library stopped with an internal error: {e}")
            if not isinstance(e, Exception):
                raise
            if len(rows) == 1:
                return [e]
            outcomes = []
            for row in rows:  # one by one, so that an error reaches its own request only
                outcomes += await self._predict_each([row])
            return outcomes

    async def _answer_next_batch(self) -> None:
        """Predict for the rows that wait now, or for the next one."""
        batch = [await self.queue.get()]
        if self.queue.qsize() + 1 < self.batch_size:  # else the batch is full already
            await asyncio.sleep(self.max_wait)
        while len(batch) < self.batch_size and not self.queue.empty():
            batch.append(self.queue.get_nowait())
        batch = [item for item in batch if not item[1].done()]  # whose request has not ended
        outcomes = await self._predict_each([row for row, _ in batch]) if batch else []
        for (_, future), outcome in zip(batch, outcomes):
            if future.done():
                continue
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    async def run(self) -> None:
        """Predict for the rows in the queue until the task is cancelled."""
        while True:
            try:
                await self._answer_next_batch()
            except Exception:  # without this loop no request would be answered any more
                logger.exception("a batch failed")


# ---- the application


def _make_predict(model: MultiTaskModel) -> Callable[[list[dict]], list]:
    """Return a function that predicts for rows in one batch."""
    return lambda rows: model.predict(rows, batch_size=len(rows), probabilities=True)


async def _predict_request(
    request: Any, model: MultiTaskModel, batcher: Batcher, limits: ServerLimits
) -> Any:
    """Return the predictions for a request: one, or a list."""
    _check_content_type(request)
    body = await _read_body(request, limits)
    rows, is_list = parse_request(body, model, limits.max_texts)
    busy = _RequestError(
        503, "the server is busy: send the request again later.", **{"Retry-After": "1"}
    )
    if batcher.n_waiting + len(rows) > limits.max_waiting:
        raise busy
    submitted = asyncio.gather(*(batcher.submit(row) for row in rows))
    predictions = await _wait_for_predictions(submitted, request, limits.timeout)
    if predictions is None:
        raise busy
    return predictions if is_list else predictions[0]


async def _wait_for_predictions(
    submitted: asyncio.Future, request: Any, timeout: float
) -> list | None:  # None: they took too long
    """Wait for predictions; they are cancelled if the client has gone, or after some time."""
    from starlette.requests import ClientDisconnect

    gone = asyncio.ensure_future(request.receive())  # the only message after the body
    try:
        await asyncio.wait({submitted, gone}, timeout=timeout, return_when="FIRST_COMPLETED")
        if submitted.done():
            return submitted.result()
        if gone.done():
            raise ClientDisconnect
        return None
    finally:
        gone.cancel()
        submitted.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await submitted  # so that the rows are no longer counted as waiting


async def _answer_request(
    request: Any, model: MultiTaskModel, batcher: Batcher, limits: ServerLimits
) -> Any:
    """Return the predictions for a request; an error that is not a bug has its status."""
    from fastapi import HTTPException
    from starlette.requests import ClientDisconnect

    try:
        return await _predict_request(request, model, batcher, limits)
    except _RequestError as e:
        raise HTTPException(e.status, str(e), e.headers) from None
    except UserError as e:  # a lone surrogate cannot be encoded
        detail = str(e)[:_MAX_ERROR_LENGTH].encode(errors="backslashreplace").decode()
        raise HTTPException(422, detail) from None
    except ClientDisconnect:
        raise HTTPException(400, "the request was not complete.") from None


def _check_host(given: str, allowed: Collection[str] | None) -> None:
    """Refuse a header Host that has neither an IP address nor one of the allowed names."""
    from fastapi import HTTPException

    name, _, port = given.rpartition(":")
    host = (name if name and port.isdecimal() else given).strip("[]").lower().rstrip(".")
    with suppress(ValueError):
        ipaddress.ip_address(host)  # no page can make the name of its server an address
        return
    if allowed is not None and host not in allowed:
        raise HTTPException(
            421,
            f"this server is not called {given[:60]!r}: use its address, or start it with "
            "--host_names.",
        )


def create_app(
    model: MultiTaskModel,
    limits: ServerLimits = ServerLimits(),  # noqa: B008 (it cannot be changed)
    # names by which clients may call the server, beside IP addresses; None: all names
    host_names: Collection[str] | None = None,
) -> Any:
    """Return a FastAPI application: POST /answer {"text": …}, GET /tasks, /health and /ready.

    Raises: `UserError` for a task that chooses among several rows.
    """
    require_packages("fastapi")
    from fastapi import Depends, FastAPI, Request
    from fastapi.responses import JSONResponse

    for name, task_model in model.task_models.items():
        if task_model.task.grouping == "choose":
            raise UserError(
                f"{name!r} cannot be served, because its task compares all rows of a question and "
                "a request has one row: leave it out, or use idp predict."
            )
    batcher = Batcher(_make_predict(model), limits.batch_size, limits.wait_ms / 1000)

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        app.state.worker = asyncio.create_task(batcher.run())
        yield
        app.state.worker.cancel()

    def check_host(request: Request) -> None:
        """Refuse a request whose header Host has another name."""
        _check_host(request.headers.get("host", ""), host_names)

    # without the pages of documentation, whose scripts a browser would load from another server
    app = FastAPI(
        title="idp_tutorial",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        dependencies=[Depends(check_host)],
    )

    @app.get("/health")
    async def health() -> dict:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Any:
        if not app.state.worker.done() and batcher.n_waiting < limits.max_waiting:
            return {"status": "ready"}
        return JSONResponse({"status": "busy"}, 503, {"Retry-After": "1"})

    @app.get("/tasks")
    async def tasks() -> dict:
        return {
            name: dict(labels=m.task.labels, pair=m.task.pair, method=m.cfg.method)
            for name, m in model.task_models.items()
        }

    @app.post("/answer", response_model=None)
    async def answer(request: Request) -> Any:
        """Return the predictions for a request."""
        return await _answer_request(request, model, batcher, limits)

    return app


# ---- the server

_HEAD_TIMEOUT = 10.0  # seconds in which the head of a request must arrive
_STOP_TIMEOUT = 5  # seconds in which requests may end after SIGTERM or Ctrl-C
_MAX_CONNECTIONS = 1000
_MAX_EVENT_BYTES = 2**14  # of the head of a request


_MAX_CHUNKS = 10_000  # of a request; each takes the server microseconds, whatever its size


def _make_protocol() -> type:
    """Return uvicorn's class of HTTP/1.1 connections, with limits of time and of chunks."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class CountingConnection(h11.Connection):
        """The state of a connection, in which a request has a limited number of chunks."""

        n_chunks = 0  # of the current request

        def next_event(self) -> Any:
            """Return the next event of the client."""
            event = super().next_event()
            if isinstance(event, h11.Request):
                self.n_chunks = 0
            elif isinstance(event, h11.Data):
                self.n_chunks += event.chunk_start
                if self.n_chunks > _MAX_CHUNKS:
                    raise h11.RemoteProtocolError("too many chunks")
            return event

    class LimitedProtocol(H11Protocol):
        """A connection that is closed if a head is not complete in time; uvicorn waits forever."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.conn = CountingConnection(h11.SERVER, _MAX_EVENT_BYTES)

        def connection_made(self, transport: Any) -> None:
            """Start the timer of the first request."""
            super().connection_made(transport)
            self.loop.call_later(_HEAD_TIMEOUT, self.close_incomplete, None)

        def close_incomplete(self, last_request: Any) -> None:
            """Close the connection if no request has arrived since the last check."""
            if self.conn.their_state is h11.IDLE and self.cycle is last_request:
                self.transport.close()
            elif not self.transport.is_closing():
                self.loop.call_later(_HEAD_TIMEOUT, self.close_incomplete, self.cycle)

    return LimitedProtocol


def run_app(
    app: Any,  # from `create_app`
    server_socket: Any,  # a socket that listens
) -> None:
    """Serve an application until SIGTERM or Ctrl-C; requests then have 5 seconds to end.

    There is no access log: a pipe that nobody reads would block the server.
    """
    import uvicorn

    config = uvicorn.Config(
        app,
        http=_make_protocol(),
        ws="none",
        access_log=False,
        server_header=False,
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=_STOP_TIMEOUT,
        h11_max_incomplete_event_size=_MAX_EVENT_BYTES,
    )
    uvicorn.Server(config).run(sockets=[server_socket])
