# SPDX-License-Identifier: Apache-2.0
"""The signals that stop a run, each sent to this process."""

import os
import signal

import pytest

from verl.trainer.run.stopping import StopRequest, hangups_for_us_only


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_lets_the_step_finish_and_names_the_exit_status(number, capsys):
    stop = StopRequest()

    with stop.listening():
        send(number)

    assert stop.signal == number and stop.exit_status == 128 + number
    assert f"{number.name}: finishing and saving this step" in capsys.readouterr().err


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGHUP])
def test_the_hangups_of_a_closing_terminal_never_end_the_run_at_once(first):
    stop = StopRequest()

    with stop.listening():
        for number in (first, signal.SIGHUP, signal.SIGHUP):
            send(number)
        with pytest.raises(SystemExit) as ended:
            send(signal.SIGTERM)

    assert stop.signal == first and ended.value.code == 128 + signal.SIGTERM


def test_nohup_lets_a_run_continue_without_its_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = StopRequest()
        with stop.listening():
            send(signal.SIGHUP)
            assert stop.signal is None
            send(signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_forked_process_leaves_the_signals_to_the_run(capfd):
    stop = StopRequest()

    with stop.listening():
        if (pid := os.fork()) == 0:
            send(signal.SIGHUP)
            send(signal.SIGINT)
            os._exit(0 if stop.signal is None else 1)
        assert os.waitpid(pid, 0)[1] == 0

    assert capfd.readouterr().err == ""


def test_processes_that_are_started_meanwhile_survive_a_hangup():
    with hangups_for_us_only():
        child = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "0.2")
    os.kill(child, signal.SIGHUP)

    assert os.waitpid(child, 0)[1] == 0
