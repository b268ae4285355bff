"""Where corpus text comes from: the running Python's library, and distributions as wheels, sdists or installed."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from email.message import Message
from email.parser import Parser
from pathlib import Path, PurePosixPath

from ..errors import TrainError
from .licences import licence_of, permits

TEXT_SUFFIXES = (".py", ".md", ".rst")
# Copies of other projects (under licences that the metadata does not name), translations, and machine-made code.
_SKIPPED_FOLDERS = re.compile(
    r"(?:^|/)(?:_?vendor(?:ed)?|third[_-]?party|extern(?:s|als?)?|node_modules|locales?|migrations|licen[cs]es?|"
    r"__pycache__|site-packages|lib2to3|idlelib|_distutils_hack|[^/]*\.dist-info|[^/]*\.egg-info)(?:/|$)"
)
Files = Callable[[], Iterator[tuple[str, bytes]]]


@dataclass(frozen=True)
class Source:
    """One distribution, or Python's own library. `files` yields (path inside it, content), sorted by path."""

    name: str
    version: str
    licence: str
    files: Files


def wanted(path: str) -> bool:
    """Text of a kind that the corpus takes, outside folders of copies and generated files."""
    return path.endswith(TEXT_SUFFIXES) and not _SKIPPED_FOLDERS.search(path)


def standard_library() -> Source:
    """The library of the running Python, under the PSF licence."""
    root = Path(sysconfig.get_path("stdlib"))

    def files() -> Iterator[tuple[str, bytes]]:
        for file in sorted(root.rglob("*.py")):
            path = file.relative_to(root).as_posix()
            if wanted(path):
                yield path, file.read_bytes()

    return Source("python", ".".join(map(str, sys.version_info[:3])), "PSF-2.0", files)


def distribution(requirement: str, folder: Path) -> Source:
    """The distribution that `name==version` names: a wheel or sdist in `folder`, else the installed one.

    Raises TrainError if it is in neither, in another version, or not under a permissive licence.
    """
    name, _, version = requirement.partition("==")
    if not version:
        raise TrainError(f"sources: found {requirement!r}, want name==version; pin it.")
    found = [f for f in sorted(folder.glob("*")) if _file_names(f.name) == (_normal(name), version)]
    if found:
        parts = [_wheel(file) if file.suffix == ".whl" else _sdist(file) for file in found]
        checked = [_checked(name, version, metadata, files) for metadata, files in parts]
        return replace(checked[0], files=lambda: (item for part in checked for item in part.files()))
    try:
        installed = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        raise TrainError(
            f"{requirement}: found neither in {folder} nor installed, want its wheel; run pip download --no-deps."
        ) from None
    if installed.version.partition("+")[0] != version:
        raise TrainError(
            f"{name}: found {installed.version} installed and nothing in {folder}, want {version}; run pip download."
        )
    message = Message()
    for key in installed.metadata:
        for value in installed.metadata.get_all(key) or []:
            message[key] = value
    return _checked(name, version, message, _installed(installed))


def _checked(name: str, version: str, metadata: Message, files: Files) -> Source:
    licence = licence_of(metadata)
    if not permits(licence):
        raise TrainError(
            f"{name} {version}: found licence {licence!r}, want a permissive one; drop it from the sources."
        )
    return Source(name, version, licence, files)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _file_names(file: str) -> tuple[str, str]:
    """(normalised name, version) of a wheel's or sdist's file name, empty strings for any other file."""
    if file.endswith(".whl"):
        name, version = file.split("-")[:2]
    elif file.endswith(".tar.gz"):
        name, _, version = file.removesuffix(".tar.gz").rpartition("-")
    else:
        return "", ""
    return _normal(name), version


def _installed(installed: importlib.metadata.Distribution) -> Files:
    def files() -> Iterator[tuple[str, bytes]]:
        for entry in sorted(installed.files or [], key=str):
            path = PurePosixPath(str(entry)).as_posix()
            file = Path(str(installed.locate_file(entry)))
            if wanted(path) and file.is_file():
                yield path, file.read_bytes()

    return files


def _wheel(file: Path) -> tuple[Message, Files]:
    def files() -> Iterator[tuple[str, bytes]]:
        with zipfile.ZipFile(file) as archive:
            for path in sorted(archive.namelist()):
                if wanted(path):
                    yield path, archive.read(path)

    with zipfile.ZipFile(file) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA") and n.count("/") == 1)
        return Parser().parsestr(archive.read(name).decode("utf-8", "replace")), files


def _sdist(file: Path) -> tuple[Message, Files]:
    """Of an sdist only the prose (.md, .rst): its code is in the wheel already."""

    def files() -> Iterator[tuple[str, bytes]]:
        found = []
        with tarfile.open(file) as archive:
            for member in archive:
                path = member.name.partition("/")[2]
                content = archive.extractfile(member) if member.isfile() and wanted(path) else None
                if content is not None and not path.endswith(".py"):
                    found.append((path, content.read()))
        yield from sorted(found)

    with tarfile.open(file) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.name.count("/") == 1 else None
            if content is not None and member.name.endswith("/PKG-INFO"):
                return Parser().parsestr(content.read().decode("utf-8", "replace")), files
    raise TrainError(f"{file}: found no PKG-INFO, want an sdist; download it again.")
