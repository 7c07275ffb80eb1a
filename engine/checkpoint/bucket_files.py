"""Bucket files: the file system of object stores (``s3://``), through ``fsspec`` with the environment's options.

Endpoint, region and credentials come from the settings of the AWS client (``AWS_ENDPOINT_URL``, ``AWS_ACCESS_KEY_ID``,
a profile, the machine's role) and of fsspec (``FSSPEC_S3_ANON=true`` for public buckets).
"""

from __future__ import annotations

from typing import Any

_CLIENT = {"connect_timeout": 10, "read_timeout": 30, "retries": {"total_max_attempts": 2}}  # fsspec tries again itself


def open_buckets() -> Any:
    """Return fsspec's file system of buckets; it follows no redirects. Raises ImportError without the extra ``s3``."""
    import fsspec
    import s3fs  # noqa: F401

    from .unredirected_session import UnredirectedSession

    options = {**_CLIENT, "http_session_cls": UnredirectedSession}
    return fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False, config_kwargs=options)
