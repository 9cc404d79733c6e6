"""Stop requests: flags set by signals and a clock."""

from __future__ import annotations

import os
import signal
import threading

from megastack.training.signals import TIME_LIMIT, StopRequest, describe_stop


def test_a_signal_is_a_stop_request_inside_and_unchanged_outside():
    before = signal.getsignal(signal.SIGUSR1)
    with StopRequest(signals=(signal.SIGTERM, signal.SIGUSR1)) as stop:
        assert stop.code == 0
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.code == signal.SIGUSR1 and describe_stop(stop.code) == "received SIGUSR1"
    assert signal.getsignal(signal.SIGUSR1) is before


def test_the_time_limit_and_other_threads():
    assert StopRequest(1000).code == 0 and StopRequest(0).code == TIME_LIMIT
    assert describe_stop(TIME_LIMIT) == "the time limit is reached"
    errors = []

    def enter() -> None:
        try:
            with StopRequest(signals=(signal.SIGTERM,)):
                pass
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert not errors
