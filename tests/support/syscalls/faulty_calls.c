/* Counts the calls that change the disk under a folder, or read a file under it, and makes one of them go wrong.
 *
 * Loaded by LD_PRELOAD; the process arms it through ctypes (faulty_calls.py), forks, and the parent reads what the child did
 * from memory that both share. Real work is done by raw system calls, so that nothing here calls what it stands in for.
 * Not seen: stores into mapped memory, stdio of C (fopen), io_uring, calls that a library makes without libc.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define LONGEST 512
#define MOST_CALLS 16384
#define MOST_PIECES 16

/* In the order of `Fault` in faulty_calls.py. */
enum fault { COUNT, KILL, TORN, NO_SPACE, SHORT, IO_ERROR, READ_ERROR, READ_SHORT };

struct call {
    char name[16];
    char path[LONGEST]; /* of two paths: where something new appears */
};

static struct shared {
    int fault;
    long at;             /* the call that goes wrong, counted from 1; 0: none */
    char under[LONGEST]; /* the folder, without a slash at its end; empty: nothing is counted */
    atomic_long seen;    /* calls so far; of writers or of readers, as the fault wants them */
    atomic_int is_full;  /* the disk has no space any more */
    atomic_long hit;     /* number of the call that went wrong; 0: none yet */
    struct call calls[MOST_CALLS];
} *shared;

__attribute__((constructor)) static void start(void) {
    void *memory = mmap(NULL, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory != MAP_FAILED) shared = memory;
}

void *faulty_calls_shared(void) { return shared; }

/* ------------------------------------------------------------------------------------------------ which file */
static int by_descriptor(int descriptor, char *path) {
    char link[32] = "/proc/self/fd/", digits[12];
    int length = 0, at = 14;
    if (descriptor < 0) return 0;
    do digits[length++] = '0' + descriptor % 10;
    while ((descriptor /= 10));
    while (length) link[at++] = digits[--length];
    link[at] = 0;
    long size = syscall(SYS_readlinkat, AT_FDCWD, link, path, (size_t)LONGEST - 1);
    path[size > 0 ? size : 0] = 0;
    return size > 0;
}

static void by_name(int folder, const char *name, char *path) {
    path[0] = 0;
    if (!strncmp(name, "/proc/self/fd/", 14)) {
        long size = syscall(SYS_readlinkat, AT_FDCWD, name, path, (size_t)LONGEST - 1);
        path[size > 0 ? size : 0] = 0;
        return;
    }
    if (name[0] != '/') {
        if (folder == AT_FDCWD)
            syscall(SYS_getcwd, path, (size_t)LONGEST - 1);
        else
            by_descriptor(folder, path);
        strncat(path, "/", LONGEST - 1 - strlen(path));
    }
    strncat(path, name, LONGEST - 1 - strlen(path));
}

static int is_under(const char *path) {
    size_t length = strlen(shared->under);
    return length && !strncmp(path, shared->under, length) && (path[length] == '/' || !path[length]);
}

/* ------------------------------------------------------------------------------------------------ what happens */
enum verdict { PASS, FAIL, HALF };

static enum verdict fail(int error) {
    errno = error;
    return FAIL;
}

/* size: bytes of a read or a write; of other calls 0. takes_space: it fails on a full disk, however often it is tried. */
static enum verdict meet(const char *name, const char *path, long size, int takes_space, int reads) {
    int saved = errno;
    if (!shared || reads != (shared->fault == READ_ERROR || shared->fault == READ_SHORT) || !is_under(path)) return PASS;
    long number = atomic_fetch_add(&shared->seen, 1) + 1;
    if (number <= MOST_CALLS) {
        strncpy(shared->calls[number - 1].name, name, sizeof shared->calls[0].name - 1);
        strncpy(shared->calls[number - 1].path, path, LONGEST - 1);
    }
    if (number != shared->at) {
        errno = saved;
        return takes_space && shared->is_full ? fail(ENOSPC) : PASS;
    }
    shared->hit = number;
    switch (shared->fault) {
    case KILL:
        syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
        return PASS;
    case NO_SPACE:
        shared->is_full = 1;
        return fail(ENOSPC);
    case SHORT:
        shared->is_full = 1;
        return size > 1 ? HALF : fail(ENOSPC);
    case TORN:
        if (size <= 1) syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
        return HALF;
    case READ_SHORT:
        return size > 1 ? HALF : PASS;
    case IO_ERROR:
    case READ_ERROR:
        return fail(EIO);
    }
    errno = saved;
    return PASS;
}

