"""Ranks that were started and are not needed: they wait, and end when and as the others do.

A worker that ends by itself would not be idle in the eyes of torchrun: an agent whose workers have all ended waits for
the other agents, joins no restart any more, and closes the rendezvous for all of them when it leaves. So spare ranks
stay, and look for the first rank's word in the store.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch.distributed as dist

from megastack.errors import ConfigError
from megastack.training.signals import StopRequest, describe_stop
from megastack.training.state import RunResult

OVER, GONE = "megastack/over", "megastack/gone"
LOOKS_EVERY_S = 0.2


def wait_out(
    store: dist.Store, rank: int, folder: Path, grace_s: float, signals: Sequence[signal.Signals] = ()
) -> RunResult:
    """Wait as a spare rank until the run is over; how it ended.

    Args:
        store: shared with the ranks that train.
        rank: this one.
        folder: the run folder, for the result.
        grace_s: how long after a signal the run may take to end, before this rank leaves by itself.
        signals: those that ask this rank to end.

    Raises:
        ConfigError: the run was refused.
    """
    asked_at = None
    with StopRequest(None, signals) as stop:
        while True:
            try:
                if store.check([OVER]):
                    break
            except dist.DistError:
                return RunResult("failed", 0, None, folder, "the first rank cannot be reached any longer")
            if stop.code:
                asked_at = asked_at or time.monotonic()
                if time.monotonic() > asked_at + grace_s:
                    return RunResult("preempted", 0, None, folder, describe_stop(stop.code))
            time.sleep(LOOKS_EVERY_S)
    return _heard(store, rank, folder)


def _heard(store: dist.Store, rank: int, folder: Path) -> RunResult:
    word = json.loads(store.get(OVER))
    store.set(f"{GONE}/{rank}", "")
    if word["status"] == "refused":
        raise ConfigError(word["reason"])
    return RunResult(word["status"], word["step"], word["loss"], folder, word["reason"])


def dismiss(store: dist.Store, spare: Iterable[int], outcome: RunResult | BaseException, grace_s: float) -> None:
    """Tell spare ranks how the run ended, on the first rank, and wait until they know: the store may end with it."""
    waiting, deadline = list(spare), time.monotonic() + grace_s
    if not waiting:
        return
    store.set(OVER, json.dumps(_word(outcome)))
    while waiting and time.monotonic() < deadline:
        waiting = [rank for rank in waiting if not store.check([f"{GONE}/{rank}"])]
        if waiting:
            time.sleep(LOOKS_EVERY_S / 4)


def _word(outcome: RunResult | BaseException) -> dict[str, object]:
    if isinstance(outcome, RunResult):
        return {"status": outcome.status, "step": outcome.step, "loss": outcome.loss, "reason": outcome.reason}
    status = "refused" if isinstance(outcome, ConfigError) else "failed"
    return {"status": status, "step": 0, "loss": None, "reason": str(outcome)}
