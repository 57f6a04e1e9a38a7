/*
 * probe - tries one thing after the other and prints what the kernel said.
 *
 *   probe WORD...     WORD is OP or OP:ARG; one line each: "WORD RESULT", where RESULT is the name of
 *                     an errno, "signal-N", "timeout", or "ok N" with what the call returned
 *
 * For tests/security, inside a sandbox and, as the control, on the host: so each try is harmless
 * where it is allowed. Arguments are invalid on purpose ("reached the kernel" is then EINVAL, EFAULT
 * or EBADF), files are opened for writing and never written. Each try has a process of its own, and
 * PARENT (the process that runs the tries) is what is done to a target that may be touched.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <dirent.h>
#include <mqueue.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <linux/capability.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <netinet/in.h>
#include <arpa/inet.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/timex.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>

#ifndef SYS_open_tree_attr
#define SYS_open_tree_attr 467
#endif
#ifndef SYS_listmount
#define SYS_statmount 457
#define SYS_listmount 458
#endif
#ifndef SYS_memfd_secret
#define SYS_memfd_secret 447
#endif
#ifndef SYS_cachestat
#define SYS_cachestat 451
#endif
#ifndef SYS_process_mrelease
#define SYS_process_mrelease 448
#endif
#ifndef SYS_quotactl_fd
#define SYS_quotactl_fd 443
#endif

typedef long (*op_fn)(const char *arg);

/* A call by number, whose six arguments are all the same nonsense or given one by one. */
#define RAW(name, ...)                                                                             \
    static long op_##name(const char *arg) {                                                       \
        (void)arg;                                                                                 \
        return syscall(__VA_ARGS__);                                                               \
    }

static const char *EMPTY = "";

/* --- system calls with invalid arguments ----------------------------------------------------- */

RAW(mount, SYS_mount, 0L, 0L, 0L, 0L, 0L)
RAW(umount2, SYS_umount2, EMPTY, 0x7fff0000L)
RAW(pivot_root, SYS_pivot_root, EMPTY, EMPTY)
RAW(fsopen, SYS_fsopen, "no-such-file-system", 0L)
RAW(fsconfig, SYS_fsconfig, -1L, 99L, 0L, 0L, 0L)
RAW(fsmount, SYS_fsmount, -1L, ~0UL, 0L)
RAW(fspick, SYS_fspick, -1L, EMPTY, ~0UL)
RAW(open_tree, SYS_open_tree, -1L, EMPTY, ~0UL)
RAW(open_tree_attr, SYS_open_tree_attr, -1L, EMPTY, ~0UL, 0L, 0L)
RAW(move_mount, SYS_move_mount, -1L, EMPTY, -1L, EMPTY, ~0UL)
RAW(mount_setattr, SYS_mount_setattr, -1L, EMPTY, ~0UL, 0L, 0L)
RAW(listmount, SYS_listmount, 0L, 0L, 0L, ~0UL)
RAW(statmount, SYS_statmount, 0L, 0L, 0L, ~0UL)
RAW(setns, SYS_setns, -1L, 0L)
RAW(bpf, SYS_bpf, 9999L, 0L, 0L)
RAW(perf_event_open, SYS_perf_event_open, 0L, 0L, 0L, 0L, 0L)
RAW(userfaultfd, SYS_userfaultfd, ~0UL)
RAW(io_uring_setup, SYS_io_uring_setup, 0L, 0L)
RAW(io_uring_enter, SYS_io_uring_enter, -1L, 0L, 0L, 0L, 0L, 0L)
RAW(io_uring_register, SYS_io_uring_register, -1L, 0L, 0L, 0L)
RAW(add_key, SYS_add_key, 0L, 0L, 0L, 0L, 0L)
RAW(request_key, SYS_request_key, 0L, 0L, 0L, 0L)
RAW(keyctl, SYS_keyctl, 9999L, 0L, 0L, 0L, 0L)
RAW(kexec_load, SYS_kexec_load, 0L, 0L, 0L, ~0UL)
RAW(kexec_file_load, SYS_kexec_file_load, -1L, -1L, 0L, 0L, ~0UL)
RAW(init_module, SYS_init_module, 0L, 0L, 0L)
RAW(finit_module, SYS_finit_module, -1L, 0L, ~0UL)
RAW(delete_module, SYS_delete_module, 0L, 0L)
RAW(reboot, SYS_reboot, 0L, 0L, 0L, 0L)
RAW(swapon, SYS_swapon, 0L, ~0UL)
RAW(swapoff, SYS_swapoff, 0L)
RAW(acct, SYS_acct, "/no/such/file")
RAW(quotactl, SYS_quotactl, ~0UL, 0L, 0L, 0L)
RAW(quotactl_fd, SYS_quotactl_fd, -1L, ~0UL, 0L, 0L)
RAW(syslog, SYS_syslog, 9999L, 0L, 0L)
RAW(open_by_handle_at, SYS_open_by_handle_at, -1L, 0L, 0L)
RAW(clock_settime, SYS_clock_settime, 9999L, 0L)
RAW(clock_adjtime, SYS_clock_adjtime, 9999L, 0L)
RAW(adjtimex, SYS_adjtimex, 0L)
RAW(sethostname, SYS_sethostname, 0L, -1L)
RAW(setdomainname, SYS_setdomainname, 0L, -1L)
RAW(fanotify_init, SYS_fanotify_init, ~0UL, 0L)
RAW(fanotify_mark, SYS_fanotify_mark, -1L, ~0UL, 0L, -1L, 0L)
RAW(migrate_pages, SYS_migrate_pages, 0L, ~0UL, 0L, 0L)
RAW(move_pages, SYS_move_pages, 0L, 1L, 0L, 0L, 0L, ~0UL)
RAW(io_setup, SYS_io_setup, 0L, 0L)
RAW(memfd_secret, SYS_memfd_secret, ~0UL)
RAW(cachestat, SYS_cachestat, -1L, 0L, 0L, ~0UL)
#ifdef __x86_64__
RAW(modify_ldt, SYS_modify_ldt, 0L, 0L, 0L)
RAW(iopl, SYS_iopl, 99L)
RAW(ioperm, SYS_ioperm, ~0UL, 1L, 1L)
RAW(x32_getpid, 0x40000000L | SYS_getpid)
#endif

