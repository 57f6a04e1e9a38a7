/*
 * exec.c - the child of PID 1 that becomes a command.
 *
 * It starts as PID 1's own id with all of PID 1's capabilities, inside the exec's cgroup and under
 * the filter. Order, and why:
 *   1. a session of its own; default signals;
 *   2. raise its OOM score above PID 1's. Needs /proc/self to be its own: dumpable for that moment,
 *      still under an id that nobody in the sandbox may trace; becoming the user clears it again;
 *   3. find the user;
 *   4. make the pipes with the user's fsuid, or a program could not reopen /dev/stdout; send them
 *      while still PID 1's id, so that fds in flight are not charged to the sandbox's; or likewise
 *      a terminal, which then belongs to the user;
 *   5. limits; every fd but 0-2 (and STATUS_FD) closed, then the user's ids (nothing needs a capability after that);
 *   6. the working directory, as the user; the sandbox's own filter, where it has one; exec.
 * Close-on-exec alone would be too late: a working directory, program or ELF interpreter that is (or
 * is a symlink of the sandbox's to) /proc/self/fd/N would lead into the host's mounts through the
 * descriptor of a cgroup directory, as in CVE-2024-21626.
 */
#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Raised for everything that a command starts; PID 1 stays at what it inherited. */
#define OOM_SCORE "500"

static struct command command;

_Noreturn static void give_up(void) {
    _exit(127);
}

/* By the system call: signal(3) refuses the two that glibc keeps for itself, and posix_spawn, by which
 * the zygote was started, left these ignored. All zero is SIG_DFL, no flags, an empty mask. */
