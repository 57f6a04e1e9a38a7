/*
 * pid1.c - PID 1 of a sandbox: sets it up, swaps its root, starts and reaps everything in it.
 *
 * It is also what the design calls the spawner. A spawner beside it would be an ordinary process of
 * the sandbox's user namespace, and the sandbox's root (CAP_KILL) could stop or kill it; PID 1 is
 * shielded by the kernel from every signal of its own pid namespace. The few calls that the filter
 * would refuse it carry the node's token (sys.c).
 *
 * One loop over: control sockets, SIGCHLD, and the cgroup.events of execs whose end is waited for.
 * It never blocks on the sandbox's files: what touches them runs in a child. It never blocks on a
 * client: an answer that does not fit a client's queue stays with its exec until it does.
 */
#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum exec_state { FREE, RUNNING, LINGERING };
enum source { FROM_CLIENT, FROM_SIGNALS, FROM_EVENTS };

/* Owned by PID 1. `client` is -1 once nobody waits for an answer. LINGERING: the main process is
 * reaped, but processes it left behind are still in the cgroup. */
struct exec {
    enum exec_state state;
    int client;
    uint32_t id;
    uint32_t serial; /* names the cgroup, "e<serial>" */
    pid_t pid;
    int events_fd; /* cgroup.events, -1 until somebody waits for the cgroup to empty */
    bool detached;
    bool exit_unsent;
    bool want_gone;
    struct exited exit;
};

struct client {
    int fd; /* -1: free */
    bool want_out;
};

static struct exec execs[EXECS_MAX];
static uint32_t execs_end; /* one past the last that was ever used */
static struct client clients[CLIENTS_MAX];
static struct record *records; /* EXECS_MAX, shared with children */
static uint32_t next_serial;
static int epoll_fd, cgroup_fd = -1, root_fd = -1;
static struct kernel_mounts mounts;
static bool is_set_up, has_root;

static void watch(int fd, enum source source, uint32_t index, uint32_t events, int op) {
    struct epoll_event event = {.events = events, .data.u64 = (uint64_t)source << 32 | index};
    epoll_ctl(epoll_fd, op, fd, &event);
}

/* --- cgroups of execs ------------------------------------------------------------------------ */

static void cgroup_path(char *out, const struct exec *exec, const char *file) {
    out[0] = 'e';
    char *at = text_number(out + 1, exec->serial);
    if (file)
        strcpy(stpcpy(at, "/"), file);
}

