"""A server in this process: its token, its port, the line that says when it is ready, and its end."""

import errno
import logging
import os
import socket

import uvicorn
from starlette.types import ASGIApp

from lol.errors import UserError
from lol.serve.engine import Engine
from lol.serve.guard import is_loopback

# Answers in progress are told to end when the server does; whoever does not read that is cut off after so many seconds.
_GRACE = 5


def run_server(app: ASGIApp, engine: Engine, listener: socket.socket, line: str) -> None:
    """Serve until Ctrl-C or SIGTERM; prints the line once clients are answered, and closes the engine at the end."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=_GRACE,
    )
    # A client that leaves in the middle of an answer is nothing to warn of, and asyncio would.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
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


def read_token(flag: str | None) -> str | None:
    """The token of a flag, else of LOL_TOKEN.

    Raises:
        UserError: it cannot be sent in a header.
    """
    token = os.environ.get("LOL_TOKEN") or None if flag is None else flag
    if token is not None and (not token.isascii() or not token.isprintable() or " " in token or not token):
        raise UserError("the token is empty or holds other than letters, digits and signs of ASCII: choose another one")
    return token


def listen(host: str, port: int, token: str | None) -> socket.socket:
    """A socket that listens; 0 takes a free port.

    Raises:
        UserError: the place cannot be taken, or other machines reach it and there is no token.
    """
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
    if token is None and not is_loopback(listener.getsockname()[0]):
        listener.close()
        raise UserError(f"--host {host} lets other machines in: set a token in LOL_TOKEN (or --token), or drop --host")
    return listener


def address_of(host: str, listener: socket.socket) -> str:
    """Where the socket is reached."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}"
