"""migrate MACHINE bitmap|ring|postcopy|background [killed|nested|served]: a guest moves to another QEMU while it rewrites a pattern over 256 MiB (on arm64
fewer).

    bitmap    dirty pages by the bitmap, each chunk cleared by KVM_CLEAR_DIRTY_LOG just before it is sent (manual protect)
    ring      dirty pages by rings of 4096 entries
    postcopy  after the first round the guest runs at the target; what is not there yet comes by userfaultfd
    killed    the target is killed in the middle of it; the guest goes on where it is, and moves to another target
    background  nothing moves: a snapshot of the running guest goes to a file, each page as it was at the beginning (userfaultfd protects
              the pages); another QEMU goes on from the file, and the guest goes on, too
    served    slat serves userfaultfd, even if the kernel permits it
    nested    the guest is a hypervisor, and its own guest rewrites the pattern, over 32 MiB

The pattern tells of every page that was lost or is of another time. Prints downtime, rounds and bytes.
"""

import os
import re

from rows import nested
from rows.console import Failure
from rows.qemu import BOOT, Qemu

MIB = 1 << 20
PATTERN, PATTERN_NESTED = 256, 32
ROUNDS = 3
# Slow enough for a round to last a while, fast enough to end: bytes a second, and milliseconds.
BANDWIDTH = 128 * MIB
DOWNTIME = 300
LIMIT = 300


def _wait(source, done, seconds=LIMIT):
    """Waits until `done` says so of query-migrate's result; fails when the migration does."""

    def ended(result):
        if result.get("status") in ("failed", "cancelled"):
            raise Failure(f"migration {result['status']}: {result.get('error-desc', '')}")
        return done(result)

    return source.qmp.poll("query-migrate", ended, seconds)


def _move(setting, source, target, mode):
    """Begins a migration of `source` to `target`, which waits for one; the source is in its second round."""
    path = setting.path(target.name)
    capabilities = [{"capability": "auto-converge", "state": True}]
    if mode == "postcopy":
        capabilities = [{"capability": "postcopy-ram", "state": True}]
    for qemu in (source, target):
        qemu.qmp.call("migrate-set-capabilities", capabilities=capabilities)
    slowness = setting.architecture.slowness
    limits = {"max_bandwidth": BANDWIDTH // slowness, "downtime_limit": DOWNTIME * slowness}
    source.qmp.call("migrate-set-parameters", cpu_throttle_initial=40, cpu_throttle_increment=20, **limits)
    target.qmp.call("migrate-incoming", uri=f"unix:{path}")
    source.qmp.call("migrate", uri=f"unix:{path}")
    _wait(source, lambda result: result.get("ram", {}).get("dirty-sync-count", 0) >= 2)


def _found(check, console, size):
    """Ends the guest's program by `check`. Returns what it has found, when it has found all pages to be of one time."""
    pattern = console.run(check, LIMIT).splitlines()[-1]
    found = re.fullmatch(r"pattern: (\d+) pages, (\d+) generations, 0 wrong words", pattern)
    if not found or int(found[1]) != size * 256:
        raise Failure(f"the pattern: {pattern}")
    return pattern


def _snapshot(setting, source, qemu, check, size):
    """Saves `source` while its guest runs, and checks the guests of both."""
    source.qmp.call("migrate-set-capabilities", capabilities=[{"capability": "background-snapshot", "state": True}])
    path = setting.path("snapshot")
    source.qmp.call("migrate", uri=f"exec:cat >{path}")
    result = _wait(source, lambda result: result.get("status") == "completed")
    target = qemu("target", "-incoming", f"exec:cat {path}")
    target.qmp.poll("query-status", lambda status: status["status"] == "running", 60)
    saved = _found(check, target.console, size)
    running = _found(check, source.console, size)
    print(f"note: downtime {result['downtime']} ms, {result['total-time']} ms; saved: {saved}; went on: {running}")
    for vmm in (source, target):
        vmm.power_off()


def run(setting, machine, mode, *words):
    accel = ",dirty-ring-size=4096" if mode == "ring" and setting.on != "tcg" else ""
    is_nested = "nested" in words
    if "served" in words:
        os.environ["SLAT_USERFAULTFD"] = "slat"

    def qemu(name, *options):
        if is_nested:
            return nested.hypervisor(setting, machine, 2, name=name, accel=accel, options=options)
        return Qemu(setting, machine, name=name, accel=accel, options=options)

    def waiting(name):
        return qemu(name, "-incoming", "defer")

    source = qemu("source")
    source.boot(2 * BOOT if is_nested else BOOT)
    size = PATTERN_NESTED if is_nested else PATTERN // setting.architecture.slowness
    guest = nested.begin(source.console) if is_nested else source.console
    pid = guest.run(f"pattern {size} >/tmp/pattern 2>&1 & echo $!")
    guest.run("until grep -q written /tmp/pattern; do usleep 100000; done", LIMIT)

    check = f"kill -USR1 {pid}; while kill -0 {pid} 2>/dev/null; do usleep 100000; done; cat /tmp/pattern"
    if mode == "background":
        return _snapshot(setting, source, qemu, check, size)
    if "killed" in words:
        target = waiting("killed")
        _move(setting, source, target, mode)
        target.process.kill()
        source.qmp.poll("query-migrate", lambda result: result.get("status") == "failed", 60)
        source.check_cpus()
    target = waiting("target")
    _move(setting, source, target, mode)
    if mode == "postcopy":
        source.qmp.call("migrate-start-postcopy")
    _wait(source, lambda result: result.get("status") == "completed")
    target.qmp.poll("query-status", lambda status: status["status"] == "running", 60)
    # QEMU calculates the times after it has completed.
    result = _wait(source, lambda result: result.get("total-time", 0) > 0)

    # What the source had to say of the pattern went with it: the guest's memory is the target's.
    guest = guest.moved(target.console) if is_nested else target.console
    pattern = _found(check, guest, size)
    ram = result["ram"]
    rounds = ram["dirty-sync-count"]
    if mode != "postcopy" and rounds < ROUNDS:
        raise Failure(f"only {rounds} rounds")
    if mode == "postcopy" and ram["postcopy-requests"] == 0:
        raise Failure("no page was asked for after the switch")
    print(
        f"note: downtime {result['downtime']} ms, {rounds} rounds, {ram['transferred']} bytes in {result['total-time']} ms, "
        f"{ram['postcopy-requests']} pages asked for; {pattern}"
    )
    source.qmp.call("quit")
    if source.process.wait(60) != 0:
        raise Failure("the source does not end well")
    if is_nested:
        guest.power_off()
    target.check_cpus()
    target.power_off()
