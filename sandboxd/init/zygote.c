/*
 * zygote.c - the only process that clones sandboxes.
 *
 * Started by hostd as the host's root, so that its memory belongs to the initial user namespace
 * (exec decides that): of a process that is not dumpable, /proc/PID is then owned by the host's root,
 * whom no sandbox can name. If it were executed inside the node namespace, those files would belong
 * to that namespace's id 0, which is the sandboxes' root.
 *
 * Steps, in this order:
 *   0. a session of its own: no terminal, so nobody's Ctrl-C ends every sandbox;
 *   1. join the node's user namespace, then its mount namespace (needs the former's capabilities);
 *   2. become the node's own id, keeping capabilities (SECBIT_NO_SETUID_FIXUP);
 *   3. a mount namespace of its own with next to nothing in it: every sandbox starts as a copy of
 *      this one, so neither images nor host paths may be in it, and its size is the cost of a clone;
 *   4. answer Z_READY; then one Z_CLONE after the other until the launcher goes away.
 */
#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/mount.h>
#include <linux/sched.h>
#include <linux/securebits.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

struct node node;

#define SANDBOX_NAMESPACES                                                                         \
    (CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS)

static int join(int userns_fd, int mntns_fd) {
    if (setns(userns_fd, CLONE_NEWUSER) || setns(mntns_fd, CLONE_NEWNS))
        return -1;
    /* A net namespace too: its own sysfs (below) is that of its own net namespace. */
    return unshare(CLONE_NEWNS | CLONE_NEWNET);
}

static int become_node_id(void) {
    if (prctl(PR_SET_SECUREBITS, (unsigned long)SECBIT_NO_SETUID_FIXUP, 0UL, 0UL, 0UL))
        return -1;
    if ((!node.one_id && setgroups(0, NULL)) || setresgid(node.id, node.id, node.id) ||
        setresuid(node.id, node.id, node.id))
        return -1;
    /* Changing ids made it undumpable; the zygote writes the id maps of its children, whose /proc
     * files are its own only while they are dumpable. PID 1 gives that up before anything else. */
    return prctl(PR_SET_DUMPABLE, 1UL, 0UL, 0UL, 0UL);
}

static int touch(const char *path, mode_t mode) {
    int fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, mode);
    return fd < 0 ? -1 : close(fd);
}

static int bind_from(int tree_fd, const char *target) {
    if (tree_fd < 0)
        return -1;
    int r = sys_move_mount(tree_fd, AT_FDCWD, target);
    int err = errno;
    close(tree_fd);
    errno = err;
    return r;
}

/* Bind a path over itself read-only: PID 1 clones these mounts over what it masks. */
static int seal(const char *path) {
    int fd = sys_open_tree(AT_FDCWD, path, OPEN_TREE_CLONE);
    if (fd < 0 || sys_mount_readonly(fd))
        return -1;
    return bind_from(fd, path);
}

/* /proc is the host's (the zygote writes /proc/PID/uid_map, and a sandbox may mount its own only
 * where a whole one is in sight); recursive because what lies below it is locked to it here. */
