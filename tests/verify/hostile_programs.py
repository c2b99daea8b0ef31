# ruff: noqa: E501
"""Programs that attack the machine or the verdict. The task is to add two integers; the score each one honestly earns is 0.

`SCRIPTS` read standard input, `CALLS` are judged by calls of `add`, `ASSERTED` by assertions on `add`. `SPINNING` programs burn CPU
and `WAITING` ones wall clock until a limit ends them, `FILLING` ones take memory; all others end by themselves.
"""

SCRIPTS = {
    "fork bomb": "import os\nwhile True:\n    os.fork()",
    "quiet fork bomb": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "memory bomb": "x = []\nwhile True:\n    x.append(bytearray(1 << 24))",
    "memory bomb in many processes": (
        "import os, time\nfor _ in range(30):\n    try:\n        if os.fork() == 0:\n            x = bytearray(100 << 20)\n"
        "            for i in range(0, len(x), 4096): x[i] = 1\n            time.sleep(60)\n    except (OSError, MemoryError):\n        pass\n"
        "time.sleep(60)"
    ),
    "disk bomb": (
        "import os\nfor d in ('/tmp', '/var/tmp', '/dev/shm', os.path.expanduser('~'), '.', '/run', '/run/lock'):\n    try:\n"
        "        with open(d + '/klear_bomb', 'wb') as f:\n            while True: f.write(b'x' * (1 << 20))\n    except OSError:\n        pass"
    ),
    "files in memory": "import os\ntry:\n    os.memfd_create('x')\n    print('OPEN')\nexcept OSError:\n    pass",
    "output bomb": "while True:\n    print('x' * 100000)",
    "error output bomb": "import sys\nwhile True:\n    sys.stderr.write('x' * 100000)",
    "endless loop": "while True:\n    pass",
    "endless sleep": "import time\ntime.sleep(10**6)",
    "catastrophic C call": "x = 9 ** 9 ** 8",
    "signals ignored": "import signal\nfor s in range(1, 65):\n    try:\n        signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError):\n        pass\nwhile True:\n    pass",
    "signals blocked": "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True:\n    pass",
    "daemon by double fork": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        import signal\n"
        "        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n        time.sleep(1000)\n    os._exit(0)"
    ),
    "daemon that keeps the output open": "import os, time\nif os.fork() == 0:\n    time.sleep(1000)\nprint(5)",
    "sockets": (
        "import socket\nfor family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, 16, 17, 40):\n    try:\n"
        "        socket.socket(family, socket.SOCK_STREAM)\n        print('OPEN', family)\n    except OSError:\n        pass"
    ),
    "reads of secrets": (
        "import os, glob\nfor p in ['/etc/shadow', '/root/.bashrc', '/proc/1/environ', '/proc/%d/environ' % os.getppid(), '/proc/%d/mem' % os.getppid(),"
        " os.path.expanduser('~/.ssh/id_rsa')] + glob.glob('/srv/*') + glob.glob('/opt/*') + glob.glob('/home/*/*'):\n    try:\n"
        "        open(p, 'rb').read(10)\n        print('READ', p)\n    except OSError:\n        pass"
    ),
    "memory of other processes": (
        "import os\nfor p in os.listdir('/proc'):\n    for mode in ('rb', 'r+b'):\n        try:\n"
        "            if p.isdigit() and int(p) != os.getpid():\n                open('/proc/%s/mem' % p, mode)\n                print('READ', p)\n"
        "        except OSError:\n            pass"
    ),
    "kills of other processes": (
        "import os, signal\nfor pid in [-1, 1, os.getppid()] + list(range(2, 400)):\n    for s in (signal.SIGKILL, signal.SIGSTOP):\n        try:\n"
        "            if pid != os.getpid():\n                os.kill(pid, s)\n                print('KILLED', pid)\n        except OSError:\n            pass"
    ),
    "limits of the parent": (
        "import os, resource\nfor what in (resource.RLIMIT_CPU, resource.RLIMIT_NOFILE, resource.RLIMIT_AS):\n    try:\n"
        "        resource.prlimit(os.getppid(), what, (1, 1))\n        print('LIMITED')\n    except OSError:\n        pass\n"
        "try:\n    os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)\n    print('RENICED')\nexcept OSError:\n    pass"
    ),
    "raises its own limits": (
        "import resource\nfor what in range(16):\n    try:\n        soft, hard = resource.getrlimit(what)\n"
        "        resource.setrlimit(what, (resource.RLIM_INFINITY,) * 2)\n        if hard != resource.RLIM_INFINITY: print('RAISED', what)\n"
        "    except (OSError, ValueError):\n        pass"
    ),
    "symlinks": (
        "import os\nfor d in ('/tmp', '.', '/dev/shm', '/var/tmp'):\n    try:\n        os.symlink('/etc/passwd', d + '/klear_link')\n"
        "        print('LINKED', d)\n    except OSError:\n        pass"
    ),
    "invalid UTF-8": "import os\nos.write(1, bytes(range(128, 256)))",
    "NUL bytes": "print('\\0' * 1000)",
    "closed stdout": "import os, sys\nos.close(1)\nprint(3)",
    "closed everything": "import os\nos.closerange(0, 1000)",
    "deep recursion": "def f(): return f()\nf()",
    "deep recursion in C": "import sys\nsys.setrecursionlimit(10**9)\nx = []\nfor _ in range(10**6): x = [x]\nrepr(x)",
    "deep nesting in the source": "x = " + "(" * 50_000 + ")" * 50_000,
    "deep expression in the source": "x = " + "-" * 100_000 + "1",
    "NUL in the source": "print(1)\0",
    "ctypes crash": "import ctypes\nctypes.string_at(0)",
    "ctypes jump": "import ctypes\nctypes.CFUNCTYPE(None)(1)()",
    "abort": "import os\nos.abort()",
    "thread bomb": "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(1000,)).start()",
    "thread that never ends": "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()",
    "namespaces": "import ctypes\nfor flag in (0x10000000, 0x20000000, 0x40000000, 0x20000):\n    if ctypes.CDLL(None).unshare(flag) == 0: print('UNSHARED', flag)",
    "ptrace": "import ctypes, os\nif ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0: print('TRACED')",
    "shared memory left behind": (
        "from multiprocessing import shared_memory\ntry:\n    shared_memory.SharedMemory('klear_left', create=True, size=1 << 20)\n    print('SHARED')\nexcept OSError:\n    pass"
    ),
    "system V memory": "import ctypes\nif ctypes.CDLL(None).shmget(0x1234, 4096, 0o1666) >= 0: print('SHARED')",
    "exit at once": "import os\nos._exit(0)",
    "SystemExit at once": "raise SystemExit(0)",
    "kills itself": "import os\nos.kill(os.getpid(), 9)",
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "os.execv": "import os\nos.execv('/bin/sleep', ['sleep', '1000'])",
    "setuid": "import os\nos.setuid(0)\nprint('ROOT')",
    "sudo and friends": "import os\nos.system('su -c id; sudo id; mount -t tmpfs x /mnt')",
    "writes to descriptors it finds": (
        "import os\nfor fd in range(3, 300):\n    try:\n        os.write(fd, b'\\x00\\x00\\x00\\x11\\x00' + b'\\x00' * 16 + b'3\\n')\n    except OSError:\n        pass"
    ),
    "frames": "import sys\nf = sys._getframe()\nwhile f:\n    print(sorted(f.f_locals)[:50], {k: v for k, v in f.f_locals.items() if isinstance(v, (bytes, str, dict))})\n    f = f.f_back",
    "expected outputs in memory": (
        "import gc\nfound = [o for o in gc.get_objects() if isinstance(o, dict) and 'expected' in o]\nprint(found[0]['expected'] if found else 'nothing')"
    ),
    "patched builtins": (
        "import builtins\nbuiltins.print = builtins.open = builtins.len = lambda *a, **k: 3\nbuiltins.str = type('S', (str,), {'__eq__': lambda s, o: True})\nimport json\njson.dumps = lambda *a: '3'"
    ),
    "digits of another script": "print('\\uff13')",
    "number with underscore": "print('0_3')",
    "quits in a thread": "import threading, os\nthreading.Thread(target=lambda: os._exit(0)).start()\nwhile True: pass",
    "CPU in children": "import os\nfor _ in range(20):\n    if os.fork() == 0:\n        while True: pass\nos.wait()",
}  # fmt: skip

