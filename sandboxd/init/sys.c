/*
 * sys.c - system calls without a libc wrapper, and those that carry the token.
 *
 * PID 1 runs under the filter that every program of its sandbox inherits. The filter lets clone3,
 * move_mount, pivot_root, umount2 and sethostname through only if the registers that these calls do
 * not use hold the node's token; seccomp(2) sees all six argument registers of every call. The token
 * lives in the memory of PID 1, which is not dumpable, and of its children until they become the
 * user.
 */
#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define OPENAT2_TRIES 4096

#ifndef MNT_DETACH
#define MNT_DETACH 2
#endif

/* Not syscall(2): its last argument goes over the stack, and what lies there is still in the memory
 * of a child that belongs to the sandbox. */
static inline __attribute__((always_inline)) long raw_syscall(long number, long a, long b, long c,
                                                              long d, long e, long f) {
#if defined(__x86_64__)
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
#elif defined(__aarch64__)
    register long x8 __asm__("x8") = number;
    register long result __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e;
    register long x5 __asm__("x5") = f;
    __asm__ volatile("svc 0"
                     : "+r"(result)
                     : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5)
                     : "memory");
#else
#error "the token's calls are written for x86_64 and aarch64"
#endif
    if (result < 0 && result > -4096) {
        errno = (int)-result;
        return -1;
    }
    return result;
}

static long with_token(long number, long a, long b, long c, long d) {
    return raw_syscall(number, a, b, c, d, (long)node.token[0], (long)node.token[1]);
}

/* Without CLONE_VM: a fork. pidfd may be NULL, cgroup_fd -1. Returns as fork(2). */
int sys_clone3_child(uint64_t flags, int cgroup_fd, int *pidfd) {
    int32_t fd = -1;
    struct clone_args args = {.flags = flags, .exit_signal = SIGCHLD};
    if (cgroup_fd >= 0) {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = (unsigned)cgroup_fd;
    }
    if (pidfd) {
        args.flags |= CLONE_PIDFD;
        args.pidfd = (uint64_t)(uintptr_t)&fd;
    }
    long pid = with_token(SYS_clone3, (long)&args, (long)sizeof args, 0, 0);
    if (pidfd)
        *pidfd = fd;
    return (int)pid;
}

int sys_open_tree(int dir_fd, const char *path, unsigned int flags) {
    return (int)syscall(SYS_open_tree, dir_fd, path, flags | OPEN_TREE_CLOEXEC);
}

/* to_path "" means to_fd itself. Five arguments: only the sixth register is free. */
int sys_move_mount(int from_fd, int to_fd, const char *to_path) {
    unsigned long flags = MOVE_MOUNT_F_EMPTY_PATH;
    if (!*to_path)
        flags |= MOVE_MOUNT_T_EMPTY_PATH;
    return (int)raw_syscall(SYS_move_mount, from_fd, (long)"", to_fd, (long)to_path, (long)flags,
                            (long)node.token[1]);
}

int sys_pivot_root(const char *new_root, const char *old_root) {
    return (int)with_token(SYS_pivot_root, (long)new_root, (long)old_root, 0, 0);
}

int sys_umount_detach(const char *path) {
    return (int)with_token(SYS_umount2, (long)path, MNT_DETACH, 0, 0);
}

int sys_sethostname(const char *name) {
    return (int)with_token(SYS_sethostname, (long)name, (long)strlen(name), 0, 0);
}

int sys_set_mark(const struct rlimit *mark) {
    return (int)with_token(SYS_prlimit64, 0, RLIMIT_LOCKS, (long)mark, 0);
}

static int mount_add(int mount_fd, uint64_t attributes) {
    struct mount_attr attr = {.attr_set = attributes};
    return (int)syscall(SYS_mount_setattr, mount_fd, "", AT_EMPTY_PATH, &attr, sizeof attr);
}

int sys_mount_sealed(int mount_fd) {
    return mount_add(mount_fd, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC);
}

int sys_mount_readonly(int mount_fd) {
    return mount_add(mount_fd,
                     MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC);
}

/* Resolve as if chrooted to root_fd; /proc's magic links lead nowhere. */
int sys_openat_root(int root_fd, const char *path, int flags, mode_t mode) {
    struct open_how how = {.flags = (uint64_t)(unsigned int)(flags | O_CLOEXEC),
                           .mode = (flags & (O_CREAT | O_TMPFILE)) ? mode : 0,
                           .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS};
    int fd, tries = 0;
    /* openat2(2): a ".." gives EAGAIN when anything on the host was renamed or mounted meanwhile. */
    do
        fd = (int)syscall(SYS_openat2, root_fd, path, &how, sizeof how);
    while (fd < 0 && errno == EAGAIN && ++tries < OPENAT2_TRIES);
    return fd;
}

/* Below dir_fd, on its mount, over no symlink. */
int sys_open_beneath(int dir_fd, const char *path, int flags) {
    struct open_how how = {.flags = (uint64_t)(unsigned int)(flags | O_CLOEXEC),
                           .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_XDEV};
    return (int)syscall(SYS_openat2, dir_fd, path, &how, sizeof how);
}

int sys_close_from(int first) {
    return (int)syscall(SYS_close_range, (unsigned)first, ~0U, 0U);
}

int sys_capset(uint64_t effective, uint64_t permitted) {
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[2] = {
        {.effective = (uint32_t)effective, .permitted = (uint32_t)permitted},
        {.effective = (uint32_t)(effective >> 32), .permitted = (uint32_t)(permitted >> 32)}};
    return (int)syscall(SYS_capset, &head, data);
}

int sys_drop_bounding(uint64_t keep) {
    for (unsigned long cap = 0; cap < 64; cap++) {
        if (keep & (1ULL << cap))
            continue;
        if (prctl(PR_CAPBSET_DROP, cap, 0UL, 0UL, 0UL)) {
            if (errno == EINVAL) /* the first number this kernel does not know */
                break;
            return -1;
        }
    }
    return 0;
}

int sys_load_filter(const uint8_t *filter, uint32_t len) {
    struct sock_fprog program = {.len = (unsigned short)(len / sizeof(struct sock_filter)),
                                 .filter = (struct sock_filter *)(uintptr_t)filter};
    /* SPEC_ALLOW: without it kernels before 5.16 turn on SSBD, which slows Python by 40-60 %. */
    return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW,
                        &program);
}

int sys_write_file(int dir_fd, const char *path, const char *value) {
    int fd = openat(dir_fd, path, O_WRONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return -1;
    size_t len = strlen(value);
    ssize_t put = write(fd, value, len);
    int err = errno;
    close(fd);
    errno = err;
    return put == (ssize_t)len ? 0 : -1;
}

char *text_number(char *at, unsigned long n) {
    char digits[20];
    size_t len = 0;
    do
        digits[len++] = (char)('0' + n % 10);
    while (n /= 10);
    while (len)
        *at++ = digits[--len];
    *at = 0;
    return at;
}

int fail_at(struct failure *fail, enum step step, uint32_t index) {
    fail->step = step;
    fail->index = index;
    fail->err = errno;
    return -1;
}
