"""A Hub as ``huggingface_hub`` speaks with it: revisions, commits, Git and LFS hashes, a storage host behind redirects.

That the real client understands it is tested in ``tests/engine/adapter_sources/test_hub_client.py``.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field

from aiohttp import web

from support.adapter_sources.file_server import FileServer

_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/(.+)/([^/]+)")
_HISTORY = re.compile(r"/api/models/([^/]+/[^/]+)/(refs|commits/(.+))")
_INFO = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?")


@dataclass
class Repository:
    """Files by commit, and what branches stand for.

    Attributes:
        history: the commits of a branch, the newest first.
        readers: tokens that may read it; empty for all.
        is_gated: whether others are told that it is there.
    """

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    history: dict[str, list[str]] = field(default_factory=dict)
    readers: frozenset[str] = frozenset()
    is_gated: bool = False

    def push(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Make a commit with these files; returns its hash."""
        text = repr((sorted(files.items()), len(self.commits))).encode()
        commit = hashlib.sha1(text).hexdigest()
        self.commits[commit] = files
        self.branches[branch] = commit
        self.history.setdefault(branch, []).insert(0, commit)
        return commit


class HubStub:
    """A Hub at ``endpoint``, whose weights lie at ``storage``, another server."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.server = FileServer(extra=self._answer)
        self.storage = FileServer()
        self.damage: dict[str, bytes] = {}  # what the storage gives for a name in place of its content
        self.redirect: str | None = None  # where weights are said to lie

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    def close(self) -> None:
        self.server.close()
        self.storage.close()

    def add(self, name: str, files: dict[str, bytes]) -> str:
        """Make a repository with one commit; returns the commit."""
        self.repositories[name] = Repository()
        return self.repositories[name].push(files)

    async def _answer(self, request: web.Request) -> web.StreamResponse | None:
        found = next(filter(None, (rule.fullmatch(request.path) for rule in (_RESOLVE, _HISTORY, _INFO))), None)
        if found is None:
            return None
        repository = self.repositories.get(found[1])
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if repository is None or (repository.readers and token not in repository.readers):
            if repository is not None and repository.is_gated:
                return _error(403 if token else 401, "GatedRepo")
            return _error(404 if token else 401, "RepoNotFound")
        if found.re is _HISTORY:
            return _history(repository, found[3])
        revision = found[2] or "main"
        commit = repository.branches.get(revision, revision)
        if commit not in repository.commits:
            return _error(404, "RevisionNotFound")
        files = repository.commits[commit]
        if found.re is _INFO:
            names = [{"rfilename": name} for name in files]
            return web.json_response({"id": found[1], "modelId": found[1], "sha": commit, "siblings": names})
        if found[3] not in files:
            return _error(404, "EntryNotFound", {"X-Repo-Commit": commit})
        return await self._file(request, found[3], files[found[3]], commit)

    async def _file(self, request: web.Request, name: str, content: bytes, commit: str) -> web.StreamResponse:
        if not name.endswith(".safetensors"):
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            return await self.server.send(
                request, self.damage.get(name, content), request.path, **{"X-Repo-Commit": commit, "ETag": f'"{blob}"'}
            )
        digest = hashlib.sha256(content).hexdigest()
        path = f"/lfs/{digest}"
        self.storage.files[path] = self.damage.get(name, content)
        headers = {
            "X-Repo-Commit": commit,
            "X-Linked-Etag": f'"{digest}"',
            "X-Linked-Size": str(len(content)),
            "ETag": f'"{digest}"',
            "Location": self.redirect or f"http://127.0.0.1:{self.storage.port}{path}?signature=secret",
        }
        return web.Response(status=302, headers=headers)


def _history(repository: Repository, branch: str | None) -> web.Response:
    """Answer which branches there are, or which commits one of them has."""
    if branch is not None:
        return web.json_response([{"id": commit} for commit in repository.history[branch]])
    heads = [
        {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit}
        for name, commit in repository.branches.items()
        if not name.startswith("refs/")
    ]
    return web.json_response({"branches": heads, "converts": [], "tags": []})


def _error(status: int, code: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(status=status, headers={"X-Error-Code": code, "X-Error-Message": code, **(headers or {})})