static long op_settimeofday(const char *arg) {
    (void)arg;
    long invalid[2] = {0, 2000000};
    return syscall(SYS_settimeofday, invalid, 0L);
}

static long op_vhangup(const char *arg) {
    (void)arg;
    setsid(); /* no terminal any more that it could hang up */
    return syscall(SYS_vhangup);
}

/* getpid through the i386 entry point: number 20 there, writev here. */
static long op_int80_getpid(const char *arg) {
    (void)arg;
#ifdef __x86_64__
    long result;
    __asm__ volatile("int $0x80" : "=a"(result) : "a"(20L), "b"(0L), "c"(0L), "d"(0L) : "memory");
    if ((int)result < 0) {
        errno = -(int)result;
        return -1;
    }
    return (int)result;
#else
    errno = ENOSYS;
    return -1;
#endif
}

static long op_unshare(const char *arg) {
    return syscall(SYS_unshare, strtoul(arg, NULL, 16));
}

static long op_clone(const char *arg) {
    long pid = syscall(SYS_clone, strtoul(arg, NULL, 16) | SIGCHLD, 0L, 0L, 0L, 0L);
    if (pid == 0)
        _exit(0);
    if (pid > 0)
        waitpid((pid_t)pid, NULL, 0);
    return pid > 0 ? 0 : pid;
}

static long clone3_with(unsigned long low, unsigned long high) {
    struct clone_args args = {.exit_signal = SIGCHLD};
    long pid = syscall(SYS_clone3, &args, sizeof args, 0L, 0L, low, high);
    if (pid == 0)
        _exit(0);
    if (pid > 0)
        waitpid((pid_t)pid, NULL, 0);
    return pid > 0 ? 0 : pid;
}

static long op_clone3(const char *arg) {
    (void)arg;
    return clone3_with(0, 0);
}

/* The filter lets PID 1 through where these registers hold 128 random bits: ARG guesses. */
static long op_guess_token(const char *arg) {
    long guesses = strtol(arg, NULL, 10);
    for (long i = 0; i < guesses; i++) {
        unsigned long guess[2];
        if (getentropy(guess, sizeof guess))
            return -1;
        if (i < 64)
            guess[0] = guess[1] = 1UL << i;
        if (clone3_with(guess[0], guess[1]) == 0)
            return 1;
        if (errno != ENOSYS)
            return -1;
        if (syscall(SYS_pivot_root, EMPTY, EMPTY, 0L, 0L, guess[0], guess[1]) == 0 ||
            errno != EPERM)
            return -1;
    }
    errno = ENOSYS;
    return -1;
}

