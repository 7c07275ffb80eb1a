"""Hook of MkDocs: links from pages to files of the repository lead to its address, and those to nothing are errors."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

_LINK = re.compile(r"(\]\()(\.\./[^)#\s]+)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Return the text of a page with the addresses of files outside of the documentation.

    Raises:
        PluginError: there is no such file.
    """
    docs = Path(config.docs_dir).resolve()
    folder = (docs / page.file.src_path).parent

    def addressed(link: re.Match[str]) -> str:
        file = Path(os.path.normpath(folder / link[2]))
        if file.is_relative_to(docs):
            return link[0]
        if not file.exists():
            raise PluginError(f"{page.file.src_path} links to {link[2]}, which does not exist")
        return f"{link[1]}{config.repo_url.rstrip('/')}/blob/main/{file.relative_to(docs.parent).as_posix()}"

    return _LINK.sub(addressed, markdown)
