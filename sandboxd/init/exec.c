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
 *      while still PID 1's id, so that fds in flight are not charged to the sandbox's;
 *   5. limits; every fd but 0-2 closed, then the user's ids (nothing needs a capability after that);
 *   6. the working directory, as the user; exec.
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
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ARGS_MAX 65536
/* Raised for everything that a command starts; PID 1 stays at what it inherited. */
#define OOM_SCORE "500"

struct command {
    struct exec_req req;
    uint32_t flags;
    const char *user;
    const char *cwd;
    const char *argv[ARGS_MAX + 4]; /* room for a shell in front */
    const char *envp[ARGS_MAX + 2]; /* and for HOME */
};

static struct command command;

_Noreturn static void give_up(void) {
    _exit(127);
}

static int load_payload(struct inbox *in, const uint8_t **at, size_t *len) {
    *at = in->payload;
    *len = in->head.len;
    if (!(in->head.flags & EXEC_PAYLOAD_FD))
        return 0;
    struct stat st;
    errno = EBADMSG;
    if (in->fd_count != 1 || fstat(in->fds[0], &st) || st.st_size <= 0)
        return -1;
    errno = E2BIG;
    if (st.st_size > (off_t)PAYLOAD_MAX)
        return -1;
    uint8_t *copy = mmap(NULL, (size_t)st.st_size + 1, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copy == MAP_FAILED)
        return -1;
    size_t have = 0;
    while (have < (size_t)st.st_size) {
        ssize_t got = pread(in->fds[0], copy + have, (size_t)st.st_size - have, (off_t)have);
        errno = EBADMSG;
        if (got <= 0)
            return -1;
        have += (size_t)got;
    }
    *at = copy;
    *len = have;
    return 0;
}

static int parse(struct inbox *in) {
    const uint8_t *cursor, *end;
    size_t len;
    if (load_payload(in, &cursor, &len))
        return -1;
    end = cursor + len;
    errno = EBADMSG;
    if (len < sizeof command.req)
        return -1;
    memcpy(&command.req, cursor, sizeof command.req);
    cursor += sizeof command.req;
    command.flags = in->head.flags;
    command.user = wire_string(&cursor, end);
    command.cwd = wire_string(&cursor, end);
    if (!command.cwd || !command.req.argc)
        return -1;
    errno = E2BIG;
    if (command.req.argc > ARGS_MAX || command.req.envc > ARGS_MAX)
        return -1;
    errno = EBADMSG;
    for (uint32_t i = 0; i < command.req.argc; i++)
        if (!(command.argv[i] = wire_string(&cursor, end)))
            return -1;
    for (uint32_t i = 0; i < command.req.envc; i++)
        if (!(command.envp[i] = wire_string(&cursor, end)))
            return -1;
    return cursor == end ? 0 : -1;
}

