/* Moves the wall clock and fills the disk of every process that has it in LD_PRELOAD; chaos_machine.py compiles it.
 *
 * CHAOS_CONTROL: a file of two 64-bit numbers that are read anew at every call: seconds added to CLOCK_REALTIME, and 0, or 1 to
 * let every write to a file below CHAOS_FULL_1 end in ENOSPC, or 2 for CHAOS_FULL_2. The kernel's own stamps of files do not
 * move, and neither does CLOCK_MONOTONIC. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct control { volatile int64_t clock_s, full; };

static const struct control *control(void) {
    static const struct control none, *volatile found;
    if (!found) {
        const char *path = getenv("CHAOS_CONTROL");
        int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        void *at = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof none, PROT_READ, MAP_SHARED, fd, 0);
        if (fd >= 0) close(fd);
        found = at == MAP_FAILED ? &none : at;
    }
    return found;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int status = syscall(SYS_clock_gettime, clock, now);
    if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += control()->clock_s;
    return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec fine;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &fine);
    *now = (struct timeval){fine.tv_sec, fine.tv_nsec / 1000};
    return 0;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}

static int is_full(int fd) {
    int64_t which = control()->full;
    const char *below = which == 1 ? getenv("CHAOS_FULL_1") : which == 2 ? getenv("CHAOS_FULL_2") : NULL;
    char name[32], path[PATH_MAX];
    if (!below) return 0;
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(name, path, sizeof path - 1);
    if (length < 0 || strncmp(path, below, strlen(below)) != 0) return 0;
    errno = ENOSPC;
    return 1;
}

ssize_t write(int fd, const void *data, size_t n) { return is_full(fd) ? -1 : syscall(SYS_write, fd, data, n); }
ssize_t pwrite(int fd, const void *data, size_t n, off_t at) { return is_full(fd) ? -1 : syscall(SYS_pwrite64, fd, data, n, at); }
ssize_t pwrite64(int fd, const void *data, size_t n, off64_t at) { return pwrite(fd, data, n, at); }
ssize_t writev(int fd, const struct iovec *parts, int n) { return is_full(fd) ? -1 : syscall(SYS_writev, fd, parts, n); }
ssize_t pwritev(int fd, const struct iovec *parts, int n, off_t at) { return is_full(fd) ? -1 : syscall(SYS_pwritev, fd, parts, n, at, 0L); }
ssize_t pwritev64(int fd, const struct iovec *parts, int n, off64_t at) { return pwritev(fd, parts, n, at); }
int ftruncate(int fd, off_t length) { return is_full(fd) ? -1 : syscall(SYS_ftruncate, fd, length); }
int ftruncate64(int fd, off64_t length) { return ftruncate(fd, length); }
int fallocate(int fd, int mode, off_t at, off_t n) { return is_full(fd) ? -1 : syscall(SYS_fallocate, fd, mode, at, n); }
int posix_fallocate(int fd, off_t at, off_t n) { return fallocate(fd, 0, at, n) ? errno : 0; }
