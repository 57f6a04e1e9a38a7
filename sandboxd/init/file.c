/*
 * file.c - the operations on one file: read, write, stat.
 *
 * Paths are resolved inside the sandbox's root in one step with the open (openat2), never checked
 * first and opened later, and magic links of /proc lead nowhere. Symlinks are followed as the
 * sandbox's own programs would: a child that is the user in the sandbox's root can reach nothing
 * that the user could not. Only regular files are read or replaced; O_NONBLOCK keeps a FIFO from
 * holding the open.
 */
#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#define PART_BYTES (1u << 20)

static void describe(const struct stat *st) {
    job.record->mode = st->st_mode & 07777;
    job.record->uid = st->st_uid;
    job.record->gid = st->st_gid;
    job.record->size = (uint64_t)st->st_size;
    job.record->mtime_ns = st->st_mtim.tv_sec * 1000000000LL + st->st_mtim.tv_nsec;
}

static int check_regular(const struct stat *st) {
    errno = S_ISDIR(st->st_mode) ? EISDIR : EINVAL;
    return S_ISREG(st->st_mode) ? 0 : job_fail(STEP_FILE_TYPE, 1);
}

int file_read(void) {
    struct stat st;
    int fd = sys_openat_root(job.child->root_fd, job.path, O_RDONLY | O_NONBLOCK | O_NOCTTY, 0);
    if (fd < 0)
        return job_fail(STEP_FILE_OPEN, 0);
    if (fstat(fd, &st))
        return job_fail(STEP_FILE_TYPE, 0);
    if (check_regular(&st))
        return -1;
    describe(&st);
    uint64_t at = job.req.offset, left = job.req.length, size = (uint64_t)st.st_size;
    if (job.req.flags & FILE_SUFFIX)
        at = size > left ? size - left : 0;
    if (job.req.flags & FILE_ENTRY) {
        if (emit_entry(&st, 0, "", "") || emit_flush())
            return -1;
        /* What was said is what comes, also of a log that grows; a file of /proc says nothing. */
        if (size && left > (at < size ? size - at : 0))
            left = at < size ? size - at : 0;
    }
    if (at > INT64_MAX)
        return 0;
    return emit_part(fd, (off_t)at, left) < 0 ? -1 : 0;
}

int file_stat(void) {
    struct stat st;
    char target[PATH_MAX] = "";
    int flags = O_PATH | (job.req.flags & FILE_FOLLOW ? 0 : O_NOFOLLOW);
    int fd = sys_openat_root(job.child->root_fd, job.path, flags, 0);
    if (fd < 0)
        return job_fail(STEP_FILE_OPEN, 0);
    if (fstat(fd, &st))
        return job_fail(STEP_FILE_TYPE, 0);
    describe(&st);
    if (S_ISLNK(st.st_mode) && readlinkat(fd, "", target, sizeof target - 1) < 0)
        return job_fail(STEP_FILE_READ, 1);
    return emit_entry(&st, 0, "", target) || emit_flush();
}

/* The bytes that belong to the file next: how many at most, 0 at its end, -1. */
static int64_t next_chunk(uint64_t total) {
    uint32_t size;
    if (!(job.req.flags & FILE_CHUNKED))
        return total < job.req.length ? (int64_t)PART_BYTES : 0;
    for (size_t have = 0; have < sizeof size;) {
        int got = read_some(job.data_fd, (uint8_t *)&size + have, sizeof size - have);
        errno = got ? errno : EPIPE;
        if (got <= 0)
            return job_fail(got ? STEP_DATA_PIPE : STEP_FILE_LENGTH, 0);
        have += (size_t)got;
    }
    errno = EFBIG;
    return total + size > job.req.length ? job_fail(STEP_FILE_LENGTH, 1) : (int64_t)size;
}

static int copy_in(int fd) {
    static uint8_t block[65536];
    uint64_t total = 0;
    int64_t left;
    while ((left = next_chunk(total)) > 0) {
        while (left > 0) {
            int got = read_some(job.data_fd, block,
                                left < (int64_t)sizeof block ? (size_t)left : sizeof block);
            if (got < 0)
                return job_fail(STEP_DATA_PIPE, 1);
            errno = EPIPE;
            if (got == 0)
                return job_fail(STEP_FILE_LENGTH, 0);
            if (write_all(fd, block, (size_t)got))
                return job_fail(STEP_FILE_WRITE, 0);
            total += (uint64_t)got;
            left -= got;
            errno = EFBIG;
            if (total > job.req.length)
                return job_fail(STEP_FILE_LENGTH, 1);
            if (!(job.req.flags & FILE_CHUNKED) && total == job.req.length)
                break;
        }
    }
    if (left < 0 || job.req.flags & FILE_CHUNKED)
        return (int)left;
    int more = read_some(job.data_fd, block, 1);
    errno = EFBIG;
    return more > 0 ? job_fail(STEP_FILE_LENGTH, 1) : 0;
}

/* Mode, owner and place for what is written, then its picture. */
static int finish(int parent, const char *base, struct fresh *fresh, const struct stat *old) {
    mode_t mode = job.req.flags & FILE_MODE ? job.req.mode & 07777
                  : old                     ? old->st_mode & 07777
                                            : 0644;
    struct stat st;
    if (*job.other) {
        if (fchown(fresh->fd, job.owner, job.group))
            return job_fail(STEP_FILE_WRITE, 3);
        /* A replaced file keeps its owner where the user may give files away (root), as an edit would. */
    } else if (old && geteuid() == 0 && fchown(fresh->fd, old->st_uid, old->st_gid)) {
        return job_fail(STEP_FILE_WRITE, 1);
    }
    if (fchmod(fresh->fd, mode))
        return job_fail(STEP_FILE_WRITE, 2);
    if (fresh_place(parent, fresh, base))
        return job_fail(STEP_FILE_RENAME, 0);
    if (fstat(fresh->fd, &st))
        return job_fail(STEP_FILE_TYPE, 0);
    describe(&st);
    return 0;
}

int file_write(void) {
    static char buffer[PATH_MAX];
    struct stat old;
    struct fresh fresh;
    const char *base;
    int parent = path_find_target(job.child->root_fd, job.path, buffer, &base,
                                  (job.req.flags & FILE_PARENTS) != 0);
    if (parent < 0)
        return job_fail(STEP_FILE_OPEN, 0);
    bool replaces = !fstatat(parent, base, &old, AT_SYMLINK_NOFOLLOW);
    if (replaces && check_regular(&old))
        return -1;
    /* rename(2) asks the directory only: without this a user could replace what it may not write */
    if (replaces && faccessat(parent, base, W_OK, AT_EACCESS))
        return job_fail(STEP_FILE_OPEN, 1);
    if (fresh_open(parent, &fresh))
        return job_fail(STEP_FILE_OPEN, 3);
    int r = copy_in(fresh.fd) || finish(parent, base, &fresh, replaces ? &old : NULL);
    fresh_drop(parent, &fresh);
    return r ? -1 : 0;
}
