// A client of the KVM API in Go, whose system calls are its own. Built without cgo it is static; with it, it loads the C library.
package main

import (
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"sync"
	"syscall"
	"time"
	"unsafe"
)

const (
	getAPIVersion   = 0xae00
	createVM        = 0xae01
	getVcpuMmapSize = 0xae04
	createVcpu      = 0xae41
	setUserMemory   = 0x4020ae46
	run             = 0xae80
	getSregs        = 0x8138ae83
	setSregs        = 0x4138ae84
	setRegs         = 0x4090ae82
	exitHlt         = 5
)

func check(good bool, what string, more ...any) {
	if !good {
		fmt.Println(append([]any{what}, more...)...)
		os.Exit(1)
	}
}

func ioctl(fd, request, argument uintptr) (uintptr, syscall.Errno) {
	answer, _, errno := syscall.Syscall(syscall.SYS_IOCTL, fd, request, argument)
	return answer, errno
}

// Runs a guest that adds two numbers and halts.
func guest() {
	device, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	check(err == nil, "open", err)
	defer device.Close()
	version, _ := ioctl(device.Fd(), getAPIVersion, 0)
	check(version == 12, "version", version)
	vm, errno := ioctl(device.Fd(), createVM, 0)
	check(errno == 0, "KVM_CREATE_VM", errno)
	memory, err := syscall.Mmap(-1, 0, 0x4000, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED|syscall.MAP_ANONYMOUS)
	check(err == nil, "mmap", err)
	// add al, bl; mov [0x3000], al; hlt
	copy(memory[0x1000:], []byte{0x00, 0xd8, 0xa2, 0x00, 0x30, 0xf4})
	region := [4]uint64{0, 0, 0x4000, uint64(uintptr(unsafe.Pointer(&memory[0])))}
	_, errno = ioctl(vm, setUserMemory, uintptr(unsafe.Pointer(&region)))
	check(errno == 0, "KVM_SET_USER_MEMORY_REGION", errno)
	vcpu, errno := ioctl(vm, createVcpu, 0)
	check(errno == 0, "KVM_CREATE_VCPU", errno)
	size, _ := ioctl(device.Fd(), getVcpuMmapSize, 0)
	page, err := syscall.Mmap(int(vcpu), 0, int(size), syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	check(err == nil, "mmap of the vCPU", err)
	var sregs [312]byte
	_, errno = ioctl(vcpu, getSregs, uintptr(unsafe.Pointer(&sregs)))
	check(errno == 0, "KVM_GET_SREGS", errno)
	for i := 0; i < 14; i++ { // CS: base, limit, selector
		if i < 8 || i >= 12 {
			sregs[i] = 0
		}
	}
	_, errno = ioctl(vcpu, setSregs, uintptr(unsafe.Pointer(&sregs)))
	check(errno == 0, "KVM_SET_SREGS", errno)
	regs := [18]uint64{0: 2, 1: 3, 16: 0x1000, 17: 2}
	_, errno = ioctl(vcpu, setRegs, uintptr(unsafe.Pointer(&regs)))
	check(errno == 0, "KVM_SET_REGS", errno)
	for {
		_, errno = ioctl(vcpu, run, 0)
		if errno != syscall.EINTR { // The runtime's own signals end it.
			break
		}
	}
	check(errno == 0, "KVM_RUN", errno)
	check(page[8] == exitHlt && memory[0x3000] == 5, "the guest's sum", page[8], memory[0x3000])
	check(syscall.Munmap(page) == nil && syscall.Munmap(memory) == nil, "munmap")
	check(syscall.Close(int(vcpu)) == nil && syscall.Close(int(vm)) == nil, "close")
}

func threads() {
	var all sync.WaitGroup
	for i := 0; i < 64; i++ {
		all.Add(1)
		go func(i int) {
			defer all.Done()
			if i%4 == 0 {
				runtime.LockOSThread() // And the thread ends with this function.
			}
			for round := 0; round < 10; round++ {
				guest()
				time.Sleep(time.Millisecond)
			}
		}(i)
	}
	all.Wait()
	runtime.GC()
}

func signals() {
	arrived := make(chan os.Signal, 1)
	signal.Notify(arrived, syscall.SIGUSR1)
	for i := 0; i < 100; i++ {
		check(syscall.Kill(syscall.Getpid(), syscall.SIGUSR1) == nil, "kill")
		<-arrived
	}
	defer func() { check(recover() != nil, "a nil pointer") }()
	var nowhere *int
	*nowhere = 1
}

func children() {
	for _, command := range [][]string{{"/proc/self/exe", "guest"}, {os.Args[0], "guest"}, {"sh", "-c", os.Args[0] + " guest"}} {
		output, err := exec.Command(command[0], command[1:]...).CombinedOutput()
		check(err == nil, "child", command, err, string(output))
	}
}

func main() {
	guest()
	if len(os.Args) > 1 {
		return
	}
	threads()
	signals()
	children()
	fmt.Println("all parts passed")
}
