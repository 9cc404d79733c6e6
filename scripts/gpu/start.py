"""Steps: what the machine is, and that runs start on it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu.task import TINY, Task
from megastack.observe.devices import describe_environment, peak_flops

QUERY = "name,memory.total,driver_version,pcie.link.gen.current,ecc.errors.uncorrected.volatile.total"
SMI = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv"]


def environment(task: Task) -> dict[str, Any]:
    """Versions, the device, what nvidia-smi says."""
    found: dict[str, Any] = {"description": describe_environment(task.torch_device)}
    found["peak_flops"] = peak_flops(task.torch_device, "bf16")
    if shutil.which("nvidia-smi"):
        found["nvidia-smi"] = subprocess.run(SMI, capture_output=True, text=True).stdout.splitlines()
    return found


def start(task: Task) -> dict[str, Any]:
    """A run started by the command line, by torchrun, and a generation from its checkpoint."""
    cli, torchrun = Path("cli").resolve(), Path("torchrun").resolve()
    overrides = [*TINY, f"device={task.device}", "run.steps=3", "checkpoint.at_end=true"]
    task.command("train", *overrides, f"run.dir={cli}")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"]
    task.command("train", *overrides, f"run.dir={torchrun}", launcher=launcher)
    text = task.command("generate", str(cli), "--prompt", "The ", "--max-new-tokens", "8")
    logs = [line for path in sorted((cli / "logs").glob("*")) for line in path.read_text().splitlines()]
    return {"generated": text[-200:], "log": logs[:12]}