static long op_personality(const char *arg) {
    return personality(strtoul(arg, NULL, 16));
}

static long op_socket(const char *arg) {
    int family = -1, type = -1, protocol = -1;
    sscanf(arg, "%d,%d,%d", &family, &type, &protocol);
    return socket(family, type, protocol);
}

static long op_socketpair(const char *arg) {
    int family = -1, type = -1, protocol = -1, pair[2];
    sscanf(arg, "%d,%d,%d", &family, &type, &protocol);
    return socketpair(family, type, protocol, pair);
}

static int open_pty(void) {
    int master = open("/dev/ptmx", O_RDWR | O_NOCTTY);
    int unlock = 0;
    if (master < 0 || ioctl(master, TIOCSPTLCK, &unlock))
        return -1;
    int slave = ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY);
    return slave;
}

/* An ioctl on a terminal of our own, command in hex, with an argument that is not there. */
static long op_tty_ioctl(const char *arg) {
    int terminal = open_pty();
    if (terminal < 0)
        return -1;
    return syscall(SYS_ioctl, terminal, strtoul(arg, NULL, 16), 0L);
}

/* A command of fcntl on a pipe of our own, with one page as its argument. */
static long op_pipe_fcntl(const char *arg) {
    int ends[2];
    if (pipe(ends))
        return -1;
    return syscall(SYS_fcntl, ends[0], strtoul(arg, NULL, 0), 4096L);
}

static long op_tiocsti(const char *arg) {
    setsid();
    int terminal = open_pty();
    if (terminal < 0 || ioctl(terminal, TIOCSCTTY, 0))
        return -1;
    return syscall(SYS_ioctl, terminal, strtoul(arg, NULL, 16) | 0x5412UL, "x");
}

/* --- files ----------------------------------------------------------------------------------- */

static long op_open_r(const char *arg) {
    return open(arg, O_RDONLY | O_NONBLOCK | O_NOCTTY);
}

static long op_open_w(const char *arg) {
    return open(arg, O_WRONLY | O_NONBLOCK | O_NOCTTY);
}

static long op_open_rw(const char *arg) {
    return open(arg, O_RDWR | O_NONBLOCK | O_NOCTTY);
}

static long op_create(const char *arg) {
    int fd = open(arg, O_WRONLY | O_CREAT | O_EXCL, 0600);
    if (fd >= 0)
        unlink(arg);
    return fd;
}

/* Bytes that can be read, up to a page. */
static long op_read(const char *arg) {
    char page[4096];
    int fd = open(arg, O_RDONLY | O_NONBLOCK | O_NOCTTY);
    return fd < 0 ? -1 : read(fd, page, sizeof page);
}

static long op_list(const char *arg) {
    DIR *directory = opendir(arg);
    if (!directory)
        return -1;
    long count = 0;
    errno = 0;
    for (struct dirent *entry; (entry = readdir(directory));)
        count += strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..");
    return errno ? -1 : count;
}

static long op_readlink(const char *arg) {
    char target[4096];
    return readlink(arg, target, sizeof target);
}

static long op_chmod(const char *arg) {
    struct stat st;
    if (stat(arg, &st))
        return -1;
    return chmod(arg, st.st_mode & 07777);
}

static long op_chown(const char *arg) {
    return chown(arg, 0, 0);
}

static long op_unlink(const char *arg) {
    return unlink(arg);
}

static long op_rmdir(const char *arg) {
    return rmdir(arg);
}

static long op_rename(const char *arg) {
    char target[4096];
    snprintf(target, sizeof target, "%s-moved", arg);
    if (rename(arg, target))
        return -1;
    return rename(target, arg);
}

static long op_mkdir(const char *arg) {
    if (mkdir(arg, 0700))
        return -1;
    return rmdir(arg);
}

static long op_truncate(const char *arg) {
    struct stat st;
    return stat(arg, &st) ? -1 : truncate(arg, st.st_size);
}

static long op_setxattr(const char *arg) {
    char path[4096];
    const char *comma = strchr(arg, ',');
    memcpy(path, arg, (size_t)(comma - arg));
    path[comma - arg] = 0;
    return syscall(SYS_setxattr, path, comma + 1, "y", 1L, 0L);
}

