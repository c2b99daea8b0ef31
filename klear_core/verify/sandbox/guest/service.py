"""Runs inside a jailed child as module `klear_service`: answers calls of the program, or runs the tests, by role."""

from klear_tester import serve_tester
from klear_values import ListNode, TreeNode, Wire, receive, send, text_of


class ProgramSide:
    """Answers calls of the untrusted program's functions."""

    def __init__(self, names, defined):
        self.names = names
        self.defined = defined
        self.wire = Wire(self._find, keeps_objects=True)
        # A program that defines ListNode itself may rely on the attributes and methods of its own class.
        self.wire.node = lambda name: self.names.get(name) or Wire.node(self.wire, name)

    def _find(self, tag, value):
        return self.wire.kept[value] if tag == "h" else self.resolve(value)

    def resolve(self, path):
        """Return the object at a path: a name that the program defines, or a handle, followed by attributes."""
        first, *attributes = path
        target = self.wire.kept[first] if isinstance(first, int) else self._defined(first)
        for name in attributes:
            target = getattr(target, name)
        return target

    def _defined(self, name):
        if name not in self.defined or name not in self.names:
            raise NameError("the program does not define %r" % name)
        return self.names[name]

    def entry(self, name):
        """Return the function to call. The class Solution comes first: a star import may bind the same name."""
        if "Solution" in self.defined and hasattr(self.names.get("Solution"), name):
            return getattr(self.names["Solution"](), name)
        return self._defined(name)

    def answer(self, request):
        """Call, set, read or list what the request names, and return the result encoded."""
        args = [self.wire.decode(a) for a in request["args"]]
        kwargs = {k: self.wire.decode(v) for k, v in request.get("kwargs", {}).items()}
        target = self.entry(request["entry"]) if "entry" in request else self.resolve(request["path"])
        if "set" in request:
            setattr(target, request["set"], args[0])
            return None
        if request.get("get"):
            return self.wire.encode(target)
        if request.get("list"):
            return self.wire.encode(list(target))
        return self.wire.encode(target(*args, **kwargs))


def serve_program(code, program, new_main):
    program.provide()
    names = new_main("solution", {"ListNode": ListNode, "TreeNode": TreeNode})
    exec(code, names)
    side = ProgramSide(names, program.defined)
    while True:
        request = receive()
        if request.get("raw"):
            request["args"] = [_plain(a) for a in request["args"]]
        try:
            reply = {"value": side.answer(request)}
        except BaseException as e:  # also SystemExit: a program may call sys.exit
            reply = {"error": type(e).__name__, "text": text_of(e)}
        send(reply)


def _plain(value):
    """Return a plain JSON argument in the wire's tagged form."""
    if isinstance(value, list):
        return ["l", [_plain(v) for v in value]]
    if isinstance(value, dict):
        return ["d", [[k, _plain(v)] for k, v in value.items()]]
    return value


def serve(code, program, new_main, role):
    """Serve requests until the process is killed; called once the process is restricted."""
    if role == "program":
        serve_program(code, program, new_main)
    else:
        serve_tester()
