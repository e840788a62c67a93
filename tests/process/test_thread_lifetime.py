"""Whether a thread has ended, whatever signal handlers have done to Python's own answer."""

from __future__ import annotations

import queue
import sys
import threading
import time

import torch

import lazyviz
from lazyviz.process.thread_lifetime import lifetime
from lazyviz.session import block


def in_thread(function):
    """The result of ``function`` on a thread that has ended, or its exception."""
    answers = queue.Queue()

    def work():
        try:
            answers.put((function(), None))
        except BaseException as error:
            answers.put((None, error))

    thread = threading.Thread(target=work)
    thread.start()
    result, error = answers.get(timeout=60)  # not `join`: Python may have lost the thread
    while thread.ident in sys._current_frames():
        time.sleep(0.001)
    if error is not None:
        raise error
    return result


def test_it_is_alive_as_long_as_its_thread():
    asked, ends = threading.Event(), threading.Event()
    references = []

    def work():
        references.append(lifetime())
        asked.set()
        ends.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    assert asked.wait(30)
    own = lifetime()
    assert references[0]() is not None and references[0]() is not own()
    ends.set()
    thread.join(30)
    assert references[0]() is None
    assert own() is not None and lifetime() is own


def test_a_thread_with_the_number_of_an_earlier_one_is_another():
    assert in_thread(lifetime)() is None
    assert in_thread(lambda: lifetime()() is not None)


def raise_in_the_library_of_threads(number):
    """Ask whether the thread is alive, with an error at the ``number``-th line of the answer; whether there
    was one.
    """
    lines = 0

    def trace(frame, event, argument):
        nonlocal lines
        if frame.f_code.co_filename != threading.__file__:
            return None
        if event == "line":
            lines += 1
            if lines == number:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        threading.current_thread().is_alive()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def test_the_outer_block_stays_open_after_an_interrupt_in_which_python_loses_the_thread():
    def work():
        number = 1
        while raise_in_the_library_of_threads(number):
            number += 1
            with lazyviz.lazy() as outer:
                with lazyviz.lazy() as inner:
                    first = torch.ones(2) + 1
                second = first * 2
            assert (len(inner.nodes), len(outer.nodes)) == (2, 1)
            assert outer.pending == 1 and second.tolist() == [4, 4]
        return number

    assert in_thread(work) > 3


def test_a_block_that_a_handler_exits_meanwhile_is_exited_once(monkeypatch):
    class Claims(list):
        """A signal comes just before a block is removed."""

        def remove(self, item):
            monkeypatch.setattr(block, "_claims", list(self))
            with lazyviz.lazy():
                made.append(torch.ones(2) + 1)
            assert item not in block._claims
            block._claims.remove(item)

    in_thread(lazyviz.lazy().__enter__)  # a block of a thread that has ended
    assert block.is_any_entered()
    monkeypatch.setattr(block, "_claims", Claims(block._claims))
    made = []
    with lazyviz.lazy():
        made.append(torch.ones(2) * 3)
    assert [each.tolist() for each in made] == [[2, 2], [3, 3]]
    assert not block.is_any_entered()
