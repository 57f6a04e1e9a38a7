/*
 * table.c - the execs of a sandbox, from their clone to the removal of their cgroup.
 *
 *   FREE --table_start()--> RUNNING --table_reap()--> LINGERING --settle()--> FREE
 *
 * LINGERING: the main process is reaped, but R_EXIT is not sent yet, or processes that it left behind
 * are still in its cgroup, or R_GONE is not sent yet. settle() takes an entry as far as it goes now,
 * and may be called at any time; whatever it waits for leads to another call: room in the client's
 * queue, an event of the cgroup, or, where neither could be arranged, the loop's retry.
 *
 * Where the launcher has no cgroups, an exec is a mark instead of one (mark.c): "its cgroup" below is
 * then its marked processes, and the event is the reaping of an orphan. The last of an exec's processes
 * to end is always PID 1's to reap: its parent was one of them.
 *
 * A sandbox that has used up its memory makes any allocation of PID 1 fail. So nothing here may
 * depend on one call succeeding: neither the kill, nor the watch for its end.
 */
#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* Reaped in one go: a storm of orphans must not keep requests waiting. */
#define REAP_BATCH 256

enum exec_state { FREE, RUNNING, LINGERING };

struct exec {
    enum exec_state state;
    int client; /* -1 once nobody waits for an answer */
    uint32_t id;
    uint32_t serial; /* names the cgroup, "e<serial>"; 0 once it is removed */
    pid_t pid;
    int events_fd; /* cgroup.events, -1 until somebody waits for the cgroup to empty */
    bool detached;
    bool exit_unsent;
    bool want_kill;
    bool want_gone;
    bool due;       /* its cgroup has changed */
    uint32_t looks; /* for marked processes to kill */
    struct exited exit;
};

static struct exec execs[EXECS_MAX];
static uint32_t execs_end;     /* one past the last that was ever used */
static struct record *records; /* EXECS_MAX, shared with children */
static uint32_t next_serial;
static int cgroup_fd = -1, proc_fd = -1; /* one of them */

/* Looks after which all of the sandbox is stopped for the next: whoever is left forks fast. */
#define LOOKS_MAX 8

struct record *table_init(void) {
    void *shared = mmap(NULL, EXECS_MAX * sizeof *records, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    records = shared == MAP_FAILED ? NULL : shared;
    return records;
}

void table_set_cgroup(int fd) {
    cgroup_fd = fd;
}

void table_use_marks(int fd) {
    proc_fd = fd;
}

/* --- cgroups --------------------------------------------------------------------------------- */

static void cgroup_path(char *out, const struct exec *exec, const char *file) {
    out[0] = 'e';
    char *at = text_number(out + 1, exec->serial);
    if (file)
        strcpy(stpcpy(at, "/"), file);
}

static bool cgroup_kill(struct exec *exec) {
    char path[64];
    if (cgroup_fd < 0)
        return mark_kill(proc_fd, exec->serial, ++exec->looks > LOOKS_MAX) == 0;
    cgroup_path(path, exec, "cgroup.kill");
    return !sys_write_file(cgroup_fd, path, "1") || errno == ENOENT || errno == ENODEV;
}

/* A signal other than SIGKILL to all: those that are forked meanwhile may be missed; the SIGKILL that
 * follows it misses none. */
static void cgroup_signal(const struct exec *exec, int signal_number, pid_t spared) {
    char path[64], text[4096];
    if (cgroup_fd < 0) {
        mark_signal(proc_fd, exec->serial, signal_number, spared);
        return;
    }
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
                if (pid > 1 && pid != spared)
                    kill(pid, signal_number);
                pid = 0;
            }
        }
    close(fd);
}

/* The read also arms the next event: without it epoll would report this one for ever. */
static bool still_populated(int events_fd) {
    char text[128];
    ssize_t got = pread(events_fd, text, sizeof text - 1, 0);
    text[got > 0 ? got : 0] = 0;
    return strstr(text, "populated 1") != NULL;
}

static bool watch_cgroup(struct exec *exec, uint32_t index) {
    char path[64];
    cgroup_path(path, exec, "cgroup.events");
    exec->events_fd = openat(cgroup_fd, path, O_RDONLY | O_CLOEXEC);
    if (exec->events_fd < 0)
        return false;
    if (!loop_watch(exec->events_fd, FROM_CGROUP, index, EPOLLPRI, EPOLL_CTL_ADD))
        return true;
    close(exec->events_fd);
    exec->events_fd = -1;
    return false;
}

static bool cgroup_removed(struct exec *exec, uint32_t index) {
    char path[64];
    if (!exec->serial)
        return true;
    if (cgroup_fd < 0) {
        int left = mark_signal(proc_fd, exec->serial, 0, 0);
        if (left < 0)
            loop_retry();
        if (left == 0)
            exec->serial = 0;
        if (left > 0 && exec->want_gone && !exec->want_kill) {
            /* The looks that killed have missed one: numbers of processes begin anew. */
            exec->want_kill = true;
            loop_retry();
        }
        return left == 0;
    }
    cgroup_path(path, exec, NULL);
    for (int tries = 0; unlinkat(cgroup_fd, path, AT_REMOVEDIR) && errno != ENOENT; tries++) {
        if (tries == 2 || (exec->events_fd < 0 && !watch_cgroup(exec, index))) {
            loop_retry();
            return false;
        }
        if (still_populated(exec->events_fd))
            return false;
    }
    if (exec->events_fd >= 0) {
        /* Children have copies of the fd, so closing it does not end the watch. */
        loop_watch(exec->events_fd, FROM_CGROUP, index, 0, EPOLL_CTL_DEL);
        close(exec->events_fd);
        exec->events_fd = -1;
    }
    exec->serial = 0;
    return true;
}

