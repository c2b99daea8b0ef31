# ruff: noqa: E501
"""Programs may use event loops, threads and processes of their own inside the sandbox."""

import pytest
from verify_builders import call_reference, fenced, problem, stdin_reference

from klear_core.types import Outcome
from klear_core.verify import JudgePool

SQUARES = stdin_reference(("4\n", "0 1 4 9\n"))
MAIN = "if __name__ == '__main__':\n    n = int(input())\n"
PROGRAMS = {
    "asyncio": "import asyncio\nasync def sq(x):\n    await asyncio.sleep(0.01)\n    return x * x\nasync def main():\n    print(*await asyncio.gather(*(sq(i) for i in range(int(input())))))\nasyncio.run(main())",
    "asyncio in threads": "import asyncio\nasync def main():\n    print(*[await asyncio.to_thread(pow, i, 2) for i in range(int(input()))])\nasyncio.run(main())",
    "asyncio queue and timeout": "import asyncio\nasync def main():\n    q = asyncio.Queue()\n    for i in range(int(input())): q.put_nowait(i * i)\n    print(*[await asyncio.wait_for(q.get(), 1) for _ in range(q.qsize())])\nasyncio.run(main())",
    "Pool.map": f"from multiprocessing import Pool\ndef sq(x): return x * x\n{MAIN}    with Pool(2) as p: print(*p.map(sq, range(n)))",
    "Pool without a number": f"import multiprocessing as mp\ndef sq(x): return x * x\n{MAIN}    with mp.Pool() as p: print(*p.imap(sq, range(n)))",
    "Pool closed and joined": f"from multiprocessing import Pool\ndef sq(x, y): return x * y\n{MAIN}    p = Pool(3)\n    r = p.starmap_async(sq, [(i, i) for i in range(n)])\n    p.close()\n    p.join()\n    print(*r.get())",
    "ThreadPool": f"from multiprocessing.pool import ThreadPool\n{MAIN}    with ThreadPool(2) as p: print(*p.map(lambda x: x * x, range(n)))",
    "ProcessPoolExecutor": f"from concurrent.futures import ProcessPoolExecutor\ndef sq(x): return x * x\n{MAIN}    with ProcessPoolExecutor(2) as p: print(*p.map(sq, range(n)))",
    "ThreadPoolExecutor": f"from concurrent.futures import ThreadPoolExecutor\n{MAIN}    with ThreadPoolExecutor(2) as p: print(*p.map(lambda x: x * x, range(n)))",
    "Process and Queue": f"from multiprocessing import Process, Queue\ndef work(n, q):\n    for i in range(n): q.put(i * i)\n{MAIN}    q = Queue()\n    p = Process(target=work, args=(n, q))\n    p.start()\n    print(*[q.get() for _ in range(n)])\n    p.join()",
    "Pipe": f"from multiprocessing import Process, Pipe\ndef work(c): c.send([i * i for i in range(c.recv())])\n{MAIN}    a, b = Pipe()\n    p = Process(target=work, args=(b,))\n    p.start()\n    a.send(n)\n    print(*a.recv())\n    p.join()",
    "Lock, Value and Array": f"from multiprocessing import Process, Lock, Value, Array\ndef work(i, l, v, a):\n    for _ in range(200):\n        with l: v.value += 1\n    a[i] = i * i\n{MAIN}    l, v, a = Lock(), Value('i', 0), Array('i', n)\n    ps = [Process(target=work, args=(i, l, v, a)) for i in range(n)]\n    [p.start() for p in ps]\n    [p.join() for p in ps]\n    assert v.value == 200 * n\n    print(*a)",
    "terminate": f"import time\nfrom multiprocessing import Process\n{MAIN}    p = Process(target=time.sleep, args=(1000,))\n    p.start()\n    p.terminate()\n    p.join()\n    assert not p.is_alive() and p.exitcode == -15\n    print(*[i * i for i in range(n)])",
    "kill": f"import time\nfrom multiprocessing import Process\n{MAIN}    p = Process(target=time.sleep, args=(1000,))\n    p.start()\n    p.kill()\n    p.join()\n    assert p.exitcode == -9 and p.exitcode == -9\n    print(*[i * i for i in range(n)])",
    "exit status": f"import sys\nfrom multiprocessing import Process\n{MAIN}    p = Process(target=sys.exit, args=(3,))\n    p.start()\n    p.join()\n    assert p.exitcode == 3\n    print(*[i * i for i in range(n)])",
    "terminate after its end": f"import time\nfrom multiprocessing import Process, connection\n{MAIN}    p = Process(target=int)\n    p.start()\n    connection.wait([p.sentinel])\n    time.sleep(0.1)\n    p.terminate()\n    p.kill()\n    p.join()\n    assert p.exitcode == 0\n    print(*[i * i for i in range(n)])",
    "Condition and Event": f"from multiprocessing import Process, Event, Barrier, Semaphore, RLock, Condition\ndef work(e, c, r):\n    e.wait()\n    with c: c.notify_all()\n    with r:\n        with r: pass\n{MAIN}    e, c, r = Event(), Condition(), RLock()\n    p = Process(target=work, args=(e, c, r))\n    p.start()\n    with c:\n        e.set()\n        assert c.wait(20)\n    p.join()\n    print(*[i * i for i in range(n)])",
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_parallel_program_is_judged_like_any_other(code_pool: JudgePool, name: str) -> None:
    verdict = code_pool.submit(problem(SQUARES), fenced(PROGRAMS[name])).result()
    assert (verdict.outcome, verdict.score) == (Outcome.SCORED, 1.0), verdict.detail


def test_a_function_may_use_an_event_loop(code_pool: JudgePool) -> None:
    program = "import asyncio\nasync def twice(x): return 2 * x\ndef f(x): return asyncio.run(twice(x))"
    assert code_pool.judge(problem(call_reference("f", ("[4]", "8"))), fenced(program)).score == 1.0


PAIRS = "import socket\nfor family in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_VSOCK):\n    try:\n        socket.socketpair(family)\n        print('PAIR', family)\n    except OSError:\n        pass\ntry:\n    socket.socket(socket.AF_UNIX)\n    print('SOCKET')\nexcept OSError:\n    print('none')"


def test_only_unnamed_pairs_of_sockets_can_be_made(code_pool: JudgePool) -> None:
    assert code_pool.judge(problem(stdin_reference(("", "none\n"))), fenced(PAIRS)).score == 1.0
