"""Ctrl-C is for the parent: its children neither see it nor outlive it."""

import multiprocessing
import os
import signal
import time

import pytest

from grpo_lab.trainer.interrupts import children_born_deaf, children_ended_early


def interrupted(pipe):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGINT)
    pipe.send("alive")
    time.sleep(600)


def test_children_do_not_see_ctrl_c_and_end_with_it():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with children_born_deaf():
        child = context.Process(target=interrupted, args=(theirs,), daemon=True)
        child.start()
    assert ours.poll(60)
    assert ours.recv() == "alive"
    with pytest.raises(KeyboardInterrupt), children_ended_early():
        raise KeyboardInterrupt
    child.join(60)
    assert child.exitcode == -signal.SIGTERM


def test_the_parent_sees_it_when_they_are_born():
    with pytest.raises(KeyboardInterrupt), children_born_deaf():
        os.kill(os.getpid(), signal.SIGINT)
