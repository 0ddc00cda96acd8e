// What runs in a jail (jail.c): makes a VM and runs it.
//
//	jailed [PATH [PROGRAM...]]
//	jailed --...
//
// PATH is the device, /dev/kvm if it is not given, or if options are given, as Firecracker's jailer does; then becomes PROGRAM. Nothing but slat's status tells what the device is: the file has no
// permissions.
#define NAME "jailed"
#include "small_vm.h"

int main(int count, char **words)
{
	const char *path = count > 1 && words[1][0] != '-' ? words[1] : "/dev/kvm";
	pid_t child;
	int status;

	// The descriptors that slat uses to come here are gone.
	for (int fd = 3; fd < 64; fd++)
		CHECK(fcntl(fd, F_GETFD) < 0);
	run(path);
	// A child makes one, too.
	CHECK((child = fork()) >= 0);
	if (child == 0) {
		run(path);
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	if (count > 2 && path == words[1]) {
		execv(words[2], words + 2);
		CHECK(!"executed");
	}
	puts("ran");
	return 0;
}