static const char *env_value(const char *name) {
    size_t len = strlen(name);
    for (uint32_t i = 0; i < command.req.envc; i++)
        if (!strncmp(command.envp[i], name, len) && command.envp[i][len] == '=')
            return command.envp[i] + len + 1;
    return NULL;
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

/* Make the pipes, hand their far ends to the client, put the near ones on 0-2. */
static int connect_streams(struct child *self, struct inbox *in, const struct user *user) {
    int out[2], err[2] = {-1, -1}, input[2] = {-1, -1}, far[3], count = 0;
    struct failure *fail = &self->record->failure;
    setfsgid(user->gid);
    setfsuid(user->uid);
    bool merge = command.flags & EXEC_MERGE_STDERR;
    if (pipe2(out, O_CLOEXEC) || (!merge && pipe2(err, O_CLOEXEC)) ||
        ((command.flags & EXEC_STDIN) && pipe2(input, O_CLOEXEC)))
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
    struct started started = {(uint32_t)getpid(), 0};
    if (wire_send(self->client_fd, R_STARTED, in->head.id, &started, sizeof started, far, count, 0))
        return fail_at(fail, STEP_STARTED, 0);
    for (int i = 0; i < count; i++)
        close(far[i]);
    if (dup2(input[0], 0) < 0 || dup2(out[1], 1) < 0 || dup2(merge ? out[1] : err[1], 2) < 0)
        return fail_at(fail, STEP_PIPES, 1);
    return 0;
}

static int set_limits(struct failure *fail) {
    struct rlimit nofile = {command.req.nofile, command.req.nofile};
    /* 1, not 0: core_pattern's helper is started in spite of 0 when it is a pipe (core(5)) */
    struct rlimit core = {1, 1};
    if (setrlimit(RLIMIT_NOFILE, &nofile))
        return fail_at(fail, STEP_RLIMIT, 0);
    if (setrlimit(RLIMIT_CORE, &core))
        return fail_at(fail, STEP_RLIMIT, 1);
    return 0;
}

/* mkdir -p inside the sandbox's root, as its root: the image's working directory, as Docker does. */
static int make_cwd(struct child *self) {
    char path[4096];
    size_t len = strlen(command.cwd);
    if (len >= sizeof path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    memcpy(path, command.cwd, len + 1);
    for (size_t i = 1; i <= len; i++) {
        if (path[i] != '/' && path[i] != 0)
            continue;
        char saved = path[i];
        path[i] = 0;
        int fd = sys_openat_root(self->root_fd, path, O_PATH | O_DIRECTORY, 0);
        if (fd < 0 && errno == ENOENT) {
            char *slash = strrchr(path, '/');
            *slash = 0;
            int parent =
                sys_openat_root(self->root_fd, *path ? path : "/", O_PATH | O_DIRECTORY, 0);
            *slash = '/';
            if (parent < 0 || (mkdirat(parent, slash + 1, 0755) && errno != EEXIST))
                return -1;
            close(parent);
        } else if (fd < 0) {
            return -1;
        } else {
            close(fd);
        }
        path[i] = saved;
    }
    return 0;
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
    if (write(2, line, strlen(line)) < 0)
        return;
}

/* As execvpe(3), but without its fallback to a shell: "run as is". */
static void run(const char *file, char *const *argv) {
    char *const *envp = (char *const *)(uintptr_t)command.envp;
    const char *path = env_value("PATH");
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

static void run_shell(void) {
    static const char *const shells[][2] = {{"/bin/bash", "bash"}, {"/bin/sh", "sh"}};
    const char *argv[5] = {NULL, "-c", command.argv[0], NULL, NULL};
    if (command.flags & EXEC_LOGIN) {
        argv[1] = "-l";
        argv[2] = "-c";
        argv[3] = command.argv[0];
    }
    for (size_t i = 0; i < 2; i++) {
        argv[0] = shells[i][1];
        execve(shells[i][0], (char *const *)(uintptr_t)argv,
               (char *const *)(uintptr_t)command.envp);
        if (errno != ENOENT)
            return;
    }
}

_Noreturn void exec_child(struct child *self, struct inbox *in) {
    static struct user user;
    static char home[sizeof user.home + 8];
    struct failure *fail = &self->record->failure;
    setsid();
    default_signals();
    if (parse(in)) {
        fail_at(fail, STEP_MESSAGE, 0);
        give_up();
    }
    if (raise_oom_score(self->proc_fd)) {
        fail_at(fail, STEP_OOM_SCORE, 0);
        give_up();
    }
    if (user_find(self->root_fd, command.user, &user, fail))
        give_up();
    if (command.flags & EXEC_CWD_CREATE && make_cwd(self)) {
        fail_at(fail, STEP_CWD, 1);
        give_up();
    }
    if (connect_streams(self, in, &user) || set_limits(fail))
        give_up();
    sys_close_from(3);
    if (user_become(&user, fail) || enter_cwd(fail))
        give_up();
    if (!env_value("HOME")) {
        strcpy(stpcpy(home, "HOME="), user.home);
        command.envp[command.req.envc] = home;
    }
    umask(command.req.umask);
    if (command.flags & EXEC_SHELL)
        run_shell();
    else
        run(command.argv[0], (char *const *)(uintptr_t)command.argv);
    int err = errno;
    fail_at(fail, STEP_EXEC, 0);
    /* Of a script it is the shell that is missing. */
    say(command.flags & EXEC_SHELL ? "/bin/sh" : command.argv[0], err);
    _exit(err == ENOENT || err == ENOTDIR ? 127 : 126);
}
