/*
 * path.c - directories made and symlinks followed inside the sandbox's root.
 *
 * Each step is one openat2(2) from the root, so a path that is changed meanwhile leads somewhere
 * else inside the root and nowhere else; magic links of /proc lead nowhere.
 */
#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define LINKS_MAX 40 /* as the kernel's path resolution(7) */

static int open_directory(int root_fd, const char *path) {
    return sys_openat_root(root_fd, *path ? path : "/", O_PATH | O_DIRECTORY, 0);
}

/* Make the last component of path (changed meanwhile) and open it. */
static int make_directory(int root_fd, char *path) {
    char *cut = strrchr(path, '/');
    *cut = 0;
    int above = open_directory(root_fd, path);
    *cut = '/';
    if (above < 0)
        return -1;
    bool failed = mkdirat(above, cut + 1, 0755) && errno != EEXIST;
    int err = errno;
    close(above);
    errno = err;
    return failed ? -1 : open_directory(root_fd, path);
}

int path_open_directory(int root_fd, char *path, bool make) {
    int fd = open_directory(root_fd, path);
    if (fd >= 0 || errno != ENOENT || !make || *path != '/')
        return fd;
    for (char *at = path + 1;; at++) {
        if (*at && *at != '/')
            continue;
        char saved = *at;
        *at = 0;
        fd = open_directory(root_fd, path);
        if (fd < 0 && errno == ENOENT)
            fd = make_directory(root_fd, path);
        *at = saved;
        if (fd < 0 || !saved)
            return fd;
        close(fd);
    }
}

/* Split path at its last slash; returns the fd of the directory before it. */
static int open_parent(int root_fd, char *path, const char **base, bool make) {
    char *slash = strrchr(path, '/');
    *base = slash + 1;
    errno = EISDIR;
    if (!**base || !strcmp(*base, ".") || !strcmp(*base, ".."))
        return -1;
    *slash = 0;
    return path_open_directory(root_fd, path, make);
}

int path_find_target(int root_fd, const char *path, char *buffer, const char **base, bool make) {
    char link[PATH_MAX], before[PATH_MAX];
    if (*path != '/' || strlen(path) >= PATH_MAX) {
        errno = *path == '/' ? ENAMETOOLONG : EINVAL;
        return -1;
    }
    strcpy(buffer, path);
    for (int i = 0; i < LINKS_MAX; i++) {
        strcpy(before, buffer);
        int parent = open_parent(root_fd, buffer, base, make);
        if (parent < 0)
            return -1;
        ssize_t len = readlinkat(parent, *base, link, sizeof link - 1);
        if (len < 0 && (errno == EINVAL || errno == ENOENT))
            return parent;
        int err = errno;
        close(parent);
        errno = err;
        if (len < 0)
            return -1;
        /* The text of a magic link is no path of the sandbox. */
        int end = sys_openat_root(root_fd, before, O_PATH, 0);
        if (end < 0 && errno == ELOOP)
            return -1;
        if (end >= 0)
            close(end);
        size_t keep = *link == '/' ? 0 : (size_t)(strrchr(before, '/') - before) + 1;
        errno = ENAMETOOLONG;
        if (keep + (size_t)len >= sizeof before)
            return -1;
        memcpy(buffer, before, keep);
        memcpy(buffer + keep, link, (size_t)len);
        buffer[keep + (size_t)len] = 0;
    }
    errno = ELOOP;
    return -1;
}
