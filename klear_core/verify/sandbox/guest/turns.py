"""Runs inside a jailed child as module `klear_turns`: lets the threads of the tests and of the program talk in turns.

The two sides send one message each in turn: a request, the answer to one, or `go`, which passes the turn on. A thread
that has sent a message reads the next one. While it has to wait for more, it gives the turn to other threads of its
side, so that what two threads of the tests call in the program, and what a thread of the program calls in the tests
while nothing else runs, happens.
"""

import _thread
import sys
import threading
from time import sleep  # the tests may replace `time.sleep`

from klear_values import receive, send

_SHORT_S = 0.001
_PERIOD_S = 0.01


class Turns:
    """The requests and answers of one side. Its lock is free only while the turn is at this side."""

    def __init__(self, wire, answer, read, add=dict, take=lambda message: None):
        self.wire = wire
        self.answer = answer  # gives the answer to a request of the other side
        self.read = read  # takes an answer; gives what `ask` returns
        self.add, self.take = add, take  # gives what goes with each message; takes it
        self.lock = threading.RLock()
        self.answers = {}
        self.num_asked = 0
        self.passing = None  # the thread that passes the turn on regularly

    def ask(self, message):
        """Send a request, answer those of the other side, and return what `read` makes of the answer."""
        with self.lock:
            self.num_asked += 1
            number = self.num_asked
            self.exchange(dict(message, id=number))
            while number not in self.answers:
                self.without_lock(sleep, _SHORT_S)
                if number not in self.answers:
                    self.exchange(self.go())
            return self.answers.pop(number)

    def exchange(self, message):
        """Send a message, then answer requests until another message comes."""
        while True:
            if threading.active_count() > 1:
                message["is_threaded"] = True
            message.update(self.add())
            send(message)
            message = receive()
            self.wire.take_changes(message)
            self.take(message)
            self._pass_on(message)
            if "do" not in message:
                break
            message = dict(self.answer(message), answers=message.get("id"))
        if "answers" in message:
            self.answers[message["answers"]] = self.read(message)

    def serve(self, request):
        """Answer a request, and all further ones."""
        with self.lock:
            self.wire.take_changes(request)
            self._pass_on(request)
            message = dict(self.answer(request), answers=request["id"])
            while True:
                self.exchange(message)
                self.without_lock(sleep, _SHORT_S)
                message = self.go()

    def go(self):
        return self.wire.message(lambda: {"go": True})

    def without_lock(self, function, *args):
        """Call what takes time; other threads of this side may talk meanwhile."""
        state = self.lock._release_save()
        try:
            return function(*args)
        finally:
            self.lock._acquire_restore(state)

    def _pass_on(self, message):
        """Pass the turn on regularly while the other side has several threads; a thread that does may get a request."""
        is_busy = self.passing == _thread.get_ident() and "do" in message
        if "is_threaded" not in message:
            self.passing = None
        elif self.passing is None or is_busy:
            self.passing = 0
            _thread.start_new_thread(self._regularly, ())  # not of `threading`, which counts its threads

    def _regularly(self):
        if self.passing == 0:
            self.passing = _thread.get_ident()
        while self.passing == _thread.get_ident():
            sleep(_PERIOD_S)
            with self.lock:
                if self.passing == _thread.get_ident():
                    self.exchange(self.go())


def follow(tasks, awaitable, do):
    """Start, look at, cancel or end a task of the tests for the program; None without a running event loop."""
    asyncio = sys.modules["asyncio"]
    if do == "__start__" and asyncio._get_running_loop() is None:
        return None
    if do == "__start__":
        tasks[id(awaitable)] = asyncio.ensure_future(awaitable)
        return False
    task = tasks[id(awaitable)]
    return {"__done__": task.done, "__cancel__": task.cancel, "__result__": task.result}[do]()


def finished(awaitable):
    """Await something of the tests in a thread of its own: a loop of theirs may run in this one."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    async def result():
        return await awaitable

    # `asyncio.run` would end the asynchronous generators of the tests.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.new_event_loop().run_until_complete(result())).result()
