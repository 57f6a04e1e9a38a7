/*
 * setup.c - what PID 1 does to its namespaces before anything runs in them, and the swap of roots.
 *
 * setup_stage() runs in a forked child that is the sandbox's root: what it creates then belongs to
 * ids the sandbox has, and ipc sysctls may be written by nobody else. PID 1 itself cannot become
 * that id and return, since its own is not mapped here. Order:
 *   1. host name, loopback up, mounts made private;
 *   2. /stage, a tmpfs that is gone after the first swap; on it /proc, /sys (read-only), /dev;
 *   3. sysctls through the new /proc: the caps of this user namespace (before /proc/sys goes
 *      read-only);
 *   4. masks and read-only parts, each a mount over the path, checked for its type first.
 * setup_lock() then closes PID 1 itself: bounding set, no_new_privs, the filter.
 */
#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <net/if.h>
#include <linux/mount.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define LOCKED_DOWN (MS_NOSUID | MS_NODEV | MS_NOEXEC)
#define STAGE       "/stage/"

static int loopback_up(void) {
    struct ifreq request;
    memset(&request, 0, sizeof request);
    strcpy(request.ifr_name, "lo");
    request.ifr_flags = IFF_UP | IFF_RUNNING;
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    int r = ioctl(fd, SIOCSIFFLAGS, &request);
    close(fd);
    return r;
}

