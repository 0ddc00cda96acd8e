"""VMMs that have the guest's console on a terminal."""

import os
import tty

from rows.console import Console, Failure
from rows.process import Process


class Terminal:
    """A VMM whose standard input and output are a terminal, and which ends when the guest does."""

    def __init__(self, setting, name, command):
        self.name = name
        ours, theirs = os.openpty()
        tty.setraw(theirs)
        self.process = Process(setting, name, command, stdin=theirs, stdout=theirs)
        os.close(theirs)
        self.console = Console(setting, name, ours, ours)
        setting.consoles.append(self.console)

    def end(self, command, seconds=60):
        """Has the guest run its last command; the VMM must end with status 0."""
        self.console.check()
        self.console.write(command + "\n")
        status = self.process.wait(seconds)
        if status != 0:
            raise Failure(f"{self.name}: exit status {status}")
        self.console.check()