static enum verdict meet_descriptor(const char *name, int descriptor, long size, int takes_space, int reads) {
    char path[LONGEST];
    int saved = errno, known = shared && shared->under[0] && by_descriptor(descriptor, path);
    errno = saved;
    return known ? meet(name, path, size, takes_space, reads) : PASS;
}

static enum verdict meet_name(const char *name, int folder, const char *file, int takes_space, int reads) {
    char path[LONGEST];
    if (!shared || !shared->under[0] || !file) return PASS;
    int saved = errno;
    by_name(folder, file, path);
    errno = saved;
    return meet(name, path, 0, takes_space, reads);
}

/* ------------------------------------------------------------------------------------------------ reading and writing */
static long total(const struct iovec *pieces, int count) {
    long size = 0;
    for (int i = 0; i < count; i++) size += pieces[i].iov_len;
    return size;
}

/* The first `size` bytes of `pieces` as pieces of their own; how many. */
static int beginning(const struct iovec *pieces, int count, long size, struct iovec *out) {
    int used = 0;
    for (; used < count && used < MOST_PIECES && size > 0; used++) {
        out[used] = pieces[used];
        if ((long)out[used].iov_len > size) out[used].iov_len = size;
        size -= out[used].iov_len;
    }
    return used;
}

/* offset -1: where the file stands. */
static long move(int reads, int descriptor, const struct iovec *pieces, int count, off_t offset, int flags) {
    if (offset == -1 && !flags)
        return syscall(reads ? SYS_readv : SYS_writev, descriptor, pieces, (long)count);
    return syscall(reads ? SYS_preadv2 : SYS_pwritev2, descriptor, pieces, (long)count, offset, 0L, (long)flags);
}

static long moved(const char *name, int reads, int descriptor, const struct iovec *pieces, int count, off_t offset, int flags) {
    struct iovec some[MOST_PIECES];
    long size = total(pieces, count), half = size / 2;
    switch (meet_descriptor(name, descriptor, size, !reads, reads)) {
    case FAIL:
        return -1;
    case HALF:
        if (fcntl(descriptor, F_GETFL) & O_DIRECT) half = half / 4096 * 4096; /* nothing less goes to such a file */
        if (half) {
            long done = move(reads, descriptor, some, beginning(pieces, count, half, some), offset, flags);
            if (shared->fault != TORN) return done;
        } else if (reads) {
            break;
        }
        if (shared->fault == TORN) syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
        errno = ENOSPC;
        return -1;
    case PASS:
        break;
    }
    return move(reads, descriptor, pieces, count, offset, flags);
}

#define ONE(buffer, size) (struct iovec[]){{(void *)(buffer), (size)}}, 1

