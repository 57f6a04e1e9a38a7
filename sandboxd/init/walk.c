/*
 * walk.c - going through a directory tree that others may be changing, at a bounded cost.
 *
 * Every directory is opened below the one it is in, no symlink and no mount on the way (openat2(2)),
 * so that whatever is moved meanwhile, nothing but what was below the root at some moment is seen.
 * An fd and a buffer a level; PATH_MAX bounds the levels, since what lies deeper has no name by which
 * anyone could ask for it.
 */
#include "files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LEVELS_MAX   (ENTRY_PATH_MAX / 2 + 1)
#define BUFFER_BYTES 16384

struct level {
    int fd;
    uint32_t at, end;
    size_t path_len;
    uint8_t *buffer;
};

static struct level levels[LEVELS_MAX];
static char path[ENTRY_PATH_MAX];

int open_inside(int dir_fd, const char *name) {
    struct open_how how = {.flags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC,
                           .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_XDEV};
    return (int)syscall(SYS_openat2, dir_fd, name, &how, sizeof how);
}

/* The next name of a directory but for "." and ".."; NULL at its end, or with *err set. */
static const char *next_name(struct level *level, int *err) {
    *err = 0;
    for (;;) {
        if (level->at == level->end) {
            long got = syscall(SYS_getdents64, level->fd, level->buffer, (size_t)BUFFER_BYTES);
            if (got <= 0) {
                *err = got < 0 && errno != ENOENT ? errno : 0; /* ENOENT: removed meanwhile */
                return NULL;
            }
            level->at = 0;
            level->end = (uint32_t)got;
        }
        struct dirent64 *entry = (struct dirent64 *)(void *)(level->buffer + level->at);
        level->at += entry->d_reclen;
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
            return entry->d_name;
    }
}

static int enter(size_t depth, int fd, size_t path_len) {
    struct level *level = &levels[depth];
    if (!level->buffer) {
        void *pages =
            mmap(NULL, BUFFER_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (pages == MAP_FAILED)
            return job_fail(STEP_FILE_TREE, 1);
        level->buffer = pages; /* kept for the next directory at this depth */
    }
    level->fd = fd;
    level->at = level->end = 0;
    level->path_len = path_len;
    return 0;
}

/* Put the name behind its directory's path, and return the length of both. */
static size_t append(size_t dir_len, const char *name) {
    size_t len = strlen(name), start = dir_len ? dir_len + 1 : 0;
    if (start)
        path[dir_len] = '/';
    memcpy(path + start, name, len + 1);
    return start + len;
}

int walk(int root_fd, uint32_t depth_max, int (*visit)(const struct visited *)) {
    size_t depth = 1;
    int err;
    if (enter(0, root_fd, 0))
        return WALK_STOP;
    while (depth) {
        struct level *level = &levels[depth - 1];
        const char *name = next_name(level, &err);
        struct visited at = {.dir_fd = level->fd, .name = name, .path = path};
        path[level->path_len] = 0;
        if (!name) {
            errno = err;
            if (err)
                return job_fail_in(STEP_FILE_TREE, 2, path);
            close(level->fd);
            depth--;
            continue;
        }
        size_t len = append(level->path_len, name);
        if (fstatat(level->fd, name, &at.st, AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT)) {
            if (errno == ENOENT)
                continue; /* gone since */
            return job_fail_in(STEP_FILE_TREE, 4, path);
        }
        int fd = -1;
        if (S_ISDIR(at.st.st_mode) && depth < depth_max) {
            errno = ENAMETOOLONG; /* not entered unless every name in it would fit */
            fd = len + 1 + NAME_MAX < sizeof path ? open_inside(level->fd, name) : -1;
            at.err = fd < 0 ? errno : 0;
        }
        int how = visit(&at);
        if (how == WALK_STOP)
            return WALK_STOP;
        if (how == WALK_PRUNE || fd < 0) {
            if (fd >= 0)
                close(fd);
            continue;
        }
        if (enter(depth, fd, len))
            return WALK_STOP;
        depth++;
    }
    return 0;
}
