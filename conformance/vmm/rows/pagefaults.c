// A page fault handler for a VM that Firecracker restores: it provides each page of guest memory from the snapshot's memory file when
// the page is first needed.
//
//	pagefaults SOCKET FILE
//
// Firecracker connects to SOCKET, and sends a userfaultfd and a list of its memory (docs/snapshotting/handling-page-faults-on-snapshot-resume.md
// of Firecracker). When the connection ends, prints the number of pages that were provided, and of all.
#define _GNU_SOURCE
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define PAGE 4096ul

struct part {
	uint64_t start, size, offset;
};

static struct part parts[16];
static int count;
static char *file;
static unsigned long provided, all;

static int accepted(const char *path)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	int listener = socket(AF_UNIX, SOCK_STREAM, 0);
	strncpy(address.sun_path, path, sizeof address.sun_path - 1);
	if (bind(listener, (void *)&address, sizeof address) || chmod(path, 0666) || listen(listener, 1))
		err(1, "%s", path);
	int stream = accept(listener, NULL, NULL);
	if (stream < 0)
		err(1, "accept");
	return stream;
}

// Receives the list of memory and the userfaultfd.
static int received(int stream)
{
	static char text[8192];
	union {
		struct cmsghdr header;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control;
	struct iovec part = { text, sizeof text - 1 };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control };
	if (recvmsg(stream, &message, 0) <= 0 || !CMSG_FIRSTHDR(&message))
		err(1, "no userfaultfd");
	for (char *at = text; (at = strchr(at, '{')) && count < 16; at++) {
		struct part *next = &parts[count++];
		char *start = strstr(at, "\"base_host_virt_addr\":"), *size = strstr(at, "\"size\":"), *offset = strstr(at, "\"offset\":");
		if (!start || !size || !offset)
			errx(1, "not understood: %s", text);
		next->start = strtoull(strchr(start, ':') + 1, NULL, 10);
		next->size = strtoull(strchr(size, ':') + 1, NULL, 10);
		next->offset = strtoull(strchr(offset, ':') + 1, NULL, 10);
		all += next->size / PAGE;
	}
	int uffd;
	memcpy(&uffd, CMSG_DATA(&control.header), sizeof uffd);
	return uffd;
}

// Provides the page at `address`.
static void provide(int uffd, uint64_t address)
{
	for (int i = 0; i < count; i++) {
		uint64_t offset = address - parts[i].start;
		if (address < parts[i].start || offset >= parts[i].size)
			continue;
		struct uffdio_copy copy = { .dst = address, .src = (uint64_t)(file + parts[i].offset + offset), .len = PAGE };
		if (ioctl(uffd, UFFDIO_COPY, &copy) == 0)
			provided++;
		else if (errno == ESRCH)
			return;
		else if (errno != EEXIST)
			err(1, "UFFDIO_COPY at %llx", (unsigned long long)address);
		return;
	}
	errx(1, "no memory at %llx", (unsigned long long)address);
}

int main(int arguments, char **words)
{
	if (arguments != 3)
		errx(2, "pagefaults SOCKET FILE");
	int fd = open(words[2], O_RDONLY);
	struct stat stat;
	if (fd < 0 || fstat(fd, &stat))
		err(1, "%s", words[2]);
	file = mmap(NULL, stat.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
	if (file == MAP_FAILED)
		err(1, "mmap");
	int stream = accepted(words[1]), uffd = received(stream);
	struct pollfd polled[2] = { { .fd = uffd, .events = POLLIN }, { .fd = stream, .events = POLLIN } };
	while (poll(polled, 2, -1) >= 0) {
		struct uffd_msg message;
		if (polled[1].revents & (POLLHUP | POLLIN))
			break;
		if (read(uffd, &message, sizeof message) != sizeof message)
			continue;
		if (message.event == UFFD_EVENT_PAGEFAULT)
			provide(uffd, message.arg.pagefault.address & ~(PAGE - 1));
	}
	printf("%lu of %lu pages\n", provided, all);
	return 0;
}