ssize_t write(int fd, const void *buffer, size_t size) { return moved("write", 0, fd, ONE(buffer, size), -1, 0); }
ssize_t pwrite(int fd, const void *buffer, size_t size, off_t at) { return moved("pwrite", 0, fd, ONE(buffer, size), at, 0); }
ssize_t pwrite64(int fd, const void *buffer, size_t size, off_t at) { return moved("pwrite", 0, fd, ONE(buffer, size), at, 0); }
ssize_t writev(int fd, const struct iovec *pieces, int count) { return moved("writev", 0, fd, pieces, count, -1, 0); }
ssize_t pwritev(int fd, const struct iovec *pieces, int count, off_t at) {
    return moved("pwritev", 0, fd, pieces, count, at, 0);
}
ssize_t pwritev64(int fd, const struct iovec *pieces, int count, off_t at) {
    return moved("pwritev", 0, fd, pieces, count, at, 0);
}
ssize_t pwritev2(int fd, const struct iovec *pieces, int count, off_t at, int flags) {
    return moved("pwritev", 0, fd, pieces, count, at, flags);
}
ssize_t pwritev64v2(int fd, const struct iovec *pieces, int count, off_t at, int flags) {
    return moved("pwritev", 0, fd, pieces, count, at, flags);
}
ssize_t read(int fd, void *buffer, size_t size) { return moved("read", 1, fd, ONE(buffer, size), -1, 0); }
ssize_t pread(int fd, void *buffer, size_t size, off_t at) { return moved("pread", 1, fd, ONE(buffer, size), at, 0); }
ssize_t pread64(int fd, void *buffer, size_t size, off_t at) { return moved("pread", 1, fd, ONE(buffer, size), at, 0); }
ssize_t readv(int fd, const struct iovec *pieces, int count) { return moved("readv", 1, fd, pieces, count, -1, 0); }
ssize_t preadv(int fd, const struct iovec *pieces, int count, off_t at) { return moved("preadv", 1, fd, pieces, count, at, 0); }
ssize_t preadv64(int fd, const struct iovec *pieces, int count, off_t at) {
    return moved("preadv", 1, fd, pieces, count, at, 0);
}
ssize_t preadv2(int fd, const struct iovec *pieces, int count, off_t at, int flags) {
    return moved("preadv", 1, fd, pieces, count, at, flags);
}
ssize_t preadv64v2(int fd, const struct iovec *pieces, int count, off_t at, int flags) {
    return moved("preadv", 1, fd, pieces, count, at, flags);
}

ssize_t sendfile(int out, int in, off_t *at, size_t size) {
    switch (meet_descriptor("sendfile", out, size, 1, 0)) {
    case FAIL:
        return -1;
    case HALF:
        size /= 2;
        break;
    case PASS:
        break;
    }
    long done = syscall(SYS_sendfile, out, in, at, size);
    if (shared && shared->hit && shared->fault == TORN) syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
    return done;
}
ssize_t sendfile64(int out, int in, off_t *at, size_t size) { return sendfile(out, in, at, size); }

ssize_t copy_file_range(int in, off_t *in_at, int out, off_t *out_at, size_t size, unsigned flags) {
    switch (meet_descriptor("copy_file_range", out, size, 1, 0)) {
    case FAIL:
        return -1;
    case HALF:
        size /= 2;
        break;
    case PASS:
        break;
    }
    long done = syscall(SYS_copy_file_range, in, in_at, out, out_at, size, (long)flags);
    if (shared && shared->hit && shared->fault == TORN) syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
    return done;
}

/* ------------------------------------------------------------------------------------------------ everything else */
static int opened(int folder, const char *file, int flags, mode_t mode) {
    int writes = (flags & (O_CREAT | O_TRUNC)) || (flags & O_ACCMODE) != O_RDONLY;
    if (meet_name("open", folder, file, writes && (flags & O_CREAT), !writes) == FAIL) return -1;
    return syscall(SYS_openat, (long)folder, file, (long)flags, (long)mode);
}

#define MODE(flags)                            \
    mode_t mode = 0;                           \
    if ((flags) & (O_CREAT | __O_TMPFILE)) {   \
        va_list more;                          \
        va_start(more, flags);                 \
        mode = va_arg(more, mode_t);           \
        va_end(more);                          \
    }

