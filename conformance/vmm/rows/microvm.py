"""What Firecracker and cloud-hypervisor have in common: an HTTP interface on a socket, a tap device, and the words of their rows."""

import ctypes
import http.client
import json
import os
import socket
import subprocess
import time

from rows.console import Failure, Skip
from rows.content import DiskFile, Server
from rows.terminal import Terminal

HOST_ADDRESS = "192.0.2.1"
GUEST_ADDRESS = "192.0.2.2"
TAP = "slat-tap"

CLONE_NEWNET = 0x4000_0000
# What runs a program as a user without rights.
_NOBODY = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]

_unshare = ctypes.CDLL(None, use_errno=True).unshare


def _network():
    """Puts the row into a network of its own, with one tap device. Call before any thread is started."""
    if _unshare(CLONE_NEWNET) != 0:
        raise Skip(f"no network of its own: {os.strerror(ctypes.get_errno())}")
    for command in (
        f"tuntap add {TAP} mode tap",
        f"address add {HOST_ADDRESS}/24 dev {TAP}",
        f"link set {TAP} up",
    ):
        subprocess.run(["ip", *command.split()], check=True)


class _Connection(http.client.HTTPConnection):
    def __init__(self, path, seconds):
        super().__init__("localhost", timeout=seconds)
        self._path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class MicroVm(Terminal):
    """A VMM with an HTTP interface on a socket."""

    def __init__(self, setting, name, command, socket_path):
        super().__init__(setting, name, command)
        self._socket_path = socket_path
        self._slowness = setting.architecture.slowness

    def wait_for_socket(self, seconds=60):
        """Waits until the VMM answers."""
        end = time.monotonic() + seconds * self._slowness
        while True:
            try:
                with socket.socket(socket.AF_UNIX) as attempt:
                    attempt.connect(self._socket_path)
                return
            except OSError as error:
                if time.monotonic() > end or self.process.has_ended():
                    raise Failure(f"{self.name}: no answer on its socket: {error}") from None
                time.sleep(0.05)

    def call(self, method, path, body=None):
        """Makes a request and returns what is answered; fails when it is refused."""
        connection = _Connection(self._socket_path, 120 * self._slowness)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise Failure(f"{self.name}: {method} {path}: {error}") from None
        finally:
            connection.close()
        if answer.status >= 300:
            raise Failure(f"{self.name}: {method} {path}: status {answer.status}: {content}")
        return content


class Devices:
    """The devices that the words of a row ask for; `None` where they do not. Create before any thread is started."""

    def __init__(self, setting, words):
        self.disk = self._server = None
        if "net" in words:
            _network()
            self._server = Server(setting, HOST_ADDRESS)
        if "disk" in words:
            self.disk = DiskFile(setting)

    @property
    def has_network(self):
        return self._server is not None

    def check(self, vmm):
        """Checks in the guest of `vmm` what its devices carry."""
        if self.disk:
            self.disk.check(vmm.console.run, "/dev/vda")
        if self._server:
            self._server.check(vmm.console.run, GUEST_ADDRESS, HOST_ADDRESS)


def move(vmm, restore):
    """Has `restore` save the guest of `vmm` and return another VMM that goes on with it, with all that the guest held."""
    vmm.console.run("word=saved; echo saved >/tmp/state")
    restored = restore(vmm)
    restored.console.run('test "$word" = saved && grep -q saved /tmp/state')
    return restored


def without_userfaultfd(setting):
    """Returns the words that run a program as a user to whom the kernel refuses userfaultfd. This user may use all files of the row."""
    user = _NOBODY if os.geteuid() == 0 else []
    ask = "import ctypes; raise SystemExit(ctypes.CDLL(None).syscall(323, 0o2000000) < 0)"
    if subprocess.run([*user, "/usr/bin/python3", "-c", ask], check=False).returncode == 0:
        raise Skip("the kernel permits userfaultfd to ordinary users")
    for directory, _, names in os.walk(setting.scratch):
        os.chmod(directory, 0o777)
        for path in (os.path.join(directory, name) for name in names):
            if os.path.isfile(path):
                os.chmod(path, 0o666)
    return user
