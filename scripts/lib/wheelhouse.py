"""Fills and verifies wheelhouse/ from the hash-pinned locks; run by scripts/setup, standard library only.

Every wheel is compared with the sha256 values of its lock entry. What is there and right is kept, what no
lock names is removed, what is missing is downloaded by pip in its hash-checking mode. A stamp with the digest
of the locks makes the next run a matter of milliseconds, also after the directory was copied to a machine
without a network.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

STAMP = ".complete"
REQUIREMENT = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s\\;]+)")
DIGEST = re.compile(r"--hash=sha256:([0-9a-f]{64})")

Key = tuple[str, str]


def normalise(name: str) -> str:
    """The project name as package indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(path: Path) -> dict[Key, tuple[set[str], str]]:
    """The pins of one lock: (name, version) -> (allowed sha256 values, the entry's own text)."""
    entries: dict[Key, tuple[set[str], str]] = {}
    block: list[str] = []
    for line in [*path.read_text(encoding="utf-8").splitlines(), "end==0"]:
        if REQUIREMENT.match(line) and block:
            text = "\n".join(block) + "\n"
            pin = REQUIREMENT.match(block[0])
            assert pin is not None, block[0]
            entries[normalise(pin[1]), pin[2]] = (set(DIGEST.findall(text)), text)
            block = []
        if REQUIREMENT.match(line) or (block and line.startswith(" ")):
            block.append(line)
    return entries


def key_of(wheel: Path) -> Key:
    """(name, version) from a wheel's file name."""
    name, version = wheel.name.split("-")[:2]
    return normalise(name), version


def file_sha256(path: Path) -> str:
    """The sha256 of a file as hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def stamp_text(locks: list[Path], wheels: list[Path]) -> str:
    """What the stamp holds: the locks' digest, then name and size of every wheel."""
    digest = hashlib.sha256(b"".join(lock.read_bytes() for lock in locks)).hexdigest()
    names = sorted(f"{wheel.name} {wheel.stat().st_size}" for wheel in wheels)
    return "\n".join([digest, *names]) + "\n"


def verified(directory: Path, pins: dict[Key, tuple[set[str], str]]) -> set[Key]:
    """The pins that have a right wheel; wheels that are stale, duplicate or damaged are removed."""
    found: set[Key] = set()
    for wheel in sorted(directory.glob("*.whl")):
        key = key_of(wheel)
        if key in pins and file_sha256(wheel) in pins[key][0]:
            found.add(key)
        else:
            print(f"wheelhouse: {wheel.name} is not what the lock names; removed", file=sys.stderr)
            wheel.unlink()
    return found


def download(directory: Path, texts: list[str], pip: list[str]) -> bool:
    """Let pip fetch the wheels of these lock entries; True when it could."""
    with tempfile.TemporaryDirectory() as scratch:
        wanted = Path(scratch) / "missing.lock"
        wanted.write_text("".join(texts), encoding="utf-8")
        options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--no-cache-dir"]
        quiet = ["--quiet", "--disable-pip-version-check", "--retries", "2"]
        command = [*pip, "download", *options, *quiet, "-r", str(wanted), "-d", str(directory)]
        return subprocess.run(command, check=False).returncode == 0


def main() -> int:
    """Make the wheelhouse complete; 0 when it is, 1 with one line otherwise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheelhouse", type=Path, required=True)
    parser.add_argument("--pip", required=True, help="the Python whose pip downloads")
    parser.add_argument("locks", type=Path, nargs="+")
    args = parser.parse_args()
    directory: Path = args.wheelhouse
    directory.mkdir(exist_ok=True)
    stamp = directory / STAMP
    wheels = sorted(directory.glob("*.whl"))
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == stamp_text(args.locks, wheels):
        return 0
    stamp.unlink(missing_ok=True)
    pins = {key: entry for lock in args.locks for key, entry in read_lock(lock).items()}
    missing = sorted(pins.keys() - verified(directory, pins))
    if missing:
        print(f"wheelhouse: downloading {len(missing)} of {len(pins)} wheels", flush=True)
        fetched = download(directory, [pins[key][1] for key in missing], [args.pip, "-m", "pip"])
        missing = sorted(pins.keys() - verified(directory, pins))
        if missing or not fetched:
            names = ", ".join("==".join(key) for key in missing[:3]) + (", ..." if len(missing) > 3 else "")
            print(
                f"wheelhouse: {len(missing)} wheels are missing ({names}) and could not be downloaded: run "
                f"scripts/setup on a machine with a network, then copy its {directory.name}/ directory here",
                file=sys.stderr,
            )
            return 1
    stamp.write_text(stamp_text(args.locks, sorted(directory.glob("*.whl"))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
