/*
 * emit.c - what a file operation says: bytes and entries to the data pipe, buffered, and why it failed.
 */
#include "files.h"

#include <errno.h>
#include <string.h>
#include <sys/sendfile.h>
#include <unistd.h>

#define PART_BYTES (1u << 20)

struct job job;

static uint8_t outbox[65536];
static size_t outbox_used;

int read_some(int fd, void *at, size_t size) {
    ssize_t got;
    do
        got = read(fd, at, size);
    while (got < 0 && errno == EINTR);
    return (int)got;
}

int write_all(int fd, const void *from, size_t size) {
    for (const uint8_t *at = from; size;) {
        ssize_t put = write(fd, at, size);
        if (put < 0 && errno == EINTR)
            continue;
        if (put < 0)
            return -1;
        at += put;
        size -= (size_t)put;
    }
    return 0;
}

int emit_flush(void) {
    size_t used = outbox_used;
    outbox_used = 0;
    return write_all(job.data_fd, outbox, used) ? job_fail(STEP_DATA_PIPE, 0) : 0;
}

int emit(const void *from, size_t size) {
    if (size > sizeof outbox - outbox_used && emit_flush())
        return -1;
    if (size > sizeof outbox)
        return write_all(job.data_fd, from, size) ? job_fail(STEP_DATA_PIPE, 0) : 0;
    memcpy(outbox + outbox_used, from, size);
    outbox_used += size;
    return 0;
}

/* What sendfile(2) refuses: most of /proc/PID cannot be spliced. */
static int64_t copy_part(int fd, off_t at, uint64_t left) {
    uint64_t total = 0;
    while (total < left) {
        size_t part = left - total > sizeof outbox ? sizeof outbox : (size_t)(left - total);
        ssize_t got = pread(fd, outbox, part, at + (off_t)total);
        if (got < 0)
            return job_fail(STEP_FILE_READ, 1);
        if (got == 0)
            break;
        if (write_all(job.data_fd, outbox, (size_t)got))
            return job_fail(STEP_DATA_PIPE, 2);
        total += (uint64_t)got;
    }
    return (int64_t)total;
}

int64_t emit_part(int fd, off_t at, uint64_t left) {
    uint64_t total = 0;
    while (total < left) {
        size_t part = left - total > PART_BYTES ? PART_BYTES : (size_t)(left - total);
        ssize_t sent = sendfile(job.data_fd, fd, &at, part);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0 && errno == EINVAL && !total)
            return copy_part(fd, at, left);
        if (sent < 0)
            return job_fail(errno == EPIPE ? STEP_DATA_PIPE : STEP_FILE_READ, 0);
        if (sent == 0)
            break;
        total += (uint64_t)sent;
    }
    return (int64_t)total;
}

int emit_file(int fd, const char *path, uint64_t size) {
    uint64_t have = 0;
    if (size <= sizeof outbox / 2) {
        if (size > sizeof outbox - outbox_used && emit_flush())
            return -1;
        while (have < size) {
            int got = read_some(fd, outbox + outbox_used, (size_t)(size - have));
            if (got < 0)
                return job_fail_in(STEP_FILE_READ, 0, path);
            if (got == 0)
                break;
            outbox_used += (size_t)got;
            have += (uint64_t)got;
        }
    } else {
        int64_t sent = emit_flush() ? -1 : emit_part(fd, 0, size);
        if (sent < 0)
            return -1;
        have = (uint64_t)sent;
    }
    errno = EAGAIN;
    return have == size ? 0 : job_fail_in(STEP_FILE_CHANGED, 0, path);
}

static struct file_entry entry_of(const struct stat *st, int err, const char *path,
                                  const char *target) {
    return (struct file_entry){
        .err = (uint32_t)err,
        .mode = st->st_mode,
        .uid = st->st_uid,
        .gid = st->st_gid,
        .nlink = (uint32_t)st->st_nlink,
        .path_len = (uint32_t)strlen(path),
        .target_len = (uint32_t)strlen(target),
        .size = (uint64_t)st->st_size,
        .inode = st->st_ino,
        .mtime_ns = st->st_mtim.tv_sec * 1000000000LL + st->st_mtim.tv_nsec,
    };
}

int emit_entry(const struct stat *st, int err, const char *path, const char *target) {
    struct file_entry entry = entry_of(st, err, path, target);
    return emit(&entry, sizeof entry) || emit(path, entry.path_len) ||
           emit(target, entry.target_len);
}

int job_fail(enum step step, uint32_t index) {
    return fail_at(job.fail, step, index);
}

int job_fail_in(enum step step, uint32_t index, const char *path) {
    static const struct stat nothing;
    struct file_entry entry = entry_of(&nothing, errno, path, "");
    job_fail(step, index);
    if (job.report_fd == job.data_fd && outbox_used && write_all(job.data_fd, outbox, outbox_used))
        return -1;
    outbox_used = 0;
    if (job.report_fd >= 0 && !write_all(job.report_fd, &entry, sizeof entry))
        (void)!write_all(job.report_fd, path, entry.path_len);
    return -1;
}
