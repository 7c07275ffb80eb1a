"""Unredirected session: an aiobotocore HTTP session that follows no redirects.

The target of a redirect would receive the credentials. This module is imported only with the extra ``s3``.
"""

from __future__ import annotations

from typing import Any

from aiobotocore.httpsession import AIOHTTPSession


class UnredirectedSession(AIOHTTPSession):  # type: ignore[misc]  # untyped
    """Session whose requests return a redirect as the answer. botocore itself redirects to the bucket's region."""

    async def _get_session(self, proxy_url: str | None) -> _Requests:
        return _Requests(await super()._get_session(proxy_url))


class _Requests:
    def __init__(self, session: Any) -> None:
        self._session = session

    async def request(self, *arguments: Any, **options: Any) -> Any:
        return await self._session.request(*arguments, allow_redirects=False, **options)
