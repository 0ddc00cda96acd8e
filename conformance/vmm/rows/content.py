"""Bytes that the guest and this machine must agree on: on a disk, and by the network."""

import hashlib
import http.server
import os
import threading

from rows.console import Failure

MIB = 1 << 20


def equal(what, found, expected):
    """Fails when they are not."""
    if found != expected:
        raise Failure(f"{what}: {found}, not {expected}")


class DiskFile:
    """A raw disk with random bytes."""

    SIZE = 64 * MIB

    def __init__(self, setting, name="disk"):
        self.path = setting.path(name)
        size = self.SIZE // setting.architecture.slowness
        # The guest writes an eighth of it, behind the first quarter.
        self._at, self._written = size // 4, size // 8
        data = os.urandom(size)
        self._sum = hashlib.sha256(data).hexdigest()
        with open(self.path, "wb") as file:
            file.write(data)

    def check(self, run, device):
        """Has the guest read it all, then write some of it."""
        equal("the guest's sum of the disk", run(f"sha256sum <{device}", 180).split()[0], self._sum)
        block = self._written // 8
        run(f"dd if=/dev/urandom of=/tmp/new bs={block} count=8", 180)
        run(f"dd if=/tmp/new of={device} bs={block} seek={self._at // block} conv=fsync", 180)
        written = run("sha256sum </tmp/new; rm /tmp/new", 180).split()[0]
        with open(self.path, "rb") as file:
            file.seek(self._at)
            equal("the host's sum of what was written", hashlib.sha256(file.read(self._written)).hexdigest(), written)


class Server:
    """An HTTP server on this machine that has one file."""

    SIZE = 16 * MIB

    def __init__(self, setting, address="127.0.0.1"):
        data = os.urandom(self.SIZE // setting.architecture.slowness)
        self._sum = hashlib.sha256(data).hexdigest()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer((address, 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self._port = server.server_address[1]

    def check(self, run, own_address, address):
        """Has the guest take an address and fetch the file from where it sees the server."""
        run(f"ip address add {own_address}/24 dev eth0 && ip link set eth0 up")
        fetched = run(f"wget -q -O - http://{address}:{self._port}/ | sha256sum", 240).split()[0]
        equal("the guest's sum of the file", fetched, self._sum)