static bool cgroup_populated(const struct exec *exec) {
    char path[64], text[128];
    cgroup_path(path, exec, "cgroup.events");
    int fd = openat(cgroup_fd, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    text[got > 0 ? got : 0] = 0;
    return strstr(text, "populated 1") != NULL;
}

static void cgroup_kill(const struct exec *exec) {
    char path[64];
    cgroup_path(path, exec, "cgroup.kill");
    sys_write_file(cgroup_fd, path, "1");
}

/* A signal other than SIGKILL to all: those that are forked meanwhile may be missed; the SIGKILL that
 * follows it misses none. */
static void cgroup_signal(const struct exec *exec, int signal_number) {
    char path[64], text[4096];
    cgroup_path(path, exec, "cgroup.procs");
    int fd = openat(cgroup_fd, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    pid_t pid = 0;
    ssize_t got;
    while ((got = read(fd, text, sizeof text)) > 0)
        for (ssize_t i = 0; i < got; i++) {
            if (text[i] >= '0' && text[i] <= '9') {
                pid = pid * 10 + (text[i] - '0');
            } else {
                if (pid > 1)
                    kill(pid, signal_number);
                pid = 0;
            }
        }
    close(fd);
}

/* --- clients --------------------------------------------------------------------------------- */

static void drop_client(uint32_t index);

/* Answers that belong to no exec: a client whose queue is full of unread ones is dropped. */
static void answer(uint32_t index, uint32_t type, uint32_t id, const void *payload, uint32_t len) {
    if (clients[index].fd >= 0 &&
        wire_send(clients[index].fd, type, id, payload, len, NULL, 0, MSG_DONTWAIT))
        drop_client(index);
}

static void answer_failure(uint32_t index, uint32_t id, enum step step, uint32_t which, int err) {
    struct failure fail = {step, which, err, 0};
    answer(index, R_FAILED, id, &fail, sizeof fail);
}

/* --- the end of an exec ---------------------------------------------------------------------- */

static bool tell(struct exec *exec, uint32_t type, const void *payload, uint32_t len) {
    struct client *client = &clients[exec->client];
    if (!wire_send(client->fd, type, exec->id, payload, len, NULL, 0, MSG_DONTWAIT))
        return true;
    if (errno != EAGAIN) {
        drop_client((uint32_t)exec->client);
        return true;
    }
    if (!client->want_out)
        watch(client->fd, FROM_CLIENT, (uint32_t)exec->client, EPOLLIN | EPOLLOUT, EPOLL_CTL_MOD);
    client->want_out = true;
    return false;
}

/* Take an exec as far towards its end as it goes now. */
static void settle(uint32_t index) {
    struct exec *exec = &execs[index];
    if (exec->state != LINGERING)
        return;
    if (exec->exit_unsent && exec->client >= 0 &&
        !tell(exec, R_EXIT, &exec->exit, sizeof exec->exit))
        return;
    exec->exit_unsent = false;
    char path[64];
    cgroup_path(path, exec, NULL);
    if (exec->serial && unlinkat(cgroup_fd, path, AT_REMOVEDIR) && errno != ENOENT) {
        if (exec->events_fd >= 0)
            return;
        char events[64];
        cgroup_path(events, exec, "cgroup.events");
        exec->events_fd = openat(cgroup_fd, events, O_RDONLY | O_CLOEXEC);
        if (exec->events_fd < 0)
            return;
        watch(exec->events_fd, FROM_EVENTS, index, EPOLLPRI, EPOLL_CTL_ADD);
        /* what happened before the watch is not announced any more */
        if (cgroup_populated(exec) || unlinkat(cgroup_fd, path, AT_REMOVEDIR))
            return;
    }
    exec->serial = 0;
    if (exec->want_gone && exec->client >= 0 && !tell(exec, R_GONE, NULL, 0))
        return;
    if (exec->events_fd >= 0)
        close(exec->events_fd);
    exec->state = FREE;
}

static void drop_client(uint32_t index) {
    close(clients[index].fd);
    clients[index].fd = -1;
    clients[index].want_out = false;
    if (index == 0)
        _exit(0); /* the launcher: without it nobody owns this sandbox */
    for (uint32_t i = 0; i < execs_end; i++) {
        struct exec *exec = &execs[i];
        if (exec->state == FREE || exec->client != (int)index)
            continue;
        exec->client = -1;
        if (!exec->detached)
            cgroup_kill(exec);
        settle(i);
    }
}

/* Reap what has ended; with `options` 0 wait until nothing is left but PID 1. False: some lives. */
static bool reap(int options) {
    struct rusage usage;
    int status;
    pid_t pid;
    while ((pid = wait4(-1, &status, options, &usage)) > 0) {
        for (uint32_t i = 0; i < execs_end; i++) {
            struct exec *exec = &execs[i];
            if (exec->state != RUNNING || exec->pid != pid)
                continue;
            const struct record *record = &records[i];
            exec->exit = (struct exited){
                .failure = record->failure,
                .status = status,
                .mode = record->mode,
                .uid = record->uid,
                .gid = record->gid,
                .size = record->size,
                .mtime_ns = record->mtime_ns,
                .user_us =
                    (uint64_t)usage.ru_utime.tv_sec * 1000000u + (uint64_t)usage.ru_utime.tv_usec,
                .system_us =
                    (uint64_t)usage.ru_stime.tv_sec * 1000000u + (uint64_t)usage.ru_stime.tv_usec,
                .maxrss_kb = (uint64_t)usage.ru_maxrss,
            };
            exec->state = LINGERING;
            exec->exit_unsent = true;
            settle(i);
            break;
        }
    }
    return pid < 0 && errno == ECHILD;
}

/* --- requests -------------------------------------------------------------------------------- */

static void start(uint32_t client, struct inbox *in) {
    uint32_t index = 0;
    char path[64];
    while (index < EXECS_MAX && execs[index].state != FREE)
        index++;
    if (!has_root || index == EXECS_MAX) {
        answer_failure(client, in->head.id, has_root ? STEP_TABLE_FULL : STEP_MESSAGE, 0,
                       has_root ? EAGAIN : EBADMSG);
        return;
    }
    struct exec *exec = &execs[index];
    if (index >= execs_end)
        execs_end = index + 1;
    memset(&records[index], 0, sizeof records[index]);
    *exec = (struct exec){.client = (int)client,
                          .id = in->head.id,
                          .serial = ++next_serial,
                          .events_fd = -1,
                          .detached = in->head.type == M_EXEC && in->head.flags & EXEC_DETACH};
    cgroup_path(path, exec, NULL);
    int dir = mkdirat(cgroup_fd, path, 0755)
                  ? -1
                  : openat(cgroup_fd, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir < 0) {
        answer_failure(client, in->head.id, STEP_EXEC_CGROUP, 0, errno);
        return;
    }
    exec->pid = sys_clone3_child(0, dir, NULL);
    if (exec->pid == 0) {
        struct child self = {.record = &records[index],
                             .client_fd = clients[client].fd,
                             .root_fd = root_fd,
                             .proc_fd = mounts.fd[0],
                             .dev_fd = mounts.fd[2]};
        if (in->head.type == M_EXEC)
            exec_child(&self, in);
        file_child(&self, in);
    }
    int err = errno;
    close(dir);
    if (exec->pid < 0) {
        unlinkat(cgroup_fd, path, AT_REMOVEDIR);
        answer_failure(client, in->head.id, STEP_CLONE, 0, err);
        return;
    }
    exec->state = RUNNING;
}

static void kill_exec(uint32_t client, const struct inbox *in) {
    struct kill_req req;
    if (in->head.len != sizeof req)
        return;
    memcpy(&req, in->payload, sizeof req);
    bool wants_gone = req.scope == KILL_TREE && req.signal == SIGKILL;
    for (uint32_t i = 0; i < execs_end; i++) {
        struct exec *exec = &execs[i];
        if (exec->state == FREE || exec->id != in->head.id || exec->client != (int)client)
            continue;
        if (req.scope == KILL_MAIN) {
            if (exec->state == RUNNING)
                kill(exec->pid, (int)req.signal);
        } else if (wants_gone) {
            exec->want_gone = true;
            cgroup_kill(exec);
            settle(i);
        } else {
            cgroup_signal(exec, (int)req.signal);
        }
        return;
    }
    if (wants_gone)
        answer(client, R_GONE, in->head.id, NULL, 0);
}

static void attach(uint32_t client, struct inbox *in) {
    for (uint32_t i = 1; i < CLIENTS_MAX; i++) {
        if (clients[i].fd >= 0 || in->fd_count != 1)
            continue;
        clients[i] = (struct client){.fd = in->fds[0]};
        in->fd_count = 0;
        watch(clients[i].fd, FROM_CLIENT, i, EPOLLIN, EPOLL_CTL_ADD);
        answer(client, R_DONE, in->head.id, NULL, 0);
        return;
    }
    answer_failure(client, in->head.id, STEP_MESSAGE, 0, EMFILE);
}

static int join_cgroups(struct inbox *in, struct failure *fail) {
    struct setup setup;
    errno = EBADMSG;
    if (in->head.len < sizeof setup)
        return fail_at(fail, STEP_MESSAGE, 0);
    memcpy(&setup, in->payload, sizeof setup);
    if (setup.cgroup_v1_count > CGROUP_V1_MAX || in->fd_count != 1 + (int)setup.cgroup_v1_count)
        return fail_at(fail, STEP_MESSAGE, 1);
    for (uint32_t i = 0; i < setup.cgroup_v1_count; i++)
        if (write(in->fds[1 + i], "0", 1) != 1)
            return fail_at(fail, STEP_CGROUP, i);
    cgroup_fd = in->fds[0];
    in->fds[0] = -1;
    /* After the placement, or /proc/self/cgroup would show a path with "/../" in it. */
    if (unshare(CLONE_NEWCGROUP))
        return fail_at(fail, STEP_CGROUP_NS, 0);
    return 0;
}

static int set_up(struct inbox *in, struct failure *fail) {
    errno = EBADMSG;
    if (is_set_up)
        return fail_at(fail, STEP_MESSAGE, 2);
    if (join_cgroups(in, fail))
        return -1;
    struct failure *shared = &records[0].failure;
    pid_t pid = fork();
    if (pid == 0)
        _exit(setup_stage(in, shared) ? 1 : 0);
    int status;
    if (pid < 0 || waitpid(pid, &status, 0) != pid)
        return fail_at(fail, STEP_STAGE, 9);
    if (status) {
        *fail = *shared;
        return -1;
    }
    if (setup_open_mounts(&mounts, fail) || setup_lock(fail))
        return -1;
    is_set_up = true;
    return 0;
}

static int take_root(struct inbox *in, struct failure *fail) {
    errno = EBADMSG;
    if (!is_set_up || in->fd_count != 1)
        return fail_at(fail, STEP_MESSAGE, 3);
    /* All of this pid namespace but PID 1; a fork that is under way fails or is killed too. */
    if (in->head.flags & ROOT_KILL)
        kill(-1, SIGKILL);
    if (in->head.flags & (ROOT_KILL | ROOT_IDLE) &&
        !reap(in->head.flags & ROOT_KILL ? 0 : WNOHANG)) {
        errno = EBUSY;
        return fail_at(fail, STEP_ROOT_BUSY, 0);
    }
    const uint8_t *cursor = in->payload;
    const char *hostname = wire_string(&cursor, in->payload + in->head.len);
    if (hostname && sys_sethostname(hostname))
        return fail_at(fail, STEP_HOSTNAME, 1);
    if (setup_swap_root(in->fds[0], &mounts, fail))
        return -1;
    if (root_fd >= 0)
        close(root_fd);
    root_fd = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    has_root = root_fd >= 0;
    return has_root ? 0 : fail_at(fail, STEP_ROOT_PIVOT, 1);
}

static void handle(uint32_t client, struct inbox *in) {
    struct failure fail = {0, 0, 0, 0};
    bool launcher = client == 0;
    if (in->head.type == M_EXEC || in->head.type == M_FILE) {
        start(client, in);
    } else if (in->head.type == M_KILL) {
        kill_exec(client, in);
    } else if (in->head.type == M_ATTACH && launcher) {
        attach(client, in);
    } else if (in->head.type == M_PING) {
        answer(client, R_DONE, in->head.id, NULL, 0);
    } else if ((in->head.type == M_SETUP || in->head.type == M_ROOT) && launcher) {
        int r = in->head.type == M_SETUP ? set_up(in, &fail) : take_root(in, &fail);
        if (r)
            answer(client, R_FAILED, in->head.id, &fail, sizeof fail);
        else
            answer(client, R_DONE, in->head.id, NULL, 0);
    } else {
        answer_failure(client, in->head.id, STEP_MESSAGE, 4, EBADMSG);
    }
}

static void from_client(uint32_t index, uint32_t events, struct inbox *in) {
    if (clients[index].fd < 0)
        return;
    if (events & EPOLLOUT) {
        clients[index].want_out = false;
        watch(clients[index].fd, FROM_CLIENT, index, EPOLLIN, EPOLL_CTL_MOD);
        for (uint32_t i = 0; i < execs_end && clients[index].fd >= 0; i++)
            if (execs[i].client == (int)index)
                settle(i);
    }
    if (clients[index].fd < 0 || !(events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
        return;
    int got = wire_receive(clients[index].fd, in);
    if (got == 1) {
        handle(index, in);
        wire_close_fds(in);
    } else if (got == 0 || (errno != EAGAIN && errno != EBADMSG)) {
        drop_client(index);
    }
}

/* Close all that came with the clone but `control_fd`, which moves to 3; 0-2 are /dev/null. */
static void own_fds(int control_fd) {
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    for (int fd = 0; fd < 3; fd++)
        if (null != fd)
            dup2(null, fd);
    if (control_fd != 3)
        dup2(control_fd, 3);
    fcntl(3, F_SETFD, FD_CLOEXEC);
    sys_close_from(4);
}

_Noreturn void pid1_main(int control_fd) {
    static struct inbox in;
    sigset_t child;
    prctl(PR_SET_PDEATHSIG, (unsigned long)SIGKILL, 0UL, 0UL, 0UL);
    own_fds(control_fd);
    signal(SIGCHLD, SIG_DFL);
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_SETMASK, &child, NULL);
    records = mmap(NULL, EXECS_MAX * sizeof *records, PROT_READ | PROT_WRITE,
                   MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    int signal_fd = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
    if (records == MAP_FAILED || epoll_fd < 0 || signal_fd < 0)
        _exit(1);
    for (uint32_t i = 0; i < CLIENTS_MAX; i++)
        clients[i].fd = -1;
    clients[0].fd = 3;
    watch(3, FROM_CLIENT, 0, EPOLLIN, EPOLL_CTL_ADD);
    watch(signal_fd, FROM_SIGNALS, 0, EPOLLIN, EPOLL_CTL_ADD);
    /* The first message comes after the id maps are written, and only until then must /proc/PID
     * belong to the zygote. */
    if (wire_receive(3, &in) != 1)
        _exit(0);
    prctl(PR_SET_DUMPABLE, 0UL, 0UL, 0UL, 0UL);
    handle(0, &in);
    wire_close_fds(&in);
    for (;;) {
        struct epoll_event events[32];
        int count = epoll_wait(epoll_fd, events, 32, -1);
        for (int i = 0; i < count; i++) {
            uint32_t index = (uint32_t)events[i].data.u64;
            switch ((enum source)(events[i].data.u64 >> 32)) {
            case FROM_CLIENT:
                from_client(index, events[i].events, &in);
                break;
            case FROM_SIGNALS: {
                struct signalfd_siginfo info[8];
                while (read(signal_fd, info, sizeof info) > 0)
                    ;
                reap(WNOHANG);
                break;
            }
            case FROM_EVENTS:
                settle(index);
                break;
            }
        }
    }
}
