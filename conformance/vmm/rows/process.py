"""VMMs as child processes."""

import ctypes
import os
import signal
import subprocess

from rows.console import Failure

PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl


def _die_with_parent():
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Process:
    """A program that ends with the row, however the row ends. Its standard error goes to a file below the scratch directory."""

    def __init__(self, setting, name, command, stdin=subprocess.DEVNULL, stdout=None, pass_fds=()):
        self.name = name
        self._slowness = setting.architecture.slowness
        self._log = os.path.join(setting.scratch, f"{name}.stderr")
        with open(self._log, "wb") as log:
            self._child = subprocess.Popen(
                setting.launcher + command,
                stdin=stdin,
                stdout=log if stdout is None else stdout,
                stderr=log,
                pass_fds=pass_fds,
                preexec_fn=_die_with_parent,
            )
        setting.processes.append(self)

    @property
    def pid(self):
        return self._child.pid

    @property
    def stdin(self):
        return self._child.stdin

    @property
    def stdout(self):
        return self._child.stdout

    def stderr(self):
        """What the program has complained about so far."""
        with open(self._log, errors="replace") as log:
            return log.read()

    def wait(self, seconds):
        """Waits until the program ends and returns its status; negative: the signal."""
        seconds *= self._slowness
        try:
            return self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Failure(f"{self.name} does not end within {seconds} s") from None

    def has_ended(self):
        """Whether the program has ended."""
        return self._child.poll() is not None

    def kill(self):
        """Ends the program, if it is there still."""
        if not self.has_ended():
            self._child.kill()
            self._child.wait()
