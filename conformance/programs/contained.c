// What runs in a container (conformance/containers): makes a VM and runs it. It does not fork: a child in qemu-user 7.2 cannot make threads.
#define NAME "contained"
#include "small_vm.h"

int main(void)
{
	run("/dev/kvm");
	puts("ran");
	return 0;
}