static void default_signals(void) {
    static const unsigned long default_action[4];
    sigset_t none;
    for (int n = 1; n < NSIG; n++)
        syscall(SYS_rt_sigaction, n, default_action, NULL, sizeof(uint64_t));
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

static int raise_oom_score(int proc_fd) {
    if (prctl(PR_SET_DUMPABLE, 1UL, 0UL, 0UL, 0UL))
        return -1;
    int r = sys_write_file(proc_fd, "self/oom_score_adj", OOM_SCORE);
    int err = errno;
    prctl(PR_SET_DUMPABLE, 0UL, 0UL, 0UL, 0UL);
    errno = err;
    return r;
}

static int send_started(struct child *self, const struct inbox *in, const int *fds, int count) {
    struct started started = {(uint32_t)getpid(), self->cgroup};
    if (wire_send(self->client_fd, R_STARTED, in->head.id, &started, sizeof started, fds, count, 0))
        return fail_at(&self->record->failure, STEP_STARTED, 0);
    return 0;
}

/* A terminal of the sandbox's own devpts as the controlling one, hand its master to the client. The
 * slave is opened through the master: a path could be anything by now. */
static int connect_terminal(struct child *self, const struct inbox *in, const struct user *user) {
    struct failure *fail = &self->record->failure;
    struct winsize size = {.ws_col = (unsigned short)(command.req.tty_size & 0xffff),
                           .ws_row = (unsigned short)(command.req.tty_size >> 16)};
    int unlocked = 0;
    setfsgid(user->gid);
    setfsuid(user->uid);
    int master = openat(self->dev_fd, "pts/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (master < 0 || ioctl(master, TIOCSPTLCK, &unlocked))
        return fail_at(fail, STEP_TTY, 0);
    int slave = ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (slave < 0 || ioctl(slave, TIOCSWINSZ, &size) || ioctl(slave, TIOCSCTTY, 0))
        return fail_at(fail, STEP_TTY, 1);
    if (send_started(self, in, &master, 1))
        return -1;
    close(master);
    for (int fd = 0; fd < 3; fd++)
        if (dup2(slave, fd) < 0)
            return fail_at(fail, STEP_TTY, 2);
    return 0;
}

/* Make the pipes, hand their far ends to the client, put the near ones on 0-2. */
static int connect_streams(struct child *self, const struct inbox *in, const struct user *user,
                           int *status_fd) {
    int out[2], err[2] = {-1, -1}, input[2] = {-1, -1}, status[2] = {-1, -1}, far[4], count = 0;
    struct failure *fail = &self->record->failure;
    setfsgid(user->gid);
    setfsuid(user->uid);
    bool merge = command.flags & EXEC_MERGE_STDERR;
    if (pipe2(out, O_CLOEXEC) || (!merge && pipe2(err, O_CLOEXEC)) ||
        ((command.flags & EXEC_STDIN) && pipe2(input, O_CLOEXEC)) ||
        ((command.flags & EXEC_STATUS) && pipe2(status, O_CLOEXEC)))
        return fail_at(fail, STEP_PIPES, 0);
    far[count++] = out[0];
    if (!merge)
        far[count++] = err[0];
    if (input[1] >= 0)
        far[count++] = input[1];
    else
        input[0] = openat(self->dev_fd, "null", O_RDONLY | O_CLOEXEC);
    if (input[0] < 0)
        return fail_at(fail, STEP_STDIN, 0);
    if (status[0] >= 0)
        far[count++] = status[0];
    if (send_started(self, in, far, count))
        return -1;
    for (int i = 0; i < count; i++)
        close(far[i]);
    if (dup2(input[0], 0) < 0 || dup2(out[1], 1) < 0 || dup2(merge ? out[1] : err[1], 2) < 0)
        return fail_at(fail, STEP_PIPES, 1);
    *status_fd = status[1];
    return 0;
}

/* All but 0-2, and the status pipe where there is one. */
static int close_others(int status_fd) {
    if (status_fd < 0)
        return sys_close_from(3);
    if (status_fd == STATUS_FD ? fcntl(STATUS_FD, F_SETFD, 0) : dup2(status_fd, STATUS_FD) < 0)
        return -1;
    for (int fd = 3; fd < STATUS_FD; fd++)
        close(fd);
    return sys_close_from(STATUS_FD + 1);
}

static int set_limits(struct failure *fail) {
    struct rlimit nofile = {command.req.nofile, command.req.nofile};
    /* 1, not 0: core_pattern's helper is started in spite of 0 when it is a pipe (core(5)). An
     * ordinary user may be let have no more than 0. */
    struct rlimit core = {1, 1}, had;
    if (!getrlimit(RLIMIT_CORE, &had) && !had.rlim_max)
        core = had;
    if (setrlimit(RLIMIT_NOFILE, &nofile))
        return fail_at(fail, STEP_RLIMIT, 0);
    if (setrlimit(RLIMIT_CORE, &core))
        return fail_at(fail, STEP_RLIMIT, 1);
    return 0;
}

/* mkdir -p inside the sandbox's root, as its root: the image's working directory, as Docker does. */
static int make_cwd(int root_fd) {
    static char path[PATH_MAX];
    errno = *command.cwd == '/' ? ENAMETOOLONG : ENOENT;
    if (*command.cwd != '/' || strlen(command.cwd) >= sizeof path)
        return -1;
    strcpy(path, command.cwd);
    umask(022);
    /* A file belongs to its maker's fsuid, and PID 1's own is not the sandbox's. */
    setfsgid(0);
    setfsuid(0);
    int fd = path_open_directory(root_fd, path, true);
    return fd < 0 ? -1 : close(fd);
}

static int enter_cwd(struct failure *fail) {
    errno = ENOENT;
    if (*command.cwd != '/' || chdir(command.cwd))
        return fail_at(fail, STEP_CWD, 0);
    return 0;
}

static void say(const char *name, int err) {
    const char *why = err == ENOENT || err == ENOTDIR ? ": not found\n"
                      : err == EACCES                 ? ": permission denied\n"
                      : err == ENOEXEC                ? ": not an executable format\n"
                      : err == E2BIG                  ? ": argument list too long\n"
                                                      : ": cannot be executed\n";
    char line[512], *at = stpcpy(line, "exec: ");
    size_t len = strnlen(name, 400);
    memcpy(at, name, len);
    strcpy(at + len, why);
    signal(SIGPIPE, SIG_IGN); /* the status is to tell the same, read or not */
    if (write(2, line, strlen(line)) < 0)
        return;
}

/* As execvpe(3), but without its fallback to a shell: "run as is". */
static void run(const char *file, char *const *argv) {
    char *const *envp = (char *const *)(uintptr_t)command.envp;
    const char *path = command_env(&command, "PATH");
    int err = ENOENT;
    if (strchr(file, '/')) {
        execve(file, argv, envp);
        return;
    }
    if (!path)
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    while (*file) {
        char full[4096];
        const char *colon = strchrnul(path, ':');
        size_t len = (size_t)(colon - path);
        if (len + strlen(file) + 2 < sizeof full) {
            memcpy(full, path, len);
            strcpy(stpcpy(full + len, len ? "/" : "./"), file);
            execve(full, argv, envp);
            if (errno == EACCES)
                err = EACCES;
            else if (errno != ENOENT && errno != ENOTDIR)
                return;
        }
        if (!*colon)
            break;
        path = colon + 1;
    }
    errno = err;
}

/* Returns what could not be run. */
static const char *run_shell(void) {
    static const char *const shells[][2] = {{"/bin/bash", "bash"}, {"/bin/sh", "sh"}};
    const char *argv[5] = {NULL, "-c", command.argv[0], NULL, NULL};
    if (command.flags & EXEC_LOGIN) {
        argv[1] = "-l";
        argv[2] = "-c";
        argv[3] = command.argv[0];
    }
    size_t i = 0;
    for (;; i++) {
        argv[0] = shells[i][1];
        execve(shells[i][0], (char *const *)(uintptr_t)argv,
               (char *const *)(uintptr_t)command.envp);
        if (errno != ENOENT || i == 1)
            return shells[i][0];
    }
}

_Noreturn void exec_child(struct child *self, struct inbox *in) {
    static struct user user;
    static char home[sizeof user.home + 8];
    struct failure *fail = &self->record->failure;
    setsid();
    default_signals();
    if (command_parse(in, &command)) {
        fail_at(fail, STEP_MESSAGE, 0);
        give_up();
    }
    if (raise_oom_score(self->proc_fd)) {
        fail_at(fail, STEP_OOM_SCORE, 0);
        give_up();
    }
    if (user_find(self->root_fd, command.user, &user, fail))
        give_up();
    if (command.flags & EXEC_CWD_CREATE && make_cwd(self->root_fd)) {
        fail_at(fail, STEP_CWD, 1);
        give_up();
    }
    int status_fd = -1;
    if (command.flags & EXEC_TTY ? connect_terminal(self, in, &user)
                                 : connect_streams(self, in, &user, &status_fd))
        give_up();
    if (set_limits(fail))
        give_up();
    if (close_others(status_fd)) {
        fail_at(fail, STEP_PIPES, 2);
        give_up();
    }
    if (user_become(&user, fail) || enter_cwd(fail))
        give_up();
    if (!command_env(&command, "HOME")) {
        strcpy(stpcpy(home, "HOME="), user.home);
        command.envp[command.req.envc] = home;
    }
    umask(command.req.umask);
    /* Last, as it may refuse all but the exec; with PID 1's own the stricter answer counts. */
    if (self->filter && sys_load_filter(self->filter, self->filter_len)) {
        fail_at(fail, STEP_SECCOMP, 2);
        give_up();
    }
    const char *what = command.argv[0];
    if (command.flags & EXEC_SHELL)
        what = run_shell();
    else
        run(what, (char *const *)(uintptr_t)command.argv);
    int err = errno;
    fail_at(fail, STEP_EXEC, 0);
    say(what, err);
    _exit(err == ENOENT || err == ENOTDIR ? 127 : 126);
}
