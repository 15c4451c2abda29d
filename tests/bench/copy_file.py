"""Copying a safetensors file through fdsd's source and sink, against ``cp``, interleaved in one run.

    python tests/bench/copy_file.py [--megabytes 1024] [--repetitions 7] [--folder DIR] [--json FILE]

Prints a table of medians and their ratios to ``cp``, and writes them as JSON. Like ``cp``, fdsd leaves new files
to be written out later; it waits for them where it replaces a file, so both stand here with a sync too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec
from fdsd.storage.safetensors_sink import SafetensorsSink
from fdsd.storage.safetensors_source import SafetensorsSource


def make_source(path: Path, megabytes: int, megabytes_each: float) -> None:
    """Write random tensors, a few large or many small."""
    count = max(1, int(megabytes / megabytes_each))
    spec = TensorSpec((int(megabytes_each * 2**20) // 2,), torch.bfloat16)
    noise = torch.randint(0, 2**15, spec.shape, dtype=torch.int16).view(torch.bfloat16)
    with SafetensorsSink.create(path, {f"layers.{i}.weight": spec for i in range(count)}) as sink:
        for name in sink.specs():
            sink.write(name, 0, noise)


def cp(source: Path, target: Path) -> None:
    subprocess.run(["cp", source, target], check=True)


def cp_and_sync(source: Path, target: Path) -> None:
    cp(source, target)
    fd = os.open(target, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def kernel_copy(source: Path, target: Path, durable: bool = False, aligned: bool = True) -> None:
    """Rename every tensor; the kernel copies the bytes, if they may keep their place within a page."""
    opened = SafetensorsSource(source)
    specs = {f"model.{name}": spec for name, spec in opened.specs().items()}
    extents = {f"model.{name}": opened.extent(name) for name in opened.specs()}
    origins = {name: extent.offset for name, extent in extents.items()} if aligned else None
    with SafetensorsSink.create(target, specs, durable=durable, origins=origins) as sink:
        for _ in sink.copy_tensors(extents.items()):
            pass


def through_memory(source: Path, target: Path) -> None:
    """Rename every tensor; each is read into memory and written."""
    opened = SafetensorsSource(source)
    specs = {f"model.{name}": spec for name, spec in opened.specs().items()}
    with SafetensorsSink.create(target, specs) as sink:
        for name, spec in opened.specs().items():
            out = torch.empty(spec.shape, dtype=spec.dtype)
            opened.read(name, Region.whole(spec.shape), out)
            sink.write(f"model.{name}", 0, out)


WAYS: dict[str, Callable[[Path, Path], None]] = {
    "cp": cp,
    "cp + fsync": cp_and_sync,
    "fdsd": kernel_copy,
    "fdsd + fsync": lambda source, target: kernel_copy(source, target, durable=True),
    "fdsd, other place in a page": lambda source, target: kernel_copy(source, target, aligned=False),
    "fdsd, through memory": through_memory,
}


def measure(source: Path, folder: Path, repetitions: int) -> dict[str, list[float]]:
    """Time all ways in turn, so that each meets the same machine; the first round is thrown away."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(repetitions + 1):
        for way, copy in WAYS.items():
            target = folder / "target.safetensors"
            target.unlink(missing_ok=True)
            begin = time.perf_counter()
            copy(source, target)
            seconds[way].append(time.perf_counter() - begin)
    return {way: times[1:] for way, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=Path("copy_file.json"))
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    results: dict[str, dict[str, dict[str, float]]] = {}
    try:
        for label, each in (("tensors of 32 MB", 32.0), ("tensors of 64 KB", 1 / 16)):
            source = folder / "source.safetensors"
            source.unlink(missing_ok=True)
            make_source(source, options.megabytes, each)
            times = measure(source, folder, options.repetitions)
            base = statistics.median(times["cp"])
            results[label] = {
                way: {"seconds": statistics.median(t), "ratio to cp": statistics.median(t) / base}
                for way, t in times.items()
            }
    finally:
        shutil.rmtree(folder)
    for label, ways in results.items():
        print(f"\n{options.megabytes} MB, {label}, median of {options.repetitions}")
        for way, found in ways.items():
            print(f"  {way:32} {found['seconds']:8.3f} s   {found['ratio to cp']:6.2f} x cp")
    options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(f"\nwritten to {options.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