/* A valid one: the kernel looks at its form before it asks who is there. */
static long op_file_capability(const char *arg) {
    struct vfs_cap_data data = {.magic_etc = VFS_CAP_REVISION_2,
                                .data = {{.permitted = 1U << CAP_NET_BIND_SERVICE}}};
    return syscall(SYS_setxattr, arg, "security.capability", &data, sizeof data, 0L);
}

static long make_node(const char *arg, mode_t kind) {
    char path[4096];
    unsigned int major_number, minor_number;
    if (sscanf(arg, "%u,%u,%4000s", &major_number, &minor_number, path) != 3) {
        errno = EDOM;
        return -1;
    }
    if (mknod(path, kind | 0600, makedev(major_number, minor_number)))
        return -1;
    return unlink(path);
}

static long op_mknod_c(const char *arg) {
    return make_node(arg, S_IFCHR);
}

static long op_mknod_b(const char *arg) {
    return make_node(arg, S_IFBLK);
}

static long op_mknod_p(const char *arg) {
    return make_node(arg, S_IFIFO);
}

/* How many files below ARG can be opened for writing, processes apart; told on stderr by name. */
static long count_writable(const char *directory, int depth) {
    long count = 0;
    DIR *listing = depth < 24 ? opendir(directory) : NULL;
    for (struct dirent *entry; listing && (entry = readdir(listing));) {
        char path[4096];
        struct stat st;
        if (entry->d_name[0] == '.' || (depth == 0 && strspn(entry->d_name, "0123456789")) ||
            !strcmp(entry->d_name, "self") || !strcmp(entry->d_name, "thread-self"))
            continue;
        snprintf(path, sizeof path, "%s/%s", directory, entry->d_name);
        if (lstat(path, &st) || S_ISLNK(st.st_mode))
            continue;
        if (S_ISDIR(st.st_mode)) {
            count += count_writable(path, depth + 1);
            continue;
        }
        int fd = open(path, O_WRONLY | O_NONBLOCK | O_NOCTTY);
        if (fd < 0)
            continue;
        close(fd);
        dprintf(2, "%s\n", path);
        count++;
    }
    if (listing)
        closedir(listing);
    return count;
}

static long op_writable(const char *arg) {
    return count_writable(arg, 0);
}

/* The classic way out of a chroot: hold a directory, chroot below it, walk up from it. "ok 1" when
 * the walk ends in another root than it began in. */
static long op_chroot_walk(const char *arg) {
    struct stat before, after;
    int held = open("/", O_RDONLY | O_DIRECTORY);
    if (held < 0 || fstat(held, &before))
        return -1;
    mkdir(arg, 0700);
    if (chroot(arg) || fchdir(held))
        return -1;
    for (int i = 0; i < 64; i++)
        if (chdir(".."))
            return -1;
    if (stat(".", &after))
        return -1;
    return before.st_dev != after.st_dev || before.st_ino != after.st_ino;
}

static long op_chroot(const char *arg) {
    return chroot(arg);
}

static long op_remount(const char *arg) {
    return mount(NULL, arg, NULL, MS_REMOUNT | MS_BIND, NULL);
}

static long op_umount(const char *arg) {
    return umount2(arg, MNT_DETACH);
}

static long op_mount_proc(const char *arg) {
    return mount("proc", arg, "proc", 0, NULL);
}

static long op_mount_tmpfs(const char *arg) {
    return mount("none", arg, "tmpfs", 0, NULL);
}

static long op_bind(const char *arg) {
    return mount(arg, "/tmp", NULL, MS_BIND, NULL);
}

static long op_shared(const char *arg) {
    return mount(NULL, arg, NULL, MS_REC | MS_SHARED, NULL);
}

static long op_setns_file(const char *arg) {
    int fd = open(arg, O_RDONLY | O_CLOEXEC);
    return fd < 0 ? -1 : setns(fd, 0);
}

/* --- privileges ------------------------------------------------------------------------------ */

static long op_nice(const char *arg) {
    return setpriority(PRIO_PROCESS, 0, (int)strtol(arg, NULL, 10));
}

static long op_scheduler(const char *arg) {
    struct sched_param param = {.sched_priority = 1};
    return sched_setscheduler(0, (int)strtol(arg, NULL, 10), &param);
}

