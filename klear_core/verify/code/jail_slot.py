"""Keep one jail of a worker alive across programs, and replace it when it may be damaged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

from klear_core.config.verify import VerifyConfig
from klear_core.verify.sandbox.jail import Jail, JailBrokenError, JailReply, Status, TestLimits
from klear_core.verify.sandbox.jail_command import Backend

_HARMLESS = (Status.OK, Status.EXITED)  # after any other end the jail is replaced, as a precaution


class JailSlot:
    """Keeps one jail alive across programs; replaces it after `programs_per_jail` of them or after anything unusual."""

    def __init__(self, backend: Backend, cfg: VerifyConfig) -> None:
        self._backend: Backend = backend
        self._cfg = cfg
        self._jail: Jail | None = None
        self._num_programs = 0
        self._must_load = False
        """Whether the jail was replaced since its program was loaded."""
        self._needs_restart = False

    def jail(self) -> Jail:
        """Return the jail, started if necessary."""
        if self._jail is not None and self._needs_restart:
            self.discard()
        if self._jail is None:
            self._jail = Jail(self._backend, self._cfg.limits)
            self._needs_restart = False
            self._num_programs = 0
            self._must_load = True
        return self._jail

    def next_program(self) -> Jail:
        """Return the jail for another program, a fresh one if this one has run `programs_per_jail` of them."""
        if self._num_programs >= self._cfg.limits.programs_per_jail:
            self.discard()
        jail = self.jail()
        self._num_programs += 1
        self._must_load = False  # the caller loads the next program
        return jail

    def jail_for(self, program: bytes, limits: TestLimits) -> Jail:
        """Return the jail with the program loaded, reloaded if the jail was replaced."""
        jail = self.jail()
        if self._must_load:
            # It has compiled once already, so a failure now is the jail's.
            if jail.load(program, limits).status is not Status.OK:
                raise JailBrokenError("a program compiled in one jail and not in the next")
            self._must_load = False
        return jail

    def note(self, reply: JailReply) -> None:
        """Record how a process ended; after anything but a plain exit the next test gets a fresh jail."""
        if reply.status is Status.NO_FORK:
            raise JailBrokenError(f"the jail could not start a process: {reply.text}")
        self._needs_restart |= reply.status not in _HARMLESS and reply.status is not Status.REPLIED

    def discard(self) -> None:
        """End the jail, if there is one."""
        if self._jail is not None:
            self._jail.kill()
            self._jail = None


@contextlib.contextmanager
def open_session(slot: JailSlot, jail: Jail, role: Literal["program", "tester"], limits: TestLimits) -> Iterator[Jail]:
    """Yield the jail with a session of this role open, and close the session afterwards."""
    slot.note(jail.open(role, limits))
    try:
        yield jail
    finally:
        jail.close_session()