static int make_file(const char *path) {
    int fd = open(path, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
    return fd < 0 ? -1 : close(fd);
}

/* mount(2) and not open_tree(2): a detached mount counts as a mount namespace, and a sandbox is
 * allowed none of those by now. A clone keeps its source's flags: the masks stay read-only. */
static int bind_over(const char *source, const char *target, unsigned long flags, bool readonly) {
    if (mount(source, target, NULL, MS_BIND | flags, NULL))
        return -1;
    if (!readonly)
        return 0;
    return mount(NULL, target, NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | LOCKED_DOWN, NULL);
}

static int stage_dev(const struct setup *setup, struct failure *fail) {
    static const char *const nodes[] = {"null", "zero", "full", "random", "urandom", "tty"};
    static const char *const links[][2] = {{"/proc/self/fd", STAGE "dev/fd"},
                                           {"/proc/self/fd/0", STAGE "dev/stdin"},
                                           {"/proc/self/fd/1", STAGE "dev/stdout"},
                                           {"/proc/self/fd/2", STAGE "dev/stderr"},
                                           {"pts/ptmx", STAGE "dev/ptmx"}};
    char options[128], *at;
    at = stpcpy(options, "mode=0755,size=65536,nr_inodes=");
    text_number(at, setup->dev_inodes);
    if (mount("dev", STAGE "dev", "tmpfs", MS_NOSUID | MS_NOEXEC, options))
        return fail_at(fail, STEP_DEV, 0);
    for (uint32_t i = 0; i < sizeof nodes / sizeof *nodes; i++) {
        char source[32], target[48];
        strcpy(stpcpy(source, "/dev/"), nodes[i]);
        strcpy(stpcpy(target, STAGE "dev/"), nodes[i]);
        if (make_file(target) || bind_over(source, target, 0, false))
            return fail_at(fail, STEP_DEV_NODE, i);
    }
    for (uint32_t i = 0; i < sizeof links / sizeof *links; i++)
        if (symlink(links[i][0], links[i][1]))
            return fail_at(fail, STEP_DEV, i + 1);
    if (mkdir(STAGE "dev/pts", 0755) || mkdir(STAGE "dev/shm", 0755) ||
        mkdir(STAGE "dev/mqueue", 0755))
        return fail_at(fail, STEP_DEV, 16);
    at = stpcpy(options, "newinstance,ptmxmode=0666,mode=0620,");
    at = stpcpy(at, node.one_id ? "max=" : "gid=5,max=");
    text_number(at, setup->pty_max);
    if (mount("devpts", STAGE "dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, options))
        return fail_at(fail, STEP_DEV_PTS, 0);
    at = text_number(stpcpy(options, "mode=1777,size="), setup->shm_bytes_mb);
    text_number(stpcpy(at, "m,nr_inodes="), setup->shm_inodes);
    if (mount("shm", STAGE "dev/shm", "tmpfs", LOCKED_DOWN, options))
        return fail_at(fail, STEP_DEV_SHM, 0);
    if (mount("mqueue", STAGE "dev/mqueue", "mqueue", LOCKED_DOWN, NULL))
        return fail_at(fail, STEP_DEV_MQUEUE, 0);
    return 0;
}

/* Every path in the message is below /stage and came from the launcher. */
static int stage_path(char *out, size_t size, const char *below, const char *path) {
    if (strlen(below) + strlen(path) + sizeof STAGE > size) {
        errno = ENAMETOOLONG;
        return -1;
    }
    strcpy(stpcpy(stpcpy(out, STAGE), below), path);
    return 0;
}

static int stage_kernel_files(const struct setup *setup, const uint8_t *cursor, const uint8_t *end,
                              struct failure *fail) {
    char path[512];
    for (uint32_t i = 0; i < setup->sysctl_count; i++) {
        const char *key = wire_string(&cursor, end), *value = wire_string(&cursor, end);
        errno = EBADMSG;
        if (!key || !value)
            return fail_at(fail, STEP_MESSAGE, i);
        bool optional = *key == '?';
        if (stage_path(path, sizeof path, "proc/sys/", key + optional))
            return fail_at(fail, STEP_SYSCTL, i);
        if (sys_write_file(AT_FDCWD, path, value) && !(optional && errno == ENOENT))
            return fail_at(fail, STEP_SYSCTL, i);
    }
    for (uint32_t i = 0; i < setup->mask_count + setup->readonly_count; i++) {
        bool mask = i < setup->mask_count;
        enum step step = mask ? STEP_MASK : STEP_READONLY;
        const char *name = wire_string(&cursor, end);
        struct stat st;
        errno = EBADMSG;
        if (!name)
            return fail_at(fail, STEP_MESSAGE, i);
        if (stage_path(path, sizeof path, "", name))
            return fail_at(fail, step, i);
        if (lstat(path, &st)) {
            if (errno == ENOENT || errno == ENOTDIR)
                continue;
            return fail_at(fail, step, i);
        }
        int r = mask ? bind_over(S_ISDIR(st.st_mode) ? "/mask/dir" : "/mask/file", path, 0, false)
                     : bind_over(path, path, MS_REC, true);
        if (r)
            return fail_at(fail, step, i);
    }
    return 0;
}

int setup_stage(const struct inbox *in, struct failure *fail) {
    struct setup setup;
    const uint8_t *cursor = in->payload + sizeof setup, *end = in->payload + in->head.len;
    const char *hostname = NULL;
    if (in->head.len >= sizeof setup) {
        memcpy(&setup, in->payload, sizeof setup);
        hostname = wire_string(&cursor, end);
    }
    errno = EBADMSG;
    if (!hostname)
        return fail_at(fail, STEP_MESSAGE, 0);
    umask(0);
    if ((!node.one_id && setgroups(0, NULL)) || setresgid(0, 0, 0) || setresuid(0, 0, 0))
        return fail_at(fail, STEP_CREDENTIALS, 0);
    if (sethostname(hostname, strlen(hostname)))
        return fail_at(fail, STEP_HOSTNAME, 0);
    if (loopback_up())
        return fail_at(fail, STEP_LOOPBACK, 0);
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL))
        return fail_at(fail, STEP_PROPAGATION, 0);
    if (mount("stage", "/stage", "tmpfs", LOCKED_DOWN, "mode=0755,size=65536") ||
        mkdir(STAGE "proc", 0755) || mkdir(STAGE "sys", 0755) || mkdir(STAGE "dev", 0755))
        return fail_at(fail, STEP_STAGE, 0);
    if (mount("proc", STAGE "proc", "proc", LOCKED_DOWN, NULL))
        return fail_at(fail, STEP_PROC, 0);
    if (mount("sysfs", STAGE "sys", "sysfs", MS_RDONLY | LOCKED_DOWN, NULL))
        return fail_at(fail, STEP_SYS, 0);
    /* The JVM believes no limit below /sys/fs/cgroup where mountinfo has no cgroup2 there. It is this
     * namespace's own, and nothing of it can be reached below the mask, on which the views go. */
    if ((mount("cgroup", STAGE "sys/fs/cgroup", "cgroup2", MS_RDONLY | LOCKED_DOWN, NULL) ||
         bind_over("/mask/dir", STAGE "sys/fs/cgroup", 0, false)) &&
        errno != ENOENT)
        return fail_at(fail, STEP_SYS, 1);
    if (stage_dev(&setup, fail))
        return -1;
    return stage_kernel_files(&setup, cursor, end, fail);
}

static const char *const KERNEL_MOUNTS[] = {"proc", "sys", "dev"};

int setup_open_mounts(struct kernel_mounts *mounts, struct failure *fail) {
    for (uint32_t i = 0; i < 3; i++) {
        char path[32];
        strcpy(stpcpy(path, STAGE), KERNEL_MOUNTS[i]);
        /* Without OPEN_TREE_CLONE: the mount itself, wherever it is moved later. */
        mounts->fd[i] = sys_open_tree(AT_FDCWD, path, 0);
        if (mounts->fd[i] < 0)
            return fail_at(fail, STEP_STAGE, i + 1);
    }
    return 0;
}

/* What is counted by user; commands inherit it and cannot raise it. Where the host lets the node have
 * less, there is less. */
int setup_user_limits(const struct inbox *in, struct failure *fail) {
    struct setup setup;
    memcpy(&setup, in->payload, sizeof setup);
    const struct {
        enum __rlimit_resource resource;
        rlim_t most;
    } limits[] = {{RLIMIT_SIGPENDING, setup.pending_signals},
                  {RLIMIT_MEMLOCK, (rlim_t)setup.memlock_kb * 1024},
                  {RLIMIT_MSGQUEUE, (rlim_t)setup.msgqueue_kb * 1024}};
    for (uint32_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        struct rlimit limit;
        if (getrlimit(limits[i].resource, &limit))
            return fail_at(fail, STEP_RLIMIT, 2 + i);
        if (limit.rlim_max > limits[i].most)
            limit.rlim_max = limits[i].most;
        limit.rlim_cur = limit.rlim_max;
        if (setrlimit(limits[i].resource, &limit))
            return fail_at(fail, STEP_RLIMIT, 2 + i);
    }
    return 0;
}

int setup_lock(struct failure *fail) {
    if (sys_drop_bounding(node.caps))
        return fail_at(fail, STEP_CAPABILITIES, 0);
    if (prctl(PR_SET_NO_NEW_PRIVS, 1UL, 0UL, 0UL, 0UL))
        return fail_at(fail, STEP_SECCOMP, 0);
    if (sys_load_filter(node.filter, node.filter_len))
        return fail_at(fail, STEP_SECCOMP, 1);
    madvise(node.filter, sizeof node.filter, MADV_DONTNEED);
    return 0;
}

int setup_keep_mounts(struct inbox *in, const uint8_t *cursor, struct host_mounts *out,
                      struct failure *fail) {
    const uint8_t *end = in->payload + in->head.len;
    size_t used = 0;
    errno = EBADMSG;
    if (out->count || in->fd_count - 1 > HOST_MOUNTS_MAX)
        return fail_at(fail, STEP_MESSAGE, 9);
    for (int i = 1; i < in->fd_count; i++) {
        const char *target = wire_string(&cursor, end);
        size_t size = target ? strlen(target) + 1 : 0;
        errno = EBADMSG;
        if (!target || size > sizeof out->targets - used)
            return fail_at(fail, STEP_MESSAGE, 10);
        out->target[i - 1] = memcpy(out->targets + used, target, size);
        used += size;
    }
    for (int i = 1; i < in->fd_count; i++) {
        out->fd[out->count++] = in->fds[i];
        in->fds[i] = -1;
    }
    return 0;
}

/* Where the host's mounts go in a root that is attached nowhere yet; 0, or -1 and none is open. */
static int open_targets(int overlay_fd, const struct host_mounts *host, int *targets,
                        struct failure *fail) {
    for (int i = 0; i < host->count; i++) {
        targets[i] = sys_open_beneath(overlay_fd, host->target[i], O_PATH | O_NOFOLLOW);
        if (targets[i] < 0) {
            fail_at(fail, STEP_MOUNT_TARGET, (uint32_t)i);
            while (i--)
                close(targets[i]);
            return -1;
        }
    }
    return 0;
}

/*
 * Put the overlay in the place of the root, with the kernel's mounts on it, and the host's.
 *
 * The targets are opened in the overlay before it is attached, and must be directories: an image in
 * which /proc is a symlink is refused. pivot_root(".", ".") stacks the old root on the new one
 * (pivot_root(2), NOTES), so detaching "." drops the old root and what is below it.
 */
int setup_swap_root(int overlay_fd, const struct kernel_mounts *mounts,
                    const struct host_mounts *host, struct failure *fail) {
    int targets[3], host_targets[HOST_MOUNTS_MAX];
    if (open_targets(overlay_fd, host, host_targets, fail))
        return -1;
    for (uint32_t i = 0; i < 3; i++) {
        targets[i] =
            openat(overlay_fd, KERNEL_MOUNTS[i], O_PATH | O_NOFOLLOW | O_DIRECTORY | O_CLOEXEC);
        if (targets[i] < 0 && errno == ENOENT && !mkdirat(overlay_fd, KERNEL_MOUNTS[i], 0755))
            targets[i] =
                openat(overlay_fd, KERNEL_MOUNTS[i], O_PATH | O_NOFOLLOW | O_DIRECTORY | O_CLOEXEC);
        if (targets[i] < 0) {
            fail_at(fail, STEP_ROOT_TARGET, i);
            while (i--)
                close(targets[i]);
            for (int j = 0; j < host->count; j++)
                close(host_targets[j]);
            return -1;
        }
    }
    int r = 0;
    if (sys_move_mount(overlay_fd, AT_FDCWD, "/"))
        r = fail_at(fail, STEP_ROOT_ATTACH, 0);
    for (uint32_t i = 0; i < 3; i++) {
        if (!r && sys_move_mount(mounts->fd[i], targets[i], ""))
            r = fail_at(fail, STEP_ROOT_MOVE, i);
        close(targets[i]);
    }
    for (int i = 0; i < host->count; i++) {
        if (!r && sys_move_mount(host->fd[i], host_targets[i], ""))
            r = fail_at(fail, STEP_MOUNT_MOVE, (uint32_t)i);
        close(host_targets[i]);
    }
    if (!r && (fchdir(overlay_fd) || sys_pivot_root(".", ".")))
        r = fail_at(fail, STEP_ROOT_PIVOT, 0);
    if (!r && (sys_umount_detach(".") || chdir("/")))
        r = fail_at(fail, STEP_ROOT_DETACH, 0);
    return r;
}

/* Bit i: a view lies over path i of M_VIEWS. What else may be mounted there stays. */
static uint32_t views_bound;

/*
 * Bind each mount over its path. What an earlier server's files show is an error by now, so theirs
 * go first; in between a reader sees what is below them: the kernel's own file, or a mask.
 *
 * Nothing here asks a file system that may not answer: neither end of a path is opened, and mounts
 * come ready by descriptor. By working directory, as umount2(2) takes no descriptor.
 */
int setup_views(const struct inbox *in, const struct kernel_mounts *mounts, struct failure *fail) {
    const uint8_t *cursor = in->payload, *end = in->payload + in->head.len;
    int r = 0;
    for (int i = 0; i < in->fd_count && !r; i++) {
        const char *path = wire_string(&cursor, end);
        bool proc = path && !strncmp(path, "proc/", 5), sys = path && !strncmp(path, "sys/", 4);
        errno = EBADMSG;
        if ((!proc && !sys) || fchdir(mounts->fd[proc ? 0 : 1])) {
            r = fail_at(fail, STEP_VIEW, (uint32_t)i);
            break;
        }
        path += proc ? 5 : 4;
        uint32_t bit = UINT32_C(1) << i;
        if (views_bound & bit && sys_umount_detach(path)) {
            r = fail_at(fail, STEP_VIEW, (uint32_t)i);
            break;
        }
        views_bound &= ~bit;
        if (!sys_move_mount(in->fds[i], AT_FDCWD, path))
            views_bound |= bit;
        else if (errno != ENOENT)
            r = fail_at(fail, STEP_VIEW, (uint32_t)i);
    }
    if (chdir("/") && !r)
        r = fail_at(fail, STEP_VIEW, MSG_FDS_MAX);
    return r;
}
