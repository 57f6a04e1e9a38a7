/*
 * fresh.c - a file on its way to its place: what was there stays until the new one is complete.
 */
#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

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
