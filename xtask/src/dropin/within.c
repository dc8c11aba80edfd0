/* In front of a program (LD_PRELOAD): how long its calls of process_vm_writev(2) take, and how many bytes they move. */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static atomic_ulong nanoseconds, bytes;

static unsigned long now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000000000ul + time.tv_nsec;
}

ssize_t process_vm_writev(pid_t pid, const struct iovec *local, unsigned long locals, const struct iovec *remote,
			  unsigned long remotes, unsigned long flags)
{
	unsigned long start = now();
	ssize_t written = syscall(SYS_process_vm_writev, pid, local, locals, remote, remotes, flags);
	atomic_fetch_add_explicit(&nanoseconds, now() - start, memory_order_relaxed);
	if (written > 0)
		atomic_fetch_add_explicit(&bytes, written, memory_order_relaxed);
	return written;
}

__attribute__((destructor)) static void tell(void)
{
	if (bytes)
		printf("process_vm_writev %lu %lu\n", bytes, nanoseconds);
}