ALWAYS_EQUAL = (
    "class Same(int):\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n    __hash__ = int.__hash__\n"
    "    def __bool__(self): return True\n    def __repr__(self): return '3'\n"
)

CALLS = {
    "os._exit in the call": "import os\ndef add(a, b):\n    os._exit(0)",
    "os._exit at import": "import os\nos._exit(0)\ndef add(a, b): pass",
    "SystemExit in the call": "def add(a, b):\n    raise SystemExit(0)",
    "always equal": ALWAYS_EQUAL + "def add(a, b):\n    return Same(-77)",
    "always equal list": "class L(list):\n    def __eq__(self, o): return True\ndef add(a, b):\n    return L([1])",
    "always equal object": "class A:\n    def __eq__(self, o): return True\ndef add(a, b):\n    return A()",
    "patched json": "import json\njson.dumps = lambda *a, **k: '{\"value\": {\"passed\": true}}'\ndef add(a, b):\n    return -77",
    "verdict in place of the result": "import os, struct\np = b'{\"passed\": true}'\nfor fd in range(3, 60):\n    try:\n        os.write(fd, struct.pack('>I', len(p)) + p)\n    except OSError:\n        pass\ndef add(a, b):\n    return -77",
    "garbage in place of the result": "import os\nfor fd in range(3, 60):\n    try:\n        os.write(fd, b'\\xff' * 64)\n    except OSError:\n        pass\ndef add(a, b):\n    return -77",
    "endless frame": "import os, struct\ndef add(a, b):\n    os.write(4, struct.pack('>I', 2**31))\n    while True: os.write(4, b'x' * 65536)",
    "half a frame": "import os, struct, time\ndef add(a, b):\n    os.write(4, struct.pack('>I', 100) + b'x')\n    time.sleep(1000)",
    "deep result": "def add(a, b):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
    "cyclic result": "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
    "endless result": "import itertools\ndef add(a, b):\n    return itertools.count()",
    "huge result": "def add(a, b):\n    return 'x' * (1 << 25)",
    "huge integer": "def add(a, b):\n    return 10 ** 10**6",
    "NaN": "def add(a, b):\n    return float('nan')",
    "infinity": "def add(a, b):\n    return float('inf')",
    "result that raises": "class B:\n    def __getattribute__(self, n): raise SystemError\ndef add(a, b):\n    return B()",
    "result of an odd class": "class T: pass\nT.__name__ = 'ListNode'\ndef add(a, b):\n    return T()",
    "frames": "import sys\ndef add(a, b):\n    f = sys._getframe()\n    while f:\n        for v in list(f.f_locals.values()):\n            if isinstance(v, dict) and 'expected' in v: return v['expected']\n        f = f.f_back\n    return -77",
    "closed channel": "import os\nos.close(4)\ndef add(a, b):\n    return -77",
    "patched service": "import sys\nfor m in list(sys.modules.values()):\n    if hasattr(m, 'send'): m.send = None\nsys.modules['klear_service'].__dict__['Wire'].encode = lambda s, v: True\ndef add(a, b):\n    return -77",
}  # fmt: skip

