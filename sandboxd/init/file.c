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

#define LINKS_MAX 40 /* as the kernel's path resolution(7) */

static struct file_req request;

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
        if (sent < 0)
            return fail_at(fail, errno == EPIPE ? STEP_DATA_PIPE : STEP_FILE_READ, 0);
        if (sent == 0)
            break;
        left -= (uint64_t)sent;
    }
    return 0;
}

/* Directory fd of path's parent; *base is the last component. Makes parents if asked. */
static int open_parent(int root_fd, char *path, const char **base) {
    char *slash = strrchr(path, '/');
    *base = slash + 1;
    errno = EISDIR;
    if (!**base || !strcmp(*base, ".") || !strcmp(*base, ".."))
        return -1;
    *slash = 0;
    const char *parent = *path ? path : "/";
    int fd = sys_openat_root(root_fd, parent, O_PATH | O_DIRECTORY, 0);
    if (fd >= 0 || errno != ENOENT || !(request.flags & FILE_PARENTS))
        return fd;
    for (char *at = path;; at++) {
        if (at == path && *at == '/')
            continue;
        if (*at != '/' && *at != 0)
            continue;
        char saved = *at;
        *at = 0;
        fd = sys_openat_root(root_fd, path, O_PATH | O_DIRECTORY, 0);
        if (fd < 0 && errno == ENOENT) {
            char *cut = strrchr(path, '/');
            *cut = 0;
            int above = sys_openat_root(root_fd, *path ? path : "/", O_PATH | O_DIRECTORY, 0);
            *cut = '/';
            if (above < 0 || (mkdirat(above, cut + 1, 0755) && errno != EEXIST))
                return -1;
            close(above);
            fd = sys_openat_root(root_fd, path, O_PATH | O_DIRECTORY, 0);
        }
        *at = saved;
        if (fd < 0 || !saved)
            return fd;
        close(fd);
    }
}

/* Follow path's symlinks by hand down to the directory and name that a rename can replace. */
static int find_target(int root_fd, const char *path, char *buffer, const char **base) {
    static char link[4096];
    if (*path != '/' || strlen(path) >= 4096) {
        errno = *path == '/' ? ENAMETOOLONG : EINVAL;
        return -1;
    }
    strcpy(buffer, path);
    for (int i = 0; i < LINKS_MAX; i++) {
        char before[4096];
        strcpy(before, buffer);
        int parent = open_parent(root_fd, buffer, base);
        if (parent < 0)
            return -1;
        ssize_t len = readlinkat(parent, *base, link, sizeof link - 1);
        if (len < 0)
            return errno == EINVAL || errno == ENOENT ? parent : -1;
        close(parent);
        link[len] = 0;
        size_t keep = *link == '/' ? 0 : (size_t)(strrchr(before, '/') - before) + 1;
        if (keep + (size_t)len >= sizeof before) {
            errno = ENAMETOOLONG;
            return -1;
        }
        memcpy(buffer, before, keep);
        memcpy(buffer + keep, link, (size_t)len + 1);
    }
    errno = ELOOP;
    return -1;
}

static int copy_in(int data_fd, int fd, struct failure *fail) {
    static char block[65536];
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
    }
    errno = EPIPE;
    return total == request.length ? 0 : fail_at(fail, STEP_FILE_LENGTH, 0);
}

static int write_file(struct child *self, const char *path, int data_fd) {
    static char buffer[4096];
    struct failure *fail = &self->record->failure;
    struct stat old;
    const char *base;
    int parent = find_target(self->root_fd, path, buffer, &base);
    if (parent < 0)
        return fail_at(fail, STEP_FILE_OPEN, 0);
    bool replaces = !fstatat(parent, base, &old, AT_SYMLINK_NOFOLLOW);
    errno = replaces && S_ISDIR(old.st_mode) ? EISDIR : EINVAL;
    if (replaces && !S_ISREG(old.st_mode))
        return fail_at(fail, STEP_FILE_TYPE, 1);
    /* rename(2) asks the directory only: without this a user could replace what it may not write */
    if (replaces && faccessat(parent, base, W_OK, AT_EACCESS))
        return fail_at(fail, STEP_FILE_OPEN, 1);
    uint64_t random;
    char name[40] = ".sandboxd-";
    if (getrandom(&random, sizeof random, 0) != sizeof random)
        return fail_at(fail, STEP_FILE_OPEN, 2);
    text_number(name + strlen(name), random);
    int fd = openat(parent, name, O_CREAT | O_EXCL | O_WRONLY | O_NOFOLLOW | O_CLOEXEC, 0600);
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
    if (!r && renameat(parent, name, parent, base))
        r = fail_at(fail, STEP_FILE_RENAME, 0);
    if (r)
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
    else
        fail_at(fail, STEP_MESSAGE, 1);
    _exit(r ? 1 : 0);
}
