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
 * client, and loses nothing for one that does not read: the end of an exec stays in the table until
 * it fits the client's queue; another answer that does not fit is held, and the client's next
 * request is read after it has gone.
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
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

/* What the kernel had no memory for is tried again after this long. */
#define RETRY_MS 20

struct client {
    int fd; /* -1: free */
    bool want_out;
    bool broken; /* dropped at the end of the round: others may be in the middle of its execs */
    bool holds;
    struct msg held;
    struct failure held_payload;
};

static struct client clients[CLIENTS_MAX];
static struct record *records;
static int epoll_fd, signal_fd, root_fd = -1;
static struct kernel_mounts mounts;
static struct host_mounts host_mounts;
static bool is_set_up, has_root, retry, more_to_reap;
static uint8_t *own_filter; /* of the commands of this sandbox alone, not of PID 1 */
static uint32_t own_filter_len;

int loop_watch(int fd, enum source source, uint32_t index, uint32_t events, int op) {
    struct epoll_event event = {.events = events, .data.u64 = (uint64_t)source << 32 | index};
    return epoll_ctl(epoll_fd, op, fd, &event);
}

void loop_retry(void) {
    retry = true;
}

/* --- clients --------------------------------------------------------------------------------- */

static void watch_client(uint32_t index) {
    uint32_t events = (clients[index].holds ? 0u : (uint32_t)EPOLLIN) |
                      (clients[index].want_out ? (uint32_t)EPOLLOUT : 0u);
    loop_watch(clients[index].fd, FROM_CLIENT, index, events, EPOLL_CTL_MOD);
}

bool client_send(uint32_t index, uint32_t type, uint32_t id, const void *payload, uint32_t len) {
    struct client *client = &clients[index];
    if (client->fd < 0 || client->broken ||
        !wire_send(client->fd, type, id, payload, len, NULL, 0, MSG_DONTWAIT))
        return true;
    if (errno == ENOMEM || errno == ENOBUFS) {
        retry = true;
        return false;
    }
    if (errno != EAGAIN) {
        client->broken = true;
        return true;
    }
    if (!client->want_out) {
        client->want_out = true;
        watch_client(index);
    }
    return false;
}

/* At most one answer a request, so that one place to hold it is enough. */
static void answer(uint32_t index, uint32_t type, uint32_t id, const struct failure *fail) {
    struct client *client = &clients[index];
    uint32_t len = fail ? sizeof *fail : 0;
    if (client_send(index, type, id, fail, len))
        return;
    client->holds = true;
    client->held = (struct msg){type, id, len, 0};
    if (fail)
        client->held_payload = *fail;
    watch_client(index);
}

static void answer_failure(uint32_t index, uint32_t id, uint32_t which, int err) {
    struct failure fail = {STEP_MESSAGE, which, err, 0};
    answer(index, R_FAILED, id, &fail);
}

static void flush(uint32_t index) {
    struct client *client = &clients[index];
    client->want_out = false;
    if (client->holds)
        client->holds = !client_send(index, client->held.type, client->held.id,
                                     &client->held_payload, client->held.len);
    if (!client->want_out)
        table_flush(index);
    watch_client(index);
}

static void drop_client(uint32_t index) {
    if (index == 0)
        _exit(0); /* the launcher: without it nobody owns this sandbox */
    /* Children have copies of the fd, so closing it does not end the watch. */
    loop_watch(clients[index].fd, FROM_CLIENT, index, 0, EPOLL_CTL_DEL);
    close(clients[index].fd);
    clients[index] = (struct client){.fd = -1};
    table_drop_client(index);
}

/* --- requests -------------------------------------------------------------------------------- */

static void start(uint32_t client, struct inbox *in) {
    struct failure fail = {STEP_MESSAGE, 0, EBADMSG, 0};
    struct child child = {.client_fd = clients[client].fd,
                          .root_fd = root_fd,
                          .proc_fd = mounts.fd[0],
                          .dev_fd = mounts.fd[2],
                          .filter = own_filter,
                          .filter_len = own_filter_len};
    if (!has_root || table_start(client, in, &child, &fail))
        answer(client, R_FAILED, in->head.id, &fail);
}

