"""A rewrite of a large checkpoint in a fresh process, watched from outside: its time, and its anonymous memory.

Shared by the memory tests and the benchmark. Run as a script, it is that process: it says ``ready`` when everything
is imported, waits for a line, and rewrites.
"""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from attrs import frozen

import fdsd

__all__ = ["PIPELINES", "Watched", "make_checkpoint", "rewrite"]

ROOT = Path(__file__).parents[2]
BLOCK = 1 << 20
QKV = [f"layers.{{i}}.attn.{x}.weight" for x in "qkv"]
RENAME = fdsd.rename_fqns({"model.{x...}": "{x...}"})


def flipped(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flip(0)


PIPELINES: dict[str, Callable[[], fdsd.Pipeline]] = {
    "rename": lambda: RENAME,
    "rename, fuse, cast": lambda: fdsd.pipe(
        RENAME,
        fdsd.concat(QKV, "layers.{i}.attn.qkv.weight", dim=0),
        fdsd.cast(torch.float32, "embed.weight", "layers.{i}.norm.weight"),
    ),
    "cast all": lambda: RENAME >> fdsd.cast(torch.float32),
    "move and compute": lambda: fdsd.pipe(
        RENAME,
        fdsd.concat(QKV, "layers.{i}.attn.qkv.weight", dim=1, groups=4),
        fdsd.transpose("layers.{i}.mlp.up.weight"),
        fdsd.permute("layers.{i}.mlp.down.weight", (1, 0)),
        fdsd.add_scalar("embed.weight", 1),
        fdsd.map_tensors(flipped, "layers.{i}.norm.weight", spec=lambda spec: spec),
    ),
    "whole": lambda: RENAME >> fdsd.map_tensors(flipped, "embed.weight", spec=lambda spec: spec),
}


def shapes(nbytes: int, layers: int) -> dict[str, list[int]]:
    """Shapes of a transformer in bfloat16 of about that many bytes."""
    n = int((0.9 * nbytes / (2 * 11 * layers)) ** 0.5) // 64 * 64
    made: dict[str, list[int]] = {}
    for i in range(layers):
        made.update({f"model.layers.{i}.attn.{x}.weight": [n, n] for x in "qkv"})
        made[f"model.layers.{i}.mlp.up.weight"] = [4 * n, n]
        made[f"model.layers.{i}.mlp.down.weight"] = [n, 4 * n]
        made[f"model.layers.{i}.norm.weight"] = [n]
    used = sum(2 * math.prod(shape) for shape in made.values())
    made["model.embed.weight"] = [max(1, (nbytes - used) // (2 * n)), n]
    return made


def make_checkpoint(path: Path, nbytes: int, *, layers: int = 16, is_sparse: bool = True) -> None:
    """Write a safetensors file of about ``nbytes``, with holes and a few random blocks, or wholly random."""
    offset, header = 0, {}
    for name, shape in shapes(nbytes, layers).items():
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        start = file.tell()
        file.truncate(start + offset)
        step = 32 * BLOCK if is_sparse else BLOCK
        for at in range(0, offset, step):
            file.seek(start + at)
            file.write(os.urandom(min(BLOCK, offset - at)))


@frozen
class Watched:
    """What a rewrite took.

    Attributes:
        base: Anonymous memory after the imports, in bytes.
        peak: The most anonymous memory while it ran.
        seconds: How long the rewrite took, imports left out.
        cpu: Seconds of CPU in that time.
    """

    base: int
    peak: int
    seconds: float
    cpu: float

    @property
    def extra(self) -> int:
        """What the rewrite took on top of the imports."""
        return self.peak - self.base


def rewrite(source: Path, target: Path, pipeline: str, *, budget: str = "256MB", timeout: float = 600) -> Watched:
    """Run a rewrite in a fresh process, and watch it."""
    command = [sys.executable, str(Path(__file__)), str(source), str(target), pipeline, budget]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdin is not None and process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            base = peak = anonymous_memory(process.pid)
            process.stdin.write("go\n")
            process.stdin.flush()
            deadline = time.monotonic() + timeout
            while process.poll() is None and time.monotonic() < deadline:
                peak = max(peak, anonymous_memory(process.pid))
                time.sleep(0.001)
            lines = process.stdout.read().split()
        finally:
            process.kill()
    assert process.returncode == 0 and len(lines) == 2, (process.returncode, lines)
    return Watched(base, peak, float(lines[0]), float(lines[1]))


def anonymous_memory(pid: int) -> int:
    """The resident anonymous memory of a process in bytes; 0 when it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = [line.split()[1] for line in text.splitlines() if line.startswith("RssAnon")]
    return 1024 * int(found[0]) if found else 0


def main() -> None:
    source, target, pipeline, budget = sys.argv[1:]
    p = PIPELINES[pipeline]()
    print("ready", flush=True)
    sys.stdin.readline()
    start, cpu = time.perf_counter(), time.process_time()
    fdsd.save(p(fdsd.open(source)), target, budget=budget, overwrite=True)
    print(time.perf_counter() - start, time.process_time() - cpu)


if __name__ == "__main__":
    main()
