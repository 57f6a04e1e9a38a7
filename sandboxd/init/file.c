/*
 * file.c - the child of PID 1 that does one file operation, as the asked user; and of the operations
 * those on one file: read, write, stat.
 *
 * Paths are resolved inside the sandbox's root in one step with the open (openat2), never checked
 * first and opened later, and magic links of /proc lead nowhere. Symlinks are followed as the
 * sandbox's own programs would: a child that is the user in the sandbox's root can reach nothing
 * that the user could not. Only regular files are read or replaced; O_NONBLOCK keeps a FIFO from
 * holding the open.
 *
 * What comes over the data pipe (archives above all) may be the work of another sandbox. So before
 * this process becomes the user and looks at any of it, it closes all of PID 1's fds but the root,
 * /proc and the pipes: whoever took it over would be where every program of that user is.
 */
#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PART_BYTES (1u << 20)

struct job job;

/* --- what goes out --------------------------------------------------------------------------- */

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

/* From `at` up to `left` bytes, without a copy; how many there were, or -1. */
static int64_t send_part(int fd, off_t at, uint64_t left) {
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
        int64_t sent = emit_flush() ? -1 : send_part(fd, 0, size);
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

/* --- one file -------------------------------------------------------------------------------- */

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

static int read_file(void) {
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
    return send_part(fd, (off_t)at, left) < 0 ? -1 : 0;
}

static int stat_file(void) {
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

int fd_chmod(int fd, mode_t mode) {
    char path[32];
    text_number(stpcpy(path, "self/fd/"), (unsigned long)fd);
    return fchmodat(job.child->proc_fd, path, mode, 0);
}

int open_above(const char *path, char buffer[PATH_MAX], const char **base, bool make) {
    size_t len = strlen(path);
    errno = *path == '/' ? ENAMETOOLONG : EINVAL;
    if (*path != '/' || len >= PATH_MAX)
        return -1;
    memcpy(buffer, path, len + 1);
    while (len > 1 && buffer[len - 1] == '/')
        buffer[--len] = 0;
    char *slash = strrchr(buffer, '/');
    *base = slash + 1;
    errno = EINVAL;
    if (!**base || !strcmp(*base, ".") || !strcmp(*base, ".."))
        return -1;
    *slash = 0;
    return path_open_directory(job.child->root_fd, buffer, make);
}

/* --- a file on its way ----------------------------------------------------------------------- */

int fresh_open(int parent, struct fresh *fresh) {
    uint64_t random;
    if (getrandom(&random, sizeof random, 0) != sizeof random)
        return -1;
    text_number(stpcpy(fresh->name, ".sandboxd-"), random);
    fresh->fd = openat(parent, ".", O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
    fresh->named = fresh->fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == ENOENT);
    if (fresh->named)
        fresh->fd =
            openat(parent, fresh->name, O_CREAT | O_EXCL | O_WRONLY | O_NOFOLLOW | O_CLOEXEC, 0600);
    return fresh->fd < 0 ? -1 : 0;
}

/* By way of PID 1's own /proc: whatever the sandbox has at that place now. */
static int give_name(const struct fresh *fresh, int parent, const char *name) {
    char path[32];
    text_number(stpcpy(path, "self/fd/"), (unsigned long)fresh->fd);
    return linkat(job.child->proc_fd, path, parent, name, AT_SYMLINK_FOLLOW);
}

/* Only one that replaces another needs a name of its own before: a kill just then would leave it. */
int fresh_place(int parent, struct fresh *fresh, const char *base) {
    if (!fresh->named) {
        if (!give_name(fresh, parent, base))
            return 0;
        if (errno != EEXIST || give_name(fresh, parent, fresh->name))
            return -1;
        fresh->named = true;
    }
    if (renameat(parent, fresh->name, parent, base))
        return -1;
    fresh->named = false;
    return 0;
}

int fresh_place_new(int parent, struct fresh *fresh, const char *base) {
    if (!fresh->named)
        return give_name(fresh, parent, base);
    if (renameat2(parent, fresh->name, parent, base, RENAME_NOREPLACE))
        return -1;
    fresh->named = false;
    return 0;
}

void fresh_drop(int parent, struct fresh *fresh) {
    if (fresh->named)
        unlinkat(parent, fresh->name, 0);
    close(fresh->fd);
}

/* --- write ----------------------------------------------------------------------------------- */

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

static int write_file(void) {
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

/* --- the child ------------------------------------------------------------------------------- */

static int parse(const struct inbox *in, const char **who) {
    const uint8_t *cursor = in->payload + sizeof job.req, *end = in->payload + in->head.len;
    errno = EBADMSG;
    if (in->head.len < sizeof job.req)
        return -1;
    memcpy(&job.req, in->payload, sizeof job.req);
    *who = wire_string(&cursor, end);
    job.path = wire_string(&cursor, end);
    job.other = wire_string(&cursor, end);
    if (!job.other || job.req.include_count > PATTERNS_MAX ||
        job.req.exclude_count > PATTERNS_MAX - job.req.include_count)
        return -1;
    for (uint32_t i = 0; i < job.req.include_count + job.req.exclude_count; i++)
        if (!(job.patterns[i] = wire_string(&cursor, end)))
            return -1;
    bool archive = job.req.op == FILE_PACK || job.req.op == FILE_UNPACK;
    if (cursor != end || in->fd_count != (archive ? 2 : 1))
        return -1;
    job.data_fd = in->fds[0];
    job.report_fd = archive                                               ? in->fds[1]
                    : job.req.op == FILE_READ || job.req.op == FILE_WRITE ? -1
                                                                          : in->fds[0];
    return 0;
}

static int find_owner(void) {
    static struct user owner;
    job.owner = (uid_t)-1;
    job.group = (gid_t)-1;
    if (!*job.other || job.req.op == FILE_MOVE)
        return 0;
    if (user_find(job.child->root_fd, job.other, &owner, job.fail)) {
        job.fail->index = 1;
        return -1;
    }
    job.owner = owner.uid;
    if (job.req.op != FILE_CHOWN || strchr(job.other, ':'))
        job.group = owner.gid;
    return 0;
}

static int close_others(void) {
    const int keep[] = {job.child->root_fd, job.child->proc_fd, job.data_fd, job.report_fd};
    for (int first = 3;;) {
        int next = INT_MAX;
        for (size_t i = 0; i < sizeof keep / sizeof *keep; i++)
            if (keep[i] >= first && keep[i] < next)
                next = keep[i];
        if (next > first && syscall(SYS_close_range, (unsigned)first,
                                    next == INT_MAX ? ~0U : (unsigned)next - 1, 0U))
            return job_fail(STEP_PIPES, 2);
        if (next == INT_MAX)
            return 0;
        first = next + 1;
    }
}

static int run(void) {
    switch ((enum file_op)job.req.op) {
    case FILE_READ:
        return read_file();
    case FILE_WRITE:
        return write_file();
    case FILE_STAT:
        return stat_file();
    case FILE_LIST:
        return tree_list();
    case FILE_MKDIR:
        return tree_make();
    case FILE_REMOVE:
        return tree_remove();
    case FILE_MOVE:
        return tree_move();
    case FILE_CHMOD:
    case FILE_CHOWN:
        return tree_change();
    case FILE_PACK:
        return tar_pack();
    case FILE_UNPACK:
        return tar_unpack();
    }
    errno = EBADMSG;
    return job_fail(STEP_MESSAGE, 1);
}

_Noreturn void file_child(struct child *self, struct inbox *in) {
    static struct user user;
    struct rlimit nofile;
    const char *who;
    setsid();
    signal(SIGPIPE, SIG_IGN);
    umask(022);
    job = (struct job){.child = self, .fail = &self->record->failure, .record = self->record};
    if (parse(in, &who)) {
        job_fail(STEP_MESSAGE, 0);
        _exit(1);
    }
    /* One fd a level of a tree. */
    if (!getrlimit(RLIMIT_NOFILE, &nofile)) {
        nofile.rlim_cur = nofile.rlim_max;
        setrlimit(RLIMIT_NOFILE, &nofile);
    }
    if (user_find(self->root_fd, who, &user, job.fail) || find_owner() || close_others() ||
        user_become(&user, job.fail))
        _exit(1);
    _exit(run() ? 1 : 0);
}