static void kill_exec(uint32_t client, const struct inbox *in) {
    struct kill_req req;
    if (in->head.len != sizeof req) {
        answer_failure(client, in->head.id, 6, EBADMSG);
        return;
    }
    memcpy(&req, in->payload, sizeof req);
    bool wants_gone = req.scope == KILL_TREE && req.signal == SIGKILL;
    if (!table_kill(client, in->head.id, &req) && wants_gone)
        answer(client, R_GONE, in->head.id, NULL);
}

static void attach(uint32_t client, struct inbox *in) {
    uint32_t i = 1;
    while (i < CLIENTS_MAX && clients[i].fd >= 0)
        i++;
    if (i == CLIENTS_MAX || in->fd_count != 1) {
        answer_failure(client, in->head.id, 0, i == CLIENTS_MAX ? EMFILE : EBADMSG);
        return;
    }
    if (loop_watch(in->fds[0], FROM_CLIENT, i, EPOLLIN, EPOLL_CTL_ADD)) {
        answer_failure(client, in->head.id, 7, errno);
        return;
    }
    clients[i] = (struct client){.fd = in->fds[0]};
    in->fd_count = 0;
    answer(client, R_DONE, in->head.id, NULL);
}

/* The asker connects it. Not held where its queue is full: an asker that takes no answers needs no
 * socket. */
