// A jailer, which does what Firecracker's does before it becomes the program, in its order:
//
//	jail DIRECTORY WORDS PROGRAM [ARGUMENTS...]
//
// PROGRAM, a path in DIRECTORY, runs as an ordinary user with DIRECTORY as its root, without environment and without descriptors above 2. WORDS
// is a list separated by commas:
//
//	chroot   by chroot(2) alone, without a mount namespace
//	user     first a user namespace, for a caller who is not root
//	pid      the program is the first of a PID namespace
//	spawn    by a child that shares memory with its parent until it executes the program
//	posix    by posix_spawn(3)
//	close    closes descriptors at the end, not at the beginning
//	early    makes the device before it changes the root, and opens it by its path outside
//	other    the device has another name, /dev/other, and belongs to the user
//	bind     the device is the machine's, by a bind mount
//	proc     has /proc
//	few      has no more than eight descriptors
//	small    no file may become longer than a page
//
// The node has KVM's numbers and no permissions: nobody but root opens the machine's KVM by it. The program's status is the jailer's.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/kvm.h>
#include <sched.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(condition)                                                                           \
	do {                                                                                       \
		if (!(condition)) {                                                                \
			fprintf(stderr, "jail, line %d: %s: %s\n", __LINE__, #condition,           \
				strerror(errno));                                                  \
			_exit(1);                                                                  \
		}                                                                                  \
	} while (0)

enum { USER = 65534 };

static char *nothing[] = { NULL };

static void map(const char *file, const char *text)
{
	int fd = open(file, O_WRONLY);

	CHECK(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text) && close(fd) == 0);
}

static void enter_user_namespace(void)
{
	char users[40], groups[40];

	snprintf(users, sizeof(users), "0 %d 1", (int)getuid());
	snprintf(groups, sizeof(groups), "0 %d 1", (int)getgid());
	CHECK(unshare(CLONE_NEWUSER) == 0);
	map("/proc/self/setgroups", "deny");
	map("/proc/self/uid_map", users);
	map("/proc/self/gid_map", groups);
}

static void close_descriptors(void)
{
	CHECK(syscall(SYS_close_range, 3, ~0U, 0) == 0);
}

// Makes the node. The machine's device has the rights of this node, slat's those of most machines. A child looks, so that the jailer has no VM.
static void make_device(const char *path, mode_t rights)
{
	struct stat looks;
	int fd, status;
	pid_t child;

	CHECK(mknod(path, S_IFCHR | rights, makedev(10, 232)) == 0);
	CHECK((child = fork()) >= 0);
	if (child > 0) {
		CHECK(waitpid(child, &status, 0) == child && status == 0);
		return;
	}
	CHECK((fd = open(path, O_RDWR | O_CLOEXEC)) >= 0);
	CHECK(ioctl(fd, KVM_GET_API_VERSION, 0) == KVM_API_VERSION && ioctl(fd, KVM_CREATE_VM, 0) >= 0);
	CHECK(fstat(fd, &looks) == 0 && looks.st_rdev == makedev(10, 232) && looks.st_mode == (S_IFCHR | 0666));
	_exit(0);
}

int main(int count, char **words)
{
	CHECK(count > 3);
	const char *directory = words[1];
	char list[200], inside[4096];

	snprintf(list, sizeof(list), ",%s,", words[2]);
#define HAS(word) (strstr(list, "," word ",") != NULL)
	CHECK(strlen(directory) < sizeof(inside) - 20);
	if (!HAS("close"))
		close_descriptors();
	CHECK(clearenv() == 0);
	if (HAS("user"))
		enter_user_namespace();
	snprintf(inside, sizeof(inside), "%s/dev", directory);
	CHECK(mkdir(inside, 0755) == 0 || errno == EEXIST);
	if (HAS("few")) {
		struct rlimit limit = { 8, 8 };

		CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
	}
	if (HAS("early")) {
		snprintf(inside, sizeof(inside), "%s/dev/kvm", directory);
		make_device(inside, 0);
	}
	if (HAS("bind")) {
		int fd;

		snprintf(inside, sizeof(inside), "%s/dev/kvm", directory);
		CHECK((fd = open(inside, O_WRONLY | O_CREAT | O_CLOEXEC, 0600)) >= 0 && close(fd) == 0);
		CHECK(unshare(CLONE_NEWNS) == 0);
		CHECK(mount(NULL, "/", NULL, MS_SLAVE | MS_REC, NULL) == 0);
		CHECK(mount("/dev/kvm", inside, NULL, MS_BIND, NULL) == 0);
	}
	if (HAS("chroot")) {
		CHECK(chroot(directory) == 0 && chdir("/") == 0);
	} else {
		CHECK(unshare(CLONE_NEWNS) == 0);
		CHECK(mount(NULL, "/", NULL, MS_SLAVE | MS_REC, NULL) == 0);
		CHECK(mount(directory, directory, NULL, MS_BIND | MS_REC, NULL) == 0);
		CHECK(chdir(directory) == 0 && mkdir("old_root", 0600) == 0);
		CHECK(syscall(SYS_pivot_root, ".", "old_root") == 0 && chdir("/") == 0);
		CHECK(umount2("old_root", MNT_DETACH) == 0 && rmdir("old_root") == 0);
	}
	if (!HAS("user") && !HAS("early") && !HAS("bind")) {
		const char *device = HAS("other") ? "/dev/other" : "/dev/kvm";

		make_device(device, HAS("other") ? 0600 : 0);
		CHECK(chown(device, USER, USER) == 0);
	}
	if (HAS("proc"))
		CHECK((mkdir("/proc", 0555) == 0 || errno == EEXIST) && mount("proc", "/proc", "proc", 0, NULL) == 0);
	if (HAS("small")) {
		struct rlimit limit = { 4096, 4096 };

		CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
	}
	if (HAS("close"))
		close_descriptors();
	if (HAS("pid") || HAS("spawn")) {
		int status;
		pid_t child = HAS("pid") ? (pid_t)syscall(SYS_clone, CLONE_NEWPID | SIGCHLD, 0, 0, 0, 0) : vfork();

		CHECK(child >= 0);
		if (child > 0) {
			CHECK(waitpid(child, &status, 0) == child);
			_exit(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
		}
	}
	if (!HAS("user"))
		CHECK(setgid(USER) == 0 && setuid(USER) == 0);
	if (HAS("posix")) {
		int status, error;
		pid_t child;

		if ((error = posix_spawn(&child, words[3], NULL, NULL, words + 3, nothing)) == EACCES)
			_exit(126);
		CHECK(error == 0 && waitpid(child, &status, 0) == child && WIFEXITED(status));
		_exit(WEXITSTATUS(status));
	}
	execve(words[3], words + 3, nothing);
	CHECK(!"executed");
}
