/*
 * file.c - the child of PID 1 that does one file operation, as the asked user.
 *
 * Paths are resolved inside the sandbox's root in one step with the open (openat2), never checked
 * first and opened later, and magic links of /proc lead nowhere. Symlinks are followed as the
 * sandbox's own programs would: a child that is the user in the sandbox's root can reach nothing
 * that the user could not. Only regular files are read or replaced; O_NONBLOCK keeps a FIFO from
 * holding the open.
 */
#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

#define TEMPORARY_NAME 40

static struct file_req request;
static char block[65536];

static int describe(int fd, struct record *record) {
    struct stat st;
    if (fstat(fd, &st))
        return fail_at(&record->failure, STEP_FILE_TYPE, 0);
    errno = S_ISDIR(st.st_mode) ? EISDIR : EINVAL;
    if (!S_ISREG(st.st_mode))
        return fail_at(&record->failure, STEP_FILE_TYPE, 1);
    record->mode = st.st_mode & 07777;
    record->uid = st.st_uid;
    record->gid = st.st_gid;
    record->size = (uint64_t)st.st_size;
    record->mtime_ns = st.st_mtim.tv_sec * 1000000000LL + st.st_mtim.tv_nsec;
    return 0;
}

/* What sendfile(2) refuses: most of /proc/PID cannot be spliced. */
static int copy_out(int fd, int data_fd, off_t at, uint64_t left, struct failure *fail) {
    while (left) {
        ssize_t got = pread(fd, block, left < sizeof block ? (size_t)left : sizeof block, at);
        if (got < 0)
            return fail_at(fail, STEP_FILE_READ, 1);
        if (got == 0)
            return 0;
        for (ssize_t done = 0; done < got;) {
            ssize_t put = write(data_fd, block + done, (size_t)(got - done));
            if (put < 0)
                return fail_at(fail, STEP_DATA_PIPE, 2);
            done += put;
        }
        at += got;
        left -= (uint64_t)got;
    }
    return 0;
}

static int read_file(struct child *self, const char *path, int data_fd) {
    struct failure *fail = &self->record->failure;
    int fd = sys_openat_root(self->root_fd, path, O_RDONLY | O_NONBLOCK | O_NOCTTY, 0);
    if (fd < 0)
        return fail_at(fail, STEP_FILE_OPEN, 0);
    if (describe(fd, self->record))
        return -1;
    if (request.op == FILE_STAT)
        return 0;
    off_t at = (off_t)request.offset;
    uint64_t left = request.length;
    while (left) {
        size_t part = left > (1u << 20) ? 1u << 20 : (size_t)left;
        ssize_t sent = sendfile(data_fd, fd, &at, part);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0 && errno == EINVAL && left == request.length)
            return copy_out(fd, data_fd, at, left, fail);
        if (sent < 0)
            return fail_at(fail, errno == EPIPE ? STEP_DATA_PIPE : STEP_FILE_READ, 0);
        if (sent == 0)
            break;
        left -= (uint64_t)sent;
    }
    return 0;
}

static int copy_in(int data_fd, int fd, struct failure *fail) {
    uint64_t total = 0;
    for (;;) {
        ssize_t got = read(data_fd, block, sizeof block);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return fail_at(fail, STEP_DATA_PIPE, 1);
        if (got == 0)
            break;
        for (ssize_t done = 0; done < got;) {
            ssize_t put = write(fd, block + done, (size_t)(got - done));
            if (put < 0)
                return fail_at(fail, STEP_FILE_WRITE, 0);
            done += put;
        }
        total += (uint64_t)got;
        errno = EFBIG;
        if (total > request.length)
            return fail_at(fail, STEP_FILE_LENGTH, 1);
    }
    errno = EPIPE;
    return total == request.length ? 0 : fail_at(fail, STEP_FILE_LENGTH, 0);
}

/* A file without a name as long as it is incomplete, where the file system has such: then nothing
 * is left of it when this process is killed. `name` is set where it has one from the start. */