/* --- an exec's way to its end ---------------------------------------------------------------- */

static void settle(uint32_t index) {
    struct exec *exec = &execs[index];
    if (exec->state != FREE && exec->want_kill && exec->serial) {
        exec->want_kill = !cgroup_kill(exec);
        if (exec->want_kill)
            loop_retry();
    }
    if (exec->state != LINGERING)
        return;
    if (exec->exit_unsent && exec->client >= 0 &&
        !client_send((uint32_t)exec->client, R_EXIT, exec->id, &exec->exit, sizeof exec->exit))
        return;
    exec->exit_unsent = false;
    if (!cgroup_removed(exec, index))
        return;
    if (exec->want_gone && exec->client >= 0 &&
        !client_send((uint32_t)exec->client, R_GONE, exec->id, NULL, 0))
        return;
    exec->state = FREE;
}

void table_note_event(uint32_t index) {
    execs[index].due = true;
}

void table_settle_due(bool all) {
    for (uint32_t i = 0; i < execs_end; i++)
        if (all || execs[i].due) {
            execs[i].due = false;
            settle(i);
        }
}

void table_flush(uint32_t client) {
    for (uint32_t i = 0; i < execs_end; i++)
        if (execs[i].client == (int)client)
            settle(i);
}

void table_drop_client(uint32_t client) {
    for (uint32_t i = 0; i < execs_end; i++) {
        struct exec *exec = &execs[i];
        if (exec->state == FREE || exec->client != (int)client)
            continue;
        exec->client = -1;
        /* One that was answered has left behind what it meant to: a server, say, lives on. */
        exec->want_kill |= !exec->detached && (exec->state == RUNNING || exec->exit_unsent);
        settle(i);
    }
}

static void ended(uint32_t index, int status, const struct rusage *usage) {
    struct exec *exec = &execs[index];
    const struct record *record = &records[index];
    exec->exit = (struct exited){
        .failure = record->failure,
        .status = status,
        .mode = record->mode,
        .uid = record->uid,
        .gid = record->gid,
        .size = record->size,
        .mtime_ns = record->mtime_ns,
        .user_us = (uint64_t)usage->ru_utime.tv_sec * 1000000u + (uint64_t)usage->ru_utime.tv_usec,
        .system_us =
            (uint64_t)usage->ru_stime.tv_sec * 1000000u + (uint64_t)usage->ru_stime.tv_usec,
        .maxrss_kb = (uint64_t)usage->ru_maxrss,
    };
    exec->state = LINGERING;
    exec->exit_unsent = true;
    settle(index);
}

/* Reap one process, an exec's or an orphan; as wait4(2). */
static pid_t reap_one(int options) {
    struct rusage usage;
    int status;
    pid_t pid = wait4(-1, &status, options, &usage);
    for (uint32_t index = 0; pid > 0 && index < execs_end; index++)
        if (execs[index].state == RUNNING && execs[index].pid == pid) {
            ended(index, status, &usage);
            return pid;
        }
    for (uint32_t index = 0; pid > 0 && cgroup_fd < 0 && index < execs_end; index++)
        if (execs[index].state == LINGERING || execs[index].want_kill)
            execs[index].due = true;
    return pid;
}

bool table_reap(void) {
    for (int i = 0; i < REAP_BATCH; i++)
        if (reap_one(WNOHANG) <= 0)
            return false;
    return true;
}

bool table_idle(bool wait) {
    pid_t pid;
    while ((pid = reap_one(wait ? 0 : WNOHANG)) > 0)
        ;
    return pid < 0 && errno == ECHILD;
}

/* --- requests -------------------------------------------------------------------------------- */

int table_start(uint32_t client, struct inbox *in, struct child *child, struct failure *fail) {
    uint32_t index = 0;
    char path[64];
    while (index < EXECS_MAX && execs[index].state != FREE)
        index++;
    errno = EAGAIN;
    if (index == EXECS_MAX)
        return fail_at(fail, STEP_TABLE_FULL, 0);
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
    bool marked = cgroup_fd < 0;
    if (marked ? mark_next(exec->serial) : mkdirat(cgroup_fd, path, 0755))
        return fail_at(fail, STEP_EXEC_CGROUP, 0);
    int dir = marked ? -1 : openat(cgroup_fd, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    exec->pid = dir < 0 && !marked ? -1 : sys_clone3_child(0, dir, NULL);
    if (exec->pid == 0) {
        child->record = &records[index];
        child->cgroup = exec->serial;
        if (in->head.type == M_EXEC)
            exec_child(child, in);
        file_child(child, in);
    }
    if (exec->pid < 0)
        fail_at(fail, dir < 0 && !marked ? STEP_EXEC_CGROUP : STEP_CLONE, 1);
    if (dir >= 0)
        close(dir);
    if (exec->pid < 0) {
        if (!marked)
            unlinkat(cgroup_fd, path, AT_REMOVEDIR);
        return -1;
    }
    exec->state = RUNNING;
    return 0;
}

bool table_kill(uint32_t client, uint32_t id, const struct kill_req *req) {
    for (uint32_t i = 0; i < execs_end; i++) {
        struct exec *exec = &execs[i];
        if (exec->state == FREE || exec->id != id || exec->client != (int)client)
            continue;
        if (req->scope == KILL_MAIN) {
            if (exec->state == RUNNING)
                kill(exec->pid, (int)req->signal);
        } else if (req->scope == KILL_CHILDREN) {
            if (exec->serial)
                cgroup_signal(exec, (int)req->signal, exec->pid);
        } else if (req->signal == SIGKILL) {
            exec->want_gone = exec->want_kill = true;
            settle(i);
        } else if (exec->serial) {
            cgroup_signal(exec, (int)req->signal, 0);
        }
        return true;
    }
    return false;
}
