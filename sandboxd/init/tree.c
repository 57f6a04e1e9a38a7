/*
 * tree.c - directories listed, searched, made, removed, moved, and the modes and owners in them.
 *
 * The last name of a path is not followed where it is a symlink, but for FILE_LIST, FILE_CHMOD and
 * FILE_CHOWN of the path itself, as ls(1), chmod(1) and chown(1) do; below it never. Nothing goes
 * beyond the file system that it starts on.
 */
#include "files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Levels that a removal goes down: deeper than any name reaches, for what was made by relative ones. */
#define REMOVE_LEVELS_MAX 65536

/* --- list ------------------------------------------------------------------------------------ */

static uint64_t listed, looked_at;

static int end_of_list(void) {
    static const struct stat nothing;
    return emit_entry(&nothing, E2BIG, "", "") ? WALK_STOP : 1;
}

static bool is_asked_for(const struct visited *at) {
    int64_t mtime_ns = at->st.st_mtim.tv_sec * 1000000000LL + at->st.st_mtim.tv_nsec;
    uint64_t size = (uint64_t)at->st.st_size;
    return (job.req.types & 1u << ((at->st.st_mode & S_IFMT) >> 12)) && size >= job.req.size_min &&
           size <= job.req.size_max && mtime_ns >= job.req.mtime_min_ns &&
           mtime_ns <= job.req.mtime_max_ns && filter_includes(at->path);
}

static bool list_is_cut;

static int list_one(const struct visited *at) {
    char target[PATH_MAX] = "";
    if (filter_excludes(at->path))
        return WALK_PRUNE;
    bool wanted = is_asked_for(at);
    if (++looked_at > job.req.length || (wanted && listed == job.req.entries)) {
        list_is_cut = true;
        return WALK_STOP;
    }
    if (!wanted)
        return WALK_ON;
    if (S_ISLNK(at->st.st_mode) && readlinkat(at->dir_fd, at->name, target, sizeof target - 1) < 0)
        target[0] = 0; /* another thing by now */
    listed++;
    return emit_entry(&at->st, at->err == EXDEV ? 0 : at->err, at->path, target) ? WALK_STOP
                                                                                 : WALK_ON;
}

/* A directory to go through, opened by the path as the sandbox's programs see it. */
static int open_tree_root(void) {
    int fd = sys_openat_root(job.child->root_fd, job.path,
                             O_RDONLY | O_DIRECTORY | O_NONBLOCK | O_NOCTTY, 0);
    if (fd >= 0)
        return fd;
    if (errno != ENOTDIR)
        return job_fail(STEP_FILE_OPEN, 0);
    /* ENOTDIR is the path's own last name only if that can be opened. */
    if (sys_openat_root(job.child->root_fd, job.path, O_PATH, 0) < 0)
        return job_fail(STEP_FILE_OPEN, 0);
    errno = ENOTDIR;
    return job_fail(STEP_FILE_TYPE, 2);
}

int tree_list(void) {
    int fd = open_tree_root();
    if (fd < 0)
        return -1;
    if (walk(fd, job.req.depth, list_one) && (!list_is_cut || end_of_list() < 0))
        return -1;
    job.record->size = listed;
    return emit_flush();
}

/* --- make, move ------------------------------------------------------------------------------ */

static int tell(int parent, const char *base, int flags) {
    struct stat st;
    if (fstatat(parent, base, &st, flags))
        return job_fail(STEP_FILE_TREE, 9);
    return emit_entry(&st, 0, "", "") || emit_flush();
}

int tree_make(void) {
    char buffer[PATH_MAX];
    const char *base;
    struct stat st;
    bool parents = job.req.flags & FILE_PARENTS;
    int parent = open_above(job.path, buffer, &base, parents);
    if (parent < 0)
        return job_fail(STEP_FILE_OPEN, 0);
    umask(job.req.flags & FILE_MODE ? 0 : 022);
    mode_t mode = job.req.flags & FILE_MODE ? job.req.mode & 07777 : 0755;
    if (!mkdirat(parent, base, mode)) {
        job.record->size = 1;
    } else if (errno != EEXIST || !parents) {
        return job_fail(STEP_FILE_TREE, 0);
    } else {
        /* Through a symlink too, but one that stays in the root: not by fstatat. */
        int fd = sys_openat_root(job.child->root_fd, job.path, O_PATH | O_DIRECTORY, 0);
        errno = EEXIST;
        if (fd < 0 || fstat(fd, &st))
            return job_fail(STEP_FILE_TREE, 0);
        return emit_entry(&st, 0, "", "") || emit_flush();
    }
    return tell(parent, base, AT_SYMLINK_NOFOLLOW);
}

