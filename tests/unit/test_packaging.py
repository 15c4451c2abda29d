"""What the wheel holds and what its metadata say: the modules, ``py.typed``, the license, nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytest.importorskip("hatchling")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("fdsd-*-py3-none-any.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fdsd").rglob("*.py")}
    assert held == modules | {"fdsd/py.typed"}


def test_metadata(wheel: zipfile.ZipFile) -> None:
    (info,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    metadata = message_from_bytes(wheel.read(f"{info}/METADATA"))
    assert metadata["Name"] == "fdsd"
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert metadata["Requires-Python"] == ">=3.10"
    needed = {
        line.split(";")[0].split(">")[0].strip() for line in metadata.get_all("Requires-Dist") if "extra" not in line
    }
    assert needed == {"attrs", "optree", "rich", "safetensors", "torch"}
    assert "fdsd = fdsd.cli.main:main" in wheel.read(f"{info}/entry_points.txt").decode().splitlines()
    assert wheel.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
