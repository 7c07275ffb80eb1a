"""ASGI middleware for ``--root-path``: requests under the path of a proxy are those without it."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class StripRootPath:
    """Removes the root path from the paths that begin with it; a proxy may have stripped it already."""

    def __init__(self, app: ASGIApp, *, root_path: str) -> None:
        self._app = app
        self._root = root_path
        self._raw = root_path.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(f"{self._root}/"):
            raw = scope.get("raw_path") or b""
            scope = {**scope, "path": scope["path"].removeprefix(self._root), "raw_path": raw.removeprefix(self._raw)}
        await self._app(scope, receive, send)
