"""numa MACHINE: a guest with 8 GiB in two NUMA nodes, a CPU in each, uses the memory of the node that it asks for."""

from rows.console import Failure
from rows.content import equal
from rows.qemu import Qemu

GIB = 4
MEBIBYTES = 1024


def _mebibytes(guest, node, line):
    return int(guest.console.run(f"grep {line}: /sys/devices/system/node/node{node}/meminfo").split()[3]) // 1024


def run(setting, machine):
    # CPUs of one socket would share a cache, which Linux does not believe of two nodes.
    options = ["-m", f"{2 * GIB}G", "-smp", "sockets=2", "-numa", "dist,src=0,dst=1,val=30"]
    nodes = []
    for node in range(2):
        nodes += ["-object", f"memory-backend-ram,id=memory{node},size={GIB}G"]
        nodes += ["-numa", f"node,nodeid={node},cpus={node},memdev=memory{node}"]
    guest = Qemu(setting, machine, options=nodes + options)
    guest.boot()
    run = guest.console.run
    equal("the nodes' distances", run("cat /sys/devices/system/node/node*/distance").split(), ["10", "30", "30", "10"])
    for node in range(2):
        equal("the node's CPU", run(f"cat /sys/devices/system/node/node{node}/cpulist"), str(node))
        total = _mebibytes(guest, node, "MemTotal")
        if not GIB * 1024 - 400 < total <= GIB * 1024:
            raise Failure(f"node {node} has {total} MiB")
        before = [_mebibytes(guest, each, "MemFree") for each in range(2)]
        pid = run(f"taskset -c {node} pattern {MEBIBYTES} 0 >/tmp/pattern & echo $!")
        run("until grep -q written /tmp/pattern; do usleep 20000; done", 120)
        # Stopped between writing and verifying, or in the middle of the latter.
        run(f"kill -STOP {pid}")
        used = [before[each] - _mebibytes(guest, each, "MemFree") for each in range(2)]
        run(f"kill -CONT {pid}; while kill -0 {pid} 2>/dev/null; do usleep 100000; done; grep ' 0 wrong words' /tmp/pattern", 120)
        # What the guest's kernel takes and gives back meanwhile comes on top.
        if used[node] < MEBIBYTES - 100 or used[1 - node] > 100:
            raise Failure(f"memory used by a program on node {node}: {used} MiB")
    guest.power_off()