static void make_socket(uint32_t client, const struct inbox *in) {
    struct failure fail = {STEP_SOCKET, 0, EBADMSG, 0};
    struct socket_req req;
    if (in->head.len != sizeof req) {
        answer(client, R_FAILED, in->head.id, &fail);
        return;
    }
    memcpy(&req, in->payload, sizeof req);
    int fd = -1;
    errno = EAFNOSUPPORT;
    if (req.family == AF_INET || req.family == AF_INET6)
        fd = socket((int)req.family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    bool sent = fd >= 0 &&
                !wire_send(clients[client].fd, R_DONE, in->head.id, NULL, 0, &fd, 1, MSG_DONTWAIT);
    if (!sent) {
        fail_at(&fail, STEP_SOCKET, 1);
        answer(client, R_FAILED, in->head.id, &fail);
    }
    if (fd >= 0)
        close(fd);
}

static int join_cgroups(struct inbox *in, struct failure *fail) {
    struct setup setup;
    errno = EBADMSG;
    if (in->head.len < sizeof setup)
        return fail_at(fail, STEP_MESSAGE, 0);
    memcpy(&setup, in->payload, sizeof setup);
    if (setup.cgroup_v1_count > CGROUP_V1_MAX ||
        in->fd_count != (node.no_cgroups ? 0 : 1 + (int)setup.cgroup_v1_count))
        return fail_at(fail, STEP_MESSAGE, 1);
    for (uint32_t i = 0; !node.no_cgroups && i < setup.cgroup_v1_count; i++)
        if (write(in->fds[1 + i], "0", 1) != 1)
            return fail_at(fail, STEP_CGROUP, i);
    if (!node.no_cgroups) {
        table_set_cgroup(in->fds[0]);
        in->fds[0] = -1;
    }
    /* After the placement, or /proc/self/cgroup would show a path with "/../" in it. */
    if (unshare(CLONE_NEWCGROUP))
        return fail_at(fail, STEP_CGROUP_NS, 0);
    return 0;
}

static int set_up(struct inbox *in, struct failure *fail) {
    errno = EBADMSG;
    if (is_set_up)
        return fail_at(fail, STEP_MESSAGE, 2);
    if (join_cgroups(in, fail) || setup_user_limits(in, fail))
        return -1;
    struct failure *shared = &records[0].failure;
    pid_t pid = fork();
    if (pid == 0)
        _exit(setup_stage(in, shared) ? 1 : 0);
    int status;
    if (pid < 0 || waitpid(pid, &status, 0) != pid)
        return fail_at(fail, STEP_STAGE, 9);
    if (status) {
        errno =
            EINTR; /* killed, if it left no word: the memory limit is lower than what this takes */
        if (shared->step == STEP_NONE)
            return fail_at(fail, STEP_STAGE, 10);
        *fail = *shared;
        return -1;
    }
    if (setup_open_mounts(&mounts, fail) || setup_lock(fail))
        return -1;
    if (node.no_cgroups)
        table_use_marks(mounts.fd[0]);
    is_set_up = true;
    return 0;
}

static int take_root(struct inbox *in, struct failure *fail) {
    errno = EBADMSG;
    const uint8_t *cursor = in->payload;
    const char *hostname = in->head.len ? wire_string(&cursor, cursor + in->head.len) : "";
    if (!is_set_up || in->fd_count < 1 || !hostname)
        return fail_at(fail, STEP_MESSAGE, 3);
    if (in->fd_count > 1 && setup_keep_mounts(in, cursor, &host_mounts, fail))
        return -1;
    /* All of this pid namespace but PID 1; a fork that is under way fails or is killed too. */
    if (in->head.flags & ROOT_KILL)
        kill(-1, SIGKILL);
    if (in->head.flags & (ROOT_KILL | ROOT_IDLE) && !table_idle(in->head.flags & ROOT_KILL)) {
        errno = EBUSY;
        return fail_at(fail, STEP_ROOT_BUSY, 0);
    }
    if (*hostname && sys_sethostname(hostname))
        return fail_at(fail, STEP_HOSTNAME, 1);
    if (setup_swap_root(in->fds[0], &mounts, &host_mounts, fail))
        return -1;
    if (root_fd >= 0)
        close(root_fd);
    root_fd = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    has_root = root_fd >= 0;
    return has_root ? 0 : fail_at(fail, STEP_ROOT_PIVOT, 1);
}

static int take_filter(const struct inbox *in, struct failure *fail) {
    errno = EBADMSG;
    if (own_filter || !in->head.len || in->head.len % 8 || in->head.len > sizeof node.filter)
        return fail_at(fail, STEP_MESSAGE, 8);
    void *pages =
        mmap(NULL, in->head.len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED)
        return fail_at(fail, STEP_SECCOMP, 3);
    memcpy(pages, in->payload, in->head.len);
    own_filter = pages;
    own_filter_len = in->head.len;
    return 0;
}

static int take_views(struct inbox *in, struct failure *fail) {
    errno = EBADMSG;
    if (!is_set_up)
        return fail_at(fail, STEP_MESSAGE, 8);
    return setup_views(in, &mounts, fail);
}

/* Whoever holds the mount namespace beside PID 1 takes it down; else PID 1's death waits for that. */
static void answer_set_up(uint32_t index, uint32_t id) {
    int namespace_fd = open("/stage/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC);
    if (namespace_fd < 0 || wire_send(clients[index].fd, R_DONE, id, NULL, 0, &namespace_fd, 1, 0))
        answer_failure(index, id, 11, errno);
    if (namespace_fd >= 0)
        close(namespace_fd);
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
    } else if (in->head.type == M_SOCKET) {
        make_socket(client, in);
    } else if (in->head.type == M_PING) {
        answer(client, R_DONE, in->head.id, NULL);
    } else if (in->head.type == M_SETUP && launcher) {
        if (set_up(in, &fail))
            answer(client, R_FAILED, in->head.id, &fail);
        else
            answer_set_up(client, in->head.id);
    } else if ((in->head.type == M_ROOT || in->head.type == M_FILTER || in->head.type == M_VIEWS) &&
               launcher) {
        int r = in->head.type == M_ROOT     ? take_root(in, &fail)
                : in->head.type == M_FILTER ? take_filter(in, &fail)
                                            : take_views(in, &fail);
        answer(client, r ? R_FAILED : R_DONE, in->head.id, r ? &fail : NULL);
    } else {
        answer_failure(client, in->head.id, 4, EBADMSG);
    }
}

/* --- the loop -------------------------------------------------------------------------------- */

static void from_client(uint32_t index, uint32_t events, struct inbox *in) {
    struct client *client = &clients[index];
    if (client->fd < 0 || client->broken)
        return;
    if (events & EPOLLOUT)
        flush(index);
    if (client->broken || !(events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
        return;
    if (client->holds) {
        /* Hung up without taking its answer: what it may have asked since has no taker either. */
        client->broken = (events & (EPOLLHUP | EPOLLERR)) != 0;
        return;
    }
    int got = wire_receive(client->fd, in, MSG_DONTWAIT);
    if (got == 1) {
        handle(index, in);
        wire_close_fds(in);
    } else if (got < 0 && errno == EBADMSG) {
        answer_failure(index, in->head.id, 5, EBADMSG);
    } else if (got == 0 || errno != EAGAIN) {
        client->broken = true;
    }
}

static void from_signals(void) {
    struct signalfd_siginfo info[8];
    while (read(signal_fd, info, sizeof info) > 0)
        ;
    more_to_reap = true;
}

static void dispatch(const struct epoll_event *event, struct inbox *in) {
    uint32_t index = (uint32_t)event->data.u64;
    switch ((enum source)(event->data.u64 >> 32)) {
    case FROM_CLIENT:
        from_client(index, event->events, in);
        break;
    case FROM_SIGNALS:
        from_signals();
        break;
    case FROM_CGROUP:
        table_note_event(index);
        break;
    }
}

static void try_again(void) {
    retry = false;
    for (uint32_t i = 0; i < CLIENTS_MAX; i++)
        if (clients[i].fd >= 0)
            flush(i);
    table_settle_due(true);
}

static _Noreturn void serve(struct inbox *in) {
    for (uint32_t round = 0;; round++) {
        struct epoll_event events[32];
        int timeout = more_to_reap ? 0 : retry ? RETRY_MS : -1;
        int count = epoll_wait(epoll_fd, events, 32, timeout);
        for (int i = 0; i < count; i++)
            dispatch(&events[i], in);
        if (more_to_reap)
            more_to_reap = table_reap();
        /* Not before: after R_GONE no zombie is to take the place of a process. */
        if (!more_to_reap)
            table_settle_due(false);
        if (retry && (count == 0 || round % 64 == 0))
            try_again();
        for (uint32_t i = 0; i < CLIENTS_MAX; i++)
            if (clients[i].broken)
                drop_client(i);
    }
}

/* Close all that came with the clone but `control_fd`, which moves to 3; 0-2 are /dev/null. */
static int own_fds(int control_fd) {
    /* Out of the way first: it may be one of 0-2. */
    int control = fcntl(control_fd, F_DUPFD, 4), null = open("/dev/null", O_RDWR);
    if (control < 0 || null < 0)
        return -1;
    for (int fd = 0; fd < 3; fd++)
        if (dup2(null, fd) < 0)
            return -1;
    if (dup3(control, 3, O_CLOEXEC) < 0)
        return -1;
    return sys_close_from(4);
}

static int start_loop(void) {
    sigset_t child;
    signal(SIGCHLD, SIG_DFL);
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_SETMASK, &child, NULL);
    records = table_init();
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    signal_fd = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
    if (!records || epoll_fd < 0 || signal_fd < 0)
        return -1;
    for (uint32_t i = 0; i < CLIENTS_MAX; i++)
        clients[i].fd = -1;
    clients[0].fd = 3;
    return loop_watch(3, FROM_CLIENT, 0, EPOLLIN, EPOLL_CTL_ADD) ||
           loop_watch(signal_fd, FROM_SIGNALS, 0, EPOLLIN, EPOLL_CTL_ADD);
}

_Noreturn void pid1_main(int control_fd) {
    static struct inbox in;
    prctl(PR_SET_PDEATHSIG, (unsigned long)SIGKILL, 0UL, 0UL, 0UL);
    if (own_fds(control_fd) || start_loop())
        _exit(1);
    /* The first message comes after the id maps are written, and only until then must /proc/PID
     * belong to the zygote. */
    if (wire_receive(3, &in, 0) != 1)
        _exit(0);
    prctl(PR_SET_DUMPABLE, 0UL, 0UL, 0UL, 0UL);
    handle(0, &in);
    wire_close_fds(&in);
    serve(&in);
}
