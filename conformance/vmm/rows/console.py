"""The serial console of a guest, and the shell on it."""

import os
import re
import threading
import time

READY = re.compile(rb"slat: guest ready")

# What Linux prints when it is not well. It may reach a shell all the same.
TROUBLE = re.compile(
    rb"Kernel panic|BUG: (?!soft lockup)|Oops: |general protection fault|irq \d+: nobody cared|unchecked MSR access"
)
# What comes with trouble, and with being late.
TRACE = re.compile(rb"Call Trace:")
# What it prints when it had to wait for long. That may be this machine's other load.
LATE = re.compile(rb"soft lockup|rcu: INFO: rcu_\w+ .*stall|MP-BIOS bug|Marking clocksource '[^']*' as unstable")


class Failure(Exception):
    """The row fails; the text says why."""


class Skip(Exception):
    """This machine lacks what the row needs; the text says what."""


class Console:
    """Reads a guest's console in a thread of its own, so that the guest never waits for us."""

    def __init__(self, setting, name, read_fd, write_fd):
        self.name = name
        self._slowness = setting.architecture.slowness
        self._write_fd = write_fd
        self._text = b""
        self._position = 0
        self._closed = False
        self._changed = threading.Condition()
        threading.Thread(target=self._read, args=(read_fd,), daemon=True).start()

    def _read(self, fd):
        while True:
            try:
                data = os.read(fd, 65536)
            except OSError:  # A terminal whose other side is closed.
                data = b""
            with self._changed:
                self._text += data
                self._closed = not data
                self._changed.notify_all()
            if not data:
                return

    @property
    def text(self):
        """All that the guest has printed so far."""
        with self._changed:
            return self._text

    def expect(self, pattern, seconds):
        """Waits for `pattern` behind what was matched last; returns the match."""
        seconds *= self._slowness
        end = time.monotonic() + seconds
        with self._changed:
            while True:
                match = re.compile(pattern).search(self._text, self._position)
                if match:
                    self._position = match.end()
                    return match
                rest = end - time.monotonic()
                if self._closed or rest <= 0:
                    why = "its console is closed" if self._closed else f"not within {seconds} s"
                    raise Failure(f"{self.name}: expected {pattern!r}: {why}")
                self._changed.wait(rest)

    def write(self, text):
        """Types `text`."""
        data = text.encode()
        while data:
            data = data[os.write(self._write_fd, data) :]

    def run(self, command, seconds=60):
        """Runs a command in the guest's shell and returns what it printed. Fails when its status is not 0."""
        self.begin(command)
        return self.finish(command, seconds)

    def begin(self, command):
        """Types a command and does not wait for it; `finish` does."""
        self.write(f"echo '<''<<'; {command}\necho \">>>$?\"\n")

    def finish(self, command, seconds=60):
        """Like `run`, of a command that was begun."""
        # Some consoles add a carriage return to the one that the terminal has added.
        self.expect(rb"<<<\r*\n", seconds)
        match = self.expect(rb"(?s)(.*?)>>>(\d+)\r*\n", seconds)
        output = match[1].decode(errors="replace").replace("\r", "").strip()
        if match[2] != b"0":
            raise Failure(f"{self.name}: {command}: status {match[2].decode()}: {output}")
        return output

    def ready(self, seconds):
        """Waits for the guest's shell."""
        self.expect(READY, seconds)

    def check_cpus(self, cpus):
        """Checks that the guest sees all CPUs, and has work done on each of them."""
        online = int(self.run("nproc").splitlines()[0])
        if online != cpus:
            raise Failure(f"{self.name}: {online} CPUs are online, not {cpus}")
        for cpu in range(cpus):
            self.run(f"taskset -c {cpu} true")

    def check(self):
        """Fails when the kernel has complained; what it says of having been late is only shown."""
        text = self.text
        late = LATE.search(text)
        match = TROUBLE.search(text) or (None if late else TRACE.search(text))
        if match:
            context = text[max(0, match.start() - 600) : match.end() + 1200].decode(errors="replace").replace("\r", "")
            raise Failure(f"{self.name}: the guest's kernel complains: {match[0].decode()}\n{context}")
        if late:
            print(f"note: {self.name}: the guest's kernel says: {late[0].decode()}")