static int build_root(void) {
    static const char *const devices[] = {"null", "zero", "full", "random", "urandom", "tty"};
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL))
        return -1;
    int context = (int)syscall(SYS_fsopen, "tmpfs", FSOPEN_CLOEXEC);
    if (context < 0 || syscall(SYS_fsconfig, context, FSCONFIG_SET_STRING, "mode", "0755", 0) ||
        syscall(SYS_fsconfig, context, FSCONFIG_SET_STRING, "size", "65536", 0) ||
        syscall(SYS_fsconfig, context, FSCONFIG_CMD_CREATE, NULL, NULL, 0))
        return -1;
    int root = (int)syscall(SYS_fsmount, context, FSMOUNT_CLOEXEC, 0);
    close(context);
    if (root < 0)
        return -1;
    int host_proc = sys_open_tree(AT_FDCWD, "/proc", OPEN_TREE_CLONE | AT_RECURSIVE);
    int host_devices[6];
    for (size_t i = 0; i < 6; i++) {
        char path[32] = "/dev/";
        host_devices[i] = sys_open_tree(AT_FDCWD, strcat(path, devices[i]), OPEN_TREE_CLONE);
        /* The inodes are the host's: on Debian's Linux 6.1 anybody may give them attributes
         * security.*, kernel memory that nobody is charged for. What is read and written is the
         * device's, which no read-only mount is in the way of. */
        if (host_devices[i] < 0 || sys_mount_sealed(host_devices[i]))
            return -1;
    }
    if (sys_move_mount(root, AT_FDCWD, "/") || fchdir(root))
        return -1;
    if (mkdir("proc", 0755) || mkdir("sys", 0755) || mkdir("dev", 0755) || mkdir("stage", 0755) ||
        mkdir("mask", 0755) || mkdir("mask/dir", 0) || touch("mask/file", 0))
        return -1;
    for (size_t i = 0; i < 6; i++) {
        char path[32] = "dev/";
        if (touch(strcat(path, devices[i]), 0600) || bind_from(host_devices[i], path))
            return -1;
    }
    if (bind_from(host_proc, "proc") ||
        mount("sysfs", "sys", "sysfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL))
        return -1;
    if (sys_pivot_root(".", ".") || sys_umount_detach(".") || chdir("/"))
        return -1;
    close(root);
    return seal("/mask/file") || seal("/mask/dir") ? -1 : 0;
}

static int write_maps(int pid) {
    static const char *const names[] = {"/uid_map", "/gid_map"};
    char map[96] = "0 0 ", path[64];
    char *at = text_number(map + 4, node.map_count);
    if (node.map_last) {
        at = text_number(stpcpy(at, "\n"), node.map_last);
        strcpy(text_number(stpcpy(at, " "), node.map_last), " 1\n");
    }
    for (size_t i = 0; i < 2; i++) {
        memcpy(path, "/proc/", 6);
        strcpy(text_number(path + 6, (unsigned long)pid), names[i]);
        if (sys_write_file(AT_FDCWD, path, map))
            return -1;
    }
    return 0;
}

static void clone_sandbox(int socket_fd, struct inbox *in) {
    struct zygote_cloned answer = {0, 0};
    int pidfd = -1;
    if (in->fd_count != (node.no_cgroups ? 1 : 2)) {
        answer.err = EBADMSG;
    } else {
        int cgroup_fd = node.no_cgroups ? -1 : in->fds[1];
        int pid = sys_clone3_child(SANDBOX_NAMESPACES, cgroup_fd, &pidfd);
        if (pid == 0) {
            int control = in->fds[0];
            prctl(PR_SET_NAME, "init");
            pid1_main(control);
        }
        if (pid < 0) {
            answer.err = errno;
        } else {
            answer.pid = pid;
            if (write_maps(pid)) {
                answer.err = errno;
                kill(pid, SIGKILL);
            }
        }
    }
    wire_close_fds(in);
    wire_send(socket_fd, Z_CLONED, in->head.id, &answer, sizeof answer, &pidfd, answer.err ? 0 : 1,
              0);
    if (pidfd >= 0)
        close(pidfd);
}

int zygote_main(int socket_fd, int userns_fd, int mntns_fd) {
    static struct inbox in;
    struct zygote_init init;
    struct failure fail = {0, 0, 0, 0};
    prctl(PR_SET_NAME, "sandbox_init"); /* executed from a memfd, it has a number for a name */
    if (wire_receive(socket_fd, &in, 0) != 1 || in.head.type != Z_INIT || in.head.len < sizeof init)
        return 2;
    memcpy(&init, in.payload, sizeof init);
    if (init.version != PROTOCOL_VERSION || init.filter_len > sizeof node.filter ||
        in.head.len != sizeof init + init.filter_len)
        return 2;
    node.id = init.id;
    node.map_count = init.map_count;
    node.map_last = init.map_last;
    node.no_cgroups = init.no_cgroups != 0;
    node.one_id = init.map_count == 1;
    node.caps = init.caps;
    node.token[0] = init.token[0];
    node.token[1] = init.token[1];
    node.filter_len = init.filter_len;
    memcpy(node.filter, in.payload + sizeof init, init.filter_len);
    /* The token is where user_become() wipes it, and nowhere else. */
    explicit_bzero(&init, sizeof init);
    explicit_bzero(in.payload, in.head.len);

    setsid();
    /* Children are reaped by the kernel; whoever wants to know holds a pidfd. */
    signal(SIGCHLD, SIG_IGN);
    /* hostd says when the node ends. Slurm sends what it sends to every process of a job, and the
     * daemon has answers to give before. Commands begin with the defaults (exec.c). */
    static const int foreign[] = {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
    for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++)
        signal(foreign[i], SIG_IGN);
    int step = join(userns_fd, mntns_fd) ? 1 : become_node_id() ? 2 : build_root() ? 3 : 0;
    if (step) {
        fail_at(&fail, STEP_NONE, (uint32_t)step);
        wire_send(socket_fd, R_FAILED, in.head.id, &fail, sizeof fail, NULL, 0, 0);
        return 3;
    }
    close(userns_fd);
    close(mntns_fd);
    if (wire_send(socket_fd, Z_READY, in.head.id, NULL, 0, NULL, 0, 0))
        return 3;
    for (;;) {
        int got = wire_receive(socket_fd, &in, 0);
        if (got == 0)
            return 0;
        if (got < 0 && errno != EBADMSG)
            return 4;
        /* One that was cut off has no fds left, and is answered with EBADMSG. */
        if (got < 0 || in.head.type == Z_CLONE)
            clone_sandbox(socket_fd, &in);
        else
            wire_close_fds(&in);
    }
}