int open(const char *file, int flags, ...) { MODE(flags) return opened(AT_FDCWD, file, flags, mode); }
int open64(const char *file, int flags, ...) { MODE(flags) return opened(AT_FDCWD, file, flags, mode); }
int openat(int folder, const char *file, int flags, ...) { MODE(flags) return opened(folder, file, flags, mode); }
int openat64(int folder, const char *file, int flags, ...) { MODE(flags) return opened(folder, file, flags, mode); }
int __open_2(const char *file, int flags) { return opened(AT_FDCWD, file, flags, 0); }
int __open64_2(const char *file, int flags) { return opened(AT_FDCWD, file, flags, 0); }
int __openat_2(int folder, const char *file, int flags) { return opened(folder, file, flags, 0); }
int __openat64_2(int folder, const char *file, int flags) { return opened(folder, file, flags, 0); }
int creat(const char *file, mode_t mode) { return opened(AT_FDCWD, file, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *file, mode_t mode) { return opened(AT_FDCWD, file, O_CREAT | O_WRONLY | O_TRUNC, mode); }

#define BY_DESCRIPTOR(name, fd, takes_space, ...) \
    return meet_descriptor(name, fd, 0, takes_space, 0) == FAIL ? -1 : (int)syscall(__VA_ARGS__)
#define BY_NAME(name, folder, file, takes_space, ...) \
    return meet_name(name, folder, file, takes_space, 0) == FAIL ? -1 : (int)syscall(__VA_ARGS__)

int fsync(int fd) { BY_DESCRIPTOR("fsync", fd, 0, SYS_fsync, (long)fd); }
int fdatasync(int fd) { BY_DESCRIPTOR("fdatasync", fd, 0, SYS_fdatasync, (long)fd); }
int ftruncate(int fd, off_t size) { BY_DESCRIPTOR("ftruncate", fd, 0, SYS_ftruncate, (long)fd, size); }
int ftruncate64(int fd, off_t size) { BY_DESCRIPTOR("ftruncate", fd, 0, SYS_ftruncate, (long)fd, size); }
int fallocate(int fd, int mode, off_t at, off_t size) {
    BY_DESCRIPTOR("fallocate", fd, 1, SYS_fallocate, (long)fd, (long)mode, at, size);
}
int fallocate64(int fd, int mode, off_t at, off_t size) {
    BY_DESCRIPTOR("fallocate", fd, 1, SYS_fallocate, (long)fd, (long)mode, at, size);
}
int posix_fallocate(int fd, off_t at, off_t size) { /* gives the error back, and sets none */
    int saved = errno, done = fallocate(fd, 0, at, size) ? errno : 0;
    errno = saved;
    return done;
}
int posix_fallocate64(int fd, off_t at, off_t size) { return posix_fallocate(fd, at, size); }
int truncate(const char *file, off_t size) { BY_NAME("truncate", AT_FDCWD, file, 0, SYS_truncate, file, size); }
int truncate64(const char *file, off_t size) { BY_NAME("truncate", AT_FDCWD, file, 0, SYS_truncate, file, size); }

int renameat2(int from, const char *before, int to, const char *after, unsigned flags) {
    BY_NAME("rename", to, after, 0, SYS_renameat2, (long)from, before, (long)to, after, (long)flags);
}
int renameat(int from, const char *before, int to, const char *after) { return renameat2(from, before, to, after, 0); }
int rename(const char *before, const char *after) { return renameat2(AT_FDCWD, before, AT_FDCWD, after, 0); }
int unlinkat(int folder, const char *file, int flags) {
    BY_NAME(flags & AT_REMOVEDIR ? "rmdir" : "unlink", folder, file, 0, SYS_unlinkat, (long)folder, file, (long)flags);
}
int unlink(const char *file) { return unlinkat(AT_FDCWD, file, 0); }
int rmdir(const char *file) { return unlinkat(AT_FDCWD, file, AT_REMOVEDIR); }
int mkdirat(int folder, const char *file, mode_t mode) {
    BY_NAME("mkdir", folder, file, 1, SYS_mkdirat, (long)folder, file, (long)mode);
}
int mkdir(const char *file, mode_t mode) { return mkdirat(AT_FDCWD, file, mode); }
int linkat(int from, const char *before, int to, const char *after, int flags) {
    BY_NAME("link", to, after, 1, SYS_linkat, (long)from, before, (long)to, after, (long)flags);
}
int link(const char *before, const char *after) { return linkat(AT_FDCWD, before, AT_FDCWD, after, 0); }
int symlinkat(const char *target, int folder, const char *file) {
    BY_NAME("symlink", folder, file, 1, SYS_symlinkat, target, (long)folder, file);
}
int symlink(const char *target, const char *file) { return symlinkat(target, AT_FDCWD, file); }
