#!/usr/bin/env -S python3 -B
"""Runs one row: row.py --on slat|kvm|tcg|arm64|board --slat SLAT [--mmu MMU] [--cpu CPU] [--qemu QEMU] --materials DIR NAME WORDS...

Exit status: 0 when the row passes, 1 when it fails, 4 when this machine lacks what it needs. After a failure the end of each
guest's console and of what each VMM complained about is printed.
"""

import argparse
import importlib
import os
import shutil
import signal
import sys
import tempfile
import traceback

from rows.architecture import ARM64, X86_64
from rows.console import Failure, Skip

ROWS = {
    "board": "rows.board",
    "kvmtool": "rows.kvmtool",
    "boot": "rows.boot",
    "devices": "rows.devices",
    "migrate": "rows.migrate",
    "exits": "rows.exits",
    "secureboot": "rows.secureboot",
    "debug": "rows.debug",
    "live-gdb": "rows.live_gdb",
    "dirty-rate": "rows.dirty_rate",
    "numa": "rows.numa",
    "cpu": "rows.cpu",
    "hyperv": "rows.hyperv",
    "clock": "rows.clock",
    "bus-lock": "rows.bus_lock",
    "unit-test": "rows.unit_test",
    "nested": "rows.nested",
    "xen": "rows.xen",
    "firmware": "rows.firmware",
    "firecracker": "rows.firecracker",
    "cloud-hypervisor": "rows.cloud_hypervisor",
}
SKIPPED = 4


class Setting:
    """What a row runs with, and what it has started."""

    def __init__(self, on, slat, mmu, cpu, qemu, materials):
        self.on = on
        self.architecture = ARM64 if on in ("arm64", "board") else X86_64
        self.slat = slat
        self.qemu = qemu
        self.mmu = mmu
        self.cpu = cpu
        self.scratch = tempfile.mkdtemp(prefix="slat-vmm-")
        self._materials = materials
        self.processes = []
        self.consoles = []

    @property
    def launcher(self):
        """What runs a VMM on slat. With "arm64" the VMM is for 64-bit Arm, and `slat` is slat's library for it."""
        if self.on == "arm64":
            return ["qemu-aarch64", "-L", self.material("qemu"), "-E", f"LD_PRELOAD={self.slat}"]
        return [self.slat, "run", "--mmu", self.mmu, "--set", f"cpu={self.cpu}", "--"] if self.on == "slat" else []

    def material(self, name):
        """The path of something that all rows share."""
        return os.path.join(self._materials, name)

    def path(self, name):
        """A path that only this row has."""
        return os.path.join(self.scratch, name)

    def explain(self):
        """Prints the ends of all logs."""
        for console in self.consoles:
            print(f"--- console of {console.name}")
            print("\n".join(console.text.decode(errors="replace").replace("\r", "").splitlines()[-25:]))
        for process in self.processes:
            complaints = process.stderr().splitlines()[-20:]
            if complaints:
                print(f"--- standard error of {process.name}")
                print("\n".join(complaints))

    def close(self):
        """Ends what the row has started and removes its files."""
        for process in self.processes:
            process.kill()
        shutil.rmtree(self.scratch, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--on", required=True, choices=["slat", "kvm", "tcg", "arm64", "board"])
    parser.add_argument("--slat", required=True)
    parser.add_argument("--mmu", default="tdp")
    parser.add_argument("--cpu", default="host")
    parser.add_argument("--qemu", default="qemu-system-x86_64")
    parser.add_argument("--materials", required=True)
    parser.add_argument("name", choices=ROWS)
    parser.add_argument("words", nargs="*")
    arguments = parser.parse_args()
    # A time-out ends what this has started, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    setting = Setting(arguments.on, arguments.slat, arguments.mmu, arguments.cpu, arguments.qemu, arguments.materials)
    status = 0
    try:
        importlib.import_module(ROWS[arguments.name]).run(setting, *arguments.words)
    except Skip as reason:
        print(reason)
        status = SKIPPED
    except (Failure, SystemExit) as reason:
        setting.explain()
        print(f"--- {reason}")
        status = 1
    except Exception:
        setting.explain()
        traceback.print_exc(file=sys.stdout)
        status = 1
    finally:
        setting.close()
    return status


if __name__ == "__main__":
    sys.exit(main())
