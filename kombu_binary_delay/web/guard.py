"""Users, hosts, security headers, and tokens against forged forms."""

from __future__ import annotations

import hmac
import inspect
import ipaddress
import secrets
from base64 import b64decode
from collections.abc import Awaitable, Callable, Collection
from typing import Any
from urllib.parse import parse_qs, urlsplit

from anyio import CapacityLimiter, to_thread
from kombu.log import get_logger
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .passwords import Checker

logger = get_logger(__name__)

#: Returns the user's name; None to refuse; or a response, such as a redirect to a login page.
Authenticate = Callable[[Request], Any]

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
#: Host names of this machine; other names may come from a DNS rebinding attack.
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_COOKIE, FIELD = "kbd-form", "token"
#: The key of all that we keep in a request's state, which the site around the pages uses as well.
_STATE = "kombu-binary-delay"
#: The limits of a form, in bytes and fields: a page of ids is far below.
_LONGEST, _FIELDS = 2_000_000, 2000


class Guard:
    """Middleware that checks hosts and users, and sets security headers.

    :param authenticate: returns the user's name; a coroutine, or a function that is called in a
        thread. None admits every user.
    :param hosts: the host names that requests may use; None for any.
    """

    def __init__(
        self, app: ASGIApp, authenticate: Authenticate | None, hosts: Collection[str] | None
    ) -> None:
        self._app = app
        self._authenticate = authenticate
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        request = Request(scope, receive)
        refused = await self._refuse(request)
        await (refused or self._app)(scope, receive, send_guarded)

    async def _refuse(self, request: Request) -> Response | None:
        if self._hosts is not None and _host(request) not in self._hosts:
            return PlainTextResponse("this host is not known here", 400)
        user: Any = ""
        if self._authenticate is not None:
            if inspect.iscoroutinefunction(self._authenticate):
                user = self._authenticate(request)
            else:
                # It may ask a database, and other requests must not wait for that.
                user = await run_in_threadpool(self._authenticate, request)
            if inspect.isawaitable(user):
                user = await user
            if isinstance(user, Response):
                return user
            if not user:
                return PlainTextResponse("you may not see this", 403)
        request.scope.setdefault("state", {})[_STATE] = {"user": str(user)}
        return None


def by_password(users: Any) -> Callable[[Request], Awaitable[str | Response]]:
    """Return an ``authenticate`` function that asks for name and password by HTTP Basic.

    :param users: password hashes by user name, as ``passwords.read`` returns them.
    """
    checker = Checker(users)
    # The most of this machine that an attacker who guesses passwords can use.
    two = CapacityLimiter(2)
    again = {"www-authenticate": 'Basic realm="kombu-binary-delay", charset="UTF-8"'}

    async def authenticate(request: Request) -> str | Response:
        kind, _, words = request.headers.get("authorization", "").partition(" ")
        try:
            said = b64decode(words, validate=True).decode() if kind.lower() == "basic" else ""
        except ValueError:
            said = ""
        user, _, password = said.partition(":")
        is_right = False
        if user:
            is_right = await to_thread.run_sync(
                lambda: checker.is_right(user, password), limiter=two
            )
        if is_right:
            return user
        if said:
            logger.warning("wrong name or password, from %s", _address(request))
        return PlainTextResponse("a name and a password are needed", 401, again)

    return authenticate


def by_header(name: str, proxies: Collection[str]) -> Callable[[Request], str | None]:
    """Return an ``authenticate`` function that reads the user's name from a proxy's header.

    :param proxies: the addresses or networks of trusted proxies, such as ``10.0.0.0/8``.
    :raises ValueError: for an invalid address or network.
    """
    networks = [ipaddress.ip_network(proxy) for proxy in proxies]

    def authenticate(request: Request) -> str | None:
        try:
            address = ipaddress.ip_address(_address(request))
        except ValueError:
            return None
        if not any(address in network for network in networks):
            return None
        return request.headers.get(name)

    return authenticate


class Tokens:
    """CSRF tokens of forms: only our pages, shown to the same browser, have them."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def of(self, request: Request) -> str:
        """Return the token for the forms of a page; call :meth:`remember` for its response."""
        state = request.scope["state"][_STATE]
        cookie = request.cookies.get(_COOKIE) or state.get("cookie")
        if not cookie:
            cookie = state["cookie"] = secrets.token_urlsafe(24)
        return hmac.new(self._key, f"{cookie}\0{state['user']}".encode(), "sha256").hexdigest()

    def remember(self, request: Request, response: Response) -> None:
        """Set the cookie from which the token was made."""
        if cookie := request.scope["state"][_STATE].get("cookie"):
            response.set_cookie(
                _COOKIE,
                cookie,
                path=f"{request.scope.get('root_path', '')}/",
                secure=request.url.scheme == "https",
                httponly=True,
                samesite="strict",
            )

    async def form(self, request: Request) -> dict[str, list[str]]:
        """Return the fields of a form.

        :raises HTTPException: 403, if the form does not come from one of our pages; 413, if it is
            too long.
        """
        site = request.headers.get("sec-fetch-site", "same-origin")
        body = bytearray()
        # Its length may not be said before.
        async for chunk in request.stream():
            body += chunk
            if len(body) > _LONGEST:
                raise HTTPException(413, f"This form is longer than {_LONGEST:,} bytes.")
        try:
            # A blank value is said, too: no exchange is the default exchange.
            form = parse_qs(
                body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=_FIELDS
            )
        except ValueError as exc:
            raise HTTPException(413, f"This form has more than {_FIELDS:,} fields.") from exc
        given = form.get(FIELD, [""])[0]
        has_cookie = _COOKIE in request.cookies
        if site != "same-origin" or not has_cookie or not given.isascii():
            raise HTTPException(403, "This form did not come from this page. Load it again.")
        if not hmac.compare_digest(given, self.of(request)):
            raise HTTPException(403, "This form is too old, or another user's. Load it again.")
        return form


def _host(request: Request) -> str:
    """Return the host name of a request; an empty text if it is invalid."""
    try:
        return urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    except ValueError:
        return ""


def _address(request: Request) -> str:
    return request.client.host if request.client else ""


def user_of(request: Request) -> str:
    """Return the name of a request's user; an empty text if every user is admitted."""
    user: str = request.scope["state"][_STATE]["user"]
    return user


def asker(request: Request) -> str:
    """Return who shares a place where requests wait: a user or, without users, an address."""
    return user_of(request) or _address(request)


def is_from_elsewhere(request: Request) -> bool:
    """Return whether a browser says that another site made it send this request."""
    return request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin")


def who(request: Request) -> str:
    """Return the user of a request, for the log."""
    user = user_of(request)
    return f"{user!r} from {_address(request)}" if user else f"somebody at {_address(request)}"