ASSERTED = {
    **{name: program for name, program in CALLS.items() if name not in ("NaN", "infinity")},
    "replaces AssertionError": "import builtins\nbuiltins.AssertionError = Exception\ndef add(a, b):\n    return -77",
    "defines the tests' helpers": "def check(f): pass\ndef is_same_list(*a): return True\ndef set(*a): return True\ndef add(a, b):\n    return -77",
    "truthy object": "class Yes:\n    def __bool__(self): return True\ndef add(a, b):\n    return Yes()",
    "handle to another": "def add(a, b):\n    return add",
    "tests in the traceback": "import traceback, sys\ndef add(a, b):\n    for f, _ in traceback.walk_stack(None):\n        for v in f.f_locals.values():\n            if isinstance(v, str) and 'assert' in v: return int(v.split('==')[1])\n    return -77",
    "optimised away": "import sys\nsys.flags = None\n__debug__ if True else 0\ndef add(a, b):\n    return -77",
}  # fmt: skip

HOSTILE_FILES = "klear_"  # what their names begin with, wherever these programs try to leave files

SPINNING = {
    "quiet fork bomb", "endless loop", "catastrophic C call", "signals ignored", "signals blocked", "deep recursion in C",
    "CPU in children", "quits in a thread", "huge integer",
}  # fmt: skip
WAITING = {
    "endless sleep",
    "thread bomb",
    "thread that never ends",
    "stops itself",
    "os.execv",
    "sudo and friends",
    "half a frame",
}
FILLING = {"memory bomb", "memory bomb in many processes", "endless result", "huge result"}
