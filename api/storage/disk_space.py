"""Disk space: converts the error of a full disk to HTTP 507 in OpenAI's error format."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import HTTPError

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})

logger = logging.getLogger(__name__)


@contextmanager
def refusing_without_space(what: str) -> Iterator[None]:
    """Context manager: convert an ``OSError`` for lack of space to HTTPError 507 with the code ``storage_full``.

    Args:
        what: name of the data that cannot be stored, for the error message.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        logger.error("no space is left for %s: %s", what, error)
        raise HTTPError(507, f"The server's disk has no space for {what}.", code="storage_full") from None
