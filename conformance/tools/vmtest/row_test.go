// A test in a VM, as programs in Go have them that use u-root's vmtest.
package row

import (
	"os"
	"testing"
	"time"

	"github.com/hugelgupf/vmtest/qemu"
)

// The kernel in the directory LINUX boots to the shell of its initrd, by the command QEMU.
func TestRow(t *testing.T) {
	linux := os.Getenv("LINUX")
	vm := qemu.StartT(t, "row", qemu.ArchAMD64,
		qemu.WithQEMUCommand(os.Getenv("QEMU")),
		qemu.WithKernel(linux+"/vmlinuz"),
		qemu.WithInitramfs(linux+"/initrd"),
		qemu.WithAppendKernel("console=ttyS0"),
		qemu.WithVMTimeout(2*time.Minute))
	for _, text := range []string{"slat: guest ready", "6 * 7 is 42"} {
		if _, err := vm.Console.ExpectString(text); err != nil {
			t.Fatal(err)
		}
		if _, err := vm.Console.Send("echo 6 \\* 7 is $((6 * 7))\n"); err != nil {
			t.Fatal(err)
		}
	}
	if err := vm.Kill(); err != nil {
		t.Fatal(err)
	}
	vm.Wait()
}