static int copy_file(int fd, const struct stat *st, int to) {
    static uint8_t block[65536];
    struct timespec times[2] = {st->st_atim, st->st_mtim};
    bool is_ours = st->st_uid == geteuid();
    int got;
    while ((got = read_some(fd, block, sizeof block)) > 0)
        if (write_all(to, block, (size_t)got))
            return job_fail(STEP_FILE_WRITE, 0);
    if (got < 0)
        return job_fail(STEP_FILE_READ, 0);
    if (geteuid() == 0 && fchown(to, st->st_uid, st->st_gid))
        return job_fail(STEP_FILE_WRITE, 1);
    /* As mv(1): what makes its runner another user only goes along with its owner. */
    if (fchmod(to, st->st_mode & (geteuid() == 0 || is_ours ? 07777 : 0777)) || futimens(to, times))
        return job_fail(STEP_FILE_WRITE, 2);
    return 0;
}

/* To another file system: a file is whole there before it is gone here. Whatever else it may be has
 * no such way (EXDEV). */
static int move_by_copy(int from, const char *from_base, int to, const char *to_base) {
    struct stat st;
    struct fresh fresh;
    bool replaces = job.req.flags & FILE_REPLACE;
    int flags = O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC;
    int fd = fstatat(from, from_base, &st, AT_SYMLINK_NOFOLLOW) || !S_ISREG(st.st_mode)
                 ? -1
                 : openat(from, from_base, flags);
    if (fd < 0 || fstat(fd, &st) || !S_ISREG(st.st_mode)) {
        errno = fd < 0 && S_ISREG(st.st_mode) ? errno : EXDEV;
        return job_fail(STEP_FILE_RENAME, 2);
    }
    if (faccessat(from, ".", W_OK | X_OK, AT_EACCESS))
        return job_fail(STEP_FILE_OPEN, 0);
    if (fresh_open(to, &fresh))
        return job_fail(STEP_FILE_OPEN, 4);
    int r = copy_file(fd, &st, fresh.fd);
    if (!r && (replaces ? fresh_place : fresh_place_new)(to, &fresh, to_base))
        r = job_fail(STEP_FILE_RENAME, 2);
    if (!r && unlinkat(from, from_base, 0)) {
        r = job_fail(STEP_FILE_RENAME, 2);
        if (!replaces)
            unlinkat(to, to_base, 0);
    }
    fresh_drop(to, &fresh);
    return r;
}

int tree_move(void) {
    char from_buffer[PATH_MAX], to_buffer[PATH_MAX];
    const char *from_base, *to_base;
    int from = open_above(job.path, from_buffer, &from_base, false);
    if (from < 0)
        return job_fail(STEP_FILE_OPEN, 0);
    int to = open_above(job.other, to_buffer, &to_base, (job.req.flags & FILE_PARENTS) != 0);
    if (to < 0)
        return job_fail(STEP_FILE_OPEN, 4);
    unsigned flags = job.req.flags & FILE_REPLACE ? 0 : RENAME_NOREPLACE;
    if (renameat2(from, from_base, to, to_base, flags)) {
        if (errno != EXDEV)
            return job_fail(STEP_FILE_RENAME, 2);
        if (move_by_copy(from, from_base, to, to_base))
            return -1;
    }
    job.record->size = 1;
    return tell(to, to_base, AT_SYMLINK_NOFOLLOW);
}

/* --- change ---------------------------------------------------------------------------------- */

/* `fd` is O_PATH and may be a symlink only for chown. */
static int change(int fd, const struct stat *st) {
    if (++job.record->size > job.req.entries) {
        errno = E2BIG;
        return -1;
    }
    if (job.req.op == FILE_CHOWN)
        return fchownat(fd, "", job.owner, job.group, AT_EMPTY_PATH);
    return S_ISLNK(st->st_mode) ? 0 : fd_chmod(fd, job.req.mode & 07777);
}

static int change_one(const struct visited *at) {
    struct stat st;
    int fd = openat(at->dir_fd, at->name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT)
        return WALK_ON;
    int r = fd < 0 || fstat(fd, &st) ? -1 : change(fd, &st);
    if (r && errno == E2BIG)
        job_fail_in(STEP_FILE_BOUND, 0, at->path);
    else if (r)
        job_fail_in(STEP_FILE_TREE, 5, at->path);
    if (fd >= 0)
        close(fd);
    errno = at->err;
    if (!r && at->err && at->err != EXDEV && at->err != ENOENT)
        r = job_fail_in(STEP_FILE_TREE, 6, at->path);
    return r ? WALK_STOP : WALK_ON;
}