static int open_temporary(int parent, char name[TEMPORARY_NAME], bool *named) {
    uint64_t random;
    if (getrandom(&random, sizeof random, 0) != sizeof random)
        return -1;
    text_number(stpcpy(name, ".sandboxd-"), random);
    int fd = openat(parent, ".", O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
    *named = fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == ENOENT);
    if (*named)
        fd = openat(parent, name, O_CREAT | O_EXCL | O_WRONLY | O_NOFOLLOW | O_CLOEXEC, 0600);
    return fd;
}

/* By way of PID 1's own /proc: whatever the sandbox has at that place now. */
static int give_name(int proc_fd, int fd, int parent, const char *name) {
    char path[32];
    text_number(stpcpy(path, "self/fd/"), (unsigned long)fd);
    return linkat(proc_fd, path, parent, name, AT_SYMLINK_FOLLOW);
}

static int write_file(struct child *self, const char *path, int data_fd) {
    static char buffer[PATH_MAX];
    struct failure *fail = &self->record->failure;
    struct stat old;
    const char *base;
    char name[TEMPORARY_NAME];
    bool named;
    int parent =
        path_find_target(self->root_fd, path, buffer, &base, (request.flags & FILE_PARENTS) != 0);
    if (parent < 0)
        return fail_at(fail, STEP_FILE_OPEN, 0);
    bool replaces = !fstatat(parent, base, &old, AT_SYMLINK_NOFOLLOW);
    errno = replaces && S_ISDIR(old.st_mode) ? EISDIR : EINVAL;
    if (replaces && !S_ISREG(old.st_mode))
        return fail_at(fail, STEP_FILE_TYPE, 1);
    /* rename(2) asks the directory only: without this a user could replace what it may not write */
    if (replaces && faccessat(parent, base, W_OK, AT_EACCESS))
        return fail_at(fail, STEP_FILE_OPEN, 1);
    int fd = open_temporary(parent, name, &named);
    if (fd < 0)
        return fail_at(fail, STEP_FILE_OPEN, 3);
    mode_t mode = request.flags & FILE_MODE ? request.mode & 07777
                  : replaces                ? old.st_mode & 07777
                                            : 0644;
    int r = copy_in(data_fd, fd, fail);
    /* A replaced file keeps its owner where the user may give files away (root), as an edit would. */
    if (!r && replaces && geteuid() == 0 && fchown(fd, old.st_uid, old.st_gid))
        r = fail_at(fail, STEP_FILE_WRITE, 1);
    if (!r && fchmod(fd, mode))
        r = fail_at(fail, STEP_FILE_WRITE, 2);
    if (!r && !named && !(named = !give_name(self->proc_fd, fd, parent, name)))
        r = fail_at(fail, STEP_FILE_RENAME, 1);
    if (!r && renameat(parent, name, parent, base))
        r = fail_at(fail, STEP_FILE_RENAME, 0);
    if (r && named)
        unlinkat(parent, name, 0);
    return r ? -1 : describe(fd, self->record);
}

_Noreturn void file_child(struct child *self, struct inbox *in) {
    static struct user user;
    struct failure *fail = &self->record->failure;
    const uint8_t *cursor = in->payload + sizeof request, *end = in->payload + in->head.len;
    const char *who = NULL, *path = NULL;
    setsid();
    signal(SIGPIPE, SIG_IGN);
    umask(022);
    if (in->head.len >= sizeof request) {
        memcpy(&request, in->payload, sizeof request);
        who = wire_string(&cursor, end);
        path = wire_string(&cursor, end);
    }
    errno = EBADMSG;
    if (!path || (in->fd_count != 1 && request.op != FILE_STAT)) {
        fail_at(fail, STEP_MESSAGE, 0);
        _exit(1);
    }
    if (user_find(self->root_fd, who, &user, fail) || user_become(&user, fail))
        _exit(1);
    int r = -1;
    if (request.op == FILE_READ || request.op == FILE_STAT)
        r = read_file(self, path, in->fds[0]);
    else if (request.op == FILE_WRITE)
        r = write_file(self, path, in->fds[0]);
    else {
        errno = EBADMSG;
        fail_at(fail, STEP_MESSAGE, 1);
    }
    _exit(r ? 1 : 0);
}