static long op_ioprio_realtime(const char *arg) {
    (void)arg;
    return syscall(SYS_ioprio_set, 1L, 0L, 1L << 13 | 4);
}

static long op_raise_limit(const char *arg) {
    struct rlimit now;
    int which = (int)strtol(arg, NULL, 10);
    if (getrlimit(which, &now))
        return -1;
    if (now.rlim_max == RLIM_INFINITY) {
        errno = ERANGE; /* nothing above it */
        return -1;
    }
    now.rlim_max++;
    return setrlimit(which, &now);
}

static long op_prctl_mm(const char *arg) {
    (void)arg;
    return prctl(PR_SET_MM, PR_SET_MM_BRK, (unsigned long)sbrk(0), 0, 0);
}

static long op_securebits(const char *arg) {
    (void)arg;
    return prctl(PR_GET_SECUREBITS, 0, 0, 0, 0);
}

static long op_no_new_privs_off(const char *arg) {
    (void)arg;
    return prctl(PR_SET_NO_NEW_PRIVS, 0UL, 0UL, 0UL, 0UL);
}

static long op_bounding_has(const char *arg) {
    return prctl(PR_CAPBSET_READ, strtoul(arg, NULL, 10), 0UL, 0UL, 0UL);
}

static long op_oom_score(const char *arg) {
    int fd = open("/proc/self/oom_score_adj", O_WRONLY);
    return fd < 0 ? -1 : write(fd, arg, strlen(arg));
}

static long op_read_filter(const char *arg) {
    pid_t child = fork();
    if (child == 0) {
        pause();
        _exit(0);
    }
    (void)arg;
    long result = ptrace(PTRACE_SEIZE, child, 0L, 0L);
    if (!result) {
        ptrace(PTRACE_INTERRUPT, child, 0L, 0L);
        waitpid(child, NULL, 0);
        result = ptrace(PTRACE_SECCOMP_GET_FILTER, child, 0L, NULL);
    }
    int err = errno;
    kill(child, SIGKILL);
    errno = err;
    return result;
}

/* --- another process: ARG is a pid, or "child" for one of our own ----------------------------- */

static pid_t own_child;

static pid_t target(const char *arg) {
    if (strcmp(arg, "child"))
        return (pid_t)strtol(arg, NULL, 10);
    own_child = fork();
    if (own_child == 0)
        for (;;)
            pause();
    return own_child;
}

static long op_prlimit_get(const char *arg) {
    struct rlimit limit;
    return prlimit(target(arg), RLIMIT_NOFILE, NULL, &limit);
}

static long op_prlimit_set(const char *arg) {
    struct rlimit limit = {64, 64};
    return prlimit(target(arg), RLIMIT_NOFILE, &limit, NULL);
}

static long op_affinity(const char *arg) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set))
        return -1;
    return sched_setaffinity(target(arg), sizeof set, &set);
}

static long op_renice(const char *arg) {
    return setpriority(PRIO_PROCESS, (id_t)target(arg), 19);
}

static long op_sched_idle(const char *arg) {
    struct sched_param param = {0};
    return sched_setscheduler(target(arg), SCHED_IDLE, &param);
}

static long op_sched_setattr(const char *arg) {
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
    } attr = {.size = 48, .policy = SCHED_BATCH, .nice = 19};
    return syscall(SYS_sched_setattr, target(arg), &attr, 0L);
}

static long op_ioprio(const char *arg) {
    return syscall(SYS_ioprio_set, 1L, target(arg), 3L << 13);
}

static long op_ptrace_attach(const char *arg) {
    return ptrace(PTRACE_ATTACH, target(arg), 0L, 0L);
}

static long op_ptrace_seize(const char *arg) {
    return ptrace(PTRACE_SEIZE, target(arg), 0L, 0L);
}

static long remote_memory(const char *arg, long number) {
    static char own[8];
    struct iovec local = {own, sizeof own}, remote = {own, sizeof own};
    return syscall(number, target(arg), &local, 1L, &remote, 1L, 0L);
}

static long op_vm_readv(const char *arg) {
    return remote_memory(arg, SYS_process_vm_readv);
}

static long op_vm_writev(const char *arg) {
    return remote_memory(arg, SYS_process_vm_writev);
}

static long op_pidfd_getfd(const char *arg) {
    long pidfd = syscall(SYS_pidfd_open, target(arg), 0L);
    return pidfd < 0 ? -1 : syscall(SYS_pidfd_getfd, pidfd, 1L, 0L);
}