int tree_change(void) {
    struct stat st;
    int fd = sys_openat_root(job.child->root_fd, job.path, O_PATH, 0);
    if (fd < 0)
        return job_fail(STEP_FILE_OPEN, 0);
    if (fstat(fd, &st) || change(fd, &st))
        return job_fail(STEP_FILE_TREE, 5);
    if (job.req.flags & FILE_RECURSIVE && S_ISDIR(st.st_mode)) {
        int tree = open_inside(fd, ".");
        if (tree < 0)
            return job_fail(STEP_FILE_OPEN, 0);
        if (walk(tree, job.req.depth, change_one))
            return -1;
    }
    if (fstat(fd, &st))
        return job_fail(STEP_FILE_TREE, 9);
    return emit_entry(&st, 0, "", "") || emit_flush();
}

/* --- remove ---------------------------------------------------------------------------------- */

/*
 * Down into the first directory that is not empty, up again once it is, with one fd: a tree that was
 * made by relative names may have more levels than there are fds. The way up is "..", which a rename
 * may have turned elsewhere meanwhile: so where it leads is compared with where we came from.
 */
static struct {
    dev_t device;
    ino_t inode;
} above[REMOVE_LEVELS_MAX];

static int count_removed(void) {
    errno = E2BIG;
    return ++job.record->size > job.req.entries ? job_fail(STEP_FILE_BOUND, 0) : 0;
}

/* 0: removed or gone; 1: a directory that is not empty; -1. */
static int remove_name(int dir, const char *name, bool directory) {
    if (!directory && !unlinkat(dir, name, 0))
        return count_removed();
    if (directory || errno == EISDIR) {
        if (!unlinkat(dir, name, AT_REMOVEDIR))
            return count_removed();
        if (errno == ENOTEMPTY || errno == EEXIST)
            return 1;
    }
    return errno == ENOENT ? 0 : job_fail_in(STEP_FILE_TREE, 7, name);
}

/* Remove what can be; 1 and *next when a directory in it is not empty, 0 when nothing is left. */
static int clear(int dir, char next[NAME_MAX + 1]) {
    static _Alignas(8) uint8_t buffer[32768];
    for (bool any = true; any;) {
        long got;
        any = false;
        if (lseek(dir, 0, SEEK_SET))
            return job_fail(STEP_FILE_TREE, 8);
        while ((got = syscall(SYS_getdents64, dir, buffer, sizeof buffer)) > 0) {
            struct dirent64 *entry;
            for (long at = 0; at < got; at += entry->d_reclen) {
                entry = (struct dirent64 *)(void *)(buffer + at);
                if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
                    continue;
                any = true;
                int r = remove_name(dir, entry->d_name, entry->d_type == DT_DIR);
                if (r == 1)
                    strcpy(next, entry->d_name);
                if (r)
                    return r;
            }
        }
        if (got < 0 && errno != ENOENT)
            return job_fail(STEP_FILE_TREE, 8);
    }
    return 0;
}

static int remove_content(int dir) {
    char next[NAME_MAX + 1];
    struct stat st;
    size_t depth = 0;
    for (;;) {
        int r = clear(dir, next), other;
        if (r < 0 || (r == 0 && depth == 0))
            return r;
        if (r == 1) {
            errno = ELOOP;
            if (depth == REMOVE_LEVELS_MAX)
                return job_fail(STEP_FILE_BOUND, 2);
            if (fstat(dir, &st))
                return job_fail(STEP_FILE_TREE, 8);
            other = open_inside(dir, next);
            if (other < 0 && (errno == ENOENT || errno == EAGAIN)) {
                if (count_removed()) /* so that this ends */
                    return -1;
                continue;
            }
            if (other < 0)
                return job_fail_in(STEP_FILE_TREE, 8, next);
            above[depth].device = st.st_dev;
            above[depth++].inode = st.st_ino;
        } else {
            other = openat(dir, "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
            if (other < 0 || fstat(other, &st))
                return job_fail(STEP_FILE_TREE, 8);
            depth--;
            errno = EAGAIN;
            if (st.st_dev != above[depth].device || st.st_ino != above[depth].inode)
                return job_fail(STEP_FILE_CHANGED, 1);
        }
        close(dir);
        dir = other;
    }
}

int tree_remove(void) {
    char buffer[PATH_MAX];
    const char *base;
    struct stat st;
    int parent = open_above(job.path, buffer, &base, false);
    if (parent < 0)
        return job_fail(STEP_FILE_OPEN, 0);
    if (fstatat(parent, base, &st, AT_SYMLINK_NOFOLLOW))
        return job_fail(STEP_FILE_OPEN, 0);
    if (S_ISDIR(st.st_mode) && job.req.flags & FILE_RECURSIVE) {
        int dir = open_inside(parent, base);
        if (dir < 0 && errno != ENOENT)
            return job_fail(STEP_FILE_OPEN, 0);
        if (dir >= 0 && remove_content(dir))
            return -1;
    }
    if (unlinkat(parent, base, S_ISDIR(st.st_mode) ? AT_REMOVEDIR : 0))
        return job_fail(STEP_FILE_TREE, 7);
    job.record->size++;
    return 0;
}
