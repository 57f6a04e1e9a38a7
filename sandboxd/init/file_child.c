/*
 * file_child.c - the child of PID 1 that does one file operation, as the asked user.
 *
 * What comes over the data pipe (archives above all) may be the work of another sandbox. So before
 * this process becomes the user and looks at any of it, it closes all of PID 1's fds but the root,
 * /proc and the pipes: whoever took it over would be where every program of that user is.
 */
#include "files.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

static int parse(const struct inbox *in, const char **who) {
    const uint8_t *cursor = in->payload + sizeof job.req, *end = in->payload + in->head.len;
    errno = EBADMSG;
    if (in->head.len < sizeof job.req)
        return -1;
    memcpy(&job.req, in->payload, sizeof job.req);
    *who = wire_string(&cursor, end);
    job.path = wire_string(&cursor, end);
    job.other = wire_string(&cursor, end);
    if (!job.other || job.req.include_count > PATTERNS_MAX ||
        job.req.exclude_count > PATTERNS_MAX - job.req.include_count)
        return -1;
    for (uint32_t i = 0; i < job.req.include_count + job.req.exclude_count; i++)
        if (!(job.patterns[i] = wire_string(&cursor, end)))
            return -1;
    bool archive = job.req.op == FILE_PACK || job.req.op == FILE_UNPACK;
    if (cursor != end || in->fd_count != (archive ? 2 : 1))
        return -1;
    job.data_fd = in->fds[0];
    job.report_fd = archive                                               ? in->fds[1]
                    : job.req.op == FILE_READ || job.req.op == FILE_WRITE ? -1
                                                                          : in->fds[0];
    return 0;
}

static int find_owner(void) {
    static struct user owner;
    job.owner = (uid_t)-1;
    job.group = (gid_t)-1;
    if (!*job.other || job.req.op == FILE_MOVE)
        return 0;
    if (user_find(job.child->root_fd, job.other, &owner, job.fail)) {
        job.fail->index = 1;
        return -1;
    }
    job.owner = owner.uid;
    if (job.req.op != FILE_CHOWN || strchr(job.other, ':'))
        job.group = owner.gid;
    return 0;
}

static int close_others(void) {
    const int keep[] = {job.child->root_fd, job.child->proc_fd, job.data_fd, job.report_fd};
    for (int first = 3;;) {
        int next = INT_MAX;
        for (size_t i = 0; i < sizeof keep / sizeof *keep; i++)
            if (keep[i] >= first && keep[i] < next)
                next = keep[i];
        if (next > first && syscall(SYS_close_range, (unsigned)first,
                                    next == INT_MAX ? ~0U : (unsigned)next - 1, 0U))
            return job_fail(STEP_PIPES, 2);
        if (next == INT_MAX)
            return 0;
        first = next + 1;
    }
}

static int run(void) {
    switch ((enum file_op)job.req.op) {
    case FILE_READ:
        return file_read();
    case FILE_WRITE:
        return file_write();
    case FILE_STAT:
        return file_stat();
    case FILE_LIST:
        return tree_list();
    case FILE_MKDIR:
        return tree_make();
    case FILE_REMOVE:
        return tree_remove();
    case FILE_MOVE:
        return tree_move();
    case FILE_CHMOD:
    case FILE_CHOWN:
        return tree_change();
    case FILE_PACK:
        return tar_pack();
    case FILE_UNPACK:
        return tar_unpack();
    }
    errno = EBADMSG;
    return job_fail(STEP_MESSAGE, 1);
}

_Noreturn void file_child(struct child *self, struct inbox *in) {
    static struct user user;
    struct rlimit nofile;
    const char *who;
    setsid();
    signal(SIGPIPE, SIG_IGN);
    umask(022);
    job = (struct job){.child = self, .fail = &self->record->failure, .record = self->record};
    if (parse(in, &who)) {
        job_fail(STEP_MESSAGE, 0);
        _exit(1);
    }
    /* One fd a level of a tree. */
    if (!getrlimit(RLIMIT_NOFILE, &nofile)) {
        nofile.rlim_cur = nofile.rlim_max;
        setrlimit(RLIMIT_NOFILE, &nofile);
    }
    if (user_find(self->root_fd, who, &user, job.fail) || find_owner() || close_others() ||
        user_become(&user, job.fail))
        _exit(1);
    _exit(run() ? 1 : 0);
}