static long op_kcmp(const char *arg) {
    return syscall(SYS_kcmp, getpid(), target(arg), 0L, 0L, 0L) < 0 ? -1 : 0;
}

static long op_robust_list(const char *arg) {
    void *head;
    size_t len;
    return syscall(SYS_get_robust_list, target(arg), &head, &len);
}

static long op_process_madvise(const char *arg) {
    static char page[4096] __attribute__((aligned(4096)));
    struct iovec range = {page, sizeof page};
    long pidfd = syscall(SYS_pidfd_open, target(arg), 0L);
    return syscall(SYS_process_madvise, pidfd, &range, 1L, MADV_COLD, 0L);
}

/* Of a process that is not dying: EINVAL where it may be tried at all. */
static long op_process_mrelease(const char *arg) {
    long pidfd = syscall(SYS_pidfd_open, target(arg), 0L);
    return syscall(SYS_process_mrelease, pidfd, 0L);
}

static long op_setpgid(const char *arg) {
    return setpgid(target(arg), 0);
}

/* A file of a process: "PID,NAME" */
static void proc_path(const char *arg, char *path, size_t size) {
    char pid[32];
    const char *comma = strchr(arg, ',');
    snprintf(pid, sizeof pid, "%.*s", (int)(comma - arg), arg);
    snprintf(path, size, "/proc/%d/%s", target(pid), comma + 1);
}

static long op_proc_open_r(const char *arg) {
    char path[256];
    proc_path(arg, path, sizeof path);
    return op_open_r(path);
}

static long op_proc_open_w(const char *arg) {
    char path[256];
    proc_path(arg, path, sizeof path);
    return op_open_w(path);
}

static long op_proc_read(const char *arg) {
    char path[256];
    proc_path(arg, path, sizeof path);
    return op_read(path);
}

static long op_proc_list(const char *arg) {
    char path[256];
    proc_path(arg, path, sizeof path);
    return op_list(path);
}

static long op_proc_readlink(const char *arg) {
    char path[256];
    proc_path(arg, path, sizeof path);
    return op_readlink(path);
}

/* Write what a file of a process holds already: "PID,NAME". */
static long op_proc_rewrite(const char *arg) {
    char path[256], text[256];
    proc_path(arg, path, sizeof path);
    int from = open(path, O_RDONLY), to = open(path, O_WRONLY);
    if (to < 0)
        return -1;
    ssize_t got = from < 0 ? -1 : read(from, text, sizeof text);
    if (got <= 0)
        got = snprintf(text, sizeof text, "50000");
    return write(to, text, (size_t)got);
}

/* --- signals: "PID,NUMBER" -------------------------------------------------------------------- */

static long op_kill(const char *arg) {
    int pid = 0, number = 0;
    sscanf(arg, "%d,%d", &pid, &number);
    return kill(pid, number);
}

/* Whether a process of our own dies of, or stops at, a signal. */
static long op_kill_child(const char *arg) {
    int status;
    pid_t child = target("child");
    if (kill(child, (int)strtol(arg, NULL, 10)) || waitpid(child, &status, WUNTRACED) != child)
        return -1;
    kill(child, SIGKILL);
    return 0;
}

static long op_signal_storm(const char *arg) {
    long count = strtol(arg, NULL, 10);
    for (long i = 0; i < count; i++) {
        siginfo_t info = {.si_code = SI_QUEUE, .si_signo = i % 2 ? SIGCHLD : SIGRTMIN};
        if (kill(1, SIGCHLD) ||
            (syscall(SYS_rt_sigqueueinfo, 1L, info.si_signo, &info) && errno != EAGAIN))
            return -1;
    }
    return count;
}

/* --- network ---------------------------------------------------------------------------------- */

static long op_connect(const char *arg) {
    char host[64];
    int port = 0;
    sscanf(arg, "%63[^,],%d", host, &port);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    inet_pton(AF_INET, host, &to.sin_addr);
    if (fd < 0 || (connect(fd, (struct sockaddr *)&to, sizeof to) && errno != EINPROGRESS))
        return -1;
    struct pollfd poller = {fd, POLLOUT, 0};
    poll(&poller, 1, 3000);
    int err = ETIMEDOUT;
    socklen_t len = sizeof err;
    if (poller.revents)
        getsockopt(fd, SOL_SOCKET, SO_ERROR, &err, &len);
    errno = err;
    return err ? -1 : 0;
}

