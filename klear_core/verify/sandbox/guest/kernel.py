"""Runs inside the jail as module `klear_kernel`: restricts the system calls of a program's process."""

import ctypes
import os
import platform
import struct

PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38

LIBC = ctypes.CDLL(None, use_errno=True)

# System call: its number on x86_64, on aarch64. All fail with EPERM, except that those of the first group are allowed
# if the target is the caller itself.
_SELF_ONLY = {
    "kill": (62, 129),
    "tgkill": (234, 131),
    "prlimit64": (302, 261),
}
_DENIED = {
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "socket": (41, 198),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "memfd_create": (319, 279),  # its memory would count in no limit
    "memfd_secret": (447, 447),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "personality": (135, 92),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "acct": (163, 89),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
}
_SOCKETPAIR = (53, 199)
_AF_UNIX = 1
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32_BIT = 0x40000000
_EPERM = 0x00050001  # SECCOMP_RET_ERRNO | EPERM
_ENOSYS = 0x00050000 | 38
_ALLOW = 0x7FFF0000


class _Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]


def _bpf(code, jump_true, jump_false, value):
    """Return one instruction; a jump is the number of instructions to skip if its test is true, and if it is false."""
    return struct.pack("=HBBI", code, jump_true, jump_false, value & 0xFFFFFFFF)


_LOAD, _IF_EQUAL, _IF_GREATER_EQUAL, _RETURN = 0x20, 0x15, 0x35, 0x06


def filter_for(pid):
    """Return a BPF filter that denies access to other processes, the network and rare kernel features.

    The process `pid` may still signal itself.
    """
    column, audit_arch = _ARCHITECTURES[platform.machine()]
    # Offsets in struct seccomp_data: 0 the call's number, 4 the architecture, 16 the first argument.
    lines = [_bpf(_LOAD, 0, 0, 4), _bpf(_IF_EQUAL, 1, 0, audit_arch), _bpf(_RETURN, 0, 0, _EPERM), _bpf(_LOAD, 0, 0, 0)]
    if column == 0:
        # x32 numbers would pass the list below.
        lines += [_bpf(_IF_GREATER_EQUAL, 0, 1, _X32_BIT), _bpf(_RETURN, 0, 0, _EPERM)]
    for numbers in _SELF_ONLY.values():
        is_target_self = [
            _bpf(_LOAD, 0, 0, 16),
            _bpf(_IF_EQUAL, 2, 0, pid),
            _bpf(_IF_EQUAL, 1, 0, 0),  # 0 also means the caller, for kill its process group
            _bpf(_RETURN, 0, 0, _EPERM),
            _bpf(_RETURN, 0, 0, _ALLOW),
        ]
        lines += [_bpf(_IF_EQUAL, 0, len(is_target_self), numbers[column]), *is_target_self]
    for numbers in _DENIED.values():
        lines += [_bpf(_IF_EQUAL, 0, 1, numbers[column]), _bpf(_RETURN, 0, 0, _EPERM)]
    # socketpair: two connected ends without a name, which event loops wake themselves by
    is_unix = [_bpf(_LOAD, 0, 0, 16), _bpf(_IF_EQUAL, 1, 0, _AF_UNIX)]
    pair = [*is_unix, _bpf(_RETURN, 0, 0, _EPERM), _bpf(_RETURN, 0, 0, _ALLOW)]
    lines += [_bpf(_IF_EQUAL, 0, len(pair), _SOCKETPAIR[column]), *pair]
    # clone3: its flags cannot be read here; libc falls back to clone
    lines += [_bpf(_IF_EQUAL, 0, 1, 435), _bpf(_RETURN, 0, 0, _ENOSYS)]
    new_namespaces = 0x7E020000  # user, pid, net, ipc, uts, cgroup and mount namespaces in clone's flags
    clone = [
        _bpf(_LOAD, 0, 0, 16),
        _bpf(0x45, 0, 1, new_namespaces),  # tests whether any of these bits is set
        _bpf(_RETURN, 0, 0, _EPERM),
        _bpf(_RETURN, 0, 0, _ALLOW),
    ]
    lines += [_bpf(_IF_EQUAL, 0, len(clone), (56, 220)[column]), *clone]
    lines.append(_bpf(_RETURN, 0, 0, _ALLOW))
    return b"".join(lines)


def restrict_system_calls():
    code = filter_for(os.getpid())
    kept = ctypes.create_string_buffer(code, len(code))
    program = _Filter(len(code) // 8, ctypes.cast(kept, ctypes.c_void_p))
    if LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or LIBC.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp filter refused")
