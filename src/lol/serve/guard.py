"""Who may talk to the server: an ASGI middleware in front of everything.

A server on this machine is within reach of every web page that its user has open. A page of another site is told by
its Origin header; a page that has pointed its own name at this machine (DNS rebinding) by its Host header, which then
names a host that this server is not. No answer carries CORS headers. Beyond this machine a token is demanded as well.
"""

import hmac
import ipaddress
import socket
from dataclasses import dataclass
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lol.serve.errors import error_response

# No prompt that is allowed needs more; refused before it fills the memory.
MAX_BODY_BYTES = 4 * 2**20
# Says only that the server runs and how long its line is, so that whoever watches it needs no token.
OPEN_PATHS = ("/health",)


@dataclass(frozen=True)
class Access:
    """Whom a server answers."""

    host: str = "127.0.0.1"
    """What it listens at, as the user named it."""
    token: str | None = None
    guarded: str = "/"
    """Paths that begin with this want the token; a page's own files say nothing."""

    def refusal(self, path: str, headers: Headers) -> tuple[HTTPStatus, str] | None:
        """Why a request is refused; `None` lets it pass."""
        if not self.is_own_name(headers.get("host", "")):
            return HTTPStatus.FORBIDDEN, (
                f"the Host header {headers.get('host', '')!r} is no name of this server: reach it under the address "
                "that it printed, or start it with --host and that name"
            )
        origin = headers.get("origin")
        if origin is not None and origin not in (f"http://{headers['host']}", f"https://{headers['host']}"):
            return (
                HTTPStatus.FORBIDDEN,
                f"pages of {origin} may not use this server: only programs and its own pages may",
            )
        guarded = path.startswith(self.guarded) and path not in OPEN_PATHS
        if self.token is not None and guarded and not self._has_token(headers):
            return HTTPStatus.UNAUTHORIZED, (
                "this server wants its token: send it as the API key (Authorization: Bearer TOKEN)"
            )
        return None

    def is_own_name(self, header: str) -> bool:
        """Whether a Host header names this server. An address cannot be rebound, so beyond loopback any will do."""
        name = _host_name(header)
        own = {"localhost", self.host.lower()}
        beyond = not is_loopback(self.host)
        if beyond:
            own |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        if name in own:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return beyond or address.is_loopback

    def _has_token(self, headers: Headers) -> bool:
        assert self.token is not None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Constant time: how long it takes must not tell how much of a guess was right.
        return scheme.lower() == "bearer" and hmac.compare_digest(given.encode(), self.token.encode())


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address or name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _host_name(header: str) -> str:
    """The name or address of a Host header without its port, in lower case."""
    if header.startswith("["):
        name, closed, _ = header[1:].partition("]")
        return name.lower() if closed else ""
    return header.partition(":")[0].lower()


class Guard:
    """The middleware."""

    def __init__(self, app: ASGIApp, access: Access, max_body_bytes: int = MAX_BODY_BYTES):
        self.app = app
        self.access = access
        self.max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # Neither websockets nor start-up hooks are served.
            return
        headers = Headers(scope=scope)
        refusal = self.access.refusal(scope["path"], headers)
        length = headers.get("content-length", "0")
        if refusal is None and length.isdecimal() and int(length) > self.max_body_bytes:
            refusal = HTTPStatus.REQUEST_ENTITY_TOO_LARGE, self._too_large
        if refusal is not None:
            await error_response(*refusal)(scope, receive, send)
            return
        await self.app(scope, self._counted(receive), send)

    @property
    def _too_large(self) -> str:
        return f"the body has more than {self.max_body_bytes} bytes: send less in one request"

    def _counted(self, receive: Receive) -> Receive:
        """A body that does not say its length is cut off when it is too long."""
        read = 0

        async def receive_some() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.max_body_bytes:
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, self._too_large)
            return message

        return receive_some
