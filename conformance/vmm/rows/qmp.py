"""A client of QEMU's monitor protocol (docs/interop/qmp-spec.txt)."""

import json
import time

from rows.console import Failure


class Qmp:
    """One monitor connection. Events are kept until somebody waits for them."""

    def __init__(self, setting, name, connection):
        self.name = name
        self._slowness = setting.architecture.slowness
        self._socket = connection
        self._buffer = b""
        self.events = []
        self._message(self._end(60))  # The greeting.
        self.call("qmp_capabilities")

    def _end(self, seconds):
        return time.monotonic() + seconds * self._slowness

    def _message(self, end):
        while b"\n" not in self._buffer:
            rest = end - time.monotonic()
            if rest <= 0:
                raise Failure(f"{self.name}: its monitor says nothing")
            self._socket.settimeout(rest)
            try:
                data = self._socket.recv(65536)
            except TimeoutError:
                continue
            except ConnectionError:
                data = b""
            if not data:
                raise Failure(f"{self.name}: its monitor is closed")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def call(self, command, seconds=60, **arguments):
        """Runs a command and returns its result."""
        request = {"execute": command, "arguments": {key.replace("_", "-"): value for key, value in arguments.items()}}
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        while True:
            message = self._message(self._end(seconds))
            if "event" in message:
                self.events.append(message)
            elif "error" in message:
                raise Failure(f"{self.name}: {command}: {message['error']['desc']}")
            else:
                return message["return"]

    def event(self, name, seconds):
        """Waits for an event and returns its data."""
        end = self._end(seconds)
        while True:
            for index, event in enumerate(self.events):
                if event["event"] == name:
                    del self.events[index]
                    return event.get("data", {})
            if time.monotonic() > end:
                raise Failure(f"{self.name}: no event {name} within {seconds} s")
            message = self._message(end)
            if "event" in message:
                self.events.append(message)

    def poll(self, command, done, seconds, pause=0.1):
        """Runs a query again and again until `done` says that its result is the expected one; returns it."""
        end = self._end(seconds)
        while True:
            result = self.call(command)
            if done(result):
                return result
            if time.monotonic() > end:
                raise Failure(f"{self.name}: {command} within {seconds} s: {json.dumps(result)}")
            time.sleep(pause)
