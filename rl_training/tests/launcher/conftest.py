"""A launcher run with a Python that records what it was asked to do instead of training."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
LAUNCHER = REPOSITORY / "scripts" / "train" / "grpo_multinode.fish"

# validate, probe-judge and torchrun are answered here; everything else (the supervisor) runs for real.
# Without the site's packages it starts in a tenth of the time, above all where coverage is measured.
STUB = """#!{python} -SE
import json, os, sys
arguments = sys.argv[1:]
record = {{"argv": arguments, "cwd": os.getcwd(), "env": dict(os.environ)}}
out = {out!r}
module = arguments[1] if arguments[:1] == ["-m"] else ""
if arguments[1:3] == ["wan_trainer.cli.main", "probe-judge"]:
    json.dump(record, open(out + "/probe.json", "w"))
    sys.exit(int(os.environ.get("STUB_PROBE_STATUS", "0")))
if module == "wan_trainer.cli.main":
    json.dump(record, open(out + "/validate.json", "w"))
    facts = arguments[arguments.index("--facts") + 1]
    open(facts, "w").write(open(out + "/facts").read())
    sys.exit(int(os.environ.get("STUB_VALIDATE_STATUS", "0")))
if module == "wan_trainer.preflight.agent":
    json.dump(record, open(out + "/torchrun.json", "w"))
    if "STUB_RANK" in os.environ:
        # As torchrun does: ranks in sessions of their own, and status 1 for every way in which they can fail.
        import subprocess
        rank = subprocess.Popen([{python!r}, "-SEc", os.environ["STUB_RANK"], out], start_new_session=True)
        sys.exit(int(rank.wait() != 0))
    sys.exit(int(os.environ.get("STUB_TORCHRUN_STATUS", "0")))
if module == "wan_trainer.preflight.supervise":
    # Its own tests measure what they cover of it.
    os.environ.pop("COVERAGE_PROCESS_CONFIG", None)
os.execv({python!r}, [{python!r}, *arguments])
"""


@dataclass(frozen=True)
class Launch:
    """A launcher with a recording Python. `out` holds the records, `output_dir` is its run directory."""

    out: Path
    output_dir: Path
    python: Path

    def environment(self, **extra: str) -> dict[str, str]:
        """The caller's environment without a rendezvous, plus `extra`."""
        names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "OMP_NUM_THREADS", "KERNELS_CACHE")
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in names and not name.startswith("WAN_TRAINER_VLM_")
        }
        return {**kept, "WAN_TRAINER_PYTHON": str(self.python), **extra}

    def run(
        self, *arguments: str, cwd: Path | None = None, launcher: Path = LAUNCHER, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the launcher to its end."""
        return subprocess.run(
            ["fish", str(launcher), *arguments],
            cwd=cwd,
            env=self.environment(**env),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def start(self, *arguments: str, launcher: Path = LAUNCHER, **env: str) -> subprocess.Popen[str]:
        """Start the launcher and return at once."""
        command = ["fish", str(launcher), *arguments]
        return subprocess.Popen(command, env=self.environment(**env), stderr=subprocess.PIPE, text=True)

    def record(self, name: str) -> dict:
        """What the stub was called with: argv, cwd, env."""
        return json.loads((self.out / f"{name}.json").read_text(encoding="utf-8"))

    def called(self, name: str) -> bool:
        """Whether the stub got that far."""
        return (self.out / f"{name}.json").exists()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """A launcher whose Python records validate and torchrun; the config resolves to the CPU."""
    assert shutil.which("fish"), "fish is missing: run scripts/setup"
    out, output_dir = tmp_path / "records", tmp_path / "a run"
    out.mkdir()
    output_dir.mkdir()
    (out / "facts").write_text(f"device=cpu\noutput_dir={output_dir}\nrendezvous_timeout_s=30\n")
    python = tmp_path / "recording python"
    python.write_text(STUB.format(python=sys.executable, out=str(out)), encoding="utf-8")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    # The stub's interpreter line cannot hold spaces in its own path, only in the script's.
    yield Launch(out, output_dir, python)