static long op_connect6(const char *arg) {
    char host[64];
    int port = 0;
    sscanf(arg, "%63[^,],%d", host, &port);
    int fd = socket(AF_INET6, SOCK_STREAM, 0);
    struct sockaddr_in6 to = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port)};
    inet_pton(AF_INET6, host, &to.sin6_addr);
    return fd < 0 ? -1 : connect(fd, (struct sockaddr *)&to, sizeof to);
}

static long op_send_udp(const char *arg) {
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(53)};
    inet_pton(AF_INET, arg, &to.sin_addr);
    return sendto(fd, "x", 1, 0, (struct sockaddr *)&to, sizeof to);
}

static void unix_address(const char *arg, struct sockaddr_un *to, socklen_t *len) {
    memset(to, 0, sizeof *to);
    to->sun_family = AF_UNIX;
    size_t n = strlen(arg);
    memcpy(to->sun_path, arg, n);
    if (*arg == '@')
        to->sun_path[0] = 0;
    *len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n);
}

static long op_connect_unix(const char *arg) {
    struct sockaddr_un to;
    socklen_t len;
    unix_address(arg, &to, &len);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    return connect(fd, (struct sockaddr *)&to, len);
}

/* One rtnetlink request; the kernel's answer is an errno. */
static long netlink(int type, int flags, const void *body, size_t size) {
    struct {
        struct nlmsghdr head;
        char body[256];
    } request = {0};
    char answer[4096];
    int fd = socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE);
    if (fd < 0)
        return -1;
    request.head.nlmsg_len = (uint32_t)(sizeof request.head + size);
    request.head.nlmsg_type = (uint16_t)type;
    request.head.nlmsg_flags = (uint16_t)(NLM_F_REQUEST | NLM_F_ACK | flags);
    memcpy(request.body, body, size);
    if (send(fd, &request, request.head.nlmsg_len, 0) < 0 || recv(fd, answer, sizeof answer, 0) < 0)
        return -1;
    struct nlmsghdr *head = (struct nlmsghdr *)answer;
    if (head->nlmsg_type != NLMSG_ERROR)
        return 0;
    errno = -((struct nlmsgerr *)NLMSG_DATA(head))->error;
    return errno ? -1 : 0;
}

/* Of nonsense: a link of no known kind, a route to nowhere, a rule about nothing. */
static long op_link_add(const char *arg) {
    struct ifinfomsg body = {.ifi_family = AF_UNSPEC};
    (void)arg;
    return netlink(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, &body, sizeof body);
}

static long op_route_add(const char *arg) {
    struct rtmsg body = {.rtm_family = AF_INET, .rtm_dst_len = 99};
    (void)arg;
    return netlink(RTM_NEWROUTE, NLM_F_CREATE, &body, sizeof body);
}

static long op_address_add(const char *arg) {
    struct ifaddrmsg body = {.ifa_family = AF_INET, .ifa_prefixlen = 99, .ifa_index = 1};
    (void)arg;
    return netlink(RTM_NEWADDR, NLM_F_CREATE, &body, sizeof body);
}

static long op_link_list(const char *arg) {
    struct ifinfomsg body = {.ifi_family = AF_UNSPEC, .ifi_index = 1};
    (void)arg;
    return netlink(RTM_GETLINK, 0, &body, sizeof body);
}

/* --- the try itself ---------------------------------------------------------------------------- */

