/*
 * mark.c - the processes of one exec told from all others where there is no cgroup to hold them.
 *
 * The mark is the soft RLIMIT_LOCKS, which has meant nothing since Linux 2.4 (getrlimit(2)): PID 1
 * sets its own to an exec's serial before it forks it, and every descendant inherits it, orphans and
 * those in sessions of their own included. The sandbox's filter refuses to change it (only PID 1's
 * token is let through), so that no process of an exec can pass for another's.
 *
 * One look over /proc misses what is forked behind it, so looks follow each other until one finds
 * nobody. Whoever forks faster than that is stopped together with all others first: to fork(2),
 * kill(2) of -1 is one step.
 */
#include "init.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

struct entry {
    uint64_t ino;
    int64_t off;
    unsigned short len;
    unsigned char type;
    char name[];
};

int mark_next(uint32_t serial) {
    struct rlimit mark;
    if (getrlimit(RLIMIT_LOCKS, &mark))
        return -1;
    mark.rlim_cur = serial;
    return sys_set_mark(&mark);
}

static pid_t process_number(const char *name) {
    pid_t pid = 0;
    for (; *name >= '0' && *name <= '9'; name++)
        pid = pid * 10 + (*name - '0');
    return *name ? 0 : pid;
}

int mark_signal(int proc_fd, uint32_t serial, int signal_number, pid_t spared) {
    _Alignas(8) char buffer[8192];
    int found = 0;
    int fd = openat(proc_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    for (;;) {
        long got = syscall(SYS_getdents64, fd, buffer, sizeof buffer);
        if (got <= 0) {
            int err = errno;
            close(fd);
            errno = err;
            return got < 0 ? -1 : found;
        }
        for (long at = 0; at < got;) {
            const struct entry *entry = (const struct entry *)(const void *)(buffer + at);
            at += entry->len;
            pid_t pid = process_number(entry->name);
            struct rlimit mark;
            /* PID 1 wears the mark of its latest exec. */
            if (pid <= 1 || pid == spared || prlimit(pid, RLIMIT_LOCKS, NULL, &mark) ||
                mark.rlim_cur != serial)
                continue;
            found++;
            if (signal_number)
                kill(pid, signal_number);
        }
    }
}

int mark_kill(int proc_fd, uint32_t serial, bool stop_all) {
    if (stop_all)
        kill(-1, SIGSTOP);
    int found = mark_signal(proc_fd, serial, SIGKILL, 0);
    if (stop_all)
        kill(-1, SIGCONT);
    return found;
}
