"""bus-lock LIMIT: QEMU slows a guest down to so many bus locks in each second (bus-lock-ratelimit)."""

import time

from rows.console import Failure
from rows.content import equal
from rows.qemu import Qemu

LOCKS = 50


def run(setting, limit):
    limit = int(limit)
    guest = Qemu(setting, f"q35,bus-lock-ratelimit={limit}")
    guest.boot()
    begin = time.monotonic()
    equal("the sum", guest.console.run(f"buslock {LOCKS}", 120), f"buslock: {LOCKS}")
    seconds = time.monotonic() - begin
    print(f"note: {LOCKS} bus locks in {seconds:.1f} s")
    # The first of them are within the first second's limit.
    if seconds < (LOCKS - limit) / limit:
        raise Failure(f"{LOCKS} bus locks took only {seconds:.1f} s")
    guest.power_off()
