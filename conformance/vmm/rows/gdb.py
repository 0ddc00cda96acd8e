"""A client of GDB's remote serial protocol (GDB's manual, appendix E), as far as the rows use it."""

import re
import socket
import struct

from rows.console import Failure

# Kinds of the packets Z and z.
SOFTWARE, HARDWARE, WRITE, ACCESS = 0, 1, 2, 4
# What a stop is called when such a watch point is its reason.
WATCHES = {WRITE: "watch", ACCESS: "awatch"}


class Gdb:
    """One connection to a stub. The machine stops when it begins."""

    def __init__(self, setting, name, path):
        self.name = name
        self._slowness = setting.architecture.slowness
        self._buffer = b""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        # What stopped the machine. QEMU 7.2 says so once more, on its own.
        self._send("?")
        self._receive()

    def _byte(self):
        if not self._buffer:
            try:
                self._buffer = self._socket.recv(65536)
            except TimeoutError:
                raise Failure(f"{self.name}: the stub says nothing") from None
            if not self._buffer:
                raise Failure(f"{self.name}: the stub has closed the connection")
        byte, self._buffer = self._buffer[:1], self._buffer[1:]
        return byte

    def _send(self, text):
        self._socket.sendall(f"${text}#{sum(text.encode()) % 256:02x}".encode())

    def _receive(self, seconds=60):
        """Returns the content of the next packet."""
        self._socket.settimeout(seconds * self._slowness)
        while self._byte() != b"$":  # Acknowledgements.
            pass
        content = b""
        while (byte := self._byte()) != b"#":
            content += byte
        if int(self._byte() + self._byte(), 16) != sum(content) % 256:
            raise Failure(f"{self.name}: a packet with a wrong sum: {content!r}")
        self._socket.sendall(b"+")
        return content.decode()

    def _ask(self, text):
        self._send(text)
        while re.match(r"[ST]\d\d", answer := self._receive()):
            pass
        return answer

    def _call(self, text):
        answer = self._ask(text)
        if re.fullmatch(r"E[0-9a-f]{2}|", answer):
            raise Failure(f"{self.name}: {text}: {answer or 'not known'}")
        return answer

    def register(self, number):
        """Returns a register of the stopped CPU; `number` counts words of 8 bytes in the packet g."""
        return struct.unpack_from("<Q", bytes.fromhex(self._call("g")), number * 8)[0]

    def memory(self, address, length):
        """Returns memory at a virtual address of the stopped CPU."""
        return bytes.fromhex(self._call(f"m{address:x},{length:x}"))

    def reads(self, address):
        """Whether the stub reads memory at this virtual address now."""
        return not self._ask(f"m{address:x},1").startswith("E")

    def word(self, address):
        """Returns 8 bytes of memory as a number."""
        return struct.unpack("<Q", self.memory(address, 8))[0]

    def insert(self, kind, address, length=1):
        """Sets a break point or watch point."""
        self._call(f"Z{kind},{address:x},{length:x}")

    def remove(self, kind, address, length=1):
        """Removes a break point or watch point."""
        self._call(f"z{kind},{address:x},{length:x}")

    def resume(self):
        """Has the machine go on, and does not wait."""
        self._send("c")

    def stopped(self, seconds=60):
        """Waits until the machine stops by a trap; returns what is said of it."""
        reason = self._receive(seconds)
        if not re.match(r"[ST]05", reason):
            raise Failure(f"{self.name}: stopped by {reason}")
        # The thread that stopped is the one whose registers are asked for.
        thread = re.search(r"thread:([^;]+);", reason)
        if thread:
            self._call(f"Hg{thread[1]}")
        return reason

    def interrupt(self):
        """Stops the machine."""
        self._socket.sendall(b"\x03")
        reason = self._receive()
        if not re.match(r"[ST]02", reason):
            raise Failure(f"{self.name}: stopped by {reason}")

    def step(self):
        """Has the stopped CPU execute one instruction."""
        self._send("s")
        return self.stopped()
