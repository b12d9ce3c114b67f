"""`lol serve`: from flags to a running server and back to the prompt."""

import errno
import os
import socket

import uvicorn

from lol.errors import UserError
from lol.serve.app import make_app
from lol.serve.completions import Served
from lol.serve.engine import Engine
from lol.serve.guard import Access, is_loopback
from lol.serve.limits import Limits, Serve
from lol.train.loading import load_model

# Answers in progress are told to end when the server does; whoever does not read that is cut off after so many seconds.
_GRACE = 5


def serve(command: Serve) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Raises:
        UserError: flags that do not fit, a port that is taken, or a folder without a model.
    """
    check_limits(command.limits)
    token = _token(command.token)
    # First what fails at once, then the model, which takes its time.
    listener = _listen(command.host, command.port)
    with listener:
        if token is None and not is_loopback(listener.getsockname()[0]):
            raise UserError(
                f"--host {command.host} lets other machines in: set a token in LOL_TOKEN (or --token), or drop --host"
            )
        model, tokenizer = load_model(command.model)
        served = Served(command.model.resolve().name, model, tokenizer, command.limits)
        engine = Engine(command.limits.queue)
        app = make_app(served, engine, Access(command.host, token))
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=_GRACE,
        )
        line = f"serving {served.name} at {_address(command.host, listener)}/v1 (Ctrl-C ends it)"
        try:
            _Server(config, engine, line).run(sockets=[listener])
        except KeyboardInterrupt:
            # The way in which a server ends; uvicorn has shut down before it passes the signal on.
            return
        finally:
            engine.close()


class _Server(uvicorn.Server):
    """Says when it is ready, and ends the engine's work first when it stops."""

    def __init__(self, config: uvicorn.Config, engine: Engine, line: str):
        super().__init__(config)
        self.engine = engine
        self.line = line

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self.line, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.engine.close()
        await super().shutdown(sockets)


def check_limits(limits: Limits) -> None:
    """Raise `UserError` for bounds that let nothing through."""
    for name, least in {"max_prompt_tokens": 1, "max_new_tokens": 1, "max_choices": 1, "queue": 0}.items():
        if getattr(limits, name) < least:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} is {getattr(limits, name)}: give at least {least}")


def _token(flag: str | None) -> str | None:
    token = os.environ.get("LOL_TOKEN") or None if flag is None else flag
    if token is not None and (not token.isascii() or not token.isprintable() or " " in token or not token):
        raise UserError("the token is empty or holds other than letters, digits and signs of ASCII: choose another one")
    return token


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise UserError(f"--port {port} does not exist: choose 1 to 65535, or 0 for a free one")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
    except (socket.gaierror, UnicodeError):
        raise UserError(f"--host {host} is not known: give an address of this machine") from None
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Only who listens owns the port; clients that come before the model is loaded wait.
        listener.listen()
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port {port} of {host} is taken: choose another --port; 0 takes a free one") from None
        raise UserError(f"cannot listen at {host}, port {port} ({error.strerror}): choose another") from None
    return listener


def _address(host: str, listener: socket.socket) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}"