#define OP(name)                                                                                   \
    { #name, op_##name }

static const struct {
    const char *name;
    op_fn run;
} OPS[] = {
    OP(mount),
    OP(umount2),
    OP(pivot_root),
    OP(fsopen),
    OP(fsconfig),
    OP(fsmount),
    OP(fspick),
    OP(open_tree),
    OP(open_tree_attr),
    OP(move_mount),
    OP(mount_setattr),
    OP(listmount),
    OP(statmount),
    OP(setns),
    OP(bpf),
    OP(perf_event_open),
    OP(userfaultfd),
    OP(io_uring_setup),
    OP(io_uring_enter),
    OP(io_uring_register),
    OP(add_key),
    OP(request_key),
    OP(keyctl),
    OP(kexec_load),
    OP(kexec_file_load),
    OP(init_module),
    OP(finit_module),
    OP(delete_module),
    OP(reboot),
    OP(swapon),
    OP(swapoff),
    OP(acct),
    OP(quotactl),
    OP(quotactl_fd),
    OP(syslog),
    OP(open_by_handle_at),
    OP(clock_settime),
    OP(clock_adjtime),
    OP(adjtimex),
    OP(sethostname),
    OP(setdomainname),
    OP(fanotify_init),
    OP(fanotify_mark),
    OP(migrate_pages),
    OP(move_pages),
    OP(io_setup),
    OP(memfd_secret),
    OP(cachestat),
#ifdef __x86_64__
    OP(modify_ldt),
    OP(iopl),
    OP(ioperm),
    OP(x32_getpid),
#endif
    OP(settimeofday),
    OP(vhangup),
    OP(int80_getpid),
    OP(unshare),
    OP(clone),
    OP(clone3),
    OP(guess_token),
    OP(personality),
    OP(socket),
    OP(socketpair),
    OP(tty_ioctl),
    OP(pipe_fcntl),
    OP(tiocsti),
    OP(open_r),
    OP(open_w),
    OP(open_rw),
    OP(create),
    OP(read),
    OP(list),
    OP(readlink),
    OP(chmod),
    OP(chown),
    OP(unlink),
    OP(rmdir),
    OP(rename),
    OP(mkdir),
    OP(truncate),
    OP(setxattr),
    OP(file_capability),
    OP(writable),
    OP(mknod_c),
    OP(mknod_b),
    OP(mknod_p),
    OP(chroot_walk),
    OP(chroot),
    OP(remount),
    OP(umount),
    OP(mount_proc),
    OP(mount_tmpfs),
    OP(bind),
    OP(shared),
    OP(setns_file),
    OP(nice),
    OP(scheduler),
    OP(ioprio_realtime),
    OP(raise_limit),
    OP(prctl_mm),
    OP(securebits),
    OP(no_new_privs_off),
    OP(bounding_has),
    OP(oom_score),
    OP(read_filter),
    OP(prlimit_get),
    OP(prlimit_set),
    OP(affinity),
    OP(renice),
    OP(sched_idle),
    OP(sched_setattr),
    OP(ioprio),
    OP(ptrace_attach),
    OP(ptrace_seize),
    OP(vm_readv),
    OP(vm_writev),
    OP(pidfd_getfd),
    OP(kcmp),
    OP(robust_list),
    OP(process_madvise),
    OP(process_mrelease),
    OP(setpgid),
    OP(proc_open_r),
    OP(proc_open_w),
    OP(proc_read),
    OP(proc_list),
    OP(proc_readlink),
    OP(proc_rewrite),
    OP(kill),
    OP(kill_child),
    OP(signal_storm),
    OP(connect),
    OP(connect6),
    OP(send_udp),
    OP(connect_unix),
    OP(link_add),
    OP(route_add),
    OP(address_add),
    OP(link_list),
};

static void say(const char *word, const char *text, long number) {
    char line[4200];
    int len = number >= 0 ? snprintf(line, sizeof line, "%s %s %ld\n", word, text, number)
                          : snprintf(line, sizeof line, "%s %s\n", word, text);
    if (write(1, line, (size_t)len) != len)
        _exit(3);
}

static void attempt(const char *word) {
    char name[64];
    const char *colon = strchrnul(word, ':');
    snprintf(name, sizeof name, "%.*s", (int)(colon - word), word);
    for (size_t i = 0; i < sizeof OPS / sizeof *OPS; i++) {
        if (strcmp(OPS[i].name, name))
            continue;
        alarm(20);
        errno = 0;
        long result = OPS[i].run(*colon ? colon + 1 : "");
        int err = errno;
        if (own_child > 0)
            kill(own_child, SIGKILL);
        errno = err;
        if (result < 0)
            say(word, strerrorname_np(errno), -1);
        else
            say(word, "ok", result);
        return;
    }
    say(word, "no-such-op", -1);
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        int status;
        pid_t pid = fork();
        if (pid == 0) {
            attempt(argv[i]);
            _exit(0);
        }
        if (pid < 0) {
            say(argv[i], strerrorname_np(errno), -1);
            continue;
        }
        while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
            ;
        if (WIFSIGNALED(status))
            say(argv[i], WTERMSIG(status) == SIGALRM ? "timeout" : "signal", WTERMSIG(status));
    }
    return 0;
}
